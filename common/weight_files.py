"""The safetensors files of a Hugging Face folder: where the values of each tensor are.

A file begins with the length of its header, in 8 bytes. The header (JSON) has each tensor's dtype,
its shape, and where its values begin and end. The values follow, row by row. For 13 and 15.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from common.distributed import sync

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Values(NamedTuple):
    """Where a tensor's values are: in a file, `start` bytes after the end of its header."""

    file: str
    start: int
    dtype: torch.dtype
    shape: torch.Size


class WeightFiles:
    """The headers of a folder's files. ValueError unless the tensors are those of `shapes`.

    rank, size: each rank compares its part of a matrix that is stored twice.
    """

    def __init__(self, folder: Path, shapes: dict[str, torch.Size], rank: int = 0, size: int = 1):
        self.folder = folder
        self.headers: dict[str, bytes] = {}  # by file, as read
        self.new_headers: dict[str, bytes] = {}  # by file, as written
        self.values: dict[str, list[Values]] = {}  # by tensor; two if a tied head is there as well
        self.to_copy = files_to_copy(folder)
        index = json.loads((folder / INDEX).read_text("utf-8")) if INDEX in self.to_copy else {}
        self.weight_map: dict[str, str] = index.get("weight_map", {})
        names = {Path(name).name for name in self.weight_map.values()} or {SINGLE}
        if SINGLE not in names and (folder / SINGLE).exists():
            raise ValueError(f"{INDEX} does not name {SINGLE}, which is beside it: remove one")
        for name in sorted(names):
            self.read_header(name)
        # old versions saved the rotary frequencies, which are no parameters
        unused = [name for name in self.values if name.endswith("rotary_emb.inv_freq")]
        self.unused = [self.values.pop(name)[0] for name in unused]
        self.bytes_read = sum(map(len, self.headers.values()))  # `read_model` adds the values
        if HEAD in self.values.keys() - shapes.keys() and EMBEDDING in self.values:
            self.values[EMBEDDING] += self.values.pop(HEAD)
            ours, copy = self.values[EMBEDDING]
            parts = (self.bytes_of(each).tensor_split(size)[rank] for each in (ours, copy))
            if (ours.dtype, ours.shape) != (copy.dtype, copy.shape) or not torch.equal(*parts):
                raise ValueError(f"tied embeddings, and a {HEAD} with other values")
        found = {name: values[0].shape for name, values in self.values.items()}
        if differ := sorted(dict(found.items() ^ shapes.items())):
            ours, theirs = (each.get(differ[0], "absent") for each in (shapes, found))
            what = f"{differ[0]} is {theirs} there, and {ours} according to config.json"
            raise ValueError(f"{len(differ)} tensors of the files do not fit: {what}")

    def read_header(self, name: str) -> None:
        path = self.folder / name
        with open(path, "rb", buffering=0) as file:  # nothing is read ahead
            length = file.read(8)
            size = int.from_bytes(length, "little")
            if size > path.stat().st_size:
                raise ValueError(f"{name} is no safetensors file; a pointer of Git LFS, perhaps?")
            header = file.read(size)
        entries = json.loads(header)
        metadata = entries.pop("__metadata__", {})
        self.headers[name], self.new_headers[name] = length + header, header_of(entries, metadata)
        for tensor, entry in entries.items():
            if (listed := self.weight_map.get(tensor, name)) != name:
                raise ValueError(f"{tensor} is in {name}, but in {listed} according to {INDEX}")
            if tensor in self.values:
                raise ValueError(f"{tensor} is in {self.values[tensor][0].file}, and in {name}")
            dtype, shape = DTYPES.get(entry["dtype"]), torch.Size(entry["shape"])
            start, end = entry["data_offsets"]
            if dtype is None:
                raise ValueError(f"{tensor} is {entry['dtype']}, not one of {', '.join(DTYPES)}")
            is_short = 8 + size + end > path.stat().st_size
            if end - start != shape.numel() * dtype.itemsize or is_short:
                raise ValueError(f"{name} is truncated in {tensor}")
            self.values[tensor] = [Values(name, start, dtype, shape)]

    def bytes_of(self, values: Values) -> Tensor:
        """A tensor's values as they are stored; memory-mapped: only what is used is read."""
        start = len(self.headers[values.file]) + values.start
        end = start + values.shape.numel() * values.dtype.itemsize
        path = str(self.folder / values.file)
        return torch.from_file(path, size=end, dtype=torch.uint8)[start:]

    def prepare(self, folder: Path) -> None:
        """Make a folder like this one. Its weight files have headers, but no values yet."""
        shutil.rmtree(folder, ignore_errors=True)  # what a killed process has left
        folder.mkdir(parents=True)
        for name in self.to_copy:  # the configuration, the tokenizer, the index
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(self.folder / name, folder / name)
        for name, header in self.new_headers.items():
            (folder / name).write_bytes(header)
            n_bytes = (self.folder / name).stat().st_size - len(self.headers[name])
            os.truncate(folder / name, len(header) + n_bytes)
        for values in self.unused:
            with open(folder / values.file, "r+b") as file:
                file.seek(len(self.new_headers[values.file]) + values.start)
                file.write(self.bytes_of(values).numpy())

    def try_to_prepare(self, folder: Path) -> None:
        """OSError if the model could not be written now: try it before the first step."""
        try:
            self.prepare(folder)
            needed = sum(path.stat().st_size for path in folder.rglob("*"))
            if (free := shutil.disk_usage(folder).free) < needed:
                raise OSError(f"{needed / 1e9:,.2f} GB are needed, {free / 1e9:,.2f} GB are free")
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write float32 tensors as one file."""
    entries, end = {}, 0
    for name, t in tensors.items():
        places = [end, end := end + t.nbytes]
        entries[name] = {"dtype": "F32", "shape": [*t.shape], "data_offsets": places}
    with open(path, "wb") as file:
        file.write(header_of(entries, {}))
        for t in tensors.values():
            file.write(t.detach().cpu().contiguous().numpy())


def publish(folder: Path, out: Path) -> None:
    """Rename a folder to `out` when all that is in it is on the disk: complete, or absent."""
    for path in (*folder.rglob("*"), folder):
        sync(path)
    folder.rename(out)
    sync(out.parent)


def files_to_copy(folder: Path) -> list[str]:
    """What belongs to a model beside its weights, also a link whose file is missing."""
    named = [folder.glob(f"*{suffix}") for suffix in (".json", ".jinja", ".model", ".txt")]
    named += [folder.glob("LICENSE*"), folder.glob("additional_chat_templates/*.jinja")]
    return sorted({str(p.relative_to(folder)) for x in named for p in x if not p.is_dir()})


def header_of(entries: dict, metadata: dict[str, str]) -> bytes:
    """A header that all readers accept: with the format, and padded to 8 bytes."""
    entries = {"__metadata__": {**metadata, "format": "pt"}, **entries}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
