"""A run's folder: its name, and the lock that keeps other processes out.

A folder belongs to one run: whoever starts in it continues that run from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import time
from pathlib import Path

from common.distributed import warn

from common.job.paths import numbered


def launch_name(command: list[str]) -> str | None:
    """The launcher's name for this run, which a requeued job keeps; None: there is none."""
    if job := job_id():  # a job may start several commands
        return f"{job}-{hashlib.sha256(repr(command).encode()).hexdigest()[:6]}"
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if name == "none" and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        raise OSError("torchrun --max-restarts needs --rdzv-id, --standalone or --run-dir")
    return None if name == "none" else re.sub(r"[^\w.-]|^\.+", "_", name)[:100]


def job_id() -> str:
    """Slurm's id of this job (of a task of an array, not of the array), and its submission."""
    env = os.environ
    names = [env.get("SLURM_JOB_ID", "")]
    if "SLURM_ARRAY_TASK_ID" in env:
        names = [f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"]
    # slurm/ exports SUBMITTED, because Slurm may count its jobs from 1 again
    return "-".join([*names, env["SUBMITTED"]] if "SUBMITTED" in env and names[0] else names)


def is_alive(pid: int) -> bool:
    """Whether another process of this host has the id."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, TypeError):
        return False
    except PermissionError:  # another user's
        pass
    return pid != os.getpid()


def claim(path: str | None, parent: Path, command: list[str]) -> tuple[Path, int, str]:
    """Make the run's folder, and lock it until this process ends or closes the lock.

    path: `--run-dir`, or None for a folder of this launch under `parent`. Returns the folder, the
    lock and who had it before. Raises OSError, also if another process has it now.
    """
    name = path or launch_name(command)
    wanted = Path(path) if path else parent / (name or time.strftime("%Y%m%d-%H%M%S"))
    for folder in [wanted] if name else numbered(wanted):
        with contextlib.suppress(FileExistsError):  # of another run in this second
            folder.mkdir(parents=True, exist_ok=name is not None)
            break
    lock = os.open(folder / "launch.json", os.O_RDWR | os.O_CREAT, 0o666)
    step = os.environ.get("SLURM_STEP_ID", "")
    ours = {"host": platform.node(), "pid": os.getpid(), "job": job_id(), "step": step}
    try:
        last = {key: json.loads(os.pread(lock, 10_000, 0)).get(key, "") for key in ours}
    except (ValueError, AttributeError):
        last = dict.fromkeys(ours, "")
    who = f"process {last['pid']} on {last['host']}" if last["host"] else "an unknown process"
    # a step of a job has its rank 0 on one host: if it was on another one, that node is lost, and
    # its lock is, too
    is_same_step = last["job"] == ours["job"] != "" and last["step"] == step
    is_lost = is_same_step and last["host"] != ours["host"]
    try:  # ends with this process, and its children do not inherit it
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):  # another process has it
            is_held = not is_lost
        else:
            warn(f"{folder} is on a file system without locks: start no second run there: {error}")
            is_held = last["host"] == ours["host"] and is_alive(last["pid"])
        if is_held:
            os.close(lock)
            found = f"another run writes to {folder} ({who}): pass another --run-dir"
            raise OSError(found) from None
    text = json.dumps(ours).encode() + b"\n"
    os.pwrite(lock, text, 0)  # in place: if the node is lost meanwhile, the file is not left empty
    os.ftruncate(lock, len(text))
    os.fsync(lock)
    return folder, lock, who
