"""`make check-NN`: hold a script to its stage, from the cheapest check to the strictest.

    python tests/check.py 02 [SCRIPT]       default: exercises/02_ddp/train.py

SCRIPT is an exercise, whose blanks have the stage's own code meanwhile, or any changed copy of the
stage's script. The runs are those of `stage.toml`, on two to four ranks and with fewer steps. This
is a session of pytest with the fixtures of the other tests; a test below is one line of the report.
Exit status 1 with a cross, 2 if nothing could be checked.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "tools"), str(REPO / "tests")]

import first_difference
import harness
import pytest
from exercise import blanks_of, filled
from harness import PeakMemory, Run, WorkerError, count_collectives, stage_file, stage_path, stages
from stages import load_script
from test_late_backend import assert_parity_over_the_late_backend, train
from test_late_backend import test_checkpoint_and_resume_over_the_late_backend as resume_bitwise

STAGE, SCRIPT = os.environ.get("CHECK", "02"), os.environ.get("CHECK_SCRIPT", "")
ORIGINS = [int(n) for n in os.environ.get("CHECK_LINES", "").split()]  # of a script with blanks
PATIENCE = 60.0  # seconds of a run
MEANS = {
    "losses": "",
    "accumulation, dropout, clipping": "the losses agree, so look at what differs here: gradients "
    "of earlier micro-batches (added, divided and sent once?), dropout's positions, the norm",
    "communication": "a collective is missing, sends another size, or runs per micro-batch",
    "memory": "something lives longer than in the stage: full parameters, gradients, a copy",
    "as late as NCCL": "a result is used, or a buffer reused, before the collective's wait(); "
    "or the ranks issue their collectives in different orders",
    "bfloat16": "a sum or a copy in another dtype than the stage's",
    "saved and resumed": "the state in a checkpoint is not the state of training",
    "overlap": "a wait comes right after its collective, or a collective starts too late",
    "schedules": "an action is missing, out of order, or too early",
}


def chosen(purpose: str) -> list[Run]:
    """The stage's runs for a purpose on two or three ranks, and on four where there are no others
    with these flags."""
    runs = [run for run in stage_file(STAGE).for_(purpose) if 2 <= run.ranks <= 4]
    few = {run.flags for run in runs if run.ranks < 4}
    return [run for run in runs if run.ranks < 4 or run.flags not in few]


def each(runs: list[Run], check: Callable[[Run], None]) -> None:
    """Check every run; the first failure is told in plain words, with the script's line."""
    if not runs:
        pytest.skip("the stage has no such run")
    for run in runs:
        try:
            check(run)
        except (AssertionError, WorkerError) as error:
            flags = f" {' '.join(run.flags)}" if run.flags else ""
            raise AssertionError(f"{run.ranks} ranks{flags}: {plain(str(error))}") from error


def plain(text: str) -> str:
    """An error in one line: a hang, an exception, or a difference; and the line of the script."""
    hangs = "did not finish in time" in text
    found = re.findall(rf'File "{re.escape(SCRIPT)}", line (\d+),? in (\w+)', text)
    where = ""
    if found:
        number, name = found[0 if hangs else -1]
        line = ORIGINS[int(number) - 1] if ORIGINS else int(number)
        where = f" (line {line}, in {name})"
    if hangs:
        return f"hangs: a rank still waited after {PATIENCE:.0f} s{where}"
    lines = [line for line in text.splitlines() if re.match(r"\w*(\.\w+)*(Error|Exit)\b", line)]
    return (lines[0] if lines else text.split("\n")[0])[:300] + where


def lines_with(name: str) -> str:
    """Where the script names a collective."""
    text = Path(os.environ["CHECK_SHOWN"]).read_text().splitlines()
    found = [str(i) for i, line in enumerate(text, 1) if re.search(rf"\b{name}\(", line)]
    return f" (lines {', '.join(found)})" if found else ""


# ---- the checks, in order ----


def parity(reproduce, flags: str) -> Callable[[Run], None]:
    def check(run: Run) -> None:
        every, expected = reproduce(run, train_script, flags=flags.split())
        for metrics in every:
            harness.assert_reproduces(run, metrics, expected)

    return check


