"""What `dcp.async_save` and `dcp.load` call: atomic commits, checksums and safe unpickling.

The files are those of `torch.distributed.checkpoint` (DCP), so PyTorch's own tools read them. A
64-bit XXH3 checksum of each stored item is beside the item's offset in the metadata, where
PyTorch's reader ignores it. The metadata's own follows its pickle, which unpickling does not read
past. Both are verified before anything is used. The path of a tensor, or of a `Shard`'s chunks:

    Checkpointer.save
        AtomicWriter.stage                       copies it to host memory; the rest in a thread
        Shard.__create_write_items__             lists each chunk as an item, PyTorch each tensor
        AtomicWriter.prepare_global_plan         rank 0: makes the folder `writing-...`
        AtomicWriter.write_data                  hashes and writes each item of this rank
            SavePlanner.lookup_object            finds the copy of the item
        AtomicWriter.finish                      rank 0: writes `.metadata`; renames to `step-...`
    Checkpointer.load
        Reader.__init__                          verifies and unpickles `.metadata`
        LoadPlanner.create_local_plan            lists the parts of items that this rank needs
        Reader.read_data                         copies each part to its place
            Reader.read                          reads an item and verifies its checksum
            LoadPlanner.lookup_tensor            finds the tensor or chunk that a part is copied to
"""

import copyreg
import io
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.futures import Future
from torch.utils.serialization import config
from xxhash import xxh3_64_intdigest

from common.distributed import replacing, sync

RUN = " run"  # key of the run's arguments and hashes in the metadata
SEAL = b"\nxxh3_64 "  # between the pickle of the metadata and its checksum


class IncompatibleCheckpointError(Exception):
    """The checkpoint is intact, but belongs to another model or another program."""


# ---- saving ----


