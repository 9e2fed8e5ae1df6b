"""Mutation testing: break the code on purpose, one change per run; each time the tests must fail.

    python tests/mutants.py                     every row of mutants.txt, and a table of results
    python tests/mutants.py --only dropout      the rows whose name or file contains the word
    python tests/mutants.py --part 1/5          every fifth row, from the first on
    python tests/mutants.py --jobs 1            one after another

Each mutant is applied to a copy of the repository in a temporary folder, where its tests run. They
must pass without it and fail with it. Exit status 1 if a mutant survives, 2 if a row is outdated.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("mutants.txt")
NOT_COPIED = (".git", ".venv", "data", "runs", "__pycache__", ".pytest_cache", ".ruff_cache")
TIMEOUT = 240  # seconds; tests that hang count as failed


@dataclass
class Mutant:
    """One change: in `file` the text `old`, which occurs there exactly once, becomes `new`."""

    name: str
    file: str = ""
    old: str = ""
    new: str = ""
    tests: str = ""
    verdict: str = field(default="", init=False)
    detail: str = field(default="", init=False)
    seconds: float = field(default=0.0, init=False)


def read_table() -> list[Mutant]:
    found: list[Mutant] = []
    for line in TABLE.read_text().splitlines():
        if line.startswith("["):
            found.append(Mutant(line.strip().strip("[]")))
        elif line.startswith(("- ", "+ ")):
            old_or_new = "old" if line[0] == "-" else "new"
            text = getattr(found[-1], old_or_new)
            setattr(found[-1], old_or_new, f"{text}\n{line[2:]}" if text else line[2:])
        elif line.startswith(("file: ", "tests: ")):
            name, value = line.split(": ", 1)
            setattr(found[-1], name, value)
    return found


def copy_of_repo(folder: Path) -> Path:
    shutil.copytree(REPO, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
    return folder


def run_tests(folder: Path, tests: str) -> tuple[int, str]:
    """pytest's exit status (1: tests failed) and its output."""
    words = shlex.split(tests)
    paths = [f"tests/{w}" if re.match(r"test_\w+\.py", w) else w for w in words]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    environment["RERUNS"] = "0"  # a mutant may break only some of a test's runs
    try:
        done = subprocess.run(
            [*command, *paths],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return 1, f"FAILED not finished within {TIMEOUT} s"
    return done.returncode, done.stdout + done.stderr


def first_failure(output: str) -> str:
    for line in output.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            return re.sub(r"^(FAILED|ERROR) (tests/)?|( - .*)$", "", line)
    return ""


def try_mutant(mutant: Mutant) -> Mutant:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as parent:
        folder = copy_of_repo(Path(parent) / "repo")
        path = folder / mutant.file
        text = path.read_text() if path.is_file() else ""
        if text.count(mutant.old) != 1:
            mutant.verdict = "out of date"
            mutant.detail = f"its text occurs {text.count(mutant.old)} times in {mutant.file}"
            return mutant
        path.write_text(text.replace(mutant.old, mutant.new))
        status, output = run_tests(folder, mutant.tests)
    verdicts = {0: "SURVIVED", 1: "killed"}
    mutant.verdict = verdicts.get(status, "out of date")
    mutant.detail = first_failure(output) if status < 2 else " ".join(output.split())[-200:]
    mutant.seconds = time.monotonic() - started
    return mutant


def check_baseline(mutants: list[Mutant], pool: ThreadPoolExecutor) -> str:
    """The first test that fails without any mutant, or "": such a failure would prove nothing."""
    chosen: dict[str, set[str]] = {}  # by file, what `-k` selects; in one run for all its mutants
    for mutant in mutants:
        file, *words = shlex.split(mutant.tests)
        chosen.setdefault(file, set()).add(f"({words[1]})" if words else "test_")
    runs = [f"{file} -k {shlex.quote(' or '.join(ks))}" for file, ks in chosen.items()]
    with tempfile.TemporaryDirectory(prefix="mutant-") as parent:
        folder = copy_of_repo(Path(parent) / "repo")
        for status, output in pool.map(lambda tests: run_tests(folder, tests), runs):
            if status != 0:
                return first_failure(output) or f"pytest ended with status {status}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="part of a name or of a file's path")
    parser.add_argument("--part", default="1/1", help="K/N: part K of N")
    parser.add_argument("--jobs", type=int, default=2, help="how many run in parallel")
    args = parser.parse_args()
    mutants = [m for m in read_table() if args.only in m.name or args.only in m.file]
    part, parts = map(int, args.part.split("/"))
    mutants = mutants[part - 1 :: parts]
    if not mutants:
        print(f"no mutant has {args.only!r} in its name or file")
        return 2
    width = max(len(m.name) for m in mutants)
    with ThreadPoolExecutor(args.jobs) as pool:
        failure = check_baseline(mutants, pool)
        if failure:
            print(f"fails without any mutant: {failure}")
            return 2
        print(f"{'mutant':{width}}  verdict      seconds  by", flush=True)
        for m in pool.map(try_mutant, mutants):
            print(f"{m.name:{width}}  {m.verdict:11}  {m.seconds:7.0f}  {m.detail}", flush=True)
    killed = sum(m.verdict == "killed" for m in mutants)
    survived = [m.name for m in mutants if m.verdict == "SURVIVED"]
    print(f"\n{killed} of {len(mutants)} mutants killed", flush=True)
    if survived:
        print(f"survived: {', '.join(survived)}")
    return 1 if survived else 2 if killed < len(mutants) else 0


if __name__ == "__main__":
    sys.exit(main())
