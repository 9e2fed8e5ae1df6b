"""Stage 03: ZeRO: shard the optimizer state, gradients and parameters across the ranks.

The replicas of stage 02 hold the same optimizer state, gradients and parameters N times over. ZeRO
removes this redundancy in three steps. Parameters lie in flat buffers (buckets), each split into N
equal shards, one per rank. A rank keeps only its shard of AdamW's first and second moments
(ZeRO-1), also of the gradients (ZeRO-2), also of the parameters (ZeRO-3).

New since stage 02: `ZeroRedundancyOptimizer` in place of DDP and AdamW. A reduce-scatter leaves
each rank the average gradient of its shard. The rank updates that shard, and an all-gather
distributes the updated parameters. ZeRO-3 all-gathers the parameters of a unit (here a layer)
before its forward and again for its backward, and frees them afterwards.

    P parameters, N ranks, m micro-batches per step; E of the embedding, O of the output; float32

    --zero-stage  memory per rank, bytes         communication per step, elements
    1             8 P + 8 P / N                  reduce-scatter P + all-gather P
    2             4 P + 12 P / N                 reduce-scatter m P + all-gather P
    3             16 P / N + one unsharded unit  reduce-scatter m P + all-gather m (2 P - E - O)

    During backward, ZeRO-2 also holds the full gradients of two buckets, one that backward fills
    and one that is being reduced, ZeRO-3 those of one unit. Gloo adds a receive buffer for each.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
sections 5 (P_os, P_os+g, P_os+g+p) and 7 (communication).

Run it:

    torchrun --nproc-per-node 2 03_zero/train.py --zero-stage 2 --data sample --steps 100
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
    all_reduce_control,
    broadcast,
    check_same,
    global_norm,
    reduce_scatter_single,
)
from common.units import lend_parameters, take_parameters, units_with_values

# isort: split
from common.arguments import base_parser, check_arguments, model_config, positive
from common.checkpoint import State, state_of_flat_shard
from common.data import eval_batches, load_corpus, train_batches
from common.distributed import World, cleanup, setup, world_size
from common.guards import guard
from common.loss import IGNORED
from common.model import Transformer, init_weights
from common.optimization import adamw_settings, learning_rate, set_learning_rate
from common.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: flat buffers, of which each rank owns a shard
# ------------------------------------------------------------------------------------------------


class ZeroRedundancyOptimizer:
    """Shard an element-wise optimizer across the data-parallel ranks: ZeRO-1, ZeRO-2 and ZeRO-3.

    The contract. A step is `finish_gradient_synchronization()`, `clip_grad_norm_()`, `step()`,
    `zero_grad()`; each of the last three calls the first. ZeRO-1: all micro-batches of a step but
    the last are under `no_sync()`. The last one, in ZeRO-2 each, gives every parameter a gradient.
    ZeRO-3: each parameter is in exactly one unit, trains, has the common dtype, and is used in
    every forward of its unit and nowhere else. All ranks run the same units in the same order.

    module: the same on every rank. optimizer_class: for instance torch.optim.AdamW; defaults: its
    keyword arguments. zero_stage: 1 shards the optimizer state, 2 the gradients as well, 3 the
    parameters as well. bucket_cap_mb: the most MB of one bucket, ZeRO-1 and -2. units: the modules
    that are gathered one by one, ZeRO-3.

    `self.optimizer` is the optimizer over the shards, for learning-rate schedulers and checkpoints.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        zero_stage: int = 1,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
        units: list[nn.Module] | None = None,
        **defaults,
    ):
        if zero_stage not in (1, 2, 3) or (zero_stage == 3 and not units):
            raise ValueError("zero_stage is 1, 2 or 3, and 3 needs units")
        self.module, self.zero_stage, self.group = module, zero_stage, process_group
        tensors = [*module.named_parameters(), *module.named_buffers()]
        kinds = [(name, t.shape, t.dtype, t.requires_grad) for name, t in tensors]
        check_same("parameters or buffers", kinds, tensors[0][1].device, process_group)
        for _, tensor in tensors:
            broadcast(tensor.detach(), group=process_group, group_src=0)
        self.launched = 0  # how many buckets' reductions have started
        self.in_flight: Bucket | None = None  # whose reduction was started last
        self.finished = False  # whether the shards have this step's gradients
        self.synchronizes = True
        self.buckets: list[Bucket | FlatParameter] = []  # ZeRO-3: one per unit
        self.bucket_of: dict[nn.Parameter, Bucket] = {}
        if zero_stage == 3:
            for name, unit in units_with_values(module, units):
                self.buckets.append(FlatParameter(name, unit, process_group))
        else:
            params = [p for p in module.parameters() if p.requires_grad][::-1]  # last layer first
            bucket_class = ShardedGradientBucket if zero_stage == 2 else Bucket
            for part in split_into_buckets(params, bucket_cap_mb):
                self.buckets.append(bucket_class(part, process_group))
                for param in part:
                    self.bucket_of[param] = self.buckets[-1]
                    param.register_post_accumulate_grad_hook(self.mark_ready)
        self.optimizer = optimizer_class([bucket.shard for bucket in self.buckets], **defaults)
        # a hook, so that no caller can step and leave out the all-gathers
        self.optimizer.register_step_post_hook(lambda *_: self.all_gather_parameters())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients and start no reduction: for all micro-batches but the last.

        Without effect in ZeRO-2 and ZeRO-3, which have no full gradients to accumulate in.
        """
        self.synchronizes = self.zero_stage > 1
        try:
            yield
        finally:
            self.synchronizes = True

    # ---- ZeRO-1 and ZeRO-2: hooks that reduce a bucket when its gradients are ready ----

    def mark_ready(self, param: nn.Parameter) -> None:
        """Called by autograd in backward, when it has accumulated a gradient into `param.grad`."""
        bucket = self.bucket_of[param]
        bucket.collect(param)
        if not self.synchronizes:
            return
        if self.launched == len(self.buckets):  # ZeRO-2: the next micro-batch
            self.expect_gradients()
        bucket.waiting_for.remove(param)
        self.launch_ready_buckets()

    def expect_gradients(self) -> None:
        self.launched = 0
        for bucket in self.buckets:
            bucket.waiting_for = set(bucket.params)

    def launch_ready_buckets(self) -> None:
        """Start to reduce the next buckets that are ready.

        Buckets are launched strictly in order: ranks may finish gradients in different orders, but
        collectives are matched by the order of the calls. Each launch finishes the previous
        reduction, so that, as a rule, two buckets have full gradients (ZeRO-2).
        """
        while self.launched < len(self.buckets) and not self.buckets[self.launched].waiting_for:
            previous, self.in_flight = self.in_flight, self.buckets[self.launched]
            self.in_flight.start_reduction()
            if previous is not None and self.zero_stage == 2:
                previous.finish_reduction()  # after the launch: the network is busy meanwhile
            self.launched += 1

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """After a step's last backward: give each shard its average gradient, unless it has it."""
        if self.finished:
            return
        if self.zero_stage < 3:  # else autograd has computed and accumulated it
            missing = {p for bucket in self.buckets for p in bucket.waiting_for}
            if missing:
                names = [name for name, p in self.module.named_parameters() if p in missing]
                raise RuntimeError(f"the last backward outside of no_sync() left out {names}")
            for bucket in self.buckets:
                bucket.finish_reduction()
                bucket.finish_step()
            self.expect_gradients()
        self.finished = True
        grads = (bucket.shard.grad for bucket in self.buckets)
        agree_on_overflow((grad for grad in grads if grad is not None), self.group)

    # ---- all of ZeRO: clip, step, gather ----

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
        """Update this rank's shards, then all-gather the updated parameters (ZeRO-1 and -2)."""
        self.finish_gradient_synchronization()
        self.optimizer.step()  # its hook calls the all-gathers

    def all_gather_parameters(self) -> None:
        """Send the updated shards to all ranks. ZeRO-3 gathers in the next forward instead."""
        if self.zero_stage == 3:
            return
        for gather in [bucket.start_all_gather() for bucket in self.buckets]:
            gather.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, whatever `set_to_none` is, also if the step was skipped."""
        if self.launched:
            self.finish_gradient_synchronization()
        self.finished = False
        self.optimizer.zero_grad()
        for param in self.bucket_of:
            param.grad = None


class Bucket:
    """ZeRO-1: parameters in one flat buffer, of which each rank owns an equal shard.

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
        self.shard = nn.Parameter(self.full[self.owned])
        self.grads: Tensor | None = None
        self.average: Tensor | None = None
        self.reduction: Work | None = None  # the collective in flight

    def views_into(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        sizes = [p.numel() for p in self.params]
        chunks = flat[: sum(sizes)].split(sizes)
        return {p: chunk.view(p.shape) for p, chunk in zip(self.params, chunks, strict=True)}

    def collect(self, param: nn.Parameter) -> None:
        """Move the gradient of `param` into the buffer, where later micro-batches add to it."""
        if self.grads is None or param.grad is not self.grad_views[param]:
            self.copy_gradient(param)
        param.grad = self.grad_views[param]

    def copy_gradient(self, param: nn.Parameter) -> None:
        if self.grads is None:
            self.grads = torch.empty_like(self.full)
            self.grad_views = self.views_into(self.grads)
        self.grad_views[param].copy_(param.grad)

    def start_reduction(self) -> None:
        """Start the reduce-scatter: the sum over the ranks replaces this rank's part of `grads`."""
        self.grads[len(self.grads) - self.padding :].zero_()  # else garbage enters the norm
        owned = self.grads[self.owned]
        self.reduction = reduce_scatter_single(owned, self.grads, group=self.group, async_op=True)

    def finish_reduction(self) -> None:
        if self.reduction is None:
            return
        self.reduction.wait()
        self.reduction, self.average = None, self.grads[self.owned].div_(self.n_ranks)

    def finish_step(self) -> None:
        """Make the average `shard.grad`. In `param.grad` only this rank's part has been reduced."""
        self.shard.grad, self.average = self.average, None
        for param in self.params:
            param.grad = None

    def start_all_gather(self) -> Work:
        """Start to replace the old parameters: all-gather the updated shards into `full`."""
        return all_gather_single(self.full, self.shard.detach(), group=self.group, async_op=True)


class ShardedGradientBucket(Bucket):
    """ZeRO-2: full gradients exist only from a bucket's first gradient until it is reduced."""

    def collect(self, param: nn.Parameter) -> None:
        """Move the gradient of `param` into the buffer."""
        self.finish_reduction()  # of the previous micro-batch, if it is still in flight
        self.copy_gradient(param)
        param.grad = None

    def finish_reduction(self) -> None:
        """If a reduction is in flight, add its average to the earlier ones and free `grads`."""
        if self.reduction is None:
            return
        self.reduction.wait()
        average = self.grads[self.owned] / self.n_ranks
        self.average = average if self.average is None else self.average.add_(average)
        self.reduction = self.grads = self.grad_views = None


class FlatParameter:
    """ZeRO-3: one unit's parameters side by side, of which this rank keeps its shard alone.

    shard: [length], a parameter, whose gradient autograd computes and accumulates. full: the
    gathered parameters, [N * length], padded; exists only while the unit computes.
    """

    def __init__(self, name: str, unit: nn.Module, group: ProcessGroup | None):
        self.name, self.group = name, group
        self.n_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.shapes = {full_name: p.shape for full_name, p in unit.named_parameters(name)}
        self.owners, flat = take_parameters(unit)  # the unit has no parameters any more
        length = -(-len(flat) // self.n_ranks)  # of a shard, rounded up
        self.owned = slice(rank * length, (rank + 1) * length)
        padding = self.n_ranks * length - len(flat)
        self.sizes = [*(shape.numel() for shape in self.shapes.values()), padding]
        self.shard = nn.Parameter(F.pad(flat, (0, padding))[self.owned].clone())
        self.full: Tensor | None = None
        self.forward, unit.forward = unit.forward, self.run

    def run(self, *args, **kwargs):
        """In place of the unit's `forward`: the unit has parameters in here and nowhere else."""
        self.full = None  # a backward to inputs alone leaves it, and a step may have followed
        params = Gather.apply(self.shard, self)
        try:
            with lend_parameters(self.shard, self.owners, params, self.pack, self.unpack):
                return self.forward(*args, **kwargs)
        finally:
            self.full = None  # frees it: `pack` has kept no reference for backward

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
        return self.unshard().as_strided(*place) if place else tensor

    @torch.inference_mode(False)  # else `full` would not count its versions
    def unshard(self) -> Tensor:
        """All-gather the parameters, unless they are here. Returns them: [N * length]."""
        if self.full is None:
            self.full = self.shard.new_empty(self.n_ranks * len(self.shard))
            all_gather_single(self.full, self.shard.detach(), group=self.group)
        return self.full


class Gather(torch.autograd.Function):
    """A unit's parameters as a function of its shard, [length]. Its adjoint is a reduce-scatter."""

    @staticmethod
    def forward(ctx, shard: Tensor, bucket: FlatParameter) -> tuple[Tensor, ...]:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        *chunks, _ = bucket.unshard().split(bucket.sizes)  # the all-gather
        return tuple(c.view(s) for c, s in zip(chunks, bucket.shapes.values(), strict=True))

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor, None]:
        """Autograd calls it when it has all gradients of the unit."""
        bucket = ctx.bucket
        if any(grad is None for grad in grads):
            raise RuntimeError(f"unit {bucket.name} has not used all of its parameters")
        bucket.full = None  # backward is done with the parameters
        padding = grads[0].new_zeros(bucket.sizes[-1])
        flat = torch.cat([*(grad.flatten() for grad in grads), padding])
        owned = flat[bucket.owned]
        reduce_scatter_single(owned, flat, group=bucket.group)
        return owned / bucket.n_ranks, None  # autograd adds it to `shard.grad`


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
        shapes = {names[p]: p.shape for p in bucket.params} if full else bucket.shapes
        state |= state_of_flat_shard(optimizer.optimizer, bucket.shard, shapes, bucket.owned.start)
    return state | {f"model.{name}": p.detach() for name, p in full.items()}


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument(
        "--zero-stage", type=int, choices=(1, 2, 3), default=1, help="what to shard"
    )
    parser.add_argument("--bucket-cap-mb", type=positive, default=25, help="MB per bucket")
    return check_arguments(parser.parse_args(argv), data_parallel_size=world_size())


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
        **adamw_settings(args.lr, args.weight_decay),
    )
    guard(model, optimizer)

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
        grad_norm = optimizer.clip_grad_norm_(args.max_norm)
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
