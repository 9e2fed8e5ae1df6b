"""Ranks and addresses under every launcher, printing and errors, setup and cleanup."""

from __future__ import annotations

import errno
import json
import os
import platform
import resource
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from harness import REPO, load_stage
from processes import torchrun

from common import collectives

from common.job.launch import has_lost_a_peer, launch_environment, rank, setup, world_size
from common.job.run_folder import claim, launch_name
from tools.pool import WorkerError

TORCHRUN = {
    **{"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
    **{"MASTER_ADDR": "node0", "MASTER_PORT": "1234"},
}
SBATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
SRUN = SBATCH | {
    **{"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "3"},
    **{"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "MASTER_ADDR": "node0"},
}
MPIRUN = {
    **{"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
}


def environment(monkeypatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "variables, launcher, ranks",
    [
        ({}, "python", (0, 0, 1, 1)),
        (TORCHRUN, "torchrun", (5, 1, 4, 8)),
        (SRUN | {"WORLD_SIZE": "8"}, "srun", (5, 1, 4, 8)),  # which many batch scripts export
        (MPIRUN, "mpirun", (2, 2, 4, 4)),
        (SBATCH, "python", (0, 0, 1, 1)),  # the batch shell is not a job step
        (SRUN | TORCHRUN, "torchrun", (5, 1, 4, 8)),  # torchrun started by srun
        (SRUN | {"RANK": "0", "WORLD_SIZE": "1"}, "torchrun", (0, 0, 1, 1)),  # after a lost node
        (SRUN | MPIRUN, "mpirun", (2, 2, 4, 4)),  # which has used srun
        (SBATCH | {"SLURM_STEP_NUM_TASKS": "1"}, "python", (0, 0, 1, 1)),
        ({"PMI_SIZE": "1", "PMIX_RANK": "0"}, "python", (0, 0, 1, 1)),  # of another launcher
    ],
    ids="python torchrun srun mpirun sbatch torchrun-in-srun lost-node mpirun-by-srun one-task "
    "one-process".split(),
)
def test_ranks_from_every_launcher(monkeypatch, variables, launcher, ranks):
    environment(monkeypatch, variables)
    found = launch_environment()
    assert found.launcher == launcher
    assert (found.rank, found.local_rank, found.local_size, found.size) == ranks
    assert (rank(), world_size()) == (ranks[0], ranks[3])


WRONG = {
    "RANK=0 WORLD_SIZE=x": "WORLD_SIZE is 'x': start with torchrun, srun",
    "RANK=5 WORLD_SIZE=2": "RANK is 5, but WORLD_SIZE is 2",
    "RANK=1": "RANK is 1, but WORLD_SIZE is 0",
    "WORLD_SIZE=2": "WORLD_SIZE=2: not a launcher that is supported",
    "RANK=0 WORLD_SIZE=1 LOCAL_RANK=-1": "LOCAL_RANK is '-1'",
    # launchers that are not supported: each process would train alone
    "PMI_RANK=0 PMI_SIZE=2": "PMI_SIZE=2: not a launcher that is supported",  # MPICH, Intel MPI
    "PMI_SIZE=2 SLURM_STEP_NUM_TASKS=1": "PMI_SIZE=2: not a launcher",  # MPICH in a step
    "FLUX_TASK_RANK=0 FLUX_JOB_SIZE=2": "FLUX_JOB_SIZE=2",
    "PMIX_RANK=0": "PMIX_RANK=0",
}


@pytest.mark.parametrize("variables", WRONG)
def test_wrong_launcher_variables_are_an_error(monkeypatch, error_of, variables):
    environment(monkeypatch, dict(word.split("=") for word in variables.split()))
    assert WRONG[variables] in error_of(world_size)


@pytest.mark.parametrize(
    "variables, says",
    [
        ({"MASTER_ADDR": "no-such-host.invalid"}, "at no-such-host.invalid, port 20001: "),
        ({"MASTER_PORT": ""}, "MASTER_PORT expected, but not set"),
        ({"MASTER_PORT": "99999"}, "99999"),
        ({"MASTER_PORT": "x"}, "port x: "),
    ],
)
def test_a_wrong_address_of_rank_0_is_a_one_line_error(monkeypatch, error_of, variables, says):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "20001"}
    environment(monkeypatch, SRUN | {"SLURM_PROCID": "0"} | address | variables)
    said = error_of(setup)
    assert says in said and "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to" in said


@pytest.mark.parametrize("variables", [SRUN, MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}])
def test_several_nodes_without_an_address_are_an_error(monkeypatch, error_of, variables):
    of_rank_0 = {"SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "0"}
    environment(monkeypatch, variables | {name: "0" for name in of_rank_0 if name in variables})
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    said = "source slurm/env.sh sets both, mpirun -x NAME passes them on"
    assert said in error_of(setup)
    # on another node, while rank 0 has an address and waits for the others
    monkeypatch.setattr("common.job.launch.GRACE", 0.01)
    environment(monkeypatch, variables)
    assert said in error_of(setup)


def test_stage_01_with_several_ranks_is_an_error(monkeypatch, error_of):
    environment(monkeypatch, TORCHRUN | {"RANK": "0"})
    said = "this script is for one process, not 8: start it without a launcher"
    assert said in error_of(load_stage("01").main, ["--data", "sample"])


def test_ranks_of_one_node_join_there_at_a_port_of_their_job(monkeypatch):
    asked, ports = [], set()
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: asked.append(k))
    for name in ("get_rank", "get_world_size"):
        monkeypatch.setattr(dist, name, lambda *a: 0)
    for job in ("prterun-x-1@1", "prterun-x-2@1"):
        environment(monkeypatch, MPIRUN | {"PMIX_NAMESPACE": job})
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        setup()
        assert (asked[-1]["rank"], asked[-1]["world_size"], asked[-1]["store"]) == (2, 4, None)
        assert os.environ["MASTER_ADDR"] == "127.0.0.1"
        ports.add(int(os.environ["MASTER_PORT"]))
    assert len(ports) == 2 and min(ports) >= 20000 and max(ports) < 32768


@pytest.mark.parametrize(
    "variables, expected",
    [
        (SBATCH, "77-c189d3"),
        (SBATCH | {"SLURM_RESTART_COUNT": "1"}, "77-c189d3"),
        (SRUN | {"SLURM_STEP_ID": "0", "TORCHELASTIC_RUN_ID": "abc"}, "77-c189d3"),
        # another submission with the same number is another run
        (SBATCH | {"SUBMITTED": "20250101-120000"}, "77-20250101-120000-c189d3"),
        (SRUN | {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "2"}, "70_2-c189d3"),
        ({"TORCHELASTIC_RUN_ID": "abc"}, "abc"),
        ({"TORCHELASTIC_RUN_ID": "../a b"}, "__a_b"),
        # torchrun without --rdzv-id and without Slurm: the time
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({}, None),
    ],
)
def test_requeued_job_has_the_same_run_folder(monkeypatch, variables, expected):
    environment(monkeypatch, variables)
    assert launch_name(["--lr", "1"]) == expected
    assert launch_name(["--lr", "2"]) != expected or "SLURM_JOB_ID" not in variables


def test_a_restart_of_torchrun_that_would_not_find_its_folder_is_an_error(monkeypatch, tmp_path):
    environment(monkeypatch, {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "1"})
    with pytest.raises(OSError, match="needs --rdzv-id, --standalone or --run-dir"):
        claim(None, tmp_path, [])
    os.close(claim(str(tmp_path / "run"), tmp_path, [])[1])


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(monkeypatch, tmp_path):
    environment(monkeypatch, {})
    monkeypatch.setattr(time, "strftime", lambda _: "20250101-120000")
    found = [claim(None, tmp_path / "runs", [])[0].name for _ in range(3)]
    assert found == ["20250101-120000", "20250101-120000-2", "20250101-120000-3"]


def write_there(folder: str, **variables: str) -> None:
    with patch.dict(os.environ, variables):
        os.close(claim(folder, Path("runs"), [])[1])


def test_two_processes_cannot_write_to_one_run_folder(monkeypatch, pools, tmp_path):
    folder, pool = str(tmp_path / "run"), pools(1, group=False)
    step = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
    environment(monkeypatch, step)
    _, lock, who = claim(folder, tmp_path, [])
    assert who == "an unknown process"  # the folder is new, or its launch.json was lost
    for variables in ({}, step):  # of no job, or of an equal step on the same host
        (ended,) = pool.attempt(partial(write_there, folder, **variables))
        assert f"writes to {folder} (process {os.getpid()} on " in ended.traceback
    # on a file system that many nodes share
    held = json.loads(os.pread(lock, 1000, 0)) | {"host": "another"}
    os.pwrite(lock, json.dumps(held).encode(), 0)
    (ended,) = pool.attempt(partial(write_there, folder, **step | {"SLURM_STEP_ID": "1"}))
    assert "on another): pass another --run-dir" in ended.traceback
    # the job was requeued: the lock is that of a lost node
    pool.run(partial(write_there, folder, **step))
    os.close(lock)
    pool.run(write_there, folder)


def test_without_locks_a_living_process_keeps_its_folder(monkeypatch, capsys, tmp_path):
    none = Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr("fcntl.lockf", none)
    for pid, is_held in ((os.getppid(), True), (os.getpid(), False), (2**30, False)):
        holder = {"host": platform.node(), "pid": pid}
        (tmp_path / "launch.json").write_text(json.dumps(holder))
        with pytest.raises(OSError, match="another run writes") if is_held else nullcontext():
            os.close(claim(str(tmp_path), tmp_path, [])[1])
    assert "on a file system without locks: start no second run there" in capsys.readouterr().err


def limits_after_setup() -> tuple[int, int]:
    """The soft and the hard limit of open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    setup()
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def test_setup_allows_as_many_connections_as_the_system(pools):
    """Gloo has one per rank and group: 64 nodes need more than the usual 1,024."""
    for soft, hard in pools(2).run(limits_after_setup):
        assert soft == hard


def test_a_port_that_is_taken_is_one_line(monkeypatch, error_of):
    environment(monkeypatch, MPIRUN | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "20001"})
    taken = Mock(side_effect=dist.DistNetworkError("The server socket failed (EADDRINUSE)"))
    monkeypatch.setattr("common.job.launch.join", taken)
    assert "port 20001: The server socket failed" in error_of(setup)


def reduce_scatter(dtype: torch.dtype, in_place: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(size * 10, dtype=dtype).view(size * 2, 5) * (rank + 1)
    expected = whole.clone()
    dist.all_reduce(expected)
    output = whole[2 * rank : 2 * rank + 2] if in_place else torch.empty(2, 5, dtype=dtype)
    work = collectives.reduce_scatter_single(output, whole, async_op=in_place)
    expected = expected[2 * rank : 2 * rank + 2]
    if in_place:
        work.wait()
        output *= 2
        work.wait()  # a second wait does nothing, as PyTorch's
        expected *= 2
    assert torch.equal(output, expected)


def compare_tensors(of_rank_1: float) -> None:
    """As on GPUs, the tensors of two ranks print differently even where their numbers are equal."""
    value = torch.tensor(of_rank_1 if dist.get_rank() else 1.0, requires_grad=dist.get_rank() == 1)
    collectives.check_same("sums", [value], torch.device("cpu"))


def test_tensors_are_compared_by_their_numbers_in_full(pools):
    pools(2).run(compare_tensors, 1.0)
    with pytest.raises(WorkerError, match="sums differ between ranks"):
        pools(2).run(compare_tensors, 1.00001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("ranks", [1, 3])
def test_reduce_scatter_is_a_slice_of_an_all_reduce(pools, ranks, in_place, dtype):
    pools(ranks).run(reduce_scatter, dtype, in_place)


JOB = """
import os, signal, sys
sys.path.insert(0, {repo!r})
import torch, torch.distributed as dist
from common.job.launch import cleanup, setup
try:
    world = setup(timeout=60)
    x = torch.ones(1)
    dist.all_reduce(x)
    if world.rank == 1:
        {what_rank_1_does}
    dist.all_reduce(x)
finally:
    cleanup()
"""


@pytest.mark.wall_clock
@pytest.mark.slow
@pytest.mark.parametrize(
    "failure, told",
    [
        ("raise ValueError('a trouble of its own')", "ValueError: a trouble of its own"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "Signal 9 (SIGKILL) received"),
    ],
)
def test_first_failure_ends_the_job_within_seconds_and_the_other_rank_prints_at_most_a_line(
    tmp_path, failure, told
):
    script = tmp_path / "job.py"
    script.write_text(JOB.format(repo=str(REPO), what_rank_1_does=failure))
    started = time.monotonic()
    job = torchrun("--standalone --nproc-per-node 2", script, [], tmp_path)
    _, said = job.communicate(timeout=120)
    assert job.returncode != 0
    assert time.monotonic() - started < 50  # less than the group's timeout of 60
    ours, _, of_torchrun = said.partition("ChildFailedError")
    assert told in of_torchrun.split("Root Cause")[1], said
    if "ValueError" in failure:
        assert "[rank 1 of 2, " in ours and "] Traceback" in ours and told in ours
    # torchrun may terminate it before it notices
    lines = [line for line in ours.splitlines() if "[rank 0 of 2, " in line]
    assert len(lines) <= 1 and all("another rank is gone: " in x for x in lines)
    assert ours.count("Traceback") == (2 if "ValueError" in failure else 1)  # one is torchrun's own


GONE = RuntimeError("[/b/gloo/transport/tcp/pair.cc:553] Connection closed by peer [1.2.3.4]:5. GL")
GONE_UNDER_NCCL = RuntimeError("NCCL error in: x.hpp:2, remote process exited or there was a netw")


def raised(error: BaseException, while_handling: BaseException | None = None) -> BaseException:
    error.__context__ = while_handling
    return error


@pytest.mark.parametrize(
    "error, quiet",
    [
        (raised(GONE), True),
        (raised(GONE_UNDER_NCCL), True),
        (raised(RuntimeError(str(GONE)), while_handling=GONE), True),
        (raised(RuntimeError(str(GONE)), while_handling=ValueError("the cause")), False),
        (raised(ValueError("a second one"), while_handling=GONE), False),
        (ConnectionResetError("Connection reset by peer"), False),  # of a download, not of a peer
        (RuntimeError("[/b/gloo/transport/tcp/pair.cc:9] Application timeout"), False),
    ],
)
def test_lost_peer_is_distinguished_from_a_failure_of_this_rank(error, quiet):
    assert has_lost_a_peer(error) == quiet
