"""`make check-NN`: hold a script to its stage, from the cheapest check to the strictest.

    python tests/check_script.py 02 [SCRIPT]       default: exercises/02_ddp/train.py

SCRIPT is an exercise, whose blanks have the stage's own code meanwhile, or any changed copy of the
stage's script. The runs are those of `stage.toml` on two to four ranks, with fewer steps. This is a
session of pytest with the fixtures of all tests; each test below is one line of the report, and so
is each entry of `checks` in `stage.toml`. Exit status 1 with a cross, 2 if nothing was checked.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import first_difference
import harness
import pytest
from exercise import blanks_of, filled
from harness import REPO, PeakMemory, StageRun, count_collectives, stage_file, stage_path, stages
from stages import load_script
from test_late_backend import assert_parity_over_the_late_backend, train
from test_late_backend import test_checkpoint_and_resume_over_the_late_backend as resume_bitwise

# stage; script: as the user names it; loaded: the file that runs; lines: of it, in the script
CHECK = json.loads(os.environ.get("CHECK", "{}"))
PATIENCE = 60.0 * max(1.0, os.getloadavg()[0] / os.cpu_count())  # seconds; more where it is busy
QUIET = "-o addopts= -p no:terminal -p no:xdist -p no:cacheprovider".split()
MEANS = {
    "communication": "a collective is missing, sends too much, or runs once per micro-batch",
    "memory": "something lives longer than in the stage: full parameters, gradients, a copy",
    "as_late_as_NCCL": "a result is used, or a buffer reused, before the collective's wait(), or "
    "the ranks issue their collectives in different orders",
    "bfloat16": "a sum, or what is sent or kept, has another dtype than in the stage",
    "saved_and_resumed": "the state that is saved is not the state of training",
    "in_flight": "a buffer is written to while a collective still uses it",
    "balance": "some ranks compute more than others, which wait for them",
    "overlap": "a wait follows its collective at once, or a collective starts too late",
    "emulation": "a scale, a rounding, or the dtype of a matmul's operand is another",
    "numbers": "a large number overflows, or a sum or a factor has too few digits",
    "update": "a matrix is not updated as by Muon on one process, or not on every rank",
    "owners": "a rank keeps, computes or sends what belongs to another one",
    "schedules": "an action is missing, out of order or too early",
    "messages": "a send or a receive is missing, out of order, too early or too late",
}
SKIPPED = "not checked: first make the losses agree"
AGREES = (
    "without clipping, the first step agrees up to its gradients: look at clipping, at the "
    "optimizer's step, at what is sent after it, and at evaluation"
)


def chosen(purpose: str) -> list[StageRun]:
    """The stage's runs for a purpose on two or three ranks; on four, with flags of their own."""
    runs = [run for run in stage_file(CHECK["stage"]).for_(purpose) if 2 <= run.ranks <= 4]
    few = {run.flags for run in runs if run.ranks < 4}
    return [run for run in runs if run.ranks < 4 or run.flags not in few]


def each(runs: list[StageRun], check: Callable, explain: Callable | None = None) -> None:
    """Check every run. The first failure is told in plain words; `explain` adds lines to it."""
    if not runs:
        pytest.skip("the stage has no such run")
    for run in runs:
        try:
            check(run)
        except AssertionError as error:
            what = " ".join([f"{run.ranks} ranks", *run.flags])
            more = explain(run, error) if explain else []
            raise AssertionError("\n".join([f"{what}: {plain(error)}", *more])) from error


def plain(error: AssertionError) -> str:
    """A hang, an exception or a difference in one line, with the script's line."""
    text = str(error)
    hangs = "did not finish in time" in text
    frames = re.findall(rf'File "{re.escape(CHECK["loaded"])}", line (\d+),? in (\w+)', text)
    where = ""
    if frames:
        number, name = frames[0 if hangs else -1]  # a hang's stack begins with the last call
        where = f" (line {CHECK['lines'][int(number) - 1]}, in {name})"
    if hangs:
        return f"hangs: a rank has not finished in time{where}"
    if died := re.search(r"the worker died, (exit code -?\d+)", text):
        return f"a rank has died, {died[1]}"
    raised = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", text, re.M)
    raised.sort(key=lambda line: "onnection" in line)  # of the others, after a rank's own error
    if raised and "onnection" in raised[0]:
        return f"a rank has ended, or the ranks' collectives do not match{where}"
    return (raised or text.splitlines() or ["the results differ"])[0][:300] + where


