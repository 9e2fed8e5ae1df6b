"""Train every stage for a few steps on the embedded sample and compare their losses.

`make quickstart` runs it; the rows come from the stages' files. They differ in technique alone, so
their losses must agree: a difference of more than 1e-5 from stage 01 at any step is a failure. A
stage that changes what is computed is compared with its own run in one process, within the
tolerance of its file. Stage 01 saves a checkpoint halfway, from which the last row resumes. All
rows run in processes that have imported PyTorch once, but for the first one of several ranks, which
torchrun starts.

On a machine with GPUs the rows run on them, in float32 and in bfloat16, and others follow until
--budget is used up. The report, gpu-check.md, is written after each of them. There a loss may be
1e-3 off. Where ranks are more than GPUs they share them over Gloo: that checks the kernels of a
stage, not NCCL between ranks.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tools.pool import Pool, comparably, fork_server, metrics_of, train
from tools.stages import BASE, REPO, lacks_on_cpu, runs_for, stage_file, stage_path, stages

FOLDER, REPORT = REPO / "runs" / "quickstart", Path("gpu-check.md")
HALF = int(re.search(r"--steps (\d+)", BASE["quickstart"])[1]) // 2
CPU_TOLERANCE, GPU_TOLERANCE = 1e-5, 1e-3  # of a loss
ROW_SECONDS = 120.0  # of a row on GPUs
MATMULS = "10_fp8/cost.py matmuls"
COLUMNS = f"{'':34}{'ranks':>6}{'final loss':>12}{'off':>9}{'tokens/s':>11}{'step ms':>9}"
COLUMNS += f"{'state MB/rank':>15}{'sent MB/step':>14}"


class Row(NamedTuple):
    """A run of a stage; without a stage, a script of this repository and its arguments."""

    name: str
    stage: str
    ranks: int
    flags: str
    reference: str = ""  # the flags of the run that it is compared with
    tolerance: float = 0.0
    more: str = ""  # flags that change no loss
    by_torchrun: bool = False


def tolerance_of(stage: str, flags: str, on_gpu: bool) -> float:
    """The largest difference of a loss that is no failure."""
    file = stage_file(stage)
    if not on_gpu:
        return file.tolerance.get("loss", CPU_TOLERANCE)
    found = [{"loss": GPU_TOLERANCE}, file.tolerance]
    if file.tolerance and "bfloat16" in flags:  # it changes what is computed
        found += [dict(run.tolerance) for run in file.for_("bf16")]
    return max(each.get("loss", 0.0) for each in found)


def resumes(row: Row) -> bool:
    return "--resume" in row.more


def stage_rows(several: int, dtype: str, on_gpu: bool) -> list[Row]:
    """Each stage's quickstart runs, with the most ranks up to `several`, else with the fewest."""
    found: list[Row] = []
    runs, settings = runs_for("quickstart"), BASE["quickstart"].replace("float32", dtype)
    for run in runs:
        twins = [each for each in runs if each.stage == run.stage and each.flags == run.flags]
        if run != twins[0]:
            continue
        ranks = [each.ranks for each in twins]
        ranks = max((n for n in ranks if n <= several), default=min(ranks))
        variants = {each.flags for each in runs if each.stage == run.stage}
        flags = " ".join(run.flags)
        name = f"{stage_path(run.stage).parent.name} {flags if len(variants) > 1 else ''}".strip()
        name += f", {dtype}" * on_gpu
        tolerance = tolerance_of(run.stage, dtype, on_gpu)
        row = Row(name, run.stage, ranks, f"{settings} {flags}".strip(), settings, tolerance)
        if run.stage == stages()[0]:
            row = row._replace(more=f"--checkpoint-every {HALF}")
        elif stage_file(run.stage).reference == run.stage and len(variants) == 1:
            found.append(row._replace(name=f"{name}, reference", ranks=1, flags=settings))
        found.append(row._replace(by_torchrun=run.stage == stages()[1]))
    folder = FOLDER / f"{stages()[0]}-1-{dtype}"
    more = f"--resume {folder}/checkpoints/step-{HALF:08d}"
    return [*found, found[0]._replace(name=f"{found[0].name}, resumed", more=more)]


