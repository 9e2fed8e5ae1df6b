"""What a rank has of each tensor of a checkpoint, by the names that all stages share.

    model.layers.0.attn.wqkv.weight                 float32, the parameter
    optim.exp_avg.layers.0.attn.wqkv.weight         AdamW's first moment
    optim.exp_avg_sq.layers.0.attn.wqkv.weight      and its second

The names are those of the plain `Transformer` and its AdamW, so any stage on any topology can load
what another one has saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

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

    def within(self, dim: int, group: dist.ProcessGroup) -> Shard:
        """The same chunks as parts of a larger tensor, which is split evenly along `dim` over
        `group`, and of which `full_shape` has been this rank's shard."""
        first, shape = [0] * len(self.full_shape), list(self.full_shape)
        first[dim] = dist.get_rank(group) * shape[dim]
        shape[dim] *= dist.get_world_size(group)
        offsets = (map(sum, zip(first, offset, strict=True)) for offset in self.chunks)
        return Shard(shape, zip(offsets, self.chunks.values(), strict=True))

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


def training_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    shard_dims: dict[str, int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> State:
    """The tensors of a plain model and its AdamW, by their names in a checkpoint.

    shard_dims: the dimension along which a parameter is sharded evenly over `group`, by name.
    """
    state: State = {f"model.{name}": buffer for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        tensors = tensors_of(optimizer, parameter)
        if shard_dims and name in shard_dims:
            parts = {k: Shard(t.shape, [([0] * t.dim(), t)]) for k, t in tensors.items()}
            tensors = {k: part.within(shard_dims[name], group) for k, part in parts.items()}
        state |= {f"{kind}.{name}": t for kind, t in tensors.items()}
    return state
