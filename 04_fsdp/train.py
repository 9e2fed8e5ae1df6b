"""Stage 04: fully sharded data parallelism (FSDP): ZeRO stage 3 with prefetching.

Every rank owns a shard of each unit's parameters, gradients and optimizer state. The parameters of
a unit (here a layer) are all-gathered while the previous unit computes (prefetch), and freed right
after use. In backward, the reduce-scatter of one unit's gradients overlaps with the computation of
the next unit's. One autograd function does both: the adjoint of an all-gather is a reduce-scatter.

New since stage 03: prefetching; the model is built on the meta device and filled unit by unit, so
that no rank ever holds all of it; shards are float32, but unsharded parameters and gradients may be
bfloat16; with --shard-degree, groups of ranks shard the model and are replicas of each other
(hybrid sharding); shards may be kept on the CPU.

    P parameters, N ranks that shard, m micro-batches per step, E the embedding; float32

    memory per rank   16 P / N bytes + two unsharded units + in backward three units' full gradients
    communication     reduce-scatter m P + all-gather m (2 P - E) elements per step; without
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
    all_gather_single,
    all_reduce,
    all_reduce_control,
    global_norm,
    reduce_scatter_single,
)
from common.units import NoGradient, cast_inputs, forbid_parameters, is_lookup, units_with_values

# isort: split
from common.arguments import base_parser, check_arguments, model_config, positive_int, seconds
from common.checkpoint import State, state_of_flat_shard
from common.data import eval_batches, load_corpus, train_batches
from common.distributed import World, cleanup, fail, group_along, setup, world_size
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
    in its unit's forward only, which returns one tensor. All ranks run the same units in the same
    order. With replicas, all micro-batches but a step's last are under `no_sync()`. A step is
    `finish_gradient_synchronization()`, `clip_grad_norm_()`, `optimizer.step()`, `zero_grad()`.

    module: equal on all ranks, or on the meta device with a `materialize(unit, name)` that gives
    one unit's parameters memory and values. units: in the order to prefetch in. shard_group: the N
    ranks that shard each unit. replicate_group: the ranks that hold the same shard. param_dtype: of
    the unsharded parameters, None: their own. reduce_dtype: of the gradients that are reduced,
    None: `param_dtype`. cpu_offload: keep the shards on the CPU.
    `parameters()` are this rank's shards: PyTorch's `clip_grad_norm_` would take their norm alone.
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
        super().__init__()
        self.module = module  # its parameters become those of the units' flat buffers
        self.group, self.param_dtype = shard_group, param_dtype
        self.reshard_after_forward = reshard_after_forward
        device = device or next(module.parameters()).device
        shard_device = "cpu" if cpu_offload else device
        groups, dtypes = (shard_group, replicate_group), (param_dtype, reduce_dtype)
        self.buckets: list[FlatParameter] = []  # one per unit, the last layer first: as in backward
        # each unit gets its values and is sharded before the next one: no rank holds the full model
        for name, unit in units_with_values(module, units, materialize):
            bucket = FlatParameter(name, unit, groups, dtypes, device, shard_device)
            self.register_parameter(f"shard_{len(self.buckets)}", bucket.shard)
            unit.forward = partial(self.run, bucket, unit.forward)
            self.buckets.insert(0, bucket)
        self.next_in_forward = {b: a for a, b in pairwise(self.buckets)}
        self.next_in_backward = {a: b for a, b in pairwise(self.buckets) if b.unshards_in_backward}
        self.entered: FlatParameter | None = None  # whose unit backward is in
        self.in_flight: FlatParameter | None = None  # whose reduction was started last
        self.synchronizes = True
        forbid_parameters(self)

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

    def run(self, bucket: FlatParameter, forward: Callable, *args, **kwargs) -> Tensor:
        """In place of a unit's `forward`: the unit has parameters in here and nowhere else."""
        recomputes = bucket is self.entered  # activation checkpointing runs it again in backward
        if self.entered is not None and not recomputes:
            stuck = f"the last backward did not leave unit {self.entered.name}"
            raise RuntimeError(f"{stuck}: restart the run; or a checkpoint() contains two units")
        bucket.unshard()
        if not recomputes and bucket in self.next_in_forward:
            self.next_in_forward[bucket].unshard()  # prefetch: it overlaps with this unit
        bucket.wait()
        args, kwargs = cast_inputs(args, kwargs, self.param_dtype)
        with bucket.parameters(self.leave):
            output = forward(*args, **kwargs)
        own = bucket.full.untyped_storage()
        if not isinstance(output, Tensor) or output.untyped_storage() is own:
            raise TypeError(f"unit {bucket.name} returns {type(output)}, not one tensor of its own")
        if recomputes:
            return output  # unsharded, for the backward that follows
        if self.reshard_after_forward or not torch.is_grad_enabled():
            bucket.reshard()
        return bucket.await_backward(output, self.enter) if torch.is_grad_enabled() else output

    def enter(self, bucket: FlatParameter, version: int, grad: Tensor) -> None:
        """Prepare the unit's backward, which is next. Idempotent: the unit has several hooks."""
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True: the reduced gradients have no graph")
        if bucket.shard._version != version:
            raise RuntimeError("backward through a graph from before the optimizer's last step")
        self.entered = bucket
        if bucket.unshards_in_backward:
            bucket.unshard()
            if bucket in self.next_in_backward:
                self.next_in_backward[bucket].unshard()  # prefetch
            bucket.wait()

    def leave(self, bucket: FlatParameter, grads: Tensor) -> None:
        """Backward has computed `grads`, all of the unit's gradients: it is done with the unit."""
        self.entered = None
        bucket.reshard()
        bucket.collect(grads, self.synchronizes)
        bucket.start_reduction()
        previous, self.in_flight = self.in_flight, bucket
        if previous not in (None, bucket):  # at most two units have full gradients
            previous.finish_reduction()  # after the launch: the network is busy meanwhile

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """After a step's last backward: give each shard its average gradient, unless it has it."""
        fewest = min(bucket.awaited for bucket in self.buckets)  # above 0: a loss was discarded
        missing = [bucket.name for bucket in self.buckets if bucket.awaited > fewest]
        if missing:
            raise RuntimeError(f"backward has not reached every forward of unit {missing}")
        for bucket in self.buckets:
            bucket.finish_reduction()
            bucket.start_all_reduce()
        if any(bucket.average is not None for bucket in self.buckets):  # else it was called before
            for bucket in self.buckets:
                bucket.finish_step()

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


