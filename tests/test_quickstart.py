"""`make quickstart`: its rows on any machine, what is a failure, and the report of a machine with
GPUs, also after a failure."""

from __future__ import annotations

import time

import pytest
from harness import stages

from tools import quickstart
from tools.quickstart import Quickstart, Row, rows_for, run_rows, tolerance_of

TINY = "--data sample --d-model 16 --n-layers 2 --n-heads 2 --seq-len 8 --steps 4 --log-every 1"


def test_rows_cover_every_stage_and_every_dtype_for_any_number_of_gpus():
    for gpus in (0, 1, 2, 4, 8):
        rows = rows_for(gpus, cores=2)
        for dtype in ("float32", "bfloat16") if gpus else ("float32",):
            own = [row for row in rows if row.stage and f"--dtype {dtype}" in row.flags]
            assert {row.stage for row in own} == set(stages())
            assert [row.name for row in own if "resumed" in row.name] and own[0].stage == "01"
        assert sum(row.by_torchrun for row in rows) == max(1, 2 * (gpus > 0))
        names = [row.name for row in rows if not row.stage]
        assert names == ["preflight", "float8 matmuls", "make bench"] * (gpus > 0)


def test_a_loss_on_gpus_may_be_off_by_a_thousandth_but_in_float8():
    every = [(n, dtype) for n in stages() for dtype in ("float32", "bfloat16")]
    found = {key: tolerance_of(*key, on_gpu=True) for key in every}
    looser = {key: value for key, value in found.items() if value != 1e-3}
    assert looser == {("10", "float32"): 5e-3, ("10", "bfloat16"): 0.05}
    assert tolerance_of("02", "float32", on_gpu=False) == 1e-5


class Scripted:
    """In place of `Quickstart`: what a row's run returns, raises or takes."""

    def __init__(self, *results):
        self.results = iter(results)

    def run(self, row: Row, seconds: float) -> tuple[str, bool]:
        result = next(self.results)
        if isinstance(result, Exception):
            raise result
        time.sleep(0.3 * (result == "slow"))
        return result, "off" in result


@pytest.fixture
def texts(monkeypatch, tmp_path):
    monkeypatch.setattr(quickstart, "REPORT", tmp_path / "gpu-check.md")
    return lambda: quickstart.REPORT.read_text()


ROWS = [Row(f"row {i}", "02", 2, "") for i in range(4)]


def test_the_report_is_written_after_every_row_and_a_failure_stops_nothing(texts, capsys):
    died = RuntimeError("rank 1: the process died")
    assert run_rows(ROWS, Scripted("fine", died, "off by 2e-3", "fine"), 60, "2 x H100", 2) == 2
    assert "4 rows, 2 failures, 0 not run" in texts() and "2 x H100" in texts()
    assert "RuntimeError: rank 1: the process died" in texts() and "off by 2e-3" in texts()
    assert capsys.readouterr().out.count("FAILED") == texts().count("FAILED") == 2


def test_rows_that_the_budget_leaves_out_are_listed(texts):
    run_rows(ROWS, Scripted("slow"), 0.2, "", 1)
    assert "1 rows, 0 failures, 3 not run" in texts() and "- row 3" in texts()
    assert "between ranks it stays unproven" in texts()


def test_without_stage_01_no_other_row_runs_on_a_cpu(capsys):
    assert run_rows(ROWS, Scripted("off"), float("inf"), "", 0) == 1
    assert "row 1" not in capsys.readouterr().out


def test_float8_matmuls_are_judged_by_their_error():
    text, is_bad = Quickstart(0).run(Row("", "", 0, quickstart.MATMULS), 100)
    assert not is_bad, text
    first = next(line for line in text.splitlines() if "float32 " in line)
    assert first.startswith("dX, e5m2 x e4m3, rowwise")


@pytest.mark.slow
def test_every_kind_of_row_runs_and_a_loss_that_is_off_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(quickstart, "FOLDER", tmp_path)
    monkeypatch.setattr(quickstart, "HALF", 2)
    monkeypatch.setitem(quickstart.BASE, "quickstart", f"{TINY} --dtype float32")
    # 01, by torchrun, with a reference of its own, resumed; test_parity.py has the others' flags
    rows = [row for row in rows_for(0, cores=2) if row.stage in ("01", "02", "09")]
    tried = Quickstart(0)
    try:
        assert run_rows(rows, tried, float("inf"), "", 0) == 0, capsys.readouterr().out
        assert capsys.readouterr().out.count(" s\n") == len(rows)
        assert tried.run(rows[1]._replace(tolerance=-1.0), 100)[1]
    finally:
        tried.close()
