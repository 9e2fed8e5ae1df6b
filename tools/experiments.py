r"""Run the experiments of the stages' READMEs and compare the output with the figures they state.

    make experiments             # all of them
    make experiments ONLY=02     # those of stage 02

An experiment is a `###` heading in a README's section "Experiments", with one fenced `sh` block.
What its output must be is in `experiments.check` beside the README, below the same heading, so that
a reader who opens the README in an editor does not see the answer. Each line is a check:

    val loss ([\d.]+) => 5.177 ± 0.002     a figure, and how far the output may be off
    step  *\d+ .* ([\d,]+) tok/s => 9000 within 4x      a time or a speed
    exit => 1                              the status of the command, 0 if not stated
    must be no reduction                   a pattern that has to occur

Patterns are regular expressions. The figure is the group of the last match; several figures,
separated by commas, are those of the last matches. The text must state every figure too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
LIMIT = 240  # seconds; an experiment takes less than one minute on two idle cores


@dataclass(frozen=True)
class Check:
    """A line of an `experiments.check`: a pattern, and the figures that it must find."""

    pattern: str
    figures: tuple[str, ...] = ()
    tolerance: str = ""  # "± 0.1" or "within 2x"; empty: the figure exactly

    def accepts(self, figure: str, found: str) -> bool:
        expected, actual = number(figure), number(found)
        if self.tolerance.startswith("within"):
            factor = float(self.tolerance.split()[1].rstrip("x"))
            return expected / factor <= actual <= expected * factor
        return abs(actual - expected) <= float(self.tolerance.lstrip("± ") or 0) + 1e-12


@dataclass
class Experiment:
    """One experiment of a README."""

    stage: str
    title: str
    text: str  # what a reader sees
    command: str
    checks: list[Check] = field(default_factory=list)


def number(text: str) -> float:
    return float(text.replace(",", ""))


def parse_check(line: str) -> Check:
    pattern, arrow, rest = (part.strip() for part in line.partition("=>"))
    if not arrow:
        return Check(pattern)
    found = re.fullmatch(r"([-\d.,e ]+?) *((?:±|within) .*)?", rest)
    if found is None:
        raise ValueError(f"not a figure with a tolerance: {rest!r}")
    figures = tuple(figure for figure in re.split(r", +", found[1].strip()) if figure)
    return Check(pattern, figures, found[2] or "")


def sections(text: str) -> dict[str, str]:
    """The text below each `###` heading, by its title."""
    parts = re.split(r"^### ", text, flags=re.M)[1:]
    return {title.strip(): body for title, _, body in (part.partition("\n") for part in parts)}


def experiments_of(readme: Path) -> list[Experiment]:
    """The experiments of a README, in order; none if it has no such section."""
    found = re.search(r"^## Experiments\n(.*?)(?=^## |\Z)", readme.read_text("utf-8"), re.M | re.S)
    texts, path = sections(found[1] if found else ""), readme.with_name("experiments.check")
    checks = sections(path.read_text("utf-8") if path.exists() else "")
    if texts.keys() != checks.keys():
        different = ", ".join(sorted(texts.keys() ^ checks.keys()))
        raise ValueError(f"{path} and the README have different experiments: {different}")
    experiments = []
    for title, text in texts.items():
        commands = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
        if len(commands) != 1 or "<!-- check" in text:
            raise ValueError(f"{readme}: {title}: one `sh` block, and its checks in {path.name}")
        lines = [parse_check(line) for line in checks[title].splitlines() if line.strip()]
        experiments.append(Experiment(readme.parent.name[:2], title, text, commands[0], lines))
    return experiments


def all_experiments() -> list[Experiment]:
    readmes = sorted(REPO.glob("[0-9][0-9]_*/README.md"))
    return [experiment for readme in readmes for experiment in experiments_of(readme)]


def failures(experiment: Experiment, output: str, status: int) -> list[str]:
    """The checks that this output does not pass, one line for each."""
    problems = []
    expected = "0"
    for check in experiment.checks:
        if check.pattern == "exit":
            expected = check.figures[0]
            continue
        found = re.findall(check.pattern, output, re.M)
        if not found:
            problems.append(f"no match for {check.pattern}")
        elif check.figures:
            last = found[-len(check.figures) :]
            if len(last) < len(check.figures) or not all(map(check.accepts, check.figures, last)):
                wanted = f"{', '.join(check.figures)} {check.tolerance}".strip()
                problems.append(f"{check.pattern}: {', '.join(last)}, not {wanted}")
    if str(status) != expected:
        problems.append(f"exit status {status}, not {expected}")
    return problems


def run(experiment: Experiment) -> tuple[list[str], float, str]:
    """Run the command; returns the failed checks, the seconds it took, and its output."""
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    start = time.perf_counter()
    try:
        done = subprocess.run(
            ["sh", "-c", experiment.command],
            cwd=REPO,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return [f"not finished after {LIMIT} s"], LIMIT, ""
    seconds = time.perf_counter() - start
    return failures(experiment, done.stdout, done.returncode), seconds, done.stdout


def main() -> None:
    chosen = [e for e in all_experiments() if not sys.argv[1:] or e.stage in sys.argv[1:]]
    failed = 0
    for experiment in chosen:
        problems, seconds, output = run(experiment)
        verdict = "FAILED" if problems else "ok"
        title = f"{experiment.stage} {experiment.title}"
        print(f"{title:64} {verdict:6} {seconds:5.1f} s", flush=True)
        for problem in problems:
            print(f"    {problem}")
        if problems:
            failed += 1
            print("    " + "\n    ".join(output.splitlines()[-12:]), flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} experiments as their READMEs say")
    sys.exit(failed > 0 or not chosen)


if __name__ == "__main__":
    main()
