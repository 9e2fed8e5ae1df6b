"""Stage 03: ZeRO: shard the optimizer state, gradients and parameters across the ranks.

The replicas of stage 02 hold the same optimizer state, gradients and parameters N times over. ZeRO
removes this redundancy in three stages. Parameters lie in flat buffers (buckets), each split into N
equal shards, one per rank. A rank keeps only its shard of AdamW's first and second moments
(--zero-stage 1), also of the gradients (2), also of the parameters (3).

New since stage 02: `ZeroRedundancyOptimizer` in place of DDP and AdamW. A reduce-scatter leaves
each rank the average gradient of its shard. The rank updates that shard, and an all-gather
distributes the updated parameters. Stage 3 all-gathers the parameters of a unit (here a layer)
before its forward and before its backward, and frees them afterwards.

    P parameters, N ranks, m micro-batches per step, E the embedding; float32

    --zero-stage  memory per rank, bytes         communication per step, elements
    1             8 P + 8 P / N                  reduce-scatter P + all-gather P
    2             4 P + 12 P / N                 reduce-scatter m P + all-gather P
    3             16 P / N + one unsharded unit  reduce-scatter m P + all-gather m (2 P - E)

    During backward, stages 2 and 3 also hold the full gradients of two buckets: one that backward
    fills (in stage 3 twice) and one that is being reduced. Gloo adds a receive buffer for each.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
sections 5 (P_os, P_os+g, P_os+g+p) and 7 (communication).

Run it:

    torchrun --nproc-per-node 2 03_zero/train.py --zero-stage 2 --data sample --steps 100
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from common.collectives import (
    all_gather_single,
    all_reduce_control,
    broadcast,
    global_norm,
    reduce_scatter_single,
)
from common.units import NoGradient, cast_inputs, forbid_parameters, is_lookup, units_with_values

# isort: split
from common.arguments import base_parser, check_arguments, model_config, positive, seconds
from common.checkpoint import State, state_of_flat_shard
from common.data import eval_batches, load_corpus, train_batches
from common.distributed import World, cleanup, setup, world_size
from common.loss import IGNORED
from common.model import Transformer, init_weights
from common.optimization import adamw_settings, learning_rate, set_learning_rate
from common.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: flat buffers, of which each rank owns a shard
# ------------------------------------------------------------------------------------------------


class ZeroRedundancyOptimizer:
    """Shard an element-wise optimizer across the data-parallel ranks: ZeRO stages 1, 2 and 3.

    The contract. A step is `finish_gradient_synchronization()`, `clip_grad_norm_()`, `step()`,
    `zero_grad()`; each of the last three calls the first. Stage 1: all micro-batches of a step but
    the last are under `no_sync()`. Stage 3: each parameter is in exactly one unit, trains, has the
    common dtype, and is used in the forward of its unit only, which returns one tensor. All ranks
    run the same units in the same order.

    module: the same on every rank. optimizer_class: for instance torch.optim.AdamW; defaults: its
    keyword arguments. zero_stage: 1 shards the optimizer state, 2 the gradients as well, 3 the
    parameters as well. bucket_cap_mb: the most MB of one bucket; in stage 3 a unit is a bucket.
    param_dtype: stage 3 all-gathers the parameters in it, None: their own.

    `self.optimizer` is the optimizer over the shards.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        zero_stage: int = 1,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
        units: list[nn.Module] | None = None,
        param_dtype: torch.dtype | None = None,
        **defaults,
    ):
        self.module, self.zero_stage = module, zero_stage
        self.group, self.param_dtype = process_group, param_dtype
        self.launched = 0  # how many buckets' reductions this backward has started
        self.in_flight: Bucket | None = None  # whose reduction was started last
        self.entered: FlatParameter | None = None  # whose unit backward is in
        self.synchronizes, self.in_backward = True, False
        self.buckets: list[Bucket] = []  # in reverse order: backward finishes the last layer first
        if zero_stage == 3:
            for name, unit in units_with_values(module, units):
                bucket = FlatParameter(name, unit, process_group, param_dtype)
                unit.forward = partial(self.run, bucket, unit.forward)
                self.buckets.insert(0, bucket)
            forbid_parameters(module)
        else:
            params = [p for p in module.parameters() if p.requires_grad][::-1]
            bucket_class = ShardedGradientBucket if zero_stage == 2 else Bucket
            for part in split_into_buckets(params, bucket_cap_mb):
                self.buckets.append(bucket_class(part, process_group))
                for param in part:
                    param.register_post_accumulate_grad_hook(self.mark_ready)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.optimizer = optimizer_class([bucket.shard for bucket in self.buckets], **defaults)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients and start no reduction: for all micro-batches but the last."""
        self.synchronizes = self.zero_stage > 1  # stages 2 and 3 have nowhere to accumulate them
        try:
            yield
        finally:
            self.synchronizes = True

    # ---- stages 1 and 2: hooks that reduce a bucket when its gradients are ready ----

    def mark_ready(self, param: nn.Parameter) -> None:
        """Called by autograd in backward, when it has accumulated a gradient into `param.grad`."""
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True: the reduced gradients have no graph")
        self.in_backward = True
        bucket = self.bucket_of[param]
        if param not in bucket.waiting_for:
            raise RuntimeError(
                "a gradient came twice: the last backward left out a parameter, or a checkpoint() "
                "needs use_reentrant=False"
            )
        bucket.collect(param)
        if not self.synchronizes:
            return
        bucket.waiting_for.remove(param)
        self.launch_ready_buckets()

    def launch_ready_buckets(self) -> None:
        """Start to reduce the next buckets that are ready.

        Buckets are launched strictly in order: ranks may finish gradients in different orders, but
        collectives are matched by the order of the calls. Each launch finishes the previous
        reduction, so that at most two buckets have full gradients (stage 2).
        """
        while self.launched < len(self.buckets) and not self.buckets[self.launched].waiting_for:
            previous, self.in_flight = self.in_flight, self.buckets[self.launched]
            self.in_flight.start_reduction()
            if previous is not None and self.zero_stage == 2:
                previous.finish_reduction()  # after the launch: the network is busy meanwhile
            self.launched += 1
        if self.launched == len(self.buckets):  # every gradient has arrived: backward has ended
            self.launched, self.in_backward = 0, False
            for bucket in self.buckets:
                bucket.waiting_for = set(bucket.params)

    # ---- stage 3: units whose parameters are full only while they compute ----

    def run(self, bucket: FlatParameter, forward: Callable, *args, **kwargs) -> Tensor:
        """In place of a unit's `forward`: the unit has parameters in here and nowhere else."""
        recomputes = bucket is self.entered  # activation checkpointing runs it again in backward
        if self.entered is not None and not recomputes:
            stuck = f"the last backward did not leave unit {self.entered.name}"
            raise RuntimeError(f"{stuck}: restart the run; or a checkpoint() contains two units")
        bucket.unshard()
        bucket.wait()
        args, kwargs = cast_inputs(args, kwargs, self.param_dtype)
        with bucket.parameters(self.leave):
            output = forward(*args, **kwargs)
        own = bucket.full.untyped_storage()
        if not isinstance(output, Tensor) or output.untyped_storage() is own:
            raise TypeError(f"unit {bucket.name} returns {type(output)}, not one tensor of its own")
        if recomputes:
            return output  # unsharded, for the backward that follows
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
            bucket.wait()

    def leave(self, bucket: FlatParameter, grads: Tensor) -> None:
        """Backward has computed `grads`, all of the unit's gradients: it is done with the unit."""
        self.entered = None
        bucket.reshard()
        bucket.collect(grads)
        bucket.start_reduction()
        previous, self.in_flight = self.in_flight, bucket
        if previous not in (None, bucket):  # at most two units have full gradients
            previous.finish_reduction()  # after the launch: the network is busy meanwhile

    # ---- all stages: finish the reductions, step, gather ----

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """After a step's last backward: give each shard its average gradient, unless it has it."""
        fewest = min(bucket.awaited for bucket in self.buckets)  # above 0: a loss was discarded
        missing = [bucket.name for bucket in self.buckets if bucket.awaited > fewest]
        if missing:
            raise RuntimeError(f"backward has not reached every forward of unit {missing}")
        if self.in_backward:  # a parameter is unused, or every backward was under no_sync()
            for param in [p for bucket in self.buckets for p in bucket.waiting_for]:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                self.mark_ready(param)
        for bucket in self.buckets:
            bucket.finish_reduction()
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

    def step(self) -> None:
        """Update this rank's shards, then all-gather the updated parameters (stages 1 and 2)."""
        self.finish_gradient_synchronization()
        self.optimizer.step()  # writes the shards, which the all-gathers below send
        if self.zero_stage < 3:  # stage 3 gathers in the next forward
            if any(p.requires_grad != (p in self.bucket_of) for p in self.module.parameters()):
                raise RuntimeError("freeze, move or cast parameters before they are sharded")
            torch.autograd.graph.increment_version(self.bucket_of)  # older graphs are now stale
            for gather in [bucket.start_all_gather() for bucket in self.buckets]:
                gather.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, also if the step was skipped."""
        self.finish_gradient_synchronization()
        self.optimizer.zero_grad()
        for param in self.bucket_of:
            param.grad = None


class Bucket:
    """Stage 1: parameters in one flat buffer, of which each rank owns an equal shard.

    full: [N * length], padded; the parameters are views into it. shard: [length], the part that
    this rank's optimizer updates, itself a view into `full`. grads: [N * length]; the
    reduce-scatter writes the sum into the part that this rank owns. average: [length].
    waiting_for: the parameters whose gradients this backward has not finished yet.
    """

    def __init__(self, params: list[nn.Parameter], group: ProcessGroup | None):
        self.params, self.waiting_for, self.group = params, set(params), group
        self.n_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        flat = torch.cat([p.detach().flatten() for p in params])
        length = -(-len(flat) // self.n_ranks)  # of a shard, rounded up
        self.owned = slice(rank * length, (rank + 1) * length)
        self.padding = self.n_ranks * length - len(flat)
        self.full = F.pad(flat, (0, self.padding))
        self.full_views = self.views_into(self.full)
        for param, view in self.full_views.items():
            param.data = view
        broadcast(self.full, group=group, group_src=0)
        self.shard = nn.Parameter(self.full[self.owned])
        self.awaited = 0  # stage 3 counts with it
        self.grads = self.average = None
        self.reduction: Work | None = None  # the reduce-scatter in flight
        self.incomplete = NoGradient(self.shard)  # `shard.grad` from start_reduction to finish_step

    def views_into(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        sizes = [p.numel() for p in self.params]
        chunks = flat[: sum(sizes)].split(sizes)
        return {p: chunk.view(p.shape) for p, chunk in zip(self.params, chunks, strict=True)}

    def collect(self, param: nn.Parameter) -> None:
        """Move the gradient of `param` into the buffer, where later micro-batches add to it."""
        self.check_gradient()
        if self.grads is None or param.grad is not self.grad_views[param]:
            self.copy_gradient(param)
        param.grad = self.grad_views[param]

    def copy_gradient(self, param: nn.Parameter) -> None:
        if self.grads is None:
            self.grads = torch.empty_like(self.full)
            self.grad_views = self.views_into(self.grads)
        self.grad_views[param].copy_(param.grad)

    def check_gradient(self) -> None:
        expected = None if self.average is None else self.incomplete
        if self.shard.grad is not expected:
            raise RuntimeError(
                "all micro-batches but the last of a step belong in no_sync(), and "
                "zero_grad(set_to_none=True) belongs after the optimizer's step, nowhere else"
            )

    def start_reduction(self) -> None:
        """Start the reduce-scatter: the sum over the ranks replaces this rank's part of `grads`."""
        self.grads[len(self.grads) - self.padding :].zero_()  # else garbage enters the norm
        owned = self.grads[self.owned]
        self.reduction = reduce_scatter_single(owned, self.grads, group=self.group, async_op=True)
        self.shard.grad = self.incomplete

    def finish_reduction(self) -> None:
        if self.reduction is None:
            return
        self.reduction.wait()
        self.reduction, self.average = None, self.grads[self.owned].div_(self.n_ranks)

    def finish_step(self) -> None:
        """Give the optimizer the average. `param.grad` has parts of it only: nobody may use it."""
        self.check_gradient()
        self.shard.grad, self.average = self.average, None
        for param in self.params:
            param.grad = NoGradient(param)

    def start_all_gather(self) -> Work:
        """Start to replace the old parameters: all-gather the updated shards into `full`."""
        if any(param.data_ptr() != view.data_ptr() for param, view in self.full_views.items()):
            raise RuntimeError("freeze, move or cast parameters before they are sharded")
        return all_gather_single(self.full, self.shard.detach(), group=self.group, async_op=True)


