"""Run every stage on the GPUs of this machine and write gpu-check.md: `make gpu-check`.

Rows run in the order of their importance until the budget of time is used up, and the report is
written after each, so that a run that is cut short has one too. One process per rank goes through
all rows; after a failure new processes continue with the next row. Losses are compared with the
reference stage on one GPU. Every difference is reported. One above 1e-3 is a failure, with 10 one
above its own tolerance; 09 is not judged, because its routing may differ.

Several ranks share a GPU over Gloo where there are too few: that checks the kernels of a stage, not
NCCL between ranks. `--cpu` runs the same rows on the CPU, to try out this tool.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import math
import multiprocessing
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from common.data import load_corpus
from tools.pictures.overlap import Span, duration, overlapped
from tools.planner.step_time import GPUS, Job, step_time
from tools.stages import REPO, load_stage, runs_for, stage_file, stage_path, stages

FOLDER = Path("runs", "gpu-check")
MATMULS = "10_fp8/cost.py matmuls"
CURVE = "--data sample --steps 20 --log-every 1"
FAILURE = 1e-3  # in a loss
MEMORY = 0.05  # measured against the dry run
ROW_SECONDS = 120.0


class Outcome(NamedTuple):
    """What a row found. is_failure: the report counts it."""

    text: str
    is_failure: bool = False


class Row(NamedTuple):
    section: str
    name: str
    run: Callable[[float], Outcome]  # gets the seconds that are left


# ---- the processes ----


class RowFailed(Exception):
    """A stage failed, hung, or lost a process; the message is its traceback."""


class Workers:
    """`size` processes in one process group, which run stages one after another.

    size 0: one process without a process group, for stage 01.
    """

    def __init__(self, size: int, environment: dict[str, str]):
        self.size, self.environment = size, environment
        self.processes: list = []
        self.connections: list = []

    def train(self, stage: str, argv: list[str], seconds: float, deterministic: bool = False):
        """The metrics of `main(argv)` and the peak memory in bytes, for each rank."""
        if not self.processes:
            self.start()
        for connection in self.connections:
            connection.send((stage, argv, deterministic))
        end, waiting, results = time.monotonic() + seconds, dict(enumerate(self.connections)), {}
        while waiting:
            ready = multiprocessing.connection.wait(
                waiting.values(), max(0, end - time.monotonic())
            )
            for rank in [r for r, connection in waiting.items() if connection in ready]:
                try:
                    results[rank], error = waiting.pop(rank).recv()
                except EOFError:
                    error = "the process died"
                if error:
                    self.close()
                    raise RowFailed(f"rank {rank}: {error}")
            if waiting and time.monotonic() > end:
                self.close()
                raise RowFailed(f"ranks {sorted(waiting)} did not finish in {seconds:.0f} s")
        return [results[rank] for rank in sorted(results)]

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        for rank in range(max(1, self.size)):
            ours, theirs = context.Pipe()
            own = {**self.environment, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            if self.size:
                address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.size))
                own |= address | sizes | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
            # no daemon: on a GPU a rank starts a process that loads its data
            process = context.Process(target=work, args=(theirs, own))
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes, self.connections = [], []


def work(connection, environment: dict[str, str]) -> None:
    """A worker process: run stages as they arrive, until the parent closes the connection."""
    from common.distributed import setup

    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if "RANK" in environment:
        setup(ROW_SECONDS)
    while True:
        try:
            stage, argv, deterministic = connection.recv()
        except EOFError:
            os._exit(0)
        said, error, result = io.StringIO(), "", None
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        torch.use_deterministic_algorithms(deterministic)
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                lines = load_stage(stage).main(argv)
            on_gpu = torch.cuda.is_available()
            result = lines, torch.cuda.max_memory_allocated() if on_gpu else 0
        except (Exception, SystemExit):
            error = f"{traceback.format_exc().strip().splitlines()[-1]}; {said.getvalue()[-300:]}"
        connection.send((result, error))


# ---- the rows ----


class Check:
    """The rows for this machine. n: GPUs (with --cpu, the processes that stand in for them)."""

    def __init__(self, n: int, on_cpu: bool):
        self.n, self.on_cpu = n, on_cpu
        self.device_name = "" if on_cpu else torch.cuda.get_device_name()
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # for pipelines, see 06
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms
        self.environment = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
        self.workers: dict[tuple[int, bool], Workers] = {}
        self.references: dict[tuple[str, str], list[dict]] = {}
        self.count = 0

    def train(self, size: int, stage: str, flags: str, seconds: float, deterministic=False) -> list:
        self.count += 1
        folder = FOLDER / f"{self.count:03d}-{stage}"
        argv = [*flags.split(), "--run-dir", str(folder)]
        # CUDA reads the variable when a process begins to use it: such stages have their own ones
        one_queue = "CUDA_DEVICE_MAX_CONNECTIONS" in stage_path(stage).read_text()
        environment = self.environment | ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if one_queue else {})
        workers = self.workers.setdefault((size, one_queue), Workers(size, environment))
        return workers.train(stage, argv, min(seconds, ROW_SECONDS), deterministic)

    def close(self) -> None:
        for workers in self.workers.values():
            workers.close()

    def reference(self, stage: str, flags: str, seconds: float) -> list[dict]:
        """The metrics of the stage that `stage` reproduces, in one process."""
        number = stage_file(stage).reference
        if (number, flags) not in self.references:
            results = self.train(int(number != "01"), number, flags, seconds)
            self.references[number, flags] = results[0][0]
        return self.references[number, flags]

    def rows(self) -> Iterator[Row]:
        preflight = f"tools/gpu/preflight.py --nproc {self.n} --out {FOLDER}/preflight.json"
        yield Row("preflight", "this machine", partial(self.script, preflight))
        yield Row("float8", "10's matmuls, dX rowwise first", partial(self.script, MATMULS))
        for stage, size, flags in self.defaults():
            for dtype in ("float32", "bfloat16"):
                how = f"{CURVE} --dtype {dtype}"
                name = f"{stage} on {size}{self.shared(size)}, {dtype}"
                yield Row("defaults", name, partial(self.curve, stage, size, flags, how, how))
                if stage == "10":
                    run = partial(self.curve, stage, size, f"{flags} --compile", how, how)
                    yield Row("defaults", f"{name}, --compile", run)
        for preset in ("small", "gpt2") if not self.on_cpu else ("tiny",):
            for more in ("", " --compile"):
                for stage, size in (("01", 0), ("10", 1)):
                    flags = f"--data sample --steps 20 --preset {preset}{more}"
                    run = partial(self.speed, stage, size, flags)
                    yield Row("speed", f"{stage} {preset}{more}", run)
        if self.n > 1 and not self.on_cpu:
            for stage in ("02", "04", "05", "06"):
                yield Row("overlap", f"{stage} on {self.n}", partial(self.overlap, stage))
        yield Row("checkpoint", "02, saved and resumed", self.checkpoint)
        bench = f"benchmarks/bench.py --pairs 10{' --rows 01-loss' * self.on_cpu}"
        yield Row("bench", "make bench", partial(self.script, bench))
        for run in runs_for("parity"):
            if run.ranks <= self.n:
                flags, reference = " ".join(run.argv), " ".join(run.reference_argv)
                more = [f"--data sample --dtype float32 {x}" for x in (flags, reference)]
                yield Row(
                    "other runs", run.id, partial(self.curve, run.stage, run.ranks, "", *more)
                )

    def defaults(self) -> Iterable[tuple[str, int, str]]:
        """Each stage's quickstart run with the most ranks that have a GPU each, else the fewest."""
        for number in stages():
            runs = stage_file(number).for_("quickstart")
            fitting = [run for run in runs if run.ranks <= self.n]
            if number == "01":
                yield number, 0, ""
            elif fitting:
                run = max(fitting, key=lambda run: run.ranks)
                yield number, run.ranks, " ".join(run.flags)
            elif runs:
                run = min(runs, key=lambda run: run.ranks)
                yield number, run.ranks, " ".join(run.flags)

    def shared(self, size: int) -> str:
        return " ranks that share a GPU over Gloo" if size > self.n else " GPUs" if size > 1 else ""

    def curve(self, stage: str, size: int, own: str, flags: str, reference: str, seconds: float):
        """Losses against the reference, and peak memory against the dry run."""
        expected = self.reference(stage, reference, seconds)
        results = self.train(size, stage, f"{flags} {own}", seconds)
        lines = results[0][0]
        both = list(zip(lines, expected, strict=True))
        off = max(abs(a["loss"] - b["loss"]) for a, b in both)
        norm = max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in both)
        text = f"loss {lines[-1]['loss']:.6f}, off by {off:.1e}; norms by {norm:.1e}"
        if not self.on_cpu and size:
            text += self.memory(stage, size, f"{flags} {own}", [peak for _, peak in results])
        return Outcome(text, not off <= allowed(stage, flags))

    def memory(self, stage: str, size: int, flags: str, peaks: list[int]) -> str:
        flags = flags.replace("--compile", "")  # the dry run counts operators as written
        command = [sys.executable, "tools/dry_run.py", stage, "--ranks", str(size), *flags.split()]
        command += ["--vocabulary", str(len(load_corpus("sample").vocab))]
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, timeout=60)
        row = next((x for x in done.stdout.splitlines() if x.startswith("  peak ")), "")
        if not row:
            return f"; no dry run: {done.stderr.strip()[-200:]}"
        predicted = 1e9 * float(row.split()[1])
        far = " (more than 5 % apart)" if abs(peaks[0] / predicted - 1) > MEMORY else ""
        return f"; peak {peaks[0] / 1e6:.0f} MB, predicted {predicted / 1e6:.0f}{far}"

    def script(self, words: str, seconds: float) -> Outcome:
        """A script of this repository: its exit status and its output."""
        code, text = command(words.split(), self.environment, seconds)
        return Outcome(f"status {code}\n\n{text}", code != 0)

    def speed(self, stage: str, size: int, flags: str, seconds: float) -> Outcome:
        lines = self.train(size, stage, f"{flags} --log-every 1", seconds)[0][0][5:]  # warm
        rate = median(line["tokens_per_s"] for line in lines)
        mfu = [line["mfu"] for line in lines if "mfu" in line]
        text = f"{rate:,.0f} tokens/s" + (f", MFU {median(mfu):.1%}" if mfu else "")
        measured = median(line["step_ms"] for line in lines)
        text += f"; step {measured:.0f} ms"
        if stage == "01":
            text += predicted_step(flags, self.device_name)
        return Outcome(f"{text}; peak {lines[-1]['memory_mb']:.0f} MB")

    def overlap(self, stage: str, seconds: float) -> Outcome:
        flags = "--data sample --steps 8 --preset small --profile"
        size = max(s for number, s, _ in self.defaults() if number == stage)
        self.train(size, stage, flags, seconds)
        folder = FOLDER / f"{self.count:03d}-{stage}" / "profile"
        return Outcome(f"{hidden_share(read_trace(folder)):.0%} of NCCL's time behind computation")

    def checkpoint(self, seconds: float) -> Outcome:
        flags = "--data sample --steps 20 --log-every 1 --checkpoint-every 10"
        train = partial(self.train, self.n, "02", seconds=seconds, deterministic=True)
        straight = train(flags=flags)[0][0]
        saved = FOLDER / f"{self.count:03d}-02" / "checkpoints" / "step-00000010"
        resumed = train(flags=f"{flags} --resume {saved}")[0][0]
        same = [x["loss"] for x in resumed] == [x["loss"] for x in straight[10:]]
        return Outcome("the same bits" if same else "the losses differ", not same)


