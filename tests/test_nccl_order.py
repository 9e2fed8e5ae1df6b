"""The pipeline's sends and receives, and 07 to 09 as a whole, under NCCL's rules
(`nccl_rules.py`)."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import load_stage, stage_path
from late_backend import Call, Wait, recorded_calls
from nccl_rules import (
    Records,
    assert_completes,
    assert_connects_early,
    assert_ranks_agree,
    communicators,
)
from test_schedules import cases, schedule_of
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.collectives import all_to_all_single

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


@pytest.mark.parametrize(
    "orders",
    [
        ("s.r.", "r.s."),
        ("sr", "rs"),
        ("aA", "aA"),
        ("sS", "rR"),
        ("s.a.", "r.a."),
        # once connected, communicators are independent: opposite orders in two of them
        ("a.A.aA.", "a.A.Aa."),
        ("s.R.sR.", "r.S.Sr."),
    ],
    ids=str,
)
def test_orders_that_complete_under_nccl(orders):
    assert_completes(exchange(*orders))


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
        ("rs", "rs"),
        ("a", ""),
        ("s.r", "r.r"),
        ("s.a.s.aa.", "r.a.a.r.a."),  # rank 0 waits for a receive, rank 1 for a collective
        ("aA", "Aa"),  # each rank connects another communicator first
        ("sR", "Sr"),
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


def test_groups_are_independent_only_the_order_within_one_of_them_matters():
    assert_ranks_agree([[REDUCE, GATHER, SEND], [RECV, REDUCE, GATHER]])


@pytest.mark.parametrize(
    "changed",
    [
        [REDUCE, GATHER._replace(shapes=((4,), (16,))), RECV],
        [REDUCE._replace(group="3"), GATHER, RECV],
        [REDUCE._replace(op="broadcast"), GATHER, RECV],
        [REDUCE._replace(reduce_op="AVG"), GATHER, RECV],
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


# ---- the stages themselves ----


def record_of(number: str, ranks: int, rank: int, argv: list[str]) -> list[Call | Wait]:
    """The calls of `main(argv)` as `rank` of `ranks` on all groups, recorded in one process."""
    new_group = dist.new_group
    dist.init_process_group("recorded", rank=rank, world_size=ranks, store=FakeStore())
    try:
        with (
            # also the groups that use Gloo in a real run
            patch.object(dist, "new_group", lambda *a, backend=None, **kw: new_group(*a, **kw)),
            patch.object(dist, "broadcast_object_list"),
            patch("common.run.rank", lambda: 0),
            recorded_calls() as events,
        ):
            load_stage(number).main(argv)
    finally:
        dist.destroy_process_group()
    return events


SIZE = "--d-model 16 --n-heads 4 --seq-len 8 --steps 1 --resume never".split()


@pytest.fixture
def records_of(pools, corpus_dir, tmp_path):
    """`records_of("07", 8, argv)`: of a stage's run on that many ranks."""

    def records(number: str, ranks: int, argv: list[str], job=record_of, *args) -> Records:
        argv = [*SIZE, *argv, "--data", str(corpus_dir), "--run-dir", str(tmp_path)]
        alone = pools(1, group=False)
        return [alone.run(job, number, ranks, rank, argv, *args)[0] for rank in range(ranks)]

    return records


INTERLEAVED = ["--schedule", "interleaved", "--sequence-parallel"]
MESHES = [  # pp, dp, tp, flags: beside those of stage.toml, which run over the late backend
    *((2, 2, 1, []), (4, 1, 2, []), (3, 1, 2, [])),
    *((pp, dp, tp, INTERLEAVED) for pp, dp, tp in ((2, 2, 2), (2, 1, 4), (4, 2, 2))),
    (4, 1, 2, [*INTERLEAVED, "--global-batch-size", "4"]),
    (8, 1, 1, []),
]


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "dp", "tp", "own"), MESHES, ids=str)
def test_every_mesh_of_07_completes_without_deadlock(records_of, pp, dp, tp, own):
    layers = 2 * pp if "interleaved" in own else pp
    argv = f"--pp {pp} --tp {tp} --n-layers {layers} --micro-batch-size 1".split()
    argv += ["--global-batch-size", str(8 * dp), *own]
    records = records_of("07", pp * dp * tp, argv)
    assert_ranks_agree(records)
    assert_completes(records)
    assert_connects_early(records)
    for rank in range(pp * dp * tp):
        on_gloo = {(e.group,) for e in records[rank] if isinstance(e, Call) and e.desc == "stop"}
        place = rank // (dp * tp)
        neighbors = {place - 1, place + 1} & set(range(pp))
        if "interleaved" in own:
            neighbors = {(place - 1) % pp, (place + 1) % pp}
        # for collectives: all ranks, pp, dp and tp; for messages: per neighbour and direction
        assert len(communicators(records, rank) - on_gloo) == 4 + 2 * len(neighbors)


