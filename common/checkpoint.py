"""Sharded checkpoints in the format of `torch.distributed.checkpoint` (DCP).

One folder a step. Every rank writes what it owns under the names of the plain `Transformer` and
its AdamW, so that a checkpoint of any stage on any topology loads in any other:

    model.layers.0.attn.wqkv.weight                 float32, the parameter
    optim.exp_avg.layers.0.attn.wqkv.weight         AdamW's moments
    optim.exp_avg_sq.layers.0.attn.wqkv.weight
    step                                            int64: optimizer steps done

A folder is written under another name and renamed when every rank is done: what is called
`step-...` is whole. Seed and step give weights, data order and dropout, so nothing else is saved.
Beside the tensors `run.json` tells the arguments and the hashes of vocabulary and corpus, so that
to resume with others is an error or is said.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import AsyncStager

from common.distributed import print0, rank, refuse
from common.storage import (
    Damaged,
    LoadPlanner,
    Misfit,
    Reader,
    SavePlanner,
    Writer,
    read_description,
    write_description,
)


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

        Of a matrix they are at most three boxes: the end of a row, whole rows, a row's beginning.
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

    def map(self, function: Callable[[Tensor], Tensor]) -> Shard:
        """The same cut of what `function` makes of this one's tensors."""
        return Shard(self.full_shape, [(o, function(t)) for o, t in self.boxes.items()])

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.boxes[index.offset]


# a run without a process group is meant to save in one process
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)

State = dict[str, Tensor | Shard]


def adamw_moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """AdamW's two moments of a parameter; zeros before the first step, which makes them lazily."""
    state = optimizer.state[parameter]
    if not state:
        # fused AdamW wants its step count where the parameter is
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    return {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}


def training_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    cut: dict[str, int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> State:
    """The tensors of a plain model and its AdamW by their names in a checkpoint.

    cut: along which dimension a parameter of this name is a slice, equal on all ranks of `group`.
    """
    state: State = {}
    for name, parameter in model.named_parameters():
        tensors = {"model": parameter.detach()}
        tensors |= {f"optim.{k}": t for k, t in adamw_moments(optimizer, parameter).items()}
        if cut and name in cut:
            dim, shape = cut[name], list(parameter.shape)
            start = dist.get_rank(group) * shape[dim]
            shape[dim] *= dist.get_world_size(group)
            tensors = {k: Shard.of_slice(shape, dim, start, t) for k, t in tensors.items()}
        state |= {f"{kind}.{name}": t for kind, t in tensors.items()}
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


class _Commit(Writer):
    """Writes aside; the folder gets its name when all ranks have written and synced."""

    def __init__(self, folder: Path, step: int, keep: int, run: dict | None):
        super().__init__(folder / f"writing-{step:08d}")
        self.folder, self.final, self.keep = folder, folder / f"step-{step:08d}", keep
        self.run = run

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # PyTorch's makes the folder, on every rank

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0, and nobody writes before it is done."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in (*self.folder.glob("writing-*"), *self.folder.glob("deleting-*")):
            shutil.rmtree(stale)  # of a run that was killed in a save
        self.path.mkdir()
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list) -> None:
        """On rank 0, when everybody has written."""
        super().finish(metadata, results)
        if self.run is not None:
            write_description(self.path, self.run)
        if self.final.exists():
            _delete(self.final)
        self.path.rename(self.final)
        _sync_folder(self.folder)
        found = checkpoints(self.folder)
        here = found.index(self.final)
        # those past this step are of a run that went on from an earlier one than this
        for old in found[: max(0, here + 1 - self.keep)] + found[here + 1 :]:
            _delete(old)


class _HostCopy(AsyncStager):
    """What is written is a copy, so that training may go on and change the weights."""

    _synchronize_after_execute = False

    def stage(self, state: State) -> State:
        copy = {
            name: value.map(_to_host) if isinstance(value, Shard) else _to_host(value)
            for name, value in state.items()
        }
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copy


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True, non_blocking=True)  # from a GPU: into pinned memory


