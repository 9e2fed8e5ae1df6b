"""Stage 03: ZeRO, the states of training shared out over the data-parallel ranks.

The replicas of stage 02 hold the same moments, gradients and weights N times over. Here all of
them lie in flat buckets that are cut into N equal slices, and each rank keeps its slice only: of
AdamW's moments (--zero-stage 1), of the gradients too (2), of the weights too (3).

New since stage 02: `ZeroRedundancyOptimizer` in the place of DDP and optimizer. A gradient is
reduced to the rank that owns it (reduce-scatter), which steps on its slice; then the new weights
are gathered from all. Stage 3 gathers a unit's weights where they are used, and frees them.

    P parameters, N ranks, a micro-batches a step, bytes a rank in float32:

    --zero-stage  memory                         traffic a step
    1             8 P + 8 P / N                  reduce-scatter P + all-gather P
    2             4 P + 12 P / N                 reduce-scatter a P + all-gather P
    3             16 P / N + one unit gathered   all-gather 2 a P, less a times the embedding,
                                                 + reduce-scatter a P

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
sections 5 (P_os, P_os+g, P_os+g+p) and 7 (traffic).

Run it:

    torchrun --nproc-per-node 2 03_zero/train.py --zero-stage 2 --data sample --steps 100
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from common.arguments import base_parser, check_arguments, model_config, positive
from common.checkpoint import (
    State,
    adamw_moments,
    load_checkpoint,
    save_checkpoint,
    shards_of_flat_slice,
)
from common.collectives import (
    all_gather_single,
    all_reduce_control,
    broadcast,
    reduce_scatter_single,
)
from common.data import eval_batches, load_corpus, train_batches
from common.distributed import World, cleanup, setup, world_size
from common.model import IGNORED, Transformer, init_weights
from common.optimization import adamw_settings, global_norm, learning_rate, set_learning_rate
from common.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: flat buckets, of which every rank owns a slice
# ------------------------------------------------------------------------------------------------


class Bucket:
    """Some parameters side by side in one flat buffer, padded to N slices of equal length.

    weights: [N * slice], the parameters are views into it. shard: [slice], the part that this
    rank owns and its optimizer steps on, a view into `weights` too. grads: [N * slice], the
    parameters' gradients; with `zero_stage` 2 and 3 it lives from a bucket's first gradient in
    backward until it is reduced to `shard.grad`.
    """

    def __init__(self, params: list[nn.Parameter], group: ProcessGroup | None, zero_stage: int):
        self.params, self.group, self.zero_stage = params, group, zero_stage
        self.n_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        total = sum(p.numel() for p in params)
        length = -(-total // self.n_ranks)
        self.mine = slice(rank * length, (rank + 1) * length)
        self.padding = self.n_ranks * length - total
        self.weights = params[0].new_zeros(self.n_ranks * length)
        for param, view in self.views_into(self.weights).items():
            view.copy_(param.detach())
            param.data = view
        broadcast(self.weights, group=group, group_src=0)
        self.shard = nn.Parameter(self.weights[self.mine])
        self.grads: Tensor | None = None
        self.waiting_for = set(params)  # whose gradients backward has not finished yet
        self.work: Work | None = None  # the reduction under way
        self.in_backward = False

    def views_into(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        sizes = [p.numel() for p in self.params]
        pieces = flat[: sum(sizes)].split(sizes)
        return {p: piece.view(p.shape) for p, piece in zip(self.params, pieces, strict=True)}

    def attach(self, param: nn.Parameter, divide_by: int = 1) -> None:
        """Move a gradient into `grads`, divided; none is zero. In stage 1 it stays `param.grad`."""
        if self.zero_stage == 1 and self.work is not None:
            raise RuntimeError("all micro-batches but the last of a step belong in no_sync()")
        self.finish_reducing()  # of the backward before
        if self.grads is None:
            self.grads = torch.empty(len(self.weights), dtype=self.shard.dtype, device=param.device)
            self.grads[len(self.grads) - self.padding :].zero_()
            self.grad_views = self.views_into(self.grads)
        view = self.grad_views[param]
        if param.grad is None:
            view.zero_()
        elif param.grad.dtype != view.dtype:  # of bf16 weights; they would be divided in bf16
            view.copy_(param.grad).div_(divide_by)
        elif param.grad is not view or divide_by > 1:
            torch.div(param.grad, divide_by, out=view)  # copies as it divides
        param.grad = view if self.zero_stage == 1 else None

    def start_reducing(self) -> None:
        """Send each slice of the gradients to its owner, who sums them, in place."""
        for param in self.waiting_for:  # unused in this backward
            self.attach(param, divide_by=self.n_ranks)
        self.waiting_for = set()
        if self.zero_stage == 3:  # all gradients are there, so backward is done with the weights
            self.free_weights()
        mine = self.grads[self.mine]
        self.work = reduce_scatter_single(mine, self.grads, group=self.group, async_op=True)

    def finish_reducing(self) -> None:
        """Wait for it; with stages 2 and 3 add the slice to `shard.grad` and drop the rest."""
        if self.work is None:
            return
        self.work.wait()
        self.work = None
        mine = self.grads[self.mine]
        if self.zero_stage == 1:
            self.shard.grad = mine
        else:
            grad = self.shard.grad
            self.shard.grad = mine.clone() if grad is None else grad.add_(mine)
            self.grads = self.grad_views = None

    def gather_weights(self, async_op: bool = False) -> Work | None:
        """Fill `weights` from the ranks' shards.

        Under autograd the buffer keeps its storage, freed and filled, and is written through
        `.data`: what backward has saved points into it, and its version must not change.
        """
        if self.zero_stage == 3 and self.weights.untyped_storage().nbytes():
            return None  # they are there: activation checkpointing runs a forward in backward
        self.weights.untyped_storage().resize_(self.weights.numel() * self.weights.element_size())
        mine = self.shard.detach().to(self.weights.dtype)
        return all_gather_single(self.weights.data, mine, group=self.group, async_op=async_op)

    def free_weights(self) -> None:
        self.in_backward = False
        self.weights.untyped_storage().resize_(0)


class ZeroRedundancyOptimizer:
    """Any element-wise optimizer, stepping on each rank's slice of flat buckets alone.

    params: parameters or parameter groups, on every rank the same. optimizer_class: such as
    torch.optim.AdamW; defaults: its keyword arguments. zero_stage 1 shares out the optimizer's
    states, 2 the gradients too; 3 the weights too, with a bucket a group (`partition_parameters`).

    Call `finish_gradient_synchronization` after the last backward of a step. `param_groups` and
    `state` are the inner optimizer's, over `Bucket.shard`s. Gradients count as zero where a
    parameter was not used, which holds up the buckets behind it until backward ends. Stage 1
    reduces once between two `zero_grad`.
    """

    def __init__(
        self,
        params: Iterable,
        optimizer_class: type[torch.optim.Optimizer],
        zero_stage: int = 1,
        process_group: ProcessGroup | None = None,
        **defaults,
    ):
        self.zero_stage, self.group = zero_stage, process_group
        groups = optimizer_class(params, **defaults).param_groups  # as PyTorch reads all forms
        inner_groups, self.buckets = [], []
        for group in groups[::-1]:  # backward finishes the last layer first
            params = list(dict.fromkeys(p for p in group["params"] if p.requires_grad))[::-1]
            runs = [params] if zero_stage == 3 and params else split_into_buckets(params, 25)
            buckets = [Bucket(run, process_group, zero_stage) for run in runs]
            inner_groups.insert(0, {**group, "params": [bucket.shard for bucket in buckets]})
            self.buckets += buckets
        self.inner = optimizer_class(inner_groups, **defaults)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.launched = 0  # reductions that have started
        self.synchronizes, self.in_backward = True, False
        for param in self.bucket_of:
            param.register_post_accumulate_grad_hook(self.mark_ready)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward in here only adds to the gradients: for all micro-batches but the last.

        Of use to stage 1. Stages 2 and 3 have no whole gradients to add to and reduce each time.
        """
        self.synchronizes = self.zero_stage > 1
        try:
            yield
        finally:
            self.synchronizes = True

    def mark_ready(self, param: nn.Parameter) -> None:
        """Note that the gradient of `param` is final for this backward; autograd calls it."""
        bucket = self.bucket_of[param]
        if param not in bucket.waiting_for:
            raise RuntimeError("checkpoint with use_reentrant=False: a gradient is final once")
        bucket.attach(param, divide_by=bucket.n_ranks if self.synchronizes else 1)
        if not self.synchronizes:
            return
        if not self.in_backward:
            self.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        bucket.waiting_for.remove(param)
        # strictly in order: collectives match by it, and ranks may differ in what is full first
        while self.launched < len(self.buckets) and not self.buckets[self.launched].waiting_for:
            self.launch_next()

    def launch_next(self) -> None:
        """Reduce the next bucket while backward fills others; at most two are whole at a time."""
        self.buckets[self.launched].start_reducing()
        if self.launched > 0 and self.zero_stage > 1:
            self.buckets[self.launched - 1].finish_reducing()
        self.launched += 1

    def end_backward(self) -> None:
        """Reduce what unused parameters have held up, before another backward adds to it."""
        while self.launched < len(self.buckets):
            self.launch_next()
        self.launched, self.in_backward = 0, False
        for bucket in self.buckets:
            bucket.waiting_for = set(bucket.params)

    def finish_gradient_synchronization(self) -> None:
        """Wait until every shard's gradient is the average over the ranks. Once a step."""
        for bucket in self.buckets:
            bucket.finish_reducing()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients to at most this global norm; returns the norm before."""
        grads = [bucket.shard.grad for bucket in self.buckets]
        norm = all_reduce_control(global_norm(grads).square(), group=self.group).sqrt()
        for grad in grads:
            grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    def step(self) -> None:
        """Update this rank's slices, then gather the new weights from all ranks."""
        self.inner.step()
        if self.zero_stage == 3:
            for bucket in self.buckets:
                bucket.free_weights()  # what is still gathered is of before the step
            return
        works = [bucket.gather_weights(async_op=True) for bucket in self.buckets]
        for work in works:
            work.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for bucket in self.buckets:
            for param in [*bucket.params, bucket.shard]:
                if set_to_none:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.zero_()

    def training_state(self, model: nn.Module) -> State:
        """The tensors of a checkpoint, under the names of the plain model; slices as `Shard`s."""
        names = {p: name for name, p in model.named_parameters()}
        state: State = {f"model.{name}": p.detach() for p, name in names.items()}
        for bucket in self.buckets:
            shapes = {names[p]: p.shape for p in bucket.params}
            tensors = {f"optim.{k}": t for k, t in adamw_moments(self, bucket.shard).items()}
            if self.zero_stage == 3:
                tensors["model"] = bucket.shard.detach()
            for prefix, tensor in tensors.items():
                state |= shards_of_flat_slice(f"{prefix}.", shapes, bucket.mine.start, tensor)
        return state


