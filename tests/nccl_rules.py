"""NCCL's rules, applied to the calls that `late_backend.recorded_calls` has recorded per rank.

    assert_ranks_agree(records)     the ranks of a group make the same calls in the same order
    assert_completes(records)       no rank waits forever, whatever the timing
    assert_connects_early(records)  no rank connects while it receives

`records[rank]` is the list of that rank's calls and waits, in issue order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

from late_backend import Call, Wait

Records = list[list[Call | Wait]]
COMMON = [name for name in Call._fields if name not in ("sends", "receives")]

# ---- agreement across ranks ----


def assert_ranks_agree(records: Records) -> None:
    """Compare the calls rank against rank, field by field.

    Every member of a group must issue the same collectives. Every send must meet a receive of the
    same shape and dtype.
    """
    collectives: dict[tuple, list[Call]] = defaultdict(list)  # by group and rank
    messages: dict[tuple, list[Call]] = defaultdict(list)  # by op, group, source and destination
    members: dict[str, tuple[int, ...]] = {}
    for rank, call in _calls(records):
        members.setdefault(call.group, call.ranks)
        assert rank in call.ranks, f"rank {rank} is no member of the group of {call}"
        if call.op in ("send", "recv"):
            ends = (rank, call.peer) if call.op == "send" else (call.peer, rank)
            messages[call.op, call.group, *ends].append(call)
        else:
            collectives[call.group, rank].append(call)
    for group, ranks in members.items():
        first = collectives[group, ranks[0]]
        for rank in ranks[1:]:
            _same(first, collectives[group, rank], ranks[0], rank, COMMON)
        for calls in zip(*(collectives[group, rank] for rank in ranks), strict=True):
            sent, received = [c.sends for c in calls], [c.receives for c in calls]
            if any(sent):  # an all-to-all
                assert list(zip(*sent, strict=True)) == received, f"the splits differ: {calls}"
    for _op, group, src, dst in list(messages):
        sent, received = messages["send", group, src, dst], messages["recv", group, src, dst]
        _same(sent, received, src, dst, ("desc", "ranks", "shapes", "dtypes"))


def _calls(records: Records) -> Iterator[tuple[int, Call]]:
    for rank, events in enumerate(records):
        yield from ((rank, event) for event in events if isinstance(event, Call))


def _same(ours: list[Call], theirs: list[Call], a: int, b: int, fields: tuple[str, ...]) -> None:
    for i, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        for name in fields:
            same = getattr(one, name) == getattr(other, name)
            assert same, f"ranks {a} and {b} differ in {name} of call {i}: {one}, {other}"
    n, m = len(ours), len(theirs)
    more = (ours if n > m else theirs)[min(n, m) : min(n, m) + 1]
    assert n == m, f"rank {a} makes {n} calls, rank {b} {m}; the first without a match: {more}"


# ---- NCCL's order ----


def _communicator(rank: int, call: Call) -> tuple:
    if call.op in ("send", "recv"):
        return call.group, *sorted((rank, call.peer))
    return (call.group,)


def assert_connects_early(records: Records) -> None:
    """No rank makes its first call in a communicator while one of its receives is in flight.

    Creating a communicator allocates device memory, which can wait for every running kernel.
    """
    for rank, events in enumerate(records):
        known: set[tuple] = set()
        receiving: set[int] = set()
        issued = 0
        for event in events:
            if isinstance(event, Wait):
                receiving.discard(event.call)
                continue
            communicator = _communicator(rank, event)
            late = receiving and communicator not in known
            assert not late, f"rank {rank} connects while it receives: {event}"
            known.add(communicator)
            if event.op == "recv":
                receiving.add(issued)
            issued += 1


class _Rank:
    """A rank's host: it issues its calls one after another, and stops where it must wait."""

    def __init__(self, events: list[Call | Wait]):
        self.events = deque(events)
        self.issued: list[Call] = []
        self.completed: set[int] = set()  # numbers of calls
        self.connecting: tuple | None = None