class CheckpointFolder(os.PathLike):
    """A run's checkpoints: a path, and the save that is under way there.

    timeout: of the collectives of saves, which have a process group of their own: they come when
    a disk is ready, and on training's group they would get in between training's.
    run: `arguments`, and the hashes `vocabulary` and `corpus`. Saved with each checkpoint, and
    compared with those of the one that is resumed from.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        timeout: timedelta | None = None,
        run: dict | None = None,
    ):
        self.path, self.run = Path(path), run
        self.group = None
        if dist.is_initialized():
            self.group = dist.new_group(backend="gloo", timeout=timeout, group_desc="checkpoints")
        self.held = 0.0  # seconds that saves have kept training waiting
        self._saving: tuple[_Commit, Future] | None = None

    def __fspath__(self) -> str:
        return str(self.path)

    def save(self, step: int, state: State, keep: int) -> None:
        """Wait for the save before, copy `state` to host memory, and write it in the background."""
        started = time.perf_counter()
        self.wait()
        writer = _Commit(self.path, step, keep, self.run)
        future = dcp.async_save(
            {**state, "step": torch.tensor(step)},
            storage_writer=writer,
            planner=SavePlanner(),
            process_group=self.group,
            async_stager=_HostCopy(),
            no_dist=self.group is None,
        )
        self._saving = writer, future
        self.held += time.perf_counter() - started

    def has_failed(self) -> bool:
        """Has this rank learnt that the save under way has come to nothing?"""
        saving = self._saving
        return saving is not None and saving[1].done() and saving[1].exception() is not None

    def wait(self) -> None:
        """Until the save under way is whole on disk. Refuses to go on if it cannot be."""
        if self._saving is None:
            return
        (writer, future), self._saving = self._saving, None
        try:
            future.result()
        except dcp.api.CheckpointException as error:
            if rank() == 0:  # no rank writes any longer
                shutil.rmtree(writer.path, ignore_errors=True)
            why = _first_cause(error)
            refuse(f"cannot save {writer.final}: {why}; older ones are untouched", status=1)

    def close(self) -> None:
        self.wait()
        if self.group is not None:
            dist.destroy_process_group(self.group)


def save_checkpoint(folder: str | os.PathLike, step: int, state: State, keep: int = 2) -> None:
    """Write `state` after `step` steps as `folder/step-...`, then delete all but `keep` of them.

    Every rank calls it. The folder appears under its name when all ranks have written and synced:
    in the background if `folder` is a `CheckpointFolder`, else before this returns.
    """
    if isinstance(folder, CheckpointFolder):
        folder.save(step, state, keep)
        return
    alone = CheckpointFolder(folder)
    alone.save(step, state, keep)
    alone.close()


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

    resume: `auto` takes the newest checkpoint of `folder` that is whole, if there is any; `never`
    none; anything else is a checkpoint's path, or a run's. Refuses what is not one, or of another
    model. A damaged one is named, and the one before it taken.
    """
    if resume == "never":
        return 0
    found = _of_all_ranks(_candidates(folder, resume))[0]  # rank 0's: others may see them later
    if not found and resume == "auto":
        return 0
    if not found:
        refuse(f"--resume {resume}: no checkpoint there (a folder step-..., or a run's folder)")
    for path, older in zip(found, [*found[1:], None], strict=True):
        try:
            step, notes = _fill(state, path, getattr(folder, "run", None))
            break
        except Misfit as error:
            refuse(f"--resume {resume}: {path} does not fit this model: {error}")
        except Damaged as error:
            if older is None:
                refuse(f"--resume {resume}: {path} is damaged, and no older one left: {error}")
            print0(f"{path} is damaged: {error}; going back to {older.name}")
    for moments in optimizer.state.values():
        moments["step"].fill_(step)
    for note in notes:
        print0(note)
    print0(f"resumed from {path}, {step} steps done")
    return step


def _candidates(folder: str | os.PathLike, resume: str) -> list[Path]:
    """The checkpoints to try, in this order."""
    path = Path(resume)
    if resume != "auto" and (path / ".metadata").is_file():
        return [path]
    return checkpoints(folder if resume == "auto" else path / "checkpoints")[::-1]


# arguments that may differ from those of the run that saved, but not in silence
NOTED = ("seed", "seq_len", "global_batch_size", "lr", "warmup_steps", "min_lr_ratio", "steps")
NOTED += ("weight_decay", "grad_clip", "dropout")


def _compare(path: Path, run: dict) -> list[str]:
    """What to tell of the differences between this run and the one that saved the checkpoint.

    Raises `Misfit` for a model whose shapes may be the same but not their meaning.
    """
    before = read_description(path)
    if not before:
        return [f"{path} has no run.json: its arguments and vocabulary are not compared"]
    try:
        old, new = before["arguments"], run["arguments"]
        if old["n_heads"] != new["n_heads"]:
            raise Misfit(f"it has {old['n_heads']!r} heads, not --n-heads {new['n_heads']}")
        if before["vocabulary"] != run["vocabulary"]:
            raise Misfit("it has another vocabulary: pass the --data it was trained on")
        notes = [
            f"--{name.replace('_', '-')} is now {new[name]}, was {old[name]!r}"
            for name in NOTED
            if old[name] != new[name]
        ]
        if before["corpus"] != run["corpus"]:
            notes.append(f"the corpus is now {run['corpus']}, was {before['corpus']!r} (hashes)")
    except (KeyError, TypeError) as error:
        raise Damaged(f"run.json: {type(error).__name__}: {error}") from None
    return notes


def _fill(state: State, path: Path, run: dict | None) -> tuple[int, list[str]]:
    """Fill `state` from one checkpoint; the steps done, and what to tell of it.

    Every rank raises the same, or none: `Damaged` if any rank cannot read what it needs, `Misfit`
    if it is of another model.
    """
    notes: list[str] = []
    try:
        reader, problem = Reader(path), None
        notes = _compare(path, run) if run is not None else []
    except (Damaged, Misfit) as error:
        reader, problem = None, error
    told = _of_all_ranks((problem, set(state)))
    for problem, _ in told:
        if problem is not None:
            raise problem
    step = torch.tensor(0)
    try:
        dcp.load(
            {**state, "step": step},
            storage_reader=reader,
            planner=LoadPlanner({"step"}.union(*(names for _, names in told))),
            no_dist=not dist.is_initialized(),
        )
    except dcp.api.CheckpointException as error:
        why = _first_cause(error)
        kind = Misfit if isinstance(why, Misfit) else Damaged
        raise kind(str(why).strip().split("\n")[0]) from None
    return int(step.item()), notes


def _of_all_ranks(value: object) -> list:
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def _first_cause(error: dcp.api.CheckpointException) -> BaseException:
    """DCP wraps what each rank met in one exception; name the first of them."""
    return next(iter(error.failures.values()))[0]
