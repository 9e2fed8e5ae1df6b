"""`make check-NN`: hold a script to its stage, from the cheapest check to the strictest.

    python tests/check_script.py 02 [SCRIPT]       default: exercises/02_ddp/train.py

SCRIPT is an exercise, whose blanks have the stage's own code meanwhile, or any changed copy of the
stage's script. The runs are those of `stage.toml` on two to four ranks, with fewer steps. This is a
session of pytest with the fixtures of all tests; each test below is one line of the report.
Exit status 1 with a cross, 2 if nothing could be checked.
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
PATIENCE = 60.0  # seconds per run
MORE = "\nfrom there:\n"  # between what differs and where it begins
MEANS = {
    "communication": "a collective is missing, sends too much, or runs once per micro-batch",
    "memory": "something lives longer than in the stage: full parameters, gradients, a copy",
    "as_late_as_NCCL": "a result is used, or a buffer reused, before the collective's wait(), or "
    "the ranks issue their collectives in different orders",
    "bfloat16": "a sum, or what is sent or kept, has another dtype than in the stage",
    "saved_and_resumed": "the state that is saved is not the state of training",
    "overlap": "a wait follows its collective at once, or a collective starts too late",
    "emulation": "a scale, a rounding, or the dtype of a matmul's operand is another",
    "schedules": "an action is missing, out of order or too early",
    "messages": "a send or a receive is missing, out of order, too early or too late",
}
AGREES = (
    "without clipping, the first step agrees up to its gradients: look at clipping, at the "
    "optimizer's step, at what is sent after it, and at evaluation"
)


def chosen(purpose: str) -> list[StageRun]:
    """The stage's runs for a purpose on two or three ranks; on four, with flags of their own."""
    runs = [run for run in stage_file(CHECK["stage"]).for_(purpose) if 2 <= run.ranks <= 4]
    few = {run.flags for run in runs if run.ranks < 4}
    return [run for run in runs if run.ranks < 4 or run.flags not in few]


def each(runs: list[StageRun], check: Callable[[StageRun], None]) -> None:
    """Check every run. The first failure is told in plain words."""
    if not runs:
        pytest.skip("the stage has no such run")
    for run in runs:
        try:
            check(run)
        except AssertionError as error:
            what = " ".join([f"{run.ranks} ranks", *run.flags])
            raise AssertionError(f"{what}: {plain(str(error))}") from error


