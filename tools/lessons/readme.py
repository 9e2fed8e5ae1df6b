"""A README as HTML, as GitHub shows it.

Of raw HTML only <details>, <summary> and <sub> pass, without attributes, and only where every tag
has its partner in the same block; comments disappear. All else is text, which is escaped, so
nothing in a README can add other markup to a page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from html import escape

from lessons.highlight import highlight, to_html
from markdown_it import MarkdownIt
from markdown_it.token import Token

TAGS = {"block": "details|summary|sub", "inline": "sub"}


@dataclass
class Heading:
    level: int
    id: str
    text: str


@dataclass
class Document:
    """A converted README. headings: all of them, the title included."""

    html: str = ""
    headings: list[Heading] = field(default_factory=list)

    @property
    def title(self) -> str:
        return next((each.text for each in self.headings if each.level == 1), "")


@dataclass
class Resolver:
    """Where a README's references lead; None where they lead to no page.

    link: of a relative address. picture: of an image's address, as data. name: of a code span.
    """

    link: Callable[[str], str | None]
    picture: Callable[[str], str | None]
    name: Callable[[str], str | None] = lambda name: None


def convert(text: str, resolver: Resolver) -> Document:
    markdown = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    tokens = balanced(markdown.parse(text), "block")
    document, finished = Document(), []
    for i, token in enumerate(tokens):
        if token.type == "heading_open":
            token.attrSet("id", new_heading(document.headings, int(token.tag[1]), tokens[i + 1]))
        if token.type == "inline":
            token.children = inline(balanced(token.children, "inline"), resolver)
        if token.type in ("fence", "code_block"):
            token = raw(code_block(token.content, token.info))
        frame = {"table_open": '<div class="wide table">', "table_close": "</div>"}
        around = [raw(frame[token.type])] if token.type in frame else []
        finished += [*around, token] if token.nesting > 0 else [token, *around]
    document.html = markdown.renderer.render(finished, markdown.options, {})
    return document


def section(text: str, heading: str) -> str:
    """The Markdown below a heading, down to the next heading of its level or a higher one."""
    found = re.search(
        rf"^(#+) {re.escape(heading)}\n(.*?)(?=^(?!\1#)#+ |\Z)", without_code(text), re.M | re.S
    )
    if found is None:
        raise LookupError(f"no section {heading!r}")
    return text[found.start(2) : found.end(2)]


def without_code(text: str) -> str:
    """The text with fenced code blanked out, every character in its place."""
    return re.sub(r"^```.*?^```", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.M | re.S)


def raw(html: str) -> Token:
    return Token("html_inline", "", 0, content=html)


def code_block(code: str, info: str) -> str:
    lines = highlight(code.rstrip("\n"), (info.split() or ["text"])[0])
    html = "\n".join(map(to_html, lines))
    return f"<pre><code>{html}</code></pre>\n"


# ---- raw HTML ----


def balanced(tokens: Iterable[Token], kind: str) -> list[Token]:
    """The tokens with raw HTML as text, except for comments and for allowed tags in pairs."""
    found: list[Token] = []
    containers: list[list[int]] = [[]]  # of each open element: where its open raw tags are
    for token in tokens:
        if token.nesting < 0:
            containers.pop()
        elif token.nesting > 0:
            containers.append([])
        is_html = token.type in ("html_block", "html_inline")
        for piece in pieces(token.content, kind) if is_html else [token]:
            if piece.type == "html_inline":
                pair_up(piece, found, containers[-1])
            found.append(piece)
    for token in found:
        if token.type == "html_inline" and not token.meta:
            token.type = "text"
    return found


def pieces(html: str, kind: str) -> list[Token]:
    """Raw HTML as tokens: each allowed tag by itself, the rest as text, comments left out."""
    html = re.sub(r"<!--.*?-->", "", html, flags=re.S)
    parts = re.split(rf"(</?(?:{TAGS[kind]})>|<details open>)", html)
    return [
        raw(part) if i % 2 else Token("text", "", 0, content=part)
        for i, part in enumerate(parts)
        if part
    ]


def pair_up(tag: Token, before: list[Token], opened: list[int]) -> None:
    """Mark a closing tag and its partner, if the last open tag of the same element is that."""
    if not tag.content.startswith("</"):
        opened.append(len(before))
    elif opened and before[opened[-1]].content[1:].split()[0].rstrip(">") == tag.content[2:-1]:
        tag.meta = before[opened.pop()].meta = {"paired": True}


# ---- headings, links, pictures, names ----


def new_heading(headings: list[Heading], level: int, content: Token) -> str:
    """Add a heading; returns its id, which is GitHub's."""
    text = "".join(child.content for child in content.children if child.type != "html_inline")
    slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
    ids = {each.id for each in headings}
    numbered = (f"{slug}-{i}" for i in range(1, len(ids) + 2))
    headings.append(Heading(level, next(id for id in (slug, *numbered) if id not in ids), text))
    return headings[-1].id


def inline(tokens: list[Token], resolver: Resolver) -> list[Token]:
    """The tokens of a paragraph, with the addresses of links, pictures and names resolved."""
    found, links = [], []  # links: the open one
    for token in tokens:
        if token.type == "link_open":
            address = str(token.attrs.get("href", ""))
            external = re.match(r"https?://", address)
            target = address if external else resolver.link(address)
            token.attrs = {"href": target} if target else {}
            token.tag = "a" if target else "span"
            links.append(token)
        elif token.type == "link_close":
            token.tag = links.pop().tag
        elif token.type == "image":
            token = picture(token, resolver)
        elif token.type == "code_inline" and not links:
            href = resolver.name(token.content.removesuffix("()"))
            code = f"<code>{escape(token.content)}</code>"
            token = raw(f'<a class="name" href="{escape(href)}">{code}</a>') if href else token
        found.append(token)
    return found


def picture(token: Token, resolver: Resolver) -> Token:
    """An image in a frame that scrolls if the page is narrower; without data, what it shows."""
    data, alt = resolver.picture(str(token.attrs["src"])), escape(token.content)
    if data is None:
        return raw(f"<span>[picture: {alt}]</span>")
    return raw(f'<span class="wide img"><img alt="{alt}" src="{escape(data)}"></span>')
