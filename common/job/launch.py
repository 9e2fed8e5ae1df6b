"""What launchers set, and how the processes of a job start, fail and end."""

import atexit
import contextlib
import os
import platform
import re
import resource
import signal
import socket
import sys
import time
import traceback
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from common.distributed import World, join, print0, say

# what Gloo and NCCL report when the process at the other end of a connection has gone
PEER_IS_GONE = re.compile(
    "(?s)gloo/transport.*(Connection (closed|reset) by peer|Broken pipe)|remote process exited"
)

# Variables of each launcher: rank, rank on this node, ranks on this node, all ranks. The first
# launcher found counts: srun may have started torchrun, and mpirun may have used srun.
LAUNCHERS = {
    "torchrun": ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    "mpirun": [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "LOCAL_SIZE", "SIZE")],
    "srun": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"),
}
# numbers of ranks, of unsupported launchers too; RANKS: of unsupported ones that tell a rank alone
SIZES = [*(names[-1] for names in LAUNCHERS.values()), "PMI_SIZE", "FLUX_JOB_SIZE"]
SIZES += ["MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE"]
RANKS = ("PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE", "MP_CHILD")
JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")  # of srun and mpirun
HOW = "start with torchrun, srun or Open MPI's mpirun, or unset the launcher's variables"

GRACE = 2.0  # seconds that a failing rank waits before it exits: launchers then end the other ranks


@dataclass(frozen=True)
class Launch:
    """What the launcher's variables say; local: on this node."""

    launcher: str  # torchrun, srun, mpirun, or python for one process
    rank: int
    local_rank: int
    local_size: int
    size: int


def launch_environment() -> Launch:
    """Read the launcher's variables. Wrong ones end the process: one line, status 2."""
    sizes = {name: _number(name) for name in SIZES if name in os.environ}
    for launcher, (rank, local_rank, local_size, all_ranks) in LAUNCHERS.items():
        size = sizes.get(all_ranks, 0)
        if rank in os.environ and (size > 1 or launcher == "torchrun"):
            numbers = _number(rank), _number(local_rank, "0"), _number(local_size, "1")
            if numbers[0] >= size:
                fail_here(f"{rank} is {numbers[0]}, but {all_ranks} is {size}: {HOW}")
            return Launch(launcher, *numbers, size)
    found = [name for name in (*SIZES, *RANKS) if name in os.environ]
    if any(size > 1 for size in sizes.values()) or (found and not sizes):
        said = " ".join(f"{name}={os.environ[name]}" for name in found)
        fail_here(f"{said}: not a launcher that is supported: {HOW}")
    return Launch("python", 0, 0, 1, 1)


def _number(name: str, default: str = "") -> int:
    """The number that a variable begins with: SLURM_STEP_TASKS_PER_NODE may be 4(x2)."""
    text = os.environ.get(name, default)
    if not (number := re.match(r"\d+", text)):
        fail_here(f"{name} is {text!r}: {HOW}")
    return int(number[0])


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else launch_environment().rank


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else launch_environment().size


@lru_cache
def prepare_streams() -> None:
    """Make stdout and stderr safe to print to, also if closed or full."""
    # the next file that is opened would take the place of a closed stream (2>&-)
    while os.open(os.devnull, os.O_RDWR) < 3:
        pass
    sys.stdout, sys.stderr = (x or open(os.devnull, "w") for x in (sys.stdout, sys.stderr))

    @atexit.register
    def flush() -> None:
        """At the exit Python flushes stdout, and would turn an error there into status 120."""
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1 if stream is sys.stdout else 2)


def setup(timeout: float = 600.0) -> World:
    """Join the process group that the launcher's environment describes; see `join`.

    timeout: seconds after which a collective that hangs is an error.
    """
    prepare_streams()
    launch = launch_environment()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # Gloo connects all ranks, once per group
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    device, backend = _device_and_backend(launch)
    _check_store()
    if launch.local_size < launch.size and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        how = "source slurm/env.sh sets both, mpirun -x NAME passes them on"
        fail(f"ranks on several nodes need MASTER_ADDR and MASTER_PORT: {how}")
    host = os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    # each job of a node has a port of its own: with a shared one, a rank could join another job
    job = "".join(os.environ.get(name, "") for name in JOB)
    port = os.environ.setdefault("MASTER_PORT", str(20000 + zlib.crc32(job.encode()) % 12000))
    try:
        socket.getaddrinfo(host, port)  # PyTorch would try until the timeout
        return join(World(launch.rank, launch.size, device), backend, timeout)
    except (OSError, ValueError, dist.DistNetworkError) as error:  # perhaps on this node alone
        where = f"{platform.node()} cannot join the others at {host}, port {port}"
        fix = "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there"
        fail_here(f"{where}: {error}: {fix}")


