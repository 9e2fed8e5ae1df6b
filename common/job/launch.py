"""What launchers set, and how the processes of a job start, fail and end."""

import atexit
import contextlib
import io
import os
import platform
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
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

# launchers that are not supported: their number of processes, or a rank where there is none
OTHER_SIZES = ("PMI_SIZE", "FLUX_JOB_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE")
OTHER_RANKS = ("PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE", "MP_CHILD")

GRACE = 2.0  # seconds that a failing rank waits before it exits: launchers then end the other ranks


@dataclass(frozen=True)
class Launch:
    """What the launcher's variables say; local: on this node."""

    launcher: str  # torchrun, srun, mpirun, or python for one process
    rank: int
    local_rank: int
    local_size: int
    size: int
    address: tuple[str, int] | None  # host ("" if unknown) and port of rank 0; None: one process


def launch_environment() -> Launch:
    """Read and check the launcher's variables. Wrong ones end the process: one line, status 2."""
    try:
        launch = _read_environment()
        port = launch.address[1] if launch.address else 1
        is_local = 0 <= launch.local_rank and 1 <= launch.local_size
        if not (0 <= launch.rank < launch.size and is_local and 0 < port < 2**16):
            raise ValueError("a rank is below the number of ranks, a port below 65536")
        return launch
    except (KeyError, ValueError) as error:
        why = f"{error.args[0]} is not set" if isinstance(error, KeyError) else str(error)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    given = " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    why = f"{why}; start with torchrun, srun or Open MPI's mpirun, or unset them for one process"
    fail_here("the launcher's variables are wrong: " + ": ".join(filter(None, (given, why))))


