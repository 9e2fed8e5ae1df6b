"""Ring attention by itself: the balance of its ranks, and its scaling over ranks and sequences.

    python 08_context_parallel/timing.py balance                       CPU ms per rank
    torchrun --nproc-per-node 2 08_context_parallel/timing.py scale    ms, and PyTorch's on one rank

Forward and backward of one sequence: 4 heads of width 64, float32, one thread per rank. `balance`
computes what each of four ranks computes, split naively and in zigzag, one after another
and without communication, so CPU time is comparable on a busy machine. `scale` needs an idle
core per rank.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
import train
from torch import Tensor

from common.distributed import cleanup, print0, setup

HEADS, WIDTH, REPEATS, RANKS = 4, 64, 3, 4


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


def balance(seq: int = 4096) -> None:
    torch.set_num_threads(1)
    for split in (naive, train.zigzag):
        shards, found = [split(rank, RANKS, seq) for rank in range(RANKS)], []
        for rank in range(RANKS):
            q, k, v, grad = normal(seq // RANKS)
            times = []
            for _ in range(REPEATS):
                start = time.process_time()
                train.RingAttention.apply(Alone(rank, shards), q, k, v).backward(grad)
                times.append(time.process_time() - start)
            found.append(f"{1e3 * min(times):.0f}")
        print(f"{split.__name__}: {' / '.join(found)} CPU ms on ranks 0 to {RANKS - 1}", flush=True)


def milliseconds(attend: Callable[[], Tensor], grad: Tensor) -> float:
    """The median of forward and backward, after one to warm up."""
    times = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        start = time.perf_counter()
        attend().backward(grad)
        dist.barrier()
        times.append(1e3 * (time.perf_counter() - start))
    return median(times[1:])


def scale() -> None:
    setup()
    torch.set_num_threads(1)
    group = dist.group.WORLD
    n = group.size()
    for seq in (1024, 2048, 4096, 8192):
        shards = [train.zigzag(rank, n, seq) for rank in range(n)]
        ring = train.Ring(group, shards, torch.device("cpu"))
        q, k, v, grad = normal(seq // n)
        ours = milliseconds(lambda: train.RingAttention.apply(ring, q, k, v), grad)  # noqa: B023
        said = f"{seq:,} tokens: {ours:.0f} ms on {n} ranks"
        if n == 1:
            whole = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: B023, E731
            said += f", {milliseconds(whole, grad):.0f} by PyTorch's operator"
        print0(said)


if __name__ == "__main__":
    try:
        {"balance": balance, "scale": scale}[sys.argv[1]]()
    finally:
        cleanup()
