"""Stage 03: ZeRO: shard the optimizer state, gradients and parameters across the ranks.

The replicas of stage 02 hold the same optimizer state, gradients and parameters N times over. ZeRO
removes this redundancy in three steps. Parameters lie in flat buffers, each split into N equal
shards, one per rank. Each rank keeps only its shard of AdamW's first and second moments (ZeRO-1),
then of the gradients, too (ZeRO-2), and finally of the parameters (ZeRO-3).

New since stage 02: `ZeroRedundancyOptimizer` in place of DDP and AdamW. A reduce-scatter leaves
each rank the average gradient of its shard. The rank updates that shard, and an all-gather
distributes the updated parameters. ZeRO-3 all-gathers the parameters of a unit (embedding, layer
or output) before its forward, again if its backward reads them, and frees them afterwards.

    P parameters, N ranks, m micro-batches per step; E of the embedding, O of the output; float32

    --zero-stage  memory per rank, bytes         communication per step, elements
    1             8 P + 8 P / N                  reduce-scatter P + all-gather P
    2             4 P + 12 P / N                 reduce-scatter m P + all-gather P
    3             16 P / N + one unsharded unit  reduce-scatter m P + all-gather m (2 P - E - O)

    During backward, ZeRO-2 also holds the full gradients of two buckets: backward fills one while
    the other is being reduced. ZeRO-3 holds one unit's, and a copy during the reduce-scatter.
    Backward does not read the embedding, nor the output: the loss computes the head's gradient in
    forward, and our norm's backward reads a new tensor.

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
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup, Work

from common.collectives import (
    all_gather_single,
    all_reduce_control,
    broadcast_module,
    global_norm,
    reduce_scatter_single,
    split_into_buckets,
)
from common.guards import weak
from common.unit_parameters import (
    Place,
    is_in_checkpoint,
    lend_parameters,
    owned_by,
    place_in,
    take_parameters,
    units_with_values,
)

# isort: split
from common.batches import eval_batches, train_batches
from common.distributed import World
from common.guards import guard
from common.loss import IGNORED
from common.model import Transformer, init_weights
from common.optimization import adamw_settings, learning_rate, set_learning_rate
from common.shards import State, state_of_flat_tensors, tensors_of

from common.job.arguments import base_parser, check_arguments, model_config, positive
from common.job.corpus import load_corpus
from common.job.launch import cleanup, setup, world_size
from common.job.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: flat buffers, of which each rank owns a shard
# ------------------------------------------------------------------------------------------------


class ZeroRedundancyOptimizer:
    """ZeRO-1: shard the state of an element-wise optimizer across the data-parallel ranks.

    The contract. All micro-batches of a step but the last are under `no_sync()`, and the last one
    gives every parameter a gradient. After its backward call come, in this order,
    `finish_gradient_synchronization()`, `clip_grad_norm_()`, `step()` and `zero_grad()`.

    module: complete, with the same contiguous parameters on every rank. optimizer_class: for
    instance torch.optim.AdamW; defaults: its keyword arguments. process_group: the ranks that
    shard; None for all. bucket_cap_mb: the most MiB of several parameters in a bucket, in the
    first one 1.
    """

    zero_stage = 1

    def __init__(
        self,
        module: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
        **defaults,
    ):
        self.module, self.group = module, process_group
        broadcast_module(module, process_group)
        params = [p for p in module.parameters() if p.requires_grad][::-1]  # in backward's order
        # the first bucket is small, so that communication starts early
        parts = split_into_buckets(params, bucket_cap_mb, first_cap_mb=1)
        self.buckets = [self.make_bucket(part) for part in parts]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.launched = 0  # how many buckets' reductions have started
        self.synchronizes = True
        for param in params:  # weak: else these hooks would keep the wrapper alive
            param.register_post_accumulate_grad_hook(weak(self.mark_ready))
        self.shards = [bucket.shard for bucket in self.buckets]
        self._optimizer = optimizer_class(self.shards, **defaults)
        # a hook, so that the parameters are gathered no matter who calls step()
        self.optimizer.register_step_post_hook(lambda *_: self.all_gather_parameters())

    @property  # that nothing can replace: its hook gathers
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer over the shards, for learning-rate schedulers and checkpoints."""
        return self._optimizer

    def make_bucket(self, params: list[nn.Parameter]) -> Bucket:
        return Bucket(params, self.group)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients and start no reduction: for all micro-batches but the last."""
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def mark_ready(self, param: nn.Parameter) -> None:
        """Called by autograd in backward, when it has accumulated a gradient into `param.grad`.

        Buckets are launched strictly in order: ranks may finish gradients in different orders, but
        collectives are matched by the order of the calls.
        """
        bucket = self.bucket_of[param]
        bucket.collect(param, divide_by=bucket.n_ranks if self.synchronizes else 1)
        if self.synchronizes:
            bucket.waiting_for.remove(param)
        while self.launched < len(self.buckets) and not self.buckets[self.launched].waiting_for:
            self.buckets[self.launched].start_reduction()
            self.launched += 1

    def finish_gradient_synchronization(self) -> None:
        """Wait for the averages. The step's last backward must have reached every parameter."""
        missing = {p for bucket in self.buckets[self.launched :] for p in bucket.waiting_for}
        if missing:
            names = [name for name, p in self.module.named_parameters() if p in missing]
            raise RuntimeError(f"a backward outside of no_sync() left out {names}")
        for bucket in self.buckets:
            bucket.finish_reduction()
            bucket.shard.grad, bucket.average = bucket.average, None
        self.launched = 0

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients to at most this global norm; returns the norm before clipping."""
        grads = [shard.grad for shard in self.shards if shard.grad is not None]
        # each rank has the squares of its own shards only
        norm = all_reduce_control(global_norm(grads).square(), group=self.group).sqrt()
        for grad in grads:
            grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    def step(self) -> None:
        """Update this rank's shards, and all-gather the parameters."""
        self.optimizer.step()  # its hook calls `all_gather_parameters`

    def all_gather_parameters(self) -> None:
        for gather in [bucket.start_all_gather() for bucket in self.buckets]:
            gather.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, whatever `set_to_none` is."""
        self.optimizer.zero_grad()
        for param in self.bucket_of:  # else the next backward adds to this step's gradient
            param.grad = None


class Bucket:
    """Parameters that are views into one flat buffer, of which each rank owns an equal shard.

    full: [N * length], padded. shard: [length], the part of `full` that this rank's optimizer
    updates. grads: [N * length]; grad_views: each parameter's gradient, a view into `grads`.
    Every step allocates new ones, so a gradient that somebody keeps does not change.
    waiting_for: the parameters whose gradients this backward has not produced yet.
    average: [length], the average gradient of the shard, in ZeRO-2 summed over micro-batches.
    """

    def __init__(self, params: list[nn.Parameter], group: ProcessGroup | None):
        self.params, self.group, self.n_ranks = params, group, dist.get_world_size(group)
        flat = torch.cat([p.detach().flatten() for p in params])
        self.owned, padding = owned_by(len(flat), group)
        self.full = F.pad(flat, (0, padding))
        for param, view in self.views_into(self.full).items():
            param.data = view
        self.shard = nn.Parameter(self.full[self.owned])
        self.grads: Tensor | None = None
        self.waiting_for = set(params)
        self.reduction: Work | None = None  # the collective in flight
        self.average: Tensor | None = None

    def views_into(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        sizes = [p.numel() for p in self.params]
        chunks = flat[: sum(sizes)].split(sizes)
        return {p: chunk.view(p.shape) for p, chunk in zip(self.params, chunks, strict=True)}

    def collect(self, param: nn.Parameter, divide_by: int) -> None:
        """Copy the gradient of `param` into the buffer, and make the view there `param.grad`.

        After `zero_grad` backward allocates a new gradient outside the buffer; later micro-batches
        add to the view. Dividing before the sum over the ranks makes that sum the average.
        """
        if self.grads is None:
            self.grads = torch.empty_like(self.full)
            self.grad_views = self.views_into(self.grads)
        view = self.grad_views[param]
        if param.grad is not view or divide_by > 1:
            torch.div(param.grad, divide_by, out=view)  # copies and divides, or divides in place
        param.grad = view

    def start_reduction(self) -> None:
        """Start the reduce-scatter: the sum is written into this rank's part of `grads`."""
        self.grads[sum(p.numel() for p in self.params) :].zero_()  # the padding enters the norm
        owned = self.grads[self.owned]
        self.reduction = reduce_scatter_single(owned, self.grads, group=self.group, async_op=True)

    def finish_reduction(self) -> None:
        self.reduction.wait()
        self.reduction, self.waiting_for = None, set(self.params)
        self.average = self.grads[self.owned]
        self.grads = self.grad_views = None

    def start_all_gather(self) -> Work:
        """Start to fill `full` with the other ranks' updated shards; this rank's is in place."""
        return all_gather_single(self.full, self.shard.detach(), group=self.group, async_op=True)