def train_script(stage: str, argv: list[str]) -> list[dict]:
    return harness.load_stage(stage).main(argv)


def train_own(stage: str, argv: list[str]) -> list[dict]:
    return load_script(stage_path(stage), stage).main(argv)


def test_losses(reproduce, pools, corpus_dir, tmp_path):
    def check(run: Run) -> None:
        try:
            parity(reproduce, "--steps 4 --eval-every 2")(run)
        except AssertionError as error:
            more = where_it_begins(run, pools, corpus_dir, tmp_path)
            raise AssertionError(f"{plain(str(error))}\n{more}") from error

    runs = chosen("parity")
    for run in runs:
        flags = " ".join(run.flags)
        try:
            check(run)
        except AssertionError as error:
            raise AssertionError(f"{run.ranks} ranks {flags}: {error}") from error


def where_it_begins(run: Run, pools, corpus_dir: Path, tmp_path: Path) -> str:
    """The first difference, of a run over the late backend: on Gloo, a missing wait is random."""
    reference = stage_file(STAGE).reference
    both = [*first_difference.FLAGS.split(), "--data", str(corpus_dir), "--run-dir"]
    alone = [*run.reference_argv, *both, str(tmp_path / "reference")]
    pools(1, group=reference != "01").run(train_own, reference, alone)
    late = pools(run.ranks, backend="late")
    try:
        late.run(train, STAGE, [*run.argv, *both, str(tmp_path / "run")])
    except AssertionError as error:
        return f"with collectives as late as on NCCL: {plain(str(error))}"
    states = [first_difference.read(tmp_path / name) for name in ("run", "reference")]
    tolerance = stage_file(STAGE).tolerance.get("norm", 1e-4)
    return "\n".join(first_difference.compare(*states, tolerance)[0])


def test_accumulation_dropout_clipping(reproduce):
    each(chosen("accumulation"), parity(reproduce, "--steps 3 --eval-every 3"))


@pytest.fixture(scope="session")
def costs(pools, corpus_dir) -> list[tuple]:
    """Of each run: for every rank what the script and the stage's own send, and their memory."""
    size = ["--steps", "2", "--n-layers", "4", "--d-model", "64", "--data", str(corpus_dir)]
    return [
        (run, pools(run.ranks).run(cost, STAGE, harness.with_run_dir([*run.argv, *size])))
        for run in chosen("accumulation") or chosen("late")
    ]


def cost(stage: str, argv: list[str]) -> list[tuple]:
    found = []
    for job in (train_own, train_script):
        with count_collectives() as counted, PeakMemory() as peak:
            job(stage, [*argv, "--resume", "never"])
        found.append((counted.payload, peak.above))
    return found


def test_communication(costs):
    def check(run: Run) -> None:
        for (theirs, _), (ours, _) in dict(costs)[run]:
            for key in sorted(ours.keys() | theirs.keys()):
                what = f"{key[0]} in {key[1]}: {ours[key]:,} bytes, in the stage {theirs[key]:,}"
                assert ours[key] == theirs[key], what + lines_with(key[0])

    each([run for run, _ in costs], check)


def test_memory(costs):
    def check(run: Run) -> None:
        for rank, ((_, theirs), (_, ours)) in enumerate(dict(costs)[run]):
            what = f"rank {rank} has a peak of {ours:,} bytes, in the stage {theirs:,}"
            assert ours <= 1.05 * theirs, what

    each([run for run, _ in costs], check)


def test_as_late_as_NCCL(reproduce):
    late = [*chosen("late"), *chosen("late-bf16")]
    if "--bucket-cap-mb" in stage_file(STAGE).flags:
        tiny = ("--bucket-cap-mb", "0.002")
        late += [replace(run, flags=(*run.flags, *tiny)) for run in chosen("late")]
    each(late, functools.partial(assert_parity_over_the_late_backend, reproduce))


def test_bfloat16(reproduce):
    each(chosen("bf16"), parity(reproduce, "--steps 8"))


