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
    fills and one that is being reduced. Gloo adds a receive buffer for each reduction in flight.

What only other modules and training loops need stands in common/wrapping.py and common/guards.py.
On a first reading skip `inputs`, `some_are_hidden` and the methods `guard`, `check_parameters`,
`before_accumulation`, `hide_gradients` and `drop_...`.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
sections 5 (P_os, P_os+g, P_os+g+p) and 7 (communication).

Run it:

    torchrun --nproc-per-node 2 03_zero/train.py --zero-stage 2 --data sample --steps 100
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from common.arguments import base_parser, check_arguments, model_config, seconds
from common.checkpoint import State, state_of_flat_shard
from common.collectives import (
    all_gather_single,
    all_reduce_control,
    broadcast,
    reduce_scatter_single,
)
from common.data import eval_batches, load_corpus, train_batches
from common.distributed import World, cleanup, setup, world_size
from common.guards import GuardedBucket, OptimizerOfShards, no_state_dict
from common.model import IGNORED, Transformer, init_weights
from common.optimization import adamw_settings, global_norm, learning_rate, set_learning_rate
from common.run import Run
from common.wrapping import (
    cast_inputs,
    inputs_of,
    is_lookup,
    not_a_number,
    outputs_of,
    parameters_by_unit,
    unsharded_dtype,
)

# ------------------------------------------------------------------------------------------------
# The technique: flat buckets, each rank owns a shard of every one
# ------------------------------------------------------------------------------------------------


