"""Show what one stage changes in another, definition by definition.

    python tools/diff.py 04             compare 04 with the stage that 04_*/stage.toml names
    python tools/diff.py 04 --from 02   or with any other stage

New definitions are shown in full, changed ones by their changed lines, and a definition that is
identical to the one of that name in an earlier stage takes one line. `make diff-04` runs this.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from compare import Block, Comparison, Definition, Fold, Row, compare_stages, condensed, note
from stages import stage_file, stages

WIDTH = 100
COLOURS = {"+": "32", "-": "31", "~": "33", "=": "36", "*": "1", " ": ""}

# ---- rendering ----


@dataclass
class Renderer:
    """Renders a comparison as lines of text, each with a mark in its first column.

    Every line ends its own colours, because a pager starts each line without any.
    """

    colour: bool

    def diff(self, comparison: Comparison) -> list[str]:
        old, new = comparison.old.name, comparison.new.name
        words = self.word("gone", 0, True) + self.word("new", 1, True)
        legend = f"+ new   - gone   ~ words changed: {words}   = folded"
        paragraphs = [[self.line("*", f"{old} -> {new}"), self.line("*", legend)]]
        for definition in comparison.definitions:
            paragraphs += self.definition(definition, old)
        if comparison.gone:
            paragraphs += [[], self.gone(old, comparison.gone, "")]
        return spaced(paragraphs)

    def whole_file(self, comparison: Comparison) -> list[str]:
        """Every line of the newer file, blank lines between definitions included."""
        lines, at = [], 1
        for leaf in (leaf for each in comparison.definitions for leaf in each.leaves):
            lines += [self.line(" ", "")] * (leaf.block.first - at) + self.rows(leaf.rows)
            at = leaf.block.last + 1
        return lines

    def definition(self, definition: Definition, expected: str) -> Iterator[list[str]]:
        """The paragraphs of a definition, which one expects to be compared with that stage."""
        if definition.block.kind == "banner":
            yield []
        said = note(definition, expected)
        notes = [self.line("*", said)] if said else []
        first, *others = definition.leaves
        yield [*notes, *self.rows(condensed(first))]
        for other in others:
            yield from self.definition(other, definition.base_stage)
        if definition.gone:
            yield self.gone(definition.base_stage, definition.gone, "    ")
        if definition.parts:
            yield []

    def rows(self, items: list[Row | Fold]) -> list[str]:
        """Rows as lines. Where old and new lines alternate, the old ones come first."""
        lines, marked = [], [each for item in items for each in self.marked(item)]
        for _, group in groupby(marked, key=lambda each: each[0] in "-+"):
            in_order = sorted(group, key=lambda each: each[0] == "+")
            lines += [self.line(mark, text) for mark, text in in_order]
        return lines

    def marked(self, item: Row | Fold) -> list[tuple[str, str]]:
        """An item as one line or as the old and the new one, each with its mark."""
        if isinstance(item, Fold):
            return [("=" if any(row.new for row in item.rows) else "-", item.summary)]
        if item.kind == "equal":
            return [(" ", item.new.text)]
        if item.kind == "changed" and reads_in_place(item):
            return [("~", self.text(item, 0, 1))]
        return [(mark, self.text(item, side)) for side, mark in enumerate("-+") if item[side]]

    def text(self, row: Row, *sides: int) -> str:
        """The old (0) or the new (1) text of a row, or both in one; changed words are marked."""
        if row.kind != "changed":
            return row[sides[0]].text
        indent, *words = row.words
        text = indent[sides[-1]]
        for word in words:
            if word[0] == word[1]:
                text += word[0]
            else:
                text += "".join(self.word(word[i], i, len(sides) == 2) for i in sides if word[i])
        return text

    def word(self, word: str, side: int, in_place: bool) -> str:
        """A changed word. in_place: the old ones and the new ones are in the same line."""
        if self.colour:
            return f"\033[3{side + 1};7m{word}\033[0m" if in_place else f"\033[7m{word}\033[27m"
        return ("[-{}-]", "{{+{}+}}")[side].format(word) if in_place else word

    def gone(self, stage: str, blocks: list[Block], indent: str) -> list[str]:
        names = ", ".join(block.name.rpartition(".")[2] for block in blocks)
        text = f"{indent}gone since {stage}: {names}"
        wrapped = textwrap.wrap(text, WIDTH, subsequent_indent=f"{indent}    ")
        return [self.line("-", x) for x in wrapped]

    def line(self, mark: str, text: str) -> str:
        text = f"{mark} {text}".rstrip() or mark
        colour = COLOURS[mark]
        if not self.colour or not colour:
            return text
        if mark == "~":  # the words have colours of their own
            return f"\033[{colour}m~\033[0m{text[1:]}"
        return f"\033[{colour}m{text}\033[0m"


def reads_in_place(row: Row) -> bool:
    """Whether old and new words are readable within one line: few, and less than what stays."""
    (_, indent), *words = row.words
    changed = [(old, new) for old, new in words if old != new]
    kept = sum(len(old) for old, new in words if old == new)
    longest = max(sum(len(old) for old, _ in changed), sum(len(new) for _, new in changed))
    shown = sum(len(old) + len(new) for old, new in changed) + kept + len(indent)
    return len(changed) <= 2 and longest <= kept and shown <= WIDTH


def spaced(paragraphs: list[list[str]]) -> list[str]:
    """Paragraphs as lines. All that are not single lines have blank ones around them."""
    lines, apart = [], False
    for paragraph in paragraphs:
        if lines and lines[-1] and (apart or len(paragraph) != 1):
            lines.append("")
        lines += paragraph
        apart = len(paragraph) != 1
    return lines


def lines_to_read(comparison: Comparison) -> int:
    return sum(bool(line.strip()) for line in Renderer(colour=False).diff(comparison))


# ---- the command ----


def show(lines: list[str]) -> None:
    """Print, at a terminal through a pager, as git does."""
    text = "".join(f"{line}\n" for line in lines)
    pager = shlex.split(os.environ.get("PAGER", "less"))
    if sys.stdout.isatty() and pager and shutil.which(pager[0]):
        environment = {"LESS": "FRX", **os.environ}  # colours pass, and a short text just stays
        subprocess.run(pager, input=text, encoding="utf-8", env=environment)
        return
    sys.stdout.reconfigure(errors="replace")
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_coloured() -> bool:
    is_wanted = sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))
    return is_wanted and not os.environ.get("NO_COLOR")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("new", help="the stage to show, such as 04")
    parser.add_argument("--from", dest="old", help="the stage to compare with")
    parser.add_argument("--full", action="store_true", help="the whole file, changed lines marked")
    args = parser.parse_args()
    for number in (args.new, args.old or args.new):
        if number not in stages():
            known = " ".join(stages())
            parser.exit(2, f"diff.py: stage {number} does not exist; the stages are {known}\n")
    old = args.old or stage_file(args.new).compare
    if not old:
        advice = "read its train.py, or pass FROM= another one"
        parser.exit(2, f"diff.py: {args.new} is the first stage: {advice}\n")
    comparison = compare_stages(old, args.new)
    renderer = Renderer(is_coloured())
    show(renderer.whole_file(comparison) if args.full else renderer.diff(comparison))


if __name__ == "__main__":
    main()
