"""`make bench` ends in time, and a slower row fails it."""

from __future__ import annotations

from dataclasses import replace

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


def test_rows_share_the_minutes_and_what_has_no_time_is_named(monkeypatch, capsys):
    clock = iter([0.0, 0.0, 61.0])  # the start, and before each of two measurements
    monkeypatch.setattr(bench.time, "monotonic", lambda: next(clock))
    seconds = []

    class Pool:
        def __init__(self, size, backend=""):
            self.size = size

        def run(self, measure, name, shape, pairs, share, left, timeout):
            seconds.append(share)
            return [bench.Result(name, shape, 2, [1.0] * 6, [1.0] * 6, 1.0, 1.0, 0.0)]

        def close(self):
            pass

    monkeypatch.setattr(bench, "Pool", Pool)
    bench.main(["--rows", "02-ddp", "07-mesh", "--ranks", "2", "--minutes", "1"])
    said = capsys.readouterr().out
    assert seconds == [30.0] and "2 measurements, in at most 1 minutes" in said
    assert "lack of time: 02-ddp (large-vocabulary, 2 ranks)" in said
    assert "lack of cores (--ranks): 07-mesh" in said


def test_a_measurement_ends_after_its_seconds(pools):
    job = bench.measure, "02-ddp", "small", 1000
    result, _ = pools(2).run(*job, 0.0, 1e9)
    assert len(result.ratios) == bench.FEWEST and result.ours_mb > 1
    assert pools(2).run(*job, 0.0, 0.0) == [None, None]