# ---- ZeRO-2: the same buckets, whose full gradients exist only until they are reduced ----


class ZeroStage2(ZeroRedundancyOptimizer):
    """ZeRO-2: shard the gradients, too, by a reduce-scatter in every micro-batch.

    The contract is that of ZeRO-1, but every micro-batch gives every parameter a gradient.
    """

    zero_stage = 2

    def make_bucket(self, params: list[nn.Parameter]) -> Bucket:
        return ShardedGradientBucket(params, self.group)

    def no_sync(self):
        """Without effect: there are no full gradients to accumulate in."""
        return nullcontext()

    def mark_ready(self, param: nn.Parameter) -> None:
        """As in ZeRO-1, but finish a reduction once the next one has started. So two buckets have
        full gradients (more if a parameter of an earlier bucket gets its gradient late)."""
        if self.launched == len(self.buckets):
            # a new micro-batch has begun, and the last bucket of the previous one is in flight
            self.buckets[-1].finish_reduction()
            self.launched = 0
        super().mark_ready(param)
        for bucket in self.buckets[: self.launched][:-1]:
            bucket.finish_reduction()  # after the next launch, so that the network stays busy


class ShardedGradientBucket(Bucket):
    """A bucket whose `grads` exist only from its first gradient until they are reduced."""

    def collect(self, param: nn.Parameter, divide_by: int) -> None:
        """Copy the gradient of `param` into the buffer, and free it."""
        super().collect(param, divide_by)
        param.grad = None

    def finish_reduction(self) -> None:
        """Add the average to those of earlier micro-batches, and free the full gradients."""
        if self.reduction is None:  # it was finished in backward
            return
        earlier = self.average
        super().finish_reduction()
        # a copy: the view would keep `grads` alive
        self.average = self.average.clone() if earlier is None else earlier.add_(self.average)


