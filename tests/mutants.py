"""Mutation testing: break the code on purpose, one change per run; each time the tests must fail.

    python tests/mutants.py                     every row of mutants.txt, and a table of results
    python tests/mutants.py --only dropout      the rows whose name or file contains the word
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
from dataclasses import dataclass
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


def run_tests(tests: str, mutant: Mutant | None = None) -> tuple[int, str]:
    """Run tests in a copy of the repository; returns pytest's exit status (1: tests failed) and
    the first failure, or else the end of the output."""
    words = shlex.split(tests)
    paths = [f"tests/{w}" if re.match(r"test_\w+\.py", w) else w for w in words]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
    # RERUNS: a mutant may break only some of a test's runs
    more = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "RERUNS": "0"}
    with tempfile.TemporaryDirectory(prefix="mutant-") as parent:
        folder = Path(parent) / "repo"
        shutil.copytree(REPO, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
        if mutant:
            path = folder / mutant.file
            path.write_text(path.read_text().replace(mutant.old, mutant.new))
        try:
            done = subprocess.run(
                [*command, *paths],
                cwd=folder,
                env=os.environ | more,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            return 1, f"not finished within {TIMEOUT} s"
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(.*?)(?: - .*)?$", done.stdout, re.M)
    return done.returncode, failed[1] if failed else " ".join(done.stdout.split())[-200:]


def try_mutant(mutant: Mutant) -> tuple[str, float, str]:
    """The verdict, seconds, and the test that has failed or what is wrong with the row."""
    started, path = time.monotonic(), REPO / mutant.file
    count = path.read_text().count(mutant.old) if path.is_file() else 0
    if count != 1:
        return "out of date", 0, f"its text occurs {count} times in {mutant.file}"
    status, said = run_tests(mutant.tests, mutant)
    verdict = {0: "SURVIVED", 1: "killed"}.get(status, "out of date")
    return verdict, time.monotonic() - started, said


def check_baseline(mutants: list[Mutant], pool: ThreadPoolExecutor) -> str:
    """The first test that fails without any mutant, or "": such a failure would prove nothing."""
    chosen: dict[str, set[str]] = {}  # by file, what `-k` selects; in one run for all its mutants
    for mutant in mutants:
        file, *words = shlex.split(mutant.tests)
        chosen.setdefault(file, set()).add(f"({words[1]})" if words else "test_")
    runs = [f"{file} -k {shlex.quote(' or '.join(ks))}" for file, ks in chosen.items()]
    return next((said for status, said in pool.map(run_tests, runs) if status != 0), "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="part of a name or of a file's path")
    parser.add_argument("--jobs", type=int, default=2, help="how many run in parallel")
    args = parser.parse_args()
    mutants = [m for m in read_table() if args.only in m.name or args.only in m.file]
    if not mutants:
        print(f"no mutant has {args.only!r} in its name or file")
        return 2
    width, verdicts = max(len(m.name) for m in mutants), []
    with ThreadPoolExecutor(args.jobs) as pool:
        failure = check_baseline(mutants, pool)
        if failure:
            print(f"fails without any mutant: {failure}")
            return 2
        print(f"{'mutant':{width}}  verdict      seconds  by", flush=True)
        tried = zip(mutants, pool.map(try_mutant, mutants), strict=True)
        for mutant, (verdict, seconds, said) in tried:
            print(f"{mutant.name:{width}}  {verdict:11}  {seconds:7.0f}  {said}", flush=True)
            verdicts.append(verdict)
    killed = verdicts.count("killed")
    print(f"\n{killed} of {len(mutants)} mutants killed", flush=True)
    return 1 if "SURVIVED" in verdicts else 2 if killed < len(mutants) else 0


if __name__ == "__main__":
    sys.exit(main())
