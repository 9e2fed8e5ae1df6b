"""Communication overlaps with computation: reductions with backward, prefetched all-gathers.

Rank 1 delays a collective until rank 0 reports that it has done the computation after it. So rank
0's trace shows that computation while the collective is in flight, however slow or noisy the
machine. If the collective were synchronous, rank 0 would block and never report, and rank 1 would
stop waiting after a while.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from data_parallel_trainers import Trainer
from torch import nn
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.wall_clock

WIDTH, N_UNITS = 64, 4
ONE_UNIT = WIDTH * WIDTH * 4 / 2**20  # megabytes, so that every unit has a bucket
PATIENCE = timedelta(seconds=3)


class Span(NamedTuple):
    """Start and end of an event in rank 0's trace, in microseconds."""

    start: float
    end: float

    def contains(self, other: Span) -> bool:
        return self.start < other.start and other.end < self.end


class Trace:
    """Spans in order of their start. A collective lasts from its call until it is complete."""

    def __init__(self, events) -> None:
        spans: dict[str, list[Span]] = defaultdict(list)
        for e in sorted(events, key=lambda e: e.time_range.start):
            spans[e.name].append(Span(e.time_range.start, e.time_range.end))

        def collectives(call: str, work: str) -> list[Span]:
            called, done = spans[call], spans[work]  # on this thread, on Gloo's
            return [Span(c.start, d.end) for c, d in zip(called, done, strict=True)]

        self.matmuls = spans["aten::mm"]
        self.gathers = collectives("c10d::_allgather_base_", "gloo:all_gather")
        # Gloo's reduce-scatter, or an all-reduce
        self.reductions = collectives("c10d::alltoall_base_", "gloo:all_to_all")
        self.reductions = self.reductions or collectives("c10d::allreduce_", "gloo:all_reduce")


class Meeting:
    """Rank 1 blocks in `wait` until rank 0 has called `arrive`. Both are used as hooks."""

    def __init__(self, name: str):
        self.name, self.store = name, dist.distributed_c10d._get_default_store()

    def wait(self, *_) -> None:
        if dist.get_rank() == 1:
            try:
                self.store.wait([self.name], PATIENCE)
            except dist.DistStoreError:
                pass  # rank 0 is blocked; its trace will show that

    def arrive(self, *_) -> None:
        if dist.get_rank() == 0:
            self.store.set(self.name, "here")


def linear_units() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(N_UNITS)]


def when_the_gradient_is_computed(unit: nn.Module, call: Callable) -> None:
    """A unit has its weight only in forward, and in each forward another view of it."""
    unit[0].register_forward_pre_hook(lambda linear, _: linear.weight.register_hook(call) and None)


def trainer_of(strategy: str, units: list[nn.Module]) -> Trainer:
    return Trainer(strategy, nn.Sequential(*units), torch.optim.SGD, bucket_mb=ONE_UNIT, lr=0.1)


# ---- reductions ----


def backward(strategy: str, name: str) -> Trace:
    """Rank 1 delays the first reduction until rank 0 has the gradient of a later unit."""
    meeting, units = Meeting(name), linear_units()
    trainer = trainer_of(strategy, units)
    trainer.step([lambda model: model(torch.randn(4, WIDTH)).sum()])
    when_the_gradient_is_computed(units[-1], meeting.wait)
    later = units[0 if strategy in ("ddp", "zero-1") else -2]
    when_the_gradient_is_computed(later, meeting.arrive)
    total = trainer.model(torch.randn(4, WIDTH)).sum()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        total.backward()
        trainer.sync.finish_gradient_synchronization()
    return Trace(trace.events())


# per unit, backward computes the gradients of the weights and of the input (not the first unit's)
N_MATMULS = 2 * N_UNITS - 1


def trace_of_backward(pools, strategy: str) -> Trace:
    seen = pools(2).run(backward, strategy, str(uuid.uuid4()))[0]
    assert len(seen.matmuls) == N_MATMULS and len(seen.reductions) == N_UNITS
    return seen


@pytest.mark.parametrize("strategy", ["ddp", "zero-1", "zero-2", "fsdp", "fsdp-keep"])
def test_reductions_start_at_once_and_backward_overlaps_the_first(pools, strategy):
    seen = trace_of_backward(pools, strategy)
    for unit, reduction in enumerate(seen.reductions[:-1]):
        assert seen.matmuls[2 * unit + 1].end < reduction.start
        assert reduction.start < seen.matmuls[2 * unit + 2].start
    inside = [seen.reductions[0].contains(matmul) for matmul in seen.matmuls]
    if strategy in ("ddp", "zero-1"):
        assert all(inside[2:])
    else:  # backward then waits: at most two units' full gradients are alive at once
        assert inside == [False] * 2 + [True] * 2 + [False] * (N_MATMULS - 4)


# ---- all-gathers ----


def forward(strategy: str, name: str) -> Trace:
    """Rank 1 delays the third unit's all-gather until rank 0 has computed the second unit."""
    meeting, units = Meeting(name), linear_units()
    units[1].register_forward_pre_hook(meeting.wait)  # before FSDP's own hook, which prefetches
    trainer = trainer_of(strategy, units)
    units[1].register_forward_hook(meeting.arrive)
    x = torch.randn(4, WIDTH)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        trainer.model(x)
    return Trace(trace.events())


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp-keep"])
def test_prefetch_in_forward_overlaps_the_computation_of_a_unit(pools, strategy):
    seen = pools(2).run(forward, strategy, str(uuid.uuid4()))[0]
    assert len(seen.gathers) == len(seen.matmuls) == N_UNITS
    for unit, gather in enumerate(seen.gathers[1:]):
        assert gather.start < seen.matmuls[unit].start
    assert seen.gathers[2].contains(seen.matmuls[1])


def test_prefetch_in_backward_overlaps_the_computation_of_a_unit(pools):
    """Rank 1 delays the last unit's reduction, and with it the all-gather issued after it."""
    seen = trace_of_backward(pools, "fsdp")
    # the last unit has stayed, and the input of the first one needs no gradient
    assert len(seen.gathers) == N_UNITS - 2
    for unit, gather in enumerate(seen.gathers):
        assert gather.start < seen.matmuls[2 * unit].start
    assert all(seen.gathers[1].contains(matmul) for matmul in seen.matmuls[2:4])
