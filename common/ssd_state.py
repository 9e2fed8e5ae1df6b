"""The files of stage 12: each rank has one per unit, with the unit's state and gradient.

    slot 0      parameters, first moment, second moment: float32 [3, length]
    slot 1      the same: one slot is current, the other one is being written
    gradient    float32 [length]

`step.json` says which slot is current. It is replaced atomically, so after a kill at any moment it
names a slot that is complete. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from common.collectives import all_reduce_control
from common.distributed import fail, print0, warn

PAGE = 1024  # float32 elements, 4,096 bytes
SLOT, GRADIENT, ROWS = 3, 6, 7  # rows of a slot, the gradient's row, rows of a file
RECORD = ("step", "slot", "content", "boot", "settings")  # attributes that `step.json` has


class StateFile:
    """The state of one unit: rows of `length` elements, `stride` elements apart, in whole pages.

    Direct I/O bypasses the page cache, which would hold the state in memory again. It needs whole
    pages, in memory too. shard: the parameters, [length], to begin with, unless it is restored.
    """

    def __init__(self, folder: StateFolder, name: str, shard: Tensor):
        self.folder, self.path, self.length = folder, folder.path / f"{name}.state", len(shard)
        self.stride = -(-self.length // PAGE) * PAGE
        with one_line(self.path):
            self.handle = open_direct(self.path, 4 * ROWS * self.stride, folder.is_restored)
            if not folder.is_restored:
                rows = self.empty(SLOT).zero_()
                rows[0] = shard
                self.write(0, rows)
        folder.files.append(self)

    def empty(self, n_rows: int) -> Tensor:
        """Memory for rows, [n_rows, length], which begins at a page."""
        size, pinned = n_rows * self.stride, torch.cuda.is_available()  # for copies to a GPU
        memory = torch.empty(size + PAGE, dtype=torch.float32, device="cpu", pin_memory=pinned)
        start = -memory.data_ptr() // 4 % PAGE
        return memory[start : start + size].view(n_rows, -1)[:, : self.length]

    def read(self, row: int, n_rows: int = 1) -> Tensor:
        rows = self.empty(n_rows)
        self._move(os.preadv, row, rows, "ssd_read_mb")
        return rows

    def write(self, row: int, rows: Tensor) -> None:
        """`rows` are those of `empty` or `read`."""
        self._move(os.pwritev, row, rows, "ssd_written_mb")

    def _move(self, way: Callable, row: int, rows: Tensor, metric: str) -> None:
        """Whole pages, padding included."""
        pages = rows.as_strided((len(rows) * self.stride,), (1,)).numpy()
        data, place = memoryview(pages).cast("B"), 4 * self.stride * row
        with self.folder.counting:
            self.folder.traffic[metric] += len(data) / 1e6
        while data:  # Linux moves at most 2 GB at once; on macOS, more is an error
            count = way(self.handle, [data[: 2**30]], place)
            if count == 0:
                raise OSError(5, f"{self.path.name} is truncated")
            data, place = data[count:], place + count

    def mapped(self) -> Tensor:
        """The current slot, [3, length], for a checkpoint: memory only for the pages in use."""
        size = ROWS * self.stride
        rows = torch.from_file(str(self.path), True, size, dtype=torch.float32).view(ROWS, -1)
        return rows[self.folder.slot :][:SLOT, : self.length]


class StateFolder:
    """The files of this rank, which slot of them is current, and threads that read and write.

    Every rank makes one, and opens the same units in the same order. content: the run, and the
    model, that the files must fit; JSON. saved: steps of the run's newest checkpoint. If the run
    `is_resumed`, it goes on from the files, unless a rank lacks them or they have fewer steps.
    settings: of the run, JSON; `earlier` has those of the run that wrote the files.
    """

    def __init__(
        self, path: Path, content: dict, is_resumed: bool, saved: int, settings: dict | None = None
    ):
        self.path = path / f"rank-{dist.get_rank()}"
        self.content, self.settings = content | {"ranks": dist.get_world_size()}, settings
        self.files: list[StateFile] = []
        self.step = 0  # steps done, whose state is in the current slot
        self.slot = 0  # its first row, 0 or 3
        self.threads = ThreadPoolExecutor(6)
        self.jobs: dict[StateFile, Future] = {}  # the oldest first
        self.traffic: Counter[str] = Counter()  # MB since the last commit, by the metric's name
        self.counting = threading.Lock()
        self.lock = lock_folder(self.path)
        self.boot = boot_id()
        self.is_restored = self.restore(is_resumed, saved)
        self.committed = self.step
        return_freed_memory()

    def start(self, file: StateFile, function: Callable, *args) -> None:
        """Start function(file, ...) in a thread, one per file and three in all: else a disk that is
        slow would fill the memory with buffers."""
        self.wait(at_most=0 if file in self.jobs else 2)
        self.jobs[file] = self.threads.submit(function, file, *args)

    def wait(self, at_most: int = 0) -> None:
        """Wait until at most so many of the jobs are in flight."""
        while len(self.jobs) > at_most:
            self.finish(self.jobs.pop(next(iter(self.jobs))))

    def finish(self, job: Future):
        """The result of a job. If reading or writing has failed, the run ends."""
        with one_line(self.path, "; it keeps the last step that was done", status=1):
            return job.result()

    def commit(self) -> None:
        """Make `step` and `slot` what a resumed run goes on from."""
        aside = self.path / "step.json.new"
        with one_line(self.path, "; it keeps the previous step", status=1):
            aside.write_text(json.dumps({name: getattr(self, name) for name in RECORD}))
            aside.replace(self.path / "step.json")
        self.committed = self.step
        self.traffic.clear()

    def close(self) -> None:
        self.threads.shutdown()
        for file in self.files:
            os.close(file.handle)
        self.lock.close()

    # ---- recovery: the step that a run goes on from ----

    def restore(self, is_resumed: bool, saved: int) -> bool:
        """Agree with all ranks on a step, -1 without a record, or delete files of no use."""
        found = {"step": -1, "boot": self.boot, "content": self.content, "settings": None}
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            record = json.loads((self.path / "step.json").read_text())
            found = {name: record[name] for name in RECORD}
        self.earlier = found["settings"]
        fits = is_resumed and found["content"] == self.content
        # before a restart of the machine, what was written last may not have reached the disk
        step = found["step"] if fits and found["boot"] == self.boot else -1
        bounds = all_reduce_control(torch.tensor([step, -step, -saved]), op=dist.ReduceOp.MIN)
        lowest, highest, saved = bounds[0].item(), -bounds[1].item(), -bounds[2].item()
        # a rank may have been killed before it committed what another one has committed
        if lowest >= saved and highest <= lowest + 1:
            self.step, self.slot = lowest, found["slot"] if step == lowest else SLOT - found["slot"]
            if step != lowest:
                self.commit()  # the slot that `step.json` names will be overwritten
            print0(f"resumed from {self.path.parent}, {lowest} steps done")
            return True
        if found["content"]["run"] != self.content["run"] or (found["step"] > saved and not fits):
            was = found["content"].get
            differ = [f"{k} {was(k)}, here {v}" for k, v in self.content.items() if was(k) != v]
            what = f"step {found['step']} of {'; '.join(differ) or 'this run'}"
            fail(f"--offload-dir: {self.path} holds {what}: pass another folder, or delete it")
        all_reduce_control(torch.zeros(()))  # if a rank has failed here, no other deletes its files
        if found["step"] > saved:
            why = "the machine restarted, or a rank lacks its files"
            warn(f"--offload-dir: {self.path}: step {found['step']} is dropped: {why}")
        for path in [self.path / "step.json", *self.path.glob("*.state")]:
            path.unlink(missing_ok=True)
        return False


@contextlib.contextmanager
def one_line(path: Path, consequence: str = "", status: int = 2) -> Iterator[None]:
    """If the file system fails, end the run with one line."""
    try:
        yield
    except OSError as error:
        fail(f"--offload-dir: {path}: {error.strerror}{consequence}", status)


def boot_id() -> str:
    """A name that changes when the machine restarts."""
    path = Path("/proc/sys/kernel/random/boot_id")
    macos = ["sysctl", "-n", "kern.bootsessionuuid"]
    return path.read_text() if path.exists() else subprocess.check_output(macos, text=True)


def lock_folder(path: Path) -> TextIO:
    """Make a folder, for one user at a time. Returns a file: closed, it frees the folder."""
    with one_line(path):
        path.mkdir(parents=True, exist_ok=True)
        lock = open(path / "lock", "a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"--offload-dir: another run uses {path}: pass another folder")
    kind = subprocess.run(["stat", "-fc", "%T", path], capture_output=True, text=True)
    if kind.stdout.strip() in ("tmpfs", "ramfs"):
        warn(f"--offload-dir: {path} is in memory, and saves none")
    return lock


def open_direct(path: Path, size: int, is_restored: bool) -> int:
    """Open a file for direct I/O. It gets `size` bytes, which it must have if it `is_restored`."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    if is_restored and (has := os.fstat(handle).st_size) != size:
        fail(f"{path} has {has:,} bytes instead of {size:,}: delete its folder to start anew")
    if hasattr(os, "posix_fallocate"):  # a full disk is an error now, not in a step
        os.posix_fallocate(handle, 0, size)
    else:  # on macOS
        os.ftruncate(handle, size)
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, os.O_DIRECT)
    except (OSError, AttributeError):  # macOS has no O_DIRECT
        warn(f"--offload-dir: {path.parent} has no direct I/O: the page cache takes memory")
    return handle


def return_freed_memory() -> None:
    """Make glibc return large buffers to the system when they are freed: else what it keeps of them
    in fragments grows with the number of units. `Run` asks for the opposite, before this."""
    with contextlib.suppress(OSError, AttributeError):  # without glibc
        ctypes.CDLL("libc.so.6").mallopt(-3, 2**17)  # M_MMAP_THRESHOLD of malloc.h, bytes
