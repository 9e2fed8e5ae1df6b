"""Compare two stages definition by definition.

`compare(read_stage("03"), read_stage("04"))` returns a `Comparison`: the definitions of the newer
stage in its own order, each new, changed, rewritten, or known, that is, identical to the definition
of that name in an earlier stage. A definition holds its lines, aligned with those of the older
version, and a changed line knows which of its words have changed. `condensed` folds the lines that
a reader can do without. Nothing here prints: `diff.py` renders a comparison at the terminal, and
`lessons/` as web pages.

These are compared as one definition each:

- a function, a method or a class, with its decorators and the comments directly above it;
- the head of a class: its docstring and fields, up to the first method;
- any other statement of a module or a class, named by what it assigns or by its first line;
- a banner (`# ---- title ----`), and any other group of comments that stands alone;
- the module's docstring, and its imports.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache
from itertools import groupby, takewhile
from pathlib import Path
from typing import NamedTuple

from stages import REPO, renamed, stage_paths

# Classes that have a new name because the idea changed, and the older classes that each one is
# compared with, the closest first. A method is compared with the first method of its name in them,
# so the bases of an older class follow it. Functions and single methods can be listed too.
RENAMED = renamed()

# ---- a stage, split into blocks ----


@dataclass
class Block:
    """The lines of one definition. Line numbers count from 1 and include `last`.

    kind: docstring, imports, banner, comment, class, head, function or statement. name: with its
    class, as in `Bucket.attach`; of a comment, its text. header: the line of `def` or `class`.
    parts: of a class, its head and all that follows.
    """

    kind: str
    name: str
    first: int
    last: int
    header: int
    lines: list[str]
    parts: list[Block] = field(default_factory=list)


@dataclass
class Stage:
    """A stage's script. name: of its folder. by_name: all blocks, the parts of classes included."""

    name: str
    lines: list[str]
    blocks: list[Block]
    by_name: dict[str, Block]


def read_stage(number: str, repo: Path = REPO) -> Stage:
    path = stage_paths(repo)[number]
    return split_stage(path.parent.name, path.read_text(encoding="utf-8"))


def split_stage(name: str, text: str) -> Stage:
    lines, body = text.splitlines(), ast.parse(text).body
    merge_imports(body)
    blocks = Splitter(lines).blocks(body, "", 1, len(lines))
    by_name: dict[str, Block] = {}
    for block in (each for top in blocks for each in (top, *top.parts)):
        while block.name in by_name:  # such as a variable that is assigned twice
            block.name += "'"
        by_name[block.name] = block
    return Stage(name, lines, blocks, by_name)


DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
IMPORTS = (ast.Import, ast.ImportFrom)
RULE = r" *# ?-{20,}\n"
BANNER = rf" *# -{{4,}} .* -{{4,}}\n|{RULE}.*\n{RULE}"
COMMENTS = re.compile(rf"(?P<banner>{BANNER})|((?!{BANNER}).*\S.*\n)+")


def merge_imports(body: list[ast.stmt]) -> None:
    """Make one statement of the leading imports and the calls between them (`sys.path.insert`)."""
    leading = takewhile(lambda node: isinstance(node, (*IMPORTS, ast.Expr)), body)
    imports = [i for i, node in enumerate(leading) if isinstance(node, IMPORTS)]
    if imports:
        body[imports[0]].end_lineno = body[imports[-1]].end_lineno
        del body[imports[0] + 1 : imports[-1] + 1]


