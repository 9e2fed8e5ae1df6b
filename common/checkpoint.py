"""Sharded checkpoints in the format of `torch.distributed.checkpoint` (DCP).

One folder a step. Every rank writes what it owns under the names of the plain `Transformer` and
its AdamW, so that a checkpoint of any stage on any topology loads in any other:

    model.layers.0.attn.wqkv.weight                 float32, the parameter
    optim.exp_avg.layers.0.attn.wqkv.weight         AdamW's moments
    optim.exp_avg_sq.layers.0.attn.wqkv.weight
    step                                            int64: optimizer steps done

A folder is written under another name and renamed when every rank is done: what is called
`step-...` is whole. Seed and step give weights, data order and dropout, so nothing else is saved.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import warnings
import zlib
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from common.collectives import barrier
from common.distributed import print0, rank, refuse


class Shard:
    """What one rank owns of a tensor: boxes of it, each an offset and a tensor of its extent.

    full_shape: the whole tensor's. boxes: (offset a dimension, view of this rank's memory); none
    at all where this rank owns nothing of it. DCP's planners accept any object with the three
    methods below (the protocol by which it takes DTensor), so it needs no mesh and no group.
    """

    def __init__(self, full_shape: Sequence[int], boxes: Iterable[tuple[Sequence[int], Tensor]]):
        self.full_shape = torch.Size(full_shape)
        self.boxes = {torch.Size(offset): tensor for offset, tensor in boxes}

    @classmethod
    def of_flat_slice(cls, full_shape: Sequence[int], start: int, piece: Tensor) -> Shard:
        """The elements [start, start + len(piece)) of the tensor, flattened row by row.

        Of a matrix they are at most three boxes: the end of a row, whole rows, the begin of one.
        """
        if len(full_shape) < 2:
            return cls(full_shape, [((start,) * len(full_shape), piece)] if len(piece) else [])
        width = prod(full_shape[1:])
        boxes, done = [], 0
        while done < len(piece):
            row, column = divmod(start + done, width)
            whole_rows = 0 if column else (len(piece) - done) // width
            taken = whole_rows * width or min(width - column, len(piece) - done)
            part = piece[done : done + taken]
            if len(full_shape) > 2 and not whole_rows:  # part of a row that has parts itself
                inner = cls.of_flat_slice(full_shape[1:], column, part)
                boxes += [((row, *o), t.unsqueeze(0)) for o, t in inner.boxes.items()]
            else:
                shape = (max(1, whole_rows), *(full_shape[1:] if whole_rows else (taken,)))
                boxes.append(((row, column, *[0] * (len(full_shape) - 2)), part.view(shape)))
            done += taken
        return cls(full_shape, boxes)

    @classmethod
    def of_slice(cls, full_shape: Sequence[int], dim: int, start: int, piece: Tensor) -> Shard:
        """`piece` is the tensor from index `start` on along `dim`: rows (0) or columns (1)."""
        offset = [0] * len(full_shape)
        offset[dim] = start
        return cls(full_shape, [(offset, piece)] if piece.numel() else [])

    def size(self) -> torch.Size:
        return self.full_shape

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offset, tensor.size()),
                    properties=TensorProperties.create_from_tensor(tensor),
                    size=self.full_shape,
                ),
            )
            for offset, tensor in self.boxes.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, t.size()) for offset, t in self.boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.boxes[index.offset]


# a run without a process group is meant to save in one process
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)

State = dict[str, Tensor | Shard]


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, Shard) else value


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, names: set[str]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.names = names  # of the whole model, of which this rank may hold a part

    def set_up_planner(self, state_dict: State, *args, **kwargs) -> None:
        super().set_up_planner(dict(state_dict), *args, **kwargs)
        self.state_dict = state_dict  # in the copy every `Shard` has become None

    def create_local_plan(self) -> LoadPlan:
        unknown = sorted(self.metadata.state_dict_metadata.keys() - self.names)
        if unknown:
            raise ValueError(f"it has {unknown[0]}, which this model has not")
        return super().create_local_plan()

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, Shard) else value


_CHECKPOINT = "torch.distributed.checkpoint"
_NEEDED = {  # all that the metadata of tensors is made of
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    *((f"{_CHECKPOINT}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *(
        (f"{_CHECKPOINT}.metadata", f"{name}")
        for name in ("ChunkStorageMetadata", "_MEM_FORMAT_ENCODING")
    ),
    *((f"{_CHECKPOINT}.metadata", f"Tensor{name}") for name in ("Properties", "StorageMetadata")),
}


class _MetadataUnpickler(pickle.Unpickler):
    """A checkpoint may come from anybody: build what metadata needs and nothing else."""

    def find_class(self, module: str, name: str):
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in _NEEDED and not dtype:
            raise pickle.UnpicklingError(f"the metadata asks for {module}.{name}: not loaded")
        return super().find_class(module, name)


class _Writer(dcp.FileSystemWriter):
    """PyTorch's writer, and a checksum of each item beside its place in the metadata."""

    def write_data(self, *args, **kwargs):
        written = super().write_data(*args, **kwargs)
        for result in written.value():
            info = result.storage_data
            with open(Path(self.path) / info.relative_path, "rb") as file:
                info.checksum = zlib.crc32(_item(file, info))
        return written


def _item(file: BinaryIO, info: _StorageInfo) -> bytes:
    file.seek(info.offset)
    return file.read(info.length)


