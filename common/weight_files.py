"""The safetensors files of a Hugging Face folder: where the values of each tensor are.

A file begins with the length of its header, in 8 bytes. The header (JSON) has each tensor's dtype,
its shape, and where its values begin and end. The values follow, row by row.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import torch

from common.job.atomic_files import exists, sync

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Values(NamedTuple):
    """Where a tensor's values are: from byte `start` of a file on."""

    file: str
    start: int
    dtype: torch.dtype
    shape: torch.Size


class WeightFiles:
    """The headers of a folder's files. ValueError unless the tensors are those of `shapes`."""

    def __init__(self, folder: Path, shapes: dict[str, torch.Size]):
        self.folder = folder
        self.headers: dict[str, bytes] = {}  # by file
        self.values: dict[str, Values] = {}  # by tensor
        self.others: list[tuple[str, int, int]] = []  # file, start, end: no parameters
        index, names = folder / "model.safetensors.index.json", {"model.safetensors"}
        if exists(index):
            names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        for name in sorted(names):
            if Path(name).name != name:
                raise ValueError(f"{index.name} names {name}, a file of another folder")
            self.read_header(name)
        self.bytes_read = sum(map(len, self.headers.values()))  # `read_model` adds the values
        found = {name: values.shape for name, values in self.values.items()}
        differ = {
            "missing": shapes.keys() - found.keys(),
            "not of this model": found.keys() - shapes.keys(),
            "of another shape": {name for name in found if found[name] != shapes.get(name)},
        }
        for what, wrong in differ.items():
            if wrong:
                named = ", ".join(sorted(wrong)[:3])
                raise ValueError(f"{len(wrong)} tensors are {what}: {named}")

    def read_header(self, name: str) -> None:
        path = self.folder / name
        with open(path, "rb", buffering=0) as file:  # nothing is read ahead
            length = file.read(8)
            size = int.from_bytes(length, "little")
            if size > path.stat().st_size:
                raise ValueError(f"{name} is no safetensors file; a pointer of Git LFS, perhaps?")
            header = file.read(size)
        self.headers[name] = length + header
        for tensor, entry in json.loads(header).items():
            if tensor == "__metadata__":
                continue
            dtype, shape = DTYPES.get(entry["dtype"]), torch.Size(entry["shape"])
            start, end = (8 + len(header) + offset for offset in entry["data_offsets"])
            if tensor.endswith("rotary_emb.inv_freq"):  # old versions saved the frequencies
                self.others.append((name, start, end))
                continue
            if dtype is None:
                raise ValueError(f"{tensor} is {entry['dtype']}, not one of {', '.join(DTYPES)}")
            if end - start != shape.numel() * dtype.itemsize or end > path.stat().st_size:
                raise ValueError(f"{name} is truncated in {tensor}")
            self.values[tensor] = Values(name, start, dtype, shape)

    def prepare(self, folder: Path) -> None:
        """Make a folder like this one. Its weight files have headers, but no values yet."""
        shutil.rmtree(folder, ignore_errors=True)  # what a killed process has left
        folder.mkdir(parents=True)
        for path in self.folder.iterdir():  # the configuration, the tokenizer, the index
            if path.suffix in (".json", ".jinja", ".model", ".txt"):
                sync(Path(shutil.copy(path, folder)))
        for name, header in self.headers.items():
            (folder / name).write_bytes(header)
            os.truncate(folder / name, (self.folder / name).stat().st_size)
        for name, start, end in self.others:
            with open(self.folder / name, "rb") as old, open(folder / name, "r+b") as new:
                old.seek(start)
                new.seek(start)
                new.write(old.read(end - start))
