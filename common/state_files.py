"""A rank's files for stage 12: one per unit, with the unit's state in two slots, and a gradient.

    slot 0      parameters, first moment, second moment: float32 [3, length]
    slot 1      the same: one of the two counts, the other one is being written
    gradient    float32 [length]

Every row fills whole pages. `step.json` says which slot counts and how many steps it has done. It
is replaced atomically: after a kill at any moment it names a slot that is complete. Direct I/O
moves pages between the disk and a buffer, without the page cache, which would be memory too.
Nothing is flushed: after a restart of the machine, a run goes on from its checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed import fail, print0, warn
from common.files import move_aside

PAGE = 4096  # bytes
SLOT, GRADIENT, ROWS = 3, 6, 7  # rows of a slot, the gradient's row, rows of a file


class StateFolder:
    """The files of this rank. All ranks make one, and open the same units in the same order.

    path: the ranks' folders are in it. content: what it must belong to, JSON. is_resumed: go on
    from the files, if all ranks have them and they are as far as `saved`, the steps of the newest
    checkpoint. Else steps that no checkpoint has are moved aside. pinned: buffers for a GPU.
    """

    def __init__(
        self, path: str | Path, content: dict, is_resumed: bool, saved: int, pinned: bool = False
    ):
        self.path, self.content = Path(path) / f"rank-{dist.get_rank()}", content
        self.pinned, self.files = pinned, []
        self.step = self.slot = 0  # steps done, and the slot that holds them
        self.bytes_read = self.bytes_written = 0
        self.threads = ThreadPoolExecutor(6)  # three units are read, three updated
        self._counting, self._direct = threading.Lock(), getattr(os, "O_DIRECT", 0)
        self._claim()
        if file_system(self.path) in ("tmpfs", "ramfs"):
            warn(f"{self.path} is in memory ({file_system(self.path)}): it saves none")
        self.is_restored = self._restore(is_resumed, saved)

    def open(self, name: str, shard: Tensor) -> StateFile:
        """A unit's file. Unless it is restored, it gets the values of `shard`, and zeros."""
        file = StateFile(self, name, len(shard))
        self.files.append(file)
        if not self.is_restored:
            rows = file.empty(SLOT).zero_()
            rows[0] = shard
            self.finish(self.start(file.write, 0, rows))
        return file

    def start(self, function: Callable, *args) -> Future:
        return self.threads.submit(function, *args)

    def finish(self, job: Future):
        """The result of a job. If reading or writing has failed, the run ends."""
        try:
            return job.result()
        except OSError as error:
            fail(f"{self.path}: {error.strerror}; step {self.step} is kept there", status=1)

    def commit(self) -> None:
        """Make `step` and `slot` what a resumed run goes on from."""
        record = {"step": self.step, "slot": self.slot, "content": self.content, "boot": boot()}
        aside = self.path / "step.json.new"
        try:
            aside.write_text(json.dumps(record))
            aside.replace(self.path / "step.json")
        except OSError as error:
            fail(f"{self.path}: {error.strerror}; step {self.step - 1} is kept there", status=1)
        self.bytes_read = self.bytes_written = 0
        with contextlib.suppress(OSError, AttributeError):  # what glibc keeps grows with the units
            ctypes.CDLL("libc.so.6").malloc_trim(0)

    def traffic(self) -> dict[str, float]:
        """MB read and written since the last commit."""
        return {"ssd_read_mb": self.bytes_read / 1e6, "ssd_written_mb": self.bytes_written / 1e6}

    def close(self) -> None:
        self.threads.shutdown()
        for file in self.files:
            os.close(file.handle)
        self._lock.close()

    def open_file(self, path: Path, size: int) -> int:
        """Make a file of this size, or check the size; returns its handle."""
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT * (not self.is_restored) | self._direct)
        except OSError as error:
            if not self._direct or error.errno != 22:  # EINVAL
                fail(f"--offload-dir: {path}: {error.strerror}; its other files are untouched")
            warn(f"{self.path} has no direct I/O: the page cache takes memory")
            self._direct = 0
            return self.open_file(path, size)
        has = os.fstat(handle).st_size
        if self.is_restored and has != size:
            fix = "delete the folder to go on from a checkpoint"
            fail(f"--offload-dir: {path} has {has:,} bytes instead of {size:,}: {fix}")
        try:
            os.posix_fallocate(handle, 0, size)  # a full disk is an error now, not in a step
        except OSError as error:
            fail(f"--offload-dir: {path} of {size:,} bytes: {error.strerror}")
        return handle

    def move(self, way: Callable, file: StateFile, row: int, rows: Tensor) -> None:
        """Read (os.preadv) or write (os.pwritev) whole pages."""
        pages = rows.as_strided((len(rows) * file.stride,), (1,)).numpy()
        data, place = memoryview(pages).cast("B"), 4 * file.stride * row
        with self._counting:
            self.bytes_read += len(data) * (way == os.preadv)
            self.bytes_written += len(data) * (way == os.pwritev)
        while data:  # the system moves at most 2 GB at once
            count = way(file.handle, [data], place)
            if count == 0:
                raise OSError(5, f"{file.path.name} is truncated")
            data, place = data[count:], place + count

    def _claim(self) -> None:
        """Make the folder, and lock it until this process ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / "lock", "a")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"--offload-dir: another run uses {self.path}: pass another folder")
        except OSError as error:
            fail(f"--offload-dir: cannot write to {self.path}: {error.strerror}")

    def _restore(self, is_resumed: bool, saved: int) -> bool:
        """Agree with all ranks on a step that each of them has, if they go on from the files."""
        try:
            found = json.loads((self.path / "step.json").read_text())
        except FileNotFoundError:
            found = None
        except (OSError, ValueError) as error:
            fail(f"--offload-dir: {self.path}/step.json cannot be read: {error}")
        if found and found["boot"] != boot():  # what was written last may not be on the disk
            found["content"]["machine"] = "restarted since"
        every = [found]
        if is_resumed:
            every *= dist.get_world_size()
            dist.all_gather_object(every, found)
        records = [record for record in every if record]
        steps = [record["step"] for record in records]
        is_own = all(record["content"] == self.content for record in records)
        is_complete = len(records) == len(every) and max(steps) - min(steps) < 2
        if is_resumed and is_own and is_complete and min(steps) >= saved:
            # a rank may have been killed before it committed what another one has committed
            self.step, self.slot = min(steps), found["slot"] ^ (found["step"] > min(steps))
            return True
        for record in records:
            if record["content"]["run"] != self.content["run"]:
                what = f"step {record['step']} of the run {record['content']['run']}"
                fail(f"--offload-dir: {self.path.parent} holds {what}: pass another, or delete it")
        if found and found["step"] > saved:
            moved = move_aside(self.path, f"earlier-{self.path.name}")
            print0(f"{moved} is from before: step {found['step']} of {found['content']}")
            self._claim()
        (self.path / "step.json").unlink(missing_ok=True)
        return False


class StateFile:
    """The state of one unit: rows of `length` elements, `stride` elements apart."""

    def __init__(self, folder: StateFolder, name: str, length: int):
        self.folder, self.path, self.length = folder, folder.path / f"{name}.state", length
        self.stride = -(-length // (PAGE // 4)) * (PAGE // 4)
        self.handle = folder.open_file(self.path, 4 * ROWS * self.stride)

    def empty(self, n_rows: int) -> Tensor:
        """Memory for rows, [n_rows, length], which begins at a page."""
        size = n_rows * self.stride
        if self.folder.pinned:
            memory = torch.empty(size + PAGE // 4, pin_memory=True)
            start = -memory.data_ptr() % PAGE // 4
            memory = memory[start : start + size]
        else:  # not from malloc, whose fragments grow with the number of units
            memory = torch.frombuffer(mmap.mmap(-1, 4 * size), dtype=torch.float32)
        return memory.view(n_rows, -1)[:, : self.length]

    def read(self, row: int, n_rows: int = 1) -> Tensor:
        rows = self.empty(n_rows)
        self.folder.move(os.preadv, self, row, rows)
        return rows

    def write(self, row: int, rows: Tensor) -> None:
        """`rows` are those of `empty` or `read`."""
        self.folder.move(os.pwritev, self, row, rows)

    def mapped(self) -> Tensor:
        """The slot that counts, [3, length], for a checkpoint: memory only for the pages in use."""
        rows = torch.from_file(str(self.path), True, ROWS * self.stride).view(ROWS, -1)
        return rows[SLOT * self.folder.slot :][:SLOT, : self.length]


def file_system(path: Path) -> str:
    """Its type, as Linux lists it; elsewhere nothing."""
    try:
        device, lines = os.stat(path).st_dev, Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    return next((x.partition(" - ")[2].split()[0] for x in lines if x.split()[2] == number), "")


def boot() -> str:
    """What Linux calls the time since the machine started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
