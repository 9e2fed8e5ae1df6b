"""`make lessons`: pages that open from disk, lose no line, load nothing, and cannot be injected."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import TIMEOUT, Browser, find_chromium
from harness import REPO, lines_of, stages
from slurm_cluster import skip_or_fail

sys.path.insert(0, str(REPO / "tools"))

from lessons import build, readme

VOID = set("area base br col embed hr img input link meta source track wbr".split())
all_pages = pytest.mark.slow  # building them takes ten seconds
PAIRS = [(old, new) for new in stages() for old in stages() if old != new]


class Parsed(HTMLParser):
    """A page: its tags in order, ids, attributes, the text of each code line, and what is wrong."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[str] = []
        self.ids: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []  # tag, name, value
        self.code: dict[str, str] = {}  # by the id of the line
        self.scripts = self.styles = self.text = ""
        self.errors: list[str] = []
        self.open: list[tuple[str, str]] = []  # tags, and the id of the line that begins there
        self.feed(html)
        self.close()
        self.errors += [f"<{tag}> is not closed" for tag, _ in self.open]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = dict(attributes)
        if len(names) != len(attributes):
            self.errors.append(f"<{tag}> repeats an attribute")
        self.attributes += [(tag, name, value or "") for name, value in attributes]
        id = names.get("id")
        if id is not None:
            self.ids[id] += 1
        if tag in VOID:
            return
        is_line = re.fullmatch(r"(\d\d-)?L\d+", id or "")
        self.open.append((tag, id if is_line else ""))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1][0] != tag:
            self.errors.append(f"</{tag}> in {[tag for tag, _ in self.open[-3:]]}")
            return
        self.open.pop()

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self.open]
        if "script" in tags:
            self.scripts += data
        elif "style" in tags:
            self.styles += data
        else:
            self.text += data
        if "code" in tags:
            for id in filter(None, (id for _, id in self.open)):
                self.code[id] = self.code.get(id, "") + data


def leave_a_run(folder: Path, ranks: int, losses: list[float]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"world_size": ranks}))
    lines = [
        {"step": step, "loss": loss, "model_state_mb": 16 / ranks, "comm_mb": 4.0}
        for step, loss in enumerate(losses)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 3, "lo')  # the last is being written


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lesson_runs")
    leave_a_run(folder / "quickstart" / "01_single_gpu", 1, [7.5, 7.0, 6.5])
    leave_a_run(folder / "quickstart" / "02_ddp", 2, [7.5, 7.0, float("nan")])
    return folder


@pytest.fixture(scope="module")
def pages(runs) -> dict[str, str]:
    return build.Site(runs=runs).build()


@pytest.fixture(scope="module")
def parsed(pages) -> dict[str, Parsed]:
    return {name: Parsed(html) for name, html in pages.items()}


# ---- the pages ----


@all_pages
def test_pages_are_well_formed(parsed):
    for name, page in parsed.items():
        assert not page.errors, (name, page.errors[:3])
        assert [id for id, n in page.ids.items() if n > 1] == [], name
        assert not [id for id in page.ids if re.search(r"\s", id) or not id], name


@all_pages
def test_every_link_and_anchor_resolves(parsed):
    for name, page in parsed.items():
        links = [value for tag, key, value in page.attributes if key == "href"]
        assert len(links) > 5, name
        for link in links:
            if re.match(r"https://", link):
                continue
            target, _, anchor = link.partition("#")
            assert target or anchor, name
            assert not target or target in parsed, (name, link)
            assert not anchor or anchor in parsed[target or name].ids, (name, link)


@all_pages
def test_nothing_is_loaded_from_elsewhere(parsed, pages):
    for name, page in parsed.items():
        for tag, key, value in page.attributes:
            if key in ("src", "srcset", "data", "action", "poster", "background"):
                kind, _, data = value.partition(",")
                assert re.match(r"data:image/[\w+]+;base64$", kind), (name, tag, value[:80])
                if "svg" in kind:
                    svg = base64.b64decode(data).decode().replace('xmlns="http://www.w3.org', "")
                    assert not re.search(r"https?:|url\(|@import|<script", svg), name
            assert tag != "link" or key != "href" or value in parsed, (name, value)
        for text in (page.styles, page.scripts):
            assert not re.search(r"url\(|@import|https?:|//\w", text), name
        assert "default-src 'none'; img-src data:" in pages[name]


@all_pages
def test_the_same_pages_twice_and_within_ten_seconds(pages, runs, tmp_path):
    """Another process, with another seed of its hashes. Old pages are removed, other files stay."""
    out = tmp_path / "lessons"
    out.mkdir()
    (out / "08.html").write_text("of a stage that is no more")
    (out / "notes.txt").write_text("kept")
    command = [sys.executable, REPO / "tools/lessons/build.py", "--out", out, "--runs", runs]
    before = os.times()
    done = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True, text=True
    )
    after = os.times()
    assert done.returncode == 0, done.stderr
    assert str(out / "index.html") in done.stdout
    # of the processor: a busy machine is slow, not wrong
    used = after.children_user + after.children_system
    assert used - (before.children_user + before.children_system) < 10
    assert {path.name for path in out.iterdir()} == {*pages, "notes.txt"}
    for name, html in pages.items():
        assert (out / name).read_text(encoding="utf-8") == html, name


