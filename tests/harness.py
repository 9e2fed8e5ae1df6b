"""The test harness: worker pools, the parity check, and independent counts of bytes and memory.

    pool.run(function, *args)        one result per rank; `function` is a module-level function
    pool.attempt(function, *args)    one `Outcome` per rank, errors and exits included
    pool.train("02", argv)           what `main(argv)` of stage 02 returns on each rank
    assert_same_curve(metrics, reference)
    cases("parity")                  the runs of all stage files for one purpose, as parameters
    assert_reproduces(run, metrics, reference)      within the tolerance of the stage's file
    with count_collectives() as counted: ...        counted.records, .calls, .payload
    with whole_ledger() as ledger: ...              the ledger of a run, without its resets
    with true_ledger() as (ledger, counted): ...    both, which must agree at the end
    bytes_written()
    live_bytes(), live_storages(), PeakMemory()

A pool's processes live as long as the tests: starting eight takes a second or two, handing them a
job takes a millisecond. Fixtures for pools, corpus and reference runs are in `conftest.py`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import json
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools/pictures"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools/planner"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from stages import (  # noqa: F401  for the tests, too
    REPO,
    StageRun,
    load_file,
    load_stage,
    runs_for,
    stage_file,
    stage_path,
    stages,
)

import common.distributed

# ---- pools ----


class WorkerError(AssertionError):
    """A job failed in a worker. The message names the rank and holds its traceback."""


class WorkerExit(WorkerError):
    """A job ended in SystemExit. `statuses`, `stderr`: one per rank."""

    def __init__(self, outcomes: list[Outcome]):
        self.statuses = [o.exit_status for o in outcomes]
        self.stderr = [o.stderr for o in outcomes]
        said = "".join(self.stderr).strip()
        super().__init__(f"exit statuses {self.statuses}, on stderr: {said}")


@dataclass
class Outcome:
    """How a job ended on one rank: a value, a traceback, or an exit's status."""

    value: Any = None
    traceback: str | None = None
    exit_status: int | None = None
    stdout: str = ""
    stderr: str = ""


def _worker(
    rank: int, size: int, port: int | None, connection, environment, folder, backend
) -> None:
    """A worker process: join the group, run jobs as they arrive, exit when the parent does."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then kills us
    stacks = open(Path(folder) / f"stacks-{rank}.txt", "w")
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # tqdm's own lock would leak a semaphore when we are killed
    common.distributed.GRACE = 0.0  # no launcher terminates the other ranks here
    jobs: queue.Queue = queue.Queue()

    def listen() -> None:
        while True:
            try:
                jobs.put(connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)  # the parent is gone: do not wait for the job

    threading.Thread(target=listen, daemon=True).start()
    if port is not None:
        if "late" in backend:
            import late_backend  # noqa: F401  registers the backend

        dist.set_debug_level_from_env()  # torch was imported in another environment
        dist.init_process_group(
            backend,
            store=dist.TCPStore("127.0.0.1", port, is_master=False),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=100),
        )
    gc.freeze()  # these objects live forever: exclude them from the search for live tensors
    connection.send_bytes(pickle.dumps("ready"))
    while True:
        job = jobs.get()
        outcome = _do(job)
        if port is not None and not dist.is_initialized():
            outcome.traceback = outcome.traceback or "the job destroyed the pool's process group"
        if port is not None and outcome.traceback is None:
            _tidy_up()
        gc.collect()
        try:
            answer = pickle.dumps(outcome)
        except Exception:
            outcome = Outcome(traceback=f"result cannot be pickled\n{traceback.format_exc()}")
            answer = pickle.dumps(outcome)
        del outcome
        connection.send_bytes(answer)


def _tidy_up() -> None:
    """Destroy process groups that a job leaves behind: each Gloo group's threads wake 100 times a
    second.

    A run that ended with an error has destroyed none of its groups. A model whose parameters have
    hooks that refer to it is a reference cycle through C++, which the garbage collector cannot see;
    it keeps groups alive too.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    for obj in gc.get_objects():
        if type(obj) is torch.nn.Parameter:
            for hooks in (obj._post_accumulate_grad_hooks, obj._backward_hooks):
                if hooks:
                    hooks.clear()


def _do(job: bytes) -> Outcome:
    out, err = io.StringIO(), io.StringIO()
    outcome = Outcome()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            function, args, kwargs = pickle.loads(job)
            outcome.value = function(*args, **kwargs)
        except SystemExit as exit:
            outcome.exit_status = exit.code if isinstance(exit.code, int) else int(bool(exit.code))
        except BaseException:
            outcome.traceback = traceback.format_exc()
    outcome.stdout, outcome.stderr = out.getvalue(), err.getvalue()
    return outcome


