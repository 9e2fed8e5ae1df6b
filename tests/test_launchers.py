"""Every stage starts the same under every launcher, by the commands that the README gives."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import REPO, assert_same_curve, stage_path, stages
from slurm_cluster import STRAY, copy_of_repository, need

pytestmark = pytest.mark.slow

SMALL = "--d-model 32 --n-layers 2 --n-heads 2 --seq-len 16 --global-batch-size 12"
README = (REPO / "README.md").read_text()


def from_readme(command: str, changes: dict[str, str]) -> list[str]:
    """A command as it stands in the README, with other numbers or another stage."""
    assert f"    {command}" in README, f"the README does not say: {command}"
    for old, new in changes.items():
        assert old in command
        command = command.replace(old, new)
    return command.split()


# ---- on one machine ----


@pytest.fixture(scope="module")
def flags(corpus_dir) -> list[str]:
    return [*SMALL.split(), "--data", str(corpus_dir), "--steps", "3", "--log-every", "1"]


def run(command: list[str], folder: Path) -> list[dict]:
    """The lines of a run's metrics, started at the root of the repository as a user would."""
    environment = {k: v for k, v in os.environ.items() if not STRAY.match(k)}
    # Open MPI as root, on fewer cores than processes, and where there is no ssh
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment |= {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_plm": "isolated"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    command = [*command, "--run-dir", str(folder)]
    done = subprocess.run(
        command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]


COMMANDS = {
    "python": "python 04_fsdp/train.py --data sample",
    "torchrun": "torchrun --nproc-per-node 4 04_fsdp/train.py --data sample",
    "mpirun": "mpirun -n 4 python 04_fsdp/train.py --data sample",
}


# every stage starts by torchrun and by srun in test_slurm.py, on two nodes; alone, from a pool of
# one, all over the tests
STARTED = [
    *(("python", stage) for stage in ("01", "04")),
    *(("torchrun", stage) for stage in ("04", "07")),
    *(("mpirun", stage) for stage in stages()[1:]),
]


@pytest.mark.parametrize("launcher, stage", STARTED)
def test_readme_command_of_each_launcher_starts_a_stage(
    launcher, stage, tmp_path, reference, flags
):
    if launcher == "mpirun":
        need("mpirun", packages="openmpi-bin")
    size = 1 if launcher == "python" else 2
    script = str(stage_path(stage).relative_to(REPO))
    changes = {"04_fsdp/train.py": script, **({" 4 ": f" {size} "} if size > 1 else {})}
    command = [x for x in from_readme(COMMANDS[launcher], changes) if x not in ("--data", "sample")]
    metrics = run([*command, *flags], tmp_path / "run")
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert (config["launcher"], config["world_size"]) == (launcher, size)
    assert_same_curve(metrics, reference(flags))


def test_make_names_a_runs_folder_by_the_time(tmp_path, flags):
    copy = copy_of_repository(tmp_path / "copy")
    kept = {k: v for k, v in os.environ.items() if not STRAY.match(k)}
    words = ["run-02", "NPROC=2", f"VENV={sys.prefix}", f"ARGS={' '.join(flags)}"]
    command = ["make", "-o", f"{sys.prefix}/.installed", *words]
    done = subprocess.run(command, cwd=copy, env=kept, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (folder,) = (copy / "runs/02_ddp").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}", folder.name)
    assert json.loads((folder / "config.json").read_text())["world_size"] == 2


# ---- what is said where something is missing ----


def make(folder: Path, *words: str, **scripts: str) -> subprocess.CompletedProcess:
    """`make` with nothing on the path but the commonest tools, and these, lines of shell."""
    bin = folder / "bin"
    bin.mkdir()
    common = "bash sh env make awk grep sed expr printf cat dirname id uname basename realpath"
    for tool in common.split():
        (bin / tool).symlink_to(shutil.which(tool))
    for tool, lines in scripts.items():
        (bin / tool).write_text(f"#!/bin/sh\n{lines}\n")
        (bin / tool).chmod(0o755)
    copy = copy_of_repository(folder / "copy")
    return subprocess.run(
        ["make", *words], cwd=copy, env={"PATH": str(bin)}, capture_output=True, text=True
    )


@pytest.mark.parametrize("goal", ["submit-04", "submit-all", "status", "logs-04", "cancel"])
def test_without_slurm_a_one_line_error_says_what_to_do(tmp_path, goal):
    done = make(tmp_path, goal)
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode != 0 and len(said) == 1
    assert "sbatch" in said[0] and "make cluster" in said[0]
    assert ("make run-04" if goal.endswith("04") else "make run-NN") in said[0]


@pytest.mark.parametrize("goal", ["submit-04", "status", "logs-04", "cancel"])
def test_slurm_that_does_not_answer_is_a_one_line_error(tmp_path, goal):
    silent = "echo 'squeue: error: first' >&2; echo 'squeue: fatal: no configuration' >&2; exit 1"
    done = make(tmp_path, goal, sbatch="exit 1", sinfo=silent, squeue=silent)
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode != 0 and len(said) == 1
    assert "(squeue: fatal: no configuration)" in said[0] and "make cluster" in said[0]


def test_make_cluster_names_missing_packages(tmp_path):
    done = make(tmp_path, "cluster")
    assert done.returncode != 0 and not (tmp_path / "copy/slurm/cluster").exists()
    assert "sbatch" in done.stderr and "apt install slurm-wlm munge" in done.stderr


@pytest.mark.parametrize(
    "prompt", ['a"; touch broken; "b', "it's $HOME, $(shell touch broken) `x`"]
)
def test_prompt_with_quotes_reaches_generate_unchanged(tmp_path, prompt):
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"
    python.write_text('#!/bin/sh\nprintf "%s|" "$PROMPT" "$@"\n')
    python.chmod(0o755)
    (tmp_path / ".installed").touch()
    command = ["make", "-s", "-f", str(REPO / "Makefile"), "-o", f"{tmp_path}/.installed"]
    command += ["generate", f"VENV={tmp_path}", f"PROMPT={prompt}", "RUN=runs/x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"{prompt}|tools/generate.py|runs/x|", done.stderr
    assert not (tmp_path / "broken").exists()
