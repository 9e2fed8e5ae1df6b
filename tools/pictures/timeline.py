"""Draw time lines of pipeline schedules at one scale: as planned, or as runs have traced them.

    python -m tools.pictures.timeline --schedule gpipe zero-bubble --pp 4 --micro 8 --svg two.svg
    python -m tools.pictures.timeline --schedule all --svg 06_pipeline/schedules.svg    # all four
    python -m tools.pictures.timeline --run runs/traced      # of runs with --profile

Several schedules or runs come into one picture, one under another, with one scale and one axis.
Planned: the forward of a pipeline stage takes one unit of time, and so does each of the two parts
of its backward (with v virtual stages per rank, 1/v of that); a message takes none. Measured: the
step of median length, from the traces that torch.profiler has written to the run's folder.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common.arguments import Parser, positive_int
from tools.pictures.svg import LIGHT, Picture
from tools.stages import load_stage

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
COSTS = {"F": 1.0, "B": 2.0, "W": 1.0}  # B: 1 where W computes the weights' part
KINDS = {  # fill and meaning
    "F": ("blue", "F: forward"),
    "B": ("green", "B: backward (zero-bubble: inputs only)"),
    "W": ("orange", "W: backward, weights"),
}


class Span(NamedTuple):
    """An action of a rank and when it ran."""

    kind: str
    micro: int
    chunk: int
    start: float
    end: float


def simulate(stage, schedule, p: int, m: int, message: float = 0.0) -> list[list[Span]]:
    """Simulate the ranks: each action starts as soon as its rank is free and its message is there.

    message: the time that a message takes. Raises RuntimeError if the ranks deadlock.
    """
    rows = [schedule(rank, p, m) for rank in range(p)]
    n_stages = 1 + max(action.stage for row in rows for action in row)
    spans: list[list[Span]] = [[] for _ in range(p)]
    arrived: dict = {}
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            costs = COSTS | {"B": 1.0} if any(action.kind == "W" for action in row) else COSTS
            while len(spans[rank]) < len(row):
                action = row[len(spans[rank])]
                source, destination = stage.source_and_destination(action, n_stages)
                waits = source is not None
                if waits and action not in arrived:
                    break
                free = spans[rank][-1].end if spans[rank] else 0.0
                start = max(free, arrived[action] if waits else 0.0)
                end = start + costs[action.kind] * p / n_stages  # a v-th with v stages per rank
                spans[rank].append(Span(action.kind, action.micro, action.stage // p, start, end))
                if destination is not None:
                    arrived[action._replace(stage=destination)] = end + message
                progress = True
    for rank, row in enumerate(rows):
        if len(spans[rank]) < len(row):
            raise RuntimeError(f"rank {rank} waits forever before {row[len(spans[rank])]}")
    return spans


def bubble_fraction(spans: list[list[Span]]) -> float:
    """The share of ranks x time, from the first start to the last end, in which nothing runs."""
    everything = [span for row in spans for span in row]
    length = max(s.end for s in everything) - min(s.start for s in everything)
    return 1.0 - sum(s.end - s.start for s in everything) / (len(spans) * length)


def measured(folder: Path) -> list[list[list[Span]]]:
    """The traced steps of a run, each a list of spans per rank, in ms since the step began."""
    ranks = []
    paths = sorted(folder.glob("profile/rank*.pt.trace.json"), key=_rank_of)
    if not paths:
        raise SystemExit(f"timeline.py: no traces in {folder}/profile: run with --profile")
    for path in paths:
        ranks.append(_steps_of(json.loads(path.read_text())))
    steps = list(zip(*ranks, strict=True))
    return [_from_zero([_as_drawn(row) for row in step]) for step in steps]


def _as_drawn(row: list[Span]) -> list[Span]:
    """A trace has the numbers of stages; a rank's own ones are its chunks 0, 1, ..."""
    chunks = {stage: i for i, stage in enumerate(sorted({span.chunk for span in row}))}
    return [s._replace(chunk=chunks[s.chunk]) for s in row]


def _rank_of(path: Path) -> int:
    return int(path.name.removeprefix("rank").split(".")[0])


def _steps_of(trace: dict) -> list[list[Span]]:
    """The labelled actions of a trace by profiler step; on a GPU, when its kernels ran."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    category = "gpu_user_annotation"
    if not any(e.get("cat") == category for e in events):
        category = "user_annotation"
    events = sorted((e for e in events if e.get("cat") == category), key=lambda e: e["ts"])
    zero = trace.get("baseTimeNanoseconds", 0) / 1e6
    steps: list[list[Span]] = []
    for event in events:
        kind, *numbers = event["name"].split()
        if event["name"].startswith("ProfilerStep"):
            steps.append([])
        elif kind in COSTS and len(numbers) == 2 and steps:
            start = zero + event["ts"] / 1e3
            spans = (kind, *map(int, numbers), start, start + event["dur"] / 1e3)
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


class Panel(NamedTuple):
    """One time line of a picture. unit: of its spans' times."""

    title: str
    spans: list[list[Span]]
    unit: str

    @property
    def length(self) -> float:
        return max(row[-1].end for row in self.spans)

    @property
    def heading(self) -> str:
        bubble = f"bubble {100 * bubble_fraction(self.spans):.1f} %"
        return f"{self.title}: {bubble}, {self.length:.4g} {self.unit}"


