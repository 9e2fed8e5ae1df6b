"""Draw time lines of pipeline schedules in the terminal, at one scale: as planned, or as traced.

    make schedule-06 ARGS="--schedule gpipe zero-bubble --pp 4 --micro 8"
    make schedule-06 ARGS="--run runs/traced"      # of runs with --profile

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

from common.job.arguments import Parser, positive_int
from tools.pictures.svg import LIGHT
from tools.stages import load_stage

COSTS = {"F": 1.0, "B": 2.0, "W": 1.0}  # B: 1 where W computes the weights' part
COLOURS = {"F": "blue", "B": "green", "W": "orange"}


class Span(NamedTuple):
    """An action of a rank and when it ran."""

    kind: str
    micro: int
    chunk: int
    start: float
    end: float


def simulate(stage, schedule, p: int, m: int) -> list[list[Span]]:
    """Simulate the ranks: each action starts as soon as its rank is free and its message is there.
    Raises RuntimeError if the ranks deadlock."""
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
                if source is not None and action not in arrived:
                    break
                free = spans[rank][-1].end if spans[rank] else 0.0
                start = max(free, arrived.get(action, 0.0))
                end = start + costs[action.kind] * p / n_stages  # a v-th with v stages per rank
                spans[rank].append(Span(action.kind, action.micro, action.stage // p, start, end))
                if destination is not None:
                    arrived[action._replace(stage=destination)] = end
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


def measured(folder: Path) -> list[list[Span]]:
    """The traced step of median length: a list of spans per rank, in ms since the step began."""
    paths = folder.glob("profile/rank*.pt.trace.json")
    paths = sorted(paths, key=lambda path: int(path.name[4:].split(".")[0]))
    if not paths:
        raise SystemExit(f"pipeline_schedule.py: no traces in {folder}/profile: run with --profile")
    steps = zip(*(steps_of(json.loads(path.read_text())) for path in paths), strict=True)
    steps = sorted((from_zero([as_drawn(row) for row in step]) for step in steps), key=duration)
    return steps[len(steps) // 2]


def as_drawn(row: list[Span]) -> list[Span]:
    """A trace has the numbers of stages; a rank's own ones are its chunks 0, 1, ..."""
    chunks = {stage: i for i, stage in enumerate(sorted({span.chunk for span in row}))}
    return [s._replace(chunk=chunks[s.chunk]) for s in row]


def steps_of(trace: dict) -> list[list[Span]]:
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


def from_zero(rows: list[list[Span]]) -> list[list[Span]]:
    """Without evaluation's forwards, which follow a step, and with the step's start as zero."""
    kept = []
    for row in rows:
        last = max(i for i, span in enumerate(row) if span.kind != "F")
        kept.append(row[: last + 1])
    zero = min(row[0].start for row in kept)
    return [[s._replace(start=s.start - zero, end=s.end - zero) for s in row] for row in kept]


def duration(rows: list[list[Span]]) -> float:
    return max(row[-1].end for row in rows)


# ---- drawing ----


class Panel(NamedTuple):
    """One time line. unit: of its spans' times."""

    title: str
    spans: list[list[Span]]
    unit: str

    @property
    def length(self) -> float:
        return duration(self.spans)


def drawn(panel: Panel, longest: float, columns: int, coloured: bool) -> str:
    """One line per rank. Every cell is an action with the number of its micro-batch."""
    bubble = f"bubble {100 * bubble_fraction(panel.spans):.1f} %"
    lines = [f"{panel.title}: {bubble}, {panel.length:.4g} {panel.unit}"]
    least = min(s.end - s.start for row in panel.spans for s in row)
    scale = min(3 / least, (columns - 9) / longest)  # characters per unit of time
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
    paler = 0.55 * (span.chunk % 2)
    return [round(x + (255 - x) * paler) for x in bytes.fromhex(LIGHT[COLOURS[span.kind]][1:])]


# ---- what to draw ----


def planned(name: str, p: int, m: int) -> Panel:
    stage, title = load_stage("06"), name
    schedule = stage.SCHEDULES[name]
    if name == "interleaved":
        if m % p:
            raise SystemExit(f"pipeline_schedule.py: --micro {m} is not a multiple of --pp {p}")
        schedule, title = partial(schedule, v=2), f"{name}, 2 virtual stages per rank"
    return Panel(title, simulate(stage, schedule, p, m), "F")


def traced(folder: Path) -> Panel:
    arguments = json.loads((folder / "config.json").read_text())["arguments"]
    m = arguments["global_batch_size"] // arguments["dp"] // arguments["micro_batch_size"]
    title = f"{arguments['schedule']}, {m} micro-batches, measured"
    return Panel(title, measured(folder), "ms")


def main() -> None:
    parser = Parser(description=__doc__.split("\n")[0])
    names = tuple(load_stage("06").SCHEDULES)
    parser.add_argument("--schedule", choices=names, nargs="+", default=["1f1b"])
    parser.add_argument("--pp", type=positive_int, default=4, help="ranks")
    parser.add_argument("--micro", type=positive_int, default=8, help="micro-batches")
    parser.add_argument("--run", type=Path, nargs="+", help="draw the traces of these runs instead")
    args = parser.parse_args()
    if args.run:
        panels = [traced(folder) for folder in args.run]
    else:
        panels = [planned(name, args.pp, args.micro) for name in args.schedule]
    coloured = sys.stdout.isatty() or "FORCE_COLOR" in os.environ
    columns = shutil.get_terminal_size((120, 24)).columns
    longest = max(panel.length for panel in panels)
    print("\n".join(drawn(panel, longest, columns, coloured) for panel in panels))


if __name__ == "__main__":
    main()
