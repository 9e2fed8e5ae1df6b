"""The test harness itself: a mistake in it would hide the mistakes that tests look for."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from harness import REPO, Pool, WorkerError, assert_same_curve, true_ledger
from mutants import read_table

from common import collectives


def total_of_ranks() -> float:
    x = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(x)
    return x.item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("a rank's own trouble")
    dist.barrier()


def hang() -> None:
    time.sleep(60)


@pytest.mark.wall_clock
def test_failing_rank_is_named_with_its_traceback_and_the_pool_recovers(pools):
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 of 2(.|\n)*a rank's own trouble"):
        pools(2).run(fail_on, 1)
    assert time.monotonic() - started < 20
    assert pools(2).run(total_of_ranks) == [1.0, 1.0]


@pytest.mark.wall_clock
def test_hanging_job_is_ended_at_the_timeout_and_shows_its_stack():
    pool = Pool(1, timeout=2.0)
    try:
        with pytest.raises(WorkerError, match=r"did not finish in time(.|\n)*in hang"):
            pool.run(hang)
        assert pool.run(total_of_ranks) == [0.0]
        old = pool.run(os.getpid)
        with pytest.raises(WorkerError, match="the worker died, exit code 7"):
            pool.run(os._exit, 7)
        assert pool.run(os.getpid) != old
    finally:
        pool.close()


def test_parity_check_names_the_first_step_that_differs():
    curve = [{"step": s, "loss": 5.0, "grad_norm": 2.0} for s in range(4)]
    curve[3]["val_loss"] = 4.0
    assert_same_curve(curve, curve)
    for name, change in (("loss", 2e-5), ("grad_norm", 3e-4), ("val_loss", -2e-5)):
        other = [dict(x) for x in curve]
        other[3][name] += change
        with pytest.raises(AssertionError, match=f"step 3 is the first that differs: {name}"):
            assert_same_curve(other, curve)
    with pytest.raises(AssertionError, match="logged steps differ"):
        assert_same_curve(curve[:3], curve)


def bypass_the_ledger() -> None:
    for call in (
        lambda: dist.all_reduce(torch.ones(6, 2)),
        lambda: collectives.all_reduce_control(torch.ones(1000)),  # too large for a control call
    ):
        with pytest.raises(AssertionError), true_ledger():
            call()


def test_what_bypasses_the_ledger_is_seen(pools):
    """test_costs.py compares the ledger with this independent count in runs of all stages."""
    pools(2, backend="late").run(bypass_the_ledger)


def test_every_mutant_matches_exactly_one_place_of_the_code():
    stale = {
        m.name: count
        for m in read_table()
        if (count := (REPO / m.file).read_text().count(m.old)) != 1 or not m.tests
    }
    assert not stale, stale
