"""Show what one stage changes in another: `make diff-04`, `python -m tools.diff 04 [--from 02]`."""

from __future__ import annotations

import argparse
import ast
import os
import pydoc
import re
import sys
import textwrap
from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache
from itertools import groupby, takewhile
from pathlib import Path
from typing import NamedTuple

from tools.stages import REPO, beside, renamed, stage_file, stage_paths, stages

DEFINITIONS, LEADING = (ast.FunctionDef, ast.ClassDef), (ast.Expr, ast.Import, ast.ImportFrom)
TOP = "docstring and imports"
CONTEXT, MOST_REMOVED = 2, 3  # equal lines shown around a change, removed ones shown in a row
COLOURS = {"+": "32", "-": "31", "=": "36", "*": "1"}
Line = tuple[int, str]  # its number in the file, from 1, and its text


class Block(NamedTuple):
    """A function; a method, `Bucket.collect`; the docstring and fields of a class, `Bucket`; or
    lines between these, named by their text. owner: the class, or itself. first: its line."""

    stage: str
    owner: str
    name: str
    first: int
    lines: tuple[str, ...]


@cache
def split(stage: str, text: str) -> list[Block]:
    """A script in blocks, which hold all of its lines but the blank ones between them."""
    lines, body = text.splitlines(), ast.parse(text).body
    found = [(TOP, list(takewhile(lambda node: isinstance(node, LEADING), body)))]
    for node in (each for each in body if isinstance(each, DEFINITIONS)):
        parts = node.body if isinstance(node, ast.ClassDef) else []
        found.append((node.name, [node]))
        found += [(f"{node.name}.{x.name}", [x]) for x in parts if isinstance(x, DEFINITIONS)]
    names = [""] * len(lines)  # of the block that each line belongs to
    for name, nodes in found:
        # decorators and the comments directly above belong to a definition
        first = min(x.lineno for x in (nodes[0], *getattr(nodes[0], "decorator_list", []))) - 1
        first -= len([*takewhile(lambda x: x.lstrip()[:1] == "#", lines[:first][::-1])])
        names[first : nodes[-1].end_lineno] = [name] * (nodes[-1].end_lineno - first)
    for i, line in enumerate(lines):
        if not line.strip():
            names[i] = names[i] and names[i - 1]  # "" between two blocks
        elif not names[i]:
            text = " ".join(x.strip("# -") for x in takewhile(str.strip, lines[i:])).strip()
            name = f"# {text}" if line[0] == "#" else re.split(" = |:$", line)[0]
            names[i] = names[i - 1] if i and lines[i - 1].strip() else name
    groups = [(name, [*numbers]) for name, numbers in groupby(range(len(lines)), names.__getitem__)]
    texts = [(name, i, "\n".join(lines[j] for j in i).rstrip()) for name, i in groups if name]
    return [Block(stage, x.split(".")[0], x, i[0] + 1, (*t.split("\n"),)) for x, i, t in texts]


def align(old: Block | None, new: Block) -> list[tuple[str, list[Line], list[Line]]]:
    """Older and newer lines: " " equal, "=" also far from a change and from `def`, "-" or "+"."""
    a, b = ([*enumerate(x.lines, x.first)] if x else [] for x in (old, new))
    header = next((i for i, x in enumerate(new.lines) if re.match(" *(def|class) ", x)), len(b))
    # a line without a word is no reason to align what is around it
    wordless = re.compile(r"\W*\w?\W*").fullmatch
    matcher = SequenceMatcher(wordless, [text for _, text in a], new.lines, autojunk=False)
    hunks: list[tuple[str, list[Line], list[Line]]] = []
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        size, top = i_end - i, CONTEXT if hunks else header + 1
        end = size - CONTEXT * (i_end < len(a) or j_end < len(b))
        if kind != "equal":
            hunks += [("-", a[i:i_end], []), ("+", [], b[j:j_end])]
        else:
            top, end = (top, end) if end - top > 1 else (size, size)
            spans = ((" ", 0, top), ("=", top, end), (" ", end, size))
            hunks += [(m, a[i + x : i + y], b[j + x : j + y]) for m, x, y in spans if x < y]
    return hunks


