"""A run's folder: its name, the lock that keeps other processes out, and what makes another run.

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
from collections.abc import Iterable
from pathlib import Path

from common.distributed import warn

from common.job.checkpoint_hooks import IncompatibleCheckpointError, checkpoints
from common.job.paths import exists, numbered

SHAPE = ("d_model", "n_layers", "n_heads")  # of the weights
# arguments that change the losses; a checkpoint of another run fits all the same
CURVE = ("seed", "seq_len", "global_batch_size", "lr", "warmup_steps", "min_lr_ratio")
CURVE += ("weight_decay", "grad_clip", "dropout")
DATA = {"vocabulary": "the hash of --data's words", "corpus": "the hash of --data"}
# what stays the same in one run: all of these, and what changes a stage's losses
ONE_RUN = ("resume", *SHAPE, *CURVE, *DATA, "edit", "dtype", "param_dtype", "reduce_dtype")
ONE_RUN += ("recipe", "n_experts", "top_k", "balance_rate")
ONE_RUN += ("model", "valid", "lora_rank", "lora_alpha")


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
            is_alive = Path(f"/proc/{last['pid']}").exists() and last["pid"] != os.getpid()
            is_held = last["host"] == ours["host"] and is_alive
        if is_held:
            os.close(lock)
            found = f"another run writes to {folder} ({who}): pass another --run-dir"
            raise OSError(found) from None
    text = json.dumps(ours).encode() + b"\n"
    os.pwrite(lock, text, 0)  # in place: if the node is lost meanwhile, the file is not left empty
    os.ftruncate(lock, len(text))
    os.fsync(lock)
    return folder, lock, who


def changes(old: dict, new: dict, names: Iterable[str]) -> list[str]:
    """A line like `--lr is now 0.01, was 0.001` for each of the names whose values differ.

    Both are as `config.json` describes a run. A name that one of them lacks is no change.
    """
    flags = {name: "--" + name.replace("_", "-") for name in new["arguments"]} | DATA
    old, new = ({**each, **each["arguments"]} for each in (old, new))
    differ = [name for name in names if name in old and name in new and old[name] != new[name]]
    return [f"{flags.get(name, name)} is now {new[name]}, was {old[name]!r}" for name in differ]


def changes_since_checkpoint(saved: dict, run: dict) -> list[str]:
    """Report how this run differs from the one that saved a checkpoint.

    Another shape or vocabulary is an error, even one of equal size: its meaning does not fit.
    """
    if not {*SHAPE, *CURVE} <= saved["arguments"].keys():
        raise IncompatibleCheckpointError("another version of this code saved it")
    if found := changes(saved, run, (*SHAPE, "vocabulary")):
        raise IncompatibleCheckpointError("; ".join(found))
    others = ("steps", "corpus", "dtype", "recipe", "balance_rate", "model", "lora_alpha")
    return changes(saved, run, ("stage", *CURVE, *others))


def changes_since_last_start(folder: Path, run: dict, who: str) -> list[str]:
    """Report that a folder holds this run already, and what has changed; [] if it holds no run yet.

    run: describes this start, and gets the --resume of the last one if it has none. who: last wrote
    there. Raises OSError if it is another run, or would replace all metrics with other --steps.
    """
    saved, metrics = checkpoints(folder / "checkpoints"), folder / "metrics.jsonl"
    if not saved and not (exists(metrics) and metrics.stat().st_size):
        return []
    arguments = run["arguments"]
    try:
        last = json.loads((folder / "config.json").read_text())
        arguments["resume"] = arguments["resume"] or last["arguments"]["resume"]
    except (ValueError, KeyError, TypeError):
        raise OSError(f"{folder}/config.json is damaged: pass another --run-dir") from None
    if found := changes(last, run, ONE_RUN if saved else (*ONE_RUN, "steps")):
        fix = "pass --run-dir NEW, and --resume PATH to start from a checkpoint"
        raise OSError(f"{folder} belongs to another run: {'; '.join(found)}: {fix}")
    said = ("arguments", "stage", "steps")  # the last two with the checkpoint
    names = [name for name in {**run, **arguments} if name not in said]
    what = f"the folder holds this run already (last written by {who}): it continues"
    return [what, *changes(last, run, names)]
