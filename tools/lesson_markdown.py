"""A README as HTML, as GitHub shows it.

Raw HTML is text here, except for <details>, <br>, <img>, <picture> and the tags in `INLINE_TAGS`.
These become elements of the tree that Markdown builds, and Markdown escapes all text of its tree,
so nothing in a README can add other markup to a page. Comments disappear, as on GitHub.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from html import unescape
from html.parser import HTMLParser
from xml.etree.ElementTree import Element, SubElement

from highlight import highlight, to_html
from markdown import Extension, Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.extensions.sane_lists import SaneListExtension
from markdown.extensions.tables import TableExtension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor
from markdown.treeprocessors import Treeprocessor

INLINE_TAGS = "sub sup kbd b i em strong".split()


@dataclass
class Heading:
    level: int
    id: str
    text: str


@dataclass
class Document:
    """A converted README. headings: all of them, the title included."""

    html: str
    headings: list[Heading]

    @property
    def title(self) -> str:
        return next((each.text for each in self.headings if each.level == 1), "")


@dataclass
class Resolver:
    """Where a README's references lead; None where nothing of the pages answers.

    link: of a relative address. picture: of an image's address, as data. name: of a code span.
    """

    link: Callable[[str], str | None]
    picture: Callable[[str], str | None]
    name: Callable[[str], str | None] = lambda name: None


def convert(text: str, resolver: Resolver) -> Document:
    extension = GitHub(resolver)
    markdown = Markdown(
        extensions=[TableExtension(), SaneListExtension(), extension], output_format="xhtml"
    )
    return Document(markdown.convert(text), extension.headings)


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


class GitHub(Extension):
    """What GitHub's Markdown has and the library's has not, and no raw HTML."""

    def __init__(self, resolver: Resolver):
        super().__init__()
        self.resolver = resolver
        self.headings: list[Heading] = []

    def extendMarkdown(self, md: Markdown) -> None:
        for processors, name in (
            (md.preprocessors, "html_block"),
            (md.inlinePatterns, "html"),
            (md.inlinePatterns, "entity"),  # stays in the text, where it is escaped or an entity
            (md.inlinePatterns, "automail"),
        ):
            processors.deregister(name)
        md.preprocessors.register(Fences(md), "fences", 25)
        md.preprocessors.register(Blocks(md), "blocks", 20)
        md.parser.blockprocessors.register(Details(md.parser), "details", 95)
        tags = "|".join(INLINE_TAGS)
        md.inlinePatterns.register(Paired(rf"<({tags})>(.*?)</\1>", md), "paired", 85)
        md.inlinePatterns.register(Break(r"<br ?/?>", md), "break", 85)
        md.inlinePatterns.register(Picture(r"<picture>.*?</picture>|<img\b[^>]*>", md), "img", 85)
        md.treeprocessors.register(Finish(md, self), "finish", -5)  # behind all others


# ---- blocks ----


class Fences(Preprocessor):
    """Fenced code, highlighted if it names a language."""

    FENCE = re.compile(r"^( *)(```+)([\w+-]*)[^\n`]*\n(.*?)^ *\2`* *$", re.M | re.S)

    def run(self, lines: list[str]) -> list[str]:
        return self.FENCE.sub(self.stash, "\n".join(lines)).split("\n")

    def stash(self, match: re.Match) -> str:
        indent, _, language, code = match.groups()
        code = re.sub(rf"^ {{0,{len(indent)}}}", "", code, flags=re.M)
        tokens = highlight(code, language or "text")
        html = "\n".join(map(to_html, tokens))
        placeholder = self.md.htmlStash.store(code_block(html))
        return f"\n{indent}{placeholder}\n"


def code_block(html: str) -> str:
    return f"<pre><code>{html}</code></pre>"


class Blocks(Preprocessor):
    """Puts blank lines where Markdown needs them and GitHub does not; drops comments."""

    def run(self, lines: list[str]) -> list[str]:
        text = re.sub(r"^<!--.*?-->[ \t]*$", "", "\n".join(lines), flags=re.M | re.S)
        text = re.sub(r"^(<details(?: open)?>)", r"\n\1\n\n", text, flags=re.M)
        text = re.sub(r"^(<summary>.*?</summary>)", r"\n\1\n\n", text, flags=re.M | re.S)
        text = re.sub(r"(?<!`)(</details>)[ \t]*$", r"\n\n\1\n", text, flags=re.M)
        item = r"(?:[-*+]|1\.) "
        text = re.sub(rf"^((?!{item}|\d+\. |\s|\|).+\n)(?={item})", r"\1\n", text, flags=re.M)
        return text.split("\n")


class Details(BlockProcessor):
    """<details>, with Markdown inside. Without its end tag it is text."""

    OPENING = re.compile(r"<details( open)?>")
    SUMMARY = re.compile(r"<summary>(.*?)</summary>", re.S)

    def test(self, parent: Element, block: str) -> bool:
        return bool(self.OPENING.fullmatch(block.strip())) and not block.startswith("    ")

    def run(self, parent: Element, blocks: list[str]) -> bool:
        end = self.end_of(blocks)
        if end == 0:
            return False
        details = SubElement(parent, "details")
        if "open" in blocks[0]:
            details.set("open", "open")
        inner = [block for block in blocks[1:end] if block.strip()]
        del blocks[: end + 1]
        summary = self.SUMMARY.fullmatch(inner[0].strip()) if inner else None
        SubElement(details, "summary").text = summary[1] if summary else "Details"
        self.parser.parseBlocks(details, inner[1:] if summary else inner)
        return True

    def end_of(self, blocks: list[str]) -> int:
        depth = 0
        for i, block in enumerate(blocks):
            depth += bool(self.OPENING.fullmatch(block.strip()))
            depth -= block.strip() == "</details>"
            if depth == 0:
                return i
        return 0


# ---- inline ----


class Paired(InlineProcessor):
    def handleMatch(self, match: re.Match, data: str) -> tuple[Element, int, int]:
        element = Element(match[1])
        element.text = match[2]
        return element, match.start(0), match.end(0)


class Break(InlineProcessor):
    def handleMatch(self, match: re.Match, data: str) -> tuple[Element, int, int]:
        return Element("br"), match.start(0), match.end(0)


class Picture(InlineProcessor):
    """<img>, alone or in a <picture> with other sources for dark screens."""

    def handleMatch(self, match: re.Match, data: str) -> tuple[Element | None, int, int]:
        tags = Tags(match[0])
        images = [attributes for tag, attributes in tags.found if tag == "img"]
        if len(images) != 1:
            return None, None, None
        image = element("img", images[0], "src", "alt", "width")
        sources = [attributes for tag, attributes in tags.found if tag == "source"]
        if sources:
            picture = Element("picture")
            picture.extend(element("source", each, "srcset", "media") for each in sources)
            picture.append(image)
            image = picture
        return image, match.start(0), match.end(0)


class Tags(HTMLParser):
    """The start tags of a piece of HTML."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attributes}))