class ShardedGradientBucket(Bucket):
    """Stage 2: full gradients exist only from a bucket's first gradient until it is reduced."""

    def collect(self, param: nn.Parameter) -> None:
        """Move the gradient of `param` into the buffer."""
        self.finish_reduction()  # of the previous micro-batch, if it is still in flight
        self.check_gradient()
        self.copy_gradient(param)
        param.grad = None

    def finish_reduction(self) -> None:
        """If a reduction is in flight, add its average to the earlier ones and free `grads`."""
        if self.reduction is None:
            return
        self.reduction.wait()
        average = self.grads[self.owned].to(self.shard) / self.n_ranks  # in the shard's dtype
        self.average = average if self.average is None else self.average.add_(average)
        self.reduction = self.grads = self.grad_views = None


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


class FlatParameter(ShardedGradientBucket):
    """Stage 3: a bucket of one unit's parameters, which are full only while the unit computes."""

    def __init__(self, name, unit, group, param_dtype):
        self.name, self.unit = name, unit
        self.params, self.group = [], group
        n_shards, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.n_ranks = n_shards
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
        broadcast(flat, group=group, group_src=0)
        self.shard = nn.Parameter(flat[self.owned].clone())
        # the embedding's gradient is a sum over many tokens: not in bfloat16
        dtype = param_dtype if self.unshards_in_backward else None
        self.full = torch.empty_like(flat, dtype=dtype)
        self.full.untyped_storage().resize_(0)
        self.gathering: tuple[Work, Tensor] | None = None  # the all-gather in flight, what it sends
        self.version: int | None = None  # of the shard that `full` was gathered from; None: freed
        self.awaited = 0  # how many forwards of this step still await their backward
        self.grads = self.average = None
        self.reduction: Work | None = None  # the reduce-scatter in flight
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

    def collect(self, grads: Tensor) -> None:
        """Finish the unit's previous reduction, then take all its gradients: [N * length]."""
        self.finish_reduction()  # of the previous micro-batch, if it is still in flight
        self.check_gradient()
        self.awaited = max(self.awaited - 1, 0)  # 0 if a graph is used again
        self.grads = grads.to(self.shard.dtype)

    def finish_step(self) -> None:
        """Give the optimizer the average, zeros if no rank has run the unit; reset `awaited`."""
        self.check_gradient()
        self.shard.grad = torch.zeros_like(self.shard) if self.average is None else self.average
        self.average, self.awaited = None, 0


