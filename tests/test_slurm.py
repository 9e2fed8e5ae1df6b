"""Jobs on a live Slurm, whose nodes have networks and host names of their own on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from chaos import differences
from harness import REPO, assert_same_curve, metrics_of, stage_path, stages
from slurm_cluster import PACKAGES, Job, live_cluster, need, skip_or_fail

pytestmark = pytest.mark.slow

NAMESPACES = str(REPO / "tests/namespaces.sh")
EXTRA_CONF = """\
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=node3 PriorityTier=1 GraceTime=90
PartitionName=high Nodes=node3 PriorityTier=10 PreemptMode=OFF"""
SMALL = "--d-model 32 --n-layers 2 --n-heads 2 --seq-len 16 --global-batch-size 12"
READMES = "".join(
    (REPO / f"{name}.md").read_text() for name in ("README", "RUNNING", "slurm/README")
)


def folder_of(stage: str) -> str:
    return stage_path(stage).parent.name


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Three nodes with a network each."""
    need("sbatch", "slurmctld", "slurmd", "munged", "ip", packages=PACKAGES)
    if os.geteuid() != 0:
        skip_or_fail("a network for each node needs root")
    variables = dict(NODES="3", NAMESPACES=NAMESPACES, EXTRA_CONF=EXTRA_CONF)
    with live_cluster(tmp_path_factory.mktemp("cluster"), **variables) as cluster:
        yield cluster


# ---- submitting ----


def test_sbatch_accepts_every_header_with_and_without_gpus(cluster):
    for stage in stages():
        script = f"{folder_of(stage)}/train.sbatch"
        assert "to start at" in cluster.call("sbatch", "--test-only", script)
        cluster.call("sbatch", "--test-only", "--gpus-per-node=0", "--nodes=2", script)


@pytest.fixture(scope="module")
def flags(corpus_dir) -> list[str]:
    return [*SMALL.split(), "--data", str(corpus_dir), "--steps", "6", "--log-every", "1"]


def test_submit_all_runs_the_stages_in_order(cluster, flags):
    """With two stages only, on two nodes with one process each."""
    folders = f"folders={folder_of('01')} {folder_of('02')}"
    jobs = cluster.submit("submit-all", folders, "NODES=2", "GPUS=1", f"ARGS={' '.join(flags)}")
    expected, before = (("01", 1, "node1"), ("02", 2, "node[1-2]")), ""
    for job, (stage, ranks, nodes) in zip(jobs, expected, strict=True):
        info = job.ends()
        assert info["StartTime"] >= before, f"job {job.number} did not wait"
        before = info["EndTime"]
        assert info["NodeList"] == nodes
        config = json.loads((job.run_folder / "config.json").read_text())
        assert (config["stage"], config["world_size"]) == (folder_of(stage), ranks)
        assert_same_curve(job.metrics(), jobs[0].metrics())


def test_failed_job_cancels_its_dependent_and_is_reported(cluster):
    folders = f"folders={folder_of('01')} {folder_of('02')}"
    first, other = cluster.submit("submit-all", folders, "ARGS=--data absent --steps 1")
    first.ends("FAILED")
    other.ends("CANCELLED")
    status = cluster.make("status")
    assert re.search(rf"^{first.number} .* FAILED .*NonZeroExitCode", status, re.MULTILINE)
    assert re.search(rf"^{other.number} .* CANCELLED .*never started", status, re.MULTILINE), status
    assert "--data absent: [Errno 2]" in cluster.make("logs-01")
    assert "CANCELLED" in cluster.make("logs-02")


def test_cancel_ends_the_jobs_of_this_folder(cluster):
    job = cluster.submit("submit-02", "NODES=3", "ARGS=--data sample --steps 100000")[0]
    assert f"cancelled job {job.number}: 02_ddp" in cluster.make("cancel")
    job.ends("CANCELLED")
    assert "cancelled" not in cluster.make("cancel")


# ---- other launchers ----

SRUN = "srun python 04_fsdp/train.py"
MPIRUN = "mpirun -n 2 -x MASTER_ADDR -x MASTER_PORT python 04_fsdp/train.py"
TORCHRUN = (
    "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id run1 "
    "--rdzv-endpoint node1:29500 04_fsdp/train.py"
)


