"""What the pages of code and the comparisons show, ready for their templates.

A page of code shows every line of a file, and folds the definitions that an earlier stage has too.
A comparison shows a stage beside another one by the rules of `compare.py`: what `make diff-NN`
leaves out is folded here, so that every line of both stages is on the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import NamedTuple

from compare import (
    Block,
    Comparison,
    Definition,
    Fold,
    Row,
    condensed,
    count,
    note,
    numbered,
    title,
)
from lessons.highlight import Span, Token, changed_spans, to_html
from lessons.readme import Entry
from markupsafe import Markup

SHORTEST_FOLD = 3  # lines
ANCHORED = ("banner", "class", "function", "statement")  # kinds of blocks
UNMARKED = ("banner", "comment", "docstring", "imports")


class Item(NamedTuple):
    """Lines that are shown, or folded under a summary."""

    lines: list[Markup]
    css: str = ""
    summary: str = ""


def code_page(stage: str) -> str:
    return f"{stage[:2]}-code.html"


def anchor(block: Block) -> str:
    """The id of a block: a definition's name; of a banner, its words."""
    if block.kind == "banner":
        words = re.sub(r"[^\w\s-]", "", banner_text(block)).split()
        return "section-" + "-".join(words).lower()
    return re.sub(r"\s+", "-", block.name)


def banner_text(block: Block) -> str:
    return " ".join(text for line in block.lines if (text := line.strip("# -")))


def outline(blocks: Iterable[Block], status: dict[str, str] | None = None) -> list[Entry]:
    """The sections and definitions of a file. status: by name; then known methods are left out."""
    entries = []
    for block in (each for top in blocks for each in (top, *top.parts)):
        mark = (status or {}).get(block.name, "known").replace("known", "")
        is_method = "." in block.name
        if block.kind == "banner" and block in blocks:
            entries.append(Entry(2, anchor(block), banner_text(block)))
        elif block.kind in ("class", "function") and (mark or status is None or not is_method):
            name = block.name.rpartition(".")[2]
            entries.append(Entry(3 + is_method, anchor(block), name, mark))
    return entries


def linked(summary: str, definition: Definition) -> str:
    """The summary of a known definition, which names a stage, with a link to its line there."""
    before, stage, after = summary.rpartition(definition.base_stage)
    if not stage:
        return summary
    href = f"{code_page(stage)}#L{definition.base.first}"
    return Markup('{}<a href="{}">{}</a>{}').format(before, href, stage, after)


def number_link(number: int, href: str) -> str:
    """A line's number, drawn by the style sheet, so that copied code has none."""
    return f'<a class="no" href="{href}" data-n="{number}" tabindex="-1" aria-hidden="true"></a>'


# ---- a page of code ----


def code_items(
    lines: list[tuple[Token, ...]],
    links: dict[int, list[Span]],
    blocks: Iterable[Block] = (),
    definitions: Iterable[Definition] = (),
) -> list[Item]:
    """All lines of a file. blocks: a script's. definitions: compared with earlier stages."""
    every = (block for top in blocks for block in (top, *top.parts))
    ids = {block.first: anchor(block) for block in every if block.kind in ANCHORED}
    html = [
        code_line(i, to_html(tokens, tuple(links.get(i, ()))), ids.get(i, ""))
        for i, tokens in enumerate(lines, start=1)
    ]
    items, at = [], 1
    for leaf in (leaf for each in definitions for leaf in each.leaves):
        block, summary = leaf.block, ""
        is_definition = block.kind in ("class", "function", "statement")
        if leaf.status == "known" and is_definition and len(block.lines) >= SHORTEST_FOLD:
            summary = linked(condensed(leaf)[0].summary, leaf)
        items.append(Item(html[at - 1 : block.first - 1]))
        items.append(Item(html[block.first - 1 : block.last], block.kind, summary))
        at = block.last + 1
    return [*items, Item(html[at - 1 :])]


def code_line(number: int, html: str, id: str) -> Markup:
    """A line with its number. id: of the definition that begins there."""
    anchor = Markup(' id="{}"').format(id) if id else ""
    number_and_link = number_link(number, f"#L{number}")
    return Markup(
        f'<div class="line" id="L{number}">{number_and_link}<code{anchor}>{html}</code></div>'
    )