def terminal(panel: Panel, longest: float, columns: int, coloured: bool) -> str:
    """One line per rank. Every cell is an action with the number of its micro-batch."""
    least = min(s.end - s.start for row in panel.spans for s in row)
    scale = min(3 / least, (columns - 9) / longest)  # characters per unit of time
    lines = []
    for rank, row in enumerate(panel.spans):
        line, at = f"rank {rank:<3} ", 0
        for span in row:
            begin, end = round(span.start * scale), round(span.end * scale)
            line += " " * (begin - at)
            text = str(span.micro) if coloured else f"{span.kind}{span.micro}"
            cell = text.center(end - begin) if len(text) <= end - begin else " " * (end - begin)
            if coloured:
                red, green, blue = shade(span)
                cell = f"\033[48;2;{red};{green};{blue}m\033[38;2;0;0;0m{cell}\033[0m"
            line, at = line + cell, end
        lines.append(line.rstrip())
    return "\n".join(lines)


def shade(span: Span) -> list[int]:
    """The red, green and blue of a span; every second chunk is paler."""
    color = bytes.fromhex(LIGHT[KINDS[span.kind][0]].removeprefix("#"))
    return [round(part + (255 - part) * (1 - opacity(span))) for part in color]


def opacity(span: Span) -> float:
    return 0.45 if span.chunk % 2 else 1.0


def picture(title: str, panels: list[Panel]) -> Picture:
    """All panels one under another. Equal times have equal widths."""
    left, width, height, gap, heading = 70, 900, 22, 3, 26
    longest = max(panel.length for panel in panels)
    scale = (width - left - 16) / longest
    rows = sum(len(panel.spans) for panel in panels)
    bottom = 40 + len(panels) * (heading + 8) + rows * (height + gap)
    art = Picture(width, bottom + 66, title)
    y = 40
    for panel in panels:
        art.text(left, y + heading - 9, panel.heading, weight="bold")
        y += heading
        for rank, row in enumerate(panel.spans):
            art.text(16, y + height / 2 + 4, f"rank {rank}")
            art.rect(left, y, panel.length * scale, height, "track")
            for span in row:
                x, w = left + span.start * scale, (span.end - span.start) * scale
                fill, _ = KINDS[span.kind]
                art.bar(x, y, w - 1, height, fill, str(span.micro), opacity(span))
            y += height + gap
        y += 8
    art.axis(left, bottom, scale, longest, panels[0].unit)
    spans = [span for panel in panels for row in panel.spans for span in row]
    used = {span.kind for span in spans}
    meanings = dict(KINDS[kind] for kind in KINDS if kind in used)
    x = art.legend(left, bottom + 50, meanings | {"track": "bubble"})
    if any(span.chunk for span in spans):
        art.text(x, bottom + 50, "paler: every second virtual stage", fill="faint")
    return art


# ---- what to draw ----


def planned(name: str, p: int, m: int, virtual: int | None = None) -> Panel:
    stage = load_stage("06")
    v = virtual or 2 if name == "interleaved" else 1
    if name == "interleaved" and m % p:
        raise SystemExit(f"timeline.py: --micro {m} is not a multiple of --pp {p}")
    schedule = stage.SCHEDULES[name]
    if v > 1:
        schedule = partial(schedule, v=v)
    title = f"{name}, {v} virtual stages per rank" if v > 1 else name
    return Panel(title, simulate(stage, schedule, p, m), "F")


def traced(folder: Path) -> Panel:
    steps = measured(folder)
    config = json.loads((folder / "config.json").read_text())
    arguments = config["arguments"]
    m = arguments["global_batch_size"] // arguments["dp"] // arguments["micro_batch_size"]
    title = f"{arguments['schedule']}, {m} micro-batches, measured"
    fractions = (f"{100 * bubble_fraction(step):.1f} %" for step in steps)
    print(f"{title}: bubble in each traced step", *fractions)
    return Panel(title, median_step(steps), "ms")


def main() -> None:
    parser = Parser(description=__doc__.split("\n")[0])
    names = (*SCHEDULES, "all")
    parser.add_argument("--schedule", choices=names, nargs="+", default=["1f1b"])
    parser.add_argument("--pp", type=positive_int, default=4, help="ranks")
    parser.add_argument("--micro", type=positive_int, default=8, help="micro-batches")
    parser.add_argument("--virtual", type=positive_int, help="stages per rank (interleaved: 2)")
    parser.add_argument(
        "--run", type=Path, nargs="+", help="draw the traces of runs with --profile"
    )
    parser.add_argument("--svg", type=Path, help="also write the picture to this file")
    args = parser.parse_args()
    if args.run:
        panels, title = [traced(folder) for folder in args.run], "One step of each run, traced"
    else:
        chosen = SCHEDULES if "all" in args.schedule else args.schedule
        if args.virtual and args.virtual > 1 and "interleaved" not in chosen:
            raise SystemExit(f"timeline.py: {chosen[0]} has one stage per rank: --virtual 1")
        panels = [planned(name, args.pp, args.micro, args.virtual) for name in chosen]
        title = f"{args.pp} ranks, {args.micro} micro-batches"
    coloured = sys.stdout.isatty() or "FORCE_COLOR" in os.environ
    columns = shutil.get_terminal_size((120, 24)).columns
    longest = max(panel.length for panel in panels)
    for panel in panels:
        print(panel.heading)
        print(terminal(panel, longest, columns, coloured))
    path = args.svg or (args.run and args.run[0] / "timeline.svg")
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(picture(title, panels)))
        print(f"written: {path}")


if __name__ == "__main__":
    main()