@pytest.fixture(scope="module")
def launched(cluster, flags) -> Job:
    """A stage under srun, mpirun and torchrun each, by the READMEs' commands."""

    def line(command: str, stage: str, before: str = "") -> str:
        assert f"    {command}" in READMES, command
        script = command.replace("04_fsdp", folder_of(stage))
        where = f"--run-dir runs/{command.split()[0]}/{stage}"
        return " ".join([f"{before}{script}", *flags, where])

    lines = ["source slurm/env.sh", "export OMP_NUM_THREADS=1"]
    lines += [line(SRUN, "04")]
    lines += ["export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"]
    if shutil.which("mpirun"):
        lines.append(line(MPIRUN, "02"))
    lines.append(line(TORCHRUN, "03", before="srun --ntasks-per-node 1 "))
    return cluster.batch("--nodes=2", "--ntasks-per-node=1", script="\n".join(lines))


@pytest.mark.parametrize("launcher, stage", [("srun", "04"), ("mpirun", "02"), ("torchrun", "03")])
def test_readme_command_of_each_launcher_starts_a_stage_on_two_nodes(
    reference, flags, launched, launcher, stage
):
    if launcher == "mpirun":
        need("mpirun", packages="openmpi-bin")
    launched.ends()
    folder = launched.cluster.folder / "runs" / launcher / stage
    config = json.loads((folder / "config.json").read_text())
    assert (config["launcher"], config["world_size"]) == (launcher, 2)
    assert_same_curve(metrics_of(folder), reference(flags))


# ---- the environment of a job ----

PROBE = """\
import json, os, socket, sys
sys.path.insert(0, os.getcwd())
import torch
from common.collectives import all_reduce
from common.job.launch import cleanup, setup
world = setup(60)
x = torch.ones(())
all_reduce(x)
found = dict(os.environ, host=socket.gethostname(), sum=x.item())
open(f"probe-{os.environ['SLURM_JOB_ID']}-{world.rank}.json", "w").write(json.dumps(found))
cleanup()
"""


def probe(cluster, site: str, *flags: str) -> list[dict]:
    """The environment of each process of a job on two nodes, with these lines in site.env."""
    path = cluster.folder / "slurm/site.env"
    kept = path.read_text()
    path.write_text(f"{site}\n{kept}")
    (cluster.folder / "probe.py").write_text(PROBE)
    script = "source slurm/env.sh\nexec slurm/launch.sh torchrun probe.py"
    try:
        job = cluster.batch("--nodes=2", "--ntasks-per-node=1", *flags, script=script)
        job.ends()
    finally:
        path.write_text(kept)
    files = cluster.folder.glob(f"probe-{job.number}-*.json")
    found = [json.loads(x.read_text()) for x in files]
    assert all(x["sum"] == len(found) for x in found)
    return found


