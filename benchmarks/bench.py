"""Head to head: our version of each technique against PyTorch's own, step by step in one job.

    python -m benchmarks.bench                      # all rows that fit the machine, in ten minutes
    python -m benchmarks.bench --rows 02-ddp 04-fsdp --ranks 2 --minutes 30 --out table.md
    python -m benchmarks.bench --list

Both contenders live in the same processes and take turns: ours, theirs, then theirs, ours, and so
on, each step behind a barrier and timed alone; a step's time is its slowest rank's. The table
shows the median of the paired ratios ours / theirs, with its 95 % interval. Every pair counts.

Exit status 1 if ours is slower: if the lower end of a row's interval exceeds 1.02. Exempt are rows
whose contenders train different models, and 12's, whose contenders are both ours.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import platform
import re
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rows import GPU_SHAPES, ROWS, SHAPES, Row, Shape, Step, device
from common.job.arguments import Parser
from common.job.run import keep_freed_memory
from tools.memory import PeakMemory
from tools.pool import Pool

SLOWER = 1.02  # a ratio above this, with 95 % confidence, fails the run
BACKEND = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
FEWEST, MOST = 6, 100  # pairs of steps; with six the 95 % interval is that of all

# ---- one row, inside the workers ----


@dataclass
class Result:
    """A row's measurements. Milliseconds are the slowest rank's, megabytes the largest's."""

    row: str
    shape: str
    ranks: int
    ours_ms: list[float]  # per step
    theirs_ms: list[float]
    ours_mb: float
    theirs_mb: float
    loss_difference: float | None  # None: the contenders train different models

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.ours_ms, self.theirs_ms, strict=True)]


def batch(row: Row, shape: Shape, step: int) -> tuple[Tensor, Tensor]:
    """This rank's tokens and targets of a step."""
    generator = torch.Generator().manual_seed(1000 * step + row.share_of(dist.get_rank()))
    size = (shape.batch, shape.seq_len + 1)
    tokens = torch.randint(shape.vocab_size, size, generator=generator).to(device())
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(step: Step, tokens: Tensor, targets: Tensor) -> tuple[float, Tensor]:
    """Milliseconds of one step that all ranks enter together, and its loss."""
    synchronize()
    dist.barrier()
    start = time.perf_counter()
    loss = step(tokens, targets)
    synchronize()
    return 1e3 * (time.perf_counter() - start), loss


def peak_mb(row: Row, build, shape: Shape) -> float:
    """A contender's peak memory on any rank, model state included, over three steps alone."""
    gc.collect()
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run_steps(row, build, shape)
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with PeakMemory() as memory:
            run_steps(row, build, shape)
        peak = memory.above
    return largest([peak / 1e6])[0]


def run_steps(row: Row, build, shape: Shape) -> None:
    step = build(shape)
    for i in range(3):
        step(*batch(row, shape, i))


def largest(values: list[float]) -> list[float]:
    """Element by element the largest of any rank."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def cores() -> int:
    """Those that this process may use, which macOS does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def measure(name: str, shape_name: str, pairs: int, share: float, left: float) -> Result | None:
    """Run a row on the ranks of the default group, `pairs` times or for `share` seconds.

    None if `left` seconds, which all rows have, are over before there are enough pairs.
    """
    start, size = time.monotonic(), dist.get_world_size()
    keep_freed_memory()  # as every run does
    torch.set_num_threads(1 if size > 1 else cores())
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank())
    row, shape = ROWS[name], (GPU_SHAPES if torch.cuda.is_available() else SHAPES)[shape_name]
    memory = [peak_mb(row, build, shape) for build in (row.ours, row.theirs)]
    contenders = [build(shape) for build in (row.ours, row.theirs)]
    times: list[list[float]] = [[], []]
    losses = [torch.zeros(())] * 2
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would fall on one contender's step or the other's
    for i in range(-3, pairs):  # three to warm up
        (seconds,) = largest([time.monotonic() - start])
        if seconds > (share if i >= FEWEST else left):
            break
        data = batch(row, shape, i + 3)
        for which in (0, 1) if i % 2 else (1, 0):
            took, losses[which] = timed(contenders[which], *data)
            if i >= 0:
                times[which].append(took)
        gc.collect()
    gc.enable()
    gc.unfreeze()
    if len(times[0]) < min(FEWEST, pairs):
        return None
    difference = largest([abs((losses[0] - losses[1]).item())])[0] if row.same_loss else None
    ours, theirs = largest(times[0]), largest(times[1])
    return Result(name, shape_name, size, ours, theirs, *memory, difference)


# ---- the table ----


def interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of the median: order statistics, by the sign test, of any distribution."""
    values, n = sorted(values), len(values)
    tail, below = 0.0, 0  # chance that fewer than `below` values lie under the median
    while tail + comb(n, below) / 2**n <= 0.025:
        tail += comb(n, below) / 2**n
        below += 1
    return values[max(below - 1, 0)], values[n - max(below, 1)]


HEAD = (
    "| row | model | ranks | ratio | 95 % interval | pairs | ours ms | theirs ms "
    "| ours MB | theirs MB | loss differs by |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def line_of(r: Result) -> str:
    low, high = interval(r.ratios)
    loss = "(other model)" if r.loss_difference is None else f"{r.loss_difference:.1e}"
    ratio, ours, theirs = map(median, (r.ratios, r.ours_ms, r.theirs_ms))
    return (
        f"| {r.row} | {r.shape} | {r.ranks} | **{ratio:.3f}** | {low:.3f} ... {high:.3f} "
        f"| {len(r.ratios)} | {ours:.1f} | {theirs:.1f} | {r.ours_mb:.1f} | {r.theirs_mb:.1f} "
        f"| {loss} |"
    )


def slower_rows(results: list[Result]) -> list[str]:
    """The rows in which ours is slower, with 95 % confidence."""
    return [
        f"{r.row} ({r.shape}, {r.ranks} ranks): {median(r.ratios):.3f}"
        for r in results
        if r.loss_difference is not None and not ROWS[r.row].may_be_slower
        if interval(r.ratios)[0] > SLOWER
    ]


def machine() -> str:
    """The machine and the versions that the figures were measured with."""
    cpus = Path("/proc/cpuinfo")  # not on macOS
    name = cpus.exists() and re.search(r"model name\s*: (.*)", cpus.read_text())  # not on ARM
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{cores()} cores ({name[1] if name else platform.machine()}), {gpu}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, {datetime.date.today()}"
    )


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME")
    parser.add_argument("--ranks", nargs="+", type=int, help="default: a core or GPU for each")
    parser.add_argument("--minutes", type=float, default=9, help="for all rows together")
    parser.add_argument("--pairs", type=int, default=MOST, help="timed steps of each contender")
    parser.add_argument("--out", help="write the table to this file, too")
    parser.add_argument("--list", action="store_true", help="list the rows and exit")
    return parser.parse_args(argv)


def ranks_of(row: Row, wished: list[int] | None) -> list[int]:
    """The world sizes to run a row with. NCCL needs one GPU per rank."""
    if torch.cuda.is_available():
        return [min(torch.cuda.device_count(), max(wished or [1]))]
    return [n for n in row.ranks if (n in wished if wished else n <= cores())]


def run_rows(args: argparse.Namespace, deadline: float) -> tuple[list[Result], list[str]]:
    """The results by number of ranks, each printed as it comes, and the rows that had no time."""
    jobs = sorted(
        (
            (size, name, shape)
            for name in args.rows
            for size in ranks_of(ROWS[name], args.ranks)
            for shape in ROWS[name].shapes
        ),
        key=lambda job: job[0],
    )
    print(f"{len(jobs)} measurements, in at most {args.minutes:g} minutes (--minutes)\n{HEAD}")
    results, late = [], []
    for i, (size, name, shape) in enumerate(jobs):
        left = deadline - time.monotonic()
        if sys.stderr.isatty():
            progress = f"{i + 1} of {len(jobs)}: {name} ({shape}), {left / 60:.0f} minutes left"
            print(f"{progress}\r", end="", file=sys.stderr, flush=True)
        job = measure, name, shape, args.pairs, left / (len(jobs) - i), left
        result = None
        if left > 0:
            # new processes, because PyTorch's caches would keep the groups of another row's mesh
            with closing(Pool(size, backend=BACKEND)) as pool:
                result = pool.run(*job, timeout=3600)[0]
        if result is None:
            late.append(f"{name} ({shape}, {size} ranks)")
        else:
            results.append(result)
            print(line_of(result), flush=True)
    return results, late


def main(argv: list[str] | None = None) -> int:
    """Print and write the table; the exit status."""
    args = parse_args(argv)
    if args.list:
        for name, row in ROWS.items():
            print(f"{name:20} {row.against}, ranks {' '.join(map(str, row.ranks))}")
        return 0
    print(machine())
    results, late = run_rows(args, time.monotonic() + 60 * args.minutes)
    for row in slower_rows(results):
        print(f"slower than {ROWS[row.split()[0]].against}: {row}")
    if late:
        print(f"not measured, for lack of time: {', '.join(late)}")
    if few := [name for name in args.rows if not ranks_of(ROWS[name], args.ranks)]:
        print(f"not measured, for lack of cores (--ranks): {', '.join(few)}")
    if args.out:
        Path(args.out).write_text("\n".join([machine(), "", HEAD, *map(line_of, results), ""]))
    return 1 if slower_rows(results) else 0


if __name__ == "__main__":
    sys.exit(main())
