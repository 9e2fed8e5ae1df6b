"""`make quickstart`: its rows on any machine, what is a failure, and the report of a machine with
GPUs, also after a failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest
from harness import REPO, stages

from tools import quickstart
from tools.pool import NEEDED, Outcome, Pool, WorkerError, WorkerExit
from tools.quickstart import Quickstart, Row, rows_for, run_rows

TINY = "--d-model 16 --n-layers 2 --n-heads 2 --seq-len 8 --steps 4 --log-every 1"

GPT2_ROWS = ["gpt2: 01 --steps 20", "gpt2: 01 --steps 20 --compile"]
GPT2_ROWS += [row.replace("01", "10") for row in GPT2_ROWS]
GPT2_ROWS += ["gpt2: 04 --steps 10 --cpu-offload", "gpt2: 12 --steps 10"]


def test_rows_cover_every_stage_and_every_dtype_for_any_number_of_gpus():
    for gpus in (0, 1, 2, 4, 8):
        rows = rows_for(gpus, cores=2)
        for dtype in ("float32", "bfloat16") if gpus else ("float32",):
            own = [row for row in rows if f", {dtype}" in row.name or not gpus]
            assert {row.stage for row in own} == set(stages())
            assert [row.name for row in own if "resumed" in row.name] and own[0].stage == "01"
        assert sum(row.by_torchrun for row in rows) == max(1, 2 * (gpus > 0))
        names = [row.name for row in rows]
        assert [name for name in names if name.startswith("gpt2: ")] == GPT2_ROWS * (gpus > 0)
        assert not gpus or names[0].endswith("float32") and names[-6:] == GPT2_ROWS


class Scripted:
    """In place of `Quickstart`: what a row's run returns, raises or takes."""

    def __init__(self, *results):
        self.results = iter(results)

    def run(self, row: Row, deadline: float) -> tuple[str, bool]:
        result = next(self.results)
        if isinstance(result, Exception):
            raise result
        time.sleep(0.3 * (result in ("slow", "cut off")))
        if result == "cut off":
            raise WorkerError("did not finish in time")
        if result == "killed":
            raise KeyboardInterrupt
        return result, "off" in result


@pytest.fixture
def texts(monkeypatch, tmp_path):
    monkeypatch.setattr(quickstart, "REPORT", tmp_path / "gpu-check.md")
    return lambda: quickstart.REPORT.read_text()


ROWS = [Row(f"row {i}", "02", 2, "") for i in range(4)]


def after(seconds: float) -> float:
    return time.monotonic() + seconds


def exited(stderr: str) -> WorkerExit:
    return WorkerExit([Outcome(exit_status=2, stderr=stderr), Outcome(exit_status=2)])


def test_the_report_is_written_after_every_row_and_a_failure_stops_nothing(texts, capsys):
    died, cannot = (
        RuntimeError("rank 1: the process died"),
        exited("x.py: this GPU has no float8\n"),
    )
    rows = [*ROWS, ROWS[0]]
    tried = Scripted("fine", died, "off by 2e-3", cannot, exited("x.py: --d-model 5 must be even"))
    assert run_rows(rows, tried, after(60), "2 x H100", 2) == 3
    assert "5 rows, 3 failures, 1 skipped, 0 not run" in texts() and "2 x H100" in texts()
    assert "RuntimeError: rank 1: the process died" in texts() and "off by 2e-3" in texts()
    assert "  skipped: this GPU has no float8  " in texts() and "must be even" in texts()
    assert capsys.readouterr().out.count("FAILED") == texts().count("FAILED") == 3


def test_rows_that_the_budget_leaves_out_or_cuts_off_are_listed(texts):
    run_rows(ROWS, Scripted("slow"), after(0.2), "", 1)
    assert "1 rows, 0 failures, 0 skipped, 3 not run" in texts() and "- row 3" in texts()
    assert "between ranks it stays unproven" in texts()
    assert run_rows(ROWS, Scripted("fine", "cut off"), after(0.2), "", 1) == 0
    assert "1 rows, 0 failures, 0 skipped, 3 not run" in texts() and "- row 1" in texts()


def test_a_killed_quickstart_leaves_the_rows_that_are_done(texts):
    with pytest.raises(KeyboardInterrupt):
        run_rows(ROWS, Scripted("fine", "killed"), after(60), "", 1)
    assert "row 0" in texts() and "- row 1\n" in texts()


def test_without_stage_01_no_other_row_runs_on_a_cpu(capsys):
    assert run_rows(ROWS, Scripted("off"), float("inf"), "", 0) == 1
    assert "row 1" not in capsys.readouterr().out