class NcclModel:
    """What NCCL and PyTorch promise about the order of calls, and nothing more.

    - Within a communicator a rank's calls run one at a time, in issue order: an operation starts
      when it is the oldest one left, and ends when it is so on all ranks that take part.
    - A send meets the receive that is its peer's oldest operation at the time. There are no tags.
    - The first collective of a communicator, and the first message from one rank to another in
      it, connects: the host waits until the others have come to the same point.
    - A group has one communicator for its collectives, and one for each pair of ranks that exchange
      messages in it.
    - Communicators run on streams of their own, but CUDA does not promise that streams proceed
      independently. With one_queue they share a hardware queue, as with
      CUDA_DEVICE_MAX_CONNECTIONS=1: whatever was launched later, computation too, starts when this
      call has started, and it starts when the previous one in its communicator has ended.
    - The host blocks in `wait()`. On a GPU only the stream does, which allows more than this.

    One queue only adds reasons to wait: an order that completes with it completes without.
    """

    def __init__(self, records: Records, one_queue: bool):
        self.one_queue = one_queue
        self.ranks = [_Rank(events) for events in records]
        self.queues: dict[tuple, dict[int, deque[int]]] = {}  # by communicator, then by rank
        self.arrived: dict[tuple, set[int]] = defaultdict(set)  # at a first call, by what connects

    def run(self) -> None:
        """Let every rank proceed as far as it can, until all are done or none can move."""
        progress = True
        while progress:
            progress = False
            for rank in range(len(self.ranks)):
                while self._step(rank):
                    progress = True
            for queues in self.queues.values():
                while self._complete_one(queues):
                    progress = True
        stuck = {r: self._reason(r) for r, host in enumerate(self.ranks) if host.events}
        assert not stuck, f"the ranks wait for one another: {stuck}"
        left = [
            self.ranks[rank].issued[queue[0]]
            for queues in self.queues.values()
            for rank, queue in queues.items()
            if queue
        ]
        assert not left, f"these calls never complete: {left}"

    def _step(self, rank: int) -> bool:
        """Process one event of a rank's host; False if it has to wait there."""
        host = self.ranks[rank]
        if not host.events or not self._is_connected(host):
            return False
        event = host.events[0]
        if isinstance(event, Wait):
            if event.call not in host.completed:
                return False
        else:
            queues = self.queues.setdefault(_communicator(rank, event), {})
            queue = queues.setdefault(rank, deque())
            if self.one_queue and queue:
                return False
            queue.append(len(host.issued))
            host.issued.append(event)
            self._connect(rank, event)
        host.events.popleft()
        return True

    def _connect(self, rank: int, call: Call) -> None:
        """If this is the first call of its kind, have the host wait for the others."""
        if call.op in ("send", "recv"):
            ends = (rank, call.peer) if call.op == "send" else (call.peer, rank)
            link = (call.group, *ends)
            others = {rank, call.peer}
        else:
            link, others = (call.group,), set(call.ranks)
        if rank not in self.arrived[link]:
            self.arrived[link].add(rank)
            self.ranks[rank].connecting = link, frozenset(others)

    def _is_connected(self, host: _Rank) -> bool:
        if host.connecting:
            link, others = host.connecting
            if not others <= self.arrived[link]:
                return False
            host.connecting = None
        return True

    def _complete_one(self, queues: dict[int, deque[int]]) -> bool:
        """Complete an operation that is the oldest one on all ranks that take part in it."""
        heads = {r: self.ranks[r].issued[queue[0]] for r, queue in queues.items() if queue}
        for rank, call in heads.items():
            if call.op == "recv":
                continue
            ranks = (rank, call.peer) if call.op == "send" else call.ranks
            if all(r in heads and self._meets(call, rank, heads[r], r) for r in ranks):
                for r in ranks:
                    self.ranks[r].completed.add(queues[r].popleft())
                return True
        return False

    @staticmethod
    def _meets(call: Call, rank: int, other: Call, other_rank: int) -> bool:
        if call.op != "send":
            return other.op == call.op
        if other_rank == rank:
            return True
        if (other.op, other.peer) != ("recv", rank):
            return False
        # the model's callers may name a message, see `Call.name`
        assert call.name == other.name, f"{call.name} arrives where {other.name} is expected"
        return True

    def _reason(self, rank: int) -> str:
        host = self.ranks[rank]
        if host.connecting:
            return f"connects for {host.issued[-1]}"
        event = host.events[0]
        return f"waits for {host.issued[event.call] if isinstance(event, Wait) else event}"


def assert_completes(records: Records, one_queue: bool = True) -> None:
    """Fail if the recorded calls can deadlock under NCCL's rules."""
    NcclModel(records, one_queue).run()
