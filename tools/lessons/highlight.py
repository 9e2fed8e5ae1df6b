"""Source lines as HTML: highlighted, with links and with marked words.

Everything that leaves this module is escaped, so no source can add markup to a page.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from html import escape
from itertools import pairwise
from typing import NamedTuple

from compare import Row
from pygments import lex
from pygments.lexers import TextLexer, get_lexer_by_name, get_lexer_for_filename
from pygments.token import Comment, Keyword, Literal, Name, Operator, _TokenType
from pygments.util import ClassNotFound

# the few classes that the style sheet knows, the most special token types first
CLASSES = {
    **{Comment: "c", Literal.String: "s", Literal.Number: "m", Keyword: "k", Operator.Word: "k"},
    **{Name.Function: "f", Name.Class: "f", Name.Decorator: "f"},
    **{Name.Builtin.Pseudo: "", Name.Builtin: "f"},  # pseudo: self
}


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


def highlight(text: str, language: str = "", filename: str = "") -> list[tuple[Token, ...]]:
    """The tokens of every line, as `str.splitlines` counts lines."""
    options = {"stripnl": False, "ensurenl": False}
    try:
        find = get_lexer_by_name if language else get_lexer_for_filename
        lexer = find(language or filename, **options)
    except ClassNotFound:
        lexer = TextLexer(**options)
    lines: list[list[Token]] = [[]]
    for kind, piece in lex("\n".join(text.splitlines()), lexer):
        first, *others = piece.split("\n")
        lines[-1].append(Token(css_class(kind), first))
        lines += [[Token(css_class(kind), other)] for other in others]
    return [tuple(token for token in line if token.text) for line in lines]


@cache
def css_class(kind: _TokenType) -> str:
    return next((css for parent, css in CLASSES.items() if kind in parent), "")


@cache
def to_html(tokens: tuple[Token, ...], spans: tuple[Span, ...] = ()) -> str:
    """A line as HTML. Spans do not overlap; a token that a span cuts becomes two."""
    openings = {span.start: span.opening for span in spans}
    closings = {span.end: span.closing for span in spans}
    edges = sorted({*openings, *closings})
    html, at = "", 0
    for css, text in tokens:
        end = at + len(text)
        for a, b in pairwise([at, *(edge for edge in edges if at < edge < end), end]):
            piece = escape(text[a - at : b - at])
            piece = f'<i class="{css}">{piece}</i>' if css and piece.strip() else piece
            html += openings.get(a, "") + piece + closings.get(b, "")
        at = end
    return html


def changed_spans(row: Row, side: int) -> Iterator[Span]:
    """The words of a changed line that only the old (0) or the new (1) line has."""
    tag, at = ("del", "ins")[side], 0
    for i, words in enumerate(row.words):
        end = at + len(words[side])
        if i > 0 and words[0] != words[1] and words[side]:  # the first is the indentation
            yield Span(at, end, f"<{tag}>", f"</{tag}>")
        at = end


# ---- names that link to their definitions ----


def links(text: str, hrefs: dict[str, str]) -> dict[int, list[Span]]:
    """The links of a script by line: each use of a name, or of `self.method`, in `hrefs`.

    A name that the function around it binds, such as a parameter, is another one.
    """
    lines, found = text.splitlines(), {}
    for name, line, end_byte in uses(ast.parse(text), "", set()):
        if name in hrefs:
            end = len(lines[line - 1].encode()[:end_byte].decode())
            start = end - len(name.rpartition(".")[2])
            opening = f'<a href="{escape(hrefs[name])}">'
            found.setdefault(line, []).append(Span(start, end, opening, "</a>"))
    return found


def uses(node: ast.AST, owner: str, bound: set[str]) -> Iterator[tuple[str, int, int]]:
    """Names, and where they end. owner: the class around a node. bound: in functions around it."""
    match node:
        case ast.ClassDef(name=owner):
            pass
        case ast.FunctionDef() | ast.Lambda():
            bound = bound | set(bound_names(node))
        case ast.Name(id=name, ctx=ast.Load()) if name not in bound:
            yield name, node.end_lineno, node.end_col_offset
        case ast.alias(name=name):
            yield name, node.lineno, node.col_offset + len(name.encode())
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            yield f"{owner}.{name}", node.end_lineno, node.end_col_offset
    for child in ast.iter_child_nodes(node):
        yield from uses(child, owner, bound)


def bound_names(function: ast.AST) -> Iterator[str]:
    """The parameters of a function and what it assigns, in the functions inside it too."""
    for node in ast.walk(function):
        match node:
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
