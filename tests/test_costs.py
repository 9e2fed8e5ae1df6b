"""A law of all stages: model state and bytes sent per step are those of tools/costs.py.

One chain, each link once. Here the formulas are held to dry runs, which execute a stage's own
`main` as one rank, and the ledger of a real run to an independent count. test_dry_run.py holds dry
runs to real ones, and test_figures.py the READMEs to the formulas. The runs are those of the
stages' files.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import cache
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import StageRun, load_stage, runs_for, stage_file, true_ledger

from common.collectives import all_reduce_control

from tools.costs import Costs, costs_of
from tools.dry_run import Report, dry_run

pytestmark = pytest.mark.slow

VOCABULARY = 201  # of the tests' corpus; the model pads it to 256 words
PURPOSES = ("accumulation", "bf16", "late")


def cases() -> list:
    """Each run on several ranks, by dtype; where ranks differ, the first one and the last one."""
    runs = [run for purpose in PURPOSES for run in runs_for(purpose)]
    found, quick = {}, {run.id for run in runs if run.quick}
    for run in runs:
        ranks = {0, run.ranks - 1} if stage_file(run.stage).ranks_differ else {0}
        for rank in sorted(ranks) if run.ranks > 1 else []:
            dtype = "bf16" if "bf16" in run.purpose else "float32"
            found.setdefault(f"{run.id} {dtype} {rank}", (run, rank))
    return [
        pytest.param(run, rank, id=id, marks=[pytest.mark.quick] if run.id in quick else [])
        for id, (run, rank) in sorted(found.items())
    ]


@cache
def expected_of(run: StageRun, rank: int) -> Costs:
    with patch.dict(os.environ, {"RANK": str(rank), "WORLD_SIZE": str(run.ranks)}):
        args = load_stage(run.stage).parse_args(run.argv)
    return costs_of(run.stage, args, run.ranks, rank, 256)


def assert_costs(pools, run: StageRun, rank: int) -> Report:
    expected = expected_of(run, rank)
    job = dry_run, run.stage, run.ranks, rank, run.argv, VOCABULARY
    (report,) = pools(1, group=False).run(*job)
    # without padding, unless a size is not divisible by the ranks: then at most one element per
    # rank in each buffer, of which a step has as many as calls, and of which a unit has four
    odd = 4 * (run.ranks - 1) * (expected.d % run.ranks > 0)
    for kind, nbytes in expected.held.items():
        assert nbytes <= getattr(report, kind) <= nbytes + 2 * odd * (expected.L + 2), kind
    assert_sent(report.sent.ring, expected.sent, odd, report.sent.calls)
    before = {key: n for key, n in report.sent_before.items() if key[0] == "broadcast"}
    assert_sent(before, expected.sent_before, odd, Counter(dict.fromkeys(before, expected.L + 2)))
    return report


def assert_sent(found: dict, expected: Counter, odd: int, calls: Counter) -> None:
    assert {key for key, nbytes in found.items() if nbytes} == (+expected).keys()
    for key, nbytes in (+expected).items():
        sends = f"{' over '.join(key)} sends {found[key]:.0f} bytes"
        assert found[key] >= nbytes - 1e-3, f"{sends}, less than {nbytes:.0f}"
        assert found[key] <= nbytes + odd * calls[key] + 1e-3, f"{sends}, more than {nbytes:.0f}"


@pytest.mark.parametrize("run, rank", cases())
def test_model_state_and_communication_are_those_of_the_formulas(pools, run, rank):
    assert_costs(pools, run, rank)


@pytest.mark.parametrize(
    "stage, ranks, flags",
    [
        ("02", 4096, "--global-batch-size 4096"),
        ("03", 4096, "--global-batch-size 4096 --zero-stage 1"),
        ("03", 4096, "--global-batch-size 4096 --zero-stage 3"),
        ("04", 4096, "--global-batch-size 4096 --shard-degree 512"),
        ("07", 4096, "--global-batch-size 512 --pp 2 --tp 4"),
        ("04", 2, "--param-dtype bfloat16"),  # of a float32 run
        ("04", 2, "--param-dtype bfloat16 --reduce-dtype bfloat16"),
    ],
)
def test_the_formulas_hold_on_4096_ranks_and_for_each_dtype(pools, stage, ranks, flags):
    for rank in {3 % ranks, ranks - 1}:
        assert_costs(pools, StageRun(stage, "agreement", ranks, tuple(flags.split())), rank)


# ---- real runs: one per stage, on two ranks ----


def counted(stage: str, argv: list[str]) -> None:
    """Train; at the end the ledger must agree with the calls that the late backend has recorded."""
    with patch.object(load_stage(stage), "evaluate", lambda *_: 0.0), true_ledger():
        load_stage(stage).main(argv)


@pytest.mark.quick
@pytest.mark.parametrize("run", runs_for("agreement"), ids=lambda run: run.id)
def test_an_independent_count_confirms_the_ledger(reproduce, run):
    reproduce(run, job=counted, backend="late")


def bypass_the_ledger() -> None:
    for call in (
        lambda: dist.all_reduce(torch.ones(6, 2)),
        lambda: all_reduce_control(torch.ones(1000)),  # too large for a control call
    ):
        with pytest.raises(AssertionError), true_ledger():
            call()


@pytest.mark.quick
def test_what_bypasses_the_ledger_is_seen(pools):
    pools(2, backend="late").run(bypass_the_ledger)


@pytest.mark.wall_clock  # a thread of Gloo may still hold what it has sent
def test_metrics_report_the_model_state_and_the_bytes_that_were_sent(fresh_pool, corpus_dir):
    (run,) = (run for run in runs_for("agreement") if run.stage == "04")
    ranks = fresh_pool(run.ranks).train(run.stage, [*run.argv, "--data", str(corpus_dir)])
    for rank, metrics in enumerate(ranks):
        expected = expected_of(run, rank)
        for line in metrics:  # evaluations do not count
            assert line["comm_mb"] == pytest.approx(sum(expected.sent.values()) / 1e6)
        held = metrics[-1]["model_state_mb"] * 1e6
        assert held == pytest.approx(sum(expected.held.values()), rel=0.03, abs=1e3)