def element(tag: str, attributes: dict[str, str], *allowed: str) -> Element:
    return Element(tag, {name: attributes[name] for name in allowed if name in attributes})


# ---- the finished tree ----


class Finish(Treeprocessor):
    """Ids of headings, addresses of links and pictures, and frames in which wide tables scroll."""

    def __init__(self, md: Markdown, github: GitHub):
        super().__init__(md)
        self.resolver, self.headings = github.resolver, github.headings

    def run(self, root: Element) -> None:
        self.finish(root, within="")

    def finish(self, parent: Element, within: str) -> None:
        for i, child in enumerate(parent):
            if re.fullmatch(r"h[1-6]", child.tag):
                self.heading(child)
            elif child.tag == "a":
                self.link(child)
            elif child.tag in ("img", "source"):
                self.picture(child)
            elif child.tag == "code" and within not in ("a", "pre"):
                child = parent[i] = self.code(child)
            self.finish(child, "a" if within == "a" else child.tag)
            if child.tag in ("table", "picture", "img") and within not in ("a", "picture"):
                parent[i] = self.frame(child)

    def heading(self, heading: Element) -> None:
        text = unescape("".join(heading.itertext()))
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        ids = {each.id for each in self.headings}
        numbered = (f"{slug}-{i}" for i in range(1, len(ids) + 2))
        unique = next(id for id in (slug, *numbered) if id not in ids)
        heading.set("id", unique)
        self.headings.append(Heading(int(heading.tag[1]), unique, text))

    def link(self, link: Element) -> None:
        address = link.get("href", "")
        if re.match(r"https?://", address):
            target = address
        else:
            target = self.resolver.link(address)
        if target is None:
            link.tag, link.attrib = "span", {}
        else:
            link.set("href", target)

    def picture(self, image: Element) -> None:
        name = "src" if image.tag == "img" else "srcset"
        data = self.resolver.picture(image.get(name, ""))
        if data is None and image.tag == "img":
            image.tag, image.text, image.attrib = "span", f"[picture: {image.get('alt', '')}]", {}
        elif data is None:
            image.attrib = {}
        else:
            image.set(name, data)

    def code(self, code: Element) -> Element:
        href = self.resolver.name(unescape(code.text or "").removesuffix("()"))
        if href is None:
            return code
        link = Element("a", {"href": href, "class": "name"})
        link.tail, code.tail = code.tail, None
        link.append(code)
        return link

    def frame(self, child: Element) -> Element:
        """A frame that scrolls if the page is narrower than what is in it."""
        frame = Element("span" if child.tag != "table" else "div", {"class": f"wide {child.tag}"})
        frame.tail, child.tail = child.tail, None
        frame.append(child)
        return frame
