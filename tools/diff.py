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
from itertools import groupby

from compare import (
    Block,
    Comparison,
    Definition,
    Fold,
    NoSuchStage,
    Row,
    compare_stages,
    condensed,
    headline,
    note,
)
from stages import stage_file, stages

WIDTH = 100
COLOURS = {"+": "32", "-": "31", "~": "33", "=": "36", "*": "1", " ": ""}

# ---- rendering ----


class Renderer:
    """Renders a comparison as lines of text, each with a mark in its first column.

    Every line ends its own colours, because a pager starts each line without any.
    """

    def __init__(self, colour: bool):
        self.colour = colour

    def diff(self, comparison: Comparison) -> list[str]:
        old, new = comparison.old.name, comparison.new.name
        legend = f"+ new   - gone   ~ words changed: {self.both('gone', 'new')}   = folded"
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
        notes = [self.line("*", f"{headline(definition.block)}: {said}")] if said else []
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
        lines = []
        for is_split, group in groupby(items, key=is_split_in_two):
            if is_split:
                pairs = [self.old_and_new(item) for item in group]
                lines += [line for side in zip(*pairs, strict=True) for line in side if line]
            else:
                lines += [self.one_line(item) for item in group]
        return lines

    def one_line(self, item: Row | Fold) -> str:
        if isinstance(item, Fold):
            return self.line("=", item.summary)
        if item.kind == "equal":
            return self.line(" ", item.new.text)
        (_, indent), *words = item.words
        return self.line("~", indent + "".join(self.both(old, new) for old, new in words))

    def old_and_new(self, item: Row | Fold) -> tuple[str, str]:
        """The old line and the new one; an empty text where there is none."""
        if isinstance(item, Fold):
            return self.line("-", item.summary), ""
        old = self.line("-", self.side(item, 0)) if item.old else ""
        new = self.line("+", self.side(item, 1)) if item.new else ""
        return old, new

    def side(self, row: Row, side: int) -> str:
        """The old or the new text of a row; in colour, its changed words are marked."""
        if row.kind != "changed" or not self.colour:
            return row[side].text
        indent, *words = row.words
        text = indent[side]
        for word in words:
            is_marked = word[0] != word[1] and word[side]
            text += f"\033[7m{word[side]}\033[27m" if is_marked else word[side]
        return text

    def both(self, old: str, new: str) -> str:
        """A piece of a line that changed in place: the old words, then the new ones."""
        if old == new:
            return new
        if self.colour:
            gone, added = f"\033[31;7m{old}\033[0m", f"\033[32;7m{new}\033[0m"
        else:
            gone, added = f"[-{old}-]", f"{{+{new}+}}"
        return (gone if old else "") + (added if new else "")

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


def is_split_in_two(item: Row | Fold) -> bool:
    """Whether an item is shown as an old and a new line; one of them may be missing."""
    if isinstance(item, Fold):
        return all(row.kind == "removed" for row in item.rows)
    return item.kind != "equal" and not (item.kind == "changed" and reads_in_place(item))


def reads_in_place(row: Row) -> bool:
    """Whether old and new words are readable within one line: few, and less than what stays."""
    _, *words = row.words
    changed = [(old, new) for old, new in words if old != new]
    kept = sum(len(old) for old, new in words if old == new)
    longest = max(sum(len(old) for old, _ in changed), sum(len(new) for _, new in changed))
    shown = sum(len(old) + len(new) for old, new in changed) + kept + len(row.words[0][1])
    return len(changed) <= 2 and longest <= kept and shown <= WIDTH


def spaced(paragraphs: list[list[str]]) -> list[str]:
    """Paragraphs as lines. All that are not single lines have blank ones around them."""
    lines: list[str] = []
    apart = False
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
    if os.environ.get("NO_COLOR"):
        return False
    return sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("new", help="the stage to show, such as 04")
    parser.add_argument("--from", dest="old", help="the stage to compare with")
    parser.add_argument("--full", action="store_true", help="the whole file, changed lines marked")
    args = parser.parse_args()
    default = stage_file(args.new).compare if args.new in stages() else args.new
    if not (args.old or default):
        advice = "read its train.py, or pass FROM= another one"
        parser.exit(2, f"diff.py: {args.new} is the first stage: {advice}\n")
    try:
        comparison = compare_stages(args.old or default, args.new)
    except NoSuchStage as error:
        parser.exit(2, f"diff.py: {error}\n")
    renderer = Renderer(is_coloured())
    show(renderer.whole_file(comparison) if args.full else renderer.diff(comparison))


if __name__ == "__main__":
    main()
