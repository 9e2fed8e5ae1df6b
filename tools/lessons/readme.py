"""A README as HTML, as GitHub shows it.

Of raw HTML only <details>, <summary> and <sub> pass, without attributes, and only where every tag
has its partner in the same block; comments disappear. All else is text, which is escaped, so
nothing in a README can add other markup to a page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

from lessons.highlight import highlight, to_html
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

TAGS = {"block": "details|summary|sub", "inline": "sub"}


class Entry(NamedTuple):
    """A heading, or another line of a table of contents. mark: what a definition is, say, new."""

    level: int
    id: str
    text: str
    mark: str = ""


@dataclass
class Document:
    """A converted README."""

    html: Markup = Markup()
    headings: list[Entry] = field(default_factory=list)

    @property
    def title(self) -> str:
        return next((each.text for each in self.headings if each.level == 1), "")

    @property
    def lead(self) -> Markup:
        """The first paragraph."""
        found = re.search(r"<p>.*?</p>", self.html, re.S)
        return Markup(found[0] if found else "")

    def section(self, id: str) -> Markup:
        """What is below a heading, down to the next one of its level or a higher one."""
        level = {each.id: each.level for each in self.headings}[id]
        _, below = self.html.split(f'<h{level} id="{id}">')
        return Markup(re.split(rf"<h[1-{level}] ", below.partition(f"</h{level}>")[2])[0])


@dataclass
class Resolver:
    """Where a README's references lead; None where they lead to no page.

    link: of a relative address. picture: of an image's address, as data. name: of a code span.
    """

    link: Callable[[str], str | None]
    picture: Callable[[str], str | None]
    name: Callable[[str], str | None] = lambda name: None


def convert(text: str, resolver: Resolver) -> Document:
    markdown = MarkdownIt("commonmark", {"highlight": code_block})
    tokens = balanced(markdown.enable(["table", "strikethrough"]).parse(text), "block")
    document = Document()
    for i, token in enumerate(tokens):
        if token.type == "heading_open":
            token.attrSet("id", new_heading(document.headings, int(token.tag[1]), tokens[i + 1]))
        if token.type == "inline":
            token.children = inline(balanced(token.children, "inline"), resolver)
    document.html = Markup(markdown.renderer.render(tokens, markdown.options, {}))
    return document


def code_block(code: str, language: str, attributes: str) -> str:
    html = "\n".join(map(to_html, highlight(code.rstrip("\n"), language or "text")))
    return f"<pre><code>{html}</code></pre>"


# ---- raw HTML ----


def balanced(tokens: Iterable[Token], kind: str) -> list[Token]:
    """The tokens with raw HTML as text, except for comments and for allowed tags in pairs."""
    found: list[Token] = []
    opened: list[Token] = []  # elements of Markdown, and raw tags
    for token in tokens:
        is_html = token.type in ("html_block", "html_inline")
        for piece in pieces(token.content, kind) if is_html else [token]:
            found.append(piece)
            if piece.nesting > 0:
                opened.append(piece)
            elif piece.nesting < 0 and piece.type != "html_inline":
                while opened[-1].type == "html_inline":  # it is not closed in this element
                    opened.pop().type = "text"
                opened.pop()
            elif piece.nesting < 0:
                if opened and (opened[-1].type, opened[-1].tag) == (piece.type, piece.tag):
                    opened.pop()
                else:
                    piece.type = "text"
    for token in opened:
        token.type = "text"
    return found


def pieces(html: str, kind: str) -> Iterator[Token]:
    """Raw HTML as tokens: each allowed tag by itself, the rest as text, comments left out."""
    html = re.sub(r"<!--.*?-->", "", html, flags=re.S)
    for found in re.finditer(rf"<(/?)({TAGS[kind]})>|[^<]+|<", html):
        nesting = {None: 0, "": 1, "/": -1}[found[1]]
        kind_of_token = "html_inline" if nesting else "text"
        yield Token(kind_of_token, found[2] or "", nesting, content=found[0])


# ---- headings, links, pictures, names ----


def new_heading(headings: list[Entry], level: int, content: Token) -> str:
    """Add a heading; returns its id, which is GitHub's."""
    text = "".join(child.content for child in content.children if child.type != "html_inline")
    slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
    ids = {each.id for each in headings}
    numbered = (f"{slug}-{i}" for i in range(1, len(ids) + 2))
    headings.append(Entry(level, next(id for id in (slug, *numbered) if id not in ids), text))
    return headings[-1].id


def inline(tokens: list[Token], resolver: Resolver) -> list[Token]:
    """The tokens of a paragraph, with the addresses of links, pictures and names resolved."""
    found, link = [], None  # the open link
    for token in tokens:
        if token.type == "link_open":
            address = str(token.attrs.get("href", ""))
            target = address if re.match(r"https?://", address) else resolver.link(address)
            token.attrs = {"href": target} if target else {}
            token.tag = "a" if target else "span"
            link = token
        elif token.type == "link_close":
            token.tag, link = link.tag, None
        elif token.type == "image":
            token = picture(token, resolver)
        elif token.type == "code_inline" and link is None:
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


def raw(html: str) -> Token:
    return Token("html_inline", "", 0, content=html)
