"""A process group whose operations complete as late as a CUDA stream allows.

    pool = Pool(4, backend="late")      its processes train over this backend
    with recorded_calls() as record:    every call and every wait of this rank, in issue order
        ...
    assert_all_waited_for()             fails if a `Work` was never waited for

Gloo forgives mistakes that NCCL does not: on a CPU an operation is often complete before its
`wait()`, so code that reads a result too early, reuses a buffer too early or forgets to wait still
trains. Here every operation runs on private copies. Until `wait()`, which delivers the result:

- outputs hold signalling NaNs: a read spoils the loss, and arithmetic changes their bits;
- inputs must not change: NCCL may read them at any time before the wait;
- storages must keep their size and address. (A dropped reference is no error: like c10d's, a
  `Work` keeps its tensors alive.)

Tensors must be contiguous, as NCCL demands. `common.collectives` recognizes Gloo by its name, so
over this backend it takes NCCL's branch and calls the backend's own reduce-scatter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, Work


class Call(NamedTuple):
    """One collective or point-to-point call of this rank."""

    op: str
    group: str  # unique name of the process group, the same on all of its ranks
    desc: str  # what the group is for: "dp", "to_lower", ...
    ranks: tuple[int, ...]  # the group's members, as global ranks
    shapes: tuple[tuple[int, ...], ...]  # of the inputs, then the outputs
    dtypes: tuple[str, ...]
    reduce_op: str = ""
    peer: int | None = None  # global rank: destination, source, or root of a broadcast
    name: str = ""  # what a message is, for a model that knows it; never recorded
    receives: tuple[int, ...] = ()  # of an all-to-all: rows from each rank,
    sends: tuple[int, ...] = ()  # and rows to each rank; `shapes` are then those of a row


class Wait(NamedTuple):
    """A `wait()` for the `call`-th call of the record."""

    call: int


class Record:
    """The calls and waits of one rank."""

    def __init__(self) -> None:
        self.events: list[Call | Wait] = []
        self.n_calls = 0


_records: list[Record] = []  # those that are being written
_outstanding: dict[int, LateWork] = {}


@contextlib.contextmanager
def recorded_calls() -> Iterator[list[Call | Wait]]:
    """Record this rank's calls and waits on late groups, in issue order."""
    record = Record()
    _records.append(record)
    try:
        yield record.events
    finally:
        _records.remove(record)


def assert_all_waited_for() -> None:
    """Fail if a `Work` of this process was never waited for."""
    forgotten = [work.name for work in _outstanding.values()]
    _outstanding.clear()
    assert not forgotten, f"never waited for: {', '.join(forgotten)}"


# ---- buffers in flight ----

# a NaN whose quiet bit is clear: copies keep its bits, arithmetic sets the quiet bit
_SIGNALLING_NAN = {
    torch.float64: (torch.int64, 0x7FF4_0000_0000_0000),
    torch.float32: (torch.int32, 0x7FA0_0000),
    torch.bfloat16: (torch.int16, 0x7FA0),
    torch.float16: (torch.int16, 0x7D00),
}


def _bits(tensor: Tensor) -> Tensor:
    """The tensor as bytes. `.data` leaves the version counter alone, as NCCL's kernels do."""
    return tensor.data.reshape(-1).view(torch.uint8)


def _poison(tensor: Tensor) -> None:
    integer, value = _SIGNALLING_NAN.get(tensor.dtype, (torch.uint8, 0xA5))
    tensor.data.reshape(-1).view(integer).fill_(value)


class Buffer:
    """A tensor in flight: the bytes and the storage address that it must keep until the wait."""

    def __init__(self, tensor: Tensor):
        assert tensor.is_contiguous(), f"NCCL takes contiguous tensors only, not {tensor.stride()}"
        self.tensor = tensor
        self.expected = _bits(tensor).clone()
        self.address = self._where()

    def _where(self) -> tuple[int, int]:
        storage = self.tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()

    def check(self, name: str, role: str) -> None:
        assert self._where() == self.address, f"{name}: the storage of its {role} was freed"
        same = torch.equal(_bits(self.tensor), self.expected)
        assert same, f"{name}: its {role} was written to while in flight"


class LateWork:
    """A call in flight. `wait()` checks its buffers and delivers the private copies' result."""

    def __init__(
        self,
        name: str,
        work: Work,
        inputs: list[Tensor],
        outputs: list[Tensor],
        results: list[Tensor],
    ):
        self.calls = [(record, record.n_calls - 1) for record in _records]  # it is the newest one
        self.name, self.work, self.results, self.done = name, work, results, False
        for tensor in outputs:
            _poison(tensor)
        # after that, because an output may be a part of the input (a reduce-scatter in place)
        self.inputs = [Buffer(tensor) for tensor in inputs]
        self.outputs = [Buffer(tensor) for tensor in outputs]
        _outstanding[id(self)] = self

    def wait(self, timeout=None) -> bool:
        if not self.done:
            for record, call in self.calls:
                record.events.append(Wait(call))
            self.complete()
        self.done = True
        return True

    def complete(self) -> None:
        del _outstanding[id(self)]
        for role, buffers in (("input", self.inputs), ("output", self.outputs)):
            for buffer in buffers:
                buffer.check(self.name, role)
        self.work.wait()
        for buffer, result in zip(self.outputs, self.results, strict=True):
            buffer.tensor.data.copy_(result)
        self.inputs, self.outputs, self.results = [], [], []

    def is_completed(self) -> bool:
        return self.done