class AtomicWriter(dcp.FileSystemWriter):
    """PyTorch's writer, plus checksums and an atomic commit.

    Ranks write into `writing-...`, which becomes `step-...` when all of them have written and
    synced. keep: how many checkpoints then remain. run: stored in the metadata.
    """

    def __init__(self, folder: Path, step: int, keep: int, run: dict | None = None):
        super().__init__(folder / f"writing-{step:08d}")
        self.folder, self.final, self.keep = folder, folder / f"step-{step:08d}", keep
        self.run = run
        # Python 3.11.2 pickles an enum's member as getattr(cls, name), later versions as
        # cls(value), which every version can read.
        copyreg.pickle(_MEM_FORMAT_ENCODING, lambda member: (type(member), (member.value,)))

    def stage(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy to host memory, so that training may change the tensors during the save."""

        def to_host(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().filename:  # mapped: as large as the file, and not in memory
                return tensor
            return tensor.to("cpu", copy=True, non_blocking=True)  # from a GPU to pinned memory

        copy = {
            name: to_host(value) if isinstance(value, Tensor) else value.map(to_host)
            for name, value in state.items()
        }
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copy

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        return plan  # PyTorch's version creates the folder on every rank

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Create the folder. Runs on rank 0, before any rank writes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():  # of a save or deletion that did not end
            if re.fullmatch(r"(writing-|deleting-step-)\d{8,}", path.name):
                shutil.rmtree(path, ignore_errors=True)
        self.path.mkdir()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list]:
        name, results = f"{plan.storage_data.prefix}0.distcp", []
        with replacing(self.path / name) as file:
            for item in plan.items:
                buffer = io.BytesIO()
                # without the zip archive's own checksum, which PyTorch never verifies
                with config.patch("save.compute_crc32", False):
                    torch.save(planner.lookup_object(item.index), buffer)
                content = buffer.getbuffer()
                info = _StorageInfo(name, file.tell(), len(content))
                info.xxh3_64 = xxh3_64_intdigest(content)
                results.append(WriteResult(item.index, len(content), info))
                file.write(content)
        return completed(results)

    def finish(self, metadata: dcp.Metadata, results: list) -> None:
        """Commit. Runs on rank 0, after every rank has written."""
        # DCP's readers look up tensors here by their names, of which " run" is none
        metadata.planner_data = {RUN: self.run}
        metadata.storage_data = {x.index: x.storage_data for of_rank in results for x in of_rank}
        content = pickle.dumps(metadata)
        with replacing(self.path / ".metadata") as file:
            file.write(content + SEAL + b"%d" % xxh3_64_intdigest(content))
        sync(self.path)  # so that the names of all files survive a power failure
        self.path.rename(self.final)
        sync(self.folder)  # and this one
        found = checkpoints(self.folder)
        for old in found[: max(0, found.index(self.final) + 1 - self.keep)]:
            # renamed first: a folder that is called `step-...` stays complete. If a file is in use,
            # the next save tries again.
            shutil.rmtree(old.rename(old.with_name(f"deleting-{old.name}")), ignore_errors=True)


class SavePlanner(dcp.DefaultSavePlanner):
    """PyTorch's planner, for tensors and for `common.shards.Shard`."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        tensor = find_tensor_shard(self.state_dict[index.fqn], index)
        return tensor.clone(memory_format=torch.contiguous_format)  # a view's storage may be larger


def checkpoints(folder: str | os.PathLike) -> list[Path]:
    """The checkpoints in a folder, oldest first. A save that is not complete has another name.

    Raises OSError if the folder cannot be read: that does not mean that there are none.
    """
    try:
        found = [p for p in Path(folder).iterdir() if re.fullmatch(r"step-\d{8,}", p.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=lambda p: int(p.name[5:]))


# ---- loading ----


class Reader(dcp.FileSystemReader):
    """PyTorch's reader, but no file can run code, lie outside of the folder or miss its checksum.

    PyTorch unpickles `.metadata` without restriction, and byte entries too. Here the metadata
    cannot contain byte entries.
    """

    def __init__(self, path: str | os.PathLike):
        super().__init__(path)
        content, seal, checksum = (self.path / ".metadata").read_bytes().rpartition(SEAL)
        if not seal:
            raise ValueError(".metadata has no checksum: cut short, or not saved by this version")
        if checksum != b"%d" % xxh3_64_intdigest(content):
            raise ValueError(".metadata: the checksum differs")
        self.metadata = MetadataUnpickler(io.BytesIO(content)).load()
        for info in self.metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise ValueError(f"{info.relative_path} is outside of the checkpoint")

    def read_metadata(self) -> dcp.Metadata:
        return self.metadata

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        """Read every item once, by offset, and copy its parts."""
        parts: dict[MetadataIndex, list[dcp.ReadItem]] = {}
        for part in plan.items:
            parts.setdefault(part.storage_index, []).append(part)
        for index in sorted(parts, key=lambda index: self.storage_data[index].offset):
            tensor = torch.load(io.BytesIO(self.read(index)), weights_only=True)
            for part in parts[index]:
                source = narrow_tensor_by_index(tensor, part.storage_offsets, part.lengths)
                planner.resolve_tensor(part).detach().copy_(source)
        return completed(None)

    def read(self, index: MetadataIndex) -> bytes:
        info = self.storage_data[index]
        with open(self.path / info.relative_path, "rb") as file:
            file.seek(info.offset)
            content = file.read(info.length)
        if info.xxh3_64 != xxh3_64_intdigest(content):
            raise ValueError(f"{index.fqn} in {info.relative_path}: the checksum differs")
        return content


DCP = "torch.distributed.checkpoint"
ALLOWED = {  # all that the metadata of tensors consists of, besides dtypes
    "collections": ("OrderedDict",),
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
    f"{DCP}.filesystem": ("_StorageInfo",),
    f"{DCP}.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        *("TensorProperties", "TensorStorageMetadata", "ChunkStorageMetadata"),
    ),
}


class MetadataUnpickler(pickle.Unpickler):
    """Unpickle the classes of metadata and nothing else: a pickle can run any code."""

    def find_class(self, module: str, name: str):
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name not in ALLOWED.get(module, ()) and not is_dtype:
            raise pickle.UnpicklingError(f"the metadata asks for {module}.{name}: not loaded")
        return super().find_class(module, name)


class LoadPlanner(dcp.DefaultLoadPlanner):
    """The same for loading. names: all tensors of the model, of which this rank may hold some."""

    def __init__(self, names: set[str]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.names = names

    def set_up_planner(self, state_dict: dict[str, Any], metadata: dcp.Metadata, *_) -> None:
        self.state_dict, self.metadata = state_dict, metadata  # PyTorch's version copies `Shard`s

    def create_local_plan(self) -> dcp.LoadPlan:
        unknown = sorted(self.metadata.state_dict_metadata.keys() - self.names)
        if unknown:
            raise IncompatibleCheckpointError(f"it has {unknown[0]}, which this model lacks")
        try:
            return super().create_local_plan()
        except (RuntimeError, ValueError) as error:
            raise IncompatibleCheckpointError(str(error)) from None

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return find_tensor_shard(self.state_dict[index.fqn], index)


def completed(value: object) -> Future:
    future = Future()
    future.set_result(value)
    return future