def rows_for(gpus: int, cores: int) -> list[Row]:
    """The rows for a machine, in the order of their importance."""
    if not gpus:
        return stage_rows(4 if cores >= 8 else 2, "float32", False)
    preflight = f"-m tools.gpu.preflight --nproc {gpus} --out {FOLDER}/preflight.json"
    rows = [Row("preflight", "", 0, preflight), Row("float8 matmuls", "", 0, MATMULS)]
    for dtype in ("float32", "bfloat16"):
        rows += stage_rows(gpus, dtype, True)
    for stage in (stages()[0], "10"):
        for more in ("", " --compile"):
            flags = f"--data sample --steps 20 --log-every 1 --preset gpt2{more}"
            rows.append(Row(f"{stage} gpt2{more}", stage, 1, flags, flags, GPU_TOLERANCE))
    rows.append(Row("make bench", "", 0, "-m benchmarks.bench --pairs 10"))
    data = "--data sample --dtype float32"
    for run in (each for each in runs_for("parity") if each.ranks <= gpus):
        flags, reference = (f"{' '.join(each)} {data}" for each in (run.argv, run.reference_argv))
        tolerance = tolerance_of(run.stage, flags, True)
        rows.append(Row(run.id, run.stage, run.ranks, flags, reference, tolerance))
    return rows