@dataclass
class Splitter:
    """Splits a script into blocks. Only blank lines between two blocks belong to none."""

    lines: list[str]

    def blocks(self, nodes: list[ast.stmt], owner: str, first: int, last: int) -> list[Block]:
        """The blocks in lines `first` to `last`: the statements of a module or of a class, each
        with its decorators and the comments directly above it, and all other comments."""
        found, end = [], first - 1
        for node in nodes:
            start = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))])
            found += self.comments(end + 1, start - 1)
            if found and found[-1].kind == "comment" and found[-1].last == start - 1:
                start = found.pop().first
            end = node.end_lineno
            found.append(self.statement(node, owner, start))
        return found + self.comments(end + 1, last)

    def statement(self, node: ast.stmt, owner: str, first: int) -> Block:
        kind, name = kind_and_name(node, self.lines[node.lineno - 1])
        block = self.block(kind, owner + name, first, node.end_lineno, node.lineno)
        if kind == "class":
            fields = list(takewhile(lambda n: not isinstance(n, DEFINITIONS), node.body))
            end = fields[-1].end_lineno if fields else node.lineno
            head = self.block("head", f"{block.name}.(head)", first, end, node.lineno)
            others = node.body[len(fields) :]
            block.parts = [head, *self.blocks(others, f"{block.name}.", end + 1, block.last)]
        return block

    def comments(self, first: int, last: int) -> list[Block]:
        """Groups of comment lines; a blank line ends a group, and a banner is one by itself."""
        text = "".join(f"{line}\n" for line in self.lines[first - 1 : last])
        found = []
        for group in COMMENTS.finditer(text):
            start, end = (first + text.count("\n", 0, at) for at in group.span())
            kind = "banner" if group["banner"] else "comment"
            found.append(self.block(kind, group[0].rstrip("\n"), start, end - 1, start))
        return found

    def block(self, kind: str, name: str, first: int, last: int, header: int) -> Block:
        return Block(kind, name, first, last, header, self.lines[first - 1 : last])


def kind_and_name(node: ast.stmt, line: str) -> tuple[str, str]:
    """line: the first one of the statement, which names it where nothing else does."""
    match node:
        case ast.FunctionDef(name=name):
            return "function", name
        case ast.ClassDef(name=name):
            return "class", name
        case ast.Import() | ast.ImportFrom():
            return "imports", "imports"
        case ast.Expr(value=ast.Constant()):
            return "docstring", "module docstring"
        case ast.Assign(targets=[ast.Name(id=name)]):
            return "statement", name
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.AugAssign(target=ast.Name(id=name)):
            return "statement", name
    return "statement", line.strip(" :")


# ---- aligned lines, changed words ----


class Line(NamedTuple):
    number: int
    text: str


class Row(NamedTuple):
    """A line of the older version beside the line of the newer one that it has become, or None."""

    old: Line | None
    new: Line | None

    @property
    def kind(self) -> str:
        if self.old is None or self.new is None:
            return "added" if self.old is None else "removed"
        return "equal" if self.old.text == self.new.text else "changed"

    @property
    def words(self) -> list[tuple[str, str]]:
        """A changed line in pieces, each as it was and as it is. The first is the indentation."""
        a, b = (re.findall(r"^\s*|\w+|\s+|[^\w\s]", line.text) for line in self)
        # Equal ends come first: matched anywhere, a bracket could find the partner of another one.
        head = 1 + common(a[1:], b[1:])
        tail = common(a[: head - 1 : -1], b[: head - 1 : -1])
        a_end, b_end = len(a) - tail, len(b) - tail
        middle = SequenceMatcher(None, a[head:a_end], b[head:b_end], autojunk=False)
        spans = [(0, 1, 0, 1), (1, head, 1, head)]
        for _, i, i_end, j, j_end in middle.get_opcodes():
            spans.append((head + i, head + i_end, head + j, head + j_end))
        spans.append((a_end, len(a), b_end, len(b)))
        return [("".join(a[i:i_end]), "".join(b[j:j_end])) for i, i_end, j, j_end in spans]


