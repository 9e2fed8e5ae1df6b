"""Stage 04: fully sharded data parallelism (FSDP): ZeRO-3 that overlaps with computation.

Every rank owns a shard of the parameters, gradients and optimizer state of each unit: embedding,
layer or output. A unit's parameters are all-gathered while the previous unit computes (prefetch),
and freed after use, those of a layer in forward one layer later. In backward they are gathered
again, and the reduce-scatter of a unit's gradients overlaps with the computation of the preceding
unit. The autograd function `Gather` connects the two: its forward returns the parameters, its
backward starts the reduce-scatter.

New since stage 03: the wrapper is a module beside a plain optimizer; prefetching; reductions in
flight; the last layer stays gathered until backward; the model is built on the meta device, unit
by unit; bfloat16 by --param-dtype and --reduce-dtype in place of autocast; groups of ranks that
shard the model and are replicas of each other (--shard-degree, hybrid sharding); shards on the CPU.

    P parameters: E of the embedding, L of a layer, O of the output; N ranks that shard, m
    micro-batches per step; float32

    units      memory per rank, bytes  communication per step, elements
    resharded  16 P / N + four units   reduce-scatter m P + all-gather m (2 P - E - L - O)
    kept       16 P / N + all units    reduce-scatter m P + all-gather m P

    Four units: in backward, parameters of the unit that computes and of the next one; gradients of
    the unit that computes and of the one in the reduce-scatter. In forward, parameters of three, or
    of two and the head's gradient. Backward gathers neither the embedding nor the output (whose
    loss computes the head's gradient in forward), nor the last layer. --no-reshard-after-forward
    keeps all units until backward. Hybrid sharding adds an all-reduce of P / N elements.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.

Run it:

    torchrun --nproc-per-node 2 04_fsdp/train.py --data sample --steps 100
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

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

# isort: split
from common.batches import eval_batches, train_batches
from common.distributed import World, group_along
from common.guards import guard
from common.loss import IGNORED
from common.model import Transformer, initial_shard
from common.optimization import adamw_settings, learning_rate, set_learning_rate
from common.shards import State, state_of_flat_tensors, tensors_of

from common.job.arguments import base_parser, check_arguments, model_config, positive_int
from common.job.corpus import load_corpus
from common.job.launch import cleanup, fail, setup, world_size
from common.job.run import Run

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


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def sharded_from_meta(model: Transformer, args, world: World) -> FullyShardedDataParallel:
    """Shard a model that is on the meta device; its units get their initial values one by one."""
    mesh = (world.size // args.shard_degree, args.shard_degree)
    return FullyShardedDataParallel(
        model,
        model.units(),
        shard_group=group_along(mesh, 1, "shard", args.timeout),
        replicate_group=group_along(mesh, 0, "replicate", args.timeout) if mesh[0] > 1 else None,
        param_dtype=getattr(torch, args.param_dtype),
        reduce_dtype=getattr(torch, args.reduce_dtype),
        reshard_after_forward=not args.no_reshard_after_forward,
        read_shard=partial(initial_shard, args.seed),
        device=world.device,
        cpu_offload=args.cpu_offload,
    )


def training_state(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> State:
    """The tensors of a checkpoint, by the plain model's names; sharded ones as `Shard`s."""
    state: State = {}
    for unit in model.units:
        tensors = tensors_of(optimizer, unit.shard)
        state |= state_of_flat_tensors(tensors, unit.shapes, unit.owned.start)
    return state


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument(
        "--shard-degree", type=positive_int, help="ranks that shard a unit (default: all)"
    )
    parser.add_argument("--param-dtype", choices=("float32", "bfloat16"), help="default: --dtype")
    parser.add_argument("--reduce-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--no-reshard-after-forward", action="store_true", help="until backward")
    parser.add_argument("--cpu-offload", action="store_true", help="shards and AdamW on the CPU")
    args = check_arguments(parser.parse_args(argv), data_parallel_size=world_size())
    args.shard_degree = args.shard_degree or args.dp
    if args.dp % args.shard_degree:
        ranks = f"{args.dp} data-parallel ranks"
        fail(f"--shard-degree {args.shard_degree} does not divide the {ranks}")
    args.param_dtype = args.param_dtype or args.dtype
    args.state_on = "host" if args.cpu_offload else "device"
    args.autocast = False  # units are unsharded in --param-dtype, and their inputs cast to it
    return args


@torch.no_grad()
def evaluate(model, tokens, args, device, world: World) -> float:
    """Mean loss in nats over every token of a split but the first, each predicted once."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, tokens
    for inputs, targets in eval_batches(tokens, args.batching, device, world.rank, world.size):
        loss = model(inputs, targets)
        count = (targets != IGNORED).sum()
        total += torch.stack([loss * count, count])
    all_reduce_control(total)
    model.train()
    return (total[0] / total[1]).item()


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the flags say; returns the lines of metrics.jsonl."""
    args = parse_args(argv)
    world = setup(args.timeout)
    device = world.device
    corpus = load_corpus(args.data)

    config = model_config(args, corpus)
    with torch.device("meta"):
        model = Transformer(config)
    model = sharded_from_meta(model, args, world)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_settings(args.lr, args.weight_decay))
    guard(model, optimizer)

    run = Run(args, __file__, config, device, corpus)
    state = training_state(model, optimizer)
    first_step = run.checkpoints.load(args.resume, state, optimizer)
    batches = train_batches(corpus.train, args.batching, device, first_step, world.rank, world.size)

    for step in run.steps(first_step):
        lr = learning_rate(step, args.steps, args.lr, args.warmup_steps, args.min_lr_ratio)
        set_learning_rate(optimizer, lr)
        micro_batches = next(batches)
        loss = torch.zeros((), device=device)
        for inputs, targets, keys in micro_batches:
            micro_loss = model(inputs, targets, keys) / len(micro_batches)
            micro_loss.backward()
            loss += micro_loss.detach()
        model.finish_gradient_synchronization()
        loss = all_reduce_control(loss) / world.size
        grad_norm = model.clip_grad_norm_(args.max_norm)
        optimizer.step()
        run.log(step, loss, grad_norm, lr)
        optimizer.zero_grad(set_to_none=True)

        if run.evaluates(step):
            run.log_evaluation("val", evaluate(model, corpus.valid, args, device, world))
        if run.is_last(step):
            run.log_evaluation("test", evaluate(model, corpus.test, args, device, world))
        run.write()
        if run.agree_to_save_or_stop(step):
            run.checkpoints.save(step + 1, state, args.keep_checkpoints)
    return run.finish(state)


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