class Quickstart:
    """Runs rows, and remembers the metrics of what it has trained."""

    def __init__(self, gpus: int):
        self.gpus = gpus
        self.pools: dict[tuple, Pool] = {}
        self.known: dict[tuple[str, str], list[dict]] = {}  # of runs in one process

    def run(self, row: Row, seconds: float) -> tuple[str, bool]:
        """A row of the table, or the output of a script, and whether that is a failure."""
        if not self.gpus and row.stage and (lacks := lacks_on_cpu(row.stage)):
            return f"  skipped: {lacks}", False
        if not row.stage:
            status, text = self.command(row.flags.split(), seconds)
            return f"status {status}\n{text}", status != 0
        number = stage_file(row.stage).reference
        if (row.stage, row.flags, row.ranks) == (number, row.reference, 1) and not resumes(row):
            lines = expected = self.train(row, seconds)
        else:
            alone = Row("", number, 1, row.reference, row.reference)
            expected = self.known.get((number, row.reference)) or self.train(alone, seconds)
            lines = self.train(row, seconds)
        both = list(zip(lines, expected[-len(lines) :], strict=True))
        off = max(abs(a["loss"] - b["loss"]) for a, b in both)
        names = ("tokens_per_s", "step_ms", "comm_mb")
        speed, step, sent = (median(x[n] for x in lines[len(lines) // 4 :]) for n in names)
        text = f"{row.ranks:>6}{lines[-1]['loss']:>12.6f}{off:>9.1e}{speed:>11,.0f}{step:>9.1f}"
        text += f"{lines[-1]['model_state_mb']:>15.2f}{sent:>14.2f}"
        if self.gpus:
            text += f"  peak {lines[-1]['memory_mb']:.0f} MB"
            text += f", MFU {lines[-1]['mfu']:.1%}" if "mfu" in lines[-1] else ""
            text += ", ranks share GPUs" if row.ranks > self.gpus else ""
        return text, not off <= row.tolerance

    def train(self, row: Row, seconds: float) -> list[dict]:
        """Train, and return the metrics of rank 0. Where runs are only comparable if one replays
        what the other records, they do."""
        dtype = "bfloat16" if "bfloat16" in row.flags else "float32"
        folder = FOLDER / f"{row.stage}-{row.ranks}-{dtype}"
        if folder.exists():
            folder = FOLDER / f"{folder.name}-{len([*FOLDER.iterdir()])}"
        argv = [*row.flags.split(), *row.more.split(), "--run-dir", str(folder)]
        argv += [] if resumes(row) else ["--resume", "never"]
        if row.by_torchrun:
            torchrun = f"-m torch.distributed.run --standalone --nproc-per-node={row.ranks}"
            script = str(stage_path(row.stage).relative_to(REPO))
            status, text = self.command([*torchrun.split(), script, *argv], seconds)
            if status != 0:
                raise RuntimeError(f"status {status}: {text}")
            return metrics_of(folder)
        kept = FOLDER / re.sub(r"\W+", "-", f"replay {row.stage} {row.reference}")
        how = "record" if row.ranks == 1 else "replay"
        job = train, how, str(kept), row.stage, argv
        lines = self.pool(row).run(comparably, *job, timeout=seconds)[0]
        if row.ranks == 1 and not resumes(row):
            self.known[row.stage, row.flags] = lines
        return lines

    def pool(self, row: Row) -> Pool:
        has_group, environment, backend = row.stage != stages()[0], {}, "gloo"
        if self.gpus:
            backend = "cpu:gloo,cuda:nccl" if row.ranks <= self.gpus else "cpu:gloo,cuda:gloo"
            # CUDA reads it when a process begins to use it: such stages have processes of their own
            if "CUDA_DEVICE_MAX_CONNECTIONS" in stage_path(row.stage).read_text():
                environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        key = row.ranks, has_group, *environment
        if key not in self.pools:
            self.pools[key] = Pool(row.ranks, has_group, backend=backend, environment=environment)
        return self.pools[key]

    def command(self, words: list[str], seconds: float) -> tuple[int | str, str]:
        """Exit status and output of a script of this repository."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, *words], cwd=REPO, env=env, start_new_session=True, **pipes
        )
        try:
            text, _ = process.communicate(timeout=seconds)
            return process.returncode, text[-6000:]
        except subprocess.TimeoutExpired:
            return f"none after {seconds:.0f} s", ""
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


def run_rows(rows: list[Row], quickstart, budget: float, heading: str, gpus: int) -> int:
    """Run and print rows until the budget is used up; returns the number of failures."""
    done, bad, end = [], 0, time.monotonic() + budget
    print(COLUMNS)
    for i, row in enumerate(rows):
        begin = time.monotonic()
        if begin >= end:
            break
        print(f"{row.name:34}", end="", flush=True)
        try:
            limit = min(end - begin, ROW_SECONDS) if gpus and row.stage else min(end - begin, 600)
            text, is_bad = quickstart.run(row, limit)
        except Exception as error:
            text, is_bad = f"  {type(error).__name__}: {error}", True
        bad += is_bad
        result = f"{text}  {time.monotonic() - begin:5.1f} s{'  FAILED' * is_bad}"
        print(result if row.stage or is_bad else result.splitlines()[0], flush=True)
        done.append(f"{row.name:34}{result}")
        if gpus:
            write(heading, done, bad, rows[i + 1 :], gpus)
        elif is_bad and i == 0:
            break  # without stage 01 there is nothing to compare with
    return bad


def write(heading: str, done: list[str], bad: int, remaining: list[Row], gpus: int) -> None:
    """The report so far."""
    lines = ["# What ran on GPUs", "", heading, ""]
    lines.append(f"{len(done)} rows, {bad} failures, {len(remaining)} not run (no time left).")
    if gpus == 1:
        lines.append("With one GPU, NCCL runs with one rank: between ranks it stays unproven.")
    lines += ["", "```", COLUMNS, *done, "```"]
    lines += ["", "Not run:", "", *(f"- {row.name}" for row in remaining)] * bool(remaining)
    aside = REPORT.with_suffix(".writing")
    aside.write_text("\n".join(lines) + "\n")
    aside.replace(REPORT)


def machine(gpus: int, cores: int) -> str:
    import torch

    head = ["git", "-C", str(REPO), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True).stdout.strip() or "no commit"
    device, nccl = f"{cores} CPU cores", ""
    if gpus:
        device = f"{gpus} x {torch.cuda.get_device_name()}"
        nccl = f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    versions = f"torch {torch.__version__}{nccl}, Python {platform.python_version()}"
    return f"{device}, {versions}, commit {commit}, {datetime.date.today()}"


NOTES = f"""
off            the largest difference from stage 01's loss at any step, at most {CPU_TOLERANCE};
               of a stage that changes what is computed, from its own run in one process
state MB/rank  weights, gradients and optimizer state on rank 0 after its optimizer step
sent MB/step   bytes that rank 0 sends per step when its collectives run on a ring
resumed        from the checkpoint that stage 01's run saved after step {HALF}
Trained on the sample (the Python language reference), not on WikiText-2: the losses compare the
stages with one another and with nothing else. Logs and curves: {FOLDER.relative_to(REPO)}"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--budget", type=float, default=540, help="seconds, on GPUs")
    args = parser.parse_args(argv)
    print("Every stage, on the embedded sample (starting) ...", flush=True)
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # for pipelines, see 06
    fork_server()  # imports PyTorch while this process does
    import torch

    gpus = torch.cuda.device_count()
    # a job may have only some of the cores
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    heading, budget = machine(gpus, cores), args.budget if gpus else float("inf")
    print(f"{heading}\n")
    with closing(Quickstart(gpus)) as quickstart:
        bad = run_rows(rows_for(gpus, cores), quickstart, budget, heading, gpus)
    print(f"\nthe report: {REPORT}" if gpus else NOTES)
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