# ---- code and comparisons ----


@all_pages
@pytest.mark.parametrize("stage", stages())
def test_a_page_of_code_shows_every_line(parsed, stage):
    page = parsed[f"{stage}-code.html"]
    expected = {f"L{i}": line for i, line in enumerate(lines_of(stage), start=1) if line}
    assert page.code == expected
    assert all(page.ids[f"L{i}"] == 1 for i in range(1, len(lines_of(stage)) + 1))


@all_pages
@pytest.mark.parametrize("old, new", PAIRS)
def test_a_comparison_loses_no_line(parsed, old, new):
    page = parsed[f"{new}-from-{old}.html"]
    for stage, prefix in ((new, ""), (old, f"{old}-")):
        for i, line in enumerate(lines_of(stage), start=1):
            if line.strip():
                assert page.code.get(f"{prefix}L{i}") == line, (stage, i)


OLD = '''"""Old."""

import os


def same(x):
    y = x
    return y


def greet(name):
    return "good morning", name


def gone():
    return 1


if __name__ == "__main__":
    greet(same(1))
'''
NEW = OLD.replace("morning", "evening").replace("def gone", "def fresh").replace("Old", "New")


def repository(folder: Path, readme: str = "", old: str = OLD, new: str = NEW) -> Path:
    """A small repository of two stages."""
    text = {
        "README.md": "# Title\n\nLead.\n\n## How to read it\n",
        "PLANNING.md": "# Plan\n\n## Which technique when\n",
        "01_one/README.md": "# 01 · One\n\nFirst.\n",
        "01_one/train.py": old,
        "02_two/README.md": readme or "# 02 · Two\n\nSecond.\n",
        "02_two/train.py": new,
        "02_two/stage.toml": 'compare = "01"',
    }
    for name, content in text.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    return folder


def test_changed_words_are_marked_and_a_known_definition_links_to_the_earlier_stage(tmp_path):
    pages = build.Site(repository(tmp_path)).build()
    compared = pages["02-from-01.html"]
    assert re.search(r"good (</i>)?<del>(<i class=\"s\">)?morning", compared)
    assert re.search(r"good (</i>)?<ins>(<i class=\"s\">)?evening", compared)
    assert re.search(r'def same: as in <a href="01-code.html#L6">01_one</a> \(3 lines\)', compared)
    (fold,) = re.findall(r'<details class="fold">(.*?)</details>', pages["02-code.html"], re.S)
    assert "def same" in fold and 'href="01-code.html#L6"' in fold
    assert '<details class="fold">' not in pages["01-code.html"]


