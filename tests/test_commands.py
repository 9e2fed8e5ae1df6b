"""What `make run` and `make submit` start, with fake tools; the jobs' scripts and errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from harness import REPO, assert_same_curve, metrics_of, stage_path, stages
from processes import executable
from slurm_cluster import PACKAGES, STRAY, Cluster, copy_of_repository, need

from tools.stages import TINY

pytestmark = pytest.mark.slow


# ---- on one machine ----


# test_slurm.py starts stages on two nodes by every launcher
def test_readmes_command_of_mpirun_starts_a_stage(tmp_path, reference, corpus_dir):
    need("mpirun", packages="openmpi-bin")
    command = "mpirun -n 4 python 04_fsdp/train.py --data sample"
    assert f"    {command}" in (REPO / "RUNNING.md").read_text()
    words = command.replace(" 4 ", " 2 ").removesuffix(" --data sample").split()
    flags = f"{TINY} --data {corpus_dir} --steps 3".split()
    environment = {k: v for k, v in os.environ.items() if not STRAY.match(k)}
    # Open MPI as root, on fewer cores than processes, and where there is no ssh
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment |= {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_plm": "isolated"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    words += [*flags, "--run-dir", str(tmp_path)]
    subprocess.run(words, cwd=REPO, env=environment, check=True, timeout=300)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["launcher"], config["world_size"]) == ("mpirun", 2)
    assert_same_curve(metrics_of(tmp_path), reference(flags))


def launched(bin: Path, tool: str, script: str, **variables: str) -> str:
    """What `make run-04` starts where `tool` is this script."""
    executable(bin / tool, f"#!/bin/sh\n{script}")
    settings = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}"}
    settings = {k: v for k, v in settings.items() if k != "CUDA_VISIBLE_DEVICES"} | variables
    command = ["sh", "tools/run.sh", "true", "04_fsdp/train.py"]
    return subprocess.run(command, cwd=REPO, env=settings, capture_output=True, text=True).stdout


@pytest.mark.quick
@pytest.mark.parametrize(
    "gpus, visible, processes",
    [
        (0, None, 2),
        (1, None, 1),
        (4, None, 4),
        (4, "-1", 2),
        (4, "", 2),
        (4, "2,3,-1,0", 2),
        (4, "1", 1),
    ],
)
def test_make_run_starts_one_process_per_gpu(tmp_path, gpus, visible, processes):
    listed = "".join(f"echo GPU {i}: H100\n" for i in range(gpus))
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    said = launched(tmp_path, "nvidia-smi", listed, **variables)
    assert f"--nproc-per-node {processes} 04_fsdp/train.py" in said
    assert "--local-addr 127.0.0.1" in said  # else a host name that does not resolve makes it hang


@pytest.mark.quick
def test_make_runs_of_the_same_second_have_different_ids(tmp_path):
    said = [launched(tmp_path, "date", "echo 20250101-120000\n") for _ in range(2)]
    ids = [re.search(r"--rdzv-id (\S+)", each)[1] for each in said]
    assert ids[0] != ids[1] and all(x.startswith("20250101-120000-") for x in ids)


@pytest.mark.quick
def test_make_passes_on_what_a_user_types_and_a_run_ignores_a_pods_variables(tmp_path):
    typed = "--run-dir /scratch/$USER/a$(b)"
    words = ["make", "-n", "run-01", f"ARGS={typed}", f"VENV={sys.prefix}"]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True)
    assert f"01_single_gpu/train.py {typed}\n" in done.stdout, done
    executable(tmp_path / "python", "#!/bin/sh\nenv")
    env = os.environ | {"PET_NNODES": "2", "PET_MAX_RESTARTS": "3", "NPROC": "1"}
    words = ["sh", REPO / "tools/run.sh", tmp_path / "python", "02_ddp/train.py"]
    said = subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True).stdout
    assert "PET_MAX_RESTARTS=3\n" in said and "PET_NNODES" not in said


@pytest.mark.quick
def test_make_works_whatever_a_users_variables_say_of_python_and_pip(tmp_path):
    env = {**os.environ, "PYTHONSAFEPATH": "1", "PIP_USER": "1", "PIP_TARGET": str(tmp_path / "x")}
    subprocess.run(["make", "diff-02"], cwd=REPO, env=env, stdout=subprocess.DEVNULL, check=True)
    (tmp_path / "v").mkdir()
    for tool in ("pip", "python"):
        executable(tmp_path / "v/bin" / tool, '#!/bin/sh\necho "$@" "target=$PIP_TARGET" >>said\n')
    (tmp_path / "requirements.txt").write_text("x\n")
    setup = ["sh", REPO / "tools/setup.sh", sys.executable, "v"]
    for _ in range(2):  # the second installs nothing: it may be of another clone
        subprocess.run(setup, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, check=True)
    (install,) = re.findall(".*pip install.*", (tmp_path / "said").read_text())
    assert "--no-user" in install and install.endswith("target=")


# ---- errors where something is missing ----


def make(
    folder: Path, *words: str, checks_flags: bool = False, **scripts: str
) -> subprocess.CompletedProcess:
    """Run `make` with only the commonest tools on the path, and with these scripts.

    checks_flags: with the Python that checks a job's flags, which takes seconds.
    """
    bin = folder / "bin"
    bin.mkdir()
    common = "bash sh env make awk grep sed expr printf cat dirname id uname basename realpath"
    for tool in common.split():
        (bin / tool).symlink_to(shutil.which(tool))
    for tool, lines in scripts.items():
        executable(bin / tool, f"#!/bin/sh\n{lines}\n")
    copy = copy_of_repository(folder / "copy", site="" if checks_flags else "VENV=none\n")
    return subprocess.run(
        ["make", *words], cwd=copy, env={"PATH": str(bin)}, capture_output=True, text=True
    )


def said_in_one_line(done: subprocess.CompletedProcess) -> str:
    """The error of a command that submitted nothing."""
    (said,) = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode != 0 and "sbatch" not in done.stdout
    return said


SILENT = "echo 'squeue: error: first' >&2; echo 'squeue: fatal: no configuration' >&2; exit 1"


@pytest.mark.parametrize("goal", ["submit-04", "submit-all", "status", "logs-04", "cancel"])
@pytest.mark.parametrize(
    "tools, says",
    [
        ({}, "sbatch"),
        (dict(sbatch="exit 1", sinfo=SILENT, squeue=SILENT), "(squeue: fatal: no configuration)"),
    ],
    ids=["missing", "silent"],
)
def test_slurm_that_is_missing_or_does_not_answer_is_a_one_line_error(tmp_path, goal, tools, says):
    said = said_in_one_line(make(tmp_path, goal, **tools))
    assert says in said and "make cluster" in said


SINFO = """\
case "$*" in
*%P*--partition* | *--partition*%P*) echo "small 1 gpu:8" ;;
*%P*) printf 'gpu* 2 gpu:a100:8(S:0-1)\\ngpu* 1 gpu:a100:4\\ncpu 9 (null)\\n' ;;
*) echo gpu:8 ;;
esac
"""
SLURM = dict(
    sbatch='echo "7;$SUBMITTED$SLURM_MEM_PER_CPU" >&2; echo "7;cluster"', sinfo=SINFO, squeue=""
)


@pytest.mark.parametrize("time", ["4", "4:59", "0:04:59", "0-0:04", "0-00:04:59", "6"])
def test_time_shorter_than_the_warning_is_an_error_at_submission(tmp_path, time):
    longer = ["SBATCH_SIGNAL=B:USR1@300"] if time == "6" else []
    said = said_in_one_line(make(tmp_path, "submit-04", f"TIME={time}", *longer, **SLURM))
    least = 7 if longer else 5
    assert f"TIME={time} is too short" in said and f"TIME={least} (minutes)" in said


@pytest.mark.parametrize("signal", ["USR1@300", "B:USR1", "R:USR1@300"])
def test_a_warning_that_the_batch_script_would_not_get_is_an_error(signal):
    environment = {**os.environ, "SBATCH_SIGNAL": signal}
    command = ["slurm/launch.sh", "python", "train.py"]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and f"SBATCH_SIGNAL={signal}: pass B:USR1@SECONDS" in done.stderr


@pytest.mark.parametrize("time", ["5", "0", "08:00", "1:00:00", "1-0", "UNLIMITED"])
def test_time_that_is_long_enough_is_submitted(tmp_path, time):
    done = make(tmp_path, "submit-04", f"TIME={time}", **SLURM)
    assert done.returncode == 0 and f"--time={time}" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "words, says",
    [
        ("submit-02 NODES=4", "NODES=4: the partition has 3,"),
        ("submit-02 PARTITION=small", "NODES=2: the partition has 1,"),  # the header's two
        ("submit-04 NODES=2 GPUS=3 ARGS=--shard-degree=4", "--shard-degree 4 does not divide"),
        ("submit-04 NODES=2 GPUS=a100:3 ARGS=--shard-degree=4", "--shard-degree 4 does not"),
        ("submit-all ARGS=--zero-stage=2", "unrecognized arguments: --zero-stage=2"),  # of 01
    ],
)
def test_a_job_that_can_never_run_is_an_error_before_anything_is_submitted(tmp_path, words, says):
    done = make(tmp_path, *words.split(), checks_flags="ARGS" in words, **SLURM)
    assert says in said_in_one_line(done)


def test_status_and_cancel_find_the_jobs_of_a_folder_of_any_name(tmp_path):
    copy = copy_of_repository(tmp_path / "a | b")
    rows = f"7|RUNNING|0:10|node1|02_ddp|{copy}\n8|PENDING|0:00|(Resources)|a | b|{copy}"
    for tool, lines in {"squeue": f"echo '{rows}'", "sbatch": "", "scancel": ""}.items():
        executable(tmp_path / "bin" / tool, f"#!/bin/sh\n{lines}")
    executable(tmp_path / "bin/scontrol", "#!/bin/sh\necho 'KillWait    = 45 sec'")
    (tmp_path / "other/slurm").mkdir(parents=True)
    env = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    env |= {"CDPATH": f"{tmp_path}/other", "SQUEUE_FORMAT": "%i"}
    for word, says in (
        ("status", "7    02_ddp  RUNNING"),
        ("status", "8    a   b   PENDING"),
        ("cancel", "less than 45 s: make logs-02"),
    ):
        done = subprocess.run(
            ["slurm/jobs.sh", word], cwd=copy, env=env, capture_output=True, text=True
        )
        assert says in done.stdout, done


def test_what_sbatch_rejects_is_not_reported_as_a_job(tmp_path):
    fails = "echo 'sbatch: error: invalid partition' >&2; exit 1"
    done = make(tmp_path, "submit-02", **SLURM | {"sbatch": fails})
    assert done.returncode != 0 and "invalid partition" in done.stderr
    assert "job " not in done.stdout


def test_submission_passes_cpus_memory_and_its_time_and_names_the_gpus_it_does_not_take(tmp_path):
    words = ["NODES=1", "CPUS=96", "MEM=0", "SLURM_MEM_PER_CPU=1"]  # the last: of the job around it
    done = make(tmp_path, "submit-04", *words, **SLURM)
    assert done.returncode == 0 and "job 7, log 04_fsdp-7.log" in done.stdout, done.stderr
    assert "--cpus-per-task=96 --mem=0 04_fsdp/train.sbatch" in done.stdout
    assert "a node has 8: GPUS=8" in done.stdout
    assert re.search(r"^7;\d{8}-\d{6}$", done.stderr, re.MULTILINE)  # for the job's environment


# ---- launch.sh, with fake Slurm commands ----

SCONTROL = """\
sleep "${SLOW-0}"
case "$*" in
*"show job"*) echo "JobId=7 StartTime=$START EndTime=$END Command=x" ;;
*requeue*) echo "scontrol $*"; exit "${REQUEUE_STATUS-0}" ;;
*) echo "scontrol $*" ;;
esac
"""
SRUN = 'trap "exit $STATUS" USR1; touch started; while [ ! -e ended ]; do sleep 0.1; done'


def launch(
    folder: Path, before: float, left: float | None, signal_it: bool = False, **variables: str
) -> subprocess.CompletedProcess:
    """Run launch.sh in a job that started `before` seconds ago and has `left` seconds left."""

    def printed(seconds: float | None) -> str:  # by scontrol
        when = time.localtime(time.time() + (seconds or 0))
        return "Unknown" if seconds is None else time.strftime("%Y-%m-%dT%H:%M:%S", when)

    squeue = 'echo "$COMMENT"'
    for tool, lines in {"scontrol": SCONTROL, "srun": SRUN, "squeue": squeue}.items():
        executable(folder / tool, f"#!/bin/bash\n{lines}\n")
    env = dict(os.environ, PATH=f"{folder}:{os.environ['PATH']}", SLURM_JOB_ID="7", STATUS="0")
    env |= {"SRUN_CPUS_PER_TASK": "1", "SLURM_JOB_NUM_NODES": "1", "COMMENT": "(null)"}
    env |= {"START": printed(-before), "END": printed(left)} | variables
    command = ["bash", str(REPO / "slurm/launch.sh"), "python", "x.py"]
    job = subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while job.poll() is None and not (folder / "started").exists():
        time.sleep(0.05)
    if signal_it:
        job.send_signal(signal.SIGUSR1)
    else:
        (folder / "ended").touch()
    out, err = job.communicate(timeout=60)
    return subprocess.CompletedProcess(command, job.returncode, out, err)


@pytest.mark.parametrize(
    "before, left, status, unknown",
    [
        (5, 290, 2, {}),
        (5, 296, 0, {}),
        (3000, 60, 0, {}),  # nearly over
        (5, None, 0, {}),  # no limit
        (5, 290, 0, {"START": "", "END": ""}),  # scontrol does not answer
    ],
)
def test_job_shorter_than_the_warning_is_an_error(tmp_path, before, left, status, unknown):
    done = launch(tmp_path, before, left, **unknown)
    assert done.returncode == status and (tmp_path / "started").exists() == (status == 0), done
    assert status == 0 or done.stderr.count("\n") == 1 and "--time=5" in done.stderr


@pytest.mark.wall_clock  # launch.sh must have set its trap when the signal comes
@pytest.mark.parametrize(
    "left, status, restarts, comment, requeued",
    [
        (200, "138", "0", "(null)", True),  # the first start without a step
        (200, "138", "1", "no-step-in-life-0", False),
        (200, "143", "1", "no-step-in-life-0", False),
        (200, "138", "3", "no-step-in-life-0", True),  # the starts between them had steps
        # this start had a step, and saves before scontrol answers
        (200, "0", "1", "no-step-in-life-0", True),
        (3000, "138", "1", "no-step-in-life-0", True),  # a user's signal, long before the end
    ],
)
def test_job_that_hits_its_time_limit_twice_before_its_first_step_is_not_requeued(
    tmp_path, left, status, restarts, comment, requeued
):
    variables = {"STATUS": status, "SLURM_RESTART_COUNT": restarts, "COMMENT": comment}
    variables |= {"SLOW": "1"} if status == "0" else {}
    done = launch(tmp_path, 3600, left, signal_it=True, **variables)
    assert done.returncode == int(status), done
    assert ("scontrol requeue 7" in done.stdout) == requeued, done
    assert ("hit its time limit twice" in done.stderr) == (not requeued)
    assert ("asked to by USR1: job 7" in done.stdout) == (left == 3000)
    noted = requeued and status != "0" and left == 200
    assert (f"no-step-in-life-{restarts}" in done.stdout) == noted
    assert done.stdout.count("no-step") <= 1  # the note replaces an earlier one


def test_a_job_that_cannot_be_requeued_says_so_and_an_arrays_task_requeues_itself(tmp_path):
    variables = {"REQUEUE_STATUS": "1", "JOB": "5_2", "COMMENT": "a note, submitted x"}
    done = launch(tmp_path, 3600, 200, signal_it=True, **variables | {"STATUS": "138"})
    assert "scontrol requeue 5_2" in done.stdout and done.returncode == 1, done
    assert "could not be requeued" in done.stderr and "--run-dir" in done.stderr
    assert "JobId=5_2 Comment=a note, submitted x, no-step-in-life-0" in done.stdout


ERRORS_OF_ENV = {  # the job's variables: what env.sh says, and returns to the shell with status 2
    "": "SLURM_JOB_ID=",
    "SLURM_JOB_ID=8": "scontrol show job 8 does not answer",
    "SLURM_JOB_ID=7 SHOWN=HetJobId=7": "heterogeneous jobs are not supported",
    "SLURM_JOB_ID=7 SUBMITTED=x SLURM_JOB_NODELIST=n VENV=absent": "environment in absent",
}


@pytest.mark.parametrize("variables", ERRORS_OF_ENV)
def test_an_error_of_env_sh_is_a_line_and_ends_no_shell(tmp_path, variables):
    executable(tmp_path / "scontrol", '#!/bin/sh\necho "JobId=7 $SHOWN NodeAddr=n"')
    executable(tmp_path / "sleep", "#!/bin/sh")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    env |= dict(word.split("=", 1) for word in variables.split())
    script = f"source {REPO}/slurm/env.sh; echo status $?"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.stdout == "status 2\n" and ERRORS_OF_ENV[variables] in done.stderr, done


SHOWN = "JobId=7 NodeAddr=127.0.0.1\n   Restarts={restarts} x\n   StdOut={log}"


@pytest.mark.parametrize("restarts", [0, 1])
def test_env_sh_takes_a_free_port_and_moves_the_log_of_another_cluster_aside(tmp_path, restarts):
    log = tmp_path / "01_single_gpu-7.log"
    log.write_text("of another cluster\n")
    shown = SHOWN.format(restarts=restarts, log=log)
    executable(tmp_path / "scontrol", f"#!/bin/sh\necho '{shown}'\necho $SLURM_TIME_FORMAT")
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_TIME_FORMAT": "%a"}
    env |= {"SLURM_JOB_ID": "7", "SUBMITTED": "x", "SLURM_JOB_NODELIST": "n", "VENV": ""}
    script = f"cd {REPO}; source slurm/env.sh; echo $MASTER_PORT $SLURM_TIME_FORMAT"
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 20007))
        taken.listen()
        done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert re.fullmatch(r"200(0[89]|1\d)\n", done.stdout), done
    moved = [path.read_text() for path in tmp_path.glob("01_single_gpu-7.*.log")]
    assert (log.read_text(), *moved) == (
        ("", "of another cluster\n") if restarts == 0 else ("of another cluster\n",)
    )


@pytest.mark.parametrize(
    "command, says",
    [
        ("make -n submit-01 EDIT=s/a/b/", "EDIT= is for run-NN"),
        ("env NPROC=0 sh tools/run.sh true 02_ddp/train.py", "NPROC=0: pass 1 or more"),
        ("env NPROC=-2 sh tools/run.sh true 02_ddp/train.py", "NPROC=-2: pass 1 or more"),
        ("env EDIT=s/aaa/b/ sh tools/run.sh true 01_single_gpu/train.py", "changes nothing"),
    ],
)
def test_a_variable_that_cannot_work_is_an_error(command, says):
    done = subprocess.run(command.split(), cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 2 and says in done.stderr


def test_edits_at_the_same_time_have_scripts_of_their_own(tmp_path):
    script = tmp_path / "02_ddp/train.py"
    script.parent.mkdir()
    script.write_text("a = 1\n")
    command = ["sh", REPO / "tools/run.sh", "true", "02_ddp/train.py"]
    pipe = {"cwd": tmp_path, "stdout": subprocess.PIPE, "text": True}
    edits = [os.environ | {"EDIT": f"s/1/{x}/"} for x in (2, 3, 2)]
    started = [subprocess.Popen(command, env=env, **pipe) for env in edits]
    copies = [tmp_path / each.communicate()[0].split()[-1] for each in started]
    assert [copy.read_text() for copy in copies] == ["a = 2\n", "a = 3\n", "a = 2\n"]
    assert [*script.parent.iterdir()] == [script]


def test_an_edit_of_a_file_beside_the_script_reaches_the_script(tmp_path):
    folder, root = tmp_path / "07_3d", {"cwd": tmp_path, "text": True, "capture_output": True}
    folder.mkdir(), (tmp_path / "common").mkdir()
    lines = ["import os", "import sys", "from pathlib import Path"]
    lines += ["sys.path.insert(0, str(Path(__file__).resolve().parent))"]
    lines += ["import pipeline, other", "print(pipeline.a, other.a, os.environ['EDIT'])"]
    (folder / "train.py").write_text("\n".join(lines) + "\n")
    for name in ("pipeline", "other"):
        (folder / f"{name}.py").write_text("a = 1\n")
    command = ["sh", REPO / "tools/run.sh", "true", "07_3d/train.py"]
    edits = {
        ("s/1/2/", "pipeline.py"): "2 1 pipeline.py: s/1/2/",
        ("s/other.a/7/", ""): "1 7 s/other.a/7/",
    }
    for (edit, file), expected in edits.items():
        environment = os.environ | {"EDIT": edit, "FILE": file, "PYTHONSAFEPATH": "1"}
        ran = subprocess.run(command, env=environment, **root)
        edited = ran.stdout.split()[-1]
        environment["EDIT"] = f"{file}: {edit}" if file else edit
        done = subprocess.run([sys.executable, edited], env=environment, **root)
        assert done.stdout == f"{expected}\n", (ran, done)
    done = subprocess.run(command, env=os.environ | {"EDIT": "s/b/2/", "FILE": "other.py"}, **root)
    assert done.returncode == 2 and "changes nothing in 07_3d/other.py" in done.stderr


def test_sbatch_files_differ_in_names_and_numbers_alone_and_have_the_warning_of_launch_sh():
    assert "${SBATCH_SIGNAL:-B:USR1@180}" in (REPO / "slurm/launch.sh").read_text()
    others = set()
    for stage in stages():
        folder = stage_path(stage).parent.name
        text = stage_path(stage).with_name("train.sbatch").read_text()
        launcher = "python" if stage == "01" else "torchrun"
        own = [
            rf"#SBATCH --job-name={folder}\n",
            r"#SBATCH --(?:nodes|gpus-per-node)=\d\n",
            rf'exec slurm/launch.sh {launcher} {folder}/train.py "\$@"\n$',
        ]
        for line in own:
            text, count = re.subn(f"(?m)^{line}", "", text)
            assert count, f"{folder}/train.sbatch has no line {line}"
        others.add(text)
    (text,) = others
    assert "#SBATCH --signal=B:USR1@180\n" in text
    # Slurm writes no log to a folder that does not exist
    assert not re.search("^#SBATCH --output=.*/", text, re.MULTILINE)


@pytest.mark.parametrize("exists", [True, False])
def test_staging_copies_existing_data_or_warns(tmp_path, exists):
    if exists:
        (tmp_path / "corpora/sample").mkdir(parents=True)
    env = dict(os.environ, STAGE_DATA="1", DATA_ROOT=str(tmp_path / "corpora"))
    env |= {"SLURM_NODEID": "0", "SLURM_JOB_ID": f"test-{os.getpid()}"}
    copy = f"/dev/shm/corpora-test-{os.getpid()}-0"
    left, others = Path(f"{copy}-killed"), Path(copy)  # nobody can prepare the folder in advance
    left.mkdir(), others.mkdir()
    command = [REPO / "slurm/node.sh", "sh", "-c", 'echo "in $DATA_ROOT:" $(ls "$DATA_ROOT")']
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    others.rmdir()  # it is there still, and empty
    assert done.returncode == 0, done
    assert re.fullmatch(rf"in {copy}-\w{{6}}:{' sample' * exists}\n", done.stdout)
    assert not [*Path("/dev/shm").glob(f"{left.name[:-6]}*")]  # nor what a killed start has left
    if not exists:
        assert done.stderr.count("\n") == 1 and "make data" in done.stderr
        assert str(tmp_path / "corpora") in done.stderr


RANKS = """#!/usr/bin/env python3
import pathlib, subprocess, sys
rank = "import pathlib, signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0)); "
rank += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "
rank += "pathlib.Path(sys.argv[1]).touch(); signal.sigtimedwait([], 20); sys.exit(3)"
folder = pathlib.Path(__file__).parent
command = lambda i: [sys.executable, "-c", rank, folder / f"rank{i}"]
ranks = [subprocess.Popen(command(i), start_new_session=True) for i in range(2)]
sys.exit(max(rank.wait() for rank in ranks))
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_the_process_that_slurm_started_reaches_the_ranks(tmp_path, number):
    """Under cgroups Slurm signals no other. torchrun starts each rank in a session of its own."""
    executable(tmp_path / "python", RANKS)
    environment = dict(os.environ, PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_NODEID="0")
    node = subprocess.Popen(["bash", REPO / "slurm/node.sh", "torchrun"], env=environment)
    while not all((tmp_path / f"rank{i}").exists() for i in range(2)):
        assert node.poll() is None
        time.sleep(0.05)
    node.send_signal(number)
    assert node.wait(10) == 0


