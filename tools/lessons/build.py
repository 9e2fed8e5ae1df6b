"""Build the lessons as a folder of web pages that open from disk.

    python tools/lessons/build.py                into lessons/
    python tools/lessons/build.py --out FOLDER

An index, and for each stage its README, its code, and its comparison with every other stage; also
every file that these link to. A page stands alone: it holds its style, script and pictures.
`make lessons` runs this.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path, PurePosixPath

import jinja2
from markupsafe import Markup

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pictures"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compare import Stage, compare, read_stage, split_stage
from diff import Renderer
from lessons.figures import pictures, read_runs
from lessons.highlight import Token, highlight, links, to_html
from lessons.listing import ComparisonView, Entry, anchor, code_groups, outline
from lessons.readme import Document, Resolver, convert, section
from stages import REPO, stage_file, stage_paths

TEMPLATES = Path(__file__).parent
# what gets a page where it is linked; in folders of the repository, and not of a run or a site
SOURCES = {".py", ".sh", ".sbatch", ".toml", ".txt", ".example", ".md"}
NO_SOURCES = {"runs", "data", "lessons", "cluster", "__pycache__"}
TYPES = {".svg": "image/svg+xml", ".png": "image/png", ".jpg": "image/jpeg", ".gif": "image/gif"}
LARGEST_PICTURE = 300_000  # bytes


@dataclass
class Page:
    """What a template shows. view: lesson, code or comparison, of a stage."""

    template: str
    title: str
    stage: str = ""
    view: str = ""
    toc: list[Entry] = field(default_factory=list)
    content: dict[str, object] = field(default_factory=dict)


class Site:
    """All pages. `build` returns them by their files' names."""

    def __init__(self, repo: Path = REPO, runs: Path | None = None):
        self.repo, self.runs = repo.resolve(), runs or repo / "runs"
        self.folders = {number: path.parent.name for number, path in stage_paths(repo).items()}
        self.numbers = list(self.folders)
        self.text = cache(lambda path: (self.repo / path).read_text(encoding="utf-8"))
        self.document = cache(self._document)
        self.tokens = cache(self._tokens)
        self.html = cache(lambda path: [to_html(tokens) for tokens in self.tokens(path)])
        self.stage = cache(lambda number: read_stage(number, self.repo))
        self.split = cache(lambda path: split_stage(path, self.text(path)))
        self.imported = cache(self._imported)
        self.to_read: dict[tuple[str, str], int] = {}  # lines of `make diff`, by old and new
        self.wanted: dict[str, None] = {}  # linked files, in order
        settings = dict(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        loader = jinja2.FileSystemLoader(TEMPLATES)
        environment = jinja2.Environment(
            loader=loader, undefined=jinja2.StrictUndefined, **settings
        )
        self.template = environment.get_template
        self.style, self.script = (
            Markup((TEMPLATES / name).read_text(encoding="utf-8"))
            for name in ("style.css", "script.js")
        )

    def build(self) -> dict[str, str]:
        pages = {}
        for number in self.numbers:
            pages[lesson_page(number)] = self.render(self.lesson(number))
            pages[code_page(number)] = self.render(self.code(number))
            for old in self.numbers:
                if old != number:
                    pages[comparison_page(number, old)] = self.render(self.comparison(number, old))
        pages["index.html"] = self.render(self.index())
        done: set[str] = set()
        while todo := [path for path in self.wanted if path not in done]:
            for path in todo:
                pages[self.page_of(path)] = self.render(self.file(path))
                done.add(path)
        return pages

    def render(self, page: Page) -> str:
        numbers = self.numbers
        at = numbers.index(page.stage) if page.stage else -1
        return self.template(page.template).render(
            page=page,
            site=self,
            previous=numbers[at - 1] if at > 0 else "",
            next=numbers[at + 1] if 0 <= at < len(numbers) - 1 else "",
            script_hash=content_hash(self.script),
            **page.content,
        )

    # ---- pages ----

    def index(self) -> Page:
        readme = self.text("README.md")
        shown = {"how_to_read": "How to read it", "cost": "Which technique when"}
        parts = {name: self.part("README.md", readme, shown[name]) for name in shown}
        title = self.document("README.md").title
        which, runs = read_runs(self.runs)
        drawn = [(caption, Markup(picture)) for caption, picture in pictures(runs)]
        toc = [Entry(1, "stages", "The stages"), Entry(1, "how-to-read", "How to read them")]
        toc += [Entry(1, "figures", "Figures of your runs")] if drawn else []
        toc += [Entry(1, "cost", "Which technique when")]
        content = {"lead": self.lead("README.md"), "runs": which, "pictures": drawn, **parts}
        return Page("index.html", title, toc=toc, content=content)

    def lesson(self, number: str) -> Page:
        path = f"{self.folders[number]}/README.md"
        document = self.document(path)
        return self.readme(document.title, document, number, "lesson")

    def readme(self, title: str, document: Document, *view: str) -> Page:
        content = {"html": Markup(document.html)}
        toc = [Entry(x.level - 1, x.id, x.text) for x in document.headings if x.level in (2, 3)]
        return Page("lesson.html", title, *view, toc=toc, content=content)

    def code(self, number: str) -> Page:
        folder = self.folders[number]
        path = f"{folder}/train.py"
        stage = self.stage(number)
        earlier = [self.stage(each) for each in self.numbers if each < number]
        definitions = compare(Stage("", [], [], {}), stage, earlier).definitions
        groups = code_groups(self.tokens(path), self.links(path, stage), stage.blocks, definitions)
        beside = [p.name for p in sorted((self.repo / folder).iterdir()) if p.suffix in SOURCES]
        others = {name: self.link(path, name) for name in beside if name != "train.py"}
        del others["README.md"]
        content = {"path": path, "groups": groups, "others": others}
        heading, toc = f"Code of {self.title(number)}", outline(stage.blocks)
        return Page("code.html", heading, number, "code", toc, content)

    def comparison(self, number: str, old: str) -> Page:
        earlier = [self.stage(each) for each in self.numbers if each < number]
        compared = compare(self.stage(old), self.stage(number), earlier)
        lines = sum(bool(line.strip()) for line in Renderer(colour=False).diff(compared))
        self.to_read[old, number] = lines
        view = ComparisonView(
            compared,
            lambda folder: self.tokens(f"{folder}/train.py"),
            lambda folder: self.html(f"{folder}/train.py"),
            lambda folder: code_page(folder[:2]),
        )
        content = {"view": view, "old": old, "lines": lines}
        title = f"{self.folders[old]} → {self.folders[number]}"
        return Page("comparison.html", title, number, "comparison", view.outline, content)

    def file(self, path: str) -> Page:
        """A file that no stage's pages show: another README, or a source."""
        if path.endswith(".md"):
            return self.readme(self.document(path).title or path, self.document(path))
        found, blocks = {}, []
        if path.endswith(".py"):
            stage = self.split(path)
            found, blocks = self.links(path, stage), stage.blocks
        groups = code_groups(self.tokens(path), found, blocks)
        content = {"path": path, "groups": groups, "others": {}}
        return Page("code.html", path, toc=outline(blocks), content=content)

    # ---- their parts ----

    def default_old(self, number: str) -> str:
        """The stage to compare with at first; for the first stage, which has none, the next."""
        return stage_file(number, self.repo).compare or self.numbers[min(1, len(self.numbers) - 1)]

    def title(self, number: str) -> str:
        return self.document(f"{self.folders[number]}/README.md").title

    def lead(self, path: str) -> Markup:
        """The first paragraph below a README's title."""
        blocks = re.split(r"\n\s*\n", self.text(path))
        return self.converted(path, next(x for x in blocks if x.strip() and x[0] != "#"))

    def part(self, path: str, text: str, heading: str) -> Markup:
        try:
            return self.converted(path, section(text, heading))
        except LookupError as error:
            sys.exit(f"lessons.py: {path} has {error}, which the index shows")

    def converted(self, path: str, text: str) -> Markup:
        html = convert(text, self.resolver(path)).html
        return Markup(re.sub(r'(<h\d) id="[^"]*"', r"\1", html))  # they are in another page too

    def _document(self, path: str) -> Document:
        return convert(self.text(path), self.resolver(path))

    def _tokens(self, path: str) -> list[list[Token]]:
        return highlight(self.text(path), filename=PurePosixPath(path).name)

    def links(self, path: str, stage: Stage) -> dict:
        """Where the names in a script lead: its own definitions, and what it imports from here."""
        hrefs = {
            name: f"#{anchor(block)}"
            for name, block in stage.by_name.items()
            if block.kind in ("class", "function", "statement") and re.fullmatch(r"[\w.]+", name)
        }
        return links(self.text(path), {**self.imported(path), **hrefs})

    def _imported(self, path: str) -> dict[str, str]:
        """The names that a script imports from modules of the repository, and their definitions."""
        found = {}
        imports = r"^from (common(?:\.\w+)+) import (?:\(([^)]*)\)|([^\n(]*))"
        for module, several, one in re.findall(imports, self.text(path), re.M):
            source = module.replace(".", "/") + ".py"
            if (self.repo / source).is_file():
                defined = self.split(source).by_name
                for name in re.findall(r"\w+", several or one):
                    if name in defined:
                        found[name] = f"{self.page_of(source)}#{anchor(defined[name])}"
        return found

    # ---- addresses ----

    def resolver(self, path: str) -> Resolver:
        return Resolver(
            link=lambda target: self.link(path, target),
            picture=lambda target: self.picture(path, target),
            name=self.name_resolver(path),
        )

    def link(self, path: str, target: str) -> str | None:
        """Where a link in a file of the repository leads, as an address within the pages."""
        name, _, fragment = target.partition("#")
        page = self.page_of(self.normal(path, name) if name else path)
        if page is None or re.search(r"[^\w.'-]", fragment):
            return page
        return f"{page}#{fragment}" if fragment else page

    def page_of(self, path: str | None) -> str | None:
        """The page of a file of the repository, which will be built; None if none shows it."""
        if path is None or not (self.repo / path).is_file():
            return None
        parts = PurePosixPath(path)
        if parts.parent.name == self.folders.get(path[:2]) == str(parts.parent):
            if parts.name in ("README.md", "train.py"):
                return (lesson_page if parts.name == "README.md" else code_page)(path[:2])
        if parts.suffix not in SOURCES or NO_SOURCES & set(parts.parts) or "/." in f"/{path}":
            return None
        self.wanted.setdefault(path)
        return path.replace("-", "--").replace("/", "-") + ".html"

    def picture(self, path: str, target: str) -> str | None:
        """A picture as data, in which no script can run and no other host is asked."""
        name = self.normal(path, target)
        kind = TYPES.get(PurePosixPath(name or "").suffix)
        if kind is None or not (self.repo / name).is_file():
            return None
        data = (self.repo / name).read_bytes()
        if len(data) > LARGEST_PICTURE:
            sys.exit(f"lessons.py: {name} has {len(data):,} bytes; pages hold their pictures")
        return f"data:{kind};base64,{base64.b64encode(data).decode()}"

    def normal(self, path: str, target: str) -> str | None:
        """A relative address in a file as a path of the repository; None if it leads outside."""
        if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:|/", target):
            return None
        joined = os.path.normpath(PurePosixPath(path).parent / target)
        inside = (self.repo / joined).resolve().is_relative_to(self.repo)
        return joined if inside and not joined.startswith("..") else None

    def name_resolver(self, path: str) -> Callable[[str], str | None]:
        """In a stage's README, the definition that a code span names."""
        script = f"{PurePosixPath(path).parent}/train.py"
        number = script[:2]
        if script != f"{self.folders.get(number)}/train.py":
            return lambda name: None
        names: dict[str, str | None] = dict(self.imported(script))
        for name, block in self.stage(number).by_name.items():
            short = name.rpartition(".")[2]
            if block.kind in ("class", "function") and not short.startswith("__"):
                href = f"{code_page(number)}#{anchor(block)}"
                names[short] = None if short in names and short != name else href  # not unique
                names[name] = href
        return names.get


def lesson_page(number: str) -> str:
    return f"{number}.html"


def code_page(number: str) -> str:
    return f"{number}-code.html"


def comparison_page(number: str, old: str) -> str:
    return f"{number}-from-{old}.html"


def content_hash(text: str) -> str:
    """By which a page's policy allows its one script."""
    return "sha256-" + base64.b64encode(sha256(text.encode()).digest()).decode()


# ---- the command ----


def write(pages: dict[str, str], out: Path) -> None:
    """Write the pages, and remove those of an earlier build that no longer exist."""
    out.mkdir(parents=True, exist_ok=True)
    for path in out.glob("*.html"):
        if path.name not in pages:
            path.unlink()
    for name, html in pages.items():
        (out / name).write_text(html, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=REPO / "lessons", help="the folder to write")
    parser.add_argument("--runs", type=Path, default=REPO / "runs", help="the runs to show")
    args = parser.parse_args()
    pages = Site(runs=args.runs).build()
    write(pages, args.out)
    print(f"{len(pages)} pages; open {args.out / 'index.html'} in a browser")


if __name__ == "__main__":
    main()