def test_names_link_to_their_definitions(tmp_path):
    code = '''"""Links."""

from common.things import borrowed


class Box:
    def fill(self):
        return self.empty()

    def empty(self):
        return borrowed(Box)


def use(borrowed):
    return borrowed, [Box for Box in "local"]
'''
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "things.py").write_text("def borrowed(x):\n    return x\n")
    text = "# 02\n\n`Box` `fill` `Box.empty()` `borrowed` `other`\n"
    pages = build.Site(repository(tmp_path, text, new=code)).build()
    page = pages["02-code.html"]
    assert '<a href="#Box.empty">empty</a>' in page
    assert page.count('<a href="common-things.py.html#borrowed">borrowed</a>') == 2  # import, use
    assert page.count('<a href="#Box">Box</a>') == 2  # the table of contents, the use
    hrefs = re.findall(r'<a class="name" href="([^"]+)">', pages["02.html"])
    assert hrefs == [
        *("02-code.html#Box", "02-code.html#Box.fill", "02-code.html#Box.empty"),
        "common-things.py.html#borrowed",
    ]


# ---- READMEs ----


def converted(text: str) -> str:
    resolver = readme.Resolver(
        link=lambda target: f"to:{target}" if "known" in target else None,
        picture=lambda target: f"data:{target}" if target.endswith(".svg") else None,
    )
    return readme.convert(text, resolver).html


MARKDOWN = {
    "details": (
        "<details><summary>An *answer*</summary>\n\n1. `a < b`\n2. c\n\nEnd.\n</details>\n\nx",
        "<details> <summary>An *answer*</summary> <ol> <li><code>a &lt; b</code></li> "
        "<li>c</li> </ol> <p>End.</p> </details> <p>x</p>",
    ),
    "a comment": ("a\n\n<!-- check\n<b> => 1\n-->\n\nb", "<p>a</p> <p>b</p>"),
    "the same heading twice": (
        "## A `b`\n\n## A b",
        '<h2 id="a-b">A <code>b</code></h2> <h2 id="a-b-1">A b</h2>',
    ),
    "small tags": (
        "x<sub>1 `<b>`</sub> </sub><sub> *z*",
        "<p>x<sub>1 <code>&lt;b&gt;</code></sub> &lt;/sub&gt;&lt;sub&gt; <em>z</em></p>",
    ),
    "links": (
        "[a](known.md#x) [b](missing.md) [c](https://x.org/?a=1&b) [d](javascript:alert())",
        '<p><a href="to:known.md#x">a</a> <span>b</span> <a href="https://x.org/?a=1&amp;b">c'
        "</a> [d](javascript:alert())</p>",
    ),
    "pictures": (
        '![A "b"](a.svg) ![c](http://x.org/c.png)',
        '<p><span class="wide img"><img alt="A &quot;b&quot;" src="data:a.svg">'
        "</span> <span>[picture: c]</span></p>",
    ),
    "other tags": (
        "a <b>x</b> <sub class=y>z</sub>\n\n<summary onclick=x()>\n\n<img src=x onerror=y()>",
        "<p>a &lt;b&gt;x&lt;/b&gt; &lt;sub class=y&gt;z&lt;/sub&gt;</p> "
        "&lt;summary onclick=x()&gt; &lt;img src=x onerror=y()&gt;",
    ),
}


@pytest.mark.parametrize("case", MARKDOWN)
def test_markdown_as_on_github(case):
    text, expected = MARKDOWN[case]
    html = re.sub(r"\s+", " ", converted(text))
    assert re.sub(r" ?(<[^>]*>) ?", r"\1", html) == re.sub(r" ?(<[^>]*>) ?", r"\1", expected)


@all_pages
def test_no_markdown_is_left_in_the_text(pages):
    for name in ("index.html", "README.md.html", *(f"{stage}.html" for stage in stages())):
        text = re.sub(r"<(pre|code|style|script)\b.*?</\1>", "", pages[name], flags=re.S)
        text = re.sub(r"<[^>]*>", "", text)
        left = re.findall(r"```|\| ?-{3}|\]\(|\*\*|`|&lt;/?[a-z]+|^#+ |^\s*[-*] \w", text, re.M)
        assert left == [], name


# ---- what is not ours ----

