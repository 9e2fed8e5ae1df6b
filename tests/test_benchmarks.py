"""`make bench` ends in time, and a slower row fails it."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from benchmarks import bench

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ratio", [1.0, 1.01, 1.03])
@pytest.mark.parametrize("same_model", [True, False])
def test_a_slower_row_fails_the_run(monkeypatch, capsys, ratio, same_model):
    difference = 0.0 if same_model else None
    equal = bench.Result("01-loss", "small", 2, [1.0] * 40, [1.0] * 40, 1.0, 1.0, 0.0)
    other = replace(equal, ours_ms=[ratio] * 40, loss_difference=difference)
    monkeypatch.setattr(bench, "run_rows", lambda *_: ([equal, other], []))
    fails = ratio > 1.02 and same_model
    assert bench.main(["--rows", "01-loss"]) == fails
    assert ("slower than" in capsys.readouterr().out) == fails


def tiny_pair(name: str) -> bench.Result:
    """One pair of steps of a row, on a tiny model."""
    shape = bench.ROWS[name].shapes[0]
    tiny = replace(bench.SHAPES[shape], vocab_size=256, d_model=32, seq_len=16, batch=8)
    with patch.dict(bench.SHAPES, {shape: tiny}):
        return bench.measure(name, shape, 1, 1e9, 1e9)


@pytest.mark.parametrize("name", bench.ROWS)
def test_each_row_starts_and_both_contenders_have_the_same_loss(pools, name):
    row = bench.ROWS[name]
    result = pools(row.ranks[0]).run(tiny_pair, name)[0]
    assert not row.same_loss or result.loss_difference < (1e-3 if "bf16" in name else 1e-5)


def test_a_measurement_ends_after_its_seconds(pools):
    job = bench.measure, "02-ddp", "small", 1000
    result, _ = pools(2).run(*job, 0.0, 1e9)
    assert len(result.ratios) == bench.FEWEST and result.ours_mb > 1
    assert pools(2).run(*job, 0.0, 0.0) == [None, None]
