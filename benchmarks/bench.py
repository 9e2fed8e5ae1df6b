"""Head to head: our version of each technique against PyTorch's own, step by step in one job.

    python benchmarks/bench.py --list
    python benchmarks/bench.py --rows 02-ddp 04-fsdp --ranks 2 --pairs 100 --out table.md
    python benchmarks/bench.py --against main~3         # this tree beside another commit

Both contenders live in the same processes and take turns: ours, theirs, then theirs, ours, and so
on, each step behind a barrier and timed alone; a step's time is its slowest rank's. The table
shows the median of the paired ratios ours / theirs, with its 95 % interval. Every pair counts.

Exit status 1 if ours is slower: if the lower end of a row's interval exceeds 1.02. A row whose
contenders train different models is exempt.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import module_from_spec, spec_from_file_location
from math import comb
from pathlib import Path
from types import ModuleType

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "tests")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from harness import PeakMemory, live_bytes  # noqa: E402
from rows import GPU_SHAPES, ROWS, SHAPES, Row, Shape, Step, device  # noqa: E402
from torch import Tensor  # noqa: E402

from common.run import keep_freed_memory  # noqa: E402

SLOWER = 1.02  # a ratio above this, with 95 % confidence, fails the run

# ---- another commit beside this tree ----


@contextmanager
def checkout(commit: str) -> Iterator[str]:
    """A temporary folder with the repository's files as of `commit`."""
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder, git = f"{parent}/tree", ["git", "-C", str(REPO), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", folder, commit], check=True)
        try:
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)


class OtherTree:
    """Another checkout in this process, with its own `common`, stages and `rows`."""

    reloaded = re.compile(r"(common|harness|rows|stages|stage_\d+)(\.|$)")  # modules that differ

    def __init__(self, folder: str):
        self.path = [f"{folder}{sub}" for sub in ("", "/tests", "/benchmarks")]
        self.modules: dict[str, ModuleType] = {}
        with self.imported():
            # a row that is newer than the commit: this tree's row over that commit's stages
            newer = spec_from_file_location("newer_rows", REPO / "benchmarks/rows.py")
            rows = sys.modules["newer_rows"] = module_from_spec(newer)
            newer.loader.exec_module(rows)
            import rows as own

            self.rows = {name: (rows, row) for name, row in rows.ROWS.items()}
            self.rows |= {name: (own, row) for name, row in own.ROWS.items()}

    @contextmanager
    def imported(self) -> Iterator[None]:
        """Within this context `import` finds the other checkout's modules."""
        path, ours = sys.path[:], self.swap_modules(self.modules)
        sys.path[:0] = self.path
        try:
            yield
        finally:
            self.modules, sys.path[:] = self.swap_modules(ours), path

    def swap_modules(self, new: dict[str, ModuleType]) -> dict[str, ModuleType]:
        """Put one checkout's modules into `sys.modules`; returns the other's."""
        old = {name: sys.modules.pop(name) for name in [*sys.modules] if self.reloaded.match(name)}
        sys.modules.update(new)
        return old

    def builder(self, name: str) -> Callable[[Shape], Step]:
        """The other checkout's version of our contender in a row."""

        def build(shape: Shape) -> Step:
            module, row = self.rows[name]
            with self.imported():
                return row.ours(module.Shape(**asdict(shape)))

        return build


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
        peak = torch.cuda.max_memory_allocated()
    else:
        before = live_bytes()
        with PeakMemory() as memory:
            run_steps(row, build, shape)
        peak = memory.bytes
    return largest([(peak - before) / 1e6])[0]


def run_steps(row: Row, build, shape: Shape) -> None:
    step = build(shape)
    for i in range(3):
        step(*batch(row, shape, i))


def largest(values: list[float]) -> list[float]:
    """Element by element the largest of any rank."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def measure(
    name: str, shape_name: str, pairs: int, other: OtherTree | None = None, warmup: int = 3
) -> Result:
    """Run a row on the ranks of the default group, against `other` if given."""
    row, shape = ROWS[name], (GPU_SHAPES if torch.cuda.is_available() else SHAPES)[shape_name]
    builders = [row.ours, other.builder(name) if other else row.theirs]
    memory = [peak_mb(row, build, shape) for build in builders]
    contenders = [build(shape) for build in builders]
    times: list[list[float]] = [[], []]
    losses = [torch.zeros(())] * 2
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would fall on one contender's step or the other's
    for i in range(warmup + pairs):
        data = batch(row, shape, i)
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            took, losses[which] = timed(contenders[which], *data)
            if i >= warmup:
                times[which].append(took)
        gc.collect()
    gc.enable()
    gc.unfreeze()
    difference = None
    if row.same_loss or other:
        difference = largest([abs((losses[0] - losses[1]).item())])[0]
    ours, theirs = largest(times[0]), largest(times[1])
    return Result(name, shape_name, dist.get_world_size(), ours, theirs, *memory, difference)


def worker(
    rank: int,
    size: int,
    port: int,
    jobs: list[tuple[str, str]],
    pairs: int,
    folder: str | None,
    out: str,
) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    keep_freed_memory()  # as every run does
    torch.set_num_threads(1 if size > 1 else len(os.sched_getaffinity(0)))
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
    )
    other = OtherTree(folder) if folder else None
    results = []
    for name, shape_name in jobs:
        results.append(measure(name, shape_name, pairs, other))
        if rank == 0:
            print(line_of(results[-1]), flush=True)
        gc.collect()
    if rank == 0:
        torch.save(results, out)
    dist.barrier()
    dist.destroy_process_group()


def run_jobs(
    size: int, jobs: list[tuple[str, str]], pairs: int, folder: str | None = None
) -> list[Result]:
    """Rows one after another in one set of `size` processes; folder: of the other checkout."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = "1" if size > 1 else str(len(os.sched_getaffinity(0)))
    os.environ["OMP_NUM_THREADS"] = threads  # the workers inherit it
    with tempfile.NamedTemporaryFile() as out:
        arguments = (size, port, jobs, pairs, folder, out.name)
        torch.multiprocessing.spawn(worker, arguments, nprocs=size)
        return torch.load(out.name, weights_only=False)


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
    cells = [
        r.row,
        r.shape,
        str(r.ranks),
        f"**{statistics.median(r.ratios):.3f}**",
        f"{low:.3f} ... {high:.3f}",
        str(len(r.ratios)),
        f"{statistics.median(r.ours_ms):.1f}",
        f"{statistics.median(r.theirs_ms):.1f}",
        f"{r.ours_mb:.1f}",
        f"{r.theirs_mb:.1f}",
        loss,
    ]
    return f"| {' | '.join(cells)} |"


