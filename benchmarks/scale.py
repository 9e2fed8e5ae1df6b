"""Strong and weak scaling of the data-parallel stages, and how much communication they hide.

    python benchmarks/scale.py
    python benchmarks/scale.py --stages 02-ddp 04-fsdp --ranks 1 2 --steps 50 --out scale.md

Three copies of a stage take turns in the same processes, step by step: one as it is; one that
waits for each collective where it is called, so that nothing is hidden; one that does not
communicate. If these take t, t_wait and t_none, backward hides (t_wait - t) / (t_wait - t_none) of
the communication. Each rank has one thread. Strong: the ranks share 32 samples per step; weak: each
has eight samples.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import ModuleType
from unittest.mock import patch

import torch
import torch.distributed as dist
from bench import batch, interval, largest, machine, timed
from harness import load_stage
from rows import ROWS, SHAPES, Shape

from common.collectives import ledger
from common.run import keep_freed_memory

STAGES = ("02-ddp", "03-zero-1", "03-zero-2", "04-fsdp", "04-fsdp-no-reshard")
WAYS = ("as it is", "waits", "alone")
SAMPLES = 32  # per step, of strong scaling


class Done:
    """The work of a collective that has finished."""

    def wait(self) -> None:
        pass


def waiting(collective: Callable) -> Callable:
    def call(*args, async_op: bool = False, **kwargs) -> Done:
        collective(*args, **kwargs)
        return Done()

    return call


def gather_alone(output: torch.Tensor, input: torch.Tensor, **_) -> Done:
    output.view(-1, len(input)).copy_(input.expand(len(output) // len(input), -1))
    return Done()


def patched(module: ModuleType, way: str) -> AbstractContextManager:
    """The stage's collectives, looked up when they are called, in one of `WAYS`."""
    names = ("all_reduce", "all_gather_single", "reduce_scatter_single")
    real = {name: getattr(module, name) for name in names if hasattr(module, name)}
    if way == "waits":
        return patch.multiple(module, **{name: waiting(f) for name, f in real.items()})
    if way == "alone":
        nothing = {name: lambda *_, **__: Done() for name in real}
        if "all_gather_single" in real:
            nothing["all_gather_single"] = gather_alone
        return patch.multiple(module, **nothing)
    return nullcontext()


def measure(name: str, shape: Shape, steps: int, warmup: int = 3) -> tuple[dict, float]:
    """Milliseconds of each step by way, the slowest rank's, and the megabytes sent in one."""
    row, module = ROWS[name], load_stage(name[:2])
    contenders = {way: row.ours(shape) for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    sent = 0.0
    for i in range(warmup + steps):
        order = WAYS if i % 2 == 0 else WAYS[::-1]
        for way in order:
            ledger.reset()
            with patched(module, way):
                took, _ = timed(contenders[way], *batch(row, shape, i))
            if i >= warmup:
                times[way].append(took)
            if way == "as it is":
                sent = ledger.total_ring_bytes / 1e6
    return {way: largest(values) for way, values in times.items()}, sent


def worker(rank: int, size: int, port: int, names: list[str], shape: str, steps: int, out: str):
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    keep_freed_memory()  # as every run does
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    results = []
    for name in names:
        for scaling in ("strong", "weak"):
            share = SAMPLES // size if scaling == "strong" else SHAPES[shape].batch
            result = measure(name, replace(SHAPES[shape], batch=share), steps)
            results.append((name, scaling, size, *result))
    if rank == 0:
        torch.save(results, out)
    dist.barrier()
    dist.destroy_process_group()


def run(size: int, names: list[str], shape: str, steps: int) -> list[tuple]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["OMP_NUM_THREADS"] = "1"  # the workers inherit it
    with tempfile.NamedTemporaryFile() as out:
        torch.multiprocessing.spawn(
            worker, (size, port, names, shape, steps, out.name), nprocs=size
        )
        return torch.load(out.name)


HEAD = (
    "| stage | scaling | ranks | ms per step (95 %) | samples/s | efficiency | sent MB | hidden |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |"
)


def table(results: list[tuple], shape: str) -> list[str]:
    """Rows by stage and scaling. Efficiency: samples per second and rank, against one rank."""
    lines, single = [], {}
    for name, scaling, size, times, sent in sorted(results, key=lambda r: r[:3]):
        each = {way: median(values) for way, values in times.items()}
        now = each["as it is"]
        samples = SAMPLES if scaling == "strong" else size * SHAPES[shape].batch
        speed = 1e3 * samples / now
        single.setdefault((name, scaling), speed / size)  # the fewest ranks come first
        low, high = interval(times["as it is"])
        costs = each["waits"] - each["alone"]
        hidden = f"{100 * (each['waits'] - now) / costs:.0f} %" if size > 1 and costs > 0 else ""
        lines.append(
            f"| {name} | {scaling} | {size} | {now:.1f} ({low:.1f} ... {high:.1f}) | {speed:.1f} "
            f"| {100 * speed / size / single[name, scaling]:.0f} % | {sent:.1f} | {hidden} |"
        )
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--shape", choices=SHAPES, default="small", metavar="NAME")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each copy")
    parser.add_argument("--out", help="write the table to this file, too")
    args = parser.parse_args(argv)
    if any(size < 1 or SAMPLES % size for size in args.ranks):
        parser.error(f"--ranks must divide the {SAMPLES} samples of strong scaling")
    results = []
    for size in sorted(args.ranks):
        results += run(size, args.stages, args.shape, args.steps)
    text = "\n".join([machine(), "", HEAD, *table(results, args.shape), ""])
    print(text)
    if args.out:
        Path(args.out).write_text(text)


if __name__ == "__main__":
    main()
