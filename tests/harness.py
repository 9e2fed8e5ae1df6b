"""The test harness: the parity check, and the ledger against what arrives at a backend.

    assert_same_curve(metrics, reference)
    cases("parity")                  the runs of all stage files for one purpose, as parameters
    assert_reproduces(run, metrics, reference)      within the tolerance of the stage's file
    with whole_ledger() as ledger: ...              the ledger of a run, without its resets
    with true_ledger(): ...                         it must agree with what arrives
    with fake_ranks(4): ...                         as rank 0 of 4, without the others
    train_in(variables, "01", argv)  with these environment variables
    process_bytes("wchar")

Pools (`tools/pool.py`) live as long as the tests. Fixtures for them, for the corpus and for
reference runs are in `conftest.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from late_backend import Call, recorded_calls
from torch.testing._internal.distributed.fake_pg import FakeStore

# for the tests, too
from tools.memory import PeakMemory, live_bytes  # noqa: F401
from tools.pool import (  # noqa: F401
    PRELOAD,
    Outcome,
    Pool,
    WorkerError,
    WorkerExit,
    comparably,
    metrics_of,
    train,
    with_run_dir,
)
from tools.stages import (  # noqa: F401
    REPO,
    StageRun,
    load_stage,
    runs_for,
    stage_file,
    stage_path,
    stages,
)

PRELOAD += ["pytest", "harness"]  # and so the late backend


@lru_cache
def lines_of(stage: str) -> list[str]:
    return stage_path(stage).read_text().splitlines()


def train_in(variables: dict[str, str], stage: str, argv: list[str]) -> list[dict]:
    with patch.dict(os.environ, variables):
        return train(stage, argv)


# ---- parity ----


def assert_same_curve(
    metrics: list[dict], reference: list[dict], loss: float = 1e-5, norm: float = 1e-4
) -> None:
    """Compare a run's metrics with stage 01's: the same steps, and at each of them losses and
    evaluation losses within `loss` (absolute), gradient norms within `norm` (relative)."""
    steps, expected = [x["step"] for x in metrics], [x["step"] for x in reference]
    assert steps == expected, f"logged steps differ: {steps}, the reference has {expected}"
    for ours, theirs in zip(metrics, reference, strict=True):
        for name in ("loss", "grad_norm", "val_loss", "test_loss"):
            where = f"step {ours['step']} is the first that differs: {name}"
            assert (name in ours) == (name in theirs), f"{where} is in one run only"
            if name not in ours:
                continue
            a, b = ours[name], theirs[name]
            most = norm * abs(b) if name == "grad_norm" else loss
            assert abs(a - b) <= most, f"{where} {a!r}, reference {b!r}, {a - b:+.3g} off"


# ---- the runs of the stage files ----

BFLOAT16 = {"bf16": {"loss": 3e-4, "norm": 1e-2}, "late-bf16": {"loss": 0.02, "norm": 0.1}}


def cases(purpose: str) -> list:
    """The runs of all stages for one purpose, as pytest's parameters."""
    quick = {True: [pytest.mark.quick], False: []}
    return [pytest.param(run, id=run.id, marks=quick[run.quick]) for run in runs_for(purpose)]


def assert_reproduces(run: StageRun, metrics: list[dict], reference: list[dict]) -> None:
    """Compare a run's metrics with those of its reference, as its stage's file says."""
    tolerance = BFLOAT16.get(run.purpose) or stage_file(run.stage).tolerance
    tolerance = {**tolerance, **dict(run.tolerance)}
    steps = tolerance.pop("steps", len(reference))
    assert_same_curve(metrics[:steps], reference[:steps], **tolerance)


# ---- collectives ----


@contextlib.contextmanager
def fake_ranks(size: int) -> Iterator[None]:
    """Make this process rank 0 of `size`, with collectives that do nothing.

    With Gloo, the copies that its threads hold for a while would count as memory.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def whole_ledger() -> Iterator[Any]:
    """The ledger, reset when the block begins and not whenever a run logs a line."""
    from common.collectives import ledger

    ledger.reset()
    ledger.reset = lambda: None
    total = type(ledger)()
    try:
        yield total
    finally:
        del ledger.reset
        for name in ("calls", "payload", "ring", "control"):
            setattr(total, name, Counter(getattr(ledger, name)))


# the ledger's names of what the late backend records
RECORDED = {
    "send": "isend",
    "all_gather": "all_gather_single",
    "reduce_scatter": "reduce_scatter_single",
    "all_to_all": "all_to_all_single",
}


@contextlib.contextmanager
def true_ledger() -> Iterator[None]:
    """In this block the ledger must agree, to the byte, with the calls that the late backend
    records. It does not see groups on Gloo, such as the one that votes to stop."""
    with whole_ledger() as ledger, recorded_calls() as events:
        yield
    calls, payload, ring = Counter(), Counter(), Counter()
    # the sender counts a message
    sent = [call for call in events if isinstance(call, Call) and call.op != "recv"]
    for call in sorted(sent, key=payload_of):
        nbytes = payload_of(call)
        key = RECORDED.get(call.op, call.op), call.desc.replace("default_pg", "world")
        calls[key] += 1
        if calls[key] <= ledger.control[key]:  # the smallest ones
            assert nbytes <= 64, f"{key}: a control call of {nbytes} bytes"
        else:
            payload[key] += nbytes
            ring[key] += nbytes * ring_factor(call)
    control = Counter({key: n for key, n in ledger.control.items() if key[1] != "stop"})
    assert calls == ledger.calls + control
    assert +payload == +ledger.payload
    assert {k: round(v) for k, v in ring.items() if v} == {
        k: round(v) for k, v in ledger.ring.items() if v
    }


def payload_of(call: Call) -> int:
    """Bytes of the tensor that is reduced, gathered or sent."""
    if call.op == "barrier":
        return 0
    shape = call.shapes[-1 if call.op == "all_gather" else 0]
    rows = sum(call.sends) if call.sends else 1  # `shape` is then that of a row
    return prod(shape) * rows * getattr(torch, call.dtypes[0]).itemsize


def ring_factor(call: Call) -> float:
    """Bytes that a rank sends per byte of payload when the collective runs on a ring."""
    if call.sends:  # the part that goes to other ranks
        return 1 - call.sends[call.ranks.index(dist.get_rank())] / max(1, sum(call.sends))
    around = (len(call.ranks) - 1) / len(call.ranks)
    return {"all_reduce": 2 * around, "send": 1.0}.get(call.op, around)


def process_bytes(name: str) -> int:
    """Bytes that this process has passed to the kernel or got from it, in sockets and files (wchar,
    rchar), or that it has in memory (VmRSS, VmHWM, VmData)."""
    text = Path("/proc/self", "status" if name.startswith("Vm") else "io").read_text()
    number, unit = re.search(rf"^{name}:\s+(\d+)( kB)?$", text, re.M).groups()
    return int(number) * (1024 if unit else 1)
