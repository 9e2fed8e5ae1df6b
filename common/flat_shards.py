"""The `Shard`s of shards.py where a rank owns a slice of a flat parameter, made of many tensors."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from common.shards import Shard, State


def state_of_flat_tensors(
    tensors: dict[str, Tensor], shapes: dict[str, torch.Size], start: int
) -> State:
    """A `Shard` of each tensor in a flat parameter, and of its first and second moments.

    tensors: what `tensors_of` returns for this rank's slice of the flat parameter, which begins at
    element `start`. shapes: of all tensors in the flat parameter, in order, by name; one outside
    the slice gets a `Shard` without chunks.
    """
    state: State = {}
    for kind, flat in tensors.items():
        begin = -start  # of the tensor, relative to `flat`
        for name, shape in shapes.items():
            first, last = max(begin, 0), max(begin + shape.numel(), 0)
            state[f"{kind}.{name}"] = shard_of_flat_slice(shape, first - begin, flat[first:last])
            begin += shape.numel()
    return state


def shard_of_flat_slice(full_shape: Sequence[int], start: int, flat: Tensor) -> Shard:
    """The `Shard` that owns `flat`: the elements from `start` on of the flattened full tensor.

    Of a matrix these are at most three chunks: the end of a row, full rows, the start of one.
    """
    if not full_shape:
        return Shard((), [((), flat.view(()))] if len(flat) else [])
    row_shape = full_shape[1:]
    row_size, chunks = prod(row_shape), []
    while len(flat):
        row, column = divmod(start, row_size)
        rows = 0 if column else len(flat) // row_size
        taken = rows * row_size or min(row_size - column, len(flat))
        if rows:
            chunks.append(((row, *[0] * len(row_shape)), flat[:taken].view(-1, *row_shape)))
        else:
            part = shard_of_flat_slice(row_shape, column, flat[:taken])
            chunks += [((row, *offset), t[None]) for offset, t in part.chunks.items()]
        start, flat = start + taken, flat[taken:]
    return Shard(full_shape, chunks)