# ---- a comparison ----


class ComparisonView:
    """The parts of a comparison, which its template asks for from the top of the page to its end.

    tokens: of a stage's script, by the name of its folder.
    """

    def __init__(self, comparison: Comparison, tokens: Callable[[str], list[tuple[Token, ...]]]):
        self.comparison, self.tokens = comparison, tokens
        self.old, self.new = comparison.old, comparison.new
        self.shown: set[tuple[str, int]] = set()  # the lines of all stages on the page

    def outline(self) -> list[Entry]:
        every = (x for each in self.comparison.definitions for x in (each, *each.parts))
        return outline(self.new.blocks, {each.block.name: each.status for each in every})

    def id(self, block: Block) -> str:
        return "" if block.kind in ("head", "comment") else anchor(block)

    def status(self, definition: Definition) -> str:
        kind = definition.block.kind
        return kind if kind in UNMARKED else definition.status

    def note(self, definition: Definition, expected: str) -> str:
        return note(definition, expected) if definition.status == "changed" else ""

    def items(self, definition: Definition) -> list[Item]:
        """A definition's rows, equal ones, changed ones and folds; of a class, what is gone."""
        stage = definition.base_stage
        if definition.parts:
            return self.gone(definition.gone, stage, f"gone since {stage}: ")
        items = []
        if definition.status == "rewritten":
            items = [
                Item(self.rows(removed_rows(definition.base), stage), "", note(definition, ""))
            ]
        is_banner = definition.block.kind == "banner"
        rows = definition.rows if is_banner else condensed(definition)
        for kind, group in groupby(rows, key=kind_of):
            if kind == "fold":
                folds = [(self.rows(fold.rows, stage), fold.summary) for fold in group]
                items += [Item(html, "", linked(text, definition)) for html, text in folds]
            else:
                items.append(Item(self.rows(group, stage), kind))
        return items

    def gone(self, blocks: list[Block], stage: str, before: str = "") -> list[Item]:
        items = []
        for block in blocks:
            summary = f"{before}{title(block)} ({count(block.lines)})"
            items.append(Item(self.rows(removed_rows(block), stage), summary=summary))
        return items

    def others(self) -> list[Item]:
        """The older stage's definitions of which a line is not on the page yet, such as one whose
        newer version is identical to a third stage's."""
        stage = self.old.name
        leaves = [leaf for block in self.old.blocks for leaf in block.parts or [block]]
        missing = [
            leaf
            for leaf in leaves
            if any(x.text.strip() and (stage, x.number) not in self.shown for x in numbered(leaf))
        ]
        return self.gone(missing, stage)

    def rows(self, rows: Iterable[Row], stage: str) -> list[Markup]:
        """Old lines beside the new ones. stage: of the old lines."""
        html = []
        for row in rows:
            cells = self.cell(row, 0, stage) + self.cell(row, 1, self.new.name)
            html.append(Markup(f'<div class="row {row.kind}">{cells}</div>'))
        return html

    def cell(self, row: Row, side: int, stage: str) -> str:
        if row[side] is None:
            return ""
        number = row[side].number
        page, prefix = (code_page(stage), f"{stage[:2]}-") if side == 0 else ("", "")
        # a line that two definitions are compared with has its id where it is shown first
        id = "" if (stage, number) in self.shown else f' id="{prefix}L{number}"'
        self.shown.add((stage, number))
        spans = tuple(changed_spans(row, side)) if row.kind == "changed" else ()
        html = to_html(self.tokens(stage)[number - 1], spans)
        return (
            f'<div{id} class="{("old", "new")[side]}">{number_link(number, f"{page}#L{number}")}'
            f"<code>{html}</code></div>"
        )


def removed_rows(block: Block) -> list[Row]:
    return [Row(line, None) for line in numbered(block)]


def kind_of(item: Row | Fold) -> str:
    """Of changed lines, the old ones are before the new ones on a phone."""
    if isinstance(item, Fold):
        return "fold"
    return "" if item.kind == "equal" else "run"
