"""Guards of ZeRO and FSDP (stages 03 and 04) for arbitrary modules and training loops.

This repository needs none of them: its units take and return tensors, and its training loop calls
every method in turn. They are for models that return dataclasses or fill lists, and for loops that
skip steps, call `model.zero_grad()` or use a `GradScaler`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves, tree_map_only

from common.collectives import all_reduce_control
from common.model import RMSNorm
from common.optimization import global_norm

# ---- a unit's inputs and outputs ----


def tensors_in(value) -> tuple[list[Tensor], bool]:
    """The tensors in nested containers and dataclasses, and whether other objects are there too.

    Containers are those that `torch.utils._pytree` knows. Another object may hide tensors.
    """
    if isinstance(value, Tensor):
        return [value], False
    tensors, some_are_hidden = [], False
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            inner, hidden = tensors_in([getattr(leaf, f.name, None) for f in fields(leaf)])
            tensors, some_are_hidden = tensors + inner, some_are_hidden or hidden
        elif not isinstance(leaf, (int, float, complex, str, bytes, type(None))):
            some_are_hidden = True
    return tensors, some_are_hidden


def tensors_in_containers(args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors in those arguments that a module can put further tensors into."""
    values = [*args, *kwargs.values()]
    containers = [x for x in values if isinstance(x, (list, tuple, dict)) or is_dataclass(x)]
    return tensors_in(containers)[0]


def outputs_of(
    unit: nn.Module, args: tuple, kwargs: dict, output, before: list[Tensor]
) -> tuple[list[Tensor], bool]:
    """The outputs that require a gradient, and whether the unit may have others, hidden ones.

    Backward can enter a unit by a hidden output without calling a hook that unshards it. So the
    unit has to stay unsharded if it returns an object that is no container, or nothing that
    requires a gradient. Tensors that it has put into a list, a dict or a dataclass count as
    outputs: those that were not there `before` its forward (`tensors_in_containers`).
    """
    if not torch.is_grad_enabled():
        return [], False
    tensors, some_are_hidden = tensors_in(output)
    known = {id(tensor) for tensor in before}
    tensors += [t for t in tensors_in_containers(args, kwargs) if id(t) not in known]
    outputs = [tensor for tensor in tensors if tensor.requires_grad]
    if not outputs:
        used = [*unit.parameters(), *tensors_in((args, kwargs))[0]]
        some_are_hidden = any(tensor.requires_grad for tensor in used)
    return outputs, some_are_hidden


def cast_inputs(args: tuple, kwargs: dict, dtype: torch.dtype | None) -> tuple[tuple, dict]:
    """The arguments with all floating-point tensors in `dtype`, as autocast would cast them.

    A list or dict without such tensors stays the same object, because the unit may fill it.
    """
    if dtype is None:
        return args, kwargs

    def needs_cast(x: Tensor) -> bool:
        return x.is_floating_point() and x.dtype != dtype

    def stays(x) -> bool:
        return isinstance(x, (list, dict)) and not any(map(needs_cast, tensors_in(x)[0]))

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if needs_cast(x) else x

    return tree_map_only(Tensor, cast, (args, kwargs), is_leaf=stays)


# ---- a parameter's dtype, and its values while it is freed ----


def norm_weights(module: nn.Module, dtype: torch.dtype | None) -> set[nn.Parameter]:
    """The weights of norms that are not cast to `dtype`, because these norms cast their input.

    In bfloat16, which has no number between 1 and 1.0078, most of their updates would be lost.
    """
    weights = {m.weight for m in module.modules() if type(m) is RMSNorm}
    return {weight for weight in weights if dtype not in (None, weight.dtype)}


def not_a_number(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A scalar that makes everything computed from it NaN; for integers the largest value."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full((), torch.nan, dtype=dtype, device=device)
    largest = True if dtype is torch.bool else torch.iinfo(dtype).max
    return torch.full((), largest, dtype=dtype, device=device)


# ---- a gradient, while it is reduced and after ----


class PendingGradient:
    """`shard.grad` while its reduction is in flight. If `zero_grad` comes first, for a step that
    is skipped, the result is dropped."""

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
    """A placeholder, without memory, for a gradient that is in the shards: it can be zeroed and
    nothing else."""

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


class HiddenGradients:
    """What `param.grad` is when the gradients of `params` are in a shard: None, so that nothing
    reads or scales what the reduction has left of them.

    Only the first parameter has a placeholder, which `model.zero_grad()` clears like all others.
    """

    def __init__(self, params: list[nn.Parameter]):
        self.params, self.placeholder, self.is_active = params, None, False

    def start(self) -> None:
        for param in self.params:
            param.grad = None
        if self.placeholder is None:
            self.placeholder = ShardedGradient(self.params[0])
        self.placeholder.is_zeroed, self.is_active = False, True
        self.params[0].grad = self.placeholder

    def were_zeroed(self) -> bool:
        is_there = self.params[0].grad is self.placeholder
        return self.is_active and (self.placeholder.is_zeroed or not is_there)

    def end(self) -> None:
        if self.is_active and self.params[0].grad is self.placeholder:
            self.params[0].grad = None
        self.is_active = False


@torch.no_grad()
def share_overflow(shards: Iterable[Tensor], group: ProcessGroup | None) -> None:
    """Make an infinity or NaN in the gradients of one rank a NaN on every rank."""
    grads = [shard.grad for shard in shards if shard.grad is not None]
    norm = all_reduce_control(global_norm(grads), group=group)
    for grad in grads[:1]:
        grad[:1] += 0 * norm  # NaN if the norm is infinite or NaN


# ---- an optimizer and a module whose parameters are shards ----


class OptimizerOfShards(torch.optim.Optimizer):
    """Takes a model's parameters, and steps on this rank's shards of them by another optimizer."""

    inner: torch.optim.Optimizer | None = None

    def __init__(self, params: Iterable, defaults: dict):
        super().__init__(params, defaults)
        self.at_start = [(p, p.requires_grad) for g in self.param_groups for p in g["params"]]

    def step_on_shards_by(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state

    def add_param_group(self, param_group: dict) -> None:
        if self.inner is not None:
            raise RuntimeError("give all parameter groups to the constructor: buckets are fixed")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict) -> None:
        """Load what `state_dict()` returned on this rank: the state of its shards."""
        self.inner.load_state_dict(state_dict)
        self.step_on_shards_by(self.inner)

    def share_overflow(self) -> None:
        """For `torch.amp.GradScaler`: call this on every rank before its `unscale_` or `step`.

        The scaler looks for infinities in this rank's shards only, and ranks that skip different
        steps drift apart.
        """
        self.finish_gradient_synchronization()
        share_overflow((p for g in self.param_groups for p in g["params"]), self.group)

    def check_requires_grad(self) -> None:
        if any(p.requires_grad != before for p, before in self.at_start):
            raise RuntimeError("freeze parameters before making their ZeroRedundancyOptimizer")


class ModuleOfShards(nn.Module):
    """Wraps a module so that `parameters()` are this rank's shards of its parameters.

    What cannot work on shards raises an error.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        object.__setattr__(self, "module", module)  # unregistered: its parameters are not ours

    def share_overflow(self) -> None:
        """For `torch.amp.GradScaler`: call this on every rank before its `unscale_` or `step`.

        The scaler looks for infinities in this rank's shards only, and ranks that skip different
        steps drift apart.
        """
        self.finish_gradient_synchronization()
        share_overflow(self.parameters(), self.group)

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
