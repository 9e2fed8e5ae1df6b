"""Train every stage for a few steps on the embedded sample and compare their losses.

`make quickstart` runs it; the rows come from the stages' files. They differ in technique alone, so
their losses must agree: a difference of more than 1e-5 from stage 01 at any step is a failure. A
stage that changes what is computed is compared with its own run in one process, within the
tolerance of its file. Stage 01 saves a checkpoint halfway, from which the last row resumes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from tools.stages import BASE, StageRun, runs_for, stage_file, stage_path, stages
from tools.stages import REPO as ROOT

FOLDER = ROOT / "runs" / "quickstart"
STEPS, TOLERANCE = 50, 1e-5
SETTINGS = f"{BASE['quickstart']} --resume never"

HALF = STEPS // 2
CHECKPOINT = f"runs/quickstart/01_single_gpu/checkpoints/step-{HALF:08d}"


class Row(NamedTuple):
    """A run, with flags in addition to its own, and the part of its name behind the folder's."""

    run: StageRun
    more: str = ""
    variant: str = ""

    @property
    def name(self) -> str:
        return f"{stage_path(self.run.stage).parent.name} {self.variant}".strip()


def rows() -> list[Row]:
    """The runs of the stages' files. A stage that is its own reference begins with one process."""
    found, seen = [], set()
    runs = runs_for("quickstart")
    variants = {n for n in stages() if len({run.flags for run in runs if run.stage == n}) > 1}
    for run in runs:
        if (run.stage, run.flags) in seen:
            continue  # with another number of ranks
        own = found and stage_file(run.stage).reference == run.stage  # not stage 01, the first
        if own and run.stage not in variants:
            found.append(Row(replace(run, ranks=1), variant="reference"))
        seen.add((run.stage, run.flags))
        variant = " ".join(run.flags) if run.stage in variants else ""
        found.append(Row(run, "" if found else f"--checkpoint-every {HALF}", variant))
    return [*found, Row(found[0].run, f"--resume {CHECKPOINT}", "resumed")]


def machine() -> tuple[int, int, str]:
    """The most ranks where a run may have several numbers, the most of any run, and the device."""
    gpus, cores = torch.cuda.device_count(), os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # a job may have only some of the cores
        cores = len(os.sched_getaffinity(0))
    if gpus >= 4:  # one GPU per rank; else all rows run on the CPU, so that devices do not differ
        return 4, 8 if gpus >= 8 else 4, f"{gpus} GPUs"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    spare = ", because there are fewer than four GPUs" if gpus else ""
    return 4 if cores >= 8 else 2, 8, f"{cores} CPU cores{spare}"


def ranks_of(run: StageRun, several: int, most: int) -> int:
    """The largest of the run's numbers of ranks that suits the machine."""
    runs = stage_file(run.stage).for_("quickstart")
    twins = [each.ranks for each in runs if each.flags == run.flags]
    suited = [ranks for ranks in twins if ranks <= several] if run.ranks > 1 else [1]
    return min(max(suited, default=min(twins)), most)


