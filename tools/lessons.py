"""The lessons as web pages that open from disk: `make lessons` writes lessons/index.html.

Each stage is its README, its code, and its comparison with every other stage, side by side. What a
README links to gets a page too, and pictures are copied, so the folder needs nothing else.
"""

from __future__ import annotations

import html
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache
from itertools import zip_longest
from pathlib import Path

import pygments
from diff import Block, Line, align, compare, folded
from markdown_it import MarkdownIt
from pygments.formatters import HtmlFormatter
from pygments.lexers import find_lexer_class_by_name, get_lexer_for_filename
from stages import REPO, stage_file, stage_paths

STAGES = stage_paths()
PICTURES = (".svg", ".png")
ALIKE = 0.5  # the part of its words that a line must keep to be shown as changed
PAGES = {REPO / "README.md": "index.html"}
PAGES |= {path.with_name("README.md"): f"{n}.html" for n, path in STAGES.items()}
PAGES |= {path: f"{n}-code.html" for n, path in STAGES.items()}

# ---- code ----


@cache
def lines_of(path: Path) -> list[str]:
    """Lines of HTML, each of which closes what it opens."""
    name = "x.sh" if path.suffix in (".example", ".sbatch") else path.name
    lexer = get_lexer_for_filename(name, stripnl=False)
    return pygments.highlight(path.read_text(), lexer, HtmlFormatter(nowrap=True)).split("\n")[:-1]


def code_page(path: Path) -> str:
    numbered = enumerate(lines_of(path), 1)
    lines = (f'<code id="L{i}"><a href="#L{i}" data-n="{i}"></a>{x}\n</code>' for i, x in numbered)
    return f'<h1>{path.relative_to(REPO)}</h1><div class="code">{"".join(lines)}</div>'


# ---- comparisons ----


@cache
def likeness(a: str, b: str) -> float:
    left, right = (Counter(re.findall(r"\w+", line)) for line in (a, b))
    return 2 * (left & right).total() / max(1, left.total() + right.total())


def pair_up(old: list[Line], new: list[Line]) -> Iterator[tuple[Line | None, Line | None]]:
    """Put the most similar lines side by side, then those above them and those below."""
    found = (
        (likeness(a, b), -i, -j) for i, (_, a) in enumerate(old) for j, (_, b) in enumerate(new)
    )
    best, i, j = max(found, default=(0, 0, 0))
    if best < ALIKE:
        yield from zip_longest(old, new)
        return
    yield from pair_up(old[:-i], new[:-j])
    yield old[-i], new[-j]
    yield from pair_up(old[1 - i :], new[1 - j :])


def changed(a: str, b: str) -> list[list[bool]]:
    """Of each character of two lines, whether its word is another one; indentation never is."""
    words = [re.findall(r"\w+|\s+|.", line.strip()) for line in (a, b)]
    flags = [[False] * (len(line) - len(line.lstrip())) for line in (a, b)]
    for kind, *ends in SequenceMatcher(None, *words, autojunk=False).get_opcodes():
        for side, first, last in ((0, *ends[:2]), (1, *ends[2:])):
            flags[side] += [kind != "equal"] * len("".join(words[side][first:last]))
    return flags


def marked(line: str, flags: list[bool]) -> str:
    """A line of HTML with <mark> around characters."""
    flag = iter(flags)
    pieces = re.findall(r"<[^>]*>|&[^;]*;|.", line)
    done = (x if x[0] == "<" or not next(flag) else f"<mark>{x}</mark>" for x in pieces)
    return "".join(done).replace("</mark><mark>", "")


def row(old: Line | None, new: Line | None, stages: tuple[str, str]) -> str:
    """stages: the names of both, whose highlighted lines are shown."""
    is_equal = old and new and old[1] == new[1]
    is_alike = old and new and not is_equal and likeness(old[1], new[1]) >= ALIKE
    flags = changed(old[1], new[1]) if is_alike else [[], []]
    cells = ""
    for side, line, stage, flag in zip(("old", "new"), (old, new), stages, flags, strict=True):
        text = lines_of(REPO / stage / "train.py")[line[0] - 1] if line else ""
        number = f' data-n="{line[0]}"' if line else ""
        cells += f'<code class="{side}"{number}>{marked(text, flag) if flag else text}</code>'
    return f'<div class="row{" equal" * bool(is_equal)}">{cells}</div>'


@cache
def rows(old: Block | None, new: Block) -> str:
    found, removed, stages = "", [], (old.stage if old else "", new.stage)
    for mark, a, b in align(old, new):
        if mark == "-":
            removed = a
            continue
        pairs = pair_up(removed, b) if mark == "+" else zip(a, b, strict=True)
        lines = "".join(row(a, b, stages) for a, b in pairs if "# -----" not in (b or a)[1])
        found += fold(f"... {len(b)} lines", lines) if mark == "=" else lines
    return found


def fold(summary: str, content: str) -> str:
    return f"<details><summary>{html.escape(summary)}</summary>{content}</details>"


