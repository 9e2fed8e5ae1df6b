"""Documents packed into micro-batches without padding, as functions of (seed, step)."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.batches import Batching, global_batch
from common.loss import IGNORED


class Document(NamedTuple):
    """A range of the data's tokens. The first `prompt` ones are no targets."""

    start: int
    length: int
    prompt: int


def pack(lengths: Sequence[int], size: int, most: int) -> list[list[int]]:
    """Distribute documents over micro-batches of at most `most` tokens; returns their indices.

    From the longest to the shortest, each goes into the micro-batch with the fewest tokens. The
    number of micro-batches is the lowest multiple of `size`, the ranks, for which all fit.
    """
    count = math.ceil(sum(lengths) / (most * size)) * size
    while True:
        packed: list[list[int]] = [[] for _ in range(count)]
        tokens = [0] * count
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            lightest = tokens.index(min(tokens))
            packed[lightest].append(i)
            tokens[lightest] += lengths[i]
        if max(tokens) <= most:
            return packed
        count += size


def packed_batches(
    tokens: Tensor, documents: list[Document], most: int, device: torch.device, rank=0, size=1
) -> list[tuple[Tensor, Tensor, tuple[int, ...]]]:
    """This rank's micro-batches: inputs and targets [tokens], int64, and the documents' lengths.

    Every rank computes the same packing, and takes equally many micro-batches of it. One without a
    document gets one token, which has no target.
    """
    batches = []
    for indices in pack([document.length - 1 for document in documents], size, most)[rank::size]:
        inputs, targets = [torch.tensor([0])], [torch.tensor([IGNORED])]
        for start, length, prompt in (documents[i] for i in indices):
            ids = tokens[start : start + length].long()
            inputs.append(ids[:-1])
            targets.append(torch.cat([ids.new_full((prompt - 1,), IGNORED), ids[prompt:]]))
        if indices:
            del inputs[0], targets[0]
        joined = (torch.cat(each).to(device, non_blocking=True) for each in (inputs, targets))
        batches.append((*joined, tuple(map(len, inputs))))
    return batches


def document_batches(
    tokens: Tensor,
    documents: list[Document],
    batching: Batching,
    device: torch.device,
    first_step=0,
    rank=0,
    size=1,
) -> Iterator[list[tuple[Tensor, Tensor, tuple[int, ...]]]]:
    """For each step from `first_step` on, yield this rank's micro-batches.

    A step's documents depend on (seed, step) alone, whatever the number of ranks.
    """
    step = first_step
    while True:
        indices = global_batch(batching.seed, step, batching.global_batch_size, len(documents))
        chosen = [documents[i] for i in indices]
        yield packed_batches(tokens, chosen, batching.seq_len, device, rank, size)
        step += 1
