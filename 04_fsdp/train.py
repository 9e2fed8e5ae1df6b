"""Stage 04: fully sharded data parallelism (FSDP): ZeRO stage 3 with prefetching.

Every rank owns a shard of each unit's parameters, gradients and optimizer state. The parameters of
a unit (here a layer) are all-gathered while the previous unit computes (prefetch), and freed right
after use. In backward, the reduce-scatter of one unit's gradients overlaps with the computation of
the next unit's.

New since stage 03: prefetching; the model is built on the meta device and filled unit by unit, so
that no rank ever holds all of it; shards are float32, but unsharded parameters and gradients may be
bfloat16; with --shard-size, groups of ranks shard the model and are replicas of each other (hybrid
sharding); shards may be kept on the CPU.

    P parameters, N ranks that shard, m micro-batches per step, E the embedding; float32

    memory per rank     16 P / N bytes + two unsharded units + in backward two units' full gradients
    communication       reduce-scatter m P + all-gather m (2 P - E) elements per step;
                        without resharding after forward all-gather m P;
                        hybrid sharding adds an all-reduce of P / N

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
from common.units import NoGradient, cast_inputs, forbid_copies, is_lookup, parameters_by_unit

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
# The technique: flat parameters, unsharded unit by unit
# ------------------------------------------------------------------------------------------------


class FullyShardedDataParallel(nn.Module):
    """Shard a module's parameters, gradients and optimizer state; unshard them unit by unit.

    The contract, which is checked. `units` are modules that each forward of `module` runs once, in
    this order, and each returns one tensor. Each parameter is in exactly one unit, trains, and has
    the common dtype. Every backward reaches every parameter. With replicas, all micro-batches of a
    step but the last are under `no_sync()`. A step is `finish_gradient_synchronization()`,
    `clip_grad_norm_()`, `optimizer.step()`, `optimizer.zero_grad(set_to_none=True)`.

    module: equal on all ranks, or on the meta device with a `materialize(unit, name)` that gives
    one unit's parameters memory and values. shard_group: the N ranks that shard each unit.
    replicate_group: the ranks that hold the same shard, for hybrid sharding. param_dtype: of the
    unsharded parameters, None: their own. reduce_dtype: of the gradients that are reduced, None:
    `param_dtype`. cpu_offload: keep the shards on the CPU.

    `parameters()` are this rank's shards. PyTorch's `clip_grad_norm_` would take their norm alone.
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
        object.__setattr__(self, "module", module)  # unregistered: its parameters are not ours
        self.group, self.param_dtype = shard_group, param_dtype
        self.reshard_after_forward = reshard_after_forward
        device = device or next(module.parameters()).device
        shard_device = "cpu" if cpu_offload else device
        groups, dtypes = (shard_group, replicate_group), (param_dtype, reduce_dtype)
        self.buckets: list[FlatParameter] = []  # one per unit, the last layer first: as in backward
        # each unit gets its values and is sharded before the next one: no rank holds the full model
        for name, unit, params in parameters_by_unit(module, units, materialize):
            bucket = FlatParameter(name, unit, params, groups, dtypes, device, shard_device)
            self.register_parameter(f"shard_{len(self.buckets)}", bucket.shard)
            self.buckets.insert(0, bucket)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.next_in_forward = {b: a for a, b in pairwise(self.buckets)}
        self.next_in_backward = {a: b for a, b in pairwise(self.buckets) if b.unshards_in_backward}
        self.launched = 0  # how many buckets' reductions this backward has started
        self.in_flight: FlatParameter | None = None  # whose reduction was started last
        self.next_to_run: FlatParameter | None = None  # whose unit runs next in this forward
        self.entered: FlatParameter | None = None  # whose unit this backward has entered last
        self.synchronizes, self.in_backward = True, False
        for param in self.bucket_of:
            param.register_post_accumulate_grad_hook(self.mark_ready)
        self.register_hooks(module, units)
        forbid_copies(self)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> FullyShardedDataParallel:
        self.module.train(mode)  # it is unregistered, so `super().train` does not reach it
        return super().train(mode)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Start no all-reduce over replicas. Each micro-batch is reduce-scattered."""
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def mark_ready(self, param: nn.Parameter) -> None:
        """Called by autograd in backward, when it has accumulated a gradient into `param.grad`."""
        self.begin_backward()
        bucket = self.bucket_of[param]
        if param not in bucket.waiting_for:
            raise RuntimeError(
                "a gradient came twice: the last backward left out a parameter, or a checkpoint() "
                "needs use_reentrant=False"
            )
        bucket.collect(param)
        bucket.waiting_for.remove(param)
        self.launch_ready_buckets()

    def launch_ready_buckets(self) -> None:
        """Start to reduce the next buckets that are ready.

        Buckets are launched strictly in order: ranks may finish gradients in different orders, but
        collectives are matched by the order of the calls. Each launch finishes the previous
        reduction, so that at most two buckets have full gradients.
        """
        while self.launched < len(self.buckets) and not self.buckets[self.launched].waiting_for:
            previous, self.in_flight = self.in_flight, self.buckets[self.launched]
            self.in_flight.start_reduction()
            if previous is not None:
                previous.finish_reduction()  # after the launch: the network is busy meanwhile
                if self.synchronizes and self.launched > 0:  # at 0 it awaits this backward too
                    previous.start_all_reduce()
            self.launched += 1
        if self.launched == len(self.buckets):  # every gradient has arrived: backward has ended
            self.launched, self.in_backward, self.entered = 0, False, None
            for bucket in self.buckets:
                bucket.waiting_for = set(bucket.params)

    def begin_backward(self) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True: the reduced gradients have no graph")
        self.in_backward = True

    def finish_gradient_synchronization(self) -> None:
        """After the last backward of a step: wait until each shard has its average gradient."""
        if self.in_backward:
            missing = ", ".join(bucket.name for bucket in self.buckets if bucket.waiting_for)
            raise RuntimeError(f"backward has not reached every parameter of unit {missing}")
        for bucket in self.buckets:
            bucket.finish_reduction()
            bucket.start_all_reduce()
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

    # ---- hooks: unshard a unit's parameters while it computes, and the next unit's ahead ----

    def register_hooks(self, module: nn.Module, units: list[nn.Module]) -> None:
        module.register_forward_pre_hook(self.begin_forward)
        for unit, bucket in zip(units, self.buckets[::-1], strict=True):
            unit.register_forward_pre_hook(partial(self.before_forward, bucket), with_kwargs=True)
            unit.register_forward_hook(partial(self.after_forward, bucket))
        module.register_forward_hook(self.end_forward)
        for each in (module, *units):
            forbid_copies(each)

    def begin_forward(self, module: nn.Module, args) -> None:
        if self.in_backward:
            raise RuntimeError(
                "the last backward failed, or has not reached every parameter: restart the run. "
                "Or a checkpoint() contains more than one unit"
            )
        for bucket in self.buckets:
            bucket.reshard()  # left by a backward; by a forward without one it may be stale
        self.next_to_run = self.buckets[-1]

    def before_forward(self, bucket: FlatParameter, unit: nn.Module, args, kwargs):
        if bucket is not self.entered:  # else activation checkpointing recomputes it in backward
            if bucket is not self.next_to_run:
                raise RuntimeError(f"{bucket.name}: a forward runs each unit once, in their order")
            self.next_to_run = self.next_in_forward.get(bucket)
        bucket.unshard()
        self.prefetch(self.next_to_run)
        bucket.wait()
        return cast_inputs(args, kwargs, self.param_dtype)

    def after_forward(self, bucket: FlatParameter, unit: nn.Module, args, output) -> Tensor | None:
        own = bucket.full.untyped_storage()
        if not isinstance(output, Tensor) or output.untyped_storage() is own:
            raise TypeError(f"unit {bucket.name} returns {type(output)}, not one tensor of its own")
        if bucket is self.entered:
            return None  # recomputed: backward needs the parameters
        if self.reshard_after_forward or not torch.is_grad_enabled():
            bucket.reshard()
        if not torch.is_grad_enabled():
            return None
        # Autograd runs last what forward computed first. The view is computed after everything in
        # the unit, an auxiliary loss included, so backward reaches it first. An operation in place
        # on the view would remove its hook, but not that of `output`.
        view = output.view_as(output)
        for tensor in (view, output):
            tensor.register_hook(partial(self.before_backward, bucket, bucket.shard._version))
        return view

    def end_forward(self, module: nn.Module, args, output) -> None:
        if self.next_to_run is not None:
            raise RuntimeError(f"{self.next_to_run.name}: a forward has to run each unit once")

    def before_backward(self, bucket: FlatParameter, version: int, grad: Tensor) -> None:
        """The gradient of the unit's output has been computed: the unit's backward is next."""
        self.begin_backward()
        if bucket.shard._version != version:
            raise RuntimeError("backward through a graph from before the optimizer's last step")
        self.entered = bucket
        if bucket in self.next_in_forward:  # backward has left the unit that ran after this one
            self.next_in_forward[bucket].reshard()
        if bucket.unshards_in_backward:
            bucket.unshard()
            self.prefetch(self.next_in_backward.get(bucket))
            bucket.wait()

    def prefetch(self, neighbour: FlatParameter | None) -> None:
        """Start to unshard the next unit: its all-gather overlaps with this unit's computation."""
        if neighbour is not None:
            neighbour.unshard()