def comparison_page(old: str, new: str) -> str:
    pairs, rest, gone = compare(old, new)
    older, newer = STAGES[old].parent.name, STAGES[new].parent.name
    others = (f'<a href="{new}-from-{n}.html">{n}</a>' for n in STAGES if n not in (old, new))
    body, outline = "", {"New": "", "Changed": ""}
    for summary, group in folded(pairs):
        if summary:
            body += fold(summary, "".join(rows(*pair) for pair in group))
            continue
        [(base, block)], title = group, html.escape(group[0][1].name)
        if block.name[0] != "#" and (base is None or base.lines != block.lines):
            key = "Changed" if base else "New"
            is_method = f"#{block.owner}" in outline[key] and block.owner != block.name
            text = title.removeprefix(block.owner) if is_method else title
            outline[key] += f' <a href="#{title}">{text}</a>'
        is_elsewhere = base and (base.stage != older or base.name != block.name)
        note = f"<p>compared with {base.name} in {base.stage}</p>" if is_elsewhere else ""
        kind = "changed" if base else "only"
        body += f'<section class="{kind}" id="{title}">{note}{rows(base, block)}</section>'
    for block in rest:
        lines = "".join(row(x, None, (older, "")) for x in enumerate(block.lines, block.first))
        body += fold(f"only in {older}: {block.name} ({len(block.lines)} lines)", lines)
    found = [f"<p><b>{key}</b>{links}</p>" for key, links in outline.items() if links]
    found += [f"<p><b>Gone</b> {html.escape(', '.join(gone))}</p>"] * any(gone)
    head = f"<h1>{older} → {newer}</h1><p>Or compare {new} with {' '.join(others)}</p>"
    heads = f'<div class="row heads"><code>{older}</code><code>{newer}</code></div>'
    return f'{head}<nav>{"".join(found)}</nav><div class="code">{heads}{body}</div>'


# ---- READMEs ----


def highlighted(code: str, language: str, _: str) -> str:
    lexer = find_lexer_class_by_name(language or "text")()
    return f"<pre><code>{pygments.highlight(code, lexer, HtmlFormatter(nowrap=True))}</code></pre>"


MARKDOWN = MarkdownIt("commonmark", {"html": True, "highlight": highlighted}).enable("table")


def readme_page(path: Path, linked: list[Path]) -> str:
    """linked: gets the files that it links to."""

    def heading(found: re.Match) -> str:
        """With the anchor that GitHub gives it."""
        words = html.unescape(re.sub(r"<[^>]*>", "", found[2])).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        return f'<h{found[1]} id="{anchor}">{found[2]}</h{found[1]}>'

    def link(found: re.Match) -> str:
        name, hash_, anchor = found[2].partition("#")
        if not name or re.match(r"\w+:", name):
            return found[0]
        linked.append((path.parent / name).resolve())
        return f'{found[1]}="{address(linked[-1])}{hash_}{anchor}"'

    text = re.sub(r"<h(\d)>(.*?)</h\1>", heading, MARKDOWN.render(path.read_text()))
    return re.sub(r'\b(href|src)="([^"]*)"', link, text)


# ---- the folder ----


def address(path: Path) -> str:
    name = str(path.relative_to(REPO)).replace("/", "-")
    return PAGES.get(path) or name + ".html" * (path.suffix not in PICTURES)


def framed(title: str, content: str, stage: str = "", view: str = "") -> str:
    def tab(text: str, page: str, is_here: bool) -> str:
        return f'<a href="{page}"{" class=here" * is_here}>{text}</a>'

    old = stage and (stage_file(stage).compare or list(STAGES)[1])
    views = {"README": f"{stage}.html", "Code": f"{stage}-code.html"}
    views["Comparison"] = f"{stage}-from-{old}.html"
    numbers = "".join(tab(n, f"{n}.html", n == stage) for n in STAGES)
    tabs = "".join(tab(text, page, text == view) for text, page in views.items() if stage)
    return (
        '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>'
        + html.escape(title)
        + '</title><meta name="viewport" content="width=device-width, initial-scale=1">'
        + '<link rel="stylesheet" href="style.css"><header><a href="index.html">All stages</a>'
        + f"<nav>{numbers}</nav><nav>{tabs}</nav></header><main>{content}</main></html>"
    )


def build(out: Path = REPO / "lessons") -> None:
    out.mkdir(parents=True, exist_ok=True)
    for page in out.glob("*.html"):  # of stages that are no more
        page.unlink()
    css = Path(__file__).with_suffix(".css").read_text()
    for style, scheme in (("stata-light", "light"), ("github-dark", "dark")):
        rules = HtmlFormatter(style=style).get_style_defs("code").split("\n")
        colours = "\n".join(rule for rule in rules if rule.startswith("code ."))
        css += f"@media (prefers-color-scheme: {scheme}) {{\n{colours}\n}}\n"
    (out / "style.css").write_text(css)
    paths = list(PAGES)
    for path in paths:  # which grows
        stage = next((n for n in STAGES if STAGES[n].parent == path.parent and path in PAGES), "")
        title = f"{stage} {stage_file(stage).title}" if stage else path.name
        if path.suffix in PICTURES:
            shutil.copy(path, out / address(path))
            continue
        is_text = path.suffix == ".md"
        linked: list[Path] = []
        content = readme_page(path, linked) if is_text else code_page(path)
        page = framed(title, content, stage, "README" if is_text else "Code")
        (out / address(path)).write_text(page)
        paths += dict.fromkeys(x for x in linked if x not in paths)
    for new in STAGES:
        for old in (n for n in STAGES if n != new):
            page = framed(f"{old} → {new}", comparison_page(old, new), new, "Comparison")
            (out / f"{new}-from-{old}.html").write_text(page)
    print(f"open {out / 'index.html'} in a browser")


if __name__ == "__main__":
    build()