RINGS = [  # ranks, cp, flags
    *((cp, cp, []) for cp in (2, 3, 4, 5)),
    *((4, 2, flags) for flags in ([], ["--activation-checkpointing"])),
    (8, 4, []),
    *((ranks, 2, ["--context-parallel-kind", "ulysses"]) for ranks in (2, 4)),
]


@pytest.mark.quick_cases("3-3-[]")
@pytest.mark.parametrize(("ranks", "cp", "own"), RINGS, ids=str)
def test_every_ring_of_08_completes_without_deadlock(records_of, ranks, cp, own):
    argv = f"--cp {cp} --seq-len {4 * cp} --global-batch-size {4 * ranks // cp}".split()
    argv += [*"--n-layers 2 --micro-batch-size 2".split(), *own]
    records = records_of("08", ranks, argv)
    assert_ranks_agree(records)
    assert_completes(records)
    assert_connects_early(records)
    for events in records:
        peers = {e.peer for e in events if isinstance(e, Call) and e.op == "send"}
        assert len(peers) == (0 if "ulysses" in own else 1)


def record_of_experts(
    number: str, ranks: int, rank: int, argv: list[str], n_chosen: int
) -> list[Call | Wait]:
    """The record of stage 09, whose tokens take turns at `n_chosen` of its 8 experts.

    Recorded counts are arbitrary, so they follow from this routing, the same on every rank.
    """
    stage = load_stage(number)

    def exchange_counts(counts, group):
        all_to_all_single(torch.empty_like(counts), counts, group=group)
        sent = counts.view(group.size(), -1).tolist()
        return [sent, [sent[group.rank()]] * group.size()]

    def choose(self, scores):
        return (torch.arange(len(scores) * self.top_k) % n_chosen).view(-1, self.top_k)

    with (
        patch.object(stage, "exchange_counts", exchange_counts),
        patch.object(stage.MixtureOfExperts, "choose", choose),
    ):
        return record_of(number, ranks, rank, argv)


EXPERTS = [  # ranks, flags, experts that have tokens
    (4, ["--ep", "2"], 8),
    (4, ["--ep", "2", "--activation-checkpointing"], 2),
    (4, ["--ep", "4"], 2),
    (8, ["--ep", "4"], 8),
]


@pytest.mark.quick_cases("4-['--ep', '2']-8")
@pytest.mark.parametrize(("ranks", "own", "n_chosen"), EXPERTS, ids=str)
def test_every_mesh_of_09_completes_without_deadlock(records_of, ranks, own, n_chosen):
    argv = ["--global-batch-size", str(2 * ranks), "--micro-batch-size", "1", "--n-layers", "2"]
    records = records_of("09", ranks, [*argv, *own], record_of_experts, n_chosen)
    assert_ranks_agree(records)
    assert_completes(records)
    assert_connects_early(records)


def test_connecting_while_receiving_is_found():
    link, other = call("recv", (0, 1), 0), call("all_reduce", (0, 1), group="2")
    assert_connects_early([[], [other, Wait(0), link, other, Wait(1)]])
    assert_connects_early([[], [link, Wait(0), other]])
    with pytest.raises(AssertionError, match="connects while it receives"):
        assert_connects_early([[], [link, other, Wait(0)]])


ONE_QUEUE, EAGER = ("CUDA_DEVICE_MAX_CONNECTIONS", "1"), ("CUDA_MODULE_LOADING", "EAGER")
SET = [("05", *ONE_QUEUE), ("07", *ONE_QUEUE), *((n, *EAGER) for n in ("06", "07", "08"))]


@pytest.mark.parametrize(("number", "name", "value"), SET)
def test_a_script_sets_cudas_variables_before_it_imports_torch(number, name, value, monkeypatch):
    """Else CUDA is initialized without them. A value that the user has set stays."""
    path = stage_path(number)
    before_torch = path.read_text().partition("\nimport torch\n")[0]
    for given, expected in (None, value), ("user", "user"):
        monkeypatch.delenv(name, raising=False)
        if given:
            monkeypatch.setenv(name, given)
        exec(before_torch, {"__file__": str(path), "__name__": "script"})
        assert os.environ[name] == expected