# ---- the process groups ----


class LateProcessGroup(dist.ProcessGroup):
    """Delivers every result at `wait()`; Gloo moves the private copies."""

    def __init__(self, options, _):
        super().__init__(options.group_rank, options.group_size)
        self.name = options.group_id
        self.global_ranks = tuple(options.global_ranks_in_group or range(options.group_size))
        self.gloo = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, timeout=options.timeout
        )

    def _start(
        self,
        op: str,
        run: Callable[..., Work],
        inputs: list[Tensor],
        outputs: list[Tensor],
        in_place: bool = False,
        reduce_op: ReduceOp | None = None,
        peer: int | None = None,
        splits: tuple[list[int], ...] = ((), ()),
    ) -> LateWork:
        """Call `run(input copies, output copies)` and hand out a `Work` that completes late.

        in_place: the operation reads its outputs too. peer: as a rank of this group. splits: of an
        all-to-all, the rows from each rank and to each rank.
        """
        receives, sends = map(tuple, splits)
        tensors = [*inputs, *outputs]
        call = Call(
            op,
            self.name,
            self.group_desc,
            self.global_ranks,
            tuple(tuple(t.shape[1:] if sends else t.shape) for t in tensors),
            tuple(str(t.dtype).removeprefix("torch.") for t in tensors),
            "" if reduce_op is None else reduce_op.op.name,
            None if peer is None else self.global_ranks[peer],
            receives=receives,
            sends=sends,
        )
        for record in _records:
            record.events.append(call)
            record.n_calls += 1
        sent = [t.detach().clone() for t in inputs]
        results = [t.detach().clone() if in_place else torch.empty_like(t) for t in outputs]
        work = run(sent, results)
        to = "" if call.peer is None else f" with rank {call.peer}"
        shape = list(call.shapes[0]) if call.shapes else "nothing"
        name = f"{call.op} of {shape} in {call.desc}{to}"
        return LateWork(name, work, inputs, outputs, results)

    def getBackendName(self) -> str:
        return "late"

    def getGroupName(self) -> str:
        return self.name

    def allreduce(self, tensors, opts=None):
        def run(_, results: list[Tensor]) -> Work:
            return self.gloo.allreduce(results, opts)

        opts = opts or dist.AllreduceOptions()
        return self._start("all_reduce", run, [], tensors, True, opts.reduceOp)

    def broadcast(self, tensors, opts):
        def run(sent: list[Tensor], results: list[Tensor]) -> Work:
            return self.gloo.broadcast(sent or results, opts)

        ends = (tensors, []) if opts.rootRank == self.rank() else ([], tensors)
        return self._start("broadcast", run, *ends, peer=opts.rootRank)

    def reduce(self, tensors, opts):
        def run(_, results: list[Tensor]) -> Work:
            sent = [t.clone() for t in results] if opts.rootRank != self.rank() else results
            if sent is not results:
                for result in results:  # a reduce leaves other ranks than the root undefined
                    result.fill_(torch.nan if result.is_floating_point() else -1)
            return self.gloo.reduce(sent, opts)

        return self._start("reduce", run, [], tensors, True, opts.reduceOp, opts.rootRank)

    def _allgather_base(self, output, input, opts=None):
        def run(sent: list[Tensor], results: list[Tensor]) -> Work:
            return self.gloo._allgather_base(results[0], sent[0])

        return self._start("all_gather", run, [input], [output])

    def allgather(self, outputs, inputs, opts=None):
        def run(sent: list[Tensor], results: list[Tensor]) -> Work:
            return self.gloo.allgather([results], sent)

        return self._start("all_gather", run, inputs, outputs[0])

    def _reduce_scatter_base(self, output, input, opts):
        def run(sent: list[Tensor], results: list[Tensor]) -> Work:
            return self.gloo._reduce_scatter_base(results[0], sent[0], opts)

        return self._start("reduce_scatter", run, [input], [output], reduce_op=opts.reduceOp)

    def alltoall_base(self, output, input, output_splits, input_splits, opts=None):
        def run(sent: list[Tensor], results: list[Tensor]) -> Work:
            return self.gloo.alltoall_base(results[0], sent[0], *splits)

        splits = output_splits, input_splits
        return self._start("all_to_all", run, [input], [output], splits=splits)

    # their names since PyTorch 2.13
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def send(self, tensors, dst, tag=0):
        def run(sent: list[Tensor], _) -> Work:
            return self.gloo.send(sent, dst, 0)  # NCCL ignores tags

        return self._start("send", run, tensors, [], peer=dst)

    def recv(self, tensors, src, tag=0):
        def run(_, results: list[Tensor]) -> Work:
            return self.gloo.recv(results, src, 0)

        return self._start("recv", run, [], tensors, peer=src)

    def barrier(self, opts=None):
        return self._start("barrier", lambda *_: self.gloo.barrier(), [], [])

    def shutdown(self) -> None:
        self.gloo = None


dist.Backend.register_backend("late", LateProcessGroup, extended_api=True, devices=["cpu"])