def split_into_buckets(
    params: list[nn.Parameter], cap_mb: float, first_cap_mb: float = 1
) -> list[list[nn.Parameter]]:
    """Cut a row of parameters into runs of one dtype and device and of at most `cap_mb` each.

    A parameter that is larger than the cap has a bucket for itself.
    """
    runs: list[list[nn.Parameter]] = []
    size = 0.0  # megabytes in the last run
    for param in params:
        mb = param.numel() * param.element_size() / 2**20
        cap = min(first_cap_mb, cap_mb) if len(runs) == 1 else cap_mb
        alike = runs and (param.dtype, param.device) == (runs[-1][0].dtype, runs[-1][0].device)
        if not alike or size + mb > cap:
            runs.append([])
            size = 0.0
        runs[-1].append(param)
        size += mb
    return runs


def partition_parameters(
    units: list[nn.Module], optimizer: ZeroRedundancyOptimizer, dtype: torch.dtype
) -> None:
    """ZeRO stage 3: gather each unit's weights before it is used, free them after.

    The optimizer must have a group a unit, in their order. dtype: of the gathered weights; the
    shards stay as they are. All ranks must use the same parameters, for gathers and reductions
    match by their order. The plain version: backward waits for each gather.
    """
    trained = [unit for unit in units if any(p.requires_grad for p in unit.parameters())]
    for unit, bucket in zip(trained, optimizer.buckets[::-1], strict=True):
        bucket.shard.data = bucket.shard.data.clone()  # out of the buffer that is freed
        bucket.weights = bucket.weights.to(dtype)
        for param, view in bucket.views_into(bucket.weights).items():
            param.data = view
        bucket.free_weights()
        gather_where_used(unit, bucket)


