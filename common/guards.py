"""Guards of ZeRO and FSDP (stages 03 and 04) for arbitrary training loops.

This repository needs none of them: its training loop calls every method in turn. They are for loops
that skip steps, call `model.zero_grad()` or use a `GradScaler`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from common.collectives import all_reduce_control
from common.optimization import global_norm

# ---- a gradient, while it is reduced and after ----


class PendingGradient:
    """`shard.grad` while its reduction is in flight.

    In the first micro-batch of a step it is NaN until the average is there, which shows where a
    wait is missing. If `zero_grad` comes first, for a step that is skipped, the result is dropped.
    """

    def __init__(self, shard: nn.Parameter):
        self.shard, self.is_first = shard, shard.grad is None
        if self.is_first:  # for `zero_grad` to find
            shard.grad = torch.full_like(shard, torch.nan)
        self.grad, self.version = shard.grad, shard.grad._version

    def add(self, average: Tensor) -> None:
        if self.was_zeroed():
            return
        if self.is_first:
            self.grad.copy_(average)
        else:
            self.grad.add_(average)

    def zero_again(self) -> None:
        """After an all-reduce in place, which may have overwritten what `zero_grad` has zeroed."""
        if self.shard.grad is self.grad and self.grad._version != self.version:
            self.grad.zero_()

    def was_zeroed(self) -> bool:
        if self.shard.grad is not self.grad:
            return True
        if self.grad._version == self.version:
            return False
        if self.grad.any():
            raise RuntimeError("gradients changed before finish_gradient_synchronization()")
        return True


class ShardedGradient(Tensor):
    """A placeholder for a gradient that is in the shards: without memory, it can only be zeroed."""

    @staticmethod
    def __new__(cls, param: nn.Parameter):
        like = {"dtype": param.dtype, "device": param.device, "storage_size": 0}
        return Tensor._make_wrapper_subclass(cls, param.shape, **like)

    def __init__(self, param: nn.Parameter):
        self.is_zeroed = False

    def __repr__(self) -> str:
        return f"ShardedGradient(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten.zero_.default:
            raise RuntimeError(
                "param.grad: this gradient is sharded across the ranks, use clip_grad_norm_ and "
                f"zero_grad of ZeroRedundancyOptimizer ({function} on {args[0]})"
            )
        args[0].is_zeroed = True
        return args[0]


class GuardedBucket:
    """A bucket of ZeRO that notices what an arbitrary training loop may do to it.

    After the reduction the gradients are in the shard, and `param.grad` is None, so that nothing
    reads or scales what the reduction has left of it. Only the first parameter has a placeholder,
    which `model.zero_grad()` clears like all other gradients.
    """

    params: list[nn.Parameter]
    shard: nn.Parameter
    accumulates_after_reduction = False

    def guard(self) -> None:
        self.placeholder: ShardedGradient | None = None
        self.hides_gradients = False
        self.addresses = [p.data_ptr() for p in self.params]  # other ones after `model.to()`
        # the placeholder must go before autograd adds to it
        self.params[0].register_hook(self.before_accumulation)

    def hide_gradients(self) -> None:
        for param in self.params:
            param.grad = None
        if self.placeholder is None:
            self.placeholder = ShardedGradient(self.params[0])
        self.placeholder.is_zeroed, self.hides_gradients = False, True
        self.params[0].grad = self.placeholder

    def drop_placeholder(self) -> None:
        if self.hides_gradients and self.params[0].grad is self.placeholder:
            self.params[0].grad = None
        self.hides_gradients = False

    def drop_gradients(self, set_to_none: bool) -> None:
        self.finish_reduction()  # of a step that is skipped
        self.drop_placeholder()
        for param in self.params:
            param.grad = None
        if self.accumulates_after_reduction:
            self.grads = self.grad_views = None  # of a backward that failed
        if set_to_none:
            self.shard.grad = None
        elif self.shard.grad is not None:
            self.shard.grad.zero_()

    def drop_zeroed_gradients(self) -> None:
        """If `model.zero_grad()` was called since the reduction, clear the shard's gradient too."""
        is_there = self.params[0].grad is self.placeholder
        if self.hides_gradients and (self.placeholder.is_zeroed or not is_there):
            self.finish_reduction()
            self.shard.grad = None
            self.drop_placeholder()

    def before_accumulation(self, _: Tensor | None = None) -> None:
        """Before autograd adds to `param.grad`: check that it may, and remove the placeholder."""
        self.check_parameters()
        self.drop_zeroed_gradients()
        if self.hides_gradients and not self.accumulates_after_reduction:
            raise RuntimeError(
                "all micro-batches but the last of a step belong in no_sync(); zero_grad() ends a "
                "step"
            )
        self.drop_placeholder()

    def check_parameters(self) -> None:
        if self.addresses != [p.data_ptr() for p in self.params]:
            raise RuntimeError("move or cast the model before making its ZeroRedundancyOptimizer")