# ---- ZeRO-3: units, whose full parameters exist only while they compute ----


class ZeroStage3:
    """ZeRO-3: shard the parameters, too, and gather them unit by unit.

    Units replace buckets, and `Gather.backward` replaces the hooks on gradients. It is used as
    ZeRO-1 and -2 are, although there is nothing left to accumulate, to wait for or to gather.

    A micro-batch of an embedding E, layers 0 and 1 and an output O, where `+` all-gathers a unit's
    parameters, `-` frees them, and `/` reduce-scatters its gradients; nothing overlaps:

    forward     +E E -E    +0 0 -0      +1 1 -1      +O O -O
    backward    O /O       +1 1 -1 /1   +0 0 -0 /0   E /E

    The contract. Each parameter is in exactly one unit, trains, has the common dtype, and is used
    in every forward of its unit and nowhere else. All ranks run the same units in the same order.
    units: the modules that are gathered one by one.
    """

    zero_stage = 3

    def __init__(
        self,
        module: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        units: list[nn.Module],
        process_group: ProcessGroup | None = None,
        **defaults,
    ):
        self.module, self.group = module, process_group
        broadcast_module(module, process_group)
        named_units = units_with_values(module, units)
        self.units = [Unit(*named_unit, process_group) for named_unit in named_units]
        self.shards = [unit.shard for unit in self.units]
        self.optimizer = optimizer_class(self.shards, **defaults)

    def no_sync(self):
        """Without effect: every backward reduces the gradients."""
        return nullcontext()

    def finish_gradient_synchronization(self) -> None:
        """Nothing to do: autograd has reduced and accumulated every gradient."""

    clip_grad_norm_ = ZeroRedundancyOptimizer.clip_grad_norm_  # needs only the shards

    def step(self) -> None:
        """Update this rank's shards. The next forward gathers the new parameters."""
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, whatever `set_to_none` is."""
        self.optimizer.zero_grad()


class Unit:
    """One unit's parameters side by side in a flat buffer, of which this rank keeps its shard.

    shard: [length], a parameter, whose gradient autograd computes and accumulates. full: the
    gathered parameters, [N * length], padded; exists only while the unit computes.
    """

    def __init__(self, name: str, module: nn.Module, group: ProcessGroup | None):
        self.name, self.group, self.n_ranks = name, group, dist.get_world_size(group)
        self.shapes = {full_name: p.shape for full_name, p in module.named_parameters(name)}
        self.owners, flat = take_parameters(module)  # leaves the module without parameters
        self.owned, padding = owned_by(len(flat), group)
        self.sizes = [*(shape.numel() for shape in self.shapes.values()), padding]
        self.shard = nn.Parameter(F.pad(flat, (0, padding))[self.owned].clone())
        self.full: Tensor | None = None
        self.module_forward, module.forward = module.forward, self.run

    def run(self, *args, **kwargs):
        """Called as the module's `forward`. Only in here does the module have parameters."""
        self.full = None  # old values, if the last backward has not reached `Gather.backward`
        params = Gather.apply(self.shard, self)
        # a checkpoint() around the unit saves only its inputs, and calls `run` again in backward
        hooks = nullcontext() if is_in_checkpoint() else saved_tensors_hooks(self.pack, self.unpack)
        with lend_parameters(self.owners, params), hooks:
            output = self.module_forward(*args, **kwargs)
        self.full = None  # frees it: `pack` has kept no reference for backward
        return output

    def pack(self, tensor: Tensor) -> Tensor | Place:
        """Called when forward saves a tensor for backward. Of a parameter, keep only the place."""
        place = place_in(self.full, tensor)
        # detached: a node that saved its own output would form a reference cycle
        return tensor.detach() if place is None else place

    def unpack(self, saved: Tensor | Place) -> Tensor:
        """Called when backward needs a saved tensor. For a parameter, gather the unit again."""
        return self.unshard().as_strided(*saved) if isinstance(saved, Place) else saved

    @torch.inference_mode(False)  # under it, `full` would have no version counter
    def unshard(self) -> Tensor:
        """All-gather the parameters, unless they are here. Returns them: [N * length]."""
        if self.full is None:
            self.full = self.shard.new_empty(self.n_ranks * len(self.shard))
            all_gather_single(self.full, self.shard.detach(), group=self.group)
        return self.full