def test_a_row_on_a_gpu_has_speed_mfu_and_peak_memory_and_12_is_compared_with_04(monkeypatch):
    runs = []

    def train(self, row, deadline):
        runs.append((row.stage, row.flags.partition("--steps ")[2]))
        line = {"loss": 5.0 + 0.1 * (row.stage == "12"), "tokens_per_s": 98765.4, "step_ms": 248.8}
        line |= {"comm_mb": 0.0, "model_state_mb": 1.0, "memory_mb": 4321.0, "mfu": 0.412}
        return self.known.setdefault((row.stage, row.flags), [line])

    monkeypatch.setattr(Quickstart, "train", train)
    text, is_bad = Quickstart(1).run(rows_for(1, 2)[-1], after(100))
    assert runs == [("04", "10 --cpu-offload"), ("12", "10")] and not is_bad
    assert text.split()[1:5] == ["5.100000", "1.0e-01", "98,765", "248.8"]
    assert text.endswith("peak 4321 MB, MFU 41.2%")


def hang() -> None:
    time.sleep(60)


@pytest.mark.wall_clock
def test_a_job_that_hangs_is_ended_at_the_timeout_and_shows_its_stack():
    pool = Pool(1, timeout=2.0)
    try:
        with pytest.raises(WorkerError, match=r"did not finish in time(.|\n)*in hang"):
            pool.run(hang)
    finally:
        pool.close()


# ---- with the Python of a cluster ----

# in place of `sitecustomize`: a Python without these packages
BARE = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in ABSENT else super().find_spec(name, path, target)

sys.meta_path[:] = [Finder if each is PathFinder else each for each in sys.meta_path]
"""
TWO_ROWS = f"""
import sys
from pathlib import Path
from tools import quickstart
from tools.stages import BASE, load_stage, stages

if __name__ == "__main__":
    for number in stages():
        load_stage(number)
    quickstart.FOLDER, quickstart.HALF = Path(sys.argv[1]), 2
    BASE["quickstart"] = "{TINY} --dtype float32 --data " + sys.argv[2]
    quickstart.rows_for = lambda *_: quickstart.stage_rows(2, "float32", False)[:2]
    sys.exit(quickstart.main([]))
"""


@pytest.fixture
def bare(tmp_path):
    """Runs this Python without the packages of requirements.txt that are not named."""
    required = re.findall(r"^[\w-]+", (REPO / "requirements.txt").read_text(), re.M)
    modules = {name.replace("markdown-it-py", "markdown_it") for name in required}

    def run(packages: str, *words) -> subprocess.CompletedProcess:
        absent = modules - set(packages.split())
        (tmp_path / "sitecustomize.py").write_text(f"ABSENT = {absent}\n{BARE}")
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPO)])}
        words = [sys.executable, *map(str, words)]
        return subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True)

    return run


def test_quickstart_needs_pytorch_numpy_tensorboard_and_xxhash_and_no_other_package(
    bare, tmp_path, corpus_dir
):
    script = tmp_path / "two_rows.py"
    script.write_text(TWO_ROWS)
    ended = bare(" ".join(NEEDED), script, tmp_path / "runs", corpus_dir)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "02_ddp" in ended.stdout and "datasets" not in " ".join(NEEDED)
    assert bare(" ".join(NEEDED), "-c", "import pytest").returncode == 1  # this test can fail


def test_a_package_that_is_missing_is_named_in_one_line(bare):
    ended = bare("torch numpy xxhash", "-m", "tools.quickstart")
    assert ended.returncode == 2, ended.stdout
    assert ended.stderr == "tensorboard is missing: pip install tensorboard\n"


def test_make_runs_a_stage_with_the_python_of_a_module(bare):
    make = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
    words = ["-c", make, "make", "run-01", "VENV=", f"PYTHON={sys.executable}", "ARGS=--help"]
    ended = bare(" ".join(NEEDED), *words)
    assert ended.returncode == 0 and "--global-batch-size" in ended.stdout, ended.stderr
    ended = bare("torch numpy", *words)
    assert ended.returncode == 2
    text = "tensorboard, xxhash are missing: pip install tensorboard xxhash"
    assert ended.stderr.splitlines()[0] == text


@pytest.mark.slow
def test_every_kind_of_row_runs_and_a_loss_that_is_off_fails(
    monkeypatch, tmp_path, capsys, corpus_dir
):
    monkeypatch.setattr(quickstart, "FOLDER", tmp_path)
    monkeypatch.setattr(quickstart, "HALF", 2)
    monkeypatch.setenv("PET_NNODES", "2")  # of a pod: torchrun would wait for another node
    flags = f"{TINY} --data {corpus_dir} --dtype float32"
    monkeypatch.setitem(quickstart.BASE, "quickstart", flags)
    # 01, by torchrun, with a reference of its own, resumed; test_parity.py has the others' flags
    rows = [row for row in rows_for(0, cores=2) if row.stage in ("01", "02", "09")]
    tried = Quickstart(0)
    try:
        assert run_rows(rows, tried, float("inf"), "", 0) == 0, capsys.readouterr().out
        assert capsys.readouterr().out.count(" s\n") == len(rows)
        assert tried.run(rows[3]._replace(tolerance=-1.0), after(100))[1]
    finally:
        tried.close()
