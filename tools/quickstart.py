"""Train every stage for a few steps on the embedded sample and compare their losses.

`make quickstart` runs it, or `python3 -m tools.quickstart` with any Python that has torch, numpy,
tensorboard and xxhash. The rows come from the stages' files. They differ in technique alone, so
their losses must agree: a difference of more than 1e-5 from stage 01 at any step is a failure. A
stage that changes what is computed is compared with its own run in one process, within the
tolerance of its file. What this machine or this PyTorch cannot do is skipped.

On a machine with GPUs the rows run on them, in float32 and in bfloat16, where a loss may be 1e-3
off. Then come speed and peak memory of a larger model, until --budget is used up. The report,
gpu-check.md, is written after each row. Where ranks are more than GPUs they share them over Gloo:
that checks the kernels of a stage, not NCCL between ranks.
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

from tools.pool import Pool, WorkerExit, comparably, fork_server, metrics_of, missing, train
from tools.stages import BASE, REPO, needs_model, runs_for, stage_file, stage_path, stages

FOLDER, REPORT = REPO / "runs" / "quickstart", Path("gpu-check.md")
HALF = int(re.search(r"--steps (\d+)", BASE["quickstart"])[1]) // 2
CPU_TOLERANCE, GPU_TOLERANCE = 1e-5, 1e-3  # of a loss
ROW_SECONDS = 120.0  # of a row on GPUs
GPT2 = "--data sample --dtype bfloat16 --log-every 1 --preset gpt2 --micro-batch-size 8"
COLUMNS = f"{'':34}{'ranks':>6}{'final loss':>12}{'off':>9}{'tokens/s':>11}{'step ms':>9}"
COLUMNS += f"{'state MB/rank':>15}{'sent MB/step':>14}"


class Row(NamedTuple):
    """A run of a stage, and the run in one process that it is compared with."""

    name: str
    stage: str
    ranks: int
    flags: str
    reference: str = ""  # the flags of the other run
    against: str = ""  # and its stage; empty: the one that the stage's file names
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
        flags = f"{settings} {flags}".strip()
        row = Row(name, run.stage, ranks, flags, settings, tolerance=tolerance)
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
    rows = [*stage_rows(gpus, "float32", True), *stage_rows(gpus, "bfloat16", True)]
    eager, offload = "01 --steps 20", "04 --steps 10 --cpu-offload"
    for run in (eager, f"{eager} --compile", "10 --steps 20", "10 --steps 20 --compile"):
        rows.append(gpt2_row(run, eager))
    return [*rows, gpt2_row(offload, offload), gpt2_row("12 --steps 10", offload)]


def gpt2_row(run: str, reference: str) -> Row:
    """Speed and memory of a larger model. How far its losses may be off has not been measured."""
    (stage, flags), (against, others) = (each.split(maxsplit=1) for each in (run, reference))
    both = f"{GPT2} {flags}", f"{GPT2} {others}"
    return Row(f"gpt2: {run}", stage, 1, *both, against, tolerance=float("inf"))


class Quickstart:
    """Runs rows, and remembers the metrics of what it has trained."""

    def __init__(self, gpus: int):
        self.gpus = gpus
        self.pools: dict[tuple, Pool] = {}
        self.known: dict[tuple[str, str], list[dict]] = {}  # of runs in one process

    def run(self, row: Row, deadline: float) -> tuple[str, bool]:
        """A row of the table, and whether it is a failure."""
        reference = row.against or stage_file(row.stage).reference, row.reference
        if reference not in self.known and (row.stage, row.flags, row.ranks) != (*reference, 1):
            self.train(Row("", reference[0], 1, row.reference, row.reference), deadline)
        lines = self.train(row, deadline)
        expected = self.known[reference][-len(lines) :]
        off = max(abs(a["loss"] - b["loss"]) for a, b in zip(lines, expected, strict=True))
        names = ("tokens_per_s", "step_ms", "comm_mb", "mfu")
        late = lines[len(lines) // 4 :]
        speed, step, sent, mfu = (median(x.get(n, 0.0) for x in late) for n in names)
        text = f"{row.ranks:>6}{lines[-1]['loss']:>12.6f}{off:>9.1e}{speed:>11,.0f}{step:>9.1f}"
        text += f"{lines[-1]['model_state_mb']:>15.2f}{sent:>14.2f}"
        if self.gpus:
            text += f"  peak {lines[-1]['memory_mb']:.0f} MB" + f", MFU {mfu:.1%}" * (mfu > 0)
            text += ", ranks share GPUs" if row.ranks > self.gpus else ""
        return text, not off <= row.tolerance

    def train(self, row: Row, deadline: float) -> list[dict]:
        """Train, and return the metrics of rank 0. Where runs are only comparable if one replays
        what the other records, they do."""
        dtype = "bfloat16" if "bfloat16" in row.flags else "float32"
        folder = FOLDER / f"{row.stage}-{row.ranks}-{dtype}"
        if folder.exists():
            folder = FOLDER / f"{folder.name}-{len([*FOLDER.iterdir()])}"
        argv = [*row.flags.split(), *row.more.split(), "--run-dir", str(folder)]
        if needs_model(row.stage):
            argv += f"--model {self.exported()} --lr 1e-3 --global-batch-size 24".split()
        if row.by_torchrun:
            self.by_torchrun(row, argv, deadline - time.monotonic())
            return metrics_of(folder)
        kept = FOLDER / re.sub(r"\W+", "-", f"replay {row.stage} {row.reference}")
        how = "record" if row.ranks == 1 else "replay"
        job = train, how, str(kept), row.stage, argv
        pool = self.pool(row)
        lines = pool.run(comparably, *job, timeout=deadline - time.monotonic())[0]
        if row.ranks == 1 and "--resume" not in row.more:
            self.known[row.stage, row.flags] = lines
        return lines

    def exported(self) -> Path:
        """The folder of a model, for a stage that needs one: of what stage 01 has trained."""
        out = FOLDER / "model"
        if not out.exists():
            from tools.export import export_folder, run_and_checkpoint

            export_folder(*run_and_checkpoint(FOLDER / f"{stages()[0]}-1-float32"), out)
        return out

    def pool(self, row: Row) -> Pool:
        has_group, environment, backend = row.stage != stages()[0], {}, "gloo"
        if self.gpus:
            backend = "cpu:gloo,cuda:nccl" if row.ranks <= self.gpus else "cpu:gloo,cuda:gloo"
            # CUDA reads it when a process begins to use it: such stages have processes of their own
            if "CUDA_DEVICE_MAX_CONNECTIONS" in stage_path(row.stage).read_text("utf-8"):
                environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        key = row.ranks, has_group, *environment
        if key not in self.pools:
            self.pools[key] = Pool(row.ranks, has_group, backend=backend, environment=environment)
        return self.pools[key]

    def by_torchrun(self, row: Row, argv: list[str], seconds: float) -> None:
        # without an address torchrun looks its host's name up, which may be in no DNS
        words = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node"
        words = [sys.executable, *words.split(), str(row.ranks), str(stage_path(row.stage)), *argv]
        # torchrun's flags, such as those of a pod: PET_NNODES=2 would wait for another node
        env = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(words, cwd=REPO, env=env, start_new_session=True, **pipes)
        try:
            text, _ = process.communicate(timeout=seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode != 0:
            raise RuntimeError(f"status {process.returncode}: {text[-6000:]}")

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


def run_rows(rows: list[Row], quickstart, end: float, heading: str, gpus: int) -> int:
    """Run and print rows until the time `end`; returns the number of failures."""
    done, bad = [], 0
    print(COLUMNS)
    for i, row in enumerate(rows):
        begin = time.monotonic()
        if begin >= end:
            break
        print(f"{row.name:34}", end="", flush=True)
        try:
            limit = begin + (ROW_SECONDS if gpus else 600)
            text, is_bad = quickstart.run(row, min(end, limit))
        except Exception as error:
            if time.monotonic() >= end:
                print("  no time left")
                break
            text, is_bad = judged(error)
        bad += is_bad
        text += f"  {time.monotonic() - begin:5.1f} s{'  FAILED' * is_bad}"
        print(text, flush=True)
        done.append(f"{row.name:34}{text}")
        if gpus:
            write(heading, done, bad, rows[i + 1 :], gpus)
        elif is_bad and i == 0:
            break  # without stage 01 there is nothing to compare with
    return bad


def judged(error: Exception) -> tuple[str, bool]:
    """What to print, and whether it is a failure; what this machine or PyTorch lacks is none."""
    said = "".join(error.stderr).strip() if isinstance(error, WorkerExit) else ""
    if " has no " in said:
        return f"  skipped: {said.partition(': ')[2]}", False
    return f"  {type(error).__name__}: {error}", True


def write(heading: str, done: list[str], bad: int, remaining: list[Row], gpus: int) -> None:
    """The report so far."""
    lines = ["# What ran on GPUs", "", heading, ""]
    skipped = sum("  skipped: " in text for text in done)
    counts = f"{len(done)} rows, {bad} failures, {skipped} skipped, {len(remaining)} not run"
    lines.append(f"{counts} (no time left).")
    if gpus == 1:
        lines.append("With one GPU, NCCL runs with one rank: between ranks it stays unproven.")
    lines += ["", "```", COLUMNS, *done, "```"]
    lines += ["", "Not run:", "", *(f"- {row.name}" for row in remaining)] * bool(remaining)
    REPORT.write_text("\n".join(lines) + "\n", "utf-8")


def machine(gpus: int, cores: int) -> str:
    import torch

    from common.job.run import git_commit

    commit = git_commit() or "unknown"
    commit = commit[:9] + commit[40:]  # and -dirty
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
    parser.add_argument("--budget", type=float, default=480, help="seconds, on GPUs")
    args = parser.parse_args(argv)
    begin = time.monotonic()
    if lacking := missing():
        print(lacking, file=sys.stderr)
        return 2
    print("Every stage, on the embedded sample (starting) ...", flush=True)
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # for pipelines, see 06
    fork_server()  # imports PyTorch while this process does
    import torch

    gpus = torch.cuda.device_count()
    # a job may have only some of the cores
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    heading, end = machine(gpus, cores), begin + args.budget if gpus else float("inf")
    print(f"{heading}\n")
    with closing(Quickstart(gpus)) as quickstart:
        bad = run_rows(rows_for(gpus, cores), quickstart, end, heading, gpus)
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
