"""Stage 02: data parallelism, the gradients averaged while backward still runs (DDP).

Every rank holds the whole model and works on its share of each global batch. The average of the
ranks' gradients is the gradient of the global batch, so all take the same step and stay alike.

New since stage 01: a process group (`setup`, `cleanup`), each rank's slice of the data, losses
reduced over the ranks, and `DistributedDataParallel`, which averages gradients in buckets.

    memory      16 P bytes a rank for P parameters: nothing is shared out
    traffic     one all-reduce of P elements a step, whatever the number of micro-batches

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
from torch import nn
from torch.distributed import ProcessGroup, Work

from common.arguments import base_parser, check_arguments, model_config, positive
from common.checkpoint import load_checkpoint, save_checkpoint, training_state
from common.collectives import all_reduce, all_reduce_control, broadcast
from common.data import eval_batches, load_corpus, train_batches
from common.distributed import World, cleanup, setup, world_size
from common.model import IGNORED, Transformer, init_weights
from common.optimization import (
    adamw_settings,
    clip_grad_norm_,
    learning_rate,
    set_learning_rate,
)
from common.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: gradients in buckets, all-reduced during backward
# ------------------------------------------------------------------------------------------------


class Bucket:
    """Some parameters' gradients side by side in one flat buffer, so that one call sends many."""

    def __init__(self, params: list[nn.Parameter]):
        self.params = params
        total = sum(p.numel() for p in params)
        self.flat = torch.zeros(total, dtype=params[0].dtype, device=params[0].device)
        pieces = self.flat.split([p.numel() for p in params])
        self.views = {p: piece.view_as(p) for p, piece in zip(params, pieces, strict=True)}
        self.waiting_for = set(params)  # whose gradients backward has not finished yet
        self.work: Work | None = None  # the reduction under way

    def attach(self, param: nn.Parameter, divide_by: int = 1) -> None:
        """Make `param.grad` the view into the buffer, with the value that it has, divided.

        Backward makes a new gradient after `zero_grad(set_to_none=True)`, loose from the buffer;
        the next micro-batch then adds to the view in place. No gradient counts as zero.
        """
        view = self.views[param]
        if param.grad is None:
            view.zero_()
        elif param.grad is not view or divide_by > 1:
            torch.div(param.grad, divide_by, out=view)  # copies as it divides
        param.grad = view


class DistributedDataParallel(nn.Module):
    """Keeps the replicas of a module alike: same start, same averaged gradients.

    module: on every rank the same parameters in the same order. process_group: the ranks that
    average; None for all. bucket_cap_mb: megabytes of gradients a call; the first bucket takes
    at most one, so that traffic starts early.

    Call `finish_gradient_synchronization` after the last backward of a step.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
    ):
        super().__init__()
        self.module, self.group = module, process_group
        self.n_ranks = dist.get_world_size(process_group)
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.detach(), group=process_group, group_src=0)
        # a tied parameter stands in `parameters()` once; a frozen one has no gradient to send
        params = [p for p in module.parameters() if p.requires_grad]
        # in reverse order, since backward finishes the last layer first
        self.buckets = [Bucket(ps) for ps in split_into_buckets(params[::-1], bucket_cap_mb)]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.launched = 0  # reductions that have started
        self.synchronizes = True
        for param in params:
            param.register_post_accumulate_grad_hook(self.mark_ready)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward in here only adds to the buckets: for all micro-batches but the last."""
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def mark_ready(self, param: nn.Parameter) -> None:
        """Note that the gradient of `param` is final for this backward; autograd calls it."""
        bucket = self.bucket_of[param]
        if param not in bucket.waiting_for:
            raise RuntimeError("all micro-batches but the last of a step belong in no_sync()")
        bucket.attach(param, divide_by=self.n_ranks if self.synchronizes else 1)
        if self.synchronizes:
            bucket.waiting_for.remove(param)
            self.launch_ready_buckets()

    def launch_ready_buckets(self) -> None:
        """All-reduce the buckets that are full, while backward fills the others.

        Strictly in order, for collectives match by order and ranks may differ in which is full
        first.
        """
        while self.launched < len(self.buckets) and not self.buckets[self.launched].waiting_for:
            bucket = self.buckets[self.launched]
            bucket.work = all_reduce(bucket.flat, group=self.group, async_op=True)
            self.launched += 1

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the average over the ranks. Once a step."""
        for bucket in self.buckets:
            for param in bucket.waiting_for:  # unused in this backward, or by this rank
                bucket.attach(param, divide_by=self.n_ranks)
            bucket.waiting_for = set()
        self.launch_ready_buckets()
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.waiting_for, bucket.work = set(bucket.params), None
        self.launched = 0


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


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--compile", action="store_true", help="torch.compile each unit")
    parser.add_argument("--timeout", type=positive, default=600, help="seconds until a hang ends")
    return check_arguments(parser.parse_args(argv), data_parallel_size=world_size())


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
    if args.compile:
        for unit in model.units():
            unit.compile()
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_settings(args))

    run = Run(args, __file__, config, device)
    state = training_state(model.module, optimizer)
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
            with nullcontext() if is_last else model.no_sync():
                micro_loss.backward()
            loss += micro_loss.detach()
        model.finish_gradient_synchronization()
        loss = all_reduce_control(loss) / world.size
        grad_norm = clip_grad_norm_(model.parameters(), args.grad_clip)
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