def gather_where_used(unit: nn.Module, bucket: Bucket) -> None:
    """Hooks that hold the weights of `unit` in forward, and in backward until it is done."""
    owners = [m for m in unit.modules() if list(m.parameters(recurse=False))]
    # the gradient of a look-up needs no weights
    needed = not all(isinstance(m, nn.Embedding) for m in owners)

    def before_backward(_: Tensor) -> None:
        bucket.in_backward = True
        if needed:
            bucket.gather_weights()

    def after_forward(_, __, output: Tensor) -> None:
        if bucket.in_backward:
            return  # forward ran again for activation checkpointing; backward needs the weights
        bucket.free_weights()
        if output.requires_grad:
            output.register_hook(before_backward)

    unit.register_forward_pre_hook(lambda *_: bucket.gather_weights())
    unit.register_forward_hook(after_forward)


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--zero-stage", type=int, choices=(1, 2, 3), default=1, help="share out")
    parser.add_argument("--timeout", type=positive, default=600, help="seconds until a hang ends")
    args = check_arguments(parser.parse_args(argv), data_parallel_size=world_size())
    # stage 3 gathers in bf16: autocast would keep a copy of all the weights
    args.autocast = args.autocast and args.zero_stage < 3
    return args


@torch.no_grad()
def evaluate(model, tokens, args, device, world: World) -> float:
    """Mean loss in nats over every token of a split but the first, each predicted once."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, tokens
    for inputs, targets in eval_batches(tokens, args, device, world.rank, world.size):
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
    params = model.parameters()
    if args.zero_stage == 3:
        params = [{"params": list(unit.parameters())} for unit in model.units()]
    optimizer = ZeroRedundancyOptimizer(
        params, torch.optim.AdamW, args.zero_stage, **adamw_settings(args)
    )
    if args.zero_stage == 3:
        partition_parameters(model.units(), optimizer, getattr(torch, args.dtype))

    run = Run(args, __file__, config, device)
    state = optimizer.training_state(model)
    first_step = load_checkpoint(run.checkpoints, args.resume, state, optimizer)
    batches = train_batches(corpus.train, args, device, first_step, world.rank, world.size)

    for step in run.steps(first_step):
        lr = learning_rate(args, step)
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
        if run.saves(step):
            save_checkpoint(run.checkpoints, step + 1, state, args.keep_checkpoints)
    return run.finish()


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
