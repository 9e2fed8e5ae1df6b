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
from functools import cache
from hashlib import sha256
from pathlib import Path, PurePosixPath

import jinja2
from markupsafe import Markup

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pictures"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compare import Comparison, Stage, compare, split_stage
from diff import lines_to_read
from lessons.figures import curves, read_runs
from lessons.highlight import highlight, links
from lessons.listing import ComparisonView, Entry, anchor, code_items, code_page, outline
from lessons.readme import Resolver, convert
from stages import REPO, stage_file, stage_paths

TEMPLATES = Path(__file__).parent
# what gets a page where it is linked; in folders of the repository, and not of a run or a site
SOURCES = {".py", ".sh", ".sbatch", ".toml", ".txt", ".example", ".md"}
NO_SOURCES = {"runs", "data", "lessons", "cluster", "__pycache__"}
TYPES = {".svg": "image/svg+xml", ".png": "image/png", ".jpg": "image/jpeg", ".gif": "image/gif"}


class Site:
    """All pages. `build` returns them by their files' names."""

    def __init__(self, repo: Path = REPO, runs: Path | None = None):
        self.repo, self.runs = repo.resolve(), runs or repo / "runs"
        self.folders = {number: path.parent.name for number, path in stage_paths(repo).items()}
        self.pages_of_stages = {f"{x}/README.md": f"{n}.html" for n, x in self.folders.items()}
        self.pages_of_stages |= {f"{x}/train.py": code_page(n) for n, x in self.folders.items()}
        self.wanted: list[str] = []  # linked files
        self.document = cache(lambda path: convert(self.text(path), self.resolver(path)))
        self.tokens = cache(lambda path: highlight(self.text(path), filename=path))
        self.split = cache(
            lambda path: split_stage(PurePosixPath(path).parent.name, self.text(path))
        )
        self.compared = cache(self.compare)
        self.templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(TEMPLATES),
            undefined=jinja2.StrictUndefined,
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        script = (TEMPLATES / "script.js").read_text()
        # by which a page's policy allows its one script
        digest = base64.b64encode(sha256(script.encode()).digest()).decode()
        self.templates.globals.update(site=self, script=Markup(script), script_hash=digest)

    def build(self) -> dict[str, str]:
        pages = {}
        for number, folder in self.folders.items():
            pages[f"{number}.html"] = self.readme(f"{folder}/README.md", number)
            pages[code_page(number)] = self.code(f"{folder}/train.py", number)
            for old in self.folders:
                if old != number:
                    pages[comparison_page(number, old)] = self.comparison(number, old)
        pages["index.html"] = self.index()
        for path in self.wanted:  # which grows meanwhile
            render = self.readme if path.endswith(".md") else self.code
            pages[self.page_of(path)] = render(path)
        return pages

    # ---- pages ----

    def render(
        self, view: str, title: str, toc: list[Entry], stage: str = "", **content: object
    ) -> str:
        """view: index, lesson, code or comparison, each of which has a template."""
        return self.templates.get_template(f"{view}.html").render(
            title=title,
            toc=toc,
            stage=stage,
            view=view,
            previous=max((n for n in self.folders if n < stage), default=""),
            next=min((n for n in self.folders if stage and n > stage), default=""),
            **content,
        )

    def index(self) -> str:
        readme, runs = self.document("README.md"), read_runs(self.runs)
        toc = [Entry(2, "stages", "The stages"), Entry(2, "how-to-read", "How to read them")]
        toc += [Entry(2, "figures", "Figures of your runs")] if runs else []
        toc += [Entry(2, "cost", "Which technique when")]
        picture = Markup(curves(runs)) if runs else ""
        planning = self.document("PLANNING.md")
        content = {"readme": readme, "planning": planning, "runs": runs, "picture": picture}
        return self.render("index", readme.title, toc, **content)

    def readme(self, path: str, number: str = "") -> str:
        document = self.document(path)
        toc = [entry for entry in document.headings if entry.level in (2, 3)]
        return self.render("lesson", document.title or path, toc, number, html=document.html)

    def code(self, path: str, number: str = "") -> str:
        """A stage's script, or another file that is no README."""
        script = self.split(path) if path.endswith(".py") else Stage(path, [], [], {})
        definitions, beside = [], {}
        if number:
            nothing = Stage("", [], [], {})
            definitions = compare(nothing, script, *self.earlier(number)).definitions
            names = sorted(x.name for x in (self.repo / path).parent.iterdir())
            beside = {name: self.link(path, name) for name in names}
            del beside["README.md"], beside["train.py"]
        items = code_items(self.tokens(path), self.links(path, script), script.blocks, definitions)
        title = f"Code of {self.title(number)}" if number else path
        content = {"path": path, "items": items, "beside": beside}
        return self.render("code", title, outline(script.blocks), number, **content)

    def comparison(self, number: str, old: str) -> str:
        compared = self.compared(old, number)
        view = ComparisonView(compared, lambda folder: self.tokens(f"{folder}/train.py"))
        title = f"{self.folders[old]} → {self.folders[number]}"
        content = {"compared": compared, "shown": view, "old": old}
        return self.render("comparison", title, view.outline(), number, **content)

    # ---- their parts ----

    def text(self, path: str) -> str:
        return (self.repo / path).read_text(encoding="utf-8")

    def title(self, number: str) -> str:
        return self.document(f"{self.folders[number]}/README.md").title

    def stage(self, number: str) -> Stage:
        return self.split(f"{self.folders[number]}/train.py")

    def earlier(self, number: str) -> list[Stage]:
        return [self.stage(each) for each in self.folders if each < number]

    def compare(self, old: str, new: str) -> Comparison:
        return compare(self.stage(old), self.stage(new), *self.earlier(new))

    def lines_to_read(self, old: str, new: str) -> int:
        return lines_to_read(self.compared(old, new))

    def default_old(self, number: str) -> str:
        """The stage to compare with at first; for the first stage, which has none, the next."""
        return stage_file(number, self.repo).compare or [*self.folders, number][1]

    def links(self, path: str, script: Stage) -> dict:
        """Where the names in a script lead: its own definitions, and what it imports from here."""
        hrefs = self.imported(path)
        for name, block in script.by_name.items():
            if block.kind in ("class", "function", "statement") and re.fullmatch(r"[\w.]+", name):
                hrefs[name] = f"#{anchor(block)}"
        return links(self.text(path), hrefs) if script.blocks else {}

    def imported(self, path: str) -> dict[str, str]:
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
        if path is None or path in self.pages_of_stages or not (self.repo / path).is_file():
            return self.pages_of_stages.get(path)
        parts = PurePosixPath(path)
        if parts.suffix not in SOURCES or NO_SOURCES & set(parts.parts) or "/." in f"/{path}":
            return None
        if path not in self.wanted:
            self.wanted.append(path)
        return path.replace("-", "--").replace("/", "-") + ".html"

    def stage_page(self, number: str, view: str) -> str:
        """A stage's code, its comparison with the stage that it is built on, or its lesson."""
        compared = comparison_page(number, self.default_old(number))
        return {"code": code_page(number), "comparison": compared}.get(view, f"{number}.html")

    def picture(self, path: str, target: str) -> str | None:
        """A picture as data, in which no script can run and no other host is asked."""
        name = self.normal(path, target)
        kind = TYPES.get(PurePosixPath(name or "").suffix)
        if kind is None or not (self.repo / name).is_file():
            return None
        data = base64.b64encode((self.repo / name).read_bytes()).decode()
        return f"data:{kind};base64,{data}"

    def normal(self, path: str, target: str) -> str | None:
        """A relative address in a file as a path of the repository; None if it leads outside."""
        if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:|/", target):
            return None
        joined = os.path.normpath(PurePosixPath(path).parent / target)
        inside = (self.repo / joined).resolve().is_relative_to(self.repo)
        return joined if inside and not joined.startswith("..") else None

    def name_resolver(self, path: str) -> Callable[[str], str | None]:
        """In a stage's README, the definition that a code span names."""
        script = path.replace("README.md", "train.py")
        if script == path or script not in self.pages_of_stages:
            return lambda name: None
        names: dict[str, str | None] = dict(self.imported(script))
        for name, block in self.split(script).by_name.items():
            short = name.rpartition(".")[2]
            if block.kind in ("class", "function") and not short.startswith("__"):
                href = f"{self.pages_of_stages[script]}#{anchor(block)}"
                names[short] = None if short in names and short != name else href  # not unique
                names[name] = href
        return names.get


def comparison_page(number: str, old: str) -> str:
    return f"{number}-from-{old}.html"


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
