"""Sharded checkpoints in the format of `torch.distributed.checkpoint` (DCP).

One folder per step, called `step-...` once every rank has written. Each writes what it owns, under
the names of `common/shards.py`; `step` is the number of optimizer steps done, int64.
"""

from __future__ import annotations

import shutil
import time
import warnings
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from common.distributed import print0
from common.shards import State

from common.job import checkpoint_hooks as storage
from common.job.checkpoint_hooks import checkpoints
from common.job.launch import fail, rank
from common.job.paths import exists, move_aside
from common.job.run_changes import compare_runs


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
        self.blocked_seconds = 0.0  # time for which saves have blocked training
        self._saving: tuple[storage.AtomicWriter, Future] | None = None

    def save(self, step: int, state: State, keep: int = 2) -> None:
        """Save `state` after `step` steps; then delete all but the last `keep` checkpoints.

        Every rank calls it. It waits for the previous save, copies `state` to host memory and
        returns; the rest runs in the background. checkpoint_hooks.py lists what DCP calls.
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
            try:
                left = [path.name for path in checkpoints(self.path)]
            except OSError as error:
                left = [str(error)]
            older = f"older ones: {', '.join(left) or 'none'}"
            fail(f"cannot save {writer.final}: {cause}; {older}", status=1)

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

    def load(self, resume: str | None, state: State, optimizer: torch.optim.Optimizer) -> int:
        """Fill `state` in place from a checkpoint; return the steps done, 0 for a new run.

        It is the newest complete one of this folder. If there is none, `resume` may be the path of
        a checkpoint or of a run. A corrupt one is reported, and the previous one is used.
        """
        try:
            found: list[Path] | OSError = checkpoints(self.path)[::-1]
            is_own = bool(found)
            if resume is not None and not is_own:
                path = Path(resume)  # a checkpoint, or a run
                is_one = exists(path / ".metadata")
                found = [path] if is_one else checkpoints(path / "checkpoints")[::-1]
        except OSError as unreadable:
            found, is_own = unreadable, False
        found, is_own = self._gather((found, is_own))[0]  # rank 0's: shared file systems may lag
        is_resumed = resume is not None and not is_own
        where = f"--resume {resume}" if is_resumed else f"--run-dir {self.path.parent}"
        if isinstance(found, OSError):
            fail(f"{where}: cannot be read: {found}")
        if not found:
            if resume is None:
                return 0
            fail(f"{where}: no checkpoint there (step-... with .metadata, or a run's)")
        for number, path in enumerate(found):
            try:
                step, notes = self._fill(state, path)
                break
            except storage.IncompatibleCheckpointError as error:
                fail(f"{where}: {path} does not fit this model: {error}")
            except storage.CorruptCheckpointError as error:
                what = f"{path} is corrupt: {error}"
                if path == found[-1]:
                    older = "pass an older one, if there is one"
                    # a folder's own checkpoints come first, whatever --resume says
                    own = "the folder has no older one: start in another with --run-dir NEW"
                    fail(f"{where}: {what}; {own if is_own else older}")
                print0(f"{what}; going back to {found[number + 1].name}")
        if rank() == 0 and is_own:
            for bad in found[:number]:  # they do not count as checkpoints to keep
                move_aside(bad, f"corrupt-{bad.name}")
        for adamw in optimizer.state.values():
            adamw["step"].fill_(step)
        print0("\n".join([*notes, f"resumed from {path}, {step} steps done"]))
        return step

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
            notes, error = [], None
            reader = storage.Reader(path)
            notes = compare_runs(reader.metadata.planner_data[storage.RUN], self.run)
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
        if isinstance(error, storage.IncompatibleCheckpointError):
            error = storage.IncompatibleCheckpointError("; ".join([str(error), *notes]))
        if error is not None:
            raise error
        return int(state["step"].item()), notes