def command(script: Path, ranks: int, flags: str, folder: Path) -> list[str]:
    """The command line of one row, as `make run-NN` would run it.

    Where runs are only comparable if one replays what the other records, that tool runs the script.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    launcher = [sys.executable, *(torchrun if script.parent.name[:2] != "01" else [])]
    arguments = [*f"{SETTINGS} {flags}".split(), "--run-dir", str(folder)]
    replay = stage_file(script.parent.name[:2]).replay
    if replay:
        script = script.with_name(f"{replay}.py")
        arguments = ["record" if ranks == 1 else "replay", str(FOLDER / replay), *arguments]
    return [*launcher, str(script.relative_to(ROOT)), *arguments]


def metrics(folder: Path) -> list[dict]:
    """The lines that a run has written; the last one may be incomplete."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def train(
    name: str, ranks: int, argv: list[str], folder: Path, first_step: int
) -> list[dict] | None:
    """Run one row, show its progress, and return its metrics; None if it failed."""
    folder.mkdir(parents=True)
    said = f"  {name:32} {ranks} rank{'s' if ranks > 1 else ' '}"
    live = sys.stdout.isatty()
    if not live:
        print(said, end="", flush=True)
    environment = {**os.environ, **({"OMP_NUM_THREADS": "1"} if ranks > 1 else {})}
    start = time.perf_counter()
    with open(folder / "output.log", "w") as log:
        process = subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                if live:
                    done = first_step + len(metrics(folder))
                    print(f"\r{said}  step {done:2d} of {STEPS}", end="", flush=True)
                time.sleep(0.2)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
    seconds = time.perf_counter() - start
    lines = metrics(folder)
    failed = process.returncode != 0 or len(lines) != STEPS - first_step
    outcome = "FAILED" if failed else f"loss {lines[-1]['loss']:.6f}"
    print(f"\r{said}  {outcome}  {seconds:5.1f} s" if live else f"  {outcome}  {seconds:5.1f} s")
    if failed:
        log = folder / "output.log"
        print("\n".join(log.read_text().splitlines()[-30:]), file=sys.stderr)
        print(f"{name} failed (status {process.returncode}); see {log}", file=sys.stderr)
    return None if failed else lines


def table_row(name: str, ranks: int, lines: list[dict], reference: list[dict], most: float):
    """One line of the table, and whether a loss is more than `most` off the reference's."""
    same_steps = zip(lines, reference[-len(lines) :], strict=True)
    off = max(abs(a["loss"] - b["loss"]) for a, b in same_steps)
    last, speed = lines[-1], median(line["tokens_per_s"] for line in lines)
    sent, held = median(line["comm_mb"] for line in lines), last["model_state_mb"]
    text = f"{name:32}{ranks:>6}{last['loss']:>12.6f}{off:>10.1e}{speed:>11,.0f}"
    return f"{text}{held:>16.2f}{sent:>14.2f}{'' if off <= most else '  OFF'}", off > most


def main() -> int:
    several, most, device = machine()
    shutil.rmtree(FOLDER, ignore_errors=True)
    print(f"Every stage: {STEPS} steps on the embedded sample, on {device}\n")
    results, bad = [], 0
    references: dict[str, list[dict]] = {}
    for row in rows():
        resumes = row.variant == "resumed"
        ranks = ranks_of(row.run, several, most)
        folder = FOLDER / row.name.replace(" --", "-").replace(" ", "-")
        flags = f"{' '.join(row.run.flags)} {row.more}"
        argv = command(stage_path(row.run.stage), ranks, flags, folder)
        lines = train(row.name, ranks, argv, folder, HALF if resumes else 0)
        if lines is None and not results:
            return 1  # without stage 01 there is nothing to compare with
        bad += lines is None
        if lines is not None:
            results.append((row, ranks, lines))
            if ranks == 1:
                references.setdefault(row.run.stage, lines)

    head = f"{'stage':32}{'ranks':>6}{'final loss':>12}{'off':>10}{'tokens/s':>11}"
    print(f"\n{head}{'state MB/rank':>16}{'sent MB/step':>14}")
    for row, ranks, lines in results:
        file = stage_file(row.run.stage)
        tolerance = file.tolerance.get("loss", TOLERANCE)
        text, is_off = table_row(row.name, ranks, lines, references[file.reference], tolerance)
        bad += is_off
        print(text)
    print(
        f"""
off            the largest difference from stage 01's loss at any of the steps, at most {TOLERANCE};
               of a stage that changes what is computed, from its own run in one process
state MB/rank  weights, gradients and optimizer state on rank 0 after its optimizer step
sent MB/step   bytes that rank 0 sends per step when its collectives run on a ring
resumed        from the checkpoint that stage 01's run saved after step {HALF}
Trained on the sample (the Python language reference), not on WikiText-2: the losses compare the
stages with one another and with nothing else. Logs and curves: {FOLDER.relative_to(ROOT)}"""
    )
    if bad:
        print(f"\n{bad} of the rows above failed or differ from their reference", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM too ends the processes
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
