"""PyTorch's checkpoint storage, safe to load from anybody, every item checked as it is read.

What is written is the format of `torch.distributed.checkpoint` and nothing else: checksums stand
in the metadata beside each item's place, where PyTorch's own reader does not look.
"""

from __future__ import annotations

import copyreg
import io
import json
import os
import pickle
import zlib
from itertools import groupby
from pathlib import Path, PosixPath
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options


class Damaged(ValueError):
    """A file of the checkpoint is not what was written."""


class Misfit(ValueError):
    """The checkpoint is whole, but another model's."""


# ---- what of a rank's state goes where ----


def _tensor_of(state: dict[str, Any], index: MetadataIndex) -> Tensor:
    value = state[index.fqn]
    return value if isinstance(value, Tensor) else value.__get_tensor_shard__(index)


class SavePlanner(DefaultSavePlanner):
    """PyTorch's, for tensors and for what `common.checkpoint.Shard` is."""

    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return _tensor_of(self.state_dict, index).contiguous()


class LoadPlanner(DefaultLoadPlanner):
    """names: of the whole model, of which this rank may hold a part."""

    def __init__(self, names: set[str]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.names = names

    def set_up_planner(self, state_dict: dict[str, Any], *args, **kwargs) -> None:
        super().set_up_planner(dict(state_dict), *args, **kwargs)
        self.state_dict = state_dict  # in the copy every `Shard` has become None

    def create_local_plan(self) -> LoadPlan:
        unknown = sorted(self.metadata.state_dict_metadata.keys() - self.names)
        if unknown:
            raise Misfit(f"it has {unknown[0]}, which this model has not")
        try:
            return super().create_local_plan()
        except (RuntimeError, ValueError) as error:
            raise Misfit(str(error)) from None

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _tensor_of(self.state_dict, index)


# ---- checksums ----


class Checksum:
    """CRC-32 of the sums of the sectors, each of 512 bytes as 64 words.

    CRC-32 of the bytes themselves would take as long as reading them does. A bit that flips
    changes its sector's sum; a sector that is lost, doubled or another's changes the row of sums.
    """

    SECTOR = 512  # bytes

    def __init__(self):
        self._crc, self._rest = 0, b""

    def update(self, data) -> Checksum:
        data = memoryview(data).cast("B")
        if self._rest:
            missing = self.SECTOR - len(self._rest)
            self._rest, data = self._rest + bytes(data[:missing]), data[missing:]
            if len(self._rest) < self.SECTOR:
                return self
            self._add(self._rest)
        whole = len(data) - len(data) % self.SECTOR
        self._add(data[:whole])
        self._rest = bytes(data[whole:])
        return self

    def _add(self, sectors) -> None:
        words = np.frombuffer(sectors, np.uint64).reshape(-1, self.SECTOR // 8)
        self._crc = zlib.crc32(words.sum(axis=1), self._crc)

    def value(self) -> int:
        return zlib.crc32(self._rest, self._crc)


_IN_CACHE = 2**18  # bytes: what has just been summed or read is still in the core's cache
_MARK = b"\nchecksum "  # behind the metadata's pickle, where whoever unpickles it has stopped


class _Summed:
    """A stream to write an item to, the checksum of what has passed, and where the tensor began.

    Its elements come in one piece; what else `torch.save` writes is shorter than `LEAST`, below
    which they are not looked for.
    """

    LEAST = 4096  # bytes

    def __init__(self, stream: BinaryIO, shape: torch.Size, dtype: torch.dtype):
        self.stream, self.shape, self.dtype = stream, shape, dtype
        self.nbytes, self.checksum = shape.numel() * dtype.itemsize, Checksum()
        self.written, self.tensor_at = 0, None

    def write(self, data) -> int:
        data = memoryview(data).cast("B")
        if len(data) == self.nbytes >= self.LEAST:
            self.tensor_at = self.written
        self.written += len(data)
        for start in range(0, len(data), _IN_CACHE):
            piece = data[start : start + _IN_CACHE]
            self.checksum.update(piece)
            self.stream.write(piece)
        return len(data)

    def flush(self) -> None:
        pass  # the file is, when it is whole

    close = flush


class _SummedItems:
    """Stands where PyTorch would compress an item on its way into the file."""

    def __init__(self):
        self.streams: dict[MetadataIndex, _Summed] = {}

    def transform_save_stream(self, item: WriteItem, stream: BinaryIO) -> tuple[_Summed, list]:
        shape, dtype = item.tensor_data.chunk.sizes, item.tensor_data.properties.dtype
        self.streams[item.index] = _Summed(stream, shape, dtype)
        return self.streams[item.index], []  # no transformation that a reader must undo


def _os_error_behind(error: BaseException | None) -> OSError | None:
    """A full disk, for instance."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


# Python 3.11.2 pickles a member of an enum as getattr(cls, name), later versions as cls(value),
# which every version reads
copyreg.pickle(_MEM_FORMAT_ENCODING, lambda member: (type(member), (member.value,)))


class Writer(dcp.FileSystemWriter):
    """PyTorch's writer of tensors in host memory, and a checksum of each item and the metadata."""

    def __init__(self, path: str | os.PathLike):
        # nothing to copy ahead: it would be in vain, and on GPU 0 of all
        super().__init__(path, per_thread_copy_ahead=0)
        self.transforms = _SummedItems()

    def write_data(self, plan: SavePlan, planner: SavePlanner):
        theirs = get_crc32_options()
        set_crc32_options(False)  # of the zip that holds an item; nobody compares it
        try:
            written = super().write_data(plan, planner)
        except RuntimeError as error:  # the zip writer's, which covers up why a write failed
            raise _os_error_behind(error) or error from None
        finally:
            set_crc32_options(theirs)
        for result in written.value():
            stream = self.transforms.streams[result.index]
            result.storage_data.checksum = stream.checksum.value()
            if stream.tensor_at is not None:
                result.storage_data.raw = (stream.tensor_at, stream.dtype, stream.shape)
        return written

    def storage_meta(self) -> StorageMeta:
        """With the path as a string: Python 3.13 pickles a path under a name that others lack."""
        return StorageMeta(checkpoint_id=str(self.checkpoint_id), save_id=self.save_id)

    def finish(self, metadata: Metadata, results: list) -> None:
        super().finish(metadata, results)
        with open(Path(self.path) / ".metadata", "r+b") as file:
            checksum = Checksum().update(file.read()).value()
            file.write(_MARK + b"%d" % checksum)
            file.flush()
            os.fsync(file.fileno())


# ---- the run that a checkpoint is of ----


def write_description(folder: str | os.PathLike, run: dict[str, Any]) -> None:
    """Write what `run` tells (its arguments, hashes of its corpus) as JSON, with a checksum."""
    checksum = zlib.crc32(json.dumps(run).encode())
    with open(Path(folder) / "run.json", "w") as file:
        json.dump({**run, "checksum": checksum}, file)
        file.flush()
        os.fsync(file.fileno())


def read_description(folder: str | os.PathLike) -> dict[str, Any]:
    """What `write_description` was given; {} where an older version has saved. Raises `Damaged`."""
    try:
        run = json.loads((Path(folder) / "run.json").read_bytes())
        if run.pop("checksum") != zlib.crc32(json.dumps(run).encode()):
            raise ValueError("its checksum differs")
    except FileNotFoundError:
        return {}
    except Exception as error:
        raise Damaged(f"run.json: {error}") from None
    return run


# ---- reading what may come from anybody ----

_CHECKPOINT = "torch.distributed.checkpoint"
_NEEDED = {  # all that the metadata of tensors is made of
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    *((f"{_CHECKPOINT}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((f"{_CHECKPOINT}.metadata", name) for name in ("TensorProperties", "TensorStorageMetadata")),
    *((f"{_CHECKPOINT}.metadata", n) for n in ("ChunkStorageMetadata", "_MEM_FORMAT_ENCODING")),
}


def _member_of_enum(cls: type, name: str) -> _MEM_FORMAT_ENCODING:
    """The one use of `getattr` in metadata: so Python 3.11.2 pickles a member of its enum."""
    if cls is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError("the metadata asks for builtins.getattr: not loaded")
    return cls[name]


_REPLACED = {  # what other versions of Python write, and what is loaded instead
    ("builtins", "getattr"): _member_of_enum,
    ("pathlib._local", "PosixPath"): PosixPath,  # 3.13
}


class MetadataUnpickler(pickle.Unpickler):
    """A checkpoint may come from anybody: build what metadata needs and nothing else."""

    def find_class(self, module: str, name: str):
        if (module, name) in _REPLACED:
            return _REPLACED[module, name]
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in _NEEDED and not dtype:
            raise pickle.UnpicklingError(f"the metadata asks for {module}.{name}: not loaded")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """PyTorch's reader, but nothing in the folder can run code, leave it, or go unchecked.

    The library unpickles `.metadata` and hands byte entries to an unrestricted `torch.load`. Our
    checkpoints hold tensors alone, loaded with `weights_only`; a byte entry is among what the
    metadata may not ask for. Raises `Damaged`.
    """

    def __init__(self, path: str | os.PathLike):
        super().__init__(path)
        self._room = np.empty(0, np.uint8)  # for one item; new memory each time would cost more
        try:
            self._metadata = self._checked_metadata()
        except Exception as error:
            raise Damaged(f".metadata: {error}") from None

    def _checked_metadata(self) -> Metadata:
        content = (Path(self.path) / ".metadata").read_bytes()
        body, mark, checksum = content.rpartition(_MARK)
        # a checkpoint that another program wrote has no checksums
        if mark and checksum != b"%d" % Checksum().update(body).value():
            raise Damaged("its checksum differs")
        metadata = MetadataUnpickler(io.BytesIO(content)).load()
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise Damaged(f"{info.relative_path} is outside of the checkpoint")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_metadata(self) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """In the order of the files, so that an item of which several parts are wanted is read
        once."""

        def place(wanted: ReadItem) -> tuple[str, int]:
            info = self.storage_data[wanted.storage_index]
            return info.relative_path, info.offset

        in_order = sorted(plan.items, key=place)
        for (name, _), parts in groupby(in_order, key=place):
            parts = list(parts)
            with open(Path(self.path) / name, "rb") as file:
                tensor = self._tensor(file, self.storage_data[parts[0].storage_index])
            for part in parts:
                target = planner.resolve_tensor(part).detach()
                box = zip(part.storage_offsets, part.lengths, strict=True)
                source = tensor[tuple(slice(at, at + n) for at, n in box)]
                if source.size() != target.size():
                    raise Damaged(f"{part.storage_index.fqn} in {name} has another shape")
                target.copy_(source)
                planner.commit_tensor(part, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _tensor(self, file: BinaryIO, info: _StorageInfo) -> Tensor:
        """An item, until the next one is read."""
        item = self._checked_item(file, info)
        if getattr(info, "raw", None) is None:
            return torch.load(io.BytesIO(item), map_location="cpu", weights_only=True)
        at, dtype, shape = info.raw
        return torch.frombuffer(item, dtype=dtype, count=shape.numel(), offset=at).view(shape)

    def _checked_item(self, file: BinaryIO, info: _StorageInfo) -> memoryview:
        if len(self._room) < info.length:
            self._room = np.empty(info.length, np.uint8)
        item = memoryview(self._room)[: info.length]
        file.seek(info.offset)
        read, checksum = 0, Checksum()
        while piece := file.readinto(item[read : read + _IN_CACHE]):
            checksum.update(item[read : read + piece])
            read += piece
        whole, expected = read == info.length, getattr(info, "checksum", None)
        if not whole or expected not in (None, checksum.value()):
            name = next(i.fqn for i, at in self.storage_data.items() if at is info)
            wrong = "checksum differs" if whole else "file is too short"
            raise Damaged(f"{name} in {info.relative_path} is not what was written: its {wrong}")
        return item
