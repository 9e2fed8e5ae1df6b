"""Start jobs of real processes, and look from outside at how each process ends."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

from harness import load_stage, stage_path

from common.job.checkpoint_hooks import AtomicWriter
from common.job.launch import rank
from common.job.run import Run

PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def free_port() -> int:
    """A free port outside the ephemeral range, so that no connection takes it before its use."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def start(
    script: str | Path, ranks: int, argv: list[str], cwd: Path, slow: int | None = None
) -> list[subprocess.Popen]:
    """Start the processes of a job as a launcher would, but do not supervise them.

    script: its path, or a stage's number. slow: a rank that starts two seconds after the others.
    """
    if isinstance(script, str):
        script = stage_path(script)
    port = str(free_port())
    started = []
    for number in sorted(range(ranks), key=lambda r: r == slow):
        if number == slow:
            time.sleep(2)
        environment = dict(os.environ, RANK=str(number), LOCAL_RANK=str(number), MASTER_PORT=port)
        environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, str(script), *argv]
        started.append(subprocess.Popen(command, env=environment, cwd=cwd, **PIPES))
    return started if slow is None else [*started[:slow], started[-1], *started[slow:-1]]


def torchrun(
    arguments: str, script: str | Path, argv: list[str], cwd: Path, **environment
) -> subprocess.Popen:
    """Start torchrun. script: its path, or a stage's number."""
    if isinstance(script, str):
        script = stage_path(script)
    command = [sys.executable, "-m", "torch.distributed.run", *arguments.split()]
    command, env = [*command, str(script), *argv], os.environ | environment
    return subprocess.Popen(command, env=env, cwd=cwd, start_new_session=True, **PIPES)


def end_as_a_launcher_would(processes: list[subprocess.Popen], timeout: float = 60) -> list[str]:
    """Wait until the first process ends, terminate the others; returns the stderr of each."""
    deadline = time.monotonic() + timeout
    while all(p.poll() is None for p in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in processes:
        process.terminate()
    return [p.communicate(timeout=timeout)[1] for p in processes]


def train_and_signal(
    stage: str, argv: list[str], number: int, target: int, step: int
) -> tuple[list[dict], bool]:
    """Train; rank `target` gets a signal in the middle of `step`, and again while it saves.

    Returns this rank's metrics, and whether the signal's handler was restored.
    """
    if signal.getsignal(number) == signal.SIG_IGN:  # SIGHUP under nohup
        signal.signal(number, signal.SIG_DFL)
    before, log, write = signal.getsignal(number), Run.log, AtomicWriter.write_data

    def log_and_signal(self, now, *args, **more):
        log(self, now, *args, **more)
        if now == step and rank() == target:
            os.kill(os.getpid(), number)

    def signal_and_write(self, *args, **kwargs):
        os.kill(os.getpid(), number)
        time.sleep(0.1)
        return write(self, *args, **kwargs)

    with (
        patch.object(Run, "log", log_and_signal),
        patch.object(AtomicWriter, "write_data", signal_and_write),
    ):
        metrics = load_stage(stage).main(argv)
    return metrics, signal.getsignal(number) == before


def workers_of(launcher: int) -> list[int]:
    """The process ids of the ranks that a torchrun has started, from /proc."""
    found = []
    for task in Path(f"/proc/{launcher}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return [pid for pid in found if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