class _Reader(dcp.FileSystemReader):
    """PyTorch's reader, but nothing in the folder can run code or leave it.

    The library unpickles `.metadata` and hands byte entries to an unrestricted `torch.load`. Our
    checkpoints hold tensors alone, and those it loads with `weights_only`.
    """

    def read_metadata(self, *args, **kwargs):
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata):
                raise pickle.UnpicklingError(f"{name} is a byte entry, not a tensor: not loaded")
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise pickle.UnpicklingError(f"{info.relative_path} is outside of the checkpoint")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _slice_file(self, file: BinaryIO, info: _StorageInfo) -> BinaryIO:
        item = _item(file, info)
        # a checkpoint that another program wrote has none
        if zlib.crc32(item) != getattr(info, "checksum", zlib.crc32(item)):
            raise ValueError(f"{info.relative_path} is not what was written: its checksum differs")
        return io.BytesIO(item)


def adamw_moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """AdamW's two moments of a parameter; zeros before the first step, which makes them lazily."""
    state = optimizer.state[parameter]
    if not state:
        # fused AdamW wants its step count where the parameter is
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    return {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}


def training_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The tensors of a plain model and its AdamW by their names in a checkpoint."""
    state: State = {}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = parameter.detach()
        for moment, tensor in adamw_moments(optimizer, parameter).items():
            state[f"optim.{moment}.{name}"] = tensor
    return state


def shards_of_flat_slice(
    prefix: str, shapes: dict[str, torch.Size], start: int, piece: Tensor
) -> State:
    """A `Shard` for each of the tensors that lie flat in a row, of which `piece` is a slice.

    shapes: by name, in the row's order. start: where in the row `piece` begins. A tensor that the
    slice does not touch gets an empty shard.
    """
    state: State = {}
    begin = -start  # of the tensor, counted from the slice's first element
    for name, shape in shapes.items():
        first, last = max(begin, 0), max(begin + shape.numel(), 0)
        state[prefix + name] = Shard.of_flat_slice(shape, first - begin, piece[first:last])
        begin += shape.numel()
    return state


def save_checkpoint(folder: str | os.PathLike, step: int, state: State, keep: int = 2) -> Path:
    """Write `state` after `step` steps as `folder/step-...`, then delete all but `keep` of them.

    Every rank calls it. The folder appears under its name when all ranks have written and synced.
    """
    folder = Path(folder)
    final = folder / f"step-{step:08d}"
    aside = folder / f"writing-{step:08d}"
    try:
        if rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for stale in (*folder.glob("writing-*"), *folder.glob("deleting-*")):
                shutil.rmtree(stale)  # of a run that was killed in a save
        if dist.is_initialized():
            barrier()
        dcp.save(
            {**state, "step": torch.tensor(step)},
            storage_writer=_Writer(aside),
            planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=not dist.is_initialized(),
        )
    except (dcp.api.CheckpointException, OSError) as error:
        refuse(f"cannot save {final}: {_first_cause(error)}; older ones are untouched", status=1)
    if rank() == 0:
        if final.exists():
            _delete(final)
        aside.rename(final)
        _sync_folder(folder)
        found = checkpoints(folder)
        here = found.index(final)
        # those past this step are of a run that went on from an earlier one than this
        for old in found[: max(0, here + 1 - keep)] + found[here + 1 :]:
            _delete(old)
    if dist.is_initialized():
        barrier()
    return final


def _delete(path: Path) -> None:
    """Rename, then delete: a folder that is called a checkpoint is whole to its end."""
    aside = path.with_name(f"deleting-{path.name}")
    path.rename(aside)
    shutil.rmtree(aside)


def _sync_folder(folder: Path) -> None:
    """Make the rename survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checkpoints(folder: str | os.PathLike) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = [p for p in Path(folder).glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name)]
    return sorted((p for p in found if (p / ".metadata").is_file()), key=lambda p: int(p.name[5:]))


def load_checkpoint(
    folder: str | os.PathLike, resume: str, state: State, optimizer: torch.optim.Optimizer
) -> int:
    """Fill `state` in place from a checkpoint and return the steps done: 0 for a new run.

    resume: `auto` takes the newest whole checkpoint of `folder`, if there is one; `never` none;
    anything else is a checkpoint's path, or a run's. Refuses what is not one, or of another model.
    """
    if resume == "never":
        return 0
    path = Path(resume)
    if resume == "auto" or not (path / ".metadata").is_file():
        found = checkpoints(folder) if resume == "auto" else checkpoints(path / "checkpoints")
        if not found and resume == "auto":
            return 0
        if not found:
            refuse(f"--resume {resume}: no checkpoint there (a folder step-..., or a run's folder)")
        path = found[-1]
    step = torch.tensor(0)
    try:
        dcp.load(
            {**state, "step": step},
            storage_reader=_Reader(path),
            planner=_LoadPlanner({"step"}.union(*_of_all_ranks(set(state)))),
            no_dist=not dist.is_initialized(),
        )
    except (dcp.api.CheckpointException, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        why = str(_first_cause(error)).strip().split("\n")[0]
        refuse(f"--resume {resume}: {path} does not fit this model, or is damaged: {why}")
    for moments in optimizer.state.values():
        moments["step"].fill_(step.item())
    print0(f"resumed from {path}, {step.item()} steps done")
    return int(step.item())


def _of_all_ranks(value: object) -> list:
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def _first_cause(error: BaseException) -> BaseException:
    """DCP wraps what each rank met in one exception; name the first of them."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error
