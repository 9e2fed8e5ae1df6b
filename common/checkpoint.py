"""Sharded checkpoints in the format of `torch.distributed.checkpoint` (DCP).

One folder per step, called `step-...` once every rank has written. Each writes what it owns, under
the names of the plain `Transformer` and its AdamW, so any stage on any topology can load it:

    model.layers.0.attn.wqkv.weight                 float32, the parameter
    optim.exp_avg.layers.0.attn.wqkv.weight         AdamW's first moment
    optim.exp_avg_sq.layers.0.attn.wqkv.weight      and its second
    step                                            int64: optimizer steps done
"""

from __future__ import annotations

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
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType

from common import checkpoint_storage as storage
from common.atomic_files import exists, move_aside
from common.checkpoint_storage import checkpoints
from common.distributed import fail, print0, rank


class Shard:
    """What one rank owns of a tensor: chunks of it, by their offsets, as views of its memory.

    DCP's planners accept any object with the three `__...__` methods below, as they accept DTensor,
    so a shard needs no device mesh and no process group. A rank may own no chunk at all.
    """

    def __init__(self, full_shape: Sequence[int], chunks: Iterable[tuple[Sequence[int], Tensor]]):
        self.full_shape = torch.Size(full_shape)
        self.chunks = {torch.Size(offset): tensor for offset, tensor in chunks}

    @classmethod
    def of_slice(cls, full_shape: Sequence[int], dim: int, start: int, tensor: Tensor) -> Shard:
        """`tensor` is the full one from index `start` on along `dim`: rows (0) or columns (1)."""
        offset = [0] * len(full_shape)
        offset[dim] = start
        return cls(full_shape, [(offset, tensor)] if tensor.numel() else [])

    @classmethod
    def of_flat_slice(cls, full_shape: Sequence[int], start: int, flat: Tensor) -> Shard:
        """`flat` holds the elements from `start` on of the full tensor, flattened row by row.

        Of a matrix these are at most three chunks: the end of a row, full rows, the start of one.
        """
        if not full_shape:
            return cls((), [((), flat.view(()))] if len(flat) else [])
        row_shape = full_shape[1:]
        row_size, chunks = prod(row_shape), []
        while len(flat):
            row, column = divmod(start, row_size)
            rows = 0 if column else len(flat) // row_size
            taken = rows * row_size or min(row_size - column, len(flat))
            if rows:
                chunks.append(((row, *[0] * len(row_shape)), flat[:taken].view(-1, *row_shape)))
            else:
                part = cls.of_flat_slice(row_shape, column, flat[:taken])
                chunks += [((row, *offset), t[None]) for offset, t in part.chunks.items()]
            start, flat = start + taken, flat[taken:]
        return cls(full_shape, chunks)

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
            dim, shape = shard_dims[name], list(parameter.shape)
            start = dist.get_rank(group) * shape[dim]
            shape[dim] *= dist.get_world_size(group)
            tensors = {k: Shard.of_slice(shape, dim, start, t) for k, t in tensors.items()}
        state |= {f"{kind}.{name}": t for kind, t in tensors.items()}
    return state


def state_of_flat_tensors(
    tensors: dict[str, Tensor], shapes: dict[str, torch.Size], start: int
) -> State:
    """A `Shard` of each tensor in a flat parameter, and of its first and second moments.

    tensors: as `tensors_of` a shard of the flat parameter, which begins at its element `start`.
    shapes: by name, in the flat parameter's order. A tensor outside of it gets an empty shard.
    """
    state: State = {}
    for kind, flat in tensors.items():
        begin = -start  # of the tensor, relative to `flat`
        for name, shape in shapes.items():
            first, last = max(begin, 0), max(begin + shape.numel(), 0)
            state[f"{kind}.{name}"] = Shard.of_flat_slice(shape, first - begin, flat[first:last])
            begin += shape.numel()
    return state


