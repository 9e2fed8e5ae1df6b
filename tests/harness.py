"""The test harness: the parity check, and an independent count of collectives.

    assert_same_curve(metrics, reference)
    cases("parity")                  the runs of all stage files for one purpose, as parameters
    assert_reproduces(run, metrics, reference)      within the tolerance of the stage's file
    with count_collectives() as counted: ...        counted.records
    with whole_ledger() as ledger: ...              the ledger of a run, without its resets
    with true_ledger() as (ledger, counted): ...    both, which must agree at the end
    bytes_written()

Pools (`tools/pool.py`) live as long as the tests. Fixtures for them, for the corpus and for
reference runs are in `conftest.py`.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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

PRELOAD += ["pytest", "harness"]


@lru_cache
def lines_of(stage: str) -> list[str]:
    return stage_path(stage).read_text().splitlines()


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

# c10d operator -> its name in the ledger, and which argument is the payload
_PAYLOADS = {
    "allreduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "send": ("isend", 0),
    "recv_": ("irecv", 0),
    "_allgather_base_": ("all_gather_single", 0),
    "_reduce_scatter_base_": ("reduce_scatter_single", 1),
    "alltoall_base_": ("all_to_all_single", 1),
    "barrier": ("barrier", None),
}


@dataclass(frozen=True)
class Record:
    """One call of a c10d operator: its name in the ledger, its payload, its group."""

    op: str
    nbytes: int
    group: str
    group_size: int
    leaves: float | None = None  # of an all-to-all with splits: the part that goes to other ranks


@dataclass
class Counted:
    """The collectives that the dispatcher saw."""

    records: list[Record] = field(default_factory=list)


class _CountMode(TorchDispatchMode):
    def __init__(self, counted: Counted):
        super().__init__()
        self.counted = counted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counted.records.append(_record(func._opname, args))
        return func(*args, **(kwargs or {}))


def _record(op: str, args: tuple) -> Record:
    name, payload = _PAYLOADS.get(op, (op, 0))  # unknown to the ledger: keep the name
    for ours in ("reduce_scatter_single", "reduce"):
        if name == "all_to_all_single" and _is_called_by(ours):
            name = ours  # which is an all-to-all on Gloo
    group = next(_group(a) for a in args if isinstance(a, torch.ScriptObject) and _group(a))
    tensors = [] if payload is None else _tensors(args[payload])
    nbytes = sum(t.numel() * t.element_size() for t in tensors)
    desc = (group.group_desc or "group").removeprefix("mesh_")
    world = group.group_name == dist.group.WORLD.group_name
    leaves = None
    if name == "all_to_all_single":
        sends = args[4]  # rows for each rank
        leaves = 1 - sends[group.rank()] / max(1, sum(sends))
    return Record(name, nbytes, "world" if world else desc, group.size(), leaves)


def _is_called_by(function: str) -> bool:
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def _group(handle) -> dist.ProcessGroup | None:
    try:
        return dist.ProcessGroup.unbox(handle)
    except RuntimeError:
        return None  # a reduction operator


def _tensors(x) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [t for y in x for t in _tensors(y)]


@contextlib.contextmanager
def count_collectives() -> Iterator[Counted]:
    """Count every collective that PyTorch's dispatcher runs in this thread, whoever calls it.

    The ledger counts where the repository calls a collective; this counts where PyTorch runs it.
    """
    counted = Counted()
    with _CountMode(counted):
        yield counted


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


@contextlib.contextmanager
def true_ledger() -> Iterator[tuple[Any, Counted]]:
    """The ledger and the dispatcher's count, which must agree call for call and to the byte."""
    with whole_ledger() as ledger, count_collectives() as counted:
        yield ledger, counted
    calls, payload, ring = Counter(), Counter(), Counter()
    for r in sorted(counted.records, key=lambda r: r.nbytes):
        key = r.op, r.group
        if r.op == "irecv":
            continue  # the sender counts
        calls[key] += 1
        if calls[key] <= ledger.control[key]:  # the smallest ones
            most = 4096 if key == ("broadcast", "stop") else 64  # the run's folder, at the start
            assert r.nbytes <= most, f"{key}: a control call of {r.nbytes} bytes"
        else:
            payload[key] += r.nbytes
            ring[key] += r.nbytes * _ring_factor(r)
    assert calls == ledger.calls + ledger.control
    assert +payload == +ledger.payload
    assert {k: round(v) for k, v in ring.items() if v} == {
        k: round(v) for k, v in ledger.ring.items() if v
    }


def _ring_factor(record: Record) -> float:
    """Bytes that a rank sends per byte of payload when the collective runs on a ring."""
    if record.leaves is not None:
        return record.leaves
    around = (record.group_size - 1) / record.group_size
    return {"all_reduce": 2 * around, "isend": 1.0}.get(record.op, around)


def bytes_written() -> int:
    """Bytes that this process has passed to the kernel to write: Gloo's sockets, and files."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])
