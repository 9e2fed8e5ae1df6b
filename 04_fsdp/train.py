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

What only other modules and training loops need stands in common/wrapping.py and common/guards.py.
On a first reading skip `inputs`, `some_are_hidden` and `drop_failed_backward`, and take `pending`
for `shard.grad`.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.

Run it:

    torchrun --nproc-per-node 2 04_fsdp/train.py --data sample --steps 100
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count, pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from common.arguments import base_parser, check_arguments, model_config, positive_int, seconds
from common.checkpoint import State, state_of_flat_shard
from common.collectives import (
    all_gather_single,
    all_reduce,
    all_reduce_control,
    reduce_scatter_single,
)
from common.data import eval_batches, load_corpus, train_batches
from common.distributed import World, cleanup, fail, group_along, setup, world_size
from common.guards import ModuleOfShards, PendingGradient
from common.model import IGNORED, Transformer, init_weights
from common.optimization import adamw_settings, global_norm, learning_rate, set_learning_rate
from common.run import Run
from common.wrapping import (
    Parameters,
    cast_inputs,
    inputs_of,
    is_lookup,
    not_a_number,
    outputs_of,
    parameters_by_unit,
    unsharded_dtype,
)

# ------------------------------------------------------------------------------------------------
# The technique: flat parameters, unsharded unit by unit
# ------------------------------------------------------------------------------------------------


