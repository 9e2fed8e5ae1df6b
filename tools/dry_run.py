"""What a stage would hold and send on any number of ranks, without the ranks.

    python -m tools.dry_run 07 --ranks 1024 --pp 8 --tp 8 --preset gpt2-xl --n-heads 32 ...
    python -m tools.dry_run 04 --device cuda --cpu-offload ...      see fake_cuda.py
    python -m tools.dry_run all

It runs the stage's own `main` for one step as one chosen rank. PyTorch's fake process group answers
at once for all other ranks, and its fake tensors have shapes but no memory. So the dry run cannot
drift from the stage, and wrong arguments end it with the stage's own error.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from common.collectives import all_to_all_single, ledger
from common.distributed import World

from common.job.launch import fail
from tools import fake_cuda
from tools.fake_stage import Report, fake_stage, report_of
from tools.memory import PeakMemory
from tools.stages import BASE, runs_for, stage_file, stages

VOCABULARY = 33_278  # of WikiText-2


class OneStep:
    """In place of `common.job.run.Run`: takes one step, whose memory and messages it reports."""

    resume, folder = "never", "runs"

    def __init__(self, *_) -> None:
        self.checkpoints = self
        self.optimizers: list[torch.optim.Optimizer] = []  # all that have taken the step

    def load(self, *_) -> int:
        return 0

    def steps(self, first: int) -> Iterator[int]:
        self.sent_before = Counter(ledger.ring)
        ledger.reset()  # communication at the start belongs to no step
        hook = register_optimizer_step_pre_hook(lambda taken, *_: self.optimizers.append(taken))
        try:
            yield first
        finally:
            hook.remove()

    def log(self, *_, **others) -> None:
        self.report = report_of(self.optimizers, self.sent_before)
        del self.optimizers

    def evaluates(self, step: int) -> bool:
        return False

    is_last = agree_to_save_or_stop = evaluates

    def write(self) -> None:
        pass

    def finish(self, state: dict) -> Report:
        return self.report


PATCHES = {"Run": OneStep}


def empty_batches(_, batching, device, first_step: int, rank: int = 0, size: int = 1):
    """Yield batches of the shapes that `train_batches` yields."""
    share, micro = batching.global_batch_size // size, batching.micro_batch_size
    tokens = torch.zeros(micro, batching.seq_len, dtype=torch.int64, device=device)
    keys = torch.zeros(micro, dtype=torch.int32, device=device)
    while True:
        yield [(tokens, tokens, keys)] * (share // micro)


def exchange_nothing(counts: Tensor, group: dist.ProcessGroup) -> None:
    all_to_all_single(torch.empty_like(counts), counts, group=group)  # for the ledger


def dry_run(
    number: str, ranks: int, rank: int, argv: list[str], vocabulary: int = VOCABULARY
) -> Report:
    """Run one step of stage `number` as `rank` of `ranks`, with the script's own flags `argv`.

    Raises SystemExit where the stage fails. There must be no process group yet.
    """
    world = World(rank, ranks, torch.device("cpu"))
    patches = {"setup": lambda timeout: world, "train_batches": empty_batches, **PATCHES}
    stage = fake_stage(number, ranks, rank, argv, vocabulary, exchange_nothing, **patches)
    with stage as module, PeakMemory(only_touched=True) as memory:
        report = module.main(argv)
    report.peak = memory.bytes
    return report


# ---- output ----


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.3f}"


def show(
    number: str, ranks: int, rank: int, argv: list[str], vocabulary: int, device: str = "cpu"
) -> None:
    start = time.perf_counter()
    if device == "cuda":
        try:
            report, events = fake_cuda.run(number, ranks, rank, argv, vocabulary)
        except RuntimeError as error:
            fail(f"stage {number} fails in {fake_cuda.place_of(error)}: {error}", status=1)
    else:
        report = dry_run(number, ranks, rank, argv, vocabulary)
    held = f"held on the {'GPU' if device == 'cuda' else 'CPU'}, GB"
    print(f"stage {number}, rank {rank} of {ranks}: {' '.join(argv)}\n\n{held}")
    for name in ("parameters", "gradients", "optimizer", "activations", "peak"):
        print(f"  {name:24}{gigabytes(getattr(report, name)):>12}")
    print(f"\n{'sent per step':26}{'calls':>12}{'payload GB':>14}{'on a ring GB':>14}")
    sent = report.sent
    for key in sorted(sent.calls):
        row = f"{sent.calls[key]:12}{gigabytes(sent.payload[key]):>14}"
        print(f"  {' over '.join(key):24}{row}{gigabytes(sent.ring[key]):>14}")
    print(f"  {'total':36}{'':14}{gigabytes(sent.total_ring_bytes):>14}")
    if device == "cuda":
        fake_cuda.show_events(events)
    print(
        "\nactivations: with unsharded parameters and tensors in flight at the peak. "
        f"{time.perf_counter() - start:.0f} s"
    )


def every_stage() -> None:
    """One table: every stage on 8 to 4096 ranks. The batch grows with the ranks."""
    model = BASE["dry-run-all"]  # 3.5 billion parameters, of sizes that powers of two divide
    print(f"{model}, vocabulary {VOCABULARY}; GB of the rank that has the most\n")
    print("| stage | ranks | states | peak | sent per step | flags |\n|" + " --- |" * 6)
    for run in runs_for("dry-run-all"):
        # flushed, to show progress: a row may take a minute
        print(f"| {run.stage} | {run.ranks} | ", end="", flush=True)
        row = figures(run.stage, run.ranks, run.argv)
        print(f"{row} | {' '.join(run.flags)} |", flush=True)


def figures(number: str, ranks: int, argv: list[str]) -> str:
    """States, peak and ring bytes of the rank that has the most, or why there are none."""
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            # along a pipeline its ends hold most, and the ranks between them send most
            differ = (0, ranks // 2, ranks - 1) if stage_file(number).ranks_differ else (0,)
            reports = [dry_run(number, ranks, rank, argv) for rank in differ]
    except SystemExit:
        why = stderr.getvalue().removeprefix("dry-run: ").split(":")[0].split(" (")[0].strip()
        return f"no: {why} | | "
    each = [(r.states, r.peak, r.sent.total_ring_bytes) for r in reports]
    return " | ".join(gigabytes(max(values)) for values in zip(*each, strict=True))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("stage", help="its number, or all: one table")
    parser.add_argument("--ranks", type=int, default=8, help="number of ranks to simulate")
    parser.add_argument("--rank", type=int, default=0, help="the rank to run as")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="fake, too")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="words")
    args, own = parser.parse_known_args(argv)
    if not 0 <= args.rank < args.ranks:
        fail(f"--rank {args.rank} is not one of the {args.ranks} ranks: 0 to {args.ranks - 1}")
    known = stages() if args.device == "cuda" else stages()[1:]  # stage 01 has nothing to send
    if args.stage == "all":
        every_stage()
    elif args.stage in known:
        show(args.stage, args.ranks, args.rank, own, args.vocabulary, args.device)
    else:
        fail(f"no dry run of {args.stage!r}, but of {', '.join(known)}, or all")


if __name__ == "__main__":
    sys.argv[0] = "dry-run"
    main()
    sys.stdout.flush()
    os._exit(0)  # before Python ends: autograd's threads for fake GPUs would still run
