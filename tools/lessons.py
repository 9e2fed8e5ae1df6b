"""The lessons as web pages that open from disk: `make lessons` writes lessons/index.html."""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache
from itertools import permutations, zip_longest
from pathlib import Path

import pygments
from markdown_it import MarkdownIt
from pygments.formatters import HtmlFormatter
from pygments.lexers import BashLexer, find_lexer_class_for_filename, get_lexer_by_name

from tools.diff import Block, Line, align, compare, folded, moved, names_beside
from tools.stages import REPO, beside, stage_file, stage_paths

STAGES, PICTURES = stage_paths(), (".svg", ".png")
FORMATTER = HtmlFormatter(nowrap=True)
ALIKE = 0.5  # the part of its words that a line keeps, at least, if it is shown as changed
PAGES = {REPO / "README.md": "index.html"}
PAGES |= {path.with_name("README.md"): f"{n}.html" for n, path in STAGES.items()}
PAGES |= {path: f"{n}-code.html" for n, path in STAGES.items()}
PAGES |= {path: f"{n}-{path.stem}.html" for n in STAGES for path in beside(n)}
FRAME = """<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="stylesheet" href="style.css">
<header><a href="index.html">All stages</a><nav>{stages}</nav><nav>{views}</nav></header>
<main>{content}</main></html>
"""


@cache
def lines_of(path: Path) -> list[str]:
    """Lines of HTML, each of which closes what it opens."""
    lexer = (find_lexer_class_for_filename(path.name) or BashLexer)(stripnl=False)
    return pygments.highlight(path.read_text("utf-8"), lexer, FORMATTER).split("\n")[:-1]


def code_page(path: Path) -> str:
    numbered = enumerate(lines_of(path), 1)
    lines = (f'<code id="L{i}"><a href="#L{i}" data-n="{i}"></a>{x}\n</code>' for i, x in numbered)
    n = next((n for n, script in STAGES.items() if script == path), "")
    head = f"<h1>{path.relative_to(REPO)}</h1>{links_beside(n) if n else ''}"
    return f'{head}<div class="code">{"".join(lines)}</div>'


def links_beside(n: str) -> str:
    """Links to the files beside a stage's script."""
    return "".join(f'<p><a href="{PAGES[path]}">{text}</a></p>' for text, path in moved(n))


@cache
def likeness(a: str, b: str) -> float:
    left, right = ({*re.findall(r"\w+", line)} for line in (a, b))
    return 2 * len(left & right) / max(1, len(left) + len(right))


def pair_up(old: list[Line], new: list[Line]) -> Iterator[tuple[Line | None, Line | None]]:
    """Put the most similar lines side by side, then those above them and those below."""
    every = [(i, j) for i in range(len(old)) for j in range(len(new))]
    i, j = max(every, key=lambda x: likeness(old[x[0]][1], new[x[1]][1]), default=(0, 0))
    if every and likeness(old[i][1], new[j][1]) >= ALIKE:
        yield from pair_up(old[:i], new[:j])
        yield old[i], new[j]
        yield from pair_up(old[i + 1 :], new[j + 1 :])
    else:
        yield from zip_longest(old, new)


def marked(text: str, line: str, other: str) -> str:
    """The HTML of a line, with those words in <mark> that another line has not."""
    a, b = (re.findall(r"^\s*|\w+|\s+|.", x) for x in (line, other))
    blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    kept = {0, *(i + k for i, _, n in blocks for k in range(n))}  # 0 is the indentation
    is_kept = iter([i in kept for i, word in enumerate(a) for _ in word])
    pieces = re.findall(r"<[^>]*>|&[^;]*;|.", text)
    done = (x if x[0] == "<" or next(is_kept) else f"<mark>{x}</mark>" for x in pieces)
    return "".join(done).replace("</mark><mark>", "")


def cell(side: str, line: Line | None, other: Line | None, stage: str) -> str:
    if line is None:
        return f'<code class="{side}"></code>'
    text = lines_of(REPO / stage / "train.py")[line[0] - 1]
    if other and line[1] != other[1] and likeness(line[1], other[1]) >= ALIKE:
        text = marked(text, line[1], other[1])
    return f'<code class="{side}" data-n="{line[0]}">{text}</code>'


@cache
def rows(old: Block | None, new: Block) -> str:
    found, removed = "", []
    for mark, a, b in align(old, new):
        lines, removed = "", a if mark == "-" else removed
        for x, y in pair_up(removed, b) if mark == "+" else zip(a, b, strict=False):
            cells = cell("old", x, y, old.stage if old else "") + cell("new", y, x, new.stage)
            if "# -----" not in (y or x)[1]:
                lines += f'<div class="row{" equal" * (mark != "+")}">{cells}</div>'
        shown = f'<div class="hunk">{lines}</div>'
        found += shown if mark != "=" else fold(f"... {len(b)} lines", lines)
    return found