class FullyShardedDataParallel(ModuleOfShards):
    """Shard a module's parameters, gradients and optimizer state; unshard them unit by unit.

    module: the same on every rank, or on the meta device with a `materialize(unit, name)` that
    gives one unit's parameters memory and values. units: the modules that are unsharded one at a
    time, in the order of forward; None: the module's children. shard_group: the N ranks that shard
    each unit. replicate_group: the ranks that hold the same shard, for hybrid sharding.
    param_dtype: of the unsharded parameters, None: their own. reduce_dtype: of the gradients that
    are reduced, None: `param_dtype`. cpu_offload: keep the shards on the CPU.

    A step ends with `finish_gradient_synchronization` and this class's `clip_grad_norm_`: PyTorch's
    sees this rank's shards only. All ranks must use the same parameters, because collectives are
    matched by order. A parameter that a backward did not use has a zero gradient, and delays its
    own and all earlier units until backward ends.
    """

    def __init__(
        self,
        module: nn.Module,
        units: list[nn.Module] | None = None,
        shard_group: ProcessGroup | None = None,
        replicate_group: ProcessGroup | None = None,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        materialize: Callable[[nn.Module, str], None] | None = None,
        device: torch.device | None = None,
        cpu_offload: bool = False,
    ):
        super().__init__(module)
        self.group = shard_group
        self.param_dtype, self.reshard_after_forward = param_dtype, reshard_after_forward
        device = device or next(module.parameters()).device
        shard_device = "cpu" if cpu_offload else device
        groups, dtypes = (shard_group, replicate_group), (param_dtype, reduce_dtype)
        self.flats: list[FlatParameter] = []
        # each unit gets its values and is sharded before the next one: no rank holds the full model
        for unit, params in parameters_by_unit(module, units, materialize):
            self.flats.append(FlatParameter(unit, params, groups, dtypes, device, shard_device))
        self.flats.sort(key=lambda flat: flat.unit is not module)  # forward enters `module` first
        for i, flat in enumerate(self.flats):
            self.register_parameter(f"shard_{i}", flat.shard)
            self.register_hooks(flat.unit, flat)
        self.buckets = [f for f in self.flats[::-1] if f.shard.requires_grad]  # last layer first
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.next_in_forward = dict(pairwise(self.flats))
        self.next_in_backward = {b: a for a, b in pairwise(self.flats) if a.unshards_in_backward}
        self.launched = 0  # how many buckets' reductions have started
        self.has_new_gradients = False  # since the last `end_backward`
        self.finished: list[FlatParameter] = []  # gradients complete, not yet resharded
        self.turns = count()  # numbers the units in the order of forward
        self.synchronizes, self.in_forward, self.in_backward = True, False, False
        for param in self.bucket_of:
            param.register_post_accumulate_grad_hook(self.mark_ready)

    def forward(self, *args, **kwargs):
        self.check_requires_grad()
        self.drop_failed_backward()
        if not self.in_backward:  # activation checkpointing may recompute the whole forward there
            for flat in self.flats:
                flat.reshard()  # after a forward without backward: stale since the optimizer's step
        self.in_forward = True
        try:
            return self.module(*args, **kwargs)
        finally:
            self.in_forward = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Start no all-reduce over replicas: every micro-batch is reduce-scattered all the same."""
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def register_hooks(self, unit: nn.Module, flat: FlatParameter) -> None:
        unit.register_forward_pre_hook(partial(self.before_forward, flat), with_kwargs=True)
        unit.register_forward_hook(partial(self.after_forward, flat), with_kwargs=True)

    def before_forward(self, flat: FlatParameter, module: nn.Module, args, kwargs):
        if not self.in_forward and not self.in_backward:
            flat.reshard()  # a unit called alone: what is unsharded may be stale
        flat.unshard()
        if self.in_forward:  # not where backward recomputes, nor for a unit called alone
            self.prefetch(self.next_in_forward.get(flat))
        flat.wait()
        flat.turn = next(self.turns)
        args, kwargs = cast_inputs(args, kwargs, self.param_dtype)
        flat.inputs = inputs_of(args, kwargs)
        return args, kwargs

    def after_forward(self, flat: FlatParameter, module: nn.Module, args, kwargs, output) -> None:
        inputs, flat.inputs = flat.inputs, []  # dropping them frees activations
        if flat.in_backward:
            return  # activation checkpointing has recomputed forward: backward needs the parameters
        outputs, some_are_hidden = outputs_of(module, args, kwargs, output, inputs)
        if not torch.is_grad_enabled() or (self.reshard_after_forward and not some_are_hidden):
            flat.reshard()
        for tensor in outputs:
            tensor.register_hook(partial(self.before_backward, flat))

    def before_backward(self, flat: FlatParameter, _: Tensor) -> None:
        """The gradient of the unit's output has been computed: the unit's backward is next."""
        self.queue_end_backward()
        self.reshard_finished_units(flat)  # first: `unshard` can reuse their memory
        flat.in_backward = True  # until `reshard`
        if flat.unshards_in_backward:
            flat.unshard()
            self.prefetch(self.next_in_backward.get(flat))
            flat.wait()

    def prefetch(self, neighbour: FlatParameter | None) -> None:
        """Start to unshard the next unit: its all-gather overlaps with this unit's computation."""
        if neighbour is not None:
            neighbour.unshard()

    def reshard_finished_units(self, entered: FlatParameter) -> None:
        """Free the finished units that forward ran after `entered`: backward has left them.

        Complete gradients do not prove that it has: where a unit also uses `weight.detach()`,
        backward may still read its parameters.
        """
        finished, self.finished = self.finished, []
        for flat in finished:
            # entering the whole module, or another flat of the same unit, does not leave this one
            if flat.turn > entered.turn and entered.unit not in (flat.unit, self.module):
                flat.reshard()
            else:
                self.finished.append(flat)
        if not entered.waiting_for:  # frozen: `mark_ready` will not add it
            self.finished.append(entered)

    def mark_ready(self, param: nn.Parameter) -> None:
        """Called by autograd in backward, when it has accumulated a gradient into `param.grad`."""
        bucket = self.bucket_of[param]
        if param not in bucket.waiting_for:
            raise RuntimeError("a gradient came twice: use checkpoint(..., use_reentrant=False)")
        bucket.collect(param, divide_by=bucket.n_ranks)
        self.has_new_gradients = True
        self.queue_end_backward()
        bucket.waiting_for.remove(param)
        if not bucket.waiting_for:
            self.finished.append(bucket)
        self.launch_ready_buckets()

    def launch_ready_buckets(self, backward_has_ended: bool = False) -> None:
        """Start to reduce the next buckets that are ready; after backward, all that remain.

        Buckets are launched strictly in order: ranks may finish gradients in different orders, but
        collectives are matched by the order of the calls. Each launch finishes the previous
        reduction, so that at most two buckets have full gradients.
        """
        while self.launched < len(self.buckets):
            bucket = self.buckets[self.launched]
            if bucket.waiting_for and not backward_has_ended:
                return
            bucket.start_reduction()
            previous = self.buckets[self.launched - 1]  # -1: the last one of the previous backward
            previous.finish_reduction()  # after the launch: the network is busy during the wait
            if self.synchronizes and self.launched > 0:  # at 0 this backward will still add to it
                previous.start_replicating()
            self.launched += 1

    def queue_end_backward(self) -> None:
        if not self.in_backward:
            if torch.is_grad_enabled():
                raise RuntimeError("create_graph=True: the reduced gradients have no graph")
            self.in_backward = True
            # no public hook runs when the whole backward has ended; PyTorch's DDP uses this one
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def end_backward(self) -> None:
        """Launch the buckets that unused parameters have delayed, and reset."""
        if self.has_new_gradients:
            self.launch_ready_buckets(backward_has_ended=True)
        self.launched, self.in_backward, self.has_new_gradients = 0, False, False
        self.finished.clear()
        for flat in self.flats:
            flat.waiting_for = set(flat.params) if flat.shard.requires_grad else set()
            flat.reshard()

    def finish_gradient_synchronization(self) -> None:
        """After the last backward of a step: wait until each shard has its average gradient."""
        for bucket in self.buckets:
            bucket.finish_reduction()
            bucket.start_replicating()
        for bucket in self.buckets:
            bucket.finish_replicating()

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

    def training_state(self, optimizer: torch.optim.Optimizer) -> State:
        """The tensors of a checkpoint, by the plain model's names; sharded ones as `Shard`s."""
        state: State = {}
        for flat in self.flats:
            state |= state_of_flat_shard(optimizer, flat.shard, flat.shapes, flat.owned.start)
        return state

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The full parameters by name, in their own dtype, on the CPU of every rank."""
        state = {}
        for flat in self.flats:
            full = torch.empty_like(flat.full, dtype=flat.shard.dtype)
            all_gather_single(full, flat.shard.to(full.device), group=self.group)
            views = flat.views_into(full.cpu()).values()
            state |= {name: v.clone() for name, v in zip(flat.shapes, views, strict=True)}
        return state


class FlatParameter:
    """A unit's parameters side by side in one flat buffer, of which each rank owns an equal shard.

    shard: [length], the part that this rank's optimizer updates, in the parameters' own dtype.
    full: [N * length], padded, in `param_dtype`; has memory only while unsharded. The parameters
    are views into it then, and NaN otherwise. grads: [N * length] in `reduce_dtype`, in backward.
    waiting_for: the parameters whose gradients this backward has not finished yet.
    """

    def __init__(self, unit, params: Parameters, groups, dtypes, device, shard_device):
        self.unit, self.params = unit, list(params.values())
        self.shapes = {name: p.shape for name, p in params.items()}
        (self.group, self.replicate_group), (param_dtype, reduce_dtype) = groups, dtypes
        n_shards, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.n_replicas = dist.get_world_size(self.replicate_group) if self.replicate_group else 1
        self.n_ranks = n_shards * self.n_replicas
        flat = torch.cat([p.detach().flatten() for p in self.params])
        length = -(-len(flat) // n_shards)  # of a shard, rounded up
        self.owned = slice(rank * length, (rank + 1) * length)
        self.padding = n_shards * length - len(flat)
        shard = F.pad(flat, (0, self.padding))[self.owned].to(shard_device, copy=True)
        self.shard = nn.Parameter(shard, requires_grad=self.params[0].requires_grad)
        self.grads: Tensor | None = None
        self.waiting_for = set(self.params) if self.shard.requires_grad else set()
        self.reduction: Work | None = None  # the collective in flight
        self.replicating: Work | None = None
        self.pending: PendingGradient | None = None  # `shard.grad` while a collective is in flight
        self.is_replicated = False  # whether this step's `replicating` has started
        self.allocate_full(unit, param_dtype, device)
        self.reduce_dtype = reduce_dtype or self.full.dtype

    def views_into(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        sizes = [p.numel() for p in self.params]
        chunks = flat[: sum(sizes)].split(sizes)
        return {p: chunk.view(p.shape) for p, chunk in zip(self.params, chunks, strict=True)}

    def collect(self, param: nn.Parameter, divide_by: int = 1) -> None:
        self.before_accumulation()
        self.finish_reduction()  # of the previous backward, if it is still in flight
        self.copy_gradient(param, divide_by)
        param.grad = None  # a view would keep the buffer alive after the reduction

    def copy_gradient(self, param: nn.Parameter, divide_by: int) -> None:
        """Copy the gradient of `param` into the buffer. A missing gradient counts as zero.

        Dividing by the number of ranks here, before the sum over the ranks, makes the sum the
        average. Where the dtypes agree, one pass over the memory copies and divides.
        """
        if self.grads is None:
            self.grads = torch.empty_like(self.full, dtype=self.reduce_dtype)
            self.grads[len(self.grads) - self.padding :].zero_()  # the norm counts padding
            self.grad_views = self.views_into(self.grads)
        view = self.grad_views[param]
        if param.grad is None:
            view.zero_()
        elif param.grad.dtype != view.dtype:
            view.copy_(param.grad).div_(divide_by)  # divided in the dtype of the buffer
        elif param.grad is not view or divide_by > 1:
            torch.div(param.grad, divide_by, out=view)  # copies and divides, or divides in place

    def start_reduction(self) -> None:
        """Start the reduce-scatter: the sum over the ranks replaces this rank's part of `grads`."""
        for param in self.waiting_for:  # unused in the last backward; earlier ones may have added
            self.collect(param, divide_by=self.n_ranks)
        owned = self.grads[self.owned]
        self.reduction = reduce_scatter_single(owned, self.grads, group=self.group, async_op=True)
        self.pending = PendingGradient(self.shard)

    def finish_reduction(self) -> None:
        """Add the average to `shard.grad` and free the full gradients."""
        if self.reduction is None:
            return
        self.reduction.wait()
        self.pending.add(self.grads[self.owned].to(self.shard))
        self.reduction = self.grads = self.grad_views = self.pending = None

    def allocate_full(self, unit: nn.Module, dtype: torch.dtype | None, device) -> None:
        """Create the buffer of the full parameters, without memory until the first `unshard`."""
        # the gradient of a lookup does not depend on the weights (they must not be used otherwise)
        self.unshards_in_backward = not is_lookup(unit, self.params)
        dtype = unsharded_dtype(unit, self.params, dtype)
        numel = dist.get_world_size(self.group) * len(self.shard)
        self.full = torch.empty(numel, dtype=dtype, device=device)
        self.full_views = self.views_into(self.full)
        nan = not_a_number(dtype, device)  # what a parameter reads as while it is freed
        self.freed_views = {p: nan.expand(p.shape) for p in self.params}
        self.gathering: Work | None = None
        self.turn = 0  # of the unit's last forward
        self.reshard()

    def unshard(self) -> None:
        """Start the all-gather that fills `full`, unless it is there or in flight.

        Tensors saved for backward are views into this buffer, so its storage is resized in place.
        It is written through `.data`: otherwise autograd would report those tensors as modified.
        """
        storage = self.full.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.full.numel() * self.full.element_size())
            self.point_parameters_to(self.full_views)
            out, self.sent = self.full.data, self.shard.detach().to(self.full, non_blocking=True)
            self.gathering = all_gather_single(out, self.sent, group=self.group, async_op=True)

    def wait(self) -> None:
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = self.sent = None  # `sent` has to live until here

    def reshard(self) -> None:
        """Free the full parameters: the storage shrinks to nothing until the next `unshard`."""
        if self.full.untyped_storage().nbytes() > 0:
            self.wait()
            self.full.untyped_storage().resize_(0)
            self.point_parameters_to(self.freed_views)
        self.in_backward, self.inputs = False, []  # a failed forward has left inputs

    def point_parameters_to(self, views: dict[nn.Parameter, Tensor]) -> None:
        for param, view in views.items():
            param.data = view

    # ---- hybrid sharding: all-reduce the shards' gradients over the replicas ----

    def start_replicating(self) -> None:
        """Start the all-reduce: once per step, after the last micro-batch."""
        grad = self.shard.grad
        if self.n_replicas > 1 and grad is not None and not self.is_replicated:
            self.is_replicated, self.pending = True, PendingGradient(self.shard)
            self.replicating = all_reduce(grad, group=self.replicate_group, async_op=True)

    def finish_replicating(self) -> None:
        if self.replicating is not None:
            self.replicating.wait()
            self.pending.zero_again()
            self.replicating = self.pending = None

    def before_accumulation(self) -> None:
        """Raise an error if a backward would add to gradients that are averaged already."""
        if self.is_replicated:
            self.finish_replicating()
            if self.shard.grad is not None and self.shard.grad.any():
                raise RuntimeError("all micro-batches but the last of a step belong in no_sync()")
            self.is_replicated = False


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


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument(
        "--shard-size", type=positive_int, default=world_size(), help="ranks that shard a unit"
    )
    parser.add_argument("--param-dtype", choices=("float32", "bfloat16"), help="default: --dtype")
    parser.add_argument("--reduce-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--no-reshard-after-forward", action="store_true", help="until backward")
    parser.add_argument("--cpu-offload", action="store_true", help="shards and AdamW on the CPU")
    parser.add_argument("--timeout", type=seconds, default=600, help="seconds until a hang ends")
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
    state = model.training_state(optimizer)
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