def split_into_buckets(params: list[nn.Parameter], cap_mb: float, first_cap_mb: float = 1) -> list:
    """Split parameters, in order, into lists of one dtype and device and at most `cap_mb` MB.

    The first list is limited to `first_cap_mb`. A parameter above the cap gets its own list.
    """
    lists: list[list[nn.Parameter]] = []
    room = 0.0  # MB left in the last list
    for param in params:
        mb = param.numel() * param.element_size() / 2**20
        alike = lists and (param.dtype, param.device) == (lists[-1][0].dtype, lists[-1][0].device)
        if not alike or mb > room:
            room = cap_mb if lists else min(first_cap_mb, cap_mb)
            lists.append([])
        lists[-1].append(param)
        room -= mb
    return lists


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def training_state(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> State:
    """The tensors of a checkpoint, by the plain model's names; sharded ones as `Shard`s."""
    full = dict(model.named_parameters()) if optimizer.zero_stage < 3 else {}
    names = {p: name for name, p in full.items()}
    state: State = {}
    for bucket in optimizer.buckets:
        shapes = {names[p]: p.shape for p in bucket.params} or bucket.shapes
        state |= state_of_flat_shard(optimizer.optimizer, bucket.shard, shapes, bucket.owned.start)
    return state | {f"model.{name}": p.detach() for name, p in full.items()}


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument(
        "--zero-stage", type=int, choices=(1, 2, 3), default=1, help="what to shard"
    )
    parser.add_argument("--bucket-cap-mb", type=positive, default=25, help="MB per bucket")
    parser.add_argument("--timeout", type=seconds, default=600, help="collective timeout, seconds")
    args = check_arguments(parser.parse_args(argv), data_parallel_size=world_size())
    # stage 3 all-gathers in bf16; autocast would keep a bf16 copy of all the weights
    args.autocast = args.autocast and args.zero_stage < 3
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
    model = Transformer(config)
    init_weights(model, args.seed)
    model.to(device)
    optimizer = ZeroRedundancyOptimizer(
        model,
        torch.optim.AdamW,
        args.zero_stage,
        bucket_cap_mb=args.bucket_cap_mb,
        units=model.units(),
        param_dtype=getattr(torch, args.dtype),
        **adamw_settings(args.lr, args.weight_decay),
    )

    run = Run(args, __file__, config, device, corpus)
    state = training_state(model, optimizer)
    first_step = run.checkpoints.load(run.resume, state, optimizer.optimizer)
    batches = train_batches(corpus.train, args.batching, device, first_step, world.rank, world.size)

    for step in run.steps(first_step):
        lr = learning_rate(step, args.steps, args.lr, args.warmup_steps, args.min_lr_ratio)
        set_learning_rate(optimizer.optimizer, lr)
        micro_batches = next(batches)
        loss = torch.zeros((), device=device)
        for i, (inputs, targets, keys) in enumerate(micro_batches):
            is_last = i == len(micro_batches) - 1
            with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
                micro_loss = model(inputs, targets, keys) / len(micro_batches)
            with nullcontext() if is_last else optimizer.no_sync():
                micro_loss.backward()
            loss += micro_loss.detach()
        optimizer.finish_gradient_synchronization()
        loss = all_reduce_control(loss) / world.size
        grad_norm = optimizer.clip_grad_norm_(args.grad_clip)
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
