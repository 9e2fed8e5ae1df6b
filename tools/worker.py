"""A process of a `tools.pool.Pool`: it joins the group and runs jobs as they arrive.

Its answers are the fields of an `Outcome`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import common.job.launch


def work(rank: int, size: int, port: int | None, connection, environment, folder, backend) -> None:
    """A worker process: join the group, run jobs as they arrive, exit when the parent does."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then kills us
    stacks = open(Path(folder) / f"stacks-{rank}.txt", "w")
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    common.job.launch.GRACE = 0.0  # no launcher terminates the other ranks here
    # on a GPU a rank starts a process that loads its data, which a daemon must not
    multiprocessing.current_process()._config["daemon"] = False
    jobs: queue.Queue = queue.Queue()

    def listen() -> None:
        while True:
            try:
                jobs.put(connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)  # the parent is gone: do not wait for the job

    threading.Thread(target=listen, daemon=True).start()
    if port is not None:
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
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        outcome = do(job)
        if port is not None and not dist.is_initialized():
            outcome.setdefault("traceback", "the job destroyed the pool's process group")
        if port is not None and "traceback" not in outcome:
            tidy_up()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # for the processes that share this GPU
        try:
            answer = pickle.dumps(outcome)
        except Exception:
            outcome = {"traceback": f"result cannot be pickled\n{traceback.format_exc()}"}
            answer = pickle.dumps(outcome)
        has_failed = "traceback" in outcome
        del outcome
        connection.send_bytes(answer)
        if has_failed:  # the pool starts new processes: end the other ranks' wait for this one
            os._exit(1)


def tidy_up() -> None:
    """Destroy process groups that a job leaves behind: each Gloo group's threads wake 100 times a
    second.

    A run that ended with an error has destroyed none of its groups.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def do(job: bytes) -> dict[str, Any]:
    out, err = io.StringIO(), io.StringIO()
    outcome: dict[str, Any] = {}
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            function, args, kwargs = pickle.loads(job)
            outcome["value"] = function(*args, **kwargs)
        except SystemExit as exit:
            status = exit.code if isinstance(exit.code, int) else int(bool(exit.code))
            outcome["exit_status"] = status
        except BaseException:
            outcome["traceback"] = traceback.format_exc()
    return {**outcome, "stdout": out.getvalue(), "stderr": err.getvalue()}
