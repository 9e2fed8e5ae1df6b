"""The pipeline's sends and receives, and 07 as a whole, under NCCL's rules (`nccl_rules.py`)."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
import torch.distributed as dist
from harness import load_stage
from late_backend import Call, Wait, recorded_calls
from nccl_rules import Records, assert_completes, assert_ranks_agree
from torch.testing._internal.distributed.fake_pg import FakeStore

stage = load_stage("06")
EVERY = {**stage.SCHEDULES, **stage.SPLIT_SCHEDULES}
SCHEDULES = tuple(EVERY)

# ---- the model itself ----


def call(op: str, ranks: tuple[int, ...], peer: int | None = None, group: str = "1") -> Call:
    return Call(op, group, "", ranks, (), (), peer=peer)


def exchange(*orders: str) -> Records:
    """Two ranks: `s` sends to the other, `r` receives, `a` all-reduces, each followed by its wait;
    upper-case letters use a second group, `.` waits for all before it."""
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


CONNECT = "sr.", "rs."  # one message each way


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
def test_orders_that_complete(orders):
    assert_completes(exchange(*orders))


@pytest.mark.parametrize(
    "orders",
    [
        ("sr", "sr"),  # both send first
        ("rs", "rs"),
        ("a", ""),
        ("s.r", "r.r"),
        ("s.a.s.aa.", "r.a.a.r.a."),  # a collective overtakes a message that is waited for
        ("aA", "Aa"),  # both connect, each in another communicator
        ("sR", "Sr"),
        ("a.A.a.A", "a.A.A.a"),  # each waits for what the other issues afterwards
    ],
    ids=str,
)
def test_orders_that_do_not(orders):
    with pytest.raises(AssertionError):
        assert_completes(exchange(*orders))


# ---- every schedule ----


def named(op: str, message, rank: int, peer: int, p: int) -> Call:
    src, dst = (rank, peer) if op == "send" else (peer, rank)
    direction = "to_higher" if dst > src else "to_lower"
    return Call(op, direction, direction, tuple(range(p)), (), (), peer=peer, name=str(message))


def channels(p: int, rank: int) -> list[Call | Wait]:
    """What `open_channels` issues: a number through each channel, waited for at once."""
    events: list[Call | Wait] = []
    for src in range(p):
        for dst in sorted({(src - 1) % p, (src + 1) % p} - {src}):
            if rank in (src, dst):
                op, peer = ("send", dst) if rank == src else ("recv", src)
                events += [named(op, "open", rank, peer, p), Wait(len(events) // 2)]
    return events


def executed(
    name: str, p: int, m: int, v: int, rank: int, forward_only: bool = False
) -> list[Call | Wait]:
    """What `Pipeline` issues on one rank: channels are opened, then the plan is executed."""
    schedule = partial(EVERY[name], v=v) if name == "interleaved" else EVERY[name]
    actions = schedule(rank, p, m)
    if forward_only:
        actions = [action for action in actions if action.kind == "F"]
    events = channels(p, rank)
    issued = len(events) // 2
    receives, sends = {}, deque()
    for posts, action in stage.plan(actions, p * v):
        needed, made = stage.messages(action, p * v)
        for message in posts:
            events.append(named("recv", message, rank, message.source % p, p))
            receives[message], issued = issued, issued + 1
        if needed:
            events.append(Wait(receives[needed]))
        if made:
            events.append(named("send", made, rank, made.stage % p, p))
            sends.append(issued)
            issued += 1
            if len(sends) > p:
                events.append(Wait(sends.popleft()))
    return [*events, *map(Wait, sends)]


def cases(name: str) -> list[tuple[int, int, int]]:
    """Every p, m, v that the schedule takes, of p in 2..8, m in 1..32, v in 1..4."""
    interleaves = name == "interleaved"
    return [
        (p, m, v)
        for p, m, v in product(range(2, 9), range(1, 33), range(1, 5 if interleaves else 2))
        if not interleaves or m % p == 0
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_completes(name):
    for p, m, v in cases(name):
        assert_completes([executed(name, p, m, v, rank) for rank in range(p)])


def test_evaluation_completes():
    for p, m, v in product(range(2, 6), range(1, 12), range(1, 4)):
        ranks = range(p)
        assert_completes([executed("interleaved", p, m, v, rank, True) for rank in ranks])


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_interchange_of_two_sends_is_found(name):
    """Of one rank, to one rank, in one group: the messages meet each other's receives."""
    p, m, v = 3, 6, 2 if name == "interleaved" else 1
    records = [executed(name, p, m, v, rank) for rank in range(p)]
    assert_completes(records)
    found = 0
    for rank, events in enumerate(records):
        sends: dict[tuple, int] = {}
        for i, event in enumerate(events):
            if not isinstance(event, Call) or event.op != "send" or event.name == "open":
                continue
            before = sends.get((event.group, event.peer))
            sends[event.group, event.peer] = i
            if before is None:
                continue
            swapped = [*events]
            swapped[before], swapped[i] = swapped[i], swapped[before]
            with pytest.raises(AssertionError):
                assert_completes([*records[:rank], swapped, *records[rank + 1 :]])
            found += 1
    assert found >= 2 * (m - 1)


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_one_communicator_per_group_would_deadlock(name):
    """On a rank in the middle a receive that is posted early would block the sends behind it. So
    `setup` passes no `device_id`, and each pair of ranks has a communicator of its own."""
    p, m, v = 4, 8, 2 if name == "interleaved" else 1
    records = [executed(name, p, m, v, rank) for rank in range(p)]
    with pytest.raises(AssertionError, match="wait for one another"):
        assert_completes(records, one_per_group=True)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
