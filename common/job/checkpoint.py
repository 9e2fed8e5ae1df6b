"""Sharded checkpoints in the format of `torch.distributed.checkpoint` (DCP).

One folder per step, called `step-...` once every rank has written. Each writes what it owns, under
the names of `common/shards.py`; `step` is the number of optimizer steps done, int64.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

from common.distributed import print0
from common.shards import State

from common.job import checkpoint_hooks as storage
from common.job.checkpoint_hooks import checkpoints
from common.job.launch import fail, rank
from common.job.paths import exists, numbered
from common.job.run_folder import changes_since_checkpoint


class Checkpointer:
    """Saves checkpoints into a folder in the background, and loads them.

    timeout: of the collectives. They have a process group of their own, because a save issues
    them whenever its disk is ready. run: the run's `arguments` and hashes of its `vocabulary` and
    `corpus`, saved with each checkpoint and compared with those of the one resumed from.
    """

    def __init__(self, path: str | Path, run: dict, timeout: timedelta | None = None):
        self.path, self.run = Path(path), run
        self.group = None
        if dist.is_initialized():
            self.group = dist.new_group(backend="gloo", timeout=timeout, group_desc="checkpoints")
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP's, in one process
        self._options = {"process_group": self.group, "no_dist": self.group is None}
        # DCP's collectives: what a rank raises, all ranks raise, as a CheckpointException
        self._ranks = _DistWrapper(self.group, self.group is not None, coordinator_rank=0)
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
        future = dcp.async_save(state, storage_writer=writer, planner=planner, **self._options)
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
        except CheckpointException as failed:
            if rank() == 0:  # every rank has stopped writing
                shutil.rmtree(writer.path, ignore_errors=True)
            fail(f"cannot save {writer.final}: {first_error(failed)}", status=1)

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
        every = self._ranks.all_gather_object(planner.create_local_plan())
        plans, metadata = planner.create_global_plan(every)
        if rank() > 0:
            for item in plans[rank()].items:
                dist.send(planner.lookup_object(item.index).cpu(), 0, group=self.group)
            return {}
        entries = sorted(metadata.state_dict_metadata.items())
        full = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in entries}
        for owner, plan in enumerate(plans):
            for item in plan.items:
                chunk = item.tensor_data.chunk
                place = narrow_tensor_by_index(full[item.index.fqn], chunk.offsets, chunk.sizes)
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
        try:  # on rank 0: on the others a shared file system may lag
            found, is_own = self._ranks.broadcast("list", partial(self._list, resume))
        except CheckpointException as failed:
            fail(f"what --run-dir or --resume names cannot be read: {first_error(failed)}")
        is_resumed = resume is not None and not is_own
        where = f"--resume {resume}" if is_resumed else f"--run-dir {self.path.parent}"
        if not found and is_resumed:
            fail(f"{where}: no checkpoint there (step-... with .metadata, or a run's)")
        if not found:
            return 0
        step = torch.tensor(0)
        names = {"step"}.union(*self._ranks.all_gather_object(set(state)))
        for number, path in enumerate(found):
            notes: list[str] = []
            try:
                reader, notes = self._ranks.broadcast("open", partial(self._open, path))
                planner = storage.LoadPlanner(names)
                state = {**state, "step": step}
                dcp.load(state, storage_reader=reader, planner=planner, **self._options)
                break
            except CheckpointException as failed:
                error = first_error(failed)
            if isinstance(error, storage.IncompatibleCheckpointError):
                fail(f"{where}: {path} does not fit this model: {'; '.join([str(error), *notes])}")
            is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
            # it may be intact: where checksums fit, PyTorch's RuntimeError is a lack of memory
            if isinstance(error, OSError | MemoryError | RuntimeError) and not is_missing:
                fail(f"{path} cannot be read: {str(error) or repr(error)}", status=1)
            why, *_ = str(error).strip().split("\n")
            what = f"{path} is corrupt: {why}"
            if path == found[-1]:
                fix = "start in a new folder with --run-dir NEW, and --resume OLDER if there is one"
                fail(f"{where}: {what}: {fix}")
            print0(f"{what}; going back to {found[number + 1].name}")
        if rank() == 0 and is_own:
            for bad in found[:number]:  # they do not count as checkpoints to keep
                aside = numbered(bad.with_name(f"corrupt-{bad.name}"))
                bad.rename(next(path for path in aside if not os.path.lexists(path)))
        for adamw in optimizer.state.values():
            adamw["step"].fill_(step)
        print0("\n".join([*notes, f"resumed from {path}, {step} steps done"]))
        return step.item()

    def _list(self, resume: str | None) -> tuple[list[Path], bool]:
        """The checkpoints to try, the newest first, and whether they are this folder's own."""
        if own := checkpoints(self.path):
            return own[::-1], True
        if resume is None:
            return [], False
        path = Path(resume)  # a checkpoint, or a run
        is_one = exists(path / ".metadata")
        return [path] if is_one else checkpoints(path / "checkpoints")[::-1], False

    def _open(self, path: Path) -> tuple[storage.Reader, list[str]]:
        """A checkpoint's reader, and what differs in the run that saved it."""
        reader = storage.Reader(path)
        try:
            saved = reader.metadata.planner_data[storage.RUN]
            return reader, changes_since_checkpoint(saved, self.run)
        except (AttributeError, KeyError, TypeError):
            what = "another version of this code saved it"
            raise storage.IncompatibleCheckpointError(what) from None


def first_error(failed: CheckpointException) -> Exception:
    """The error of the first rank that has failed. Raises Ctrl-C, which DCP catches, too."""
    error, _ = next(iter(failed.failures.values()))
    if not isinstance(error, Exception):
        raise error
    return error