class Checkpointer:
    """Saves checkpoints into a folder in the background, and loads them.

    timeout: of the collectives. They have a process group of their own, because a save issues
    them whenever its disk is ready. run: the run's `arguments` and hashes of its `vocabulary` and
    `corpus`, saved with each checkpoint and compared with those of the one resumed from.
    """

    def __init__(self, path: str | Path, timeout: timedelta | None = None, run: dict | None = None):
        self.path, self.run = Path(path), run
        self.group = None
        if dist.is_initialized():
            self.group = dist.new_group(backend="gloo", timeout=timeout, group_desc="checkpoints")
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP's, in one process
        self._ranks = {"process_group": self.group, "no_dist": self.group is None}
        self.is_own = False  # whether `load` has loaded a checkpoint of this folder
        self.blocked_seconds = 0.0  # time for which saves have blocked training
        self._saving: tuple[storage.AtomicWriter, Future] | None = None

    def save(self, step: int, state: State, keep: int = 2) -> None:
        """Save `state` after `step` steps; then delete all but the last `keep` checkpoints.

        Every rank calls it. It waits for the previous save, copies `state` to host memory and
        returns; the rest runs in the background.
        """
        self.wait()
        started = time.perf_counter()
        writer = storage.AtomicWriter(self.path, step, keep, self.run)
        planner = storage.SavePlanner(flatten_state_dict=False)
        state = {**state, "step": torch.tensor(step)}
        future = dcp.async_save(state, storage_writer=writer, planner=planner, **self._ranks)
        self._saving = writer, future
        self.blocked_seconds += time.perf_counter() - started

    def has_failed(self) -> bool:
        """Whether this rank knows that the save in flight has failed."""
        future = self._saving and self._saving[1]
        return bool(future and future.done() and future.exception())

    def wait(self) -> None:
        """Wait until the save in flight is complete on disk. Exits if it has failed."""
        if self._saving is None:
            return
        started = time.perf_counter()
        (writer, future), self._saving = self._saving, None
        try:
            future.result()
            self.blocked_seconds += time.perf_counter() - started
        except dcp.api.CheckpointException as error:
            if rank() == 0:  # every rank has stopped writing
                shutil.rmtree(writer.path, ignore_errors=True)
            cause, _ = next(iter(error.failures.values()))  # of the first rank that failed
            fail(f"cannot save {writer.final}: {cause}; older ones are untouched", status=1)

    def close(self) -> None:
        self.wait()
        if self.group is not None:
            dist.destroy_process_group(self.group)

    def full_weights(self, state: State) -> dict[str, Tensor]:
        """The full weights by the plain model's names: in rank 0's memory, elsewhere none.

        Every rank calls it. The chunks of a checkpoint of `state` travel there one at a time.
        """
        self.wait()  # the save in flight uses the same process group
        planner = storage.SavePlanner(flatten_state_dict=False)
        named = [(n.removeprefix("model."), t) for n, t in state.items() if n.startswith("model.")]
        planner.set_up_planner(dict(named))
        plans, metadata = planner.create_global_plan(self._gather(planner.create_local_plan()))
        if rank() > 0:
            for item in plans[rank()].items:
                dist.send(planner.lookup_object(item.index).cpu(), 0, group=self.group)
            return {}
        entries = sorted(metadata.state_dict_metadata.items())
        full = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in entries}
        for owner, plan in enumerate(plans):
            for item in plan.items:
                chunk = item.tensor_data.chunk
                ends = map(sum, zip(chunk.offsets, chunk.sizes, strict=True))
                place = full[item.index.fqn][tuple(map(slice, chunk.offsets, ends))]
                if owner > 0:
                    received = torch.empty(chunk.sizes, dtype=place.dtype)
                    dist.recv(received, owner, group=self.group)
                place.copy_(received if owner > 0 else planner.lookup_object(item.index))
        return full

    def load(self, resume: str, state: State, optimizer: torch.optim.Optimizer) -> int:
        """Fill `state` in place from a checkpoint; return the steps done, 0 for a new run.

        resume: `auto` (the newest complete checkpoint of this folder, if any), `never`, or the path
        of a checkpoint or of a run. A corrupt one is reported, and the previous one is used.
        """
        if resume == "never":
            return 0
        try:
            found: list[Path] | OSError = self._candidates(resume)
        except OSError as unreadable:
            found = unreadable
        found = self._gather(found)[0]  # rank 0's: shared file systems may lag
        if isinstance(found, OSError):
            fail(f"--resume {resume}: cannot be read: {found}")
        if not found:
            if resume == "auto":
                return 0
            fail(f"--resume {resume}: no checkpoint there (step-... with .metadata, or a run's)")
        for number, path in enumerate(found):
            try:
                step, notes = self._fill(state, path)
                break
            except storage.IncompatibleCheckpointError as error:
                fail(f"--resume {resume}: {path} does not fit this model: {error}")
            except storage.CorruptCheckpointError as error:
                what = f"{path} is corrupt: {error}"
                if path == found[-1]:
                    fail(f"--resume {resume}: {what}; pass an older one, if there is one")
                print0(f"{what}; going back to {found[number + 1].name}")
        self.is_own = exists(self.path) and self.path.samefile(path.parent)
        if rank() == 0 and self.is_own:
            for bad in found[:number]:  # they do not count as checkpoints to keep
                move_aside(bad, f"corrupt-{bad.name}")
        for adamw in optimizer.state.values():
            adamw["step"].fill_(step)
        print0("\n".join([*notes, f"resumed from {path}, {step} steps done"]))
        return step

    def _candidates(self, resume: str) -> list[Path]:
        """The checkpoints that `resume` may mean, the newest first."""
        if resume == "auto":
            return checkpoints(self.path)[::-1]
        if exists(Path(resume) / ".metadata"):
            return [Path(resume)]
        return checkpoints(Path(resume) / "checkpoints")[::-1]

    def _gather(self, value: object) -> list:
        if self.group is None:
            return [value]
        values = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _fill(self, state: State, path: Path) -> tuple[int, list[str]]:
        """Fill `state` from one checkpoint; return the steps done and what to report.

        Every rank raises the same `CheckpointError`, or none does.
        """
        try:
            reader, error = storage.Reader(path), None
            notes = storage.compare_runs(reader.metadata.planner_data[storage.RUN], self.run)
        except (storage.CheckpointError, OSError) as found:
            error = found
        except (AttributeError, KeyError, TypeError):  # of what the metadata holds on the run
            error = storage.IncompatibleCheckpointError("another version of this code saved it")
        errors, names = zip(*self._gather((error, set(state))), strict=True)
        error = next(filter(None, errors), None)
        state = {**state, "step": torch.tensor(0)}
        if error is None:
            planner = storage.LoadPlanner(set(state).union(*names))
            try:
                dcp.load(state, storage_reader=reader, planner=planner, **self._ranks)
            except dcp.api.CheckpointException as failed:
                error, _ = next(iter(failed.failures.values()))  # of the first rank that failed
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            fail(f"{path} cannot be read: {error}", status=1)  # it may be intact
        if error is not None and not isinstance(error, storage.CheckpointError):
            error = storage.CorruptCheckpointError(str(error).strip().split("\n")[0])
        if error is not None:
            raise error
        return int(state["step"].item()), notes