class Pool:
    """`world_size` processes in one process group, which run one job after another.

    group=False: one process without a process group, as stage 01 runs. backend: "gloo", "late"
    (`late_backend.py`), or one for each device, as in "cpu:late,meta:gloo". environment: variables
    of the processes, in addition to this process's own.
    """

    def __init__(
        self,
        world_size: int,
        group: bool = True,
        timeout: float = 120.0,
        backend: str = "gloo",
        environment: dict[str, str] | None = None,
    ):
        if not group and world_size != 1:
            raise ValueError("without a process group there is one process")
        self.size, self.group, self.timeout, self.backend = world_size, group, timeout, backend
        self.environment = environment or {}
        self._processes: list = []
        self._connections: list = []
        self._store = self._folder = None

    def run(self, function: Callable, *args, timeout: float | None = None, **kwargs) -> list:
        """Run `function(*args, **kwargs)` on every rank; returns the results by rank.

        Raises `WorkerError` with rank and traceback if a rank fails, hangs or dies, `WorkerExit`
        if it calls `sys.exit`. After a failure the next job gets fresh processes.
        """
        outcomes = self.attempt(function, *args, timeout=timeout, **kwargs)
        failed = [r for r, o in enumerate(outcomes) if o.traceback is not None]
        if failed:
            texts = [
                f"[rank {r} of {self.size}] {outcomes[r].traceback}{outcomes[r].stderr[-2000:]}"
                for r in failed[:2]
            ]
            raise WorkerError(f"ranks {failed} failed\n" + "\n".join(texts))
        if any(o.exit_status is not None for o in outcomes):
            raise WorkerExit(outcomes)
        return [o.value for o in outcomes]

    def train(self, stage: str, argv: list[str], timeout: float | None = None) -> list[list[dict]]:
        """Run `main(argv)` of a stage on every rank; without --run-dir, in a new run folder."""
        return self.run(train, stage, with_run_dir(argv), timeout=timeout)

    def attempt_train(self, stage: str, argv: list[str]) -> list[Outcome]:
        return self.attempt(train, stage, with_run_dir(argv))

    def attempt(
        self, function: Callable, *args, timeout: float | None = None, **kwargs
    ) -> list[Outcome]:
        """Run `function` on every rank; returns how it ended on each, errors included."""
        self._start()
        job = pickle.dumps((function, args, kwargs))
        outcomes: list[Outcome | None] = [None] * self.size
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(job)
            except OSError:
                outcomes[rank] = Outcome(traceback="the worker had died before this job")
        deadline = time.monotonic() + (timeout or self.timeout)
        while any(o is None for o in outcomes):
            waiting = {c: r for r, c in enumerate(self._connections) if outcomes[r] is None}
            left = deadline - time.monotonic()
            for connection in multiprocessing.connection.wait(list(waiting), max(0.0, left)):
                rank = waiting[connection]
                try:
                    outcomes[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode
                    outcomes[rank] = Outcome(traceback=f"the worker died, exit code {code}")
            if any(o is not None and o.traceback for o in outcomes):
                # the others may wait for the failed rank forever: they get three seconds to finish
                deadline = min(deadline, time.monotonic() + 3.0)
            if left <= 0:
                stacks = self._stacks([r for r, o in enumerate(outcomes) if o is None])
                for rank, text in stacks.items():
                    outcomes[rank] = Outcome(
                        traceback=f"did not finish in time; its stack was\n{text}"
                    )
        if any(o.traceback for o in outcomes) or len({o.exit_status for o in outcomes}) > 1:
            self.close()  # the state of the process group is unknown
        return outcomes

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR2)
        time.sleep(0.3)
        return {r: (Path(self._folder.name) / f"stacks-{r}.txt").read_text()[-3000:] for r in ranks}

    def _start(self) -> None:
        if self._processes:
            return
        context = _context()
        self._folder = tempfile.TemporaryDirectory(prefix="pool-")
        port = None
        if self.group:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            environment = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
            environment |= self.environment
            if self.group:  # as torchrun would set it
                environment |= {
                    **{"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    **{"WORLD_SIZE": str(self.size), "LOCAL_WORLD_SIZE": str(self.size)},
                }
            where = theirs, environment, self._folder.name
            process = context.Process(
                target=_worker, args=(rank, self.size, port, *where, self.backend), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        for rank, connection in enumerate(self._connections):
            try:
                if not connection.poll(60):
                    raise EOFError
                connection.recv_bytes()
            except (EOFError, OSError):
                self.close()
                raise WorkerError(f"rank {rank} of {self.size} did not start") from None

    def close(self) -> None:
        """Kill the processes; a later job starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._store = [], [], None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


@lru_cache
def _context():
    """A fork server that has imported torch once and forks the workers."""
    context = multiprocessing.get_context("forkserver")
    slow = ["pytest", "torch._dynamo", "torch.utils.tensorboard", "common.checkpoint", "common.run"]
    context.set_forkserver_preload([*slow, "harness"])
    kept = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "PYTHONPATH")}
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPO), str(REPO / "tests")])
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return context


def train(stage: str, argv: list[str]) -> list[dict]:
    return load_stage(stage).main(argv)


@lru_cache
def lines_of(stage: str) -> list[str]:
    return stage_path(stage).read_text().splitlines()


def metrics_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def with_run_dir(argv: list[str]) -> list[str]:
    if "--run-dir" in argv:
        return list(argv)
    return [*argv, "--run-dir", tempfile.mkdtemp(prefix="run-", dir=os.environ.get("RUNS_ROOT"))]


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


def comparably(job: Callable, how: str, folder: str, stage: str, argv: list[str]) -> Any:
    """`job(stage, argv)`, in its stage's `replay` where there is one; how: "record" or "replay"."""
    name, around = stage_file(stage).replay, nullcontext()
    if name:
        module = load_file(stage_path(stage).with_name(f"{name}.py"), name)
        around = getattr(module, name)(how, folder, load_stage(stage))
    with around:
        return job(stage, argv)


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
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    nbytes: int
    group: str
    group_size: int
    leaves: float | None = None  # of an all-to-all with splits: the part that goes to other ranks


@dataclass
class Counted:
    """The collectives that the dispatcher saw. Keys are (collective, group), as in the ledger."""

    records: list[Record] = field(default_factory=list)

    @property
    def calls(self) -> Counter:
        return Counter((r.op, r.group) for r in self.records)

    @property
    def payload(self) -> Counter:
        total: Counter = Counter()
        for r in self.records:
            total[r.op, r.group] += r.nbytes
        return total


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
    shape = tuple(tensors[0].shape) if tensors else ()
    nbytes = sum(t.numel() * t.element_size() for t in tensors)
    desc = (group.group_desc or "group").removeprefix("mesh_")
    world = group.group_name == dist.group.WORLD.group_name
    dtype = tensors[0].dtype if tensors else None
    leaves = None
    if name == "all_to_all_single":
        sends = args[4]  # rows for each rank
        leaves = 1 - sends[group.rank()] / max(1, sum(sends))
    return Record(name, shape, dtype, nbytes, "world" if world else desc, group.size(), leaves)


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
    sent = [r for r in counted.records if r.op != "irecv"]  # the sender counts
    assert Counter((r.op, r.group) for r in sent) == ledger.calls + ledger.control
    payload, ring = Counter(), Counter()
    for key in ledger.calls + ledger.control:
        records = sorted((r for r in sent if (r.op, r.group) == key), key=lambda r: r.nbytes)
        control, technique = records[: ledger.control[key]], records[ledger.control[key] :]
        for r in control:
            most = 4096 if key == ("broadcast", "stop") else 64  # the run's folder, at the start
            assert r.nbytes <= most, f"{key}: a control call of {r.nbytes} bytes"
        payload[key] = sum(r.nbytes for r in technique)
        ring[key] = sum(r.nbytes * _ring_factor(r) for r in technique)
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


# ---- memory ----


def _counts(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.device.type == "cpu"


def live_storages() -> list[torch.UntypedStorage]:
    """Every live storage of floating-point numbers that Python can reach, once."""
    found = {}
    for obj in gc.get_objects():
        if type(obj) not in (Tensor, torch.nn.Parameter):  # other subclasses may have no memory
            continue
        # a gradient that Python has never accessed exists in C++ alone
        for tensor in (obj, obj.grad if obj.is_leaf else None):
            if tensor is not None and _counts(tensor):
                storage = tensor.untyped_storage()
                found[storage._cdata] = storage
    return list(found.values())


def live_bytes() -> int:
    """Bytes of weights, gradients, optimizer state and buffers: each live float storage once."""
    return sum(storage.nbytes() for storage in live_storages())


class PeakMemory(TorchDispatchMode):
    """Peak bytes of all live floating-point CPU storages during the block.

    It looks at every storage that an operator of this thread touches, right after the operator. So
    it sees tensors that autograd holds in C++, and storages that are resized. It does not see the
    scratch memory of a kernel, or allocations of C++ threads.

        with PeakMemory() as peak:
            ...
        peak.bytes      the peak
        peak.above      the peak minus the bytes that were live when the block began
        peak.left       bytes that the block leaves behind (negative: it freed some)
    """

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self._known: dict[int, StorageWeakRef] = {}  # a weak reference keeps the address taken
        for storage in live_storages():
            self._watch(storage)
        self._before = self.bytes = self._now()
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        gc.collect()
        self.bytes = max(self.bytes, self._now())
        self.above, self.left = self.bytes - self._before, self._now() - self._before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._see(args, kwargs)
        result = func(*args, **(kwargs or {}))
        self._see(result)
        self.bytes = max(self.bytes, self._now())
        return result

    def _see(self, *values) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and _counts(tensor):
                self._watch(tensor.untyped_storage())

    def _watch(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            self._known[storage._cdata] = StorageWeakRef(storage)

    def _now(self) -> int:
        total = 0
        for address in list(self._known):
            storage = torch.UntypedStorage._new_with_weak_ptr(address)
            if storage is None:
                del self._known[address]
            else:
                total += storage.nbytes()
        return total