def _device_and_backend(launch: Launch) -> tuple[torch.device, str]:
    """NCCL for GPU tensors and Gloo for CPU tensors; Gloo for both where ranks share a GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    count = torch.cuda.device_count()
    device = torch.device("cuda", launch.local_rank % count)
    torch.cuda.set_device(device)
    # srun may show each task its own GPU only: then one visible GPU is not a shared one
    shared = launch.local_size > count and not (launch.launcher == "srun" and count == 1)
    if shared and launch.rank == 0:
        say(f"{launch.local_size} ranks share {count} GPUs, so messages go over Gloo, not NCCL")
    return device, "cpu:gloo,cuda:gloo" if shared else "cpu:gloo,cuda:nccl"


def _check_store() -> None:
    """Fail if a restart would find the addresses of processes that are gone.

    torchrun's own store outlives it: https://github.com/pytorch/pytorch/issues/135712.
    """
    env = os.environ
    restarts = int(env.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
    if restarts and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        needs = "--standalone (or --rdzv-backend c10d) and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        fail(f"torchrun --max-restarts needs {needs}")


def cleanup() -> None:
    """Destroy the process group. Call it in a `finally`: an error is reported first.

    After an error it exits at once: other ranks learn of it from closed connections or launchers.
    If another rank has failed first, it waits for the launcher, which takes the first process that
    exits for the cause and ends the rest, and then prints a line without a traceback.
    """
    error = sys.exc_info()[1]
    if error is None or isinstance(error, SystemExit):
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    if isinstance(error, KeyboardInterrupt):
        interrupt()
    text = "".join(traceback.format_exception(error))
    if "timed out" in text.lower() or "Application timeout" in text:  # Gloo has both
        text += "No answer within --timeout: another rank hangs, was stopped, or is far behind.\n"
    if has_lost_a_peer(error):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(GRACE)
        text = f"another rank is gone: {error}"
    say(f"[rank {rank()} of {world_size()}, {platform.node()}] {text}", file=sys.stderr)
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)  # for torchrun's report
    os._exit(1)


def interrupt(*_) -> NoReturn:
    """Ctrl-C is not a failure: one line, no traceback."""
    print0("\ninterrupted", file=sys.stderr)
    os._exit(130)  # without waiting for the other ranks


def has_lost_a_peer(error: BaseException | None) -> bool:
    """Whether nothing but the connection to another rank has failed here."""
    if error is None:
        return True
    is_gone = isinstance(error, RuntimeError) and bool(PEER_IS_GONE.search(str(error)))
    is_gone |= isinstance(error, dist.DistNetworkError)  # rank 0's store is gone
    return is_gone and has_lost_a_peer(error.__cause__ or error.__context__)


def fail(message: str, status: int = 2) -> NoReturn:
    """Print one line on stderr, once for the whole job, and exit with `status` (2: wrong usage).

    Before `setup` rank 0 prints, which may start last. After it the first rank that fails does: it
    may be the only one. A launcher that sees one process exit terminates the rest, so each waits
    for those that come later. Before `setup`, any rank still alive after that prints, too.
    """
    size, has_joined = world_size(), dist.is_initialized()
    prints = has_joined or rank() == 0
    if has_joined:
        time.sleep(GRACE / 2 if rank() > 0 else 0)  # so that rank 0 prints if it fails, too
        with contextlib.suppress(RuntimeError):  # the store may be gone: twice is better than never
            failed = dist.distributed_c10d._get_default_store().add("failed", 1)
            prints = (failed - 1) % size == 0  # a test's process group lives on and fails again
    if prints:
        where = f" (rank {rank()} on {platform.node()})" if rank() > 0 else ""
        say(f"{Path(sys.argv[0]).name}: {message}{where}", file=sys.stderr)
    if size > 1:
        # a launcher that terminates this rank while it waits gets the same status
        signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
        time.sleep(2 * GRACE if has_joined or prints else 5 * GRACE)
        if not (has_joined or prints):  # this rank still runs: rank 0 has not failed
            fail_here(message)
    raise SystemExit(status)


def fail_here(message: str) -> NoReturn:
    """Print one line on stderr and exit: for an error that other ranks may not have."""
    say(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(2)