def plain(text: str) -> str:
    """A hang, an exception or a difference in one line, with the script's line; then what is said
    already in more lines."""
    text, _, more = text.partition(MORE)
    hangs = "did not finish in time" in text
    frames = re.findall(rf'File "{re.escape(CHECK["loaded"])}", line (\d+),? in (\w+)', text)
    where = ""
    if frames:
        number, name = frames[0 if hangs else -1]  # a hang's stack begins with the last call
        where = f" (line {CHECK['lines'][int(number) - 1]}, in {name})"
    if hangs:
        return f"hangs: a rank has waited for {PATIENCE:.0f} s{where}"
    lines = [line for line in text.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    said = (lines or text.splitlines() or ["the results differ"])[0][:300]
    return f"{said}{where}\n{more}".rstrip()


def lines_with(name: str) -> str:
    """Where the script calls a collective."""
    text = Path(CHECK["script"]).read_text().splitlines()
    found = [str(i) for i, line in enumerate(text, 1) if re.search(rf"\b{name}\(", line)]
    return f" (lines {', '.join(found)})" if found else ""


def train_script(stage: str, argv: list[str]) -> list[dict]:
    return harness.load_stage(stage).main(argv)


def train_own(stage: str, argv: list[str]) -> list[dict]:
    return load_script(stage_path(stage), stage).main(argv)


# ---- the checks, in order ----


@pytest.fixture
def parity(reproduce, pools, corpus_dir, tmp_path):
    """`parity(flags)(run)`: with these flags, the run has its reference's losses and norms. A
    failure says where the two begin to differ."""

    def with_flags(flags: str) -> Callable[[StageRun], None]:
        def check(run: StageRun) -> None:
            try:
                every, expected = reproduce(run, train_script, flags=flags.split())
                for metrics in every:
                    harness.assert_reproduces(run, metrics, expected)
            except AssertionError as error:
                if run.purpose == "bf16":
                    raise
                more = where_it_begins(error, run, pools, corpus_dir, tmp_path)
                raise AssertionError(f"{plain(str(error))}{MORE}{more}") from error

        return check

    return with_flags


def where_it_begins(first: Exception, run: StageRun, pools, corpus_dir: Path, folder: Path) -> str:
    """The first difference, over the late backend: on Gloo a missing wait has random results.
    first: the error on Gloo."""
    number, flags = stage_file(run.stage).reference, first_difference.FLAGS.split()
    both = [*flags, "--data", str(corpus_dir), "--resume", "never", "--run-dir"]
    alone = [*run.reference_argv, *both, str(folder / "reference")]
    pools(1, group=number != "01").run(train_script, number, alone)
    try:
        late = pools(run.ranks, backend="late")
        late.run(train, run.stage, [*run.argv, *both, str(folder / "run")])
    except AssertionError as error:
        if not is_nan(first) and is_nan(error):
            return "likely cause: NaN: a buffer is used before its collective's wait()"
        return f"with collectives as late as on NCCL: {plain(str(error))}"
    states = [first_difference.read(folder / name) for name in ("run", "reference")]
    tolerance = stage_file(run.stage).tolerance.get("norm", 1e-4)
    return "\n".join(first_difference.compare(*states, tolerance) or [AGREES])


def is_nan(error: Exception) -> bool:
    return bool(re.search(r"(loss|norm) of step \d+ is nan", str(error)))


def test_losses(parity):
    each(chosen("parity"), parity("--steps 4 --eval-every 2"))


def test_accumulation_dropout_and_clipping(parity):
    runs = chosen("accumulation")
    known = {run.flags for run in [*runs, *chosen("parity")]}
    for run in chosen("late"):  # where the losses differ here, no wait is missing
        if run.flags not in known:
            runs.append(replace(run, purpose="accumulation"))
    each(runs, parity("--steps 3 --eval-every 3"))


@functools.cache
def costs(run: StageRun, pool: harness.Pool, corpus_dir: Path) -> list[tuple]:
    """For every rank what the stage's own script and this one send, and their peak memory."""
    size = ["--steps", "2", "--n-layers", "4", "--d-model", "64", "--data", str(corpus_dir)]
    return pool.run(cost, run.stage, harness.with_run_dir([*run.argv, *size, "--resume", "never"]))


def cost(stage: str, argv: list[str]) -> tuple:
    found = []
    for job in (train_own, train_script):
        with count_collectives() as counted, PeakMemory() as peak:
            job(stage, argv)
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

    def __init__(self, number: str, checks: dict[str, list[str]]):
        self.number, self.checks = number, checks  # tests in other files, by the name of the check
        self.pending: dict[str, int] = {}  # tests of each check that have not run
        self.message, self.crosses, self.ticks, self.stopped = "", 0, 0, False

    def pytest_sessionstart(self) -> None:
        pool_of, own = harness.Pool, {f"SCRIPT_{self.number}": ""}

        def pool(size: int, *args, **kwargs) -> harness.Pool:
            # one process runs references, which may be the stage's own
            return pool_of(
                size, *args, timeout=PATIENCE, environment=own if size == 1 else {}, **kwargs
            )

        harness.Pool = pool

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            print(report.longrepr)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self.name_of(item.nodeid)]
        items.sort(key=lambda item: item.path != Path(__file__))
        for item in items:
            name = self.name_of(item.nodeid)
            self.pending[name] = self.pending.get(name, 0) + 1

    def name_of(self, nodeid: str) -> str:
        """The check that a test belongs to, or ""."""
        file, _, test = nodeid.partition("::")
        if file.endswith(Path(__file__).name):
            return test.removeprefix("test_")
        for name, (its_file, pattern) in self.checks.items():
            if file.endswith(its_file) and re.search(pattern, test):
                return name
        return ""

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self.stopped:
            pytest.skip("not checked: first make the losses agree")

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> None:
        if call.excinfo is not None:
            self.message = str(call.excinfo.value)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = self.name_of(report.nodeid)
        if name not in self.pending:
            return  # another test of this check has failed
        if report.skipped:
            self.say("-", name, self.message)
        elif report.failed:
            if name in self.checks:
                test = report.nodeid.partition("::test_")[2]
                self.message = f'"{test.replace("_", " ")}" does not hold'
            self.say("✗", name, f"{self.message}\n{MEANS.get(name, '')}".rstrip())
            self.crosses += 1
            self.stopped = self.stopped or name in ("losses", "accumulation_dropout_and_clipping")
        elif report.when == "call":
            self.pending[name] -= 1
            if self.pending[name] == 0:
                self.say("✓", name)
                self.ticks += 1

    def say(self, mark: str, name: str, message: str = "") -> None:
        self.pending.pop(name)
        first, *more = f"  {mark} {name.replace('_', ' ')}: {message}".split("\n")
        print("\n      ".join([first.removesuffix(": "), *more]), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stage", choices=stages()[1:])
    parser.add_argument("script", nargs="?", type=Path)
    args = parser.parse_args()
    number, own = args.stage, stage_path(args.stage)
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
    report = Report(
        number, {name: test.split(" ") for name, test in stage_file(number).checks.items()}
    )
    with tempfile.TemporaryDirectory() as folder:
        loaded = Path(folder) / own.parent.name / "train.py"
        loaded.parent.mkdir()
        text, lines = filled(text, number)
        loaded.write_text(text)
        check = {"stage": number, "script": str(script), "loaded": str(loaded), "lines": lines}
        os.environ |= {f"SCRIPT_{number}": str(loaded), "CHECK": json.dumps(check)}
        files = {str(REPO / "tests" / file) for file, _ in report.checks.values()}
        quiet = "-o addopts= -p no:terminal -p no:xdist -p no:cacheprovider".split()
        pytest.main([*quiet, __file__, *files], plugins=[report])
    if "overlap" not in report.checks:
        print("  - overlap: not checked")
    return 1 if report.crosses else 0 if report.ticks else 2


if __name__ == "__main__":
    sys.exit(main())
