"""Draw the time line of a pipeline schedule: as planned, or as measured in a run with --profile.

    python tools/timeline.py --schedule zero-bubble --pp 4 --micro 8 --svg zero-bubble.svg
    python tools/timeline.py --run runs/06_pipeline/20250101-120000

Planned: the forward of a pipeline stage takes one unit of time, and so does each of the two parts
of its backward (with v virtual stages per rank, 1/v of that); a message takes none. Measured: the
step of median length, from the traces that torch.profiler has written to the run's folder.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.arguments import Parser, positive, positive_int

REPO = Path(__file__).resolve().parents[1]
COSTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
# of the first chunk and of the last one: the ones between are mixed
COLOURS = {
    "F": ((66, 133, 244), (160, 198, 255)),
    "B": ((38, 154, 103), (150, 214, 181)),
    "I": ((38, 154, 103), (150, 214, 181)),
    "W": ((236, 151, 44), (250, 206, 140)),
}


class Span(NamedTuple):
    """An action of a rank and when it ran."""

    kind: str
    micro: int
    chunk: int
    start: float
    end: float


def load_stage():
    """`06_pipeline/train.py` as a module: `import` cannot, for 06_pipeline is no identifier."""
    spec = importlib.util.spec_from_file_location("stage_06", REPO / "06_pipeline" / "train.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def drawn_kind(kind: str, kinds: set[str]) -> str:
    """Where a rank has `W` actions, its `B` is the inputs' part alone: `I`."""
    return "I" if kind == "B" and "W" in kinds else kind