def slower_rows(results: list[Result]) -> list[str]:
    """The rows in which ours is slower, with 95 % confidence."""
    return [
        f"{r.row} ({r.shape}, {r.ranks} ranks): {statistics.median(r.ratios):.3f}"
        for r in results
        if r.loss_difference is not None and interval(r.ratios)[0] > SLOWER
    ]


def machine() -> str:
    """The machine and the versions that the figures were measured with."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            x.split(":")[1].strip() for x in info.read_text().splitlines() if "model name" in x
        ]
        cpu = names[0] if names else cpu
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    return (
        f"{len(os.sched_getaffinity(0))} cores ({cpu}){gpu}, "
        f"{platform.system()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{datetime.date.today().isoformat()}"
    )


def shapes_used(names: set[str]) -> list[str]:
    shapes = GPU_SHAPES if torch.cuda.is_available() else SHAPES
    return [
        f"- {n}: width {s.d_model}, {s.n_layers} layers, {s.n_heads} heads, vocabulary "
        f"{s.vocab_size}, {s.batch} samples of {s.seq_len} tokens (01 to 04: per rank), float32"
        for n, s in shapes.items()
        if n in names
    ]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME")
    parser.add_argument("--ranks", nargs="+", type=int, help="default: those of each row")
    parser.add_argument("--pairs", type=int, default=100, help="timed steps of each contender")
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit of ours")
    parser.add_argument("--out", help="write the table to this file, too")
    parser.add_argument("--list", action="store_true", help="list the rows and exit")
    args = parser.parse_args(argv)
    if args.against:
        named = f"{args.against}^{{commit}}"
        command = ["git", "-C", str(REPO), "rev-parse", "--verify", "--short", named]
        found = subprocess.run(command, capture_output=True, text=True)
        if found.returncode:
            parser.error(f"--against {args.against}: not a commit of this repository")
        args.against = found.stdout.strip()
    return args


def run_rows(args: argparse.Namespace, folder: str | None = None) -> list[Result]:
    """Every row that the arguments name, by number of ranks; folder: of the other checkout."""
    jobs: dict[int, list[tuple[str, str]]] = {}
    for name in args.rows:
        for size in ranks_of(ROWS[name], args.ranks):
            jobs.setdefault(size, []).extend(
                (name, s) for s in args.shapes if s in ROWS[name].shapes
            )
    return [r for size in sorted(jobs) for r in run_jobs(size, jobs[size], args.pairs, folder)]


def main(argv: list[str] | None = None) -> int:
    """Print and write the table; the exit status."""
    args = parse_args(argv)
    if args.list:
        for name, row in ROWS.items():
            print(f"{name:20} {row.against}, ranks {' '.join(map(str, row.ranks))}")
        return 0
    against = {n: f"commit {args.against}" if args.against else ROWS[n].against for n in args.rows}
    print(f"{machine()}\n\n{HEAD}", flush=True)
    if args.against:
        with checkout(args.against) as folder:
            results = run_rows(args, folder)
    else:
        results = run_rows(args)
    slower = slower_rows(results)
    for row in slower:
        print(f"slower than {against[row.split()[0]]}: {row}")
    if args.out:
        lines = [machine(), "", HEAD, *map(line_of, results), ""]
        lines += [f"- {name}: against {theirs}" for name, theirs in against.items()]
        Path(args.out).write_text("\n".join([*lines, *shapes_used({r.shape for r in results}), ""]))
    return 1 if slower else 0


def ranks_of(row: Row, wished: list[int] | None) -> list[int]:
    """The world sizes to run a row with. NCCL needs one GPU per rank."""
    if torch.cuda.is_available():
        return [min(torch.cuda.device_count(), max(wished or [1]))]
    return [n for n in row.ranks if not wished or n in wished]


if __name__ == "__main__":
    sys.exit(main())
