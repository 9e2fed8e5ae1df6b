"""Stage 06's schedules as pure functions: complete, free of deadlock, with the claimed bubble."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from itertools import product

import pytest
from harness import load_stage

from tools.pictures import pipeline_schedule

stage = load_stage("06")
SCHEDULES = stage.SCHEDULES


@cache
def cases(name: str) -> list[tuple[int, int, int]]:
    """Every p, m, v that the schedule takes, of p in 1..8, m in 1..32, v in 1..4."""
    interleaves = name == "interleaved"
    return [
        (p, m, v)
        for p, m, v in product(range(1, 9), range(1, 33), range(1, 5 if interleaves else 2))
        if not interleaves or m % p == 0
    ]


def schedule_of(name: str, v: int):
    return partial(SCHEDULES[name], v=v) if name == "interleaved" else SCHEDULES[name]


def rows(name: str, p: int, m: int, v: int) -> list[list]:
    return [schedule_of(name, v)(rank, p, m) for rank in range(p)]


every_schedule = pytest.mark.parametrize("name", SCHEDULES)


@every_schedule
def test_every_micro_batch_has_one_forward_and_one_backward_per_stage_in_a_fixed_order(name):
    """Every schedule runs the micro-batches of a stage in the same order, so gradients are bitwise
    identical under all of them."""
    kinds = "FBW" if name == "zero-bubble" else "FB"
    for p, m, v in cases(name):
        for rank, row in enumerate(rows(name, p, m, v)):
            stages = range(rank, p * v, p)
            expected = Counter(product(kinds, range(m), stages))
            assert Counter(map(tuple, row)) == expected, (p, m, v)
            place = {tuple(action): i for i, action in enumerate(row)}
            for micro, number in product(range(m), stages):
                places = [place[kind, micro, number] for kind in kinds]
                assert places == sorted(places), (p, m, v)
            for kind, number in product(kinds, stages):
                places = [place[kind, micro, number] for micro in range(m)]
                assert places == sorted(places), (p, m, v)


def most_in_flight(row: list) -> int:
    """The most forwards at a time whose backward (or weight gradients) has not run."""
    now = most = 0
    ends = "W" if any(action.kind == "W" for action in row) else "B"
    for action in row:
        now += {"F": 1, ends: -1}.get(action.kind, 0)
        most = max(most, now)
    return most


@every_schedule
def test_micro_batches_in_flight(name):
    for p, m, v in cases(name):
        for rank, row in enumerate(rows(name, p, m, v)):
            bound = {
                "gpipe": m,
                "1f1b": min(m, p - rank),
                "zero-bubble": min(m, p),
                # Narayanan et al.: in chunks, each 1/v of a stage
                "interleaved": min(v * m, (v - 1) * p + 2 * (p - rank - 1) + 1),
            }[name if v > 1 or name != "interleaved" else "1f1b"]
            assert most_in_flight(row) == bound, (p, m, v, rank)


@every_schedule
def test_bubble_fraction_with_unit_costs(name):
    for p, m, v in cases(name):
        spans = pipeline_schedule.simulate(stage, schedule_of(name, v), p, m)
        expected = (p - 1) / ({"zero-bubble": 3, "interleaved": v}.get(name, 1) * m + p - 1)
        if name == "zero-bubble" and m < p:
            # The critical path is that of the last micro-batch: p - 1 forwards until the last rank
            # starts, m forwards and m input gradients there, p - 1 more input gradients on the
            # lower ranks, and one weight gradient at the end.
            expected = 1 - 3 * m / (2 * m + 2 * p - 1)
        assert pipeline_schedule.bubble_fraction(spans) == pytest.approx(expected, abs=1e-9), (
            p,
            m,
            v,
        )


# ---- partition of the units ----


def test_stages_partition_the_model_evenly():
    for n_stages, n_layers in product(range(1, 9), range(1, 25)):
        if n_layers < n_stages:
            continue
        runs = [stage.units_of(s, n_stages, n_layers) for s in range(n_stages)]
        assert [unit for run in runs for unit in run] == list(range(n_layers + 2))
        layers = [len(set(run) - {0, n_layers + 1}) for run in runs]
        assert max(layers) - min(layers) <= 1
        assert layers == sorted(layers, reverse=True), "the last stage has the head as well"


# ---- the time line ----


@every_schedule
def test_timeline_shows_every_action(name):
    spans = pipeline_schedule.simulate(stage, schedule_of(name, 2), 2, 4)
    panel = pipeline_schedule.Panel("a title", spans, "units")
    plain = pipeline_schedule.drawn(panel, panel.length, 120, coloured=False)
    assert len(plain.splitlines()) == 3 and "F3" in plain and plain.startswith("a title: bubble")
    coloured = pipeline_schedule.drawn(panel, panel.length, 120, coloured=True)
    assert coloured.count("\033[0m") == sum(map(len, spans))
