"""The diff between two stages is the lesson: nothing moved, nothing respaced, nothing reworded."""

from __future__ import annotations

import io
import re
import tokenize
from collections import Counter
from functools import cache, lru_cache
from itertools import combinations

import pytest
from harness import stage_path, stages

PAIRS = sorted(
    {*zip(stages(), stages()[1:], strict=False), *(("01", s) for s in stages() if s > "01")}
)
pairs = pytest.mark.parametrize(
    "before, after",
    PAIRS or [pytest.param("01", "02", marks=pytest.mark.skip("there is one stage so far"))],
)


@cache
def code_of(line: str) -> str:
    """The line's code without comment and white space; of a piece of text the bare words."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline))
    except (tokenize.TokenError, SyntaxError):
        return re.sub(r"\s+", "", line)
    return "".join(t.string for t in tokens if t.type != tokenize.COMMENT and t.string.strip())


def hunks(before: list[str], after: list[str]) -> list[tuple[list[str], list[str]]]:
    """Lines removed and added, hunk by hunk, of a shortest diff."""
    n, m = len(before), len(after)
    length = [[0] * (m + 1) for _ in range(n + 1)]  # longest common subsequence of the rests
    for i in reversed(range(n)):
        row, below = length[i], length[i + 1]
        for j in reversed(range(m)):
            row[j] = below[j + 1] + 1 if before[i] == after[j] else max(below[j], row[j + 1])
    found, i, j = [([], [])], 0, 0
    while i < n or j < m:
        if i < n and j < m and before[i] == after[j]:
            i, j = i + 1, j + 1
            if found[-1] != ([], []):
                found.append(([], []))
        elif j == m or (i < n and length[i + 1][j] >= length[i][j + 1]):
            found[-1][0].append(before[i])
            i += 1
        else:
            found[-1][1].append(after[j])
            j += 1
    return found


def noise(before: list[str], after: list[str]) -> tuple[list[str], list[str]]:
    """Added lines that were removed too: elsewhere (moved), or with other white space or another
    comment behind them (respaced). A line that only goes in or out with a block that is new
    around it is neither, and what a file has several times is no one's twin."""
    once = [Counter(map(code_of, lines)) for lines in (before, after)]
    changes = hunks(before, after)
    removed = {code_of(x): (x, k) for k, (gone, _) in enumerate(changes) for x in gone}
    moved, respaced = [], []
    for k, (_, added) in enumerate(changes):
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


@lru_cache
def lines_of(stage: str) -> list[str]:
    return stage_path(stage).read_text().splitlines()


def without_technique(stage: str) -> list[str]:
    """Imports and training loop: what all stages share. A technique is replaced as a whole, and a
    line of the old one that the new one has too, elsewhere, was not moved."""
    lines = lines_of(stage)
    technique = next((i for i, x in enumerate(lines) if x.startswith("# The technique")), None)
    loop = lines.index(BANNER)
    return lines if technique is None else lines[:technique] + lines[loop:]


@pairs
def test_no_line_is_moved_and_none_respaced(before, after):
    moved, respaced = noise(without_technique(before), without_technique(after))
    assert not moved, "moved:\n" + "\n".join(moved)
    assert not respaced, "respaced:\n" + "\n".join(respaced)


@pairs
def test_shared_flags_have_the_same_help(before, after):
    def flags(stage: str) -> dict[str, str]:
        text = stage_path(stage).read_text()
        return dict(re.findall(r'add_argument\(\s*"(--[\w-]+)",(.*?)\)\n', text, re.DOTALL))

    a, b = flags(before), flags(after)
    for flag in a.keys() & b.keys():
        assert a[flag] == b[flag], flag


def test_these_checks_see_what_they_are_for():
    lines = ["import one_module", "import other_module", "x = compute(1)  # why", "all_done = 1"]
    swapped = [lines[1], lines[0], *lines[2:]]
    assert noise(lines, swapped) == ([lines[0]], []) or noise(lines, swapped) == ([lines[1]], [])
    for other in ("x = compute( 1 )", "x = compute(1)  # another word"):
        assert noise(lines, [*lines[:2], other, lines[3]]) == ([], [other])
    wrapped = [*lines[:2], "with a_new_block:", "    x = compute(1)  # why", lines[3]]
    assert noise(lines, wrapped) == ([], [])
    assert noise(lines, [*lines, "a_new_line = 3"]) == ([], [])
    removed, added = hunks(lines, wrapped)[0]
    assert removed == [lines[2]] and added == wrapped[2:4]


def test_every_pair_of_stages_is_looked_at():
    assert {a for a, _ in PAIRS} | {b for _, b in PAIRS} >= set(
        stages() if len(stages()) > 1 else []
    )
    assert len(PAIRS) <= len(list(combinations(stages(), 2)))