def simulate(stage, schedule, p: int, m: int, costs=COSTS) -> list[list[Span]]:
    """Simulate the ranks: each action starts as soon as its rank is free and its message is there.

    Raises RuntimeError if the ranks deadlock.
    """
    rows = [schedule(rank, p, m) for rank in range(p)]
    n_stages = 1 + max(action.stage for row in rows for action in row)
    spans: list[list[Span]] = [[] for _ in range(p)]
    arrived: dict = {}
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            kinds = {action.kind for action in row}
            while len(spans[rank]) < len(row):
                action = row[len(spans[rank])]
                needed, made = stage.messages(action, n_stages)
                if needed and needed not in arrived:
                    break
                free = spans[rank][-1].end if spans[rank] else 0.0
                start = max(free, arrived[needed] if needed else 0.0)
                kind = drawn_kind(action.kind, kinds)
                end = start + costs[kind] * p / n_stages  # a v-th of it with v stages per rank
                spans[rank].append(Span(kind, action.micro, action.stage // p, start, end))
                arrived[made] = end
                progress = True
    for rank, row in enumerate(rows):
        if len(spans[rank]) < len(row):
            raise RuntimeError(f"rank {rank} waits forever before {row[len(spans[rank])]}")
    return spans


def idle_share(spans: list[list[Span]]) -> float:
    """The bubble fraction: the share of ranks x time in which nothing runs."""
    everything = [span for row in spans for span in row]
    length = max(s.end for s in everything) - min(s.start for s in everything)
    return 1.0 - sum(s.end - s.start for s in everything) / (len(spans) * length)


def measured(folder: Path) -> list[list[list[Span]]]:
    """The traced steps of a run, each a list of spans per rank, in seconds since the step began."""
    ranks = []
    paths = sorted(folder.glob("profile/rank*.pt.trace.json*"), key=_rank_of)
    if not paths:
        raise SystemExit(f"timeline.py: no traces in {folder}/profile: run with --profile")
    for path in paths:
        opened = gzip.open(path, "rt") if path.suffix == ".gz" else open(path)
        with opened as file:
            trace = json.load(file)
        ranks.append(_steps_of(trace))
    steps = list(zip(*ranks, strict=True))
    return [_from_zero([_as_drawn(row) for row in step]) for step in steps]


def _as_drawn(row: list[Span]) -> list[Span]:
    """A trace has the numbers of stages; a rank's own ones are its chunks 0, 1, ..."""
    chunks = {stage: i for i, stage in enumerate(sorted({span.chunk for span in row}))}
    kinds = {span.kind for span in row}
    return [s._replace(kind=drawn_kind(s.kind, kinds), chunk=chunks[s.chunk]) for s in row]


def _rank_of(path: Path) -> int:
    return int(path.name.removeprefix("rank").split(".")[0])


def _steps_of(trace: dict) -> list[list[Span]]:
    """The labelled actions of a trace by profiler step; on a GPU, when its kernels ran."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    category = "gpu_user_annotation"
    if not any(e.get("cat") == category for e in events):
        category = "user_annotation"
    events = sorted((e for e in events if e.get("cat") == category), key=lambda e: e["ts"])
    zero = trace.get("baseTimeNanoseconds", 0) / 1e9
    steps: list[list[Span]] = []
    for event in events:
        kind, *numbers = event["name"].split()
        if event["name"].startswith("ProfilerStep"):
            steps.append([])
        elif kind in COSTS and len(numbers) == 2 and steps:
            start = zero + event["ts"] / 1e6
            spans = (kind, *map(int, numbers), start, start + event["dur"] / 1e6)
            steps[-1].append(Span(*spans))
    return steps


def _from_zero(rows: list[list[Span]]) -> list[list[Span]]:
    """Without evaluation's forwards, which follow a step, and with the step's start as zero."""
    kept = []
    for row in rows:
        last = max(i for i, span in enumerate(row) if span.kind != "F")
        kept.append(row[: last + 1])
    zero = min(row[0].start for row in kept)
    return [[s._replace(start=s.start - zero, end=s.end - zero) for s in row] for row in kept]


def median_step(steps: list[list[list[Span]]]) -> list[list[Span]]:
    lengths = [max(row[-1].end for row in step) for step in steps]
    middle = sorted(lengths)[len(lengths) // 2]
    return steps[lengths.index(middle)]


# ---- drawing ----


def colour(span: Span, chunks: int) -> tuple[int, ...]:
    first, last = COLOURS[span.kind]
    share = span.chunk / max(1, chunks - 1)
    return tuple(round(a + (b - a) * share) for a, b in zip(first, last, strict=True))


def hexadecimal(colour: tuple[int, ...]) -> str:
    return "#" + bytes(colour).hex()


def chunks_of(spans: list[list[Span]]) -> int:
    return 1 + max(span.chunk for row in spans for span in row)


def terminal(spans: list[list[Span]], columns: int, coloured: bool) -> str:
    """One line per rank. Every cell is an action with the number of its micro-batch."""
    length = max(row[-1].end for row in spans)
    least = min(s.end - s.start for row in spans for s in row)
    scale = min(3 / least, (columns - 9) / length)  # characters per unit of time
    lines = []
    for rank, row in enumerate(spans):
        line, at = f"rank {rank:<3} ", 0
        for span in row:
            begin, end = round(span.start * scale), round(span.end * scale)
            line += " " * (begin - at)
            text = str(span.micro) if coloured else f"{span.kind}{span.micro}"
            cell = text.center(end - begin) if len(text) <= end - begin else " " * (end - begin)
            if coloured:
                red, green, blue = colour(span, chunks_of(spans))
                cell = f"\033[48;2;{red};{green};{blue}m\033[38;2;0;0;0m{cell}\033[0m"
            line, at = line + cell, end
        lines.append(line.rstrip())
    return "\n".join(lines)


def svg(
    spans: list[list[Span]], title: str, unit: str, axis: float | None = None, width: int = 900
) -> str:
    """The same picture as a file for a page, light or dark. axis: the time that the width is."""
    length = max(row[-1].end for row in spans)
    left, top, height, gap = 58, 34, 26, 4
    scale = (width - left - 10) / (axis or length)
    kinds = [k for k in COSTS if any(s.kind == k for row in spans for s in row)]
    bottom = top + len(spans) * (height + gap)
    total = bottom + 46
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" '
        f'width="{width}" height="{total}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{total}" rx="6" fill="#fff"/>',
        f'<text x="{left}" y="21" font-size="14" font-weight="bold" fill="#222">{title}</text>',
    ]
    for rank, row in enumerate(spans):
        y = top + rank * (height + gap)
        out.append(f'<text x="10" y="{y + 17}" fill="#222">rank {rank}</text>')
        out.append(
            f'<rect x="{left}" y="{y}" width="{length * scale:.1f}" height="{height}" '
            'fill="#eceff1"/>'
        )
        for span in row:
            x, w = left + span.start * scale, (span.end - span.start) * scale
            fill = hexadecimal(colour(span, chunks_of(spans)))
            out.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(w, 0.5):.1f}" height="{height}" '
                f'fill="{fill}" stroke="#fff" stroke-width="0.8"/>'
            )
            if w >= 7 * len(str(span.micro)) + 1:
                out.append(
                    f'<text x="{x + w / 2:.1f}" y="{y + 17}" text-anchor="middle" '
                    f'font-size="11" fill="#111">{span.micro}</text>'
                )
    x = left
    for kind in kinds:
        fill = hexadecimal(COLOURS[kind][0])
        y = bottom + 22
        out.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{fill}"/>')
        out.append(f'<text x="{x + 17}" y="{y}" fill="#222">{NAMES[kind]}</text>')
        x += 30 + 7 * len(NAMES[kind])
    if chunks_of(spans) > 1:
        out.append(f'<text x="{x}" y="{bottom + 22}" fill="#222">lighter: later chunks</text>')
    out.append(
        f'<text x="{width - 10}" y="{bottom + 22}" text-anchor="end" fill="#222">'
        f"time: {length:.4g} {unit}; grey: idle</text>"
    )
    return "\n".join([*out, "</svg>", ""])


def planned(args: argparse.Namespace) -> tuple[list[list[Span]], str, str]:
    stage = load_stage()
    p, m = args.pp, args.micro
    v = args.virtual or (2 if args.schedule == "interleaved" else 1)
    if args.schedule == "interleaved" and m % p:
        raise SystemExit(f"timeline.py: --micro {m} is not a multiple of --pp {p}")
    if args.schedule != "interleaved" and v > 1:
        raise SystemExit(f"timeline.py: {args.schedule} has one stage per rank: --virtual 1")
    schedule = {**stage.SCHEDULES, **stage.SPLIT_SCHEDULES}[args.schedule]
    if v > 1:
        schedule = partial(schedule, v=v)
    spans = simulate(stage, schedule, p, m)
    title = f"{args.schedule}: {p} ranks, {m} micro-batches"
    title += f", {v} virtual stages per rank" if v > 1 else ""
    return spans, title, "units"


def main() -> None:
    parser = Parser(description=__doc__.split("\n")[0])
    names = ("gpipe", "1f1b", "interleaved", "zero-bubble")
    parser.add_argument("--schedule", choices=names, default="1f1b")
    parser.add_argument("--pp", type=positive_int, default=4, help="ranks")
    parser.add_argument("--micro", type=positive_int, default=8, help="micro-batches")
    parser.add_argument("--virtual", type=positive_int, help="stages per rank (interleaved: 2)")
    parser.add_argument("--run", type=Path, help="draw what this run has traced (--profile)")
    parser.add_argument("--svg", type=Path, help="write it there too")
    parser.add_argument("--axis", type=positive, help="time that the SVG's width stands for")
    args = parser.parse_args()
    if args.run:
        steps = measured(args.run)
        spans = median_step(steps)
        arguments = json.loads((args.run / "config.json").read_text())["arguments"]
        title = f"{arguments['schedule']}, measured"
        unit = "s"
        shares = [100 * idle_share(step) for step in steps]
        print("idle in each traced step:", *(f"{share:.1f} %" for share in shares))
    else:
        spans, title, unit = planned(args)
    title += f", idle {100 * idle_share(spans):.1f} %"
    print(title)
    coloured = sys.stdout.isatty() or "FORCE_COLOR" in os.environ
    print(terminal(spans, shutil.get_terminal_size((120, 24)).columns, coloured))
    path = args.svg or (args.run and args.run / "timeline.svg")
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(svg(spans, title, unit, args.axis))
        print(f"written: {path}")


if __name__ == "__main__":
    main()