def fold(summary: str, content: str) -> str:
    return f"<details><summary>{html.escape(summary)}</summary>{content}</details>"


def comparison_page(old: str, new: str) -> str:
    pairs, rest, gone = compare(old, new)
    older, newer = STAGES[old].parent.name, STAGES[new].parent.name
    body, outline = "", {"New": "", "Changed": "", "Gone": html.escape(", ".join(gone))}
    for summary, group in folded(pairs):
        base, block = group[0]
        if summary:
            body += fold(summary, "".join(rows(*pair) for pair in group))
            continue
        if block.name[0] != "#" and (base is None or base.lines != block.lines):
            key = "Changed" if base else "New"
            title = block.name.removeprefix(block.owner * (f">{block.owner}<" in outline[key]))
            outline[key] += f' <a href="#L{block.first}">{html.escape(title)}</a>'
        note = ""
        if base and (base.stage != older or block.owner == block.name != base.name):
            note = f"<p>compared with {base.name} in {base.stage}</p>"
        body += f'<section id="L{block.first}">{note}{rows(base, block)}</section>'
    known = names_beside(new)
    for block in rest:
        where = f"beside {newer}/train.py" if block.name in known else f"only in {older}"
        lines = "".join(cell("old", x, None, older) for x in enumerate(block.lines, block.first))
        body += fold(f"{where}: {block.name} ({len(block.lines)} lines)", lines)
    others = "".join(f' <a href="{new}-from-{n}.html">{n}</a>' for n in STAGES if n != new)
    head = f"<h1>{older} → {newer}</h1><p>{new} compared with{others}</p>"
    head += links_beside(new)
    head += "".join(f"<p><b>{key}</b> {text}</p>" for key, text in outline.items() if text)
    heads = f'<div class="row heads"><code>{older}</code><code>{newer}</code></div>'
    return f'{head}<div class="code">{heads}{body}</div>'


def code_block(code: str, language: str, _: str) -> str:
    lines = pygments.highlight(code, get_lexer_by_name(language or "text"), FORMATTER)
    return f"<pre><code>{lines}</code></pre>"


MARKDOWN = MarkdownIt("commonmark", {"html": True, "highlight": code_block}).enable("table")


def readme_page(path: Path, linked: list[Path]) -> str:  # which gets the files that it links to
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

    text = re.sub(r"<h(\d)>(.*?)</h\1>", heading, MARKDOWN.render(path.read_text("utf-8")))
    return re.sub(r'\b(href|src)="([^"]*)"', link, text)


def address(path: Path) -> str:
    name = str(path.relative_to(REPO)).replace("/", "-")
    return PAGES.get(path) or name + ".html" * (path.suffix not in PICTURES)


def framed(title: str, content: str, n: str = "", view: str = "") -> str:
    """A page of stage n. view: README, Code or Comparison."""
    old = n and (stage_file(n).compare or list(STAGES)[1])
    views = {"README": f"{n}.html", "Code": f"{n}-code.html", "Comparison": f"{n}-from-{old}.html"}
    here = "", ' class="here"'
    stages = "".join(f'<a href="{x}.html"{here[x == n]}>{x}</a>' for x in STAGES)
    tabs = "".join(f'<a href="{page}"{here[x == view]}>{x}</a>' for x, page in views.items() if n)
    return FRAME.format(title=html.escape(title), stages=stages, views=tabs, content=content)


def build(out: Path = REPO / "lessons") -> None:
    out.mkdir(parents=True, exist_ok=True)
    css = Path(__file__).with_suffix(".css").read_text("utf-8")
    for style, scheme in (("stata-light", "light"), ("github-dark", "dark")):
        rules = HtmlFormatter(style=style).get_style_defs("code").split("\n")
        colours = "\n".join(rule for rule in rules if rule.startswith("code ."))
        css += f"@media (prefers-color-scheme: {scheme}) {{\n{colours}\n}}\n"
    (out / "style.css").write_text(css, "utf-8")
    paths = list(PAGES)
    for path in paths:  # which grows
        if path.suffix in PICTURES:
            shutil.copy(path, out / address(path))
            continue
        n = next((n for n, script in STAGES.items() if script.parent == path.parent), "")
        is_text, linked = path.suffix == ".md", []
        content = readme_page(path, linked) if is_text else code_page(path)
        title = f"{n} {stage_file(n).title}" if n else path.name
        page = framed(title, content, n, "README" if is_text else "Code")
        (out / address(path)).write_text(page, "utf-8")
        paths += dict.fromkeys(x for x in linked if x not in paths)
    for old, new in permutations(STAGES, 2):
        page = framed(f"{old} → {new}", comparison_page(old, new), new, "Comparison")
        (out / f"{new}-from-{old}.html").write_text(page, "utf-8")
    print(f"open {out / 'index.html'} in a browser")


if __name__ == "__main__":
    build()
