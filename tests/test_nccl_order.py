"""The pipeline's sends and receives under NCCL's rules (`nccl_rules.py`), for every schedule.

test_late_backend.py does so with runs of all stages.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from harness import load_stage, stage_path, stages
from late_backend import Call, Wait
from nccl_rules import Records, assert_completes, assert_connects_early, assert_ranks_agree
from test_schedules import cases, schedule_of

from tools.stages import load_file

stage = load_stage("06")
SCHEDULES = tuple(stage.SCHEDULES)

# ---- the model itself ----


def call(op: str, ranks: tuple[int, ...], peer: int | None = None, group: str = "1") -> Call:
    return Call(op, group, "", ranks, (), (), peer=peer)


def exchange(*orders: str) -> Records:
    """Records of two ranks: `s` sends to the other rank, `r` receives, `a` all-reduces, `.` waits
    for all calls before it. Upper-case letters use a second group."""
    records: Records = []
    for rank, order in enumerate(orders):
        events: list[Call | Wait] = []
        n = 0
        for letter in order:
            if letter == ".":
                events += [Wait(i) for i in range(n)]
                continue
            op = {"s": "send", "r": "recv", "a": "all_reduce"}[letter.lower()]
            peer = None if op == "all_reduce" else 1 - rank
            events.append(call(op, (0, 1), peer, "2" if letter.isupper() else "1"))
            n += 1
        records.append(events)
    return records


def test_shared_queue_delays_what_is_launched_after_a_second_receive():
    """Rank 1 receives before it sends. Rank 0 has posted two receives before that send."""
    records = exchange("r.S.rrS.", "s.R.R.s.s.")
    assert_completes(records, one_queue=False)
    with pytest.raises(AssertionError, match="wait for one another"):
        assert_completes(records)


@pytest.mark.parametrize(
    "orders",
    [
        ("sr", "sr"),  # both send first
        ("a", ""),
        ("s.r", "r.r"),
        ("s.a.s.aa.", "r.a.a.r.a."),  # rank 0 waits for a receive, rank 1 for a collective
        ("aA", "Aa"),  # each rank connects another communicator first
        ("a.A.a.A", "a.A.A.a"),  # each rank waits for a call that the other issues later
    ],
    ids=str,
)
def test_orders_that_deadlock_under_nccl(orders):
    with pytest.raises(AssertionError):
        assert_completes(exchange(*orders))


# ---- agreement of the ranks ----

PAIR = ("1", "dp", (0, 1))
REDUCE = Call("all_reduce", *PAIR, ((8, 4),), ("float32",), "SUM")
GATHER = Call("all_gather", *PAIR, ((4,), (8,)), ("bfloat16", "bfloat16"))
SEND = Call("send", "2", "to_higher", (0, 1), ((2, 16),), ("float32",), peer=1)
RECV = SEND._replace(op="recv", peer=0)


@pytest.mark.parametrize(
    "changed",
    [
        [REDUCE, GATHER._replace(shapes=((4,), (16,))), RECV],
        [REDUCE._replace(peer=1), GATHER, RECV],  # the root of a broadcast
        [REDUCE, GATHER, RECV._replace(dtypes=("float16",))],
        [REDUCE, GATHER, RECV._replace(peer=1)],
        [GATHER, REDUCE, RECV],  # another order
        [REDUCE, RECV],  # one fewer
        [REDUCE, GATHER],  # no receive
        [REDUCE, GATHER, RECV, RECV],  # a receive more
    ],
)
def test_mismatch_in_any_field_order_or_number_of_calls_is_found(changed):
    with pytest.raises(AssertionError):
        assert_ranks_agree([[REDUCE, GATHER, SEND], changed])


# ---- every schedule ----


class Recorded(stage.Pipeline):
    """Stage 06's executor as one rank without the others: its calls and waits are recorded, each
    message with the action that waits for it as its name."""

    def __init__(self, schedule: Callable, p: int, v: int, rank: int):
        self.schedule, self.to_lower, self.to_higher = schedule, "to_lower", "to_higher"
        self.p, self.rank, self.n_stages = p, rank, p * v
        self.device, self.message_shape = torch.device("cpu"), lambda tokens: (*tokens.shape, 1)
        kinds = "FBW" if schedule is stage.zero_bubble else "FB"
        self.stages = {s: SimpleNamespace(kinds=kinds) for s in range(rank, p * v, p)}
        self.receives, self.sends = {}, deque()
        self.events, self.issued, self.message = [], 0, "open"
        self.seen: list[tuple] = []  # each action, with the receives and sends in flight then

    def record(self, op: str, group: str, peer: int) -> SimpleNamespace:
        ranks, number = tuple(range(self.p)), self.issued
        self.events.append(Call(op, group, group, ranks, (), (), peer=peer, name=str(self.message)))
        self.issued += 1
        return SimpleNamespace(wait=lambda: self.events.append(Wait(number)))

    def compare(self, *facts) -> None:
        """There is no other rank."""

    def start_receive(self, action, shape) -> None:
        self.message = action
        super().start_receive(action, shape)

    def run_action(self, action, received, micro_batches) -> torch.Tensor:
        _, destination = stage.source_and_destination(action, self.n_stages)
        self.message = action._replace(stage=destination)
        self.seen.append((action, [*self.receives], len(self.sends)))
        return torch.zeros(() if destination is None else (1, 1, 1))

    def record_step(self, m: int) -> list[Call | Wait]:
        calls = {
            "isend": lambda _, group, group_dst: self.record("send", group, group_dst),
            "irecv": lambda _, group, group_src: self.record("recv", group, group_src),
        }
        with patch.multiple(stage, **calls):
            self.open_channels()
            self.run([(torch.zeros(1, 1), None, None)] * m)
        return self.events


def pipeline(name: str, p: int, m: int, v: int) -> Records:
    schedule = schedule_of(name, v)
    return [Recorded(schedule, p, v, rank).record_step(m) for rank in range(p)]


def several_ranks(name: str) -> list[tuple[int, int, int]]:
    return [(p, m, v) for p, m, v in cases(name) if p > 1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_completes_without_deadlock(name):
    for p, m, v in several_ranks(name):
        assert_completes(pipeline(name, p, m, v))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_receives_are_posted_one_action_early_and_evaluation_has_forwards_only(name, training):
    """And a rank has at most p sends in flight; it waits for one only when there would be more."""
    for p, m, v in several_ranks(name)[::7]:
        for rank in range(p):
            one = Recorded(schedule_of(name, v), p, v, rank)
            with torch.set_grad_enabled(training):
                one.record_step(m)
            actions = [action for action, *_ in one.seen]
            assert training or {action.kind for action in actions} == {"F"}
            ends = [stage.source_and_destination(action, p * v) for action in actions]
            for i, (_, receives, sends) in enumerate(one.seen):
                upcoming = [a for a in actions[i + 1 : i + 2] if ends[i + 1][0] is not None]
                assert receives == upcoming, (p, m, v, rank)
                assert sends == min(p, sum(end is not None for _, end in ends[:i]))


def test_evaluation_completes_without_deadlock():
    """The forwards of a schedule alone, with any number of batches."""
    for p, m, v in product(range(2, 6), range(1, 12), range(1, 4)):
        with torch.no_grad():
            assert_completes(pipeline("interleaved", p, m, v))


def test_connecting_while_receiving_is_found():
    link, other = call("recv", (0, 1), 0), call("all_reduce", (0, 1), group="2")
    assert_connects_early([[], [other, Wait(0), link, other, Wait(1)]])
    assert_connects_early([[], [link, Wait(0), other]])
    with pytest.raises(AssertionError, match="connects while it receives"):
        assert_connects_early([[], [link, other, Wait(0)]])


ONE_QUEUE, EAGER = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"
SET = {"05": {ONE_QUEUE: "1"}, "07": {ONE_QUEUE: "1", EAGER: "EAGER"}}
SET |= {"06": {EAGER: "EAGER"}, "08": {EAGER: "EAGER"}}


@pytest.mark.parametrize("number", stages())
def test_a_script_sets_cudas_variables_when_it_is_imported(number, monkeypatch):
    """Before it uses CUDA, which reads them once. A value that the user has set stays."""
    path, load = stage_path(number), load_file.__wrapped__  # a new module each time
    for name in (ONE_QUEUE, EAGER):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name in ("is_available", "device_count", "init", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, None)  # calling it is an error
    load(path, "imported")
    names = {name for name in (ONE_QUEUE, EAGER) if name in os.environ}
    assert {name: os.environ[name] for name in names} == SET.get(number, {})
    for name in names:
        monkeypatch.setenv(name, "user")
        load(path, "imported")
        assert os.environ[name] == "user"
