"""The files of stage 12: each rank has one per unit, with the unit's state and gradient.

    slot 0      parameters, first moments, second moments: float32 [3, length]
    slot 1      the same: one slot is current, the other one is being written
    gradient    float32 [length]

`step.json` says which slot is current, and has the slots' checksums. It is replaced atomically, so
after a kill at any moment it names a slot that is complete. Direct I/O on Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from xxhash import xxh3_64_intdigest

from common.collectives import all_reduce_control
from common.distributed import print0, warn

from common.job.launch import fail

PAGE = 1024  # float32 elements, 4,096 bytes
DELETE = "delete its folder to resume from the newest checkpoint, if there is one"
SLOT = 3  # rows of a slot
GRADIENT = 2 * SLOT  # the gradient's row, which follows the two slots
ROWS = GRADIENT + 1  # of a file
# attributes of `StateFolder` that `step.json` has
RECORD = ("commits", "step", "previous", "slot", "checksums", "content", "boot", "description")


class StateFile:
    """The state of one unit: rows of `length` elements, each padded to whole pages (`stride`).

    Direct I/O bypasses the page cache, which would hold the state in memory again. It needs whole
    pages, in memory too. shard: the initial parameters, [length]; not used if the file is restored.
    """

    def __init__(self, folder: StateFolder, name: str, shard: Tensor):
        if shard.dtype != torch.float32:
            raise ValueError(f"the parameters of {name} are not float32")
        self.folder, self.path, self.length = folder, folder.path / f"{name}.state", len(shard)
        self.stride = -(-self.length // PAGE) * PAGE
        self.checksums = folder.checksums.setdefault(name, [None, None])  # of the two slots
        with exit_on_os_error(self.path):
            self.fd = open_direct(self.path, 4 * ROWS * self.stride, folder.is_restored)
            if folder.is_restored:
                self.verify()
            else:
                rows = self.empty(SLOT).zero_()
                rows[0] = shard
                self.write_slot(folder.slot, rows)
        folder.files.append(self)

    def verify(self) -> None:
        """Fail if the current slot is not as it was written."""
        rows = self.read(self.folder.current_row, SLOT)
        if xxh3_64_intdigest(self._pages(rows)) != self.checksums[self.folder.slot]:
            fail(f"{self.path} is corrupt: its checksum differs: {DELETE}")
        self.folder.traffic.clear()  # this read belongs to no step

    def empty(self, n_rows: int) -> Tensor:
        """Memory for rows, [n_rows, length], aligned for direct I/O."""
        size, pinned = n_rows * self.stride, torch.cuda.is_available()  # for copies to a GPU
        memory = torch.empty(size + PAGE, dtype=torch.float32, device="cpu", pin_memory=pinned)
        start = -memory.data_ptr() // 4 % PAGE  # elements up to the next page boundary
        return memory[start : start + size].view(n_rows, -1)[:, : self.length]

    def read(self, row: int, n_rows: int = 1) -> Tensor:
        rows = self.empty(n_rows)
        self._move(os.preadv, row, rows, "ssd_read_mb")
        return rows

    def write(self, row: int, rows: Tensor) -> None:
        """Write rows whose memory is that of `empty` or `read`."""
        self._move(os.pwritev, row, rows, "ssd_written_mb")

    def write_slot(self, slot: int, rows: Tensor) -> None:
        """Write a slot. The next commit records its checksum."""
        self.checksums[slot] = xxh3_64_intdigest(self._pages(rows))
        self.write(SLOT * slot, rows)

    def _pages(self, rows: Tensor) -> memoryview:
        """The memory of `rows`: whole pages, padding included."""
        return memoryview(rows.as_strided((len(rows) * self.stride,), (1,)).numpy()).cast("B")

    def _move(self, transfer: Callable, row: int, rows: Tensor, metric: str) -> None:
        data, offset = self._pages(rows), 4 * self.stride * row
        with self.folder.counting:
            self.folder.traffic[metric] += len(data) / 1e6
        while data:  # Linux moves at most 2 GB at once; on macOS, more is an error
            count = transfer(self.fd, [data[: 2**30]], offset)
            if count == 0:
                raise OSError(errno.EIO, f"{self.path.name}: nothing was moved at byte {offset:,}")
            data, offset = data[count:], offset + count

    def mapped(self) -> Tensor:
        """The current slot, [3, length], mapped into memory: only pages in use take memory. Writes
        to it change no checksum."""
        size = ROWS * self.stride
        rows = torch.from_file(str(self.path), True, size, dtype=torch.float32).view(ROWS, -1)
        return rows[self.folder.current_row :][:SLOT, : self.length]


class StateFolder:
    """The files of this rank, which slot of them is current, and threads that read and write.

    Every rank makes one, and opens the same units in the same order. The files belong to one `run`
    and must fit `content` (the model; JSON). saved: steps of the run's newest checkpoint. If the
    run `is_resumed`, it continues from the files, unless a rank lacks them or they are more than a
    step behind that checkpoint. description: the run's arguments and corpus, JSON; `earlier` is
    what the files were written with.
    """

    def __init__(
        self,
        path: Path,
        run: str,
        content: dict | None = None,
        is_resumed: bool = False,
        saved: int = 0,
        description: dict | None = None,
    ):
        self.path = path / f"rank-{dist.get_rank()}"
        self.content = {"run": run, **(content or {}), "ranks": dist.get_world_size()}
        self.description = description
        self.files: list[StateFile] = []
        self.commits = 0  # how many; ranks differ by one if some were killed before the last one
        self.step = 0  # steps done by the state in the current slot
        self.previous = 0  # steps done by the state in the other slot
        self.slot = 0  # the current one, 0 or 1
        self.checksums: dict[str, list[int | None]] = {}  # of each unit's two slots
        self.threads = ThreadPoolExecutor(6)
        self.jobs: dict[StateFile, Future] = {}  # the oldest first
        self.traffic: Counter[str] = Counter()  # MB since the last commit, by the metric's name
        self.counting = threading.Lock()
        self.lock = lock_folder(self.path)
        self.boot = boot_id()
        self.is_restored = self.restore(is_resumed, saved)
        self.committed = self.step
        return_freed_memory()

    @property
    def current_row(self) -> int:
        """The first row of the current slot."""
        return SLOT * self.slot

    @property
    def other_slot(self) -> int:
        return 1 - self.slot

    def switch_slots(self, step: int) -> None:
        """Make the other slot the current one; it has the state after `step` steps."""
        self.commits += 1
        self.previous, self.step, self.slot = self.step, step, self.other_slot

    def start(self, file: StateFile, function: Callable, *args) -> None:
        """Start function(file, ...) in a thread. At most one job per file and three in total are in
        flight: with a slow disk, more would fill the memory with buffers."""
        self.wait(at_most=0 if file in self.jobs else 2)
        self.jobs[file] = self.threads.submit(function, file, *args)

    def wait(self, at_most: int = 0) -> None:
        """Wait until at most so many of the jobs are in flight."""
        while len(self.jobs) > at_most:
            self.finish(self.jobs.pop(next(iter(self.jobs))))

    def finish(self, job: Future):
        """Wait for a job and return its result. If reading or writing has failed, end the run."""
        with exit_on_os_error(self.path, "; it keeps the last step that was done", status=1):
            return job.result()

    def commit(self) -> None:
        """Record `step` and `slot`: a resumed run continues from them."""
        aside = self.path / "step.json.new"
        with exit_on_os_error(self.path, "; it keeps the previous step", status=1):
            aside.write_text(json.dumps({name: getattr(self, name) for name in RECORD}))
            aside.replace(self.path / "step.json")
        self.committed = self.step
        self.traffic.clear()

    def replace(self, step: int, states: Iterable[Tensor]) -> None:
        """Commit other states, [3, length] per file, as those after `step` steps.

        They are written to the other slot: after a kill in here, the old states are complete.
        """
        for file, state in zip(self.files, states, strict=True):
            self.start(file, self._write_state, state)
        self.wait()
        all_reduce_control(torch.zeros(()))  # no rank commits before all have written
        self.switch_slots(step)
        self.commit()

    def _write_state(self, file: StateFile, state: Tensor) -> None:
        rows = file.empty(SLOT)
        rows[:] = state
        file.write_slot(self.other_slot, rows)

    def close(self) -> None:
        self.threads.shutdown()
        for file in self.files:
            os.close(file.fd)
        self.lock.close()

    # ---- recovery: the step from which a run continues ----

    def restore(self, is_resumed: bool, saved: int) -> bool:
        """Agree with all ranks on the step to continue from, and return True. If a rank's files do
        not have it, every rank deletes its files and returns False."""
        found = dict.fromkeys(RECORD, -1) | {"boot": self.boot, "content": self.content}
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            record = json.loads((self.path / "step.json").read_text())
            found = {name: record[name] for name in RECORD}
        self.earlier = found["description"]
        fits = is_resumed and found["content"] == self.content
        # if the machine has restarted since, the last writes may not have reached the disk
        commits = found["commits"] if fits and found["boot"] == self.boot else -1
        bounds = all_reduce_control(torch.tensor([commits, -commits, -saved]), op=dist.ReduceOp.MIN)
        lowest, highest, saved = bounds[0].item(), -bounds[1].item(), -bounds[2].item()
        # a rank goes back by a step that another one has not committed. Files a step behind the
        # newest checkpoint (all were killed after its save) are used: it is not verified yet
        step = found["step"] if commits == lowest else found["previous"]
        if lowest >= 0 and highest <= lowest + 1 and step >= saved - 1:
            self.commits, self.step, self.previous = lowest, step, step
            self.slot, self.checksums = found["slot"], found["checksums"]
            if commits > lowest:
                self.slot = self.other_slot
                self.commit()  # `step.json` named the slot that will be overwritten
            print0(f"resumed from {self.path.parent}, {step} steps done")
            return True
        if found["content"]["run"] != self.content["run"] or (found["step"] > saved and not fits):
            was = found["content"].get
            differ = [f"{k} {was(k)}, here {v}" for k, v in self.content.items() if was(k) != v]
            what = f"step {found['step']} of {'; '.join(differ) or 'this run'}"
            fail(f"--offload-dir: {self.path} holds {what}: pass another folder, or delete it")
        all_reduce_control(torch.zeros(()))  # no rank deletes its files if another one has failed
        if found["step"] > saved:
            why = "the machine restarted, or a rank lacks its files"
            warn(f"--offload-dir: {self.path}: step {found['step']} is dropped: {why}")
        for path in [self.path / "step.json", *self.path.glob("*.state")]:
            path.unlink(missing_ok=True)
        return False


@contextlib.contextmanager
def exit_on_os_error(path: Path, consequence: str = "", status: int = 2) -> Iterator[None]:
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
    """Create the folder and lock it. Closing the file that is returned releases the lock."""
    with exit_on_os_error(path):
        path.mkdir(parents=True, exist_ok=True)
        lock = open(path / "lock", "a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            fail(f"--offload-dir: {path} is used by {lock.read()}: end it, or pass another folder")
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
    kind = subprocess.run(["stat", "-fc", "%T", path], capture_output=True, text=True)
    if kind.stdout.strip() in ("tmpfs", "ramfs"):
        warn(f"--offload-dir: {path} is in memory (tmpfs): offloading to it saves none")
    return lock


def open_direct(path: Path, size: int, is_restored: bool) -> int:
    """Open a file for direct I/O, and allocate `size` bytes. If it `is_restored`, it has them."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    if is_restored and (has := os.fstat(fd).st_size) != size:
        fail(f"{path} has {has:,} bytes instead of {size:,}: {DELETE}")
    if hasattr(os, "posix_fallocate"):  # a full disk is an error now, not in a step
        os.posix_fallocate(fd, 0, size)
    else:  # on macOS
        os.ftruncate(fd, size)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
    except (OSError, AttributeError):  # macOS has no O_DIRECT
        warn(f"--offload-dir: {path.parent} has no direct I/O: the page cache takes memory")
    return fd


def return_freed_memory() -> None:
    """Make glibc return large buffers to the system when they are freed. If it kept them, fragments
    would grow with the number of units. `Run` asks for the opposite, before this."""
    with contextlib.suppress(OSError, AttributeError):  # without glibc
        ctypes.CDLL("libc.so.6").mallopt(-3, 2**17)  # M_MMAP_THRESHOLD of malloc.h, bytes
