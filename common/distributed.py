"""The ranks: how a process joins the others, and what rank 0 does for all of them.

A script calls `setup` of `common/job/launch.py`: it reads what torchrun, srun or mpirun has set,
and calls `join`. Everything works without a process group too: one process is rank 0 of 1.
"""

import contextlib
import errno
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """This process: its rank, the number of processes, its device."""

    rank: int
    size: int
    device: torch.device


def join(world: World, backend: str, timeout: float) -> World:
    """Start the process group together with the other processes, or take the one that exists.

    world: as the launcher says. backend: NCCL or Gloo, for each kind of device. timeout: seconds.
    Rank 0 waits for the others at MASTER_ADDR and MASTER_PORT.
    """
    if not dist.is_initialized():
        store = dist.HashStore() if world.size == 1 else None
        ranks = {"rank": world.rank, "world_size": world.size, "store": store}
        # Without device_id, NCCL has one communicator per pair of ranks for messages. With it, all
        # of a group's messages share one, where a pipeline's early receive blocks later sends.
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **ranks)
    return World(dist.get_rank(), dist.get_world_size(), world.device)


def group_along(shape: Sequence[int], axis: int, name: str, timeout: float) -> dist.ProcessGroup:
    """This rank's group along one axis of a mesh of all ranks, whose last axis is innermost.

    Every rank calls it, in the same order. (`init_device_mesh` takes no timeout.)
    """
    size, stride = shape[axis], prod(shape[axis + 1 :])
    firsts = (rank for rank in range(prod(shape)) if rank // stride % size == 0)
    groups = [[first + i * stride for i in range(size)] for first in firsts]
    return dist.new_subgroups_by_enumeration(groups, timedelta(seconds=timeout), group_desc=name)[0]


def print0(*values: object, **kwargs: object) -> None:
    if _is_rank_0():
        say(*values, **kwargs)


def save0(state: object, path: str | os.PathLike) -> None:
    """`torch.save` on rank 0, to a file that is complete or absent."""
    if _is_rank_0():
        try:
            with replacing(path) as file:
                torch.save(state, file)
        except RuntimeError as error:  # PyTorch's, in place of the file's own
            raise error.__context__ or error from None


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` (or of what it links to) when complete."""
    path = Path(os.path.realpath(path))
    # not by the process id, which processes on other nodes or in other containers may have, too
    aside = path.with_name(f".writing-{secrets.token_hex(8)}")
    try:
        with open(aside, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to disk, where the file system can (some cannot)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise
        warn(f"{path} may be lost at a power failure: {error}")
    finally:
        os.close(handle)


def _is_rank_0() -> bool:
    return (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))) == 0


def say(*values: object, **kwargs: object) -> None:
    """`print`, flushed. A full disk or a closed terminal is reported once and ends no run."""
    try:
        print(*values, **{"flush": True, **kwargs})
    except (OSError, ValueError) as error:  # ValueError: of a closed file
        warn(f"a line could not be printed: {error}")


@lru_cache(maxsize=100)
def warn(message: str) -> None:
    """Print a line on stderr, once, where an error is no reason to end the run."""
    with contextlib.suppress(OSError, ValueError):
        print(f"{Path(sys.argv[0]).name}: {message} (the run continues)", file=sys.stderr)
        sys.stderr.flush()