def lines_with(name: str) -> str:
    """Where the script calls a collective."""
    text = Path(CHECK["script"]).read_text().splitlines()
    found = [str(i) for i, line in enumerate(text, 1) if re.search(rf"\b{name}\(", line)]
    return f" (lines {', '.join(found)})" if found else ""


# ---- the checks, in order ----


@pytest.fixture
def parity(reproduce):
    """`parity(flags)(run)`: with these flags, the run has its reference's losses and norms."""

    def check(flags: str, run: StageRun) -> None:
        every, expected = reproduce(run, flags=flags.split())
        for metrics in every:
            harness.assert_reproduces(run, metrics, expected)

    return lambda flags: functools.partial(check, flags)


@pytest.fixture
def where_it_begins(pools, corpus_dir, tmp_path):
    """The first difference of a run that has failed, over the late backend: on Gloo a missing wait
    has random results."""

    def lines(run: StageRun, error: AssertionError) -> list[str]:
        number, flags = stage_file(run.stage).reference, first_difference.FLAGS.split()
        both = [*flags, "--data", str(corpus_dir), "--resume", "never", "--run-dir"]
        alone = [*run.reference_argv, *both, str(tmp_path / "reference")]
        pools(1, group=number != "01").run(harness.train, number, alone)
        try:
            late = pools(run.ranks, backend="late")
            late.run(train, run.stage, [*run.argv, *both, str(tmp_path / "run")])
        except AssertionError as late_error:
            if is_nan(late_error) and not is_nan(error):
                return ["likely cause: NaN: a buffer is used before its collective's wait()"]
            late = plain(late_error)
            return [f"with collectives as late as on NCCL: {late}"] * (late != plain(error))
        states = [first_difference.read(tmp_path / name) for name in ("run", "reference")]
        tolerance = stage_file(run.stage).tolerance.get("norm", 1e-4)
        raised = "Traceback" in str(error)  # then the exception says more than AGREES
        return first_difference.compare(*states, tolerance) or [AGREES] * (not raised)

    return lines


def is_nan(error: AssertionError) -> bool:
    return bool(re.search(r"(loss|norm) of step \d+ is nan", str(error)))


def test_losses(parity, where_it_begins):
    each(chosen("parity"), parity("--steps 4 --eval-every 2"), where_it_begins)


def test_accumulation_dropout_and_clipping(parity, where_it_begins):
    runs = chosen("accumulation")
    known = {run.flags for run in [*runs, *chosen("parity")]}
    for run in chosen("late"):  # where the losses differ here, no wait is missing
        if run.flags not in known:
            runs.append(replace(run, purpose="accumulation"))
    each(runs, parity("--steps 3 --eval-every 3"), where_it_begins)


@functools.cache
def costs(run: StageRun, pool: harness.Pool, corpus_dir: Path) -> list[tuple]:
    """For every rank what the stage's own script and this one send, and their peak memory."""
    size = ["--steps", "2", "--n-layers", "4", "--d-model", "64", "--data", str(corpus_dir)]
    return pool.run(cost, run.stage, harness.with_run_dir([*run.argv, *size, "--resume", "never"]))


def cost(stage: str, argv: list[str]) -> tuple:
    found = []
    for module in (load_script(stage_path(stage), stage), harness.load_stage(stage)):
        with count_collectives() as counted, PeakMemory() as peak:
            module.main(argv)
        found.append((counted.payload, peak.above))
    return tuple(found)


def test_communication(pools, corpus_dir):
    def check(run: StageRun) -> None:
        for (theirs, _), (ours, _) in costs(run, pools(run.ranks), corpus_dir):
            for op, group in sorted(ours.keys() | theirs.keys()):
                a, b = ours[op, group], theirs[op, group]
                said = f"{op} in {group}: {a:,} bytes, in the stage {b:,}"
                assert a == b, said + lines_with(op)

    each(chosen("accumulation") or chosen("late"), check)


def test_memory(pools, corpus_dir):
    def check(run: StageRun) -> None:
        found = costs(run, pools(run.ranks), corpus_dir)
        for rank, ((_, theirs), (_, ours)) in enumerate(found):
            said = f"rank {rank} has a peak of {ours:,} bytes, in the stage {theirs:,}"
            assert ours <= 1.05 * theirs, said

    each(chosen("accumulation") or chosen("late"), check)


