"""Stage 04: fully sharded data parallelism (FSDP): ZeRO-3 that overlaps with computation.

Every rank owns a shard of each unit's parameters, gradients and optimizer state. The parameters of
a unit (here a layer) are all-gathered while the previous unit computes (prefetch), and freed right
after use. In backward, the reduce-scatter of one unit's gradients overlaps with the computation of
the next unit's. The autograd function `Gather` stands between both collectives: when its forward
runs, the all-gather has ended, and its backward starts the reduce-scatter.

New since stage 03: prefetching; reductions in flight; the model is built on the meta device, unit
by unit; bfloat16; groups of ranks that shard the model and are replicas of each other
(--shard-degree, hybrid sharding); shards on the CPU.

    P parameters, N ranks that shard, m micro-batches per step; E of the embedding, O of the output;
    float32

    memory per rank   16 P / N bytes + two unsharded units + in backward two units' full gradients
    communication     reduce-scatter m P + all-gather m (2 P - E - O) elements per step; without
                      resharding all-gather m P; hybrid sharding adds an all-reduce of P / N

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.

Run it:

    torchrun --nproc-per-node 2 04_fsdp/train.py --data sample --steps 100
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from common.collectives import (
    agree_on_overflow,
    all_gather_single,
    all_reduce,
    all_reduce_control,
    check_same,
    global_norm,
    reduce_scatter_single,
)
from common.units import (
    cast_inputs,
    is_lookup,
    lend_parameters,
    take_parameters,
    units_with_values,
)

# isort: split
from common.arguments import base_parser, check_arguments, model_config, positive_int
from common.checkpoint import State, state_of_flat_shard
from common.data import eval_batches, load_corpus, train_batches
from common.distributed import World, cleanup, fail, group_along, setup, world_size
from common.guards import guard
from common.loss import IGNORED
from common.model import Transformer, init_weights
from common.optimization import adamw_settings, learning_rate, set_learning_rate
from common.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: flat buffers, of which each rank owns a shard
# ------------------------------------------------------------------------------------------------


class FullyShardedDataParallel(nn.Module):
    """Shard a module's parameters, gradients and optimizer state; unshard them unit by unit.

    The contract. Each parameter is in exactly one unit, trains, has the common dtype, and is used
    in every forward of its unit and nowhere else. All ranks run the same units in the same order.
    A step is `finish_gradient_synchronization()`, `clip_grad_norm_()`, `optimizer.step()` and
    `zero_grad()`. `parameters()` are this rank's shards: clip by this class, not by PyTorch's.

    module: equal on all ranks, or on the meta device with a `materialize(unit, name)` that gives
    one unit's parameters memory and values. units: in the order to prefetch in. shard_group: the N
    ranks that shard each unit (default: all). replicate_group: the ranks that hold the same shard
    (default: no others). param_dtype: units are gathered in it, and their arguments cast to it, but
    not outputs and buffers, nor units of `nn.Embedding`s alone (default: the module's).
    reduce_dtype: of the gradients that are reduced (default: the unsharded parameters').
    reshard_after_forward: False keeps a unit unsharded until its backward. device: of the unsharded
    parameters (default: the module's). cpu_offload: keep the shards on the CPU; groups then need a
    CPU backend, too.
    """

    def __init__(
        self,
        module: nn.Module,
        units: list[nn.Module],
        shard_group: ProcessGroup | None = None,
        replicate_group: ProcessGroup | None = None,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        materialize: Callable[[nn.Module, str], None] | None = None,
        device: torch.device | None = None,
        cpu_offload: bool = False,
    ):
        if replicate_group is not None and shard_group is None:
            raise ValueError("replicate_group needs a shard_group: by default all ranks shard")
        if materialize is not None and device is None:
            raise ValueError("materialize needs a device: a module on the meta device has none")
        super().__init__()
        self.module = module
        self.group, self.replicate_group = shard_group, replicate_group
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        self.reshard_after_forward = reshard_after_forward
        self.device = device or next(module.parameters()).device
        self.shard_device = torch.device("cpu") if cpu_offload else self.device
        self.in_flight: FlatParameter | None = None  # whose reduction was started last
        self.synchronizes = True
        self.buckets: list[FlatParameter] = []  # one per unit
        # each unit gets its values and is sharded before the next one: no rank holds the full model
        for name, unit in units_with_values(module, units, materialize):
            bucket = FlatParameter(name, unit, self)
            self.register_parameter(f"shard_{len(self.buckets)}", bucket.shard)
            unit.forward = partial(self.run, bucket, unit.forward)
            self.buckets.append(bucket)
        self.next_in_forward = {a: b for a, b in pairwise(self.buckets)}
        self.next_in_backward = {b: a for a, b in pairwise(self.buckets)}

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Start no all-reduce over replicas. Each micro-batch is reduce-scattered."""
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def run(self, bucket: FlatParameter, forward: Callable, *args, **kwargs):
        """In place of a unit's `forward`: the unit has parameters in here and nowhere else."""
        # private, as nothing public tells it: whether this is activation checkpointing in backward
        recomputes = torch._C._current_graph_task_id() != -1
        self.enter(bucket, in_backward=recomputes)
        args, kwargs = cast_inputs(args, kwargs, self.param_dtype)
        params = Gather.apply(bucket.shard, bucket)
        with lend_parameters(bucket.shard, bucket.owners, params, bucket.pack, bucket.unpack):
            output = forward(*args, **kwargs)
        if not recomputes and (self.reshard_after_forward or not torch.is_grad_enabled()):
            bucket.reshard()
        return output

    def enter(self, bucket: FlatParameter, in_backward: bool) -> None:
        """Gather the unit's parameters, and prefetch those of the next unit."""
        bucket.unshard()
        bucket.used_in_backward |= in_backward
        self.prefetch(bucket, in_backward)  # before the unit's own kernels, with which it overlaps
        bucket.wait()

    def prefetch(self, bucket: FlatParameter, in_backward: bool) -> None:
        """Start the all-gather of the unit that comes after this one, if it will be used."""
        neighbour = (self.next_in_backward if in_backward else self.next_in_forward).get(bucket)
        if neighbour is not None and (neighbour.used_in_backward or not in_backward):
            neighbour.unshard()

    def leave(self, bucket: FlatParameter, grads: tuple[Tensor, ...]) -> None:
        """Free the unit, and start to reduce `grads`, which backward has just completed."""
        bucket.reshard()
        bucket.finish_reduction()  # of the previous micro-batch, if no other unit has been left
        self.prefetch(bucket, in_backward=True)  # first: NCCL keeps the order of the calls
        bucket.start_reduction(grads, self.synchronizes)
        previous, self.in_flight = self.in_flight, bucket
        if previous not in (None, bucket):  # so at most two units have full gradients
            previous.finish_reduction()  # after the launch: the network is busy meanwhile

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """After a step's last backward: give each shard its average gradient, unless it has it."""
        for bucket in self.buckets:
            bucket.reshard()  # if it was prefetched and not used
            bucket.finish_reduction()
            bucket.start_all_reduce()  # if every backward was under no_sync()
        averaged = [bucket for bucket in self.buckets if bucket.finish_step()]
        if averaged:  # else it was called before
            agree_on_overflow((bucket.shard.grad for bucket in averaged), self.group)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients to at most this global norm; returns the norm before clipping."""
        self.finish_gradient_synchronization()
        grads = [bucket.shard.grad for bucket in self.buckets if bucket.shard.grad is not None]
        # each rank has the squares of its own shards only
        norm = all_reduce_control(global_norm(grads).square(), group=self.group).sqrt()
        for grad in grads:
            grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm


class FlatParameter:
    """A unit's parameters side by side in one flat buffer, of which each rank owns an equal shard.

    shard: [length], a parameter, in the module's dtype, which this rank's optimizer updates.
    full: the gathered parameters, [N * length], padded, in `dtype`; exists only while unsharded.
    average: [length], the average gradient over the ranks, summed over this step's micro-batches.
    """

    def __init__(self, name: str, unit: nn.Module, fsdp: FullyShardedDataParallel):
        self.fsdp, group, replicas = fsdp, fsdp.group, fsdp.replicate_group
        self.name, self.group = name, group
        self.n_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.n_replicas = dist.get_world_size(replicas) if replicas else 1
        self.shapes = {full_name: p.shape for full_name, p in unit.named_parameters(name)}
        # its gradients have the same dtype, and the embedding's are sums over many tokens
        param_dtype = None if is_lookup(unit) else fsdp.param_dtype
        self.owners, flat = take_parameters(unit)  # the unit has no parameters any more
        self.dtype = param_dtype or flat.dtype
        length = -(-len(flat) // self.n_ranks)  # of a shard, rounded up
        self.owned = slice(rank * length, (rank + 1) * length)
        padding = self.n_ranks * length - len(flat)
        self.sizes = [*(shape.numel() for shape in self.shapes.values()), padding]
        flat = F.pad(flat, (0, padding))
        self.shard = nn.Parameter(flat[self.owned].to(fsdp.shard_device, copy=True))
        # integer sums of the bits do not depend on the order of adding
        sums = [t.sum() for t in (flat.view(torch.int16), *unit.buffers())]
        sums += [self.dtype, fsdp.reduce_dtype, fsdp.reshard_after_forward]
        for ranks in [group, replicas] if replicas else [group]:
            check_same(f"initial values or dtypes of {name}", sums, fsdp.device, ranks)
        self.full: Tensor | None = None
        self.version: int | None = None  # of the shard that `full` was gathered from
        self.gathering: tuple[Work, Tensor] | None = None  # the all-gather in flight, what it sends
        self.used_in_backward = False  # known from the first backward on
        # the reduce-scatter in flight, its buffer, whether it belongs to the last micro-batch
        self.reduction: tuple[Work, Tensor, bool] | None = None
        self.average: Tensor | None = None
        self.all_reduces: list[tuple[Work, Tensor]] = []  # those in flight over the replicas

    def pack(self, tensor: Tensor) -> tuple:
        """What autograd keeps for backward: (tensor,) or, of a view of `full`, its place: (None,
        shape, stride, offset)."""
        # sparse, complex and negated views are not given by a place alone
        other = tensor.layout != torch.strided or tensor.dtype != self.full.dtype or tensor.is_neg()
        if other or tensor.untyped_storage() is not self.full.untyped_storage():
            return (tensor.detach(),)  # an output itself would keep its graph
        return None, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, saved: tuple) -> Tensor:
        """What backward reads: the tensor that `pack` has saved, or the view, gathered again."""
        tensor, *place = saved
        if place:
            self.fsdp.enter(self, in_backward=True)
        return self.full.as_strided(*place) if place else tensor

    @torch.inference_mode(False)  # else `full` would not count its versions
    def unshard(self) -> None:
        """Start the all-gather that fills `full`, unless it is up to date or in flight."""
        if self.full is None or self.version != self.shard._version:
            self.reshard()  # of an earlier step
            self.version = self.shard._version
            sent = self.shard.detach().to(self.fsdp.device, self.dtype)  # cast before it is sent
            self.full = sent.new_empty(self.n_ranks * len(sent))
            self.gathering = all_gather_single(self.full, sent, self.group, async_op=True), sent

    def wait(self) -> None:
        if self.gathering is not None:
            self.gathering[0].wait()
            self.gathering = None

    def reshard(self) -> None:
        """Wait for an all-gather in flight, then drop `full`."""
        self.wait()
        self.full = None  # frees it: `pack` has kept no reference for backward

    def start_reduction(self, grads: tuple[Tensor, ...], is_last: bool) -> None:
        """Start the reduce-scatter of `grads`, joined in one buffer: the sum replaces this rank's
        part of it."""
        padding = grads[0].new_zeros(self.sizes[-1])
        flat = torch.cat([*(grad.flatten() for grad in grads), padding])
        flat = flat.to(self.fsdp.reduce_dtype or flat.dtype)
        work = reduce_scatter_single(flat[self.owned], flat, group=self.group, async_op=True)
        self.reduction = work, flat, is_last

    def finish_reduction(self) -> None:
        """If a reduction is in flight, add its average to the earlier ones and free its buffer."""
        if self.reduction is None:
            return
        work, flat, is_last = self.reduction
        work.wait()
        average = flat[self.owned].to(self.shard) / (self.n_ranks * self.n_replicas)
        self.average = average if self.average is None else self.average.add_(average)
        self.reduction = None
        if is_last:
            self.start_all_reduce()

    def start_all_reduce(self) -> None:
        """With replicas: start to all-reduce the average over them. Without no_sync() there is one
        per micro-batch, and `finish_step` adds them."""
        if self.n_replicas > 1 and self.average is not None:
            work = all_reduce(self.average, group=self.fsdp.replicate_group, async_op=True)
            self.all_reduces.append((work, self.average))
            self.average = None

    def finish_step(self) -> bool:
        """Give the optimizer the average; returns whether there is one."""
        for work, average in self.all_reduces:
            work.wait()
            self.average = average if self.average is None else self.average.add_(average)
        if self.average is None:
            return False
        self.shard.grad, self.average, self.all_reduces = self.average, None, []
        return True


class Gather(torch.autograd.Function):
    """A unit's parameters as a function of its shard, [length]. Its adjoint is a reduce-scatter."""

    @staticmethod
    def forward(ctx, shard: Tensor, bucket: FlatParameter) -> tuple[Tensor, ...]:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        *chunks, _ = bucket.full.split(bucket.sizes)  # the all-gather has ended
        return tuple(c.view(s) for c, s in zip(chunks, bucket.shapes.values(), strict=True))

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[None, None]:
        """Autograd calls it when it has all gradients of the unit."""
        bucket = ctx.bucket
        if any(grad is None for grad in grads):
            raise RuntimeError(f"unit {bucket.name} has not used all of its parameters")
        bucket.fsdp.leave(bucket, grads)
        return None, None  # the average follows when the reduction has finished


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
        replicate_group=group_along(mesh, 0, "replicate", args.timeout),
        param_dtype=getattr(torch, args.param_dtype),
        reduce_dtype=getattr(torch, args.reduce_dtype),
        reshard_after_forward=not args.no_reshard_after_forward,
        materialize=lambda unit, name: init_weights(unit.to_empty(device="cpu"), args.seed, name),
        device=world.device,
        cpu_offload=args.cpu_offload,
    )


def training_state(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> State:
    """The tensors of a checkpoint, by the plain model's names; sharded ones as `Shard`s."""
    state: State = {}
    for bucket in model.buckets:
        state |= state_of_flat_shard(optimizer, bucket.shard, bucket.shapes, bucket.owned.start)
    return state


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument(
        "--shard-degree", type=positive_int, default=world_size(), help="ranks that shard a unit"
    )
    parser.add_argument("--param-dtype", choices=("float32", "bfloat16"), help="default: --dtype")
    parser.add_argument("--reduce-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--no-reshard-after-forward", action="store_true", help="until backward")
    parser.add_argument("--cpu-offload", action="store_true", help="shards and AdamW on the CPU")
    args = check_arguments(parser.parse_args(argv), data_parallel_size=world_size())
    if world_size() % args.shard_degree:
        fail(f"--shard-degree {args.shard_degree} does not divide the {world_size()} ranks")
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
        with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
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
    first_step = run.checkpoints.load(run.resume, state, optimizer)
    batches = train_batches(corpus.train, args.batching, device, first_step, world.rank, world.size)

    for step in run.steps(first_step):
        lr = learning_rate(step, args.steps, args.lr, args.warmup_steps, args.min_lr_ratio)
        set_learning_rate(optimizer, lr)
        micro_batches = next(batches)
        loss = torch.zeros((), device=device)
        for i, (inputs, targets, keys) in enumerate(micro_batches):
            is_last = i == len(micro_batches) - 1
            with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
                micro_loss = model(inputs, targets, keys) / len(micro_batches)
            with nullcontext() if is_last else model.no_sync():
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
        if run.agree_to_save(step):
            run.checkpoints.save(step + 1, state, args.keep_checkpoints)
    return run.finish()


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