# ---- an optimizer and a module whose parameters are shards ----


class SharesOverflow:
    """For ZeRO's optimizer and FSDP's module: both have `buckets`, each with a `shard`."""

    @torch.no_grad()
    def share_overflow(self) -> None:
        """For `torch.amp.GradScaler`: call this on every rank before its `unscale_` or `step`.

        It makes an infinity or NaN in the gradients of one rank a NaN on every rank. The scaler
        looks at this rank's shards only, and ranks that skip different steps drift apart.
        """
        self.finish_gradient_synchronization()
        grads = [bucket.shard.grad for bucket in self.buckets if bucket.shard.grad is not None]
        norm = all_reduce_control(global_norm(grads), group=self.group)
        for grad in grads[:1]:
            grad[:1] += 0 * norm  # NaN if the norm is infinite or NaN


class OptimizerOfShards(SharesOverflow, torch.optim.Optimizer):
    """Takes a model's parameters, and steps on this rank's shards of them by another optimizer."""

    inner: torch.optim.Optimizer | None = None

    def __init__(self, params: Iterable, defaults: dict):
        super().__init__(params, defaults)
        self.at_start = [(p, p.requires_grad) for g in self.param_groups for p in g["params"]]

    def set_inner(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state

    def add_param_group(self, param_group: dict) -> None:
        if self.inner is not None:
            raise RuntimeError("give all parameter groups to the constructor: buckets are fixed")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict) -> None:
        """Load what `state_dict()` returned on this rank: the state of its shards."""
        self.inner.load_state_dict(state_dict)
        self.set_inner(self.inner)

    def check_parameters(self) -> None:
        if any(p.requires_grad != before for p, before in self.at_start):
            raise RuntimeError("freeze parameters before making their ZeroRedundancyOptimizer")
        for bucket in self.buckets:
            bucket.check_parameters()


class ModuleOfShards(SharesOverflow, nn.Module):
    """Wraps a module so that `parameters()` are this rank's shards of its parameters.

    What cannot work on shards raises an error.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        object.__setattr__(self, "module", module)  # unregistered: its parameters are not ours

    def shards(self) -> list[nn.Parameter]:
        """This rank's shards of the parameters that train; `parameters()` has frozen ones too."""
        return [bucket.shard for bucket in self.buckets[::-1]]

    def check_requires_grad(self) -> None:
        for flat in self.flats:
            if any(p.requires_grad != flat.shard.requires_grad for p in flat.params):
                raise RuntimeError("freeze or unfreeze parameters before wrapping the module")

    def drop_failed_backward(self) -> None:
        """If a backward ended in an exception, forget the gradients that it has not yet reduced."""
        # activation checkpointing may run forward in backward; nothing public tells
        if self.in_backward and torch._C._current_graph_task_id() == -1:
            self.launched, self.in_backward, self.has_new_gradients = 0, False, False
            self.finished.clear()
            for bucket in self.buckets:
                bucket.finish_reduction()
                bucket.grads = bucket.grad_views = None
                bucket.waiting_for = set(bucket.params)
                for param in bucket.params:
                    param.grad = None

    def train(self, mode: bool = True) -> ModuleOfShards:
        self.module.train(mode)
        return super().train(mode)

    def state_dict(self, *args, **kwargs):
        raise RuntimeError("this rank has shards only: full_state_dict() gathers the parameters")

    def _load_from_state_dict(self, *args, **kwargs):
        raise RuntimeError("load the module before wrapping it; full_state_dict() is what to save")

    def __deepcopy__(self, memo):
        raise RuntimeError("copy the module before wrapping it, or load full_state_dict() into one")

    def _apply(self, fn, recurse: bool = True):
        for shard in self.parameters():
            before, after = shard.detach()[:0], fn(shard.detach()[:0])
            if (before.dtype, before.device) != (after.dtype, after.device):
                raise RuntimeError("cast or move the module before wrapping it")
        return super()._apply(fn, recurse)


def no_state_dict(*_) -> None:
    """A hook for modules whose parameters ZeRO stage 3 has sharded."""
    raise RuntimeError("this rank has shards only: save them by training_state(), load them before")