def allowed(stage: str, flags: str) -> float:
    """The largest difference of a loss that is no failure."""
    file = stage_file(stage)
    if file.replay:  # without it, a near tie of two experts decides about the rest of the curve
        return math.inf
    tolerances = [file.tolerance]  # empty, unless the stage changes what is computed
    if file.tolerance and "bfloat16" in flags:
        tolerances += [dict(run.tolerance) for run in file.for_("bf16")]
    return max([FAILURE, *(each.get("loss", 0.0) for each in tolerances)])


def predicted_step(flags: str, device_name: str) -> str:
    """What `make plan` predicts for stage 01's step on a GPU that it knows."""
    key = next((key for key in ("a100", "h100", "h200", "b200") if key in device_name.lower()), "")
    if not key:
        return ""
    args = load_stage("01").parse_args(flags.split())
    words = len(load_corpus("sample").vocab)
    shape = args.n_layers, args.d_model, args.n_heads, args.seq_len, words
    job = Job(*shape, args.global_batch_size, 1, GPUS[key], micro_batch=args.micro_batch_size)
    return f", predicted {1e3 * step_time(job).seconds:.0f}"


def command(words: list[str], environment: dict[str, str], seconds: float) -> tuple[int | str, str]:
    """Exit status and output of a script of this repository."""
    process = subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=seconds)
        return process.returncode, text[-6000:]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        return f"none after {seconds:.0f} s", process.communicate()[0][-6000:]