def test_plain_site_uses_the_first_node_as_master_and_stages_data_in_memory(cluster, tmp_path):
    (tmp_path / "corpora/wikitext2").mkdir(parents=True)
    site = (cluster.folder / "slurm/site.env.plain.example").read_text()
    site += f"STAGE_DATA=1\nDATA_ROOT={tmp_path}/corpora\nunset OMP_NUM_THREADS"
    found = probe(cluster, site)  # without GPUs: two processes per node
    assert sorted(x["host"] for x in found) == ["node1", "node1", "node2", "node2"]
    for env in found:
        assert env["SRUN_CPUS_PER_TASK"] == env["SLURM_CPUS_PER_TASK"] == "4"
        assert env["OMP_NUM_THREADS"] == str(max(1, min(4, len(os.sched_getaffinity(0))) // 2))
        assert env["HF_HUB_OFFLINE"] == env["HF_DATASETS_OFFLINE"] == "1"
        node = env["SLURM_NODEID"]
        assert env["DATA_ROOT"].startswith(f"/dev/shm/corpora-{env['SLURM_JOB_ID']}-{node}-")
        assert not Path(env["DATA_ROOT"]).exists()  # the job has removed it
    assert len({env["SLURM_NODEID"] for env in found}) == 2


def test_jsc_site_uses_the_infiniband_host_name(cluster):
    site = "module() { :; }\nSCRATCH=/tmp/scratch\n"
    site += (cluster.folder / "slurm/site.env.jsc.example").read_text()
    found = probe(cluster, site, "--gpus-per-node=1")
    assert sorted(x["host"] for x in found) == ["node1", "node2"]
    for env in found:
        assert env["MASTER_ADDR"] in ("node1i", "node2i")  # torchrun's, of the node with rank 0
        assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == "ib0"
        assert env["HF_HOME"] == "/tmp/scratch/cache/huggingface"


# what a job may have of the job that it was submitted from
FOREIGN = "SLURM_ARRAY_JOB_ID=3,SLURM_ARRAY_TASK_ID=7,SLURM_RESTART_COUNT=1,SLURM_HET_SIZE=2"
FOREIGN += ",SLURM_STEP_ID=5,SLURM_STEP_NUM_TASKS=2,SLURM_MEM_PER_NODE=9,SLURM_MEM_PER_GPU=9"
FOREIGN += ",SLURM_GPUS=8,SLURM_GPUS_PER_TASK=4,SLURM_NTASKS_PER_GPU=4"


def test_a_job_does_not_take_the_variables_of_another_job_for_its_own(cluster):
    script = "source slurm/env.sh\nenv\nulimit -St 999\nslurm/launch.sh bash -c 'ulimit -St; env'"
    job = cluster.batch("--gpus-per-node=1", f"--export=ALL,{FOREIGN}", script=script)
    job.ends()
    assert "\n999\n" not in job.log  # of CPU time: SIGXCPU would make a run stop
    batch, step = (dict(re.findall(r"^(\w+)=(.*)$", x, re.M)) for x in job.log.split("unlimited\n"))
    assert batch["JOB"] == job.number and batch["SLURM_RESTART_COUNT"] == "0"
    assert batch.keys() & set(re.split("=.,?", FOREIGN)) == {"SLURM_RESTART_COUNT"}
    assert step["SLURM_STEP_ID"] == "0" and step["SLURM_GPUS_ON_NODE"] == "1"


# ---- time limit, lost node, requeue and resume ----


@pytest.fixture
def lose(cluster):
    """`lose("node2")` kills all processes of a node at once."""
    lost: list[str] = []
    conf = cluster.folder / "slurm/cluster/slurm.conf"
    kept = conf.read_text()

    def reconfigure(text: str) -> None:
        conf.write_text(text)
        cluster.call("scontrol", "reconfigure")

    def go(node: str) -> None:
        lost.append(node)
        reconfigure(f"{kept}SlurmdTimeout=6\n")  # seconds until Slurm considers a node lost
        pids = subprocess.check_output(["ip", "netns", "pids", f"slurm-{node}"], text=True).split()
        subprocess.run(["kill", "-KILL", *pids], check=True)

    yield go
    for node in lost:  # ReturnToService: a node that responds is used again
        cluster.call(NAMESPACES, "exec", node, "slurmd", "-N", node)
    reconfigure(kept)


@pytest.mark.wall_clock  # signals must come before the run ends, and slow nodes may count as lost
def test_requeue_on_signal_and_after_a_lost_node_resumes_and_is_bitwise_identical(
    cluster, pools, corpus_dir, tmp_path, lose
):
    # some seconds long so that it can be signalled
    flags = f"{SMALL} --steps 500 --log-every 10 --checkpoint-every 50 --keep-checkpoints 10"
    flags += f" --data {corpus_dir}"
    job = cluster.submit("submit-02", "NODES=2", "GPUS=1", f"ARGS={flags}")[0]

    def reached(step: int) -> bool:
        """Whether the job has logged this step or a later one since its last requeue."""
        since = job.log.split("is to be requeued")[-1]
        return any(int(x) >= step for x in re.findall(r"^step +(\d+)", since, re.MULTILINE))

    def ask_to_stop(restarts: int) -> None:
        cluster.call("scancel", "--signal=USR1", "--batch", job.number)
        job.until("requeue", lambda: job.info()["Restarts"] == str(restarts))

    # before Python has installed a handler: the signal must not be lost. The first training step
    # may be done by then or not.
    steps = "squeue", "--steps", "--noheader", f"--jobs={job.number}"  # one per srun of the script
    job.until("step", lambda: f" {job.number}.0 " in cluster.call(*steps))
    ask_to_stop(1)
    job.until("step 10", lambda: reached(9))
    ask_to_stop(2)
    assert job.log.count("asked to by USR1: job") == 2
    assert "asked to stop: saving after step" in job.log
    job.until("step 60", lambda: reached(59))  # long before the end: losing takes seconds
    lost = job.nodes()[1]  # the batch script runs on the other node
    before = job.log.count("resumed from")
    lose(lost)
    info = job.ends()
    assert lost not in job.nodes() and info["Restarts"] >= "3"
    assert job.log.count("resumed from") > before >= 1
    undisturbed = [*flags.split(), "--run-dir", str(tmp_path)]
    pools(2).train("02", undisturbed)
    assert not differences(job.run_folder, tmp_path)


@pytest.mark.wall_clock
def test_a_task_of_an_array_requeues_itself_alone_and_has_a_folder_of_its_own(cluster, corpus_dir):
    argv = f"{SMALL} --data {corpus_dir} --steps 2000 --log-every 1 --checkpoint-every 50"
    command = ["sbatch", "--parsable", "--array=0-1", "--comment=a note", "--gpus-per-node=0"]
    array = cluster.call(*command, "01_single_gpu/train.sbatch", *argv.split()).strip()
    tasks = [Job(cluster, f"{array}_{task}", cluster.folder / "absent") for task in range(2)]
    for job in tasks:
        job.until("task", lambda job=job: "BatchHost" in job.info())
        job.log_path = cluster.folder / f"01_single_gpu-{job.info()['JobId']}.log"
    for job in tasks:
        job.until("step 10", lambda job=job: "step    10" in job.log)
    # the SLURM_JOB_ID of the last one is that of the whole array
    other, last = sorted(tasks, key=lambda job: job.info()["JobId"] == array)
    cluster.call("scancel", "--signal=USR1", "--batch", last.number)
    last.until("requeue", lambda: last.info()["Restarts"] == "1")
    for job in tasks:
        comment = "squeue", "--noheader", f"--jobs={job.number}", "--format=%k"
        assert "a note, submitted 20" in cluster.call(*comment)
    last.until("resume", lambda: "resumed from" in last.log)
    assert other.info()["Restarts"] == "0"
    folders = [path.name for path in (cluster.folder / "runs/01_single_gpu").glob(f"{array}_*")]
    assert sorted(name.split("-")[0] for name in folders) == [f"{array}_0", f"{array}_1"]
    assert f"01_single_gpu-{last.info()['JobId']}.log" in cluster.make("status")
    cluster.call("scancel", array)


@pytest.mark.wall_clock
def test_a_batch_script_without_srun_continues_in_its_own_folders_when_requeued(
    cluster, corpus_dir
):
    flags = f"{SMALL} --data {corpus_dir} --log-every 1 --checkpoint-every 2"
    train = f"python 01_single_gpu/train.py {flags}"
    lines = ["source slurm/env.sh || exit", f"{train} --steps 4", f"{train} --steps 6 --lr 1e-2"]
    lines += ["if ((${SLURM_RESTART_COUNT:-0} == 0)); then sleep 100; fi"]
    job = cluster.batch("--requeue", "--open-mode=append", script="\n".join(lines))
    job.until("end of both", lambda: job.log.count("test loss") == 2)
    cluster.call("scontrol", "requeue", job.number)
    job.ends()
    assert job.log.count("nothing left to do") == 2
    folders = list((cluster.folder / "runs/01_single_gpu").glob(f"{job.number}-*"))
    assert sorted(len(metrics_of(folder)) for folder in folders) == [4, 6]


@pytest.mark.wall_clock
def test_a_preempted_job_is_requeued_and_one_that_a_signal_stops_does_not_look_complete(
    cluster, corpus_dir
):
    argv = f"{SMALL} --data {corpus_dir} --steps 5000 --log-every 1"
    command = ["sbatch", "--parsable", "--partition=low", "--gpus-per-node=0"]
    number = cluster.call(*command, "01_single_gpu/train.sbatch", *argv.split()).strip()
    job = Job(cluster, number, cluster.folder / f"01_single_gpu-{number}.log")
    job.until("step 10", lambda: "step    10" in job.log)
    cluster.call("sbatch", "--partition=high", "--exclusive", "--wrap=sleep 1")
    job.until("step", lambda: "\nstep" in job.log.partition("resumed from")[2])
    assert "preempted by another job" in job.log and job.info()["Restarts"] == "1"
    cluster.call("scancel", "--signal=TERM", number)
    job.ends("FAILED")
    assert f"scontrol requeue {number} continues it" in job.log
