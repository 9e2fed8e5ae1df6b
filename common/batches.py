"""Batches of a corpus, as functions of (seed, step): the same on any number of ranks."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from common.counter_rng import generator_of, sample_keys
from common.loss import IGNORED


@dataclass(frozen=True)
class Batching:
    """How tokens become batches. Sizes are samples: per step over all ranks, and per forward."""

    seq_len: int
    global_batch_size: int
    micro_batch_size: int
    seed: int = 0


def _windows(tokens: Tensor, indices: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [len(indices), seq_len], int64. Past the end: token 0 and IGNORED."""
    places = indices[:, None] * seq_len + torch.arange(seq_len + 1, device=tokens.device)
    windows = tokens[places.clamp(max=len(tokens) - 1)].long()
    past = places[:, 1:] >= len(tokens)  # a target
    return windows[:, :-1].masked_fill(past, 0), windows[:, 1:].masked_fill(past, IGNORED)


@lru_cache(maxsize=1)  # drawing it takes seconds for 100 million windows
def _order_of_epoch(seed: int, epoch: int, n_windows: int) -> memoryview:
    """A permutation of all windows [n_windows]."""
    order = torch.randperm(n_windows, generator=generator_of("epoch", seed, epoch))
    # int32 takes half the memory, which every rank of a node needs
    return (order.to(torch.int32) if n_windows < 2**31 else order).numpy().data


def global_batch(seed: int, step: int, size: int, n_windows: int) -> list[int]:
    """Window indices of step `step`'s global batch, the same on every topology.

    Each epoch is a permutation of all windows, from (seed, epoch). Batches are consecutive parts
    of the concatenated epochs: a batch may span two epochs, and no window is left out.
    """
    places = (divmod(step * size + i, n_windows) for i in range(size))
    return [_order_of_epoch(seed, epoch, n_windows)[place] for epoch, place in places]


def _micro_batches(tokens: Tensor, batching: Batching, rank: int, size: int, step: int) -> list:
    """This rank's part of step `step`'s global batch: inputs, targets and keys of micro-batches."""
    n_windows = (len(tokens) - 1) // batching.seq_len  # without the last, shorter one
    indices = global_batch(batching.seed, step, batching.global_batch_size, n_windows)
    share, rest = divmod(batching.global_batch_size, size)
    if rest or share % batching.micro_batch_size:
        raise ValueError(f"{batching} does not fit {size} ranks: no sample may be left out")
    first, end = rank * share, (rank + 1) * share
    inputs, targets = _windows(tokens, torch.tensor(indices[first:end]), batching.seq_len)
    keys = sample_keys(batching.seed, step, torch.arange(first, end))
    parts = (x.split(batching.micro_batch_size) for x in (inputs, targets, keys))
    return list(zip(*parts, strict=True))


def _outlive_sigterm(_: int) -> None:
    """Ignore SIGTERM, and leave the rank's process group: a run that saves needs its worker."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def train_batches(
    tokens: Tensor, batching: Batching, device: torch.device, first_step=0, rank=0, size=1
) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """For each step from `first_step` on, yield this rank's micro-batches of its global batch.

    rank, size: of the data-parallel group. A micro-batch is inputs, targets [micro batch, seq]
    and dropout keys [micro batch], on `device`.
    """
    loader = DataLoader(
        range(first_step, 2**31),  # without end
        collate_fn=partial(_micro_batches, tokens, batching, rank, size),
        batch_size=None,  # each step is an item of its own
        num_workers=int(device.type == "cuda"),  # it prepares the next steps during this one
        # fork: the worker shares the mapped tokens and, but for SIGTERM, this process's handlers
        multiprocessing_context="fork" if device.type == "cuda" else None,
        worker_init_fn=_outlive_sigterm,
        pin_memory=device.type == "cuda",
    )
    for micro_batches in loader:
        yield [tuple(x.to(device, non_blocking=True) for x in batch) for batch in micro_batches]


def eval_batches(
    tokens: Tensor, batching: Batching, device: torch.device, rank: int = 0, size: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets [micro batch, seq] that predict each token but the first once.

    rank, size: of the data-parallel group. All ranks get the same number of batches, the last ones
    filled up with windows past the end, whose targets are IGNORED. The split, 4 bytes per token, is
    copied to `device` once: the host would wait for a GPU at each batch that it copies.
    """
    tokens = tokens.to(device, non_blocking=True)
    n_windows, n = -(-(len(tokens) - 1) // batching.seq_len), batching.micro_batch_size
    for first in range(rank * n, n_windows + rank * n, n * size):
        indices = torch.arange(first, first + n, device=device)
        yield _windows(tokens, indices, batching.seq_len)