class ZeroRedundancyOptimizer(OptimizerOfShards):
    """Shard an element-wise optimizer across the data-parallel ranks: ZeRO stages 1, 2 and 3.

    params: parameters or parameter groups, the same on every rank. optimizer_class: for instance
    torch.optim.AdamW; defaults: its keyword arguments. zero_stage: 1 shards the optimizer state,
    2 the gradients as well, 3 the parameters as well. With stage 3 the parameters of each unit (a
    module whose parameters are gathered together) are a group, and `shard_parameters` is called
    once before training. bucket_cap_mb: the most MB of one bucket; in stage 3 a unit is a bucket.

    Call `finish_gradient_synchronization` after the last backward of a step. `param_groups` and
    `state` are those of the inner optimizer, which steps on the `shard` of every bucket. A
    parameter that a backward did not use has a zero gradient, and delays the reductions of its
    bucket and of all later ones until backward ends.
    """

    def __init__(
        self,
        params: Iterable,
        optimizer_class: type[torch.optim.Optimizer],
        zero_stage: int = 1,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
        **defaults,
    ):
        super().__init__(params, defaults)
        bucket_class = (Bucket, ShardedGradientBucket, FlatParameter)[zero_stage - 1]
        self.shards_gradients, self.shards_parameters = zero_stage >= 2, zero_stage == 3
        self.group = process_group
        self.buckets, sharded_groups = [], []
        for group in self.param_groups:
            # in reverse order: backward finishes the last layer first
            trained = list(dict.fromkeys(p for p in group["params"] if p.requires_grad))[::-1]
            split = split_into_buckets(trained, bucket_cap_mb)
            if self.shards_parameters:  # all parameters of a unit are gathered together
                split = split_into_buckets(trained, math.inf, math.inf)
            buckets = [bucket_class(part, process_group) for part in split if part]
            sharded_groups.append({**group, "params": [bucket.shard for bucket in buckets]})
            self.buckets = buckets + self.buckets  # the last group first
        # from here on `param_groups` and `state` are those of the inner optimizer, over the shards
        self.set_inner(optimizer_class(sharded_groups, **defaults))
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.launched = 0  # how many buckets' reductions have started
        self.synchronizes, self.in_backward = True, False
        self.param_dtype: torch.dtype | None = None
        self.has_new_gradients = False  # since the last `end_backward`
        self.finished: list[FlatParameter] = []  # gradients complete, not yet resharded
        self.turns = count()  # numbers the units in the order of forward
        for param in self.bucket_of:
            param.register_post_accumulate_grad_hook(self.mark_ready)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients and start no reduction: for all micro-batches but the last.

        Stages 2 and 3 have no full gradients to accumulate in: they reduce every micro-batch.
        """
        self.synchronizes = self.shards_gradients
        try:
            yield
        finally:
            self.synchronizes = True

    # ---- stage 3 only: hooks that unshard a unit's parameters while it computes ----

    def shard_parameters(self, units: list[nn.Module], dtype: torch.dtype) -> None:
        """Keep only the shards, and unshard a unit's parameters, in `dtype`, while it computes.

        units: in the order of the parameter groups. This is the simple version: computation waits
        for every all-gather. All ranks must run the same units in the same order, because their
        collectives are matched by order.
        """
        self.param_dtype = dtype
        flat_of = {flat.shard: flat for flat in self.buckets}
        for unit, group in zip(units, self.param_groups, strict=True):
            for shard in group["params"]:  # one per dtype
                flat_of[shard].shard_parameters(unit, dtype)
                self.register_hooks(unit, flat_of[shard])
                unit.register_state_dict_pre_hook(no_state_dict)
                unit.register_load_state_dict_pre_hook(no_state_dict)

    def register_hooks(self, unit: nn.Module, flat: FlatParameter) -> None:
        unit.register_forward_pre_hook(partial(self.before_forward, flat), with_kwargs=True)
        unit.register_forward_hook(partial(self.after_forward, flat), with_kwargs=True)

    def before_forward(self, flat: FlatParameter, module: nn.Module, args, kwargs):
        flat.check_parameters()
        flat.unshard()
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
        if not torch.is_grad_enabled() or not some_are_hidden:  # hidden outputs get no hook
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
            flat.wait()

    def reshard_finished_units(self, entered: FlatParameter) -> None:
        """Free the finished units that forward ran after `entered`: backward has left them.

        Complete gradients do not prove that it has: where a unit also uses `weight.detach()`,
        backward may still read its parameters.
        """
        finished, self.finished = self.finished, []
        for flat in finished:
            if flat.turn > entered.turn:
                flat.reshard()
            else:
                self.finished.append(flat)

    # ---- all stages: reduce, step, gather ----

    def mark_ready(self, param: nn.Parameter) -> None:
        """Called by autograd in backward, when it has accumulated a gradient into `param.grad`."""
        bucket = self.bucket_of[param]
        if param not in bucket.waiting_for:
            raise RuntimeError("a gradient came twice: use checkpoint(..., use_reentrant=False)")
        bucket.collect(param, divide_by=bucket.n_ranks if self.synchronizes else 1)
        self.has_new_gradients = True
        if not self.synchronizes:
            return
        self.queue_end_backward()
        bucket.waiting_for.remove(param)
        if not bucket.waiting_for:
            self.finished.append(bucket)
        self.launch_ready_buckets()

    def launch_ready_buckets(self, backward_has_ended: bool = False) -> None:
        """Start to reduce the next buckets that are ready; after backward, all that remain.

        Buckets are launched strictly in order: ranks may finish gradients in different orders, but
        collectives are matched by the order of the calls. Each launch finishes the previous
        reduction, so that at most two buckets have full gradients (stages 2 and 3).
        """
        while self.launched < len(self.buckets):
            bucket = self.buckets[self.launched]
            if bucket.waiting_for and not backward_has_ended:
                return
            bucket.start_reduction()
            if self.shards_gradients:  # after the launch: the network is busy during the wait
                self.buckets[self.launched - 1].finish_reduction()  # -1: of the previous backward
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
            for bucket in self.buckets:
                bucket.hide_gradients()  # from `param.grad`: the averages are in the shards
        self.launched, self.in_backward, self.has_new_gradients = 0, False, False
        self.finished.clear()
        for bucket in self.buckets:
            bucket.end_backward()

    def finish_gradient_synchronization(self) -> None:
        """After the last backward of a step: wait until each shard has its average gradient."""
        if self.has_new_gradients:  # every backward was under no_sync(): nothing is launched
            self.end_backward()
        for bucket in self.buckets:
            bucket.drop_zeroed_gradients()  # if `model.zero_grad()` was called
            bucket.finish_reduction()

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

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update this rank's shards, then all-gather the updated parameters (stages 1 and 2)."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.finish_gradient_synchronization()
        self.check_parameters()
        self.inner.step()  # writes the shards, which the all-gathers below send
        gathers = [bucket.after_step() for bucket in self.buckets]
        for gather in filter(None, gathers):  # stage 3 has none
            gather.wait()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, also those of a step that is skipped or of a backward that failed."""
        for bucket in self.buckets:
            bucket.drop_gradients(set_to_none)
        self.has_new_gradients = False
        if self.in_backward:  # it ended in an exception
            self.end_backward()

    def training_state(self, model: nn.Module) -> State:
        """The tensors of a checkpoint, by the plain model's names; sharded ones as `Shard`s."""
        names = {p: name for name, p in model.named_parameters()}
        state: State = {}
        for bucket in self.buckets:
            shapes = {names[p]: p.shape for p in bucket.params}
            state |= state_of_flat_shard(self, bucket.shard, shapes, bucket.owned.start)
        full = {f"model.{name}": p.detach() for p, name in names.items()}
        # where both have a name, the right one wins
        return full | state if self.shards_parameters else state | full