class Gather(torch.autograd.Function):
    """A unit's parameters as a function of the ranks' shards; its backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx, shard: Tensor, unit: Unit) -> tuple[Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)  # a missing gradient is None, and so an error
        *chunks, _ = unit.unshard().split(unit.sizes)  # the all-gather
        return tuple(c.view(s) for c, s in zip(chunks, unit.shapes.values(), strict=True))

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor, None]:
        """Autograd calls it when it has all gradients of the unit."""
        unit = ctx.unit
        unit.full = None  # backward is done with the parameters
        padding = grads[0].new_zeros(unit.sizes[-1])
        flat = torch.cat([*(grad.flatten() for grad in grads), padding])
        owned = flat[unit.owned]
        reduce_scatter_single(owned, flat, group=unit.group)
        # The average, which autograd adds to `shard.grad`. A bucket divides before the sum, while
        # it copies; here that would be one more pass over `flat`, N times as long as `owned`.
        return owned / unit.n_ranks, None


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def training_state(model: nn.Module, optimizer: ZeroRedundancyOptimizer | ZeroStage3) -> State:
    """The tensors of a checkpoint, by the plain model's names; sharded ones as `Shard`s."""
    state: State = {}
    if optimizer.zero_stage == 3:
        for unit in optimizer.units:
            tensors = tensors_of(optimizer.optimizer, unit.shard)
            state |= state_of_flat_tensors(tensors, unit.shapes, unit.owned.start)
        return state
    names = {p: name for name, p in model.named_parameters()}
    for bucket in optimizer.buckets:
        tensors = tensors_of(optimizer.optimizer, bucket.shard)
        shapes = {names[p]: p.shape for p in bucket.params}
        state |= state_of_flat_tensors(tensors, shapes, bucket.owned.start)
    # every rank loads the full parameters, not only its shards of them
    return state | {f"model.{name}": p.detach() for p, name in names.items()}


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
    settings = adamw_settings(args.lr, args.weight_decay)
    if args.zero_stage == 3:
        optimizer = ZeroStage3(model, torch.optim.AdamW, model.units(), **settings)
    else:
        zero = ZeroStage2 if args.zero_stage == 2 else ZeroRedundancyOptimizer
        settings["bucket_cap_mb"] = args.bucket_cap_mb
        optimizer = zero(model, torch.optim.AdamW, **settings)
    guard(model, optimizer)

    run = Run(args, __file__, config, device, corpus)
    state = training_state(model, optimizer)
    first_step = run.checkpoints.load(args.resume, state, optimizer.optimizer)
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
        if run.agree_to_save_or_stop(step):
            run.checkpoints.save(step + 1, state, args.keep_checkpoints)
    return run.finish(state)


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