def test_make_cluster_names_missing_packages(tmp_path):
    done = make(tmp_path, "cluster")
    assert done.returncode != 0 and not (tmp_path / "copy/slurm/cluster").exists()
    assert "sbatch" in done.stderr and "apt install slurm-wlm munge" in done.stderr


# ---- make cluster ----


def test_make_cluster_submit_logs_and_cluster_down(tmp_path, corpus_dir):
    need("sbatch", "slurmctld", "slurmd", "munged", packages=PACKAGES)
    laptop = Cluster(copy_of_repository(tmp_path / "copy"))
    try:
        assert "2 nodes" in laptop.make("cluster", "PORT=17100")
        assert "make cluster-down" in laptop.make("cluster", fails=True)
        laptop.submit("submit-01", f"ARGS={TINY} --data {corpus_dir} --steps 2")
        said = laptop.make("logs-01")
        assert "step     1  loss" in said and "COMPLETED" in said
        assert "stopped" in laptop.make("cluster-down")
    finally:
        if (tmp_path / "copy/slurm/cluster").exists():
            laptop.make("cluster-down")
    assert not (tmp_path / "copy/slurm/cluster").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="the test above has started one without root")
def test_cluster_can_be_started_without_root():
    need("sbatch", "slurmctld", "slurmd", "munged", packages=PACKAGES)
    with tempfile.TemporaryDirectory() as home:  # pytest's folder is readable by its user only
        shutil.copytree(REPO / "slurm", f"{home}/slurm", ignore=shutil.ignore_patterns("cluster"))
        subprocess.run(["chown", "-R", "nobody", home], check=True)
        env = {"PATH": "/usr/bin:/bin", "HOME": home, "PORT": "17200"}
        env |= {"SLURM_CONF": f"{home}/slurm/cluster/slurm.conf"}
        as_user = "setpriv --reuid=nobody --regid=nogroup --clear-groups".split()

        def run(command: str) -> str:
            words = [*as_user, *command.split()]
            return subprocess.check_output(words, cwd=home, env=env, text=True, timeout=120)

        run("slurm/cluster.sh up")
        try:
            assert run("srun --nodes=2 --gpus-per-node=4 id -un") == "nobody\n" * 2
        finally:
            run("slurm/cluster.sh down")
