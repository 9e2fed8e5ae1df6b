"""Source lines as HTML: highlighted, with links and with marked words.

Everything that leaves this module is escaped, so no source can add markup to a page.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from html import escape
from typing import NamedTuple

from compare import Row
from pygments import lex
from pygments.lexers import get_lexer_by_name, get_lexer_for_filename
from pygments.token import Comment, Keyword, Literal, Name, Operator, _TokenType
from pygments.util import ClassNotFound

# the few classes that the style sheet knows, the most special token types first
CLASSES = {Comment: "c", Literal.String: "s", Literal.Number: "m", Keyword: "k"}
CLASSES |= {Operator.Word: "k", Name.Function: "f", Name.Class: "f", Name.Decorator: "f"}
CLASSES |= {Name.Builtin.Pseudo: "", Name.Builtin: "b"}  # pseudo: self


class Token(NamedTuple):
    """A piece of a line. css: a class of the style sheet, or none."""

    css: str
    text: str


class Span(NamedTuple):
    """An element around columns `start` to `end` (exclusive) of a line."""

    start: int
    end: int
    opening: str
    closing: str


def highlight(text: str, language: str = "", filename: str = "") -> list[list[Token]]:
    """The tokens of every line, as `str.splitlines` counts lines."""
    text = "\n".join(text.splitlines())
    find = get_lexer_by_name if language else get_lexer_for_filename
    try:
        lexer = find(language or filename, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return [[Token("", line)] for line in text.split("\n")]
    lines: list[list[Token]] = [[]]
    for kind, piece in lex(text, lexer):
        first, *others = piece.split("\n")
        lines[-1].append(Token(css_class(kind), first))
        lines += [[Token(css_class(kind), other)] for other in others]
    return lines


@cache
def css_class(kind: _TokenType) -> str:
    return next((css for parent, css in CLASSES.items() if kind in parent), "")


def to_html(tokens: Iterable[Token], spans: Iterable[Span] = ()) -> str:
    """A line as HTML. Spans do not overlap; a token that a span cuts becomes two."""
    openings = {span.start: span.opening for span in spans}
    closings = {span.end: span.closing for span in spans}
    edges = sorted({*openings, *closings})
    out, at = [], 0
    for css, text in tokens:
        end = at + len(text)
        cuts = [at, *(edge for edge in edges if at < edge < end), end] if text else []
        for a, b in zip(cuts, cuts[1:], strict=False):
            piece = escape(text[a - at : b - at])
            piece = f'<i class="{css}">{piece}</i>' if css and piece.strip() else piece
            out.append(openings.get(a, "") + piece + closings.get(b, ""))
        at = end
    return "".join(out)


def changed_spans(row: Row, side: int) -> list[Span]:
    """The words of a changed line that only the old (0) or the new (1) line has."""
    tag, spans, at = ("del", "ins")[side], [], len(row.words[0][side])  # first: the indentation
    for words in row.words[1:]:
        end = at + len(words[side])
        if words[0] != words[1] and words[side]:
            spans.append(Span(at, end, f"<{tag}>", f"</{tag}>"))
        at = end
    return spans


# ---- names that link to their definitions ----


def links(text: str, hrefs: dict[str, str]) -> dict[int, list[Span]]:
    """The links of a script by line: each use of a name, or of `self.method`, in `hrefs`.

    A name that the function around it binds, such as a parameter, is another one.
    """
    linker = Linker(text, hrefs)
    linker.visit(ast.parse(text))
    return linker.found


class Linker(ast.NodeVisitor):
    """Finds the names in a script. scopes: the names that the functions around a node bind."""

    def __init__(self, text: str, hrefs: dict[str, str]):
        self.lines, self.hrefs = text.splitlines(), hrefs
        self.found: dict[int, list[Span]] = {}
        self.scopes: list[set[str]] = []
        self.owner = ""

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.owner, outer = node.name, self.owner
        self.generic_visit(node)
        self.owner = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.Lambda) -> None:
        """The parameters of a function and what it assigns, in the functions inside it too."""
        names = {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
        stored = (each for each in ast.walk(node) if isinstance(each, ast.Name))
        names |= {each.id for each in stored if isinstance(each.ctx, ast.Store)}
        self.scopes.append(names)
        self.generic_visit(node)
        self.scopes.pop()

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_Name(self, node: ast.Name) -> None:
        is_local = any(node.id in scope for scope in self.scopes)
        if isinstance(node.ctx, ast.Load) and not is_local:
            self.link(node.id, node.lineno, node.end_col_offset)

    def visit_alias(self, node: ast.alias) -> None:
        self.link(node.name, node.lineno, node.col_offset + len(node.name.encode()))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            self.link(f"{self.owner}.{node.attr}", node.end_lineno, node.end_col_offset)
        self.generic_visit(node)

    def link(self, name: str, line: int, end_byte: int) -> None:
        if name in self.hrefs:
            end = len(self.lines[line - 1].encode()[:end_byte].decode())
            start = end - len(name.rpartition(".")[2])
            opening = f'<a href="{escape(self.hrefs[name])}">'
            self.found.setdefault(line, []).append(Span(start, end, opening, "</a>"))