def _read_environment() -> Launch:
    """Read torchrun's variables, or translate those of `srun python` or Open MPI into them."""
    env = os.environ  # below, `ranks` are: rank, rank on the node, ranks on the node, all ranks
    has_size = any(n in env for n in (*OTHER_SIZES, "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"))
    if "RANK" in env:
        launcher, host, port = "torchrun", "127.0.0.1", 29500
        local = env.get("LOCAL_RANK", 0), env.get("LOCAL_WORLD_SIZE", 1)
        ranks = env["RANK"], *local, env["WORLD_SIZE"]
    elif int(env.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:  # mpirun may have used srun to start
        ranks = [env[f"OMPI_COMM_WORLD_{n}"] for n in ("RANK", "LOCAL_RANK", "LOCAL_SIZE", "SIZE")]
        launcher, host = "mpirun", "127.0.0.1" if ranks[2] == ranks[3] else ""
        port = 20000 + sum(map(ord, env.get("PMIX_NAMESPACE", "")))  # unique to this mpirun here
    elif int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:  # a batch shell has SLURM_PROCID, too
        launcher, host = "srun", ""
        port = 20000 + (7 * int(env["SLURM_JOB_ID"]) + int(env.get("SLURM_STEP_ID", 0))) % 12000
        size = int(env["SLURM_STEP_NUM_TASKS"])
        local = env["SLURM_LOCALID"], size // int(env.get("SLURM_STEP_NUM_NODES", 1))
        ranks = env["SLURM_PROCID"], *local, size
    elif env.get("WORLD_SIZE", "1") != "1":
        raise KeyError("RANK")
    else:
        others = [f"{name}={env[name]}" for name in OTHER_SIZES if int(env.get(name, 1)) > 1]
        others += [f"{n}={env[n]}" for n in OTHER_RANKS if n in env and not has_size]
        if others:
            raise ValueError(f"{' '.join(others)}: not a launcher that is supported")
        return Launch("python", 0, 0, 1, 1, None)
    address = env.get("MASTER_ADDR", host), int(env.get("MASTER_PORT", port))
    return Launch(launcher, *map(int, ranks), address)


def _host_of_rank_0(launcher: str) -> str:
    if launcher == "mpirun":
        fail("mpirun over several nodes needs MASTER_ADDR: pass -x MASTER_ADDR=<rank 0's>")
    command = ["scontrol", "show", "hostnames", os.environ.get("SLURM_STEP_NODELIST", "")]
    try:
        return subprocess.check_output(command, stderr=subprocess.PIPE, text=True).split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        fail(f"{' '.join(command)}: {error!r}: set MASTER_ADDR to the host of rank 0")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else launch_environment().rank


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else launch_environment().size


@lru_cache
def prepare_streams() -> None:
    """Make stdout and stderr safe to print to, also if closed, full, or of few characters."""
    # the next file that is opened would take the place of a closed stream (2>&-)
    while os.open(os.devnull, os.O_RDWR) < 3:
        pass
    sys.stdout, sys.stderr = (x or open(os.devnull, "w") for x in (sys.stdout, sys.stderr))
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may have characters it cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")

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
    init_method = None if dist.is_initialized() else _init_method(launch)
    device, backend = _device_and_backend(launch)
    try:
        return join(World(launch.rank, launch.size, device), backend, init_method, timeout)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        where = f"port {launch.address[1]} of {platform.node()}"
        fail_here(f"{where} is taken by another program: set MASTER_PORT to another one")


def _device_and_backend(launch: Launch) -> tuple[torch.device, str]:
    """NCCL for GPU tensors and Gloo for CPU tensors; Gloo for both where ranks share a GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    count = torch.cuda.device_count()
    device = torch.device("cuda", launch.local_rank % count)
    torch.cuda.set_device(device)
    # srun may show each task its own GPU only: then one visible GPU is not a shared one
    shared = launch.local_size > count and not (launch.launcher == "srun" and count == 1)
    return device, "cpu:gloo,cuda:gloo" if shared else "cpu:gloo,cuda:nccl"


def _init_method(launch: Launch) -> str | None:
    if launch.launcher == "torchrun":
        _check_store()
        return "env://"
    if launch.address is None:
        return None
    host, port = launch.address[0] or _host_of_rank_0(launch.launcher), launch.address[1]
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:  # perhaps on this node alone
        fail_here(f"{platform.node()} cannot find the host of rank 0, {host}: {error}")
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


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
    """
    error = sys.exc_info()[1]
    if isinstance(error, KeyboardInterrupt):
        interrupt()
    if error is not None and not isinstance(error, SystemExit):
        _report(error)
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()


def interrupt(*_) -> NoReturn:
    """Ctrl-C is not a failure: one line, no traceback."""
    print0("\ninterrupted", file=sys.stderr)
    os._exit(130)  # without waiting for the other ranks


def _report(error: BaseException) -> None:
    """Print the traceback, and write it to the file that torchrun's report reads.

    If another rank has failed first, print one line instead, and wait for the launcher, which takes
    the first process that exits for the cause.
    """
    text = "".join(traceback.format_exception(error))
    if "timed out" in text.lower() or "Application timeout" in text:  # Gloo has both
        text += "No answer within --timeout: another rank hangs, was stopped, or is far behind.\n"
    lost = has_lost_a_peer(error)
    if lost:  # name the innermost line of this repository
        repo = Path(__file__).resolve().parents[2]
        frames = traceback.extract_tb(error.__traceback__)
        *_, frame = [f for f in frames if Path(f.filename).is_relative_to(repo)] or frames
        place = f"{frame.name} ({frame.filename}:{frame.lineno})"
        text = f"another rank is gone, as seen in {place}: {error}"
    where = f"rank {rank()} of {world_size()}, {platform.node()}"
    say(f"[{where}] {text}", file=sys.stderr)
    if lost:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(GRACE)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def has_lost_a_peer(error: BaseException | None) -> bool:
    """Whether nothing but the connection to another rank has failed here."""
    while error is not None:
        if not (isinstance(error, RuntimeError) and PEER_IS_GONE.search(str(error))):
            return False
        error = error.__cause__ or error.__context__
    return True


def fail(message: str, status: int = 2) -> NoReturn:
    """Print one line on stderr, once for the whole job, and exit with `status` (2: wrong usage).

    Before `setup` rank 0 prints, which may start last. After it the first rank that fails does: it
    may be the only one. A launcher that sees one process exit terminates the rest, so each waits
    for those that come later.
    """
    size, has_joined = world_size(), dist.is_initialized()
    prints = has_joined or rank() == 0
    if has_joined:
        with contextlib.suppress(RuntimeError):  # the store may be gone: twice is better than never
            failed = dist.distributed_c10d._get_default_store().add("failed", 1)
            prints = (failed - 1) % size == 0  # a test's process group lives on and fails again
    if prints:
        where = f" (rank {rank()} on {platform.node()})" if rank() > 0 else ""
        say(f"{Path(sys.argv[0]).name}: {message}{where}", file=sys.stderr)
    if size > 1:
        with contextlib.suppress(ValueError):  # not in the main thread
            # a launcher that terminates this rank while it waits gets the same status
            signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
        time.sleep(GRACE if has_joined or prints else 5 * GRACE)
    raise SystemExit(status)


def fail_here(message: str, status: int = 2) -> NoReturn:
    """Print one line on stderr and exit: for an error that other ranks may not have."""
    say(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(status)