def common(a: list[str], b: list[str]) -> int:
    """How many elements are equal at the start of both."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def align(old: Block | None, new: Block) -> list[Row]:
    """All lines of two versions, in order. Without an older version, all lines are added."""
    before, after = numbered(old) if old else [], numbered(new)
    pairs = best_pairs([line.text for line in before], [line.text for line in after])
    rows, i, j = [], 0, 0
    for a, b in [*pairs, (len(before), len(after))]:
        rows += [Row(line, None) for line in before[i:a]]
        rows += [Row(None, line) for line in after[j:b]]
        rows += [Row(*pair) for pair in zip(before[a : a + 1], after[b : b + 1], strict=True)]
        i, j = a + 1, b + 1
    return rows


def numbered(block: Block) -> list[Line]:
    return [Line(block.first + i, text) for i, text in enumerate(block.lines)]


def best_pairs(before: list[str], after: list[str]) -> list[tuple[int, int]]:
    """Pairs of equal or similar lines, in order on both sides, of the greatest total similarity.

    A dynamic program, as for the longest common subsequence.
    """
    if before == after:
        return [(i, i) for i in range(len(before))]
    best = [[0.0] * (len(after) + 1) for _ in range(len(before) + 1)]  # of lines i, j and below
    for i in reversed(range(len(before))):
        for j in reversed(range(len(after))):
            paired = best[i + 1][j + 1] + similarity(before[i], after[j])
            best[i][j] = max(paired, best[i + 1][j], best[i][j + 1])
    pairs, i, j = [], 0, 0
    while i < len(before) and j < len(after):
        if best[i][j] == best[i + 1][j]:
            i += 1
        elif best[i][j] == best[i][j + 1]:
            j += 1
        else:
            pairs.append((i, j))
            i, j = i + 1, j + 1
    return pairs


@cache
def similarity(a: str, b: str) -> float:
    """From 0 for lines that are not worth comparing to 1 for equal ones.

    Similar lines count less than equal ones, and equal brackets and blank lines next to nothing.
    """
    if a == b:
        return min(1.0, 0.05 + len(a.strip()) / 20)
    left, right = (Counter(re.findall(r"\w+", line)) for line in (a, b))
    share = 2 * (left & right).total() / max(1, left.total() + right.total())
    return share**2 / 2 if share > 0.5 else 0.0


# ---- definitions, compared ----


@dataclass
class Definition:
    """A block of the newer stage, and how it relates to what the earlier stages have.

    status: "new": no earlier stage has the name. "known": `base` is identical. "changed": `rows`
    align it with `base`. "rewritten": less than half of `base` is left, so all rows are added.
    base, base_stage: the older version, and the stage that has it. parts: of a changed class, its
    definitions; then `rows` is empty. gone: what only the older version of the class has.
    """

    block: Block
    status: str
    base: Block | None = None
    base_stage: str = ""
    rows: list[Row] = field(default_factory=list)
    parts: list[Definition] = field(default_factory=list)
    gone: list[Block] = field(default_factory=list)

    @property
    def leaves(self) -> list[Definition]:
        """The definitions that hold the rows: the parts of a changed class, else this one."""
        return self.parts or [self]


@dataclass
class Comparison:
    """The definitions of the newer stage, and the blocks that only the older one has."""

    old: Stage
    new: Stage
    definitions: list[Definition]
    gone: list[Block]


def compare(old: Stage, new: Stage, *earlier: Stage) -> Comparison:
    """Compare two stages. earlier: the other stages that a reader of the newer one knows."""
    history = History(new, [old, *(stage for stage in earlier if stage.name != old.name)])
    definitions = [history.compare(block) for block in new.blocks]
    return Comparison(old, new, definitions, history.gone(old.blocks, new.blocks))


def compare_stages(old: str, new: str, repo: Path = REPO) -> Comparison:
    """Compare two stages by number; every stage before the newer one counts as known."""
    newer = read_stage(new, repo)
    earlier = [read_stage(number, repo) for number in stage_paths(repo) if number < new]
    return compare(read_stage(old, repo), newer, *earlier)


@dataclass
class History:
    """The older versions of a stage's definitions. known: first the stage to compare with."""

    new: Stage
    known: list[Stage]

    def compare(self, block: Block) -> Definition:
        versions = self.versions(block)
        for stage, old in versions:
            if old.lines == block.lines:
                return Definition(block, "known", old, stage.name, align(old, block))
        if not versions:
            return Definition(block, "new", rows=align(None, block))
        stage, base = self.closest(versions, block)
        if block.parts:
            parts = [self.compare(part) for part in block.parts]
            gone = self.gone(base.parts, block.parts)
            return Definition(block, "changed", base, stage.name, parts=parts, gone=gone)
        rows = align(base, block)
        if is_rewritten(rows) and block.kind not in ("docstring", "imports"):
            return Definition(block, "rewritten", base, stage.name, align(None, block))
        return Definition(block, "changed", base, stage.name, rows)

    def versions(self, block: Block) -> list[tuple[Stage, Block]]:
        """The older versions of a block, by any of its names."""
        names = self.names(block.name)
        found = [(stage, stage.by_name.get(name)) for stage in self.known for name in names]
        return [(stage, version) for stage, version in found if version]

    def names(self, name: str) -> list[str]:
        """A name, and the ones that it continues, unless the newer stage still has them."""
        owner, _, method = name.rpartition(".")
        owners = self.names(owner)[1:] if owner else []
        older = [*RENAMED.get(name, []), *(f"{each}.{method}" for each in owners)]
        return [name, *(each for each in older if each not in self.new.by_name)]

    def closest(self, versions: list[tuple[Stage, Block]], block: Block) -> tuple[Stage, Block]:
        """The version of the stage to compare with; else the one with the most lines in common."""
        if versions[0][0] is self.known[0]:
            return versions[0]
        return max(versions, key=lambda version: len(set(version[1].lines) & set(block.lines)))

    def gone(self, old: list[Block], new: list[Block]) -> list[Block]:
        """The older blocks that none of the newer ones continues; comments aside."""
        names = {name for block in new for name in self.names(block.name)}
        named = [block for block in old if block.kind not in ("banner", "comment")]
        return [block for block in named if block.name not in names]