def test_without_open_channels_the_first_messages_can_deadlock(name):
    """So the model sees what `open_channels` is for."""
    bare: Records = []
    for rank in range(4):
        events, n = executed(name, 4, 8, 1, rank), len(channels(4, rank)) // 2
        bare.append([e if isinstance(e, Call) else Wait(e.call - n) for e in events[2 * n :]])
    with pytest.raises(AssertionError, match="connects"):
        assert_completes(bare)


# ---- the stages as they are ----


def record_of(number: str, ranks: int, rank: int, argv: list[str]) -> list[Call | Wait]:
    """What `main(argv)` issues as `rank` of `ranks`, on all groups: this process is alone."""
    new_group = dist.new_group
    dist.init_process_group("recorded", rank=rank, world_size=ranks, store=FakeStore())
    try:
        with (
            # also the groups that are on Gloo for real
            patch.object(dist, "new_group", lambda *a, backend=None, **kw: new_group(*a, **kw)),
            recorded_calls() as events,
        ):
            load_stage(number).main(argv)
    finally:
        dist.destroy_process_group()
    return events


SIZE = "--d-model 16 --n-heads 4 --seq-len 8 --steps 1 --resume never".split()


def records_of(pools, corpus_dir, tmp_path, number: str, ranks: int, argv: list[str]) -> Records:
    argv = [*SIZE, *argv, "--data", str(corpus_dir), "--run-dir", str(tmp_path)]
    alone = pools(1, group=False)
    return [alone.run(record_of, number, ranks, rank, argv)[0] for rank in range(ranks)]


def pipeline_events(events: list[Call | Wait]) -> list[tuple]:
    """Sends, receives and their waits, numbered anew."""
    number, found, n = {}, [], 0
    for event in events:
        if isinstance(event, Wait):
            if event.call in number:
                found.append(("wait", number[event.call]))
            continue
        if event.op in ("send", "recv"):
            number[n] = len(number)
            found.append((event.op, event.desc, event.peer))
        n += 1
    return found


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_model_issues_what_stage_06_issues(pools, corpus_dir, tmp_path, name, p):
    v = 2 if name == "interleaved" else 1
    argv = f"--schedule {name} --n-layers {p * v} --global-batch-size 8 --micro-batch-size 1"
    records = records_of(pools, corpus_dir, tmp_path, "06", p, argv.split())
    assert_ranks_agree(records)
    assert_completes(records)
    for rank, events in enumerate(records):
        expected = pipeline_events(executed(name, p, 8, v, rank))
        assert pipeline_events(events)[: len(expected)] == expected


MESHES = [  # pp, dp, tp, flags
    *((pp, dp, tp, []) for pp in (1, 2) for dp in (1, 2) for tp in (1, 2)),
    *((4, 1, 2, []), (1, 2, 4, []), (2, 1, 4, []), (3, 1, 2, [])),
    *((2, 2, 1, ["--schedule", name]) for name in stage.SCHEDULES),
    (4, 2, 2, ["--schedule", "interleaved", "--sequence-parallel"]),
    (8, 1, 1, ["--schedule", "gpipe"]),
]


@pytest.mark.parametrize(("pp", "dp", "tp", "own"), MESHES, ids=str)
def test_every_mesh_of_07_agrees_and_completes(pools, corpus_dir, tmp_path, pp, dp, tp, own):
    layers = 2 * pp if "interleaved" in own else pp
    argv = [*own, *f"--pp {pp} --tp {tp} --n-layers {layers}".split()]
    argv += f"--global-batch-size {8 * dp} --micro-batch-size 1".split()
    records = records_of(pools, corpus_dir, tmp_path, "07", pp * dp * tp, argv)
    assert_ranks_agree(records)
    assert_completes(records)