EVIL = "<script>hacked=1</script><img src=x onerror=hacked=1>\"'>&lt;b&gt;"
EVIL_README = f"""# 02 {EVIL}

{EVIL} `{EVIL}` [a{EVIL}](javascript:hacked=1) [b](data:text/html,x "{EVIL}") <javascript:hacked=1>
![{EVIL}](evil.svg) ![x](x.svg" onerror="hacked=1) <img src=evil.svg onload=hacked=1 alt='{EVIL}'>
[c](JaVaScRiPt&colon;hacked=1) [d](../../../../etc/passwd) [e]( vbscript:x) [f](//host/x.md)
<sub onclick=hacked=1>x</sub> <sub>{EVIL}</sub> \x02wzxhzdk:0\x03
\x02klzzwxh:0000\x03 &lt;script&gt;

## Heading {EVIL}

<details open onclick=hacked=1><summary>{EVIL}</summary>

<details><summary>{EVIL}</summary>

| {EVIL} | <svg onload=hacked=1> |
| --- | --- |
| {EVIL} | x |

</details>

```"><script>hacked=1</script>
{EVIL}
```

```python
x = "{EVIL}</code></pre>"
```

    {EVIL}

[ref]: javascript:hacked=1 "{EVIL}"

[ref] <a href="javascript:hacked=1">x</a>
<style>*{{display:none}}</style> <!-- --><script>hacked=1</script>
"""
EVIL_CODE = f'''"""Doc {EVIL}"""

# ---- banner {EVIL} ----


class Box:  # </code></div></main><script>hacked=1</script>
    text = """{EVIL}"""

    def fill(self, x: {EVIL!r} = 1):
        return {EVIL!r}, self.fill


{EVIL!r} < {EVIL!r}
if {EVIL!r}:
    pass
'''


@pytest.fixture(scope="module")
def evil_pages(tmp_path_factory) -> dict[str, str]:
    repo = tmp_path_factory.mktemp("evil")
    old = EVIL_CODE.replace("hacked=1", "hacked=2").replace("def fill", "def gone")
    repository(repo, EVIL_README, old=old, new=EVIL_CODE)
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><script>hacked=1</script></svg>'
    (repo / "02_two" / "evil.svg").write_text(svg)
    (repo / "02_two" / "more.txt").write_text(f"{EVIL}\n</pre>")
    run = repo / "runs" / "quickstart" / f"02_{EVIL.replace('/', '')}"
    leave_a_run(run, 1, [1.0, 2.0])
    (run / "config.json").write_text(json.dumps({"world_size": EVIL}))
    return build.Site(repo).build()


@all_pages
def test_nothing_injects_markup(evil_pages, parsed):
    ours = {tag for page in parsed.values() for tag in page.tags}
    assert len(evil_pages) >= 8
    for name, html in evil_pages.items():
        page = Parsed(html)
        assert not page.errors, (name, page.errors)
        assert set(page.tags) <= ours | {"sub", "span"}, name
        assert page.tags.count("script") == 1 and "hacked" not in page.scripts, name
        assert page.tags.count("style") == 1 + html.count("<svg"), name
        for tag, key, value in page.attributes:
            assert not key.startswith("on") and key != "style", (name, tag, key, value)
            if key in ("href", "src", "srcset"):
                safe = r"(https://|data:image/|[\w.-]+\.html(#|$)|#)"
                assert re.match(safe, value), (name, tag, key, value)
    lesson = Parsed(evil_pages["02.html"]).text
    assert lesson.count("<script>hacked=1</script>") > 8  # as text


def test_files_outside_of_the_repository_have_no_page(tmp_path):
    (tmp_path / "secret.md").write_text("secret")
    repo = tmp_path / "repo"
    repo.mkdir()
    (repo / "link.md").symlink_to(tmp_path / "secret.md")
    (repo / "runs").mkdir()
    (repo / "runs" / "own.md").write_text("own")
    readme = "# 02\n\n[a](../../secret.md) [b](../link.md) [c](../runs/own.md) [d](/etc/hosts)\n"
    pages = build.Site(repository(repo, readme)).build()
    assert set(pages) == {
        *("index.html", "01.html", "01-code.html", "01-from-02.html"),
        *("02.html", "02-code.html", "02-from-01.html", "02_two-stage.toml.html", "README.md.html"),
    }


