"""A live Slurm for the tests: nodes on this machine with a network and a host name each.

slurm/cluster.sh starts it in a copy of the repository. Jobs write logs and runs to the folder that
they were submitted from, and the tests need a `slurm/site.env` of their own.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import REPO, metrics_of

# variables that an outer `make test ARGS=...` or a user's shell would pass on
STRAY = re.compile(
    r"M(AKE|FLAGS)|(ARGS|NODES|GPUS|PARTITION|ACCOUNT|TIME|CLUSTER|PORT)$|S(LURM|BATCH)_"
)
# the states of a job that has not ended: after the last two comes PENDING
ACTIVE = {*"PENDING RUNNING SIGNALING COMPLETING CONFIGURING REQUEUED NODE_FAIL".split()}
LOCK = Path("/run/slurm-of-tests.lock")  # names a folder whose cluster root stops: not in /tmp
PACKAGES = "slurm-wlm munge iproute2"
SECONDS = 300  # time limit of a wait: generous, because a busy machine is slow


def skip_or_fail(reason: str) -> None:
    """Skip a test where something is not installed; in continuous integration, fail."""
    if os.environ.get("CI"):
        pytest.fail(f"in CI nothing is skipped: {reason}")
    pytest.skip(reason)


def need(*tools: str, packages: str) -> None:
    path = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))
    missing = [tool for tool in tools if not shutil.which(tool, path=path)]
    if missing:
        skip_or_fail(f"no {', '.join(missing)} here (apt install {packages})")


def copy_of_repository(folder: Path, site: str = "") -> Path:
    """Copy the files that a job needs, with a site.env for the tests and the lines of `site`."""
    ignored = shutil.ignore_patterns("__pycache__", "cluster", "site.env", "*.log")
    for path in [*REPO.glob("[0-9][0-9]_*/"), REPO / "common", REPO / "slurm", REPO / "tools"]:
        shutil.copytree(path, folder / path.name, ignore=ignored)
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(REPO / name, folder)
    python = f"VENV=\nPATH={Path(sys.executable).parent}:$PATH\n"
    if (Path(sys.prefix) / "bin/activate").exists():
        python = f"VENV={sys.prefix}\n"
    (folder / "slurm/site.env").write_text(python + site)
    return folder


@dataclass
class Cluster:
    """`folder`: the copy that jobs are submitted from."""

    folder: Path

    def call(self, *command: str, fails: bool = False, **variables: str) -> str:
        """Run a command in the copy; returns its output. It must succeed or, with `fails`, fail."""
        kept = {k: v for k, v in os.environ.items() if not STRAY.match(k)}
        conf = {"SLURM_CONF": str(self.folder / "slurm/cluster/slurm.conf")}
        done = subprocess.run(
            list(map(str, command)),
            cwd=self.folder,
            env=kept | conf | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        assert (done.returncode != 0) == fails, f"{command}: {done.returncode}\n{done.stdout}"
        return done.stdout

    def make(self, *words: str, fails: bool = False) -> str:
        # `make` finds the cluster of its own folder by itself
        return self.call("env", "-u", "SLURM_CONF", "make", *words, fails=fails)

    def submit(self, goal: str, *words: str) -> list[Job]:
        """Run `make submit-...`; returns the jobs that its output names."""
        said = self.make(goal, *words)
        found = re.findall(r"^  job (\d+), log (\S+):", said, re.MULTILINE)
        assert found, said
        return [Job(self, number, self.folder / log) for number, log in found]

    def batch(self, *flags: str, script: str) -> Job:
        """Submit a job that runs these lines of shell."""
        path = self.folder / "script.sh"
        path.write_text(f"#!/usr/bin/env bash\nset -e\n{script}\n")
        flags = ("--cpus-per-task=4", "--output=%x-%j.log", *flags)
        number = self.call("sbatch", "--parsable", *flags, str(path)).strip()
        return Job(self, number, self.folder / f"script.sh-{number}.log")


@dataclass
class Job:
    cluster: Cluster
    number: str
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else "(no log)"

    def info(self) -> dict[str, str]:
        """The fields of `scontrol show job`: JobState, Restarts, NodeList, StartTime, ..."""
        said = self.cluster.call("scontrol", "--oneliner", "show", "job", self.number)
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def nodes(self) -> list[str]:
        nodes = self.info()["NodeList"]
        return self.cluster.call("scontrol", "show", "hostnames", nodes).split()

    def until(self, what: str, true: Callable[[], bool]) -> None:
        """Wait until `true()`; fails if the job ends before. what: for the message."""
        end = time.monotonic() + SECONDS
        while not true():
            state = self.info()["JobState"]
            if state not in ACTIVE and not true() or time.monotonic() > end:
                pytest.fail(f"no {what}: {state} of job {self.number}\n{self.log}")
            time.sleep(0.3)

    def ends(self, state: str = "COMPLETED") -> dict[str, str]:
        """Wait until the job has ended; its state must be `state`."""
        self.until("end", lambda: self.info()["JobState"] not in ACTIVE)
        info = self.info()
        assert info["JobState"] == state, f"{info}\n{self.log}"
        return info

    @property
    def run_folder(self) -> Path:
        (folder,) = self.cluster.folder.glob(f"runs/*/{self.number}-*")
        return folder

    def metrics(self) -> list[dict]:
        return metrics_of(self.run_folder)


@contextmanager
def live_cluster(folder: Path, **variables: str) -> Iterator[Cluster]:
    """A cluster in a copy of the repository. The nodes' network namespaces have fixed names, so
    another run of the tests waits here."""
    with open(LOCK, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        left = file.read().strip()  # a cluster of tests that were killed
        if left and Path(left).exists():
            subprocess.run([REPO / "slurm/cluster.sh", "down"], env=os.environ | {"CLUSTER": left})
        file.truncate(0)
        file.write(str(folder / "slurm/cluster"))
        file.flush()
        cluster = Cluster(copy_of_repository(folder))
        try:
            cluster.call("slurm/cluster.sh", "up", **variables)
            yield cluster
        finally:
            cluster.call("slurm/cluster.sh", "down")
        file.truncate(0)