class FlatParameter:
    """A unit's parameters side by side in one flat buffer, of which each rank owns an equal shard.

    shard: [length], the part that this rank's optimizer updates, in the parameters' own dtype.
    full: [N * length], padded, in `param_dtype`; has memory only while unsharded. The parameters
    are views into it then, and NaN otherwise. grads: [N * length] in `reduce_dtype`, in backward.
    average: [length], the sum of the averages of this step's micro-batches so far.
    waiting_for: the parameters whose gradients this backward has not finished yet.
    """

    def __init__(self, name, unit, params, groups, dtypes, device, shard_device):
        self.name, self.params = name, params
        (self.group, self.replicate_group), (param_dtype, reduce_dtype) = groups, dtypes
        n_shards, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.n_replicas = dist.get_world_size(self.replicate_group) if self.replicate_group else 1
        self.n_ranks = n_shards * self.n_replicas
        flat = torch.cat([p.detach().flatten() for p in self.params])
        length = -(-len(flat) // n_shards)  # of a shard, rounded up
        self.owned = slice(rank * length, (rank + 1) * length)
        self.padding = n_shards * length - len(flat)
        shard = F.pad(flat, (0, self.padding))[self.owned].to(shard_device, copy=True)
        self.shard = nn.Parameter(shard)
        self.views = {p: p.detach() for p in self.params}  # where they are, checked when they move
        self.grads: Tensor | None = None
        self.average: Tensor | None = None
        self.waiting_for = set(self.params)
        self.reduction: Work | None = None  # the reduce-scatter in flight
        self.replication: Work | None = None  # the all-reduce in flight
        self.incomplete = NoGradient(self.shard)  # in place of `shard.grad` until the step ends
        self.expected_grad: NoGradient | None = None  # what `shard.grad` is before a micro-batch
        self.allocate_full(unit, param_dtype, device)
        self.reduce_dtype = reduce_dtype or self.full.dtype

    def views_into(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        sizes = [p.numel() for p in self.params]
        chunks = flat[: sum(sizes)].split(sizes)
        return {p: chunk.view(p.shape) for p, chunk in zip(self.params, chunks, strict=True)}

    def point_parameters_to(self, views: dict[nn.Parameter, Tensor]) -> None:
        if any(param.data_ptr() != view.data_ptr() for param, view in self.views.items()):
            raise RuntimeError("freeze, move or cast parameters before they are sharded")
        for param, view in views.items():
            param.data = view
        self.views = views

    def collect(self, param: nn.Parameter) -> None:
        """Move the gradient of `param` into the buffer."""
        self.check_gradient(self.expected_grad)
        self.finish_reduction()  # of the previous micro-batch, if it is still in flight
        self.copy_gradient(param)
        param.grad = None

    def copy_gradient(self, param: nn.Parameter) -> None:
        if self.grads is None:
            self.grads = torch.empty_like(self.full, dtype=self.reduce_dtype)
            self.grad_views = self.views_into(self.grads)
        self.grad_views[param].copy_(param.grad)

    def check_gradient(self, expected: Tensor | None) -> None:
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
        self.shard.grad = self.expected_grad = self.incomplete

    def finish_reduction(self) -> None:
        """Add the average to that of earlier micro-batches and free the full gradients."""
        if self.reduction is None:
            return
        self.reduction.wait()
        average = self.grads[self.owned].to(self.shard) / self.n_ranks  # in the shard's dtype
        self.average = average if self.average is None else self.average.add_(average)
        self.reduction = self.grads = self.grad_views = None

    def finish_step(self) -> None:
        """Give the optimizer the average, and free the parameters that it is about to update."""
        if self.replication is not None:
            self.replication.wait()
            self.replication = None
        if self.average is not None:
            self.check_gradient(self.incomplete)
            self.shard.grad, self.average, self.expected_grad = self.average, None, None
        self.reshard()

    def allocate_full(self, unit: nn.Module, dtype: torch.dtype | None, device) -> None:
        """Create the buffer of the full parameters, without memory until the first `unshard`."""
        lookup = is_lookup(unit)
        self.unshards_in_backward = not lookup  # the gradient of a lookup needs no weights
        dtype = None if lookup else dtype  # its gradient is a sum over many tokens: not in bfloat16
        numel = dist.get_world_size(self.group) * len(self.shard)
        self.full = torch.empty(numel, dtype=dtype or self.shard.dtype, device=device)
        self.full_views = self.views_into(self.full)
        nan = torch.full((), torch.nan, dtype=self.full.dtype, device=device)
        self.freed_views = {p: nan.expand(p.shape) for p in self.params}
        self.gathering: Work | None = None  # the all-gather in flight
        self.versions = {p: p._version for p in self.params}  # counts changes in place
        self.point_parameters_to(self.freed_views)
        self.full.untyped_storage().resize_(0)

    def unshard(self) -> None:
        """Start the all-gather that fills `full`, unless it is there or in flight.

        Tensors saved for backward share this storage, so it is resized and filled in place.
        """
        storage = self.full.untyped_storage()
        if storage.nbytes() == 0:
            if any(p._version != version for p, version in self.versions.items()):
                raise RuntimeError("a parameter has been changed in place: only shards may change")
            storage.resize_(self.full.numel() * self.full.element_size())
            self.point_parameters_to(self.full_views)
            # cast before it is sent: in bfloat16 that is half the bytes
            self.sent = self.shard.detach().to(self.full, non_blocking=True)
            self.gathering = all_gather_single(self.full, self.sent, self.group, async_op=True)

    def wait(self) -> None:
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = self.sent = None  # `sent` has to live until here

    def reshard(self) -> None:
        """Free the full parameters: the storage shrinks to nothing until the next `unshard`.

        Meanwhile the parameters are NaN: reading freed memory could end the process.
        """
        if self.full.untyped_storage().nbytes() > 0:
            self.wait()
            self.full.untyped_storage().resize_(0)
            self.point_parameters_to(self.freed_views)

    # ---- hybrid sharding: all-reduce the shards' gradients over the replicas ----

    def start_all_reduce(self) -> None:
        """Start to all-reduce the average: once per step, after the last micro-batch."""
        if self.n_replicas > 1 and self.average is not None and self.replication is None:
            self.expected_grad = None  # `collect` raises for another micro-batch
            average, group = self.average, self.replicate_group
            self.replication = all_reduce(average, group=group, async_op=True)


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def sharded_from_meta(model: Transformer, args, world: World) -> FullyShardedDataParallel:
    """Shard a model that is on the meta device; its units get their initial values one by one."""
    mesh = (world.size // args.shard_size, args.shard_size)
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
    names = {p: name for name, p in model.module.named_parameters()}
    state: State = {}
    for bucket in model.buckets:
        shapes = {names[p]: p.shape for p in bucket.params}
        state |= state_of_flat_shard(optimizer, bucket.shard, shapes, bucket.owned.start)
    return state


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument(
        "--shard-size", type=positive_int, default=world_size(), help="ranks that shard a unit"
    )
    parser.add_argument("--param-dtype", choices=("float32", "bfloat16"), help="default: --dtype")
    parser.add_argument("--reduce-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--no-reshard-after-forward", action="store_true", help="until backward")
    parser.add_argument("--cpu-offload", action="store_true", help="shards and AdamW on the CPU")
    parser.add_argument("--timeout", type=seconds, default=600, help="collective timeout, seconds")
    args = check_arguments(parser.parse_args(argv), data_parallel_size=world_size())
    if world_size() % args.shard_size:
        fail(f"--shard-size {args.shard_size} does not divide the {world_size()} ranks")
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

    config = model_config(args, corpus.vocab)
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