def is_rewritten(rows: list[Row]) -> bool:
    """Whether less than half of the shorter version is left; a changed line is half a line."""
    kinds = Counter(row.kind for row in rows if (row.new or row.old).text.strip())
    shorter = kinds["equal"] + kinds["changed"] + min(kinds["added"], kinds["removed"])
    return kinds["equal"] + kinds["changed"] / 2 < shorter / 2


# ---- what to leave out, and what to say instead ----

CONTEXT, MOST_REMOVED = 2, 3  # equal lines around a change, and removed lines in a row


class Fold(NamedTuple):
    """Consecutive rows that a reader can do without, and their summary."""

    rows: list[Row]
    summary: str


def condensed(definition: Definition) -> list[Row | Fold]:
    """The rows of a definition without equal lines far from a change, but with the line of `def`,
    and without many removed lines in a row. A known definition is folded as a whole, and of a
    docstring or imports it says only how much has changed."""
    block, base, rows = definition.block, definition.base, definition.rows
    if definition.status == "known" and block.kind != "head" and len(rows) > 1:
        where = "as in" if base.name == block.name else f"as {base.name} in"
        return [Fold(rows, f"{headline(block)}: {where} {definition.base_stage} ({count(rows)})")]
    if base and block.kind in ("docstring", "imports"):
        changed = sum(row.kind in ("added", "changed") for row in rows)
        return [Fold(rows, f"{title(block)} ({count(block.lines)}, {changed} changed)")]
    kinds = [
        "removed" if row.new is None else is_near or row.new.number == block.header
        for row, is_near in zip(rows, near_changes(rows), strict=True)
    ]
    least = {"removed": MOST_REMOVED + 1, True: len(rows) + 1, False: 2}
    found: list[Row | Fold] = []
    for kind, group in groupby(zip(kinds, rows, strict=True), key=lambda pair: pair[0]):
        stretch = [row for _, row in group]
        if len(stretch) >= least[kind]:
            texts = [(row.new or row.old).text for row in stretch]
            first = next(filter(str.strip, texts), "")
            stretch = [Fold(stretch, f"{indentation(first)}... {count(stretch)}")]
        found += stretch
    return found


def near_changes(rows: list[Row]) -> list[bool]:
    """Which rows are near a change, blank ones at the ends left out."""
    changed = [row.kind != "equal" for row in rows]
    near = [any(changed[max(0, i - CONTEXT) : i + CONTEXT + 1]) for i in range(len(rows))]
    is_blank = [row.kind == "equal" and not row.new.text.strip() for row in rows]
    return [all(near[max(0, i - 1) : i + 2]) if is_blank[i] else near[i] for i in range(len(rows))]


def note(definition: Definition, expected: str) -> str:
    """What a definition is compared with, where one does not expect that."""
    block, base, stage = definition.block, definition.base, definition.base_stage
    if definition.status in ("new", "known"):
        return ""
    if definition.status == "rewritten":
        name = "" if base.name == block.name else f"of {base.name} "
        return f"{headline(block)}: rewritten ({count(base.lines)} {name}in {stage})"
    is_unexpected = stage != expected or (block.kind == "class" and base.name != block.name)
    return f"{headline(block)}: compared with {base.name} in {stage}" if is_unexpected else ""


def headline(block: Block) -> str:
    return indentation(block.lines[0]) + title(block)


def title(block: Block) -> str:
    if block.kind in ("banner", "comment"):
        first, *more = [line.strip("# -") for line in block.lines if line.strip("# -")]
        return textwrap.shorten(f"# {first}{' ...' if more else ''}", 60, placeholder=" ...")
    prefix = {"class": "class ", "function": "def "}.get(block.kind, "")
    return prefix + block.name.rpartition(".")[2] if prefix else block.name


def indentation(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def count(lines: list) -> str:
    return f"{len(lines)} line{'s' if len(lines) > 1 else ''}"
