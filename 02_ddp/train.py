"""Stage 02: data parallelism with overlapped gradient averaging (DDP).

Every rank holds a full replica of the model and computes the gradients of its part of each global
batch. Their average over the ranks is the gradient of the whole batch, so all replicas take the
same optimizer step and stay identical. Gradients are averaged in buckets: as soon as the last
gradient of a bucket is ready, its all-reduce starts and overlaps with the rest of backward.

New since stage 01: a process group (`setup`, `cleanup`), each rank's part of the data, losses
averaged over the ranks, and `DistributedDataParallel`.

    memory          16 P bytes per rank for P parameters (4 the parameters, 4 the gradients,
                    8 AdamW's moments, in float32): nothing is sharded
    communication   all-reduces of P elements in total per step, for any number of micro-batches

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.

Run it:

    torchrun --nproc-per-node 2 02_ddp/train.py --data sample --steps 100
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from common.collectives import all_reduce, all_reduce_control, broadcast_module, split_into_buckets
from common.guards import weak

# isort: split
from common.batches import eval_batches, train_batches
from common.distributed import World
from common.guards import guard
from common.loss import IGNORED
from common.model import Transformer, init_weights
from common.optimization import adamw_settings, clip_grad_norm_, learning_rate, set_learning_rate
from common.shards import training_state

from common.job.arguments import base_parser, check_arguments, model_config, positive
from common.job.corpus import load_corpus
from common.job.launch import cleanup, setup, world_size
from common.job.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: gradients in buckets, all-reduced while backward runs
# ------------------------------------------------------------------------------------------------


class DistributedDataParallel(nn.Module):
    """Keep the replicas of a module identical: same initial weights, same averaged gradients.

    module: its parameters are contiguous, alike on every rank, and stay. process_group: the ranks
    whose gradients are averaged; None for all. bucket_cap_mb: the most MiB of several parameters
    in one all-reduce. After the last backward of a step, call `finish_gradient_synchronization`.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
    ):
        super().__init__()
        self.module = module
        broadcast_module(module, process_group)
        params = [p for p in module.parameters() if p.requires_grad][::-1]  # in backward's order
        # the first bucket is small, so that communication starts early
        parts = split_into_buckets(params, bucket_cap_mb, first_cap_mb=1)
        self.buckets = [Bucket(part, process_group) for part in parts]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.launched = 0  # how many buckets' reductions have started
        self.synchronizes = True
        for param in params:  # weak: else these hooks would keep the wrapper alive
            param.register_post_accumulate_grad_hook(weak(self.mark_ready))

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients and start no all-reduce: for all micro-batches but the last."""
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
        self.launched = 0


class Bucket:
    """Parameters whose gradients are views into one flat buffer, averaged by one all-reduce.

    grads: [numel of all parameters]; grad_views: each parameter's gradient, a view into `grads`.
    Every step allocates new ones, so a gradient that somebody keeps does not change.
    waiting_for: the parameters whose gradients the step's last backward has not produced yet.
    """

    def __init__(self, params: list[nn.Parameter], group: ProcessGroup | None):
        self.params, self.group, self.n_ranks = params, group, dist.get_world_size(group)
        self.grads: Tensor | None = None
        self.waiting_for = set(params)
        self.reduction: Work | None = None  # the collective in flight

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
            self.grads = param.new_empty(sum(p.numel() for p in self.params))
            self.grad_views = self.views_into(self.grads)
        view = self.grad_views[param]
        if param.grad is not view or divide_by > 1:
            torch.div(param.grad, divide_by, out=view)  # copies and divides, or divides in place
        param.grad = view

    def start_reduction(self) -> None:
        self.reduction = all_reduce(self.grads, group=self.group, async_op=True)

    def finish_reduction(self) -> None:
        self.reduction.wait()
        self.reduction, self.waiting_for = None, set(self.params)
        self.grads = self.grad_views = None


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--compile", action="store_true", help="torch.compile each unit")
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
    if args.compile:
        for unit in model.units():
            unit.compile()
    model = DistributedDataParallel(model, bucket_cap_mb=args.bucket_cap_mb)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_settings(args.lr, args.weight_decay))
    guard(model, optimizer)

    run = Run(args, __file__, config, device, corpus)
    state = training_state(model.module, optimizer)
    first_step = run.checkpoints.load(args.resume, state, optimizer)
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
        grad_norm = clip_grad_norm_(model.parameters(), args.max_norm)
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
