"""What a rank has of each tensor of a checkpoint, by the names that all stages share.

    model.layers.0.attn.wqkv.weight                 float32, the parameter
    optim.exp_avg.layers.0.attn.wqkv.weight         AdamW's first moment
    optim.exp_avg_sq.layers.0.attn.wqkv.weight      and its second

The names are those of the plain `Transformer` and its AdamW, so any stage on any topology can load
what another one has saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType


class Shard:
    """What one rank owns of a tensor: chunks of it, by their offsets, as views of its memory.

    DCP's planners accept any object with the three `__...__` methods below, as they accept DTensor,
    so a shard needs no device mesh and no process group. A rank may own no chunk at all.
    """

    def __init__(self, full_shape: Sequence[int], chunks: Iterable[tuple[Sequence[int], Tensor]]):
        self.full_shape = torch.Size(full_shape)
        self.chunks = {torch.Size(offset): tensor for offset, tensor in chunks}

    def map(self, function: Callable[[Tensor], Tensor]) -> Shard:
        return Shard(self.full_shape, [(o, function(t)) for o, t in self.chunks.items()])

    def size(self) -> torch.Size:
        return self.full_shape

    def __create_write_items__(self, name: str, _: object) -> list[dcp.WriteItem]:
        items = []
        for offset, tensor in self.chunks.items():
            chunk = dcp.ChunkStorageMetadata(offset, tensor.size())
            properties = TensorProperties.create_from_tensor(tensor)
            data = TensorWriteData(chunk, properties, self.full_shape)
            index = MetadataIndex(name, offset)
            items.append(dcp.WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[dcp.ChunkStorageMetadata]:
        return [dcp.ChunkStorageMetadata(offset, t.size()) for offset, t in self.chunks.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.chunks[index.offset]


State = dict[str, Tensor | Shard]


def tensors_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """A parameter and AdamW's moments (created here if need be), by the prefixes of their names."""
    state = optimizer.state[parameter]
    if not state:
        # fused AdamW needs its step count on the parameter's device
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    moments = {f"optim.{name}": state[name] for name in ("exp_avg", "exp_avg_sq")}
    return {"model": parameter.detach(), **moments}


def training_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The tensors of a plain model and its AdamW, by their names in a checkpoint."""
    state: State = {f"model.{name}": buffer for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        tensors = tensors_of(optimizer, parameter)
        state |= {f"{kind}.{name}": t for kind, t in tensors.items()}
    return state


def split_over(group: dist.ProcessGroup, dims: dict[str, int], state: State) -> State:
    """The same state, where each parameter in `dims`, and its moments, are this rank's part of a
    larger tensor, which is split evenly over `group` along that dimension."""
    parts: State = {}
    for name, dim in dims.items():
        for key in (f"model.{name}", f"optim.exp_avg.{name}", f"optim.exp_avg_sq.{name}"):
            part = state[key]
            chunks = part.chunks if isinstance(part, Shard) else {(0,) * part.dim(): part}
            shape = list(part.size())
            first = dist.get_rank(group) * shape[dim]
            shape[dim] *= dist.get_world_size(group)
            moved = [((*o[:dim], o[dim] + first, *o[dim + 1 :]), t) for o, t in chunks.items()]
            parts[key] = Shard(shape, moved)
    return state | parts


# ---- where a rank owns a slice of a flat parameter: 03, 04, 07 and 12 to 14 ----


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