# ---- figures of runs ----


@all_pages
def test_the_index_shows_the_figures_of_runs(parsed, pages):
    index = pages["index.html"].replace("\n", "")
    assert "<title>01_single_gpu</title>" in index  # of a curve
    assert "<td>01_single_gpu</td><td>1</td><td>6.5000</td><td>16.00</td><td>4.00</td>" in index
    assert "<td>02_ddp</td><td>2</td><td>7.0000</td><td>8.00</td><td>4.00</td>" in index  # no nan


# ---- in a browser ----


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if find_chromium() is None:
        skip_or_fail("Chromium is missing (apt install chromium)")
    with Browser() as started:
        yield started


@pytest.fixture(scope="module")
def folder(pages, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("lessons")
    build.write(pages, out)
    return out


TOO_WIDE = """[...document.querySelectorAll("body *")].filter((each) =>
  each.getBoundingClientRect().right > WIDTH + 1
  && !each.closest(".wide, .code, .rows, pre, table, .skip, .stages")).length"""
SEEN = f"""({{
  width: document.documentElement.scrollWidth,
  outside: {TOO_WIDE},
  broken: [...document.images].filter((each) => !each.complete || !each.naturalWidth).length,
  tags: [...document.querySelectorAll("*")].map((each) => each.localName.toLowerCase()),
  background: getComputedStyle(document.body).backgroundColor,
}})"""


@all_pages
def test_pages_in_a_browser(browser, folder, parsed):
    """The index, all lessons, and two pages of code and of comparisons each."""
    code = "01-code", "07-code", "07-from-06", "01-from-07"
    for name in (f"{page}.html" for page in ("index", *stages(), *code)):
        browser.open(folder / name, 1280)
        for width, dark in ((1280, False), (390, True)):
            browser.screen(width, dark)
            # not innerWidth, which on a phone grows with what is too wide
            seen = browser.evaluate(SEEN.replace("WIDTH", str(width)))
            assert seen["width"] <= width and seen["outside"] == 0, (name, seen["width"])
            assert seen["broken"] == 0, name
            red = int(re.search(r"\d+", seen["background"])[0])
            assert red < 60 if dark else red > 200, name
        assert browser.problems == [], name
        assert all(re.match("file:|data:", url) for url in browser.requests), name
        # it reads the tags as they are written: nothing was closed or moved for us
        assert seen["tags"] == parsed[name].tags, name


@all_pages
def test_an_anchor_unfolds_the_definition_it_leads_to(browser, folder, pages):
    fold = re.search(r'<details[^>]* class="fold">.*?id="(L\d+)"', pages["03-code.html"], re.S)
    browser.open(folder / "03-code.html", 1280, anchor=f"#{fold[1]}")
    where = f"document.getElementById('{fold[1]}').getBoundingClientRect()"
    deadline = time.monotonic() + TIMEOUT
    while not 0 < browser.evaluate(f"{where}.bottom") < 850:
        assert time.monotonic() < deadline
    is_open = f"document.getElementById('{fold[1]}').closest('details').open"
    assert browser.evaluate(is_open)
    # Chromium unfolds by itself what it navigates to; other browsers leave it to our script
    close = "document.querySelectorAll('details').forEach((each) => { each.open = false; })"
    browser.evaluate(close)
    browser.evaluate("dispatchEvent(new Event('hashchange'))")
    assert browser.evaluate(is_open)


@pytest.mark.slow
def test_no_injected_script_runs(browser, evil_pages, tmp_path):
    """Also without the policy that forbids other scripts than ours."""
    bare = {
        name: re.sub(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>", "", html)
        for name, html in evil_pages.items()
    }
    build.write(bare, tmp_path)
    for name, html in bare.items():
        assert "Content-Security-Policy" not in html
        browser.open(tmp_path / name, 1280)
        assert browser.evaluate("typeof hacked") == "undefined", name
        assert [problem for problem in browser.problems if "hacked" in problem] == [], name
