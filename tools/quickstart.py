"""Train every stage for a few steps on the embedded sample and compare their losses.

`make quickstart` runs it. The rows differ by technique alone, so their losses must agree: a
difference of more than 1e-5 from stage 01 at any step is a failure. Stage 01 saves a checkpoint
halfway, from which the last row resumes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "runs" / "quickstart"
STEPS, TOLERANCE = 50, 1e-5
SETTINGS = f"--data sample --steps {STEPS} --log-every 1 --dtype float32 --resume never"

HALF = STEPS // 2
CHECKPOINT = f"runs/quickstart/01_single_gpu/checkpoints/step-{HALF:08d}"
# ranks: "few" is 2 or 4, depending on the machine; "mesh" is pipeline 2 x data 2 x tensor 2
ROWS = [  # stage, ranks, its own flags
    ("01", 1, f"--checkpoint-every {HALF}"),
    ("02", "few", ""),
    ("03", "few", "--zero-stage 1"),
    ("03", "few", "--zero-stage 2"),
    ("03", "few", "--zero-stage 3"),
    ("04", "few", ""),
    ("05", "few", ""),
    ("06", 2, "--schedule 1f1b"),  # the tiny model has two layers, one per rank
    ("07", "mesh", "--pp 2 --tp 2"),
    ("01", 1, f"--resume {CHECKPOINT}"),
]


def ranks_here() -> tuple[dict[str, int], str]:
    """The number of ranks for "few" and "mesh", and a description of the device."""
    gpus, cores = torch.cuda.device_count(), os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # a job may have only some of the cores
        cores = len(os.sched_getaffinity(0))
    if gpus >= 4:  # one GPU per rank; else all rows run on the CPU, so that devices do not differ
        return {"few": 4, "mesh": 8 if gpus >= 8 else 4}, f"{gpus} GPUs"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    few = 4 if cores >= 8 else 2
    spare = ", because there are fewer than four GPUs" if gpus else ""
    return {"few": few, "mesh": 8}, f"{cores} CPU cores{spare}"


def command(script: Path, ranks: int, flags: str, folder: Path) -> list[str]:
    """The command line of one row, as `make run-NN` would run it."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    launcher = [sys.executable, *(torchrun if script.parent.name[:2] != "01" else [])]
    arguments = f"{SETTINGS} {flags}".split()
    return [*launcher, str(script.relative_to(ROOT)), *arguments, "--run-dir", str(folder)]


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
    said = f"  {name:26} {ranks} rank{'s' if ranks > 1 else ' '}"
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


def table_row(name: str, ranks: int, lines: list[dict], stage_01: list[dict]) -> tuple[str, float]:
    """One line of the table, and the largest difference of the row's losses from stage 01's."""
    same_steps = zip(lines, stage_01[-len(lines) :], strict=True)
    off = max(abs(a["loss"] - b["loss"]) for a, b in same_steps)
    last, speed = lines[-1], median(line["tokens_per_s"] for line in lines)
    sent, held = median(line["comm_mb"] for line in lines), last["model_state_mb"]
    text = f"{name:26}{ranks:>6}{last['loss']:>12.6f}{off:>10.1e}{speed:>11,.0f}"
    return f"{text}{held:>16.2f}{sent:>14.2f}{'' if off <= TOLERANCE else '  OFF'}", off


def main() -> int:
    ranks_of, device = ranks_here()
    shutil.rmtree(FOLDER, ignore_errors=True)
    print(f"Every stage: {STEPS} steps on the embedded sample, on {device}\n")
    results, bad = [], 0
    for stage, wanted, flags in ROWS:
        script = next(ROOT.glob(f"{stage}_*/train.py"), None)
        if script is None:
            continue
        resumes = "--resume" in flags
        variant = "resumed" if resumes else flags if stage == "03" else ""
        name, ranks = f"{script.parent.name} {variant}".strip(), ranks_of.get(wanted, wanted)
        folder = FOLDER / name.replace(" --", "-").replace(" ", "-")
        argv = command(script, ranks, flags, folder)
        lines = train(name, ranks, argv, folder, HALF if resumes else 0)
        if lines is not None:
            results.append((name, ranks, lines))
        elif not results:
            return 1  # without stage 01 there is nothing to compare with
        else:
            bad += 1

    head = f"{'stage':26}{'ranks':>6}{'final loss':>12}{'off 01':>10}{'tokens/s':>11}"
    print(f"\n{head}{'state MB/rank':>16}{'sent MB/step':>14}")
    for name, ranks, lines in results:
        text, off = table_row(name, ranks, lines, results[0][2])
        bad += off > TOLERANCE
        print(text)
    print(
        f"""
off 01         the largest difference from stage 01's loss at any of the steps; at most {TOLERANCE}
state MB/rank  weights, gradients and optimizer state on rank 0 after its optimizer step
sent MB/step   bytes that rank 0 sends per step when its collectives run on a ring
resumed        from the checkpoint that stage 01's run saved after step {HALF}
Trained on the sample (the Python language reference), not on WikiText-2: the losses compare the
stages with one another and with nothing else. Logs and curves: {FOLDER.relative_to(ROOT)}"""
    )
    if bad:
        print(f"\n{bad} of the rows above failed or differ from stage 01", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM too ends the processes
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
