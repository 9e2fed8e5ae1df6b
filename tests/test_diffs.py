"""The diff between two stages is the lesson: no shared line is moved, respaced or reworded."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from collections import Counter
from itertools import permutations

import pytest
from harness import REPO, lines_of, stage_file, stage_path, stages

from tools import diff
from tools.diff import Block, compare
from tools.stages import pairs as stage_pairs

PAIRS = stage_pairs()
pairs = pytest.mark.parametrize("before, after", PAIRS)


def code_of(line: str) -> str:
    """A line without comments and white space."""
    return re.sub(r"(^|  ) *# .*|\s", "", line)


def noise(before: list[str], after: list[str]) -> tuple[list[str], list[str]]:
    """Added lines whose code was also removed: in another hunk (moved), or in the same hunk with
    other white space or another trailing comment (respaced).

    A line that is only indented because a new block surrounds it is neither. Lines that a file has
    several times are not compared.
    """
    once = [Counter(map(code_of, lines)) for lines in (before, after)]
    opcodes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    hunks = [(before[a:b], after[c:d]) for kind, a, b, c, d in opcodes if kind != "equal"]
    removed = {code_of(x): (x, k) for k, (gone, _) in enumerate(hunks) for x in gone}
    moved, respaced = [], []
    for k, (_, added) in enumerate(hunks):
        for line in added:
            code = code_of(line)
            if len(re.findall(r"\w", code)) < 8 or any(count[code] != 1 for count in once):
                continue
            twin, place = removed.get(code, (None, None))
            if twin is not None and place != k:
                moved.append(line)
            elif twin is not None and twin.strip() != line.strip():
                respaced.append(line)
    return moved, respaced


BANNER = "# The training loop"


def without_technique(stage: str) -> list[str]:
    """The imports and the training loop, which all stages share.

    The technique and what it imports of common/ are left out: they are replaced as a whole, so an
    equal line elsewhere was not moved.
    """
    lines = lines_of(stage)
    technique = next((i for i, x in enumerate(lines) if x.startswith("# The technique")), None)
    if technique is None:
        return lines
    imports = next(i for i, line in enumerate(lines) if line.startswith("from common."))
    split, loop = lines.index("# isort: split"), lines.index(BANNER)
    return lines[:imports] + lines[split:technique] + lines[loop:]


@pairs
def test_no_line_is_moved_and_none_respaced(before, after):
    moved, respaced = noise(without_technique(before), without_technique(after))
    assert not moved, "moved:\n" + "\n".join(moved)
    assert not respaced, "respaced:\n" + "\n".join(respaced)


@pairs
def test_shared_flags_have_the_same_help(before, after):
    def flags(stage: str) -> dict[str, str]:
        text = stage_path(stage).read_text()
        text = re.sub(r"choices=\w+, ", "", text)  # a stage may have more choices
        return dict(re.findall(r'add_argument\(\s*"(--[\w-]+)",(.*?)\)\n', text, re.DOTALL))

    a, b = flags(before), flags(after)
    for flag in a.keys() & b.keys():
        assert a[flag] == b[flag], flag


# ---- inside the techniques ----


def refined(stage: str) -> list[str]:
    """The definitions that the stage's file lists as refined. The methods of a class that it lists
    as renamed count under their new class."""
    found = []
    for names in stage_file(stage).refined:
        owner, _, methods = names.partition(": ")
        found += [f"{owner}.{method}" for method in methods.split()] or [owner]
    return [name.removesuffix(".(head)") for name in found]


def differing(pairs: list[tuple[Block | None, Block]]) -> dict[str, str]:
    """The definitions of a technique that are identical to none of their earlier versions, each
    with the version that it is compared with. The head of a renamed class may differ."""
    found, inside = {}, False
    for base, block in pairs:
        if block.name.startswith("#"):
            inside = (inside or "# The technique" in block.name) and block.name != BANNER
        elif inside and base and base.lines != block.lines:
            if block.name != block.owner or block.name == base.name:
                found[block.name] = f"{base.name} in {base.stage}"
    return found


@pytest.mark.parametrize("stage", stages()[1:])
def test_a_definition_of_two_stages_is_identical_or_listed_as_refined(stage):
    found = differing(compare(stage_file(stage).compare, stage)[0])
    unlisted = {name: base for name, base in found.items() if name not in refined(stage)}
    assert not unlisted, f"not identical to an earlier stage: add to [refined]: {unlisted}"
    outdated = [name for name in refined(stage) if name not in found]
    assert not outdated, f"identical or gone: remove from [refined]: {outdated}"


# ---- `make diff-NN`: no line is lost, what is folded is identical, each diff is short ----

all_pairs = pytest.mark.parametrize("old, new", [*permutations(stages(), 2)])


@all_pairs
def test_a_comparison_has_every_line_of_both_stages(old, new):
    found, rest, _ = compare(old, new)
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


@all_pairs
def test_what_is_folded_is_identical_in_the_stage_that_is_named(old, new):
    for summary, group in diff.folded(compare(old, new)[0]):
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