def compare(old: str, new: str, repo: Path = REPO) -> tuple[list, list[Block], list[str]]:
    """All of the newer stage; of the older one what is in no pair; and the names that are gone.
    What has moved to a file beside the newer script is not gone."""
    every = {n: split(x.parent.name, x.read_text("utf-8")) for n, x in stage_paths(repo).items()}
    older, newer, pairs, continued = every[old], every[new], [], []
    owners, others = {block.owner for block in newer}, renamed(repo)
    known = older + [x for n in every if n < new and n != old for x in every[n]]
    for block in newer:
        aliases = [x for x in others.get(block.owner, []) if x not in owners]
        names = [block.name, *(block.name.replace(block.owner, x, 1) for x in aliases)]
        base = max(  # the identical one, or that of the older stage, or the first one
            (x for x in (older if block.name[0] == "#" else known) if x.name in names),
            key=lambda x: (x.lines == block.lines, x in older, -names.index(x.name)),
            default=None,
        )
        pairs.append((base, block))
        continued += names
    rest = [block for block in older if block not in [base for base, _ in pairs]]
    continued += names_beside(new, repo)
    return pairs, rest, [x.name for x in rest if x.name not in continued and x.name[0] != "#"]


def names_beside(stage: str, repo: Path = REPO) -> set[str]:
    """What the files beside a script define."""
    texts = [path.read_text("utf-8") for path in beside(stage, repo)]
    return {block.name for text in texts for block in split(stage, text)} - {TOP}


def moved(stage: str) -> Iterator[tuple[str, Path]]:
    """Every file beside a script, after a line that says what it is."""
    for path, origin in zip(beside(stage), stage_file(stage).copies.values(), strict=True):
        where, count = stage_paths()[origin].parent.name, len(path.read_text("utf-8").splitlines())
        yield f"{path.name}, beside train.py: as in {where} ({count} lines)", path


def folded(pairs: list[tuple]) -> Iterator[tuple[str, list[tuple]]]:
    """Pairs that a reader can do without, under a summary; each of the others under ""."""
    changed = {new.owner for old, new in pairs if not old or old.lines != new.lines}

    def reason(pair: tuple) -> str:
        old, new = pair
        if old and new.name == TOP:
            return f"{sum(len(b) for mark, _, b in align(*pair) if mark == '+')} changed"
        if old is None or old.lines != new.lines or new.name in changed or new.name[0] == "#":
            return ""  # as a heading stays: the line of a class of which a method has changed
        return f"as in {old.stage}" + f", {old.owner}" * (old.name != new.name)

    for why, group in groupby(pairs, key=reason):
        found = list(group)
        heads = {new.owner for _, new in found if new.name == new.owner}
        parts = [b.owner if b.owner in heads else b.name.split(".")[-1] for _, b in found]
        count = sum(len(new.lines) for _, new in found)
        summary = f"{', '.join(dict.fromkeys(parts))}: {why} ({count} lines)"
        yield from [(summary, found)] if why else (("", [pair]) for pair in found)


def report(old: str, new: str) -> Iterator[str]:
    pairs, _, gone = compare(old, new)
    older, newer = (stage_paths()[x].parent.name for x in (old, new))
    yield f"* {older} -> {newer}: + new   - gone   = the same"
    yield from [f"= {text}" for text, _ in moved(new)]
    for summary, [(base, block), *_] in folded(pairs):
        if summary:
            yield from textwrap.wrap(f"= {summary}", 100, subsequent_indent="=     ")
            continue
        yield ""
        if base and (base.stage != older or block.owner == block.name != base.name):
            text = f"* {block.name}: compared with {base.name} in {base.stage}"
            yield from textwrap.wrap(text, 100, subsequent_indent="*     ")
        for mark, a, b in align(base, block):
            lines = [f"{mark} {text}" for _, text in b or a if "# -----" not in text]
            is_folded = mark == "=" or (mark == "-" and len(a) > MOST_REMOVED)
            yield from [f"{mark}     ... {len(lines)} lines"] if is_folded else lines
    if gone:
        yield from textwrap.wrap(f"- gone: {', '.join(gone)}", 100, subsequent_indent="-     ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], usage=argparse.SUPPRESS)
    parser.add_argument("new", choices=stages()[1:])
    parser.add_argument("--from", dest="old", choices=stages())
    args = parser.parse_args()
    text = "\n".join(report(args.old or stage_file(args.new).compare, args.new)) + "\n"
    if (sys.stdout.isatty() or os.environ.get("FORCE_COLOR")) and not os.environ.get("NO_COLOR"):
        text = re.sub(r"(?m)^([-+=*]).*", lambda x: f"\033[{COLOURS[x[1]]}m{x[0]}\033[0m", text)
    os.environ.setdefault("LESS", "FRX")
    pydoc.pager(text)


if __name__ == "__main__":
    main()