class Bucket(GuardedBucket):
    """Stage 1: parameters in one flat buffer, of which each rank owns an equal shard.

    full: [N * length], padded; the parameters are views into it. shard: [length], the part that
    this rank's optimizer updates, itself a view into `full`. grads: [N * length]; the
    reduce-scatter writes the average into the part that this rank owns.
    waiting_for: the parameters whose gradients this backward has not finished yet.
    """

    def __init__(self, params: list[nn.Parameter], group: ProcessGroup | None):
        self.params, self.group = params, group
        n_shards, rank = dist.get_world_size(group), dist.get_rank(group)
        self.n_ranks = n_shards
        total = sum(p.numel() for p in self.params)
        length = -(-total // n_shards)  # of a shard, rounded up
        self.owned = slice(rank * length, (rank + 1) * length)
        self.padding = n_shards * length - total
        self.full = params[0].new_zeros(n_shards * length)
        for param, view in self.views_into(self.full).items():
            view.copy_(param.detach())
            param.data = view
        broadcast(self.full, group=group, group_src=0)
        self.shard = nn.Parameter(self.full[self.owned])
        self.reduce_dtype = self.shard.dtype  # of the gradients
        self.grads: Tensor | None = None
        self.waiting_for = set(params)
        self.reduction: Work | None = None  # the collective in flight
        self.guard()

    def views_into(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        sizes = [p.numel() for p in self.params]
        chunks = flat[: sum(sizes)].split(sizes)
        return {p: chunk.view(p.shape) for p, chunk in zip(self.params, chunks, strict=True)}

    def collect(self, param: nn.Parameter, divide_by: int = 1) -> None:
        """Move the gradient of `param` into the buffer, where later micro-batches add to it."""
        self.before_accumulation()
        self.copy_gradient(param, divide_by)
        param.grad = self.grad_views[param]

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

    def finish_reduction(self) -> None:
        if self.reduction is None:
            return
        self.reduction.wait()
        self.reduction, self.shard.grad = None, self.grads[self.owned]

    def end_backward(self) -> None:
        self.waiting_for = set(self.params)

    def after_step(self) -> Work | None:
        """Start to replace the old parameters: all-gather the updated shards into `full`."""
        return all_gather_single(self.full, self.shard.detach(), group=self.group, async_op=True)


class ShardedGradientBucket(Bucket):
    """Stage 2: full gradients exist only from a bucket's first gradient until it is reduced."""

    accumulates_after_reduction = True  # `finish_reduction` adds to `shard.grad`

    def collect(self, param: nn.Parameter, divide_by: int = 1) -> None:
        self.before_accumulation()
        self.finish_reduction()  # of the previous backward, if it is still in flight
        self.copy_gradient(param, divide_by)
        param.grad = None  # a view would keep the buffer alive after the reduction

    def finish_reduction(self) -> None:
        """Add the average to `shard.grad` and free the full gradients."""
        if self.reduction is None:
            return
        self.reduction.wait()
        average, sum_so_far = self.grads[self.owned].clone(), self.shard.grad
        self.shard.grad = average if sum_so_far is None else sum_so_far.add_(average)
        self.reduction = self.grads = self.grad_views = None


class FlatParameter(ShardedGradientBucket):
    """Stage 3: a bucket of one unit's parameters, which are full only while the unit computes."""

    def shard_parameters(self, unit: nn.Module, dtype: torch.dtype) -> None:
        # until now a view into the full parameters, whose memory it would keep alive
        self.shard.data = self.shard.data.clone()
        self.allocate_full(unit, dtype, self.full.device)
        self.addresses = [p.data_ptr() for p in self.params]  # for `check_parameters`

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

    def end_backward(self) -> None:
        super().end_backward()
        self.reshard()

    def after_step(self) -> None:
        self.reshard()  # parameters that are still unsharded are stale now

    def check_parameters(self) -> None:
        if self.full.untyped_storage().nbytes() == 0:
            super().check_parameters()

    def __deepcopy__(self, memo: dict) -> None:  # reached by `deepcopy(model)`, through its hooks
        raise RuntimeError("copy the model before shard_parameters(): this rank has shards only")


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


def sharded_adamw(model: Transformer, args) -> ZeroRedundancyOptimizer:
    """AdamW under ZeRO. Stage 3 gets the parameters of each unit as one parameter group."""
    params, dtype = model.parameters(), getattr(torch, args.dtype)
    if args.zero_stage == 3:
        pairs = parameters_by_unit(model, model.units())
        pairs = sorted(pairs, key=lambda pair: pair[0] is not model)  # forward enters `model` first
        params = [{"params": list(part.values())} for _, part in pairs]
    settings = adamw_settings(args.lr, args.weight_decay)
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.AdamW, args.zero_stage, **settings)
    if args.zero_stage == 3:
        optimizer.shard_parameters([unit for unit, _ in pairs], dtype)
    return optimizer


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument(
        "--zero-stage", type=int, choices=(1, 2, 3), default=1, help="what to shard"
    )
    parser.add_argument("--timeout", type=seconds, default=600, help="seconds until a hang ends")
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

    config = model_config(args, corpus.vocab)
    model = Transformer(config)
    init_weights(model, args.seed)
    model.to(device)
    optimizer = sharded_adamw(model, args)

    run = Run(args, __file__, config, device, corpus)
    state = optimizer.training_state(model)
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
