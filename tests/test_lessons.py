"""`make lessons`: pages that open from disk, whose links resolve, and that lose no line."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from itertools import permutations
from pathlib import Path

import pytest
from browser import Browser, find_chromium
from harness import lines_of, stages
from slurm_cluster import skip_or_fail

from tools import lessons

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
    lessons.build(out := tmp_path_factory.mktemp("lessons"))
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


@pytest.mark.parametrize("old, new", [*permutations(stages(), 2)])
def test_a_comparison_shows_every_line_of_both_stages(pages, old, new):
    page = pages[f"{new}-from-{old}.html"]
    for stage, start in ((old, 'class="old"'), (new, 'class="new"')):
        lines = enumerate(lines_of(stage), 1)
        assert {x for x in lines if x[1] and "# -----" not in x[1]} <= page.code(start)


def test_words_that_differ_are_marked_and_indentation_is_not():
    line = '<span class="k">return</span> f(a &lt; b)'
    said = lessons.marked(line, "return f(a < b)", "    return f(c < g(b))")
    assert said == '<span class="k">return</span> f(<mark>a</mark> &lt; b)'


def test_lines_face_those_that_they_resemble_most():
    old, new = ([*enumerate(text.split("|"))] for text in ("x = f(a)|y = 2", "z()|x = f(b)|w|v"))
    assert [*lessons.pair_up(old, new)] == [
        *((None, new[0]), (old[0], new[1]), (old[1], new[2]), (None, new[3]))
    ]


SEEN = r"""({
  width: document.documentElement.scrollWidth,
  broken: [...document.images].filter((each) => !each.naturalWidth).length,
  dark: getComputedStyle(document.body).backgroundColor.match(/\d+/)[0] < 60,
  beside: [...document.querySelectorAll(".row")].some((each) => {
    const [old, new_] = [...each.children].map((cell) => cell.getBoundingClientRect());
    return old.height && new_.height && old.top == new_.top;
  }),
})"""


def test_pages_in_a_browser(folder):
    """Nothing scrolls sideways. A wide screen shows both stages side by side, a narrow one not."""
    if find_chromium() is None:
        skip_or_fail("Chromium is missing (apt install chromium)")
    with Browser() as browser:
        for name in (*stages(), "index", "07-code", "07-from-06", "01-from-07", "RUNNING.md"):
            browser.open(folder / f"{name}.html", 1280)
            for width, dark in ((1280, False), (390, True)):
                browser.screen(width, dark)
                seen = browser.evaluate(SEEN)
                beside = "from" in name and width == 1280
                assert seen.pop("width") <= width, (name, width)
                assert seen == {"broken": 0, "dark": dark, "beside": beside}, (name, width)
            assert not browser.problems, name
            assert all(url.startswith("file:") for url in browser.requests), name
