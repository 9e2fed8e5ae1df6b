"""`make diff-NN`: new, changed and known definitions, no line lost, and the terminal's output."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from harness import REPO, stage_file, stage_path, stages

sys.path.insert(0, str(REPO / "tools"))

import compare
import diff
from compare import Comparison, Definition, Row
from stages import pairs as stage_pairs

pairs = pytest.mark.parametrize("old, new", stage_pairs())

compare_stages = cache(compare.compare_stages)


def compared(old: str, new: str, *earlier: str) -> Comparison:
    """Compare two stages given by their texts; earlier ones are called 0_old, 1_old, ..."""
    known = [compare.split_stage(f"{i}_old", text) for i, text in enumerate(earlier)]
    return compare.compare(
        compare.split_stage("8_before", old), compare.split_stage("9_after", new), *known
    )


def by_name(comparison: Comparison) -> dict[str, Definition]:
    definitions = [x for each in comparison.definitions for x in (each, *each.parts)]
    return {each.block.name: each for each in definitions}


def text_of(comparison: Comparison) -> list[str]:
    return diff.Renderer(colour=False).diff(comparison)


def leaves(comparison: Comparison) -> Iterator[Definition]:
    for definition in comparison.definitions:
        yield from definition.leaves


# ---- no line is lost ----


@pairs
def test_shown_and_folded_lines_add_up_to_the_file(old, new):
    comparison = compare_stages(old, new)
    text = text_of(comparison)
    shown = sum(line[:1] in ("+", "~", " ") for line in text)
    folds = [re.search(r"(?:\((\d+) lines|\.\.\. (\d+) lines)", x) for x in text if x[:1] == "="]
    folded = sum(int(fold[1] or fold[2]) for fold in folds)
    n_lines = len(stage_path(new).read_text().splitlines())
    between = n_lines - sum(len([r for r in leaf.rows if r.new]) for leaf in leaves(comparison))
    assert shown + folded + between == n_lines


@pairs
def test_the_whole_file_is_the_file(old, new):
    lines = diff.Renderer(colour=False).whole_file(compare_stages(old, new))
    kept = [line[2:] for line in lines if line[0] in "+ "]
    in_place = [line for line in lines if line[0] == "~"]
    merged = [re.sub(r"\[-.*?-\](?!\])|{\+(.*?)\+}", r"\1", x[2:]) for x in in_place]
    expected = stage_path(new).read_text().splitlines()
    assert len(kept) + len(merged) == len(expected) and set(kept) <= set(expected)
    assert not [line for line in merged if line not in expected]


@pytest.mark.parametrize("new", stages()[1:])
def test_folded_definitions_are_identical_in_the_stage_that_is_named(new):
    """An independent check: it reads the files with `ast`, not with the tool."""

    @cache
    def sources(stage: str) -> set[str]:
        text = stage_path(stage).read_text()
        nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, compare.DEFINITIONS)]
        return {ast.get_source_segment(text, node) for node in nodes}

    comparison = compare_stages(stage_file(new).compare, new)
    text = stage_path(new).read_text()
    nodes = {n.lineno: n for n in ast.walk(ast.parse(text)) if isinstance(n, compare.DEFINITIONS)}
    known = [x for x in by_name(comparison).values() if x.status == "known"]
    for definition in (x for x in known if x.block.kind in ("class", "function")):
        source = ast.get_source_segment(text, nodes[definition.block.header])
        assert source in sources(definition.base_stage[:2]), definition.block.name


@pytest.mark.parametrize("new", stages()[1:])
def test_the_diff_is_short_enough_to_be_read(new):
    """`make diff-NN` is the lesson of a stage."""
    count = diff.lines_to_read(compare_stages(stage_file(new).compare, new))
    most = stage_file(new).diff_lines
    assert count <= most, f"diff_lines in the stage's file allows {most} lines"


# ---- new, changed, known, renamed, gone ----

OLD = '''"""Before."""

import os


class Tool:
    """A tool."""

    def same(self):
        return 1

    def other(self):
        first = 1
        second = first + 2
        return first + second

    def gone(self):
        return 3


def helper(x):
    return x + 1


def dropped():
    return 0
'''

NEW = '''"""After."""

import os
import sys


def helper(x):
    return x + 1


class Tool:
    """A tool."""

    def same(self):
        return 1

    def other(self):
        first = 1
        second = first + 3
        return first + second

    def added(self):
        return 4


def fresh():
    return sys.argv
'''


def test_each_definition_is_new_changed_or_known():
    comparison = compared(OLD, NEW)
    assert {name: x.status for name, x in by_name(comparison).items()} == {
        "module docstring": "changed",
        "imports": "changed",
        "helper": "known",  # although it has moved
        "Tool": "changed",
        "Tool.(head)": "known",
        "Tool.same": "known",
        "Tool.other": "changed",
        "Tool.added": "new",
        "fresh": "new",
    }
    assert [block.name for block in comparison.gone] == ["dropped"]
    assert [block.name for block in by_name(comparison)["Tool"].gone] == ["Tool.gone"]


def test_identical_to_any_earlier_stage_is_folded_and_names_it():
    changed = NEW.replace("x + 1", "x + 2")
    comparison = compared(changed, NEW, OLD)
    assert by_name(comparison)["helper"].base_stage == "0_old"
    assert "= def helper: as in 0_old (2 lines)" in text_of(comparison)
    (helper,) = [line for line in text_of(compared(NEW, NEW, OLD)) if "def helper" in line]
    assert helper.endswith("as in 8_before (2 lines)")  # the stage to compare with comes first


def test_a_definition_of_an_earlier_stage_alone_is_compared_with_that():
    without = OLD[: OLD.index("def helper")]
    comparison = compared(without, NEW.replace("x + 1", "x + 2"), OLD)
    assert by_name(comparison)["helper"].status == "changed"
    text = text_of(comparison)
    at = text.index("* def helper: compared with helper in 0_old")
    assert text[at + 1 :][:2] == ["  def helper(x):", "~     return x + [-1-]{+2+}"]


@pytest.mark.parametrize("line", ["return x + 2", "return x + 1  # why", "return x  + 1"])
def test_one_changed_line_keeps_a_definition_from_being_folded(line):
    helper = by_name(compared(NEW, NEW.replace("return x + 1", line)))["helper"]
    assert helper.status != "known" and len(helper.rows) in (2, 3)
    same = by_name(compared(NEW, NEW))
    assert {x.status for x in same.values()} == {"known"}


def test_decorators_and_the_comments_above_belong_to_a_definition():
    before = "import os\n\n# alone\n\n\n# why\n@cache\ndef f():\n    return 1\n"
    for old, new in (("# why", "# why not"), ("@cache", "@property")):
        found = by_name(compared(before, before.replace(old, new)))
        assert (found["f"].status, found["# alone"].status) == ("changed", "known")
    method = "class A:\n    x = 1\n\n    # why\n    @cache\n    def f(self):\n        return 1\n"
    found = by_name(compared(method, method.replace("# why", "# because")))
    assert (found["A.(head)"].status, found["A.f"].status) == ("known", "changed")


def test_banners_comments_and_statements_are_definitions_too():
    banner = "# {0}\n# A title\n# {0}\n".format("-" * 34)
    text = f"{banner}# a note\nx = 1\ny: int = 2\n\n\ndef f():\n    pass\n\n# the end\n"
    blocks = compare.split_stage("stage", text).blocks
    assert [(b.kind, b.first, b.last) for b in blocks] == [
        ("banner", 1, 3),
        ("statement", 4, 5),
        ("statement", 6, 6),
        ("function", 9, 10),
        ("comment", 12, 12),
    ]
    assert [b.name for b in blocks][1:3] == ["x", "y"]


def test_a_renamed_class_is_compared_by_the_table(monkeypatch):
    renamed = OLD.replace("class Tool", "class Device").replace("def other", "def another")
    assert by_name(compared(OLD, renamed))["Device"].status == "new"
    table = {"Device": ["Nothing", "Tool"], "Device.another": ["Tool.other"]}
    monkeypatch.setattr(compare, "RENAMED", table)
    comparison = compared(OLD, renamed)
    found = by_name(comparison)
    assert found["Device.same"].status == "known" and found["Device.another"].status == "changed"
    assert not comparison.gone and not found["Device"].gone
    text = text_of(comparison)
    assert "* class Device: compared with Tool in 8_before" in text
    assert "=     def same: as Tool.same in 8_before (2 lines)" in text
    assert "~     def [-other-]{+another+}(self):" in text
    both = compared(OLD, f"{OLD}\n\n{renamed}")  # the old name exists: nothing was renamed
    assert by_name(both)["Device"].status == "new"


def test_every_name_of_the_table_is_there_and_its_older_names_are_gone():
    found = {n: compare.read_stage(n).by_name for n in stages()}
    for name, older in compare.RENAMED.items():
        for each in older:
            renamed = [n for n in stages() if name in found[n] and each not in found[n]]
            assert renamed, f"no stage has {name} without {each}"
            assert any(each in found[n] for n in stages() if n < renamed[0]), each


def test_a_definition_with_less_than_half_left_is_shown_as_rewritten():
    lines = [f"    {word} = {word}_of(x)\n" for word in "abcdefgh"]
    before = "def f(x):\n" + "".join(lines)
    after = "def f(x):\n" + "".join(line.upper() for line in lines[:6]) + "    return x\n"
    comparison = compared(before, after)
    assert by_name(comparison)["f"].status == "rewritten"
    assert [line[0] for line in text_of(comparison)[3:]] == ["*", *"+" * 8]
    assert by_name(compared(before, before + "    return x\n" * 30))["f"].status == "changed"


def test_lines_far_from_a_change_are_folded_except_the_line_of_def():
    before = "def f(x):\n" + "".join(f"    first{i} = second{i} + third{i}\n" for i in range(20))
    text = text_of(compared(before, before.replace("third12", "x")))[3:]
    assert text[:2] == ["  def f(x):", "=     ... 10 lines"] and text[-1] == "=     ... 5 lines"
    assert text[4] == "~     first12 = second12 + [-third12-]{+x+}"


# ---- lines and words ----


def rows(before: str, after: str) -> list[Row]:
    old, new = (compare.split_stage("stage", f"def f():\n{x}").blocks[0] for x in (before, after))
    return compare.align(old, new)[1:]


def test_words_that_differ_are_marked_and_indentation_is_not():
    (row,) = rows("    return f(a, b)\n", "    return f(a, g(b))\n")
    pieces = [(old, new) for old, new in row.words if old != new]
    assert pieces == [("", "g("), ("", ")")]
    assert "".join(old for old, _ in row.words) == row.old.text
    assert "".join(new for _, new in row.words) == row.new.text
    wrapped = rows("    call(f(a))\n", "    with g():\n        call(f(a))\n")
    assert [row.kind for row in wrapped] == ["added", "changed"]
    assert all(old == new for old, new in wrapped[1].words[1:])  # after the indentation


def test_lines_are_aligned_with_those_that_they_resemble_most():
    before = "    first = compute(a)\n    return first\n"
    after = "    zero = nothing()\n    first = compute(b)\n\n    return first\n"
    assert [row.kind for row in rows(before, after)] == ["added", "changed", "added", "equal"]


# ---- the command ----


def run(*words: str, cwd: Path = REPO, **environment: str) -> subprocess.CompletedProcess:
    """Run a command with these environment variables, and none of the others about colour."""
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "PAGER")}
    return subprocess.run(
        words, cwd=cwd, env=clean | environment, capture_output=True, text=True, timeout=60
    )


def tool(*words: str, **environment: str) -> subprocess.CompletedProcess:
    return run(sys.executable, "tools/diff.py", *words, **environment)


def test_a_pipe_gets_colours_only_if_they_are_forced():
    plain, coloured = tool("02").stdout, tool("02", FORCE_COLOR="1").stdout
    assert "\033" not in plain and "\033[32m+ class Bucket:\033[0m\n" in coloured
    assert tool("02", FORCE_COLOR="1", NO_COLOR="1").stdout == plain


def test_the_whole_file_and_the_lines_to_read():
    full = tool("02", "--full").stdout.splitlines()
    lines = stage_path("02").read_text().splitlines()
    assert len([line for line in full if line[0] != "-"]) == len(lines)
    count = sum(bool(line.strip()) for line in tool("02").stdout.splitlines())
    assert diff.lines_to_read(compare_stages("01", "02")) == count


def make(*words: str) -> subprocess.CompletedProcess:
    return run("make", "-s", *words)


def test_make_diff_takes_from_and_full():
    assert make("diff-03", "FROM=01").stdout == tool("03", "--from", "01").stdout
    assert make("diff-03", "FULL=1").stdout == tool("03", "--full").stdout


@pytest.mark.parametrize("words", ["diff-42", "run-42", "submit-42", "diff-03 FROM=42", "diff-01"])
def test_a_stage_that_does_not_exist_is_named_in_one_line(words):
    done = make(*words.split())
    said, *rest = done.stderr.splitlines()
    assert done.returncode == 2 and not done.stdout
    missing = "01 is the first stage" if words == "diff-01" else "stage 42 does not exist"
    assert missing in said.replace("Stage", "stage")
    # make itself may add that the tool has failed, as `make[1]` where make runs the tests
    assert not rest or re.match(r"make(\[\d+\])?: \*\*\* \[", rest[0])


def test_a_closed_pipe_ends_the_diff_quietly():
    command = f"{sys.executable} tools/diff.py 07 --full | head -n 1"
    done = run("bash", "-c", f"set -o pipefail; {command}")
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
