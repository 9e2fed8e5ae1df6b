"""The diff between two stages is the lesson: no shared line is moved, respaced or reworded."""

from __future__ import annotations

import difflib
import re
from collections import Counter

import pytest
from harness import lines_of, stage_file, stage_path, stages

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
COPIES = "to the letter from"  # in the title of the third banner, if there is one


def without_technique(stage: str) -> list[str]:
    """The imports and the training loop, which all stages share.

    The technique is left out: it is replaced as a whole, so an equal line elsewhere was not moved.
    """
    lines = lines_of(stage)
    technique = next((i for i, x in enumerate(lines) if x.startswith("# The technique")), None)
    loop = lines.index(BANNER)
    copies = next((i for i in range(loop, len(lines)) if COPIES in lines[i]), len(lines))
    return lines if technique is None else lines[:technique] + lines[loop:copies]


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
            inside = inside or COPIES in block.name
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


def test_moved_and_respaced_lines_are_found():
    lines = ["import one_module", "import other_module", "x = compute(1)  # why", "all_done = 1"]
    moved, respaced = noise(lines, [lines[1], lines[0], *lines[2:]])
    assert moved in ([lines[0]], [lines[1]]) and not respaced
    for other in ("x = compute( 1 )", "x = compute(1)  # another word"):
        assert noise(lines, [*lines[:2], other, lines[3]]) == ([], [other])
    wrapped = [*lines[:2], "with a_new_block:", "    x = compute(1)  # why", lines[3]]
    assert noise(lines, wrapped) == ([], [])