def test_saved_and_resumed(pools, corpus_dir, tmp_path):
    def check(run: Run) -> None:
        resume_bitwise(pools, corpus_dir, tmp_path / str(run.ranks), run)

    each(chosen("resume"), check)


# ---- the report ----


class Report:
    """pytest's plugin: one line per check, in place of pytest's own report."""

    def __init__(self, checks: dict[str, str]):
        self.checks, self.remaining = checks, {}
        self.message, self.stopped, self.crosses, self.ticks = "", False, 0, 0

    def pytest_sessionstart(self) -> None:
        harness.Pool = functools.partial(harness.Pool, timeout=PATIENCE)
        import check

        harness.train = check.train_own  # of the reference, which may be the stage's own script

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self.name_of(item.nodeid)]
        items.sort(key=lambda item: item.path.name != "check.py")
        for item in items:
            name = self.name_of(item.nodeid)
            self.remaining[name] = self.remaining.get(name, 0) + 1

    def name_of(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        if file.endswith("check.py"):
            name = test.removeprefix("test_").replace("_", " ")
            return name.replace("accumulation dropout", "accumulation, dropout,")
        for name, which in self.checks.items():
            wanted, pattern = which.split(" ", 1)
            if file.endswith(wanted) and re.search(pattern, test):
                return name
        return ""

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self.stopped:
            pytest.skip("not checked: first make the losses agree")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> None:
        if call.excinfo is not None:
            self.message = str(call.excinfo.value)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = self.name_of(report.nodeid)
        if report.skipped:
            self.say("-", name, self.message)
        elif report.failed:
            first, *more = self.message.split("\n")
            if report.nodeid.partition("::")[0].endswith("check.py") is False:
                first = plain(f"{report.nodeid.partition('::')[2]}: {first}")
            self.say("✗", name, first, *more, *([MEANS[name]] if MEANS.get(name) else []))
            self.stopped = self.stopped or name == "losses"
            self.crosses += 1
        elif report.when == "call":
            self.remaining[name] -= 1
            if self.remaining[name] == 0:
                self.say("✓", name)
                self.ticks += 1

    def say(self, mark: str, name: str, first: str = "", *more: str) -> None:
        print(f"  {mark} {name}{': ' if first else ''}{first}", flush=True)
        for line in more:
            print(f"      {line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stage", choices=stages()[1:])
    parser.add_argument("script", nargs="?", type=Path)
    args = parser.parse_args()
    own = stage_path(args.stage)
    script = (args.script or REPO / "exercises" / own.parent.name / "train.py").resolve()
    if not script.is_file():
        print(f"{script} does not exist: make exercise-{args.stage} writes it", file=sys.stderr)
        return 2
    source = script.read_text()
    try:
        compile(source, script, "exec")
    except SyntaxError as error:
        print(f"  ✗ line {error.lineno}: {error.msg}: {(error.text or '').strip()}")
        return 1
    blanks = blanks_of(source)
    print(f"{script}, beside {own.relative_to(REPO)}")
    if blanks:
        print(f"  - {len(blanks)} blanks, which have the stage's own code here: {', '.join(blanks)}")
    os.environ |= {"CHECK": args.stage, "CHECK_SHOWN": str(script), "WALL_CLOCK_ATTEMPTS": "2"}
    with tempfile.TemporaryDirectory() as folder:
        if blanks:
            path, (text, origins) = Path(folder) / own.parent.name, filled(source, args.stage)
            path.mkdir()
            script = path / "train.py"
            script.write_text(text)
            os.environ["CHECK_LINES"] = " ".join(map(str, origins))
        os.environ[f"SCRIPT_{args.stage}"] = os.environ["CHECK_SCRIPT"] = str(script)
        report = Report(stage_file(args.stage).checks)
        files = {str(REPO / "tests" / which.split()[0]) for which in report.checks.values()}
        quiet = "-p no:terminal -p no:xdist -p no:cacheprovider -p no:randomly".split()
        pytest.main([*quiet, __file__, *files], plugins=[report])
    if "overlap" not in report.checks:
        print("  - overlap: not checked")
    return 1 if report.crosses else 0 if report.ticks else 2


if __name__ == "__main__":
    sys.exit(main())
