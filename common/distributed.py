"""The process group: who this process is, how it joins the others, how it leaves.

Everything here works without a process group too: one process is rank 0 of 1.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# what Gloo and NCCL say when the process at the other end of a connection is gone
PEER_IS_GONE = re.compile(
    "gloo/transport.*(Connection (closed|reset) by peer|Broken pipe)|remote process exited",
    re.DOTALL,
)

GRACE = 2.0  # seconds for which a rank that ends waits for the others, before a launcher ends them


@dataclass(frozen=True)
class World:
    """This process among all: global rank, rank on its node, number of processes, device."""

    rank: int
    local_rank: int
    size: int
    device: torch.device


@dataclass(frozen=True)
class Launch:
    """What a launcher's environment says of this process.

    address: host and port of rank 0, None for one process; the host is "" where it is not told.
    """

    launcher: str
    rank: int
    local_rank: int
    local_size: int
    size: int
    address: tuple[str, int] | None


def launch_environment() -> Launch:
    """Read torchrun's, Slurm's (`srun python`) or Open MPI's environment, in this order.

    Inside `sbatch` but outside `srun` the batch shell has SLURM_PROCID=0 and the job's
    SLURM_NTASKS; only a step has SLURM_STEP_NUM_TASKS, so that is what tells.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        address = env.get("MASTER_ADDR", "127.0.0.1"), int(env.get("MASTER_PORT", 29500))
        local_rank, size = int(env.get("LOCAL_RANK", 0)), int(env["WORLD_SIZE"])
        local_size = int(env.get("LOCAL_WORLD_SIZE", 1))
        return Launch("torchrun", int(env["RANK"]), local_rank, local_size, size, address)
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        size, job = int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_JOB_ID"])
        local_size = size // int(env.get("SLURM_STEP_NUM_NODES", 1))
        port = 20000 + (job * 7 + int(env.get("SLURM_STEP_ID", 0))) % 20000
        address = env.get("MASTER_ADDR", ""), int(env.get("MASTER_PORT", port))
        rank, local_rank = int(env["SLURM_PROCID"]), int(env["SLURM_LOCALID"])
        return Launch("srun", rank, local_rank, local_size, size, address)
    if int(env.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        rank, size = int(env["OMPI_COMM_WORLD_RANK"]), int(env["OMPI_COMM_WORLD_SIZE"])
        local_size = int(env["OMPI_COMM_WORLD_LOCAL_SIZE"])
        host = "127.0.0.1" if local_size == size else ""
        # a port per mpirun: its job id is shared by its processes and by nobody else here
        job = sum(map(ord, env.get("PMIX_NAMESPACE", "")))
        address = env.get("MASTER_ADDR", host), int(env.get("MASTER_PORT", 20000 + job))
        local_rank = int(env["OMPI_COMM_WORLD_LOCAL_RANK"])
        return Launch("mpirun", rank, local_rank, local_size, size, address)
    return Launch("python", 0, 0, 1, 1, None)


def _host_of_rank_0(launcher: str) -> str:
    if launcher == "mpirun":
        refuse("mpirun over several nodes needs MASTER_ADDR: pass -x MASTER_ADDR=<rank 0's>")
    nodes = os.environ["SLURM_STEP_NODELIST"]
    hosts = subprocess.run(
        ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
    )
    return hosts.stdout.split()[0]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else launch_environment().rank


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else launch_environment().size


def setup(timeout: float = 600.0) -> World:
    """Start the process group from the launcher's environment, or join the one that exists.

    timeout: seconds after which a collective that hangs is an error.
    Gloo on CPU; on GPUs NCCL for their tensors and Gloo for the CPU's. Where several processes
    share a GPU, which NCCL refuses, Gloo serves both.
    """
    launch = launch_environment()
    device, backend = _device_and_backend(launch)
    if not dist.is_initialized():
        where: dict[str, Any] = {"store": dist.HashStore()}
        if launch.address is not None:
            host, port = launch.address
            where = {"init_method": f"tcp://{host or _host_of_rank_0(launch.launcher)}:{port}"}
            if launch.launcher == "torchrun":
                where = {"init_method": "env://"}  # reuses the store that torchrun has opened
            if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
                where = {"store": _store_of_this_attempt(launch, timedelta(seconds=timeout))}
        # no device_id: with one, all messages of a group would share one NCCL communicator, where a
        # pipeline's early receive blocks the sends behind it; now each pair of ranks has its own
        dist.init_process_group(
            backend,
            rank=launch.rank,
            world_size=launch.size,
            timeout=timedelta(seconds=timeout),
            **where,
        )
    return World(dist.get_rank(), launch.local_rank, dist.get_world_size(), device)


def _store_of_this_attempt(launch: Launch, timeout: timedelta) -> dist.Store:
    """A store of rank 0's own, whose port it tells in torchrun's.

    That one outlives a restart, and the addresses in it are of processes that are gone
    (https://github.com/pytorch/pytorch/issues/135712). So may be the port: then nobody listens.
    """
    host, port = launch.address
    shared = dist.TCPStore(host, port, timeout=timeout, wait_for_workers=False)
    if launch.rank == 0:
        store = dist.TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        shared.set("port", str(store.port))
        return store
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        at = int(shared.get("port"))
        try:
            with socket.create_connection((host, at), timeout=1):
                return dist.TCPStore(host, at, timeout=timeout, wait_for_workers=False)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _device_and_backend(launch: Launch) -> tuple[torch.device, str]:
    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    count = torch.cuda.device_count()
    device = torch.device("cuda", launch.local_rank % count)
    torch.cuda.set_device(device)
    # srun may show each task its own GPU alone: then one visible GPU is not a shared one
    shared = launch.local_size > count and not (launch.launcher == "srun" and count == 1)
    return device, "cpu:gloo,cuda:gloo" if shared else "cpu:gloo,cuda:nccl"


def group_along(shape: Sequence[int], axis: int, name: str, timeout: float) -> dist.ProcessGroup:
    """This rank's group along one axis of a mesh of all ranks, whose last axis is innermost.

    Every rank calls it, in the same order. `init_device_mesh` makes such groups too, but gives
    them a time-out of its own, ten to thirty minutes, whatever `setup` was told.
    """
    size, stride = shape[axis], prod(shape[axis + 1 :])
    firsts = (rank for rank in range(prod(shape)) if rank // stride % size == 0)
    lines = [[first + i * stride for i in range(size)] for first in firsts]
    group, _ = dist.new_subgroups_by_enumeration(
        lines, timeout=timedelta(seconds=timeout), group_desc=name
    )
    return group


def cleanup() -> None:
    """End the process group. When an error is on its way: report it with its rank first.

    Call it in a `finally`. The others learn of a failure by the closing of connections, or by
    their launcher; they must not be waited for, so after an error nothing is synchronised.
    """
    error = sys.exc_info()[1]
    if error is not None and not isinstance(error, SystemExit):
        _report(error)
        os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)
    if dist.is_initialized():
        dist.destroy_process_group()


def _report(error: BaseException) -> None:
    """The traceback on stderr, and in the file that torchrun's own report reads.

    Where another rank has failed first, one line: that rank, or the launcher, says why. Then wait
    for the launcher, which takes the first process that exits for the cause.
    """
    if isinstance(error, KeyboardInterrupt):
        print0("interrupted", file=sys.stderr)
        return
    text = "".join(traceback.format_exception(error))
    if "timed out" in text.lower() or "Application timeout" in text:  # Gloo has both
        text += "No answer within --timeout: another rank hangs, was stopped, or is far behind.\n"
    lost = has_lost_a_peer(error)
    if lost:
        text = f"another rank is gone, as seen in {_summary(error)}"
    print(f"[rank {rank()} of {world_size()}] {text}", file=sys.stderr, flush=True)
    if lost:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(GRACE)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def has_lost_a_peer(error: BaseException | None) -> bool:
    """Whether the connection to another rank is all that has failed here."""
    while error is not None:
        if not (isinstance(error, RuntimeError) and PEER_IS_GONE.search(str(error))):
            return False
        error = error.__cause__ or error.__context__
    return True


def _summary(error: BaseException) -> str:
    """The innermost line of this repository that the error has passed, and its message."""
    repo = Path(__file__).resolve().parents[1]
    frames = traceback.extract_tb(error.__traceback__)
    *_, frame = [f for f in frames if Path(f.filename).is_relative_to(repo)] or frames
    return f"{frame.name} ({frame.filename}:{frame.lineno}): {error}"


def print0(*values: Any, **kwargs: Any) -> None:
    """`print` on rank 0, at once."""
    if rank() == 0:
        print(*values, **{"flush": True, **kwargs})


def save0(obj: Any, path: str | os.PathLike) -> None:
    """`torch.save` on rank 0: whole or not at all, for it is written aside and renamed."""
    if rank() == 0:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        torch.save(obj, aside)
        aside.replace(path)


def refuse(message: str, status: int = 2) -> NoReturn:
    """One line on stderr, once for the whole job, then exit with `status` (2: wrong usage).

    Every rank must come to the same refusal. The others wait for rank 0 to speak, because a
    launcher that sees one process fail ends the rest, and rank 0 may start last. Being ended in
    that wait is what they hope for, and no failure of their own.
    """
    if rank() == 0:
        print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
        if dist.is_initialized() and world_size() > 1:
            time.sleep(GRACE)  # past `setup` the others are near, and come to their own end
    elif world_size() > 1:
        try:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
        except ValueError:
            pass  # not the main thread
        time.sleep(2 * GRACE if dist.is_initialized() else 5 * GRACE)
    raise SystemExit(status)
