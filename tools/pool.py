"""Processes in one process group that run one job after another.

    pool = Pool(4)
    pool.run(function, *args)        one result per rank; `function` is a module-level function
    pool.attempt(function, *args)    one `Outcome` per rank, errors and exits included
    pool.train("02", argv)           what `main(argv)` of stage 02 returns on each rank

Starting eight takes a second or two, handing them a job takes a millisecond. This process imports
PyTorch when the first pool starts; the fork server that the ranks come from does so meanwhile.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tools.stages import load_file, load_stage, stage_file, stage_path

# the packages that training imports; PyTorch brings its own
NEEDED = ("torch", "numpy", "tensorboard", "xxhash")
# what the fork server imports, once for all processes; a user of pools may add to it
PRELOAD = ["torch._dynamo", "torch.utils.tensorboard", "common.job.checkpoint", "common.job.run"]
PRELOAD += ["tools.worker"]


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


class Pool:
    """`world_size` processes in one process group, which run one job after another.

    group=False: one process without a process group, as stage 01 runs. backend: "gloo", one that a
    module in `PRELOAD` registers, or one for each device, as in "cpu:late,meta:gloo". environment:
    variables of the processes, in addition to this process's own.
    """

    def __init__(
        self,
        world_size: int,
        group: bool = True,
        timeout: float = 120.0,
        backend: str = "gloo",
        environment: dict[str, str] | None = None,
    ):
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
                    outcomes[rank] = Outcome(**pickle.loads(connection.recv_bytes()))
                except (EOFError, OSError):
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode
                    outcomes[rank] = Outcome(traceback=f"the worker died, exit code {code}")
            if any(o is not None and (o.traceback or o.exit_status) for o in outcomes):
                # the others may wait for the failed rank forever: they get some seconds to finish
                deadline = min(deadline, time.monotonic() + 5.0)
            if left <= 0:
                stacks = self._stacks([r for r, o in enumerate(outcomes) if o is None])
                for rank, text in stacks.items():
                    said = f"did not finish in time; its stack was\n{text}"
                    outcomes[rank] = Outcome(traceback=said)
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
        import torch.distributed as dist

        from tools.worker import work

        context = fork_server()
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
                environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
                environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.size))
            where = theirs, environment, self._folder.name
            process = context.Process(
                target=work, args=(rank, self.size, port, *where, self.backend), daemon=True
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
def fork_server():
    """A fork server that has imported torch once and forks the workers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    kept = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "PYTHONPATH")}
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return context


def missing() -> str:
    """One line that names the packages of NEEDED which this Python lacks; empty if it has all."""
    names = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    verb = "is" if len(names) == 1 else "are"
    line = f"{', '.join(names)} {verb} missing: pip install {' '.join(names)}"
    return line if names else ""


def train(stage: str, argv: list[str]) -> list[dict]:
    return load_stage(stage).main(argv)


def metrics_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def with_run_dir(argv: list[str]) -> list[str]:
    if "--run-dir" in argv:
        return list(argv)
    return [*argv, "--run-dir", tempfile.mkdtemp(prefix="run-", dir=os.environ.get("RUNS_ROOT"))]


def comparably(job: Callable, how: str, folder: str, stage: str, argv: list[str]) -> Any:
    """`job(stage, argv)`, in its stage's `replay` where there is one; how: "record" or "replay"."""
    name, around = stage_file(stage).replay, nullcontext()
    if name:
        module = load_file(stage_path(stage).with_name(f"{name}.py"), name)
        around = getattr(module, name)(how, folder, load_stage(stage))
    with around:
        return job(stage, argv)