def test_as_late_as_NCCL(reproduce):
    runs = chosen("late")
    if "--bucket-cap-mb" in stage_file(CHECK["stage"]).flags:  # a tiny model has one bucket
        tiny = ("--bucket-cap-mb", "0.002")
        runs += [replace(run, flags=(*run.flags, *tiny)) for run in chosen("late")]
    each(runs, functools.partial(assert_parity_over_the_late_backend, reproduce))


def test_bfloat16(parity, reproduce):
    each(chosen("bf16"), parity("--steps 8"))
    if late := chosen("late-bf16"):
        each(late, functools.partial(assert_parity_over_the_late_backend, reproduce))


def test_saved_and_resumed(pools, corpus_dir, tmp_path):
    def check(run: StageRun) -> None:
        resume_bitwise(pools, corpus_dir, tmp_path / run.id, run)

    each(chosen("resume"), check)


# ---- the report ----


class Report:
    """pytest's plugin that writes one line per check, in place of pytest's own report."""

    def __init__(self) -> None:
        self.marks, self.losses_differ = "", False
        self.failed: list[str] = []  # tests in other files

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self.losses_differ:
            pytest.skip(SKIPPED)

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> None:
        name, message = item.name.removeprefix("test_"), str(call.excinfo and call.excinfo.value)
        failed = call.excinfo and not call.excinfo.errisinstance(pytest.skip.Exception)
        if item.path != Path(__file__):
            self.failed += [name.replace("_", " ")] if failed else []
        elif failed:
            self.losses_differ |= name in ("losses", "accumulation_dropout_and_clipping")
            self.say("✗", name, message)
        elif call.excinfo:
            self.say("-", name, message)
        elif call.when == "call":
            self.say("✓", name)

    def run(self, name: str, file: str, words: str) -> None:
        """Run the tests of another file whose names contain one of the words, as one check."""
        if self.losses_differ:
            return self.say("-", name, SKIPPED)
        self.failed, which = [], [str(REPO / "tests" / file), "-k", words.replace("|", " or ")]
        if pytest.main([*QUIET, *which], plugins=[self]) == 0:
            return self.say("✓", name)
        self.say("✗", name, f'"{self.failed[0] if self.failed else file}" does not hold')

    def say(self, mark: str, name: str, message: str = "") -> None:
        self.marks += mark
        lines = [f"  {mark} {name.replace('_', ' ')}{': ' * bool(message)}{message}"]
        lines += [MEANS[name]] if mark == "✗" and name in MEANS else []
        print("\n".join(lines).replace("\n", "\n      "), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stage", choices=stages()[1:])
    parser.add_argument("script", nargs="?", type=Path)
    args = parser.parse_args()
    number, own, own_pool = args.stage, stage_path(args.stage), harness.Pool
    script = (args.script or REPO / "exercises" / own.parent.name / "train.py").resolve()
    try:
        text = script.read_text()
        compile(text, script, "exec")
    except OSError as error:
        print(f"{script}: {error.strerror} (make exercise-{number} writes it)", file=sys.stderr)
        return 2
    except SyntaxError as error:
        print(f"  ✗ line {error.lineno}: {error.msg}: {(error.text or '').strip()}")
        return 1
    if blanks := blanks_of(text):
        print(f"  - with the stage's own code in {len(blanks)} blanks: {', '.join(blanks)}")

    def pool(size: int, *args, **kwargs) -> harness.Pool:
        # one process runs references, which may be the stage's own
        own_script = {f"SCRIPT_{number}": ""} if size == 1 else {}
        return own_pool(size, *args, timeout=PATIENCE, environment=own_script, **kwargs)

    harness.Pool, report = pool, Report()
    with tempfile.TemporaryDirectory() as folder:
        loaded = Path(folder) / own.parent.name / "train.py"
        loaded.parent.mkdir()
        text, lines = filled(text, number)
        loaded.write_text(text)
        check = {"stage": number, "script": str(script), "loaded": str(loaded), "lines": lines}
        os.environ |= {f"SCRIPT_{number}": str(loaded), "CHECK": json.dumps(check)}
        pytest.main([*QUIET, __file__], plugins=[report])
        for name, tests in stage_file(number).checks.items():
            report.run(name, *tests.split(" "))
    if "overlap" not in stage_file(number).checks:
        print("  - overlap: not checked")
    return 1 if "✗" in report.marks else 0 if "✓" in report.marks else 2


if __name__ == "__main__":
    sys.exit(main())
