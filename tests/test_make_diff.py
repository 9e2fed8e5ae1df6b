"""`make diff-NN`: no line is lost, what is folded is identical, and each diff is short."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import permutations

import pytest
from harness import REPO, lines_of, stage_file, stage_path, stages

from tools import diff

pairs = pytest.mark.parametrize("old, new", [*permutations(stages(), 2)])

# ---- laws of all pairs ----


@pairs
def test_a_comparison_has_every_line_of_both_stages(old, new):
    found, rest, _ = diff.compare(old, new)
    older = {base.first: base for base, _ in found if base and base.stage[:2] == old}
    older |= {block.first: block for block in rest}
    for stage, blocks in (
        (new, [block for _, block in found]),
        (old, map(older.get, sorted(older))),
    ):
        lines = [line for block in blocks for line in block.lines if line.strip()]
        assert lines == [line for line in lines_of(stage) if line.strip()]
    for base, block in found:
        hunks = diff.align(base, block)
        for side, each in ((1, base), (2, block)):
            numbered = [line for hunk in hunks for line in hunk[side]]
            assert numbered == ([*enumerate(each.lines, each.first)] if each else [])
        assert all(
            a == b
            for mark, *ab in hunks
            if mark in " ="
            for (_, a), (_, b) in zip(*ab, strict=True)
        )


@pairs
def test_what_is_folded_is_identical_in_the_stage_that_is_named(old, new):
    for summary, group in diff.folded(diff.compare(old, new)[0]):
        named = re.search(r": as in (\d\d)_\w+", summary)
        assert named or not summary or summary.startswith(diff.TOP)
        for _, block in group if named else ():
            assert "\n".join(block.lines) in stage_path(named[1]).read_text(), block.name


@pytest.mark.parametrize("new", stages()[1:])
def test_the_diff_is_short_enough_to_be_read(new):
    lines = [*diff.report(stage_file(new).compare, new)]
    count, most = sum(line.strip() != "" for line in lines), stage_file(new).diff_lines
    assert count <= most, f"diff_lines in the stage's file allows {most} lines"
    assert max(map(len, lines)) <= 102


# ---- the command ----


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=60)


def test_make_diff_needs_no_environment():
    plain = run(sys.executable, "-S", "-m", "tools.diff", "03", "--from", "01").stdout
    assert plain.startswith("* 01_single_gpu -> 03_zero")
    assert run("make", "-s", "diff-03", "FROM=01", "VENV=none").stdout == plain


@pytest.mark.parametrize("words", ["diff-42", "run-42", "submit-42", "diff-03 FROM=42", "diff-01"])
def test_a_stage_that_does_not_exist_is_named_in_one_line(words):
    done = run("make", "-s", *words.split())
    said, *rest = done.stderr.splitlines()
    assert done.returncode == 2 and not done.stdout
    assert ("'01'" if words == "diff-01" else "42") in said and "02" in said
    # make itself may add that the tool has failed, as `make[1]` where make runs the tests
    assert not rest or re.match(r"make(\[\d+\])?: \*\*\* \[", rest[0])