class Gather(torch.autograd.Function):
    """A unit's parameters as a function of its shard. Its adjoint is a reduce-scatter.

    forward: shard [length] -> the gathered `full`, [N * length], with its own version counter.
    backward: hands the gradient, [N * length], to `leave`, which reduces it; autograd gets None.
    """

    @staticmethod
    def forward(ctx, shard: Tensor, full: Tensor, leave: Callable[[Tensor], None]) -> Tensor:
        ctx.leave = leave
        return full.data  # has its own version counter: backward gathers into `full` once more

    @staticmethod
    def backward(ctx, grads: Tensor):
        ctx.leave(grads)
        return None, None, None  # `shard.grad` gets the average when the reduction has finished


class FlatParameter:
    """A unit's parameters side by side in one flat buffer, of which each rank owns an equal shard.

    shard: [length], the part that this rank's optimizer updates, in the parameters' own dtype.
    full: [N * length], padded, in `param_dtype`; has memory only while unsharded.
    grads: [N * length] in `reduce_dtype`, while they are reduced.
    average: [length], the sum of the averages of this step's micro-batches so far.
    """

    def __init__(self, name, unit, groups, dtypes, device, shard_device):
        self.name, self.unit = name, unit
        (self.group, self.replicate_group), (param_dtype, reduce_dtype) = groups, dtypes
        n_shards, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.n_replicas = dist.get_world_size(self.replicate_group) if self.replicate_group else 1
        self.n_ranks = n_shards * self.n_replicas
        self.unshards_in_backward = not is_lookup(unit)  # a lookup's gradient needs no weights
        self.shapes = {full_name: p.shape for full_name, p in unit.named_parameters(name)}
        flat = torch.cat([p.detach().flatten() for p in unit.parameters()])
        self.owners = [(m, k) for m in unit.modules() for k, _ in m.named_parameters(recurse=False)]
        for owner, key in self.owners:
            delattr(owner, key)
        length = -(-len(flat) // n_shards)  # of a shard, rounded up
        self.owned = slice(rank * length, (rank + 1) * length)
        self.padding = n_shards * length - len(flat)
        flat = F.pad(flat, (0, self.padding))
        self.shard = nn.Parameter(flat[self.owned].to(shard_device, copy=True))
        # the embedding's gradient is a sum over many tokens: not in bfloat16
        dtype = param_dtype if self.unshards_in_backward else None
        self.full = torch.empty_like(flat, dtype=dtype, device=device)
        self.full.untyped_storage().resize_(0)
        self.reduce_dtype = reduce_dtype or self.full.dtype
        self.gathering: tuple[Work, Tensor] | None = None  # the all-gather in flight, what it sends
        self.version: int | None = None  # of the shard that `full` was gathered from; None: freed
        self.awaited = 0  # how many forwards of this step still await their backward
        self.is_last = False  # whether `grads` are those of the step's last backward
        self.grads = self.average = None
        self.reduction: Work | None = None  # the reduce-scatter in flight
        self.replication: Work | None = None  # the all-reduce in flight
        self.incomplete = NoGradient(self.shard)  # `shard.grad` from start_reduction to finish_step

    def unshard(self) -> None:
        """Start the all-gather that fills `full`, unless it is up to date or in flight."""
        if self.version != self.shard._version:
            self.reshard()  # of an earlier step
            self.version = self.shard._version
            # in place: tensors saved for backward share the storage
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
            sent = self.shard.detach().to(self.full)  # cast before it is sent
            self.gathering = all_gather_single(self.full, sent, self.group, async_op=True), sent

    def wait(self) -> None:
        if self.gathering is not None:
            self.gathering[0].wait()
            self.gathering = None

    def reshard(self) -> None:
        """Free the memory of `full` until the next `unshard`, after an all-gather in flight."""
        self.wait()
        self.full.untyped_storage().resize_(0)
        self.version = None

    @contextmanager
    def parameters(self, leave: Callable[[FlatParameter, Tensor], None]) -> Iterator[None]:
        """Give the unit its parameters: views of the output of `Gather`."""
        flat = Gather.apply(self.shard, self.full, partial(leave, self))
        shapes = self.shapes.values()
        *chunks, _ = flat.split([*(shape.numel() for shape in shapes), self.padding])
        for (owner, name), chunk, shape in zip(self.owners, chunks, shapes, strict=True):
            setattr(owner, name, chunk.view(shape))
        try:
            yield
        finally:
            for owner, name in self.owners:
                delattr(owner, name)
        if not flat.is_inference() and flat._version > 0:
            raise RuntimeError(f"unit {self.name} has changed a parameter in place")

    def await_backward(self, output: Tensor, enter: Callable) -> Tensor:
        """Make backward call `enter` before it reads a parameter; returns the unit's output.

        Autograd runs last what forward computed first, so it reaches the view first. An operation
        in place on the view removes its hook, but not that of `output`. A tensor that the unit
        keeps in an attribute, such as an auxiliary loss, may be reached without any output.
        """
        self.awaited += 1
        view = output.view_as(output)
        attributes = [value for m in self.unit.modules() for value in vars(m).values()]
        kept = [t for t in attributes if isinstance(t, Tensor) and t.grad_fn is not None]
        for tensor in (view, output, *kept):
            tensor.register_hook(partial(enter, self, self.shard._version))
        return view

    def collect(self, grads: Tensor, synchronizes: bool) -> None:
        """Finish the unit's previous reduction, then take all its gradients: [N * length]."""
        self.finish_reduction()  # of the previous micro-batch, if it is still in flight
        self.check_gradient()
        self.awaited = max(self.awaited - 1, 0)  # 0 if a graph is used again
        self.is_last = synchronizes and self.awaited == 0
        self.grads = grads.to(self.reduce_dtype)

    def check_gradient(self) -> None:
        expected = None if self.average is None else self.incomplete
        if self.shard.grad is not expected or self.replication is not None:
            raise RuntimeError(
                "all micro-batches but the last of a step belong in no_sync(), and "
                "zero_grad(set_to_none=True) belongs after the optimizer's step, nowhere else"
            )

    def start_reduction(self) -> None:
        """Start the reduce-scatter: the sum over the ranks replaces this rank's part of `grads`."""
        owned = self.grads[self.owned]
        self.reduction = reduce_scatter_single(owned, self.grads, group=self.group, async_op=True)
        self.shard.grad = self.incomplete

    def finish_reduction(self) -> None:
        """If a reduction is in flight, add its average to the earlier ones and free `grads`."""
        if self.reduction is None:
            return
        self.reduction.wait()
        average = self.grads[self.owned].to(self.shard) / self.n_ranks  # in the shard's dtype
        self.average = average if self.average is None else self.average.add_(average)
        self.reduction = self.grads = None
        if self.is_last:
            self.start_all_reduce()

    def finish_step(self) -> None:
        """Give the optimizer the average, zeros if no rank has run the unit; reset `awaited`."""
        if self.replication is not None:
            self.replication.wait()
            self.replication = None
        self.check_gradient()
        self.shard.grad = torch.zeros_like(self.shard) if self.average is None else self.average
        self.average, self.awaited = None, 0
        self.reshard()

    def start_all_reduce(self) -> None:
        """With replicas: start to all-reduce the average over them, if it exists, once per step."""
        if self.n_replicas > 1 and self.average is not None and self.replication is None:
            self.replication = all_reduce(self.average, group=self.replicate_group, async_op=True)


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
    parser.add_argument("--timeout", type=seconds, default=600, help="collective timeout, seconds")
    args = check_arguments(parser.parse_args(argv), data_parallel_size=world_size())
    if world_size() % args.shard_degree:
        fail(f"--shard-degree {args.shard_degree} does not divide the {world_size()} ranks")
    args.param_dtype = args.param_dtype or args.dtype
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
        grad_norm = model.clip_grad_norm_(args.grad_clip)
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
