"""`make check-NN`: the tests of a stage, on a script of yours.

    python tests/check.py 02 [SCRIPT]       default: exercises/02_ddp/train.py

SCRIPT is an exercise, whose blanks have the stage's own code meanwhile, or any changed copy of the
stage's script. This is pytest with SCRIPT_02=SCRIPT and a plugin that tells a line per check: those
of `CHECKS`, and `checks` in `stage.toml`. Exit status 1 with a cross, 2 if nothing was checked.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import harness
import pytest
from harness import REPO, StageRun, stage_file, stage_path, stages
from test_late_backend import train

from tools import first_difference
from tools.exercise import blanks_of, filled
from tools.stages import beside

CHECKS = {  # name: a file, and words of the names of its tests, of which the stage's runs are taken
    "gradients": "test_gradients.py reference[",
    "losses": "test_parity.py [parity|[accumulation",
    "communication and model state": "test_costs.py formulas",
    "as late as NCCL": "test_late_backend.py parity_over",
    "bfloat16": "test_parity.py [bf16",
    "saved and resumed": "test_late_backend.py resume",
}
MEANS = {
    "communication and model state": "less is sent: a collective is missing; more: one sends too "
    "much, or runs once per micro-batch; or more is kept than in the stage",
    "as late as NCCL": "a result is used, or a buffer reused, before the collective's wait(), or "
    "the ranks issue their collectives in different orders",
    "bfloat16": "a sum, or what is sent or kept, has another dtype than in the stage",
    "saved and resumed": "the state that is saved is not the state of training",
    "in flight": "a buffer is written to while a collective still uses it",
    "memory": "something lives longer than in the stage: full parameters, gradients, a copy",
    "balance": "some ranks compute more than others, which wait for them",
    "overlap": "a wait follows its collective at once, or a collective starts too late",
    "emulation": "a scale, a rounding, or the dtype of a matmul's operand is another",
    "numbers": "a large number overflows, or a sum or a factor has too few digits",
    "update": "a matrix is not updated as by Muon on one process, or not on every rank",
    "owners": "a rank keeps, computes or sends what belongs to another one",
    "schedules": "an action is missing, out of order or too early",
    "messages": "a send or a receive is missing, out of order, too early or too late",
}
FIRST = ("gradients", "losses")  # without these the others say little
PATIENCE = 60.0 * max(1.0, os.getloadavg()[0] / os.cpu_count())  # seconds; more where it is busy
AGREES = (
    "without clipping, the first step agrees up to its gradients: look at clipping, at the "
    "optimizer's step, at what is sent after it, and at evaluation"
)


class Report:
    """pytest's plugin that chooses the tests, and writes a line per check in place of its report.

    loaded: the file that runs. lines: the numbers of its lines in the user's script.
    """

    def __init__(self, stage: str, loaded: Path, lines: list[int]):
        self.stage, self.loaded, self.lines = stage, loaded, lines
        own = {name.replace("_", " "): tests for name, tests in stage_file(stage).checks.items()}
        self.tests = {**CHECKS, **own}
        self.check: dict[str, str] = {}  # by a test's node id
        self.said: dict[str, str] = {}  # of a failure, by node id
        self.left: Counter[str] = Counter()  # tests of a check that have not ended
        self.marks: dict[str, str] = {}  # of a check whose tests have begun

    def check_of(self, item: pytest.Item) -> str | None:
        values = getattr(item, "callspec", None)
        run = values.params.get("run") if values else None
        for name, tests in self.tests.items():
            file, words = tests.split(" ")
            if item.path.name == file and any(word in item.name for word in words.split("|")):
                stage = run.stage if run else values.params.get("stage") if values else None
                if name not in CHECKS or (stage == self.stage and not (run and run.ranks > 4)):
                    return name
        return None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item: self.check_of(item) for item in items}
        items[:] = [item for name in self.tests for item in items if found[item] == name]
        self.check = {item.nodeid: found[item] for item in items}
        self.left = Counter(self.check.values())

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if "✗" in (self.marks.get(name) for name in (*FIRST, self.check[item.nodeid])):
            pytest.skip("first make the losses agree")

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> None:
        error = call.excinfo and call.excinfo.value
        if not error or isinstance(error, pytest.skip.Exception):
            return
        run, name = item.funcargs.get("run"), self.check[item.nodeid]
        what = " ".join([f"{run.ranks} ranks", *run.flags]) if run else item.name
        said = [f"{what}: {self.plain(error)}"]
        if call.when == "call" and name in (*FIRST, "as late as NCCL"):
            said += self.where_it_begins(run, error, item.funcargs)
        said += [MEANS[name]] if name in MEANS else []
        self.said[item.nodeid] = "\n".join(said)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = self.check[report.nodeid]
        if report.failed and self.marks.get(name) != "✗":
            self.say("✗", name, f": {self.said[report.nodeid]}")
        elif report.passed and report.when == "call":
            self.marks.setdefault(name, "✓")
        self.left[name] -= report.when == "teardown"
        if report.when == "teardown" and not self.left[name] and self.marks.get(name) != "✗":
            known = name in self.marks
            self.say("✓" if known else "-", name, "" if known else ": not checked: see above")

    def say(self, mark: str, name: str, message: str = "") -> None:
        self.marks[name] = mark
        print(f"  {mark} {name}{message}".replace("\n", "\n      "), flush=True)

    def plain(self, error: BaseException) -> str:
        """A hang, an exception or a difference in one line, with the script's line."""
        text = str(error)
        hangs = "did not finish in time" in text
        frames = re.findall(rf'File "{re.escape(str(self.loaded))}", line (\d+),? in (\w+)', text)
        where = ""
        if frames:
            number, name = frames[0 if hangs else -1]  # a hang's stack begins with the last call
            where = f" (line {self.lines[int(number) - 1]}, in {name})"
        if hangs:
            return f"hangs: a rank has not finished in time{where}"
        raised = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", text, re.M)
        raised.sort(key=lambda line: "onnection" in line)  # of the others, after a rank's own error
        if raised and "onnection" in raised[0]:
            return f"a rank has ended, or the ranks' collectives do not match{where}"
        return (raised or text.splitlines() or ["the results differ"])[0][:300] + where

    def where_it_begins(self, run: StageRun, error: BaseException, fixtures: dict) -> list[str]:
        """The first difference of a run that has failed, over the late backend: on Gloo a missing
        wait has random results."""
        pools, folder = fixtures["pools"], Path(tempfile.mkdtemp())
        number, flags = stage_file(run.stage).reference, first_difference.FLAGS.split()
        both = [*flags, "--data", str(fixtures["corpus_dir"]), "--run-dir"]
        alone = [*run.reference_argv, *both, str(folder / "reference")]
        pools(1, group=number != "01").run(harness.train, number, alone)
        try:
            late = pools(run.ranks, backend="late")
            late.run(train, run.stage, [*run.argv, *both, str(folder / "run")])
        except AssertionError as late_error:
            if re.search(r"\bis nan\b", str(late_error)):
                return ["likely cause: NaN: a buffer is used before its collective's wait()"]
            said = self.plain(late_error)
            return [f"with collectives as late as on NCCL: {said}"] * (said != self.plain(error))
        states = [first_difference.read(folder / name) for name in ("run", "reference")]
        file = stage_file(run.stage)
        tolerance = file.gradient_tolerance or file.tolerance.get("norm", 1e-4)
        raised = "Traceback" in str(error)  # then the exception says more than AGREES
        return first_difference.compare(*states, tolerance) or [AGREES] * (not raised)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stage", choices=stages()[1:])
    parser.add_argument("script", nargs="?", type=Path)
    args = parser.parse_args()
    number, own, own_pool = args.stage, stage_path(args.stage), harness.Pool
    script = (args.script or REPO / "exercises" / own.parent.name / "train.py").resolve()
    try:
        text = script.read_text("utf-8")
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

    harness.Pool = pool
    with tempfile.TemporaryDirectory() as folder:
        loaded = Path(folder) / own.parent.name / "train.py"
        loaded.parent.mkdir()
        text, lines = filled(text, number)
        loaded.write_text(text, "utf-8")
        for path in beside(number):  # the script's own, or the stage's
            found = script.with_name(path.name)
            shutil.copy(found if found.is_file() else path, loaded.parent)
        os.environ[f"SCRIPT_{number}"] = str(loaded)
        report = Report(number, loaded, lines)
        files = dict.fromkeys(str(REPO / "tests" / t.split(" ")[0]) for t in report.tests.values())
        quiet = "-o addopts= -p no:terminal -p no:xdist -p no:cacheprovider".split()
        status = pytest.main([*quiet, *files], plugins=[report])
    marks = report.marks.values()
    return 1 if "✗" in marks else status if "✓" in marks else 2


if __name__ == "__main__":
    sys.exit(main())
