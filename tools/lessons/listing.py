"""What the pages of code and the comparisons show, ready for their templates.

A page of code shows every line of a file, and folds the definitions that an earlier stage has too.
A comparison shows a stage beside another one by the rules of `compare.py`: what `make diff-NN`
leaves out is folded here, so that every line of both stages is on the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby

from compare import Block, Comparison, Definition, LeftOut, Line, Row, condensed, numbered
from diff import count, indentation, title
from lessons.highlight import Span, Token, changed_spans, to_html
from markupsafe import Markup

SHORTEST_FOLD = 3  # lines
ANCHORED = ("banner", "class", "function", "statement")  # kinds of blocks


@dataclass
class Entry:
    """A line of a page's table of contents. mark: how the definition relates to the older stage."""

    level: int
    id: str
    text: str
    mark: str = ""


def anchor(block: Block) -> str:
    """The id of a block: a definition's name; of a banner, its words."""
    if block.kind == "banner":
        words = re.sub(r"[^\w\s-]", "", banner_text(block)).split()
        return "section-" + "-".join(words).lower()
    return re.sub(r"\s+", "-", block.name)


def banner_text(block: Block) -> str:
    return " ".join(text for line in block.lines if (text := line.strip("# -")))


def outline(blocks: Iterable[Block]) -> list[Entry]:
    """The sections and definitions of a file."""
    entries = []
    for block in blocks:
        if block.kind == "banner":
            entries.append(Entry(1, anchor(block), banner_text(block)))
        elif block.kind in ("class", "function"):
            entries.append(Entry(2, anchor(block), block.name))
        parts = (part for part in block.parts if part.kind in ("class", "function"))
        entries += [Entry(3, anchor(part), part.name.rpartition(".")[2]) for part in parts]
    return entries


# ---- a page of code ----


@dataclass
class Group:
    """Consecutive lines. known: the definition that they repeat; then they are folded."""

    lines: list[Markup]
    kind: str = ""
    known: Definition | None = None
    summary: str = ""


def code_groups(
    lines: list[list[Token]],
    links: dict[int, list[Span]],
    blocks: Iterable[Block] = (),
    definitions: Iterable[Definition] = (),
) -> list[Group]:
    """All lines of a file. blocks: a script's. definitions: compared with earlier stages."""
    every = (block for top in blocks for block in (top, *top.parts))
    ids = {block.first: anchor(block) for block in every if block.kind in ANCHORED}
    numbers = range(1, len(lines) + 1)
    html = [code_line(i, lines[i - 1], links.get(i, ()), ids.get(i, "")) for i in numbers]
    groups, at = [], 1
    for leaf in (leaf for each in definitions for leaf in each.leaves):
        block = leaf.block
        if at < block.first:
            groups.append(Group(html[at - 1 : block.first - 1]))
        group = Group(html[block.first - 1 : block.last], kind=block.kind)
        is_definition = block.kind in ("class", "function", "statement")
        if leaf.status == "known" and is_definition and len(block.lines) >= SHORTEST_FOLD:
            group.known = leaf
            group.summary = indentation(block.lines[0]) + title(block)
        groups.append(group)
        at = block.last + 1
    return [*groups, Group(html[at - 1 :])]


def code_line(number: int, tokens: list[Token], spans: Iterable[Span], id: str) -> Markup:
    """A line with its number. id: of the definition that begins there."""
    anchor = Markup(' id="{}"').format(id) if id else ""
    return Markup(
        f'<div class="line" id="L{number}">{number_link(number, f"#L{number}")}'
        f"<code{anchor}>{to_html(tokens, spans)}</code></div>"
    )


def number_link(number: int, href: str) -> str:
    """A line's number, drawn by the style sheet, so that copied code has none."""
    return f'<a class="no" href="{href}" data-n="{number}" tabindex="-1" aria-hidden="true"></a>'


# ---- a comparison ----


@dataclass
class Item:
    """Rows that are shown, or folded under a summary."""

    rows: list[Markup]
    summary: str | Markup = ""
    runs_on: bool = False  # changed lines: on a phone the old ones stand before the new ones


@dataclass
class Compared:
    """A definition of a comparison. items: its rows. parts: of a class, its definitions.

    note: what it is compared with, where one does not expect it.
    """

    id: str
    status: str
    note: str = ""
    items: list[Item] = field(default_factory=list)
    parts: list[Compared] = field(default_factory=list)

    @property
    def is_marked(self) -> bool:
        """Whether a label says how the definition relates to the older stage."""
        return self.status in ("new", "changed", "rewritten") and not self.parts