def read_trace(folder: Path) -> list[dict]:
    (path,) = folder.glob("rank0.*pt.trace.json")
    return json.loads(path.read_text())["traceEvents"]


def hidden_share(events: list[dict]) -> float:
    """The share of the time of NCCL's kernels in which another kernel computes."""
    nccl, others = [], []
    for e in (e for e in events if e.get("cat") == "kernel"):
        spans = nccl if "nccl" in e["name"].lower() else others
        spans.append(Span(e["ts"], e["ts"] + e["dur"], ""))
    if not nccl:
        raise RowFailed("the trace has no kernel of NCCL")
    return overlapped(nccl, others) / duration(nccl)


# ---- the report ----


def machine(n: int, on_cpu: bool) -> str:
    head = ["git", "-C", str(REPO), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True).stdout.strip() or "no commit"
    name = "CPU" if on_cpu else torch.cuda.get_device_name()
    nccl = "" if on_cpu else f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}{nccl}"
    return f"{n} x {name}, {versions}, commit {commit}, {datetime.date.today()}"


def markdown(
    head: str, done: list[tuple[Row, Outcome, float]], remaining: list[Row], n: int
) -> str:
    """The report so far."""
    failures = sum(outcome.is_failure for _, outcome, _ in done)
    lines = ["# What ran on GPUs", "", head, ""]
    lines.append(f"{len(done)} rows, {failures} failures, {len(remaining)} not run (no time left).")
    if n == 1:
        lines.append("With one GPU, NCCL runs with one rank: between ranks it stays unproven.")
    for row, outcome, seconds in done:
        result = "FAILED: " if outcome.is_failure else ""
        lines += [f"\n## {row.section}\n"] * (not any(f"## {row.section}\n" in x for x in lines))
        lines.append(f"- **{row.name}** ({seconds:.0f} s): {result}{outcome.text}")
    if remaining:
        lines += ["\n## Not run\n", *(f"- {row.section}: {row.name}" for row in remaining)]
    return "\n".join(lines) + "\n"


