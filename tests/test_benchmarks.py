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


def tiny(name: str, *limits: float) -> bench.Result | None:
    """Pairs of steps of a row, on a tiny model, whose peak memory does not matter."""
    shape = bench.ROWS[name].shapes[0]
    tiny = replace(bench.SHAPES[shape], vocab_size=256, d_model=32, seq_len=16, batch=8)
    with patch.dict(bench.SHAPES, {shape: tiny}), patch.object(bench, "peak_mb", lambda *_: 1.0):
        return bench.measure(name, shape, *limits)


@pytest.mark.parametrize("name", bench.ROWS)
def test_each_row_starts_and_both_contenders_have_the_same_loss(pools, name):
    row = bench.ROWS[name]
    result = pools(row.ranks[0]).run(tiny, name, 1, 1e9, 1e9)[0]
    assert not row.same_loss or result.loss_difference < (1e-3 if "bf16" in name else 1e-5)


def test_a_measurement_ends_after_its_seconds(pools):
    result, _ = pools(2).run(tiny, "02-ddp", 1000, 0.0, 1e9)
    assert len(result.ratios) == bench.FEWEST
    assert pools(2).run(tiny, "02-ddp", 1000, 0.0, 0.0) == [None, None]
