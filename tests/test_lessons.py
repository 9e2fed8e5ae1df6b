"""`make lessons`: pages that open from disk, whose links resolve, and that lose no line."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import permutations
from pathlib import Path

import pytest
from harness import REPO, lines_of, stages
from slurm_cluster import skip_or_fail

from tools.stages import beside

pytestmark = pytest.mark.slow  # building the pages takes seconds


class Page(HTMLParser):
    """ids: of its tags. links: what it links to and loads."""

    def __init__(self, text: str):
        super().__init__()
        self.text, self.ids, self.links = text, [], []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values[key] for key in ("href", "src") if key in values]

    def code(self, start: str) -> set[tuple[int, str]]:
        """Numbers and texts of the lines whose tags begin so."""
        lines = re.findall(rf"<code {start}.*?data-n=\"(\d+)\">(.*?)\n?</code>", self.text)
        return {(int(i), html.unescape(re.sub("<[^>]*>", "", text))) for i, text in lines}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("lessons")
    build = f"import pathlib, tools.lessons as x; x.build(pathlib.Path({str(out)!r}))"
    ascii = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", build], cwd=REPO, env=os.environ | ascii, check=True)
    return out


@pytest.fixture(scope="module")
def pages(folder) -> dict[str, Page]:
    return {path.name: Page(path.read_text()) for path in folder.glob("*.html")}


def test_every_link_anchor_and_picture_resolves(pages, folder):
    for name, page in pages.items():
        assert len(page.ids) == len(set(page.ids)), name
        for link in page.links:
            target, _, anchor = link.partition("#")
            if not re.match("https://", link):
                assert not target or (folder / target).is_file(), (name, link)
                assert not anchor or anchor in pages[target or name].ids, (name, link)


@pytest.mark.parametrize("stage", stages())
def test_a_page_of_code_shows_every_line(pages, stage):
    assert pages[f"{stage}-code.html"].code("id=") == {*enumerate(lines_of(stage), 1)}
    for path in beside(stage):
        page = f"{stage}-{path.stem}.html"
        assert page in pages[f"{stage}-code.html"].links
        assert pages[page].code("id=") == {*enumerate(path.read_text().splitlines(), 1)}


@pytest.mark.parametrize("old, new", [*permutations(stages(), 2)])
def test_a_comparison_shows_every_line_of_both_stages(pages, old, new):
    page = pages[f"{new}-from-{old}.html"]
    for stage, start in ((old, 'class="old"'), (new, 'class="new"')):
        lines = enumerate(lines_of(stage), 1)
        assert {x for x in lines if x[1] and "# -----" not in x[1]} <= page.code(start)


REPORT = r"""<script>onload = () => parent.postMessage({
  page: location.pathname.split("/").pop(),
  width: innerWidth,
  scrolls: document.documentElement.scrollWidth > innerWidth,
  broken: [...document.images].filter((each) => !each.naturalWidth).length,
  beside: [...document.querySelectorAll(".row")].some((each) => {
    const [old, new_] = [...each.children].map((cell) => cell.getBoundingClientRect());
    return old.height && new_.height && old.top == new_.top;
  }),
}, "*")</script>"""
LISTEN = """<pre></pre><script>onmessage = (event) => {
  document.querySelector("pre").textContent += JSON.stringify(event.data) + "\\n";
}</script>"""


def test_pages_in_a_browser(folder, tmp_path):
    """Nothing scrolls sideways. A wide screen shows both stages side by side, a narrow one not."""
    if (chromium := shutil.which("chromium")) is None:
        skip_or_fail("Chromium is missing (apt install chromium)")
    names = [f"{name}.html" for name in (*stages(), "index", "07-code", "07-from-06", "01-from-07")]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    frames = LISTEN
    for name in names:
        (tmp_path / name).write_text((folder / name).read_text() + REPORT)
        for width in (1280, 390):
            frames += f'<iframe src="{name}" width="{width}" height="800" frameborder="0"></iframe>'
    (tmp_path / "frames.html").write_text(frames)
    command = f"{chromium} --headless --no-sandbox --disable-gpu --virtual-time-budget=30000"
    command = [*command.split(), f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    page = subprocess.check_output([*command, tmp_path / "frames.html"], text=True, timeout=120)
    lines = re.findall(r"\{.*\}(?=\n)", page)
    seen = {(found.pop("page"), found.pop("width")): found for found in map(json.loads, lines)}
    good = {"scrolls": False, "broken": 0}
    assert seen == {
        (name, width): good | {"beside": "from" in name and width == 1280}
        for name in names
        for width in (1280, 390)
    }
