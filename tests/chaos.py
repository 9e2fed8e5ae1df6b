"""Kill runs with `kill -9` at any time: they must end with the same bits as an undisturbed run.

    python -m tests.chaos                       42 kills over all stages; prints its random seed
    python -m tests.chaos --seed 7 --kills 6    the same times again, as far as a clock repeats

A run is killed, one rank or all of them, some time after its start or a few milliseconds into a
save. It is started again by the same command, killed again, and finally left to finish. Each time
it must continue from the newest complete checkpoint. In the end its metrics and its last checkpoint
must equal those of the undisturbed run, bit for bit. Exit status 1 if a run differs, or if too few
kills hit a save.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from common.checkpoint import checkpoints
from tools.pool import Pool, metrics_of
from tools.stages import StageRun, runs_for

RUN = "--steps 40 --eval-every 20 --checkpoint-every 2"
EXACT = ("step", "loss", "grad_norm", "lr", "val_loss", "test_loss")


def run_of(stage: str) -> StageRun:
    """The run that the stage's file has for this."""
    (run,) = (run for run in runs_for("kill") if run.stage == stage)
    return run


@dataclass
class Kill:
    """The ranks to kill, and when: seconds after the start, or into the `save`-th save."""

    ranks: list[int]
    seconds: float
    save: int | None

    def __str__(self) -> str:
        victims = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        since = "after the start" if self.save is None else f"into save {self.save}"
        return f"{victims} {1e3 * self.seconds:.0f} ms {since}"


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


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(checkpoint, f"{folder}/plain.pt")
        return torch.load(f"{folder}/plain.pt", weights_only=True)


def differences(run_dir: Path, undisturbed: Path) -> str:
    """How a run's metrics or last checkpoint differ from the undisturbed run's; empty if equal."""
    if numbers(metrics_of(run_dir)) != numbers(metrics_of(undisturbed)):
        return "its metrics differ"
    ours, theirs = (checkpoints(r / "checkpoints")[-1] for r in (run_dir, undisturbed))
    a, b = tensors_of(ours), tensors_of(theirs)
    if ours.name != theirs.name or a.keys() != b.keys():
        return "its last checkpoint is another one"
    return "" if all(torch.equal(a[n], b[n]) for n in a) else "the bits of its checkpoint differ"


def endure(
    pool: Pool, stage: str, kills: list[Kill], argv: list[str], run_dir: Path
) -> tuple[int, int, str]:
    """Kill a run repeatedly, then let it finish.

    Returns the number of kills, the number of those inside a save, and what went wrong ("" if
    nothing).
    """
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
        print(f"  {stage}  kill -9 of {kill}; newest checkpoint: {at}  {note}", flush=True)
    ended = pool.attempt_train(stage, argv)
    failed = [o for o in ended if o.traceback or o.exit_status]
    if failed:
        return done, in_save, f"it does not resume: {failed[0].traceback or failed[0].stderr}"
    wanted = f"resumed from {newest[0]}," if newest else ""
    if wanted not in ended[0].stdout or (not newest and "resumed" in ended[0].stdout):
        return done, in_save, f"it did not resume from {newest}"
    return done, in_save, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=42, help="minimum number of kills")
    parser.add_argument("--seed", type=int, default=None, help="random seed (default: a new one)")
    everyone = [run.stage for run in runs_for("kill")]
    parser.add_argument("--only", nargs="*", default=everyone, help="stages")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as root:
        return kill_runs(args, random.Random(seed), Path(root))


def kill_runs(args: argparse.Namespace, rng: random.Random, root: Path) -> int:
    os.environ["DATA_ROOT"] = str(root / "data")
    runs = kills = in_saves = wrong = 0
    durations: dict[str, float] = {}
    while kills < args.kills:
        stage = args.only[runs % len(args.only)]
        ranks, own = run_of(stage).ranks, run_of(stage).argv
        argv = [*own, *RUN.split(), "--data", "sample"]
        undisturbed, run_dir = root / f"undisturbed-{stage}", root / f"run-{runs}"
        with contextlib.closing(Pool(ranks, group=stage != "01")) as pool:
            if stage not in durations:
                pool.run(os.getpid)  # do not time the start of the processes
                started = time.monotonic()
                pool.train(stage, [*argv, "--run-dir", str(undisturbed)])
                durations[stage] = time.monotonic() - started
            chosen = [random_kill(rng, ranks, k < 2, durations[stage]) for k in range(3)]
            done, in_save, problem = endure(pool, stage, chosen, argv, run_dir)
        problem = problem or differences(run_dir, undisturbed)
        print(f"  {stage}  {problem or 'the same bits'}", flush=True)
        runs, kills, in_saves = runs + 1, kills + done, in_saves + in_save
        wrong += bool(problem)
    print(f"{kills} kills in {runs} runs, {in_saves} inside a save; {wrong} runs went wrong")
    return 1 if wrong or in_saves * 3 < kills else 0


if __name__ == "__main__":
    sys.exit(main())
