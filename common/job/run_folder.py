"""A run's folder: its name, its lock, and what is moved aside because another run wrote it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import time
from pathlib import Path

from common.job.atomic_files import exists, make, numbered
from common.job.checkpoint_hooks import checkpoints
from common.job.metrics import step_of


def launch_name() -> str | None:
    """The launcher's name for this run, which a requeued job keeps; None: there is none."""
    env = os.environ
    if "SLURM_JOB_ID" in env:
        name = job_id()
        if 0 < int(env.get("SLURM_STEP_ID") or 0) < 2**31:  # above it are the steps of shells
            name += f".{env['SLURM_STEP_ID']}"  # each srun of a job is a run
        # slurm/ exports SUBMITTED, because Slurm may count its jobs from 1 again
        return f"{name}-{env['SUBMITTED']}" if "SUBMITTED" in env else name
    name = env.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else re.sub(r"[^\w.-]|^\.+", "_", name)[:100]


def job_id() -> str:
    """Slurm's id of this job: of a task of an array, not of the array."""
    env = os.environ
    if "SLURM_ARRAY_TASK_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID", "")


class RunFolder:
    """The folder of one run, locked until this process ends. Rank 0 has it.

    path: `--run-dir`, or None for a folder of this launch under `parent`. arguments: as given.
    Raises OSError, also if another process writes there. `launch.json` is the lock, and holds what
    identifies the launch.
    """

    def __init__(self, path: str | None, parent: Path, arguments: list[str]):
        env, name = os.environ, launch_name()
        self.ids = {
            # a restart has in common with the first start: Slurm's job, torchrun's run or process
            "job": f"{job_id()}-{env.get('SUBMITTED')}" if job_id() else "",
            "run": env.get("TORCHELASTIC_RUN_ID", ""),
            "process": env.get("TORCHELASTIC_ERROR_FILE", "").rpartition("/attempt_")[0],
            # how often Slurm and torchrun have restarted it
            "requeues": int(env.get("SLURM_RESTART_COUNT") or 0),
            "restarts": int(env.get("TORCHELASTIC_RESTART_COUNT") or 0),
            "arguments": hashlib.sha256(repr(arguments).encode()).hexdigest()[:12],
            "host": platform.node(),
            "pid": os.getpid(),
            "began": False,
        }
        wanted = Path(path) if path else parent / (name or time.strftime("%Y%m%d-%H%M%S"))
        # a name of torchrun's is a user's choice; a job may start several commands, one by one
        is_given = path is not None or (name is not None and not job_id())
        self.path = next(folder for folder in numbered(wanted) if self._take(folder, is_given))

    def _take(self, folder: Path, is_given: bool) -> bool:
        """Lock the folder, if it is this run's to use. is_given: no other one would do."""
        is_new = not folder.is_symlink() and make(folder)
        self._lock = open(os.open(folder / "launch.json", os.O_RDWR | os.O_CREAT, 0o666), "r+")
        is_locked = False
        try:  # ends with this process, and its children do not inherit it
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # others: a file system without locks
            is_locked = error.errno in (errno.EACCES, errno.EAGAIN)
        try:
            before = json.loads(self._lock.readline())
            restarted = self._is_restart_of(before, is_given)
        except (ValueError, KeyError, TypeError):
            before, restarted = {}, False
        # a lock of the same launch is that of a node that is lost
        if not restarted and (is_locked or not (is_given or is_new)):
            self._lock.close()
            if is_given:
                who = f"process {before.get('pid')} on {before.get('host')}"
                raise OSError(f"another run writes to {folder} ({who}): pass another --run-dir")
            return False
        self.ids["began"] = restarted and before["began"]
        self._note()
        return True

    def _is_restart_of(self, before: dict, is_given: bool) -> bool:
        ours = self.ids
        if not is_given and before["arguments"] != ours["arguments"]:
            return False  # another command of the same job
        facts = {name for name in ("job", "run", "process") if before[name] == ours[name] != ""}
        facts |= {name for name in ("requeues", "restarts") if before[name] < ours[name]}
        # when a node joins, torchrun restarts all ranks and does not count it
        proofs = {"process"}, {"job", "requeues"}, {"run", "restarts"}
        return any(proof <= facts for proof in proofs)

    def _note(self) -> None:
        """Overwrite in place: if the node is lost meanwhile, the file must not be left empty."""
        self._lock.seek(0)
        self._lock.write(json.dumps(self.ids) + "\n")
        self._lock.truncate()  # what is left of a longer line
        os.fsync(self._lock.fileno())

    def begin(self, first: int, is_own: bool) -> Path | None:
        """Move aside what this run has not written and would replace; return where it is now.

        first: the steps done. is_own: whether they are those of a checkpoint in this folder: then
        what comes later is moved, else all. `earlier` is a run's folder like this one.
        """
        earlier = None if self.ids["began"] else self._set_aside(first, is_own)
        self.ids["began"] = True
        self._note()
        return earlier

    def _set_aside(self, first: int, is_own: bool) -> Path | None:
        since = first if is_own else -1
        later = [p for p in checkpoints(self.path / "checkpoints") if int(p.name[5:]) > since]
        metrics = self.path / "metrics.jsonl"
        lines = metrics.read_bytes().splitlines() if exists(metrics) else []
        if not later and not any(since <= step_of(line) < float("inf") for line in lines):
            return None
        earlier = next(filter(make, numbered(self.path / "earlier")))
        (earlier / "checkpoints").mkdir()
        for path in later[::-1]:  # the newest first: a requeued job would continue from it
            shutil.move(path, earlier / "checkpoints" / path.name)
        names = "config.json", "metrics.jsonl", "model.pt", "profile", "events.out.*"
        for path in itertools.chain.from_iterable(map(self.path.glob, names)):
            if not is_own:
                shutil.move(path, earlier / path.name)
            elif path.is_file():
                shutil.copy2(path, earlier / path.name)
        return earlier

    def close(self) -> None:
        self._lock.close()
