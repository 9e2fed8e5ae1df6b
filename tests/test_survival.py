"""Signals, timeouts, kills and restarts: no run hangs, and each reproduces its loss curve."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import chaos
import pytest
from harness import REPO, Pool, assert_same_curve, metrics_of, runs_for, stage_path
from processes import free_port, start, torchrun, train_and_signal, workers_of

from common.job.checkpoint import checkpoints

pytestmark = pytest.mark.slow


def argv_of(stage: str, corpus_dir: Path, run_dir: Path, *flags) -> list[str]:
    folders = ["--data", str(corpus_dir), "--run-dir", str(run_dir)]
    return [*chaos.run_of(stage).argv, *folders, *map(str, flags)]


# ---- kill -9 ----


CHAOS = "CHAOS" in os.environ  # `make chaos`: every stage, at other times in every run


@pytest.mark.parametrize("stage", [run.stage for run in runs_for("kill")] if CHAOS else ["06"])
def test_resume_after_kills_is_bitwise_identical(corpus_dir, tmp_path, stage):
    seed = random.SystemRandom().randrange(10**6) if CHAOS else int(stage)
    rng, ranks = random.Random(seed), chaos.run_of(stage).ranks
    argv = [*chaos.run_of(stage).argv, *chaos.RUN.split(), "--data", str(corpus_dir)]
    with contextlib.closing(Pool(ranks, group=stage != "01")) as pool:
        pool.run(os.getpid)  # do not time the start of the processes
        began = time.monotonic()
        pool.train(stage, [*argv, "--run-dir", str(tmp_path / "undisturbed")])
        seconds = time.monotonic() - began
        kills = [chaos.random_kill(rng, ranks, True, seconds) for _ in range(2)]
        kills += [chaos.random_kill(rng, ranks, False, seconds)] * CHAOS
        done, in_save = chaos.endure(pool, stage, kills, argv, tmp_path / "killed")
    print(f"  {stage}  seed {seed}: {done} kills, {in_save} inside a save")
    assert done >= 1
    assert not chaos.differences(tmp_path / "killed", tmp_path / "undisturbed")


# ---- signals ----


@pytest.mark.parametrize(
    "name, stage",
    [("SIGUSR1", "02"), *(("SIGTERM", run.stage) for run in runs_for("kill") if run.stage > "01")],
)
def test_signal_to_one_rank_saves_the_same_step_on_all_and_stops(
    pools, corpus_dir, tmp_path, stage, name
):
    ranks = chaos.run_of(stage).ranks
    argv = argv_of(stage, corpus_dir, tmp_path, *"--steps 20 --log-every 1".split())
    target = ranks - 1 if name == "SIGTERM" else 0
    ended = pools(ranks).attempt(
        train_and_signal, stage, argv, getattr(signal, name), target, 3, timeout=60
    )
    assert all(o.traceback is None and o.exit_status is None for o in ended), ended
    assert sum(o.stdout.count("asked to stop") for o in ended) == 1
    assert not any(o.stderr for o in ended)
    for outcome in ended:
        metrics, _ = outcome.value
        assert [x["step"] for x in metrics][:4] == [0, 1, 2, 3]
        assert len(metrics) <= 5  # within two steps
    (saved,) = checkpoints(tmp_path / "checkpoints")
    assert saved.name == f"step-{len(metrics):08d}"


# ---- real processes ----


def wait_for_checkpoint(processes: list[subprocess.Popen], run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while all(p.poll() is None for p in processes) and time.monotonic() < deadline:
        if any(int(p.name[5:]) >= step for p in checkpoints(run_dir / "checkpoints")):
            return
        time.sleep(0.01)
    for process in processes:
        process.terminate()  # not kill: torchrun ends its ranks, which hold the pipes open
    raise AssertionError([p.communicate(timeout=60) for p in processes])


def test_ctrl_c_prints_one_line_and_saves_nothing(corpus_dir, tmp_path):
    argv = argv_of("02", corpus_dir, tmp_path, "--log-every", 1, "--steps", 100_000)
    processes = start("02", 2, argv, tmp_path)
    assert any("step     1" in line for line in processes[0].stdout)
    for process in processes:  # as a terminal does
        process.send_signal(signal.SIGINT)
    said = [p.communicate(timeout=60)[1] for p in processes]
    assert [p.returncode for p in processes] == [130, 130]
    assert "".join(said).strip() == "interrupted" and not checkpoints(tmp_path / "checkpoints")


@pytest.mark.wall_clock  # the signal must come while Python imports
def test_signal_while_ranks_import_ends_the_run_as_the_manual_says(corpus_dir, tmp_path):
    manual = " ".join((REPO / "RUNNING.md").read_text().split())
    assert "Before the first step, a signal ends the run without a message" in manual
    command = [sys.executable, str(stage_path("01")), *argv_of("01", corpus_dir, tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(0.3)
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=30) == (b"", b"")
    assert process.returncode == -signal.SIGUSR1 and not (tmp_path / "run").exists()


@pytest.mark.wall_clock
def test_hanging_rank_ends_the_job_after_the_timeout(corpus_dir, tmp_path):
    argv = argv_of("04", corpus_dir, tmp_path, "--checkpoint-every", 4, "--timeout", 4)
    processes = start("04", 2, argv, tmp_path)
    wait_for_checkpoint(processes, tmp_path, 4)
    processes[1].send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    _, said = processes[0].communicate(timeout=60)
    seconds = time.monotonic() - stopped
    processes[1].kill()
    processes[1].communicate()
    assert processes[0].returncode == 1 and 3 < seconds < 20
    assert "[rank 0 of 2, " in said
    assert "\nNo answer within --timeout" in said, said[-3000:]


@pytest.mark.wall_clock  # the kills must come before the run ends
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
def test_torchrun_restart_of_a_killed_rank_resumes_the_last_checkpoint(pools, corpus_dir, tmp_path):
    flags = "--steps 150 --log-every 1 --checkpoint-every 10".split()
    argv = argv_of("04", corpus_dir, tmp_path / "run", *flags)
    job = torchrun(
        "--standalone --nproc-per-node 2 --max-restarts 3",
        "04",
        argv,
        tmp_path,
        OMP_NUM_THREADS="1",
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )
    try:
        for step in (10, 50):  # twice: each restart may meet addresses of processes that are gone
            wait_for_checkpoint([job], tmp_path / "run", step)
            os.kill(workers_of(job.pid)[1], signal.SIGKILL)
        out, err = job.communicate(timeout=120)
    finally:
        job.terminate()  # if it hangs, torchrun ends its ranks
    assert job.returncode == 0, err
    first, second = map(int, re.findall(r"resumed from .*, (\d+) steps done", out))
    assert 10 <= first < second and 50 <= second < 150
    argv[argv.index("--run-dir") + 1] = str(tmp_path / "undisturbed")
    pools(2).train("04", argv)
    assert not chaos.differences(tmp_path / "run", tmp_path / "undisturbed")


def test_torchrun_with_restarts_and_a_store_that_outlives_them_is_an_error(tmp_path):
    arguments = "--standalone --nproc-per-node 1 --max-restarts 1"
    job = torchrun(arguments, "02", "--data sample --steps 1".split(), tmp_path)
    _, said = job.communicate(timeout=300)
    lines = [line for line in said.splitlines() if line.startswith("train.py: ")]
    assert job.returncode == 1 and lines and len(set(lines)) == 1, said
    assert "--standalone" in lines[0] and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in lines[0]


@pytest.mark.wall_clock  # both nodes must join within `last_call_timeout`
@pytest.mark.skipif(not CHAOS, reason="takes a minute: make chaos runs it")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
def test_elastic_resume_after_a_lost_node_keeps_the_global_batch(reference, corpus_dir, tmp_path):
    """Two nodes with one rank each; one dies with its launcher, the other continues alone."""
    curve = [*chaos.run_of("01").argv, "--data", str(corpus_dir), "--steps", "400"]
    argv = [*curve, "--checkpoint-every", "5", "--run-dir", str(tmp_path / "run")]
    nodes = "--nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-id x "
    nodes += f"--rdzv-endpoint 127.0.0.1:{free_port()} --rdzv-conf last_call_timeout=5"
    variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    first, second = (
        torchrun(f"{nodes},is_host={host}", "02", argv, tmp_path, **variables) for host in (1, 0)
    )
    try:
        wait_for_checkpoint([first, second], tmp_path / "run", 5)
        for pid in (second.pid, *workers_of(second.pid)):
            os.kill(pid, signal.SIGKILL)
        out, err = first.communicate(timeout=240)
    finally:
        first.kill()
        second.kill()
    said = out + second.communicate()[0]
    assert first.returncode == 0, err
    assert "2 x cpu" in said and "1 x cpu" in said and "resumed from" in said
    assert_same_curve(metrics_of(tmp_path / "run"), reference(curve))
