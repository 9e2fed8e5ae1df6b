"""Ring attention by itself: the balance of its ranks, and its scaling over ranks and sequences.

    .venv/bin/python benchmarks/context.py balance      CPU ms per rank, zigzag and naive split
    .venv/bin/python benchmarks/context.py scale        ms over 1, 2 and 4 ranks, 1k to 8k tokens

Forward and backward of one sequence: 4 heads of width 64, float32, one thread per rank. `balance`
computes what each of four ranks computes, one after another and without communication, so CPU time
is comparable on a busy machine. `scale` needs as many idle cores as ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Pool, load_stage
from torch import Tensor

HEADS, WIDTH, REPEATS = 4, 64, 3


def normal(seq: int) -> list[Tensor]:
    return [torch.randn(1, HEADS, seq, WIDTH, requires_grad=True) for _ in range(4)]


class Alone:
    """One rank of a ring without the others: it computes on its own blocks in place of theirs."""

    def __init__(self, rank: int, shards: list):
        self.n, self.rank, self.shards, self.positions = len(shards), rank, shards, shards[rank]

    def circulate(self, block: Tensor):
        for turn in range(self.n):
            yield (self.rank - turn) % self.n, block

    def start_exchange(self, tensor: Tensor) -> Alone:
        self.tensor = tensor
        return self

    def wait(self) -> Tensor:
        return self.tensor


def naive(rank: int, n: int, seq: int) -> tuple[range, ...]:
    return (range(rank * seq // n, (rank + 1) * seq // n),)


def balance(n: int = 4, seq: int = 4096) -> None:
    stage = load_stage("08")
    torch.set_num_threads(1)
    for name, split in (("naive", naive), ("zigzag", stage.zigzag)):
        shards, found = [split(rank, n, seq) for rank in range(n)], []
        for rank in range(n):
            q, k, v, grad = normal(seq // n)
            times = []
            for _ in range(REPEATS):
                start = time.process_time()
                stage.RingAttention.apply(Alone(rank, shards), q, k, v).backward(grad)
                times.append(time.process_time() - start)
            found.append(f"{1e3 * min(times):.0f}")
        print(f"{name}: {' / '.join(found)} CPU ms on ranks 0 to {n - 1}", flush=True)


def times_of(seq: int) -> tuple[float, float]:
    """Median ms of a forward and backward of the ring, and of PyTorch's operator on one rank."""
    stage, group = load_stage("08"), dist.group.WORLD
    n = group.size()
    ring = stage.Ring(group, [stage.zigzag(r, n, seq) for r in range(n)], torch.device("cpu"))
    q, k, v, grad = normal(seq // n)
    ours, theirs = [], []
    for i in range(REPEATS + 1):
        dist.barrier()
        start = time.perf_counter()
        stage.RingAttention.apply(ring, q, k, v).backward(grad)
        dist.barrier()
        ours += [time.perf_counter() - start] * (i > 0)
        if n == 1:
            start = time.perf_counter()
            F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(grad)
            theirs += [time.perf_counter() - start] * (i > 0)
    return 1e3 * median(ours), 1e3 * median(theirs or [0.0])


def scale(ranks: list[int], sequences: list[int]) -> None:
    columns = [f"ring, {n} rank{'s' * (n > 1)}" for n in ranks]
    print(f"| sequence | flash operator | {' | '.join(columns)} |\n|" + " --- |" * (len(ranks) + 2))
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(contextlib.closing(Pool(n))) for n in ranks]
        for seq in sequences:
            found = [pool.run(times_of, seq, timeout=600)[0] for pool in pools]
            cells = [f"{found[0][1]:.0f} ms" if ranks[0] == 1 else ""]
            cells += [f"{ring:.0f} ms" for ring, _ in found]
            print(f"| {seq:,} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("balance", "scale"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    args = parser.parse_args()
    if args.what == "balance":
        balance()
    else:
        scale(args.ranks, args.sequences)


if __name__ == "__main__":
    main()
