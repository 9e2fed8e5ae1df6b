# `make copies` takes this from 04_fsdp/train.py, by section "Copy" of its README.
from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup, Work

from common.collectives import (
    all_gather_single,
    all_reduce,
    all_reduce_control,
    broadcast,
    global_norm,
    reduce_scatter_single,
)
from common.unit_parameters import (
    Place,
    cast_inputs,
    check_options,
    is_in_backward,
    is_in_checkpoint,
    is_lookup,
    lend_parameters,
    owned_by,
    place_in,
    take_parameters,
    units_with_values,
)

# ------------------------------------------------------------------------------------------------
# The technique: flat buffers, of which each rank owns a shard
# ------------------------------------------------------------------------------------------------


class FullyShardedDataParallel(nn.Module):
    """Shard a module's parameters, gradients and optimizer state; unshard them unit by unit.

    The contract. Each parameter is in exactly one unit, trains, has the common dtype, and is used
    in every forward of its unit and nowhere else. All ranks run the same units in the same order.
    units: the modules that are gathered one by one, in the order in which to prefetch them.
    After the last backward of a step come `finish_gradient_synchronization()`, `clip_grad_norm_()`,
    the optimizer's `step()` and `zero_grad()`. The optimizer updates `parameters()`, the shards.

    All ranks start with the values of the first one. Or the module is on the meta device, so that
    no rank ever holds the full model. Then `read_shard(name, shapes, owned)` returns a unit's
    values: the slice `owned` of its parameters, laid side by side (it may reach beyond them).

    The time line of a micro-batch of an embedding E, layers 0 and 1 and an output O. An arrow
    begins at the call that starts a collective, and ends at the call that waits for it:

    forward         enter(E)    enter(0)    enter(1)    enter(O)
    computes        E           0           1           O
    all-gather      0 --------> 1 --------> O -------->
    unsharded       E 0         0 1         0 1 O       1 O         layer 1 stays

    backward                    enter(1)    enter(0)
    computes        O           1           0           E
    all-gather                  0 -------->
    unsharded       1           1 0         0
    reduce-scatter              O --------> 1 --------> 0 --------> E --------> finish_gradient_
                                leave(O)    leave(1)    leave(0)    leave(E)    synchronization()
    full gradients  O           O 1         1 0         0 E         E

    This relies on two facts. On a GPU, `wait()` blocks the current stream and not the host, which
    enqueues the next kernels meanwhile (with Gloo it blocks the host). And of all nodes that are
    ready, autograd runs the one that was created last, so `Gather.backward` of a unit runs before
    any node of an earlier unit.
    """

    def __init__(
        self,
        module: nn.Module,
        units: list[nn.Module],
        shard_group: ProcessGroup | None = None,  # the N ranks that shard each unit; default: all
        replicate_group: ProcessGroup | None = None,  # ranks with the same shard; default: none
        param_dtype: torch.dtype | None = None,  # of gathered units and their inputs
        reduce_dtype: torch.dtype | None = None,  # of gradients in the reduce-scatter
        reshard_after_forward: bool = True,  # False: each unit stays until its backward
        read_shard: Callable[[str, dict[str, torch.Size], slice], Tensor] | None = None,
        device: torch.device | None = None,  # of the unsharded parameters; default: the module's
        cpu_offload: bool = False,  # keep the shards on the CPU; groups then need a CPU backend
    ):
        super().__init__()
        self.module, self.read_shard = module, read_shard
        self.group, self.replicate_group = shard_group, replicate_group
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        self.reshard_after_forward = reshard_after_forward
        self.device = device or next(module.parameters()).device
        self.shard_device = torch.device("cpu") if cpu_offload else self.device
        self.kept: Unit | None = None  # the unit that stays gathered for backward
        self.in_flight: Unit | None = None  # the unit whose reduction was started last
        options = [param_dtype, reduce_dtype, reshard_after_forward, cpu_offload]
        check_options(module, self.device, options, shard_group, replicate_group)
        self.make_units(units_with_values(module, units, may_be_meta=read_shard is not None))

    def make_units(self, named_units: list[tuple[str, nn.Module]]) -> None:
        self.units = [Unit(*named_unit, self) for named_unit in named_units]
        self.shards = nn.ParameterList(unit.shard for unit in self.units)

    def forward(self, *args, **kwargs):
        for unit in self.units:
            unit.reshard()  # what was gathered earlier may be stale
        self.kept = None
        return self.module(*args, **kwargs)

    def enter(self, unit: Unit) -> None:
        """Gather the unit's parameters, and prefetch those of the next unit that will be used.

        Called by `Gather.forward`, and in backward by `unpack` for each parameter that is read: the
        first call gathers the unit, and the others find it gathered.
        """
        unit.unshard()
        later = self.following(unit)
        if later:
            # NCCL's stream waits for the kernels that were enqueued earlier: if they were this
            # unit's own, the all-gather would not overlap with them
            later[0].unshard()
        unit.wait()

    def following(self, unit: Unit) -> list[Unit]:
        """The units that will be used after this one, in an order that is the same on all ranks."""
        in_backward = is_in_backward()
        order = self.units[::-1] if in_backward else self.units
        later = order[order.index(unit) + 1 :]
        return [each for each in later if each.used_in_backward or not in_backward]

    def after_forward(self, unit: Unit) -> None:
        """Free the unit or, if backward needs it, the one kept before. So the last such unit stays
        until backward, because nothing would hide its second all-gather."""
        unit.used_in_backward |= is_in_checkpoint()  # backward runs its forward again
        keeps_all = not self.reshard_after_forward and torch.is_grad_enabled()
        if is_in_backward() or keeps_all:  # its own backward follows, which frees it
            return
        to_free = unit
        if torch.is_grad_enabled() and unit.used_in_backward:
            to_free, self.kept = self.kept, unit  # so this unit is freed one forward later
        if to_free is not None:
            to_free.reshard()

    def leave(self, unit: Unit, grads: tuple[Tensor, ...]) -> None:
        """Free the unit, and start to reduce `grads`, which backward has just completed."""
        unit.reshard()
        unit.finish_reduction()  # in flight if this unit was also the last to be reduced
        unit.start_reduction(grads)
        previous, self.in_flight = self.in_flight, unit
        if previous not in (None, unit):  # so at most two units have full gradients
            previous.finish_reduction()  # after the launch, so that the network stays busy

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """After a step's last backward: give each shard its average gradient."""
        for unit in self.units:
            unit.reshard()  # if it was prefetched, and backward did not reach it
            unit.finish_reduction()
            if unit.average is None:  # no backward has reached it
                continue
            if self.replicate_group is not None:  # hybrid sharding: average over the replicas
                all_reduce(unit.average, group=self.replicate_group)
                unit.average /= dist.get_world_size(self.replicate_group)
            unit.shard.grad, unit.average = unit.average, None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients to at most this global norm; returns the norm before clipping."""
        grads = [shard.grad for shard in self.shards if shard.grad is not None]
        # each rank has the squares of its own shards only
        norm = all_reduce_control(global_norm(grads).square(), group=self.group).sqrt()
        for grad in grads:
            grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm


class Unit:
    """One unit's parameters side by side in a flat buffer, of which this rank keeps its shard.

    shard: [length], a parameter, in the module's dtype, which this rank's optimizer updates.
    full: the gathered parameters, [N * length], padded, in `dtype`; exists only while unsharded.
    average: [length], the average gradient over the ranks, summed over this step's micro-batches.
    """

    def __init__(self, name: str, module: nn.Module, fsdp: FullyShardedDataParallel):
        self.fsdp, group = fsdp, fsdp.group
        self.name, self.group, self.n_ranks = name, group, dist.get_world_size(group)
        self.shapes = {full_name: p.shape for full_name, p in module.named_parameters(name)}
        # a row of an embedding's gradient sums many tokens: bfloat16 is too imprecise
        param_dtype = None if is_lookup(module) else fsdp.param_dtype
        self.owners, flat = take_parameters(module)  # leaves the module without parameters
        self.owned, padding = owned_by(len(flat), group)
        self.sizes = [*(shape.numel() for shape in self.shapes.values()), padding]
        self.shard = nn.Parameter(self.shard_of(flat))
        self.full: Tensor | None = None
        self.module_forward, module.forward = module.forward, self.run
        self.dtype = param_dtype or flat.dtype
        self.gathering: tuple[Work, Tensor] | None = None  # the all-gather in flight, its input
        self.used_in_backward = False  # set by the first forward
        self.reduction: tuple[Work, Tensor] | None = None  # reduce-scatter in flight, buffer
        self.average: Tensor | None = None

    def shard_of(self, flat: Tensor) -> Tensor:
        """This rank's part of the first rank's `flat`, or of the values that `read_shard` has."""
        fsdp, length = self.fsdp, len(flat[self.owned])  # the padding is not in `flat`
        if fsdp.read_shard is None:
            flat = flat.to(fsdp.device)
            broadcast(flat, group=self.group, group_src=0)
            shard = flat[self.owned]
        else:  # `flat` is on the meta device: it has a length, but no values
            shard = fsdp.read_shard(self.name, self.shapes, self.owned).view(length)
        padding = self.owned.stop - self.owned.start - length  # on the last ranks
        shard = F.pad(shard.to(fsdp.shard_device, flat.dtype), (0, padding))  # a copy: frees `flat`
        if fsdp.replicate_group is not None:
            broadcast(shard, group=fsdp.replicate_group, group_src=0)
        return shard

    def run(self, *args, **kwargs):
        """Called as the module's `forward`. Only in here does the module have parameters."""
        params = Gather.apply(self.shard, self)
        args, kwargs = cast_inputs(args, kwargs, self.fsdp.param_dtype)
        # a checkpoint() around the unit saves only its inputs, and calls `run` again in backward
        hooks = nullcontext() if is_in_checkpoint() else saved_tensors_hooks(self.pack, self.unpack)
        with lend_parameters(self.owners, params), hooks:
            output = self.module_forward(*args, **kwargs)
        self.fsdp.after_forward(self)
        return output

    def pack(self, tensor: Tensor) -> Tensor | Place:
        """Called when forward saves a tensor for backward. Of a parameter, keep only the place."""
        place = place_in(self.full, tensor)
        self.used_in_backward |= place is not None
        # detached: a node that saved its own output would form a reference cycle
        return tensor.detach() if place is None else place

    def unpack(self, saved: Tensor | Place) -> Tensor:
        """Called when backward needs a saved tensor. For a parameter, gather the unit again."""
        if not isinstance(saved, Place):
            return saved
        self.fsdp.enter(self)
        return self.full.as_strided(*saved)

    @torch.inference_mode(False)  # under it, `full` would have no version counter
    def unshard(self) -> None:
        """Start the all-gather that fills `full`, unless it is filled or in flight."""
        if self.full is None:
            sent = self.shard.detach().to(self.fsdp.device, self.dtype)  # cast before it is sent
            self.full = sent.new_empty(self.n_ranks * len(sent))
            work = all_gather_single(self.full, sent, self.group, async_op=True)
            self.gathering = work, sent

    def wait(self) -> None:
        if self.gathering is not None:
            self.gathering[0].wait()
            self.gathering = None

    def reshard(self) -> None:
        """Wait for an all-gather in flight, then drop `full`."""
        self.wait()
        self.full = None  # frees it: `pack` has kept no reference for backward

    def start_reduction(self, grads: tuple[Tensor, ...]) -> None:
        """Start the reduce-scatter: the sum is written into this rank's part of `flat`."""
        padding = grads[0].new_zeros(self.sizes[-1])
        flat = torch.cat([*(grad.flatten() for grad in grads), padding])
        flat = flat.to(self.fsdp.reduce_dtype or flat.dtype)
        work = reduce_scatter_single(flat[self.owned], flat, group=self.group, async_op=True)
        self.reduction = work, flat

    def finish_reduction(self) -> None:
        """If a reduction is in flight, add its average to the earlier ones and free its buffer."""
        if self.reduction is None:
            return
        work, flat = self.reduction
        work.wait()
        # cpu_offload: to the host; reduce_dtype: back to the shard's
        average = flat[self.owned].to(self.shard.device, self.shard.dtype) / self.n_ranks
        self.average = average if self.average is None else self.average.add_(average)
        self.reduction = None


class Gather(torch.autograd.Function):
    """A unit's parameters as a function of the ranks' shards; backward starts a reduce-scatter."""

    @staticmethod
    def forward(ctx, shard: Tensor, unit: Unit) -> tuple[Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)  # a missing gradient is None, and so an error
        unit.fsdp.enter(unit)  # the all-gather, unless it was prefetched
        *chunks, _ = unit.full.split(unit.sizes)
        return tuple(c.view(s) for c, s in zip(chunks, unit.shapes.values(), strict=True))

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[None, None]:
        """Autograd calls it when it has all gradients of the unit."""
        ctx.unit.fsdp.leave(ctx.unit, grads)  # starts the reduce-scatter
        return None, None  # the gradient comes later, from `finish_reduction`
