"""Kill runs with `kill -9` at any time: they must end with the same bits as an undisturbed run.

    python -m tests.chaos               three kills of a run of every stage; prints random seeds
    python -m tests.chaos -k 04         pytest's arguments

A run is killed, one rank or all of them, some time after its start or a few milliseconds into a
save, and started again by the same command. Each time it must continue from the newest complete
checkpoint. In the end its metrics and its last checkpoint must equal those of the undisturbed run.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from common.job.checkpoint import checkpoints
from tools import export
from tools.pool import Pool, metrics_of
from tools.stages import StageRun, runs_for

RUN = "--steps 40 --eval-every 20 --checkpoint-every 2"
EXACT = ("step", "loss", "grad_norm", "lr", "val_loss", "test_loss")
tensors_of = partial(export.tensors_of, prefix="")  # all of a checkpoint, by name


def run_of(stage: str) -> StageRun:
    """The run that the stage's file has for this."""
    (run,) = (run for run in runs_for("kill") if run.stage == stage)
    return run


class Kill(NamedTuple):
    """The ranks to kill, and when: seconds after the start, or into the `save`-th save."""

    ranks: list[int]
    seconds: float
    save: int | None


def random_kill(rng: random.Random, ranks: int, in_save: bool, duration: float) -> Kill:
    everybody = list(range(ranks))
    victims = everybody if rng.random() < 0.5 else [rng.choice(everybody)]
    if in_save:
        return Kill(victims, rng.uniform(0, 0.012), rng.randrange(1, 5))
    return Kill(victims, rng.uniform(0, 0.6 * duration), None)


def unfinished(folder: Path) -> set[str]:
    """The temporary folders of a save in progress."""
    with contextlib.suppress(FileNotFoundError):
        return {n for n in os.listdir(folder) if n.startswith(("writing-", "deleting-"))}
    return set()


def wait_for(kill: Kill, folder: Path, running) -> None:
    if kill.save is not None:
        begun, before = 0, unfinished(folder)  # ignore folders that the previous kill left behind
        while running() and begun < kill.save:
            now = unfinished(folder)
            begun += len({n for n in now - before if n.startswith("writing-")})
            before = now
            time.sleep(0.0005)
    time.sleep(kill.seconds)


def run_and_kill(pool: Pool, stage: str, argv: list[str], kill: Kill, folder: Path) -> bool:
    """Start a run and kill it; False if it had ended before the kill."""
    pool.run(os.getpid)  # waits until the processes have started
    ended: list = []
    thread = threading.Thread(target=lambda: ended.extend(pool.attempt_train(stage, argv)))
    pids = [pool._processes[r].pid for r in kill.ranks]
    thread.start()
    wait_for(kill, folder, thread.is_alive)
    hit = thread.is_alive()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    thread.join()
    pool.close()
    return hit and any(o.traceback for o in ended)


def numbers(metrics: list[dict]) -> list[dict]:
    """The metrics without times, memory and communication."""
    return [{k: line[k] for k in EXACT if k in line} for line in metrics]


def differences(run_dir: Path, undisturbed: Path) -> str:
    """How a run's metrics or last checkpoint differ from the undisturbed run's; empty if equal."""
    if numbers(metrics_of(run_dir)) != numbers(metrics_of(undisturbed)):
        return "its metrics differ"
    ours, theirs = (checkpoints(r / "checkpoints")[-1] for r in (run_dir, undisturbed))
    a, b = tensors_of(ours), tensors_of(theirs)
    if ours.name != theirs.name or a.keys() != b.keys():
        return "its last checkpoint is another one"
    return "" if all(torch.equal(a[n], b[n]) for n in a) else "the bits of its checkpoint differ"


def endure(pool: Pool, stage: str, kills: list[Kill], argv: list[str], run_dir: Path) -> tuple:
    """Kill a run repeatedly, then let it finish; returns the kills, and those inside a save."""
    folder = run_dir / "checkpoints"
    argv = [*argv, "--run-dir", str(run_dir)]
    done = in_save = 0
    newest: list[Path] = []
    for kill in kills:
        hit = run_and_kill(pool, stage, argv, kill, folder)
        inside = hit and bool(unfinished(folder))
        done, in_save = done + hit, in_save + inside
        newest = checkpoints(folder)[-1:]
        note = "inside a save" if inside else "" if hit else "the run had ended before"
        at = newest[0].name if newest else "nothing"
        print(f"  {stage}  {kill}; newest checkpoint: {at}  {note}", flush=True)
    ended = pool.attempt_train(stage, argv)
    assert not any(o.traceback or o.exit_status for o in ended), f"it does not resume: {ended}"
    resumed = re.findall("resumed from (.*),", ended[0].stdout)
    assert resumed == [str(path) for path in newest], f"resumed from {resumed}, not {newest}"
    return done, in_save


if __name__ == "__main__":
    os.environ["CHAOS"] = "1"
    sys.exit(pytest.main(["-s", "tests/test_survival.py", *(sys.argv[1:] or ["-k", "kills"])]))