def run_rows(
    rows: list[Row], budget: float, write: Callable[[str], None], head: str, n: int
) -> int:
    """Run rows until the budget is used up; returns the number of failures."""
    done: list[tuple[Row, Outcome, float]] = []
    started = time.monotonic()
    for i, row in enumerate(rows):
        begin = time.monotonic()
        left = started + budget - begin
        if left <= 0:
            break
        try:
            outcome = row.run(left)
        except Exception as error:
            outcome = Outcome(f"{type(error).__name__}: {error}", True)
        done.append((row, outcome, time.monotonic() - begin))
        write(markdown(head, done, rows[i + 1 :], n))
        first = outcome.text.splitlines()[0]
        print(f"{row.section}: {row.name}: {'FAILED, ' * outcome.is_failure}{first}", flush=True)
    return sum(outcome.is_failure for _, outcome, _ in done)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--budget", type=float, default=540, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.md"))
    parser.add_argument("--cpu", type=int, metavar="N", help="try the rows on N CPU processes")
    args = parser.parse_args(argv)
    n = args.cpu or torch.cuda.device_count()
    if n == 0:
        print("gpu-check: PyTorch sees no GPU on this machine", file=sys.stderr)
        return 2
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    check = Check(n, bool(args.cpu))

    def write(text: str) -> None:
        aside = args.out.with_suffix(".writing")
        aside.write_text(text)
        aside.replace(args.out)

    try:
        failures = run_rows(list(check.rows()), args.budget, write, machine(n, check.on_cpu), n)
    finally:
        check.close()
    print(f"{failures} failures; the report: {args.out}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
