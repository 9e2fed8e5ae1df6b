"""Export the newest checkpoint of a run as one plain file of weights, on the CPU.

    python -m tools.export runs/04_fsdp/20250101-120000 [--out model.pt]
    python -m tools.export runs/04_fsdp/20250101-120000/checkpoints/step-00000100

`torch.load(..., weights_only=True)` reads it: the full `state_dict` of a
`common.model.Transformer`, whatever stage and topology the run had. Without a folder it exports the
run that saved last.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from common.arguments import Parser
from common.atomic_files import exists
from common.checkpoint import checkpoints
from common.checkpoint_storage import CorruptCheckpointError, LoadPlanner, Reader
from common.distributed import fail, save0


def newest_run() -> Path:
    """The folder under `runs/`, or under a link there, with the newest checkpoint in it."""
    runs, seen = set(), set()
    for name, folders, _ in os.walk(Path(__file__).resolve().parents[1] / "runs", followlinks=True):
        if (folder := Path(name)).resolve() in seen:
            folders.clear()  # a link to a folder above it has no end
        elif folder.name == "checkpoints" and checkpoints(folder):
            runs.add(folder.parent)
        seen.add(folder.resolve())
    if not runs:
        fail("no run here has a checkpoint: name a run's folder, or train --checkpoint-every 100")
    return max(runs, key=lambda run: checkpoints(run / "checkpoints")[-1].lstat().st_mtime)


def tensors_of(checkpoint: Path, prefix: str = "model.") -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, by the rest of their names: unsharded."""
    try:
        reader = Reader(checkpoint)
        entries = reader.read_metadata().state_dict_metadata
        state = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in sorted(entries.items())
            if name.startswith(prefix)
        }
        planner = LoadPlanner(set(entries))
        with warnings.catch_warnings(action="ignore"):  # that it loads in a single process
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    except (CorruptCheckpointError, dcp.api.CheckpointException) as error:
        if isinstance(error, dcp.api.CheckpointException):
            error, _ = next(iter(error.failures.values()))
        fail(f"{checkpoint} cannot be read: {str(error).splitlines()[0]}", status=1)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def run_and_checkpoint(path: Path) -> tuple[Path, Path]:
    """A run's folder and its newest checkpoint, or a checkpoint and the folder of its run."""
    path = path.resolve()
    try:
        if exists(path / ".metadata"):
            return path.parents[path.parent.name == "checkpoints"], path
        found = checkpoints(path / "checkpoints")
    except OSError as error:
        fail(f"{path} cannot be read: {error}")
    if not found:
        fail(f"{path}: no checkpoint with its .metadata there; train with --checkpoint-every")
    return path, found[-1]


def export(checkpoint: Path, out: Path) -> None:
    weights = tensors_of(checkpoint)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        save0(weights, out)
    except OSError as error:  # a folder, for example, or another user's
        fail(f"--out {out}: {error}: name a file that can be written")
    millions = sum(t.numel() for t in weights.values()) / 1e6
    print(f"{out}: {len(weights)} tensors, {millions:.2f} M parameters, from {checkpoint}")


if __name__ == "__main__":
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", nargs="?", type=Path, help="a run's folder, or a checkpoint's")
    parser.add_argument("--out", type=Path, help="default: model.pt in the run's folder")
    args = parser.parse_args()
    run, checkpoint = run_and_checkpoint(args.run or newest_run())
    export(checkpoint, args.out or run / "model.pt")