class ComparisonView:
    """The definitions of a comparison, and the lines that only the older stage has.

    tokens, html, code_page: of a stage's script, by the name of its folder. gone: the blocks that
    the newer stage does not have. others: of the older stage, what stands nowhere else on the page,
    such as a definition whose newer version is identical to a third stage's.
    """

    def __init__(
        self,
        comparison: Comparison,
        tokens: Callable[[str], list[list[Token]]],
        html: Callable[[str], list[str]],
        code_page: Callable[[str], str],
    ):
        self.comparison = comparison
        self.old, self.new = comparison.old, comparison.new
        self.tokens, self.html, self.code_page = tokens, html, code_page
        self.shown: set[tuple[str, int]] = set()  # the lines of older stages on the page
        self.definitions = [self.compared(each, self.old.name) for each in comparison.definitions]
        self.gone = [self.folded(block, self.old.name) for block in comparison.gone]
        self.others = [self.folded(block, self.old.name) for block in self.not_shown()]

    @property
    def outline(self) -> list[Entry]:
        entries = []
        for definition in self.comparison.definitions:
            for entry in outline([definition.block])[:1]:
                entry.mark = "" if definition.block.kind == "banner" else definition.status
                entries.append(entry)
            for part in definition.parts:
                if part.block.kind in ("class", "function") and part.status != "known":
                    name = part.block.name.rpartition(".")[2]
                    entries.append(Entry(3, anchor(part.block), name, part.status))
        return entries

    def compared(self, definition: Definition, expected: str) -> Compared:
        """A definition, which one expects to be compared with that stage."""
        block, base, stage = definition.block, definition.base, definition.base_stage
        # a head has the name of its class
        id = "" if block.kind in ("head", "comment") else anchor(block)
        shown = Compared(id, definition.status)
        if block.kind in ("banner", "comment", "docstring", "imports"):
            shown.status = block.kind
        if definition.status == "known":
            shown.items = [self.known(definition)]
        elif base and block.kind in ("docstring", "imports"):
            changed = sum(row.kind in ("added", "changed") for row in definition.rows)
            text = f"{title(block)} ({count(block.lines)}, {changed} changed)"
            shown.items = [self.fold(text, definition.rows, stage)]
        elif definition.parts:
            if stage != expected or base.name != block.name:
                shown.note = f"compared with {base.name} in {stage}"
            shown.parts = [self.compared(part, stage) for part in definition.parts]
            gone = f"gone since {stage}: "
            shown.items = [self.folded(part, stage, gone) for part in definition.gone]
        else:
            if definition.status == "rewritten":
                name = "" if base.name == block.name else f"of {base.name} "
                text = f"the older version: {count(base.lines)} {name}in {stage}"
                shown.items = [self.fold(text, removed(base), stage)]
            elif base and stage != expected:
                shown.note = f"compared with {base.name} in {stage}"
            shown.items += self.items(condensed(definition), stage)
        return shown

    def known(self, definition: Definition) -> Item:
        block, base, stage = definition.block, definition.base, definition.base_stage
        rows = [self.same(row, stage) for row in definition.rows]
        if len(block.lines) == 1 or block.kind in ("banner", "head"):
            return Item(rows)
        where = "as in" if base.name == block.name else f"as {base.name} in"
        summary = Markup('{}{}: {} <a href="{}#L{}">{}</a> ({})').format(
            *(indentation(block.lines[0]), title(block), where),
            *(self.code_page(stage), base.first, stage, count(block.lines)),
        )
        return Item(rows, summary)

    def items(self, rows: list[Row | LeftOut], stage: str) -> list[Item]:
        """Rows in items: equal ones, changed ones, and those that are left out."""
        items = []
        for kind, group in groupby(rows, key=kind_of):
            if kind == "left out":
                items += [self.fold(f"… {count(each.rows)}", each.rows, stage) for each in group]
            else:
                html = [self.row(row, stage) for row in group]
                items.append(Item(html, runs_on=kind == "changed"))
        return items

    def fold(self, summary: str, rows: list[Row], stage: str) -> Item:
        return Item([self.row(row, stage) for row in rows], summary)

    def folded(self, block: Block, stage: str, before: str = "") -> Item:
        text = f"{before}{title(block)} ({count(block.lines)})"
        return self.fold(text, removed(block), stage)

    def not_shown(self) -> list[Block]:
        """The older stage's definitions of which a line is not on the page yet."""
        shown = {number for stage, number in self.shown if stage == self.old.name}
        leaves = [leaf for block in self.old.blocks for leaf in block.parts or [block]]
        lines = {id(leaf): [x.number for x in numbered(leaf) if x.text.strip()] for leaf in leaves}
        return [leaf for leaf in leaves if not shown.issuperset(lines[id(leaf)])]

    # ---- rows ----

    def row(self, row: Row, stage: str) -> Markup:
        """An old line beside the new one. stage: of the old line."""
        cells = ""
        for side, name in enumerate((stage, self.new.name)):
            if row[side]:
                spans = changed_spans(row, side) if row.kind == "changed" else ()
                css = ("old", "new")[side]
                number, code = self.number(row[side], name), self.code(row[side], name, spans)
                cells += f'<div{self.id(row[side], name)} class="{css}">{number}{code}</div>'
        return Markup(f'<div class="row {row.kind}">{cells}</div>')

    def same(self, row: Row, stage: str) -> Markup:
        """A line that both have, once, with both numbers."""
        old = f"<span{self.id(row.old, stage)}>{self.number(row.old, stage)}</span>"
        new = f"{self.number(row.new, self.new.name)}{self.code(row.new, self.new.name, ())}"
        return Markup(f'<div{self.id(row.new, self.new.name)} class="row same">{old}{new}</div>')

    def id(self, line: Line, stage: str) -> str:
        """The id of a line where it is shown first: a definition can be compared with twice."""
        if (stage, line.number) in self.shown:
            return ""
        self.shown.add((stage, line.number))
        prefix = "" if stage == self.new.name else f"{stage[:2]}-"
        return f' id="{prefix}L{line.number}"'

    def number(self, line: Line, stage: str) -> str:
        page = "" if stage == self.new.name else self.code_page(stage)
        return number_link(line.number, f"{page}#L{line.number}")

    def code(self, line: Line, stage: str, spans: Iterable[Span]) -> str:
        html = self.html(stage)[line.number - 1]
        if spans:
            html = to_html(self.tokens(stage)[line.number - 1], spans)
        depth = min(6, len(indentation(line.text)) // 4)
        return f'<code class="in{depth}">{html}</code>'


def removed(block: Block) -> list[Row]:
    return [Row(line, None) for line in numbered(block)]


def kind_of(item: Row | LeftOut) -> str:
    if isinstance(item, LeftOut):
        return "left out"
    return "equal" if item.kind == "equal" else "changed"
