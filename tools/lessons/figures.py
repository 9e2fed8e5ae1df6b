"""Pictures of what runs have left in their `metrics.jsonl`: losses, memory and communication."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import NamedTuple

from svg import Picture

COLOURS = ["grey", "blue", "green", "orange", "purple", "pink", "teal"]
WIDTH, LEFT, TOP, BOTTOM = 720, 56, 44, 330


class Run(NamedTuple):
    """A run's figures. name: of its folder. lines: those that have a step and a loss."""

    name: str
    ranks: object
    lines: list[dict]

    @property
    def label(self) -> str:
        known = isinstance(self.ranks, int) and self.ranks > 0
        return f"{self.name}, {self.ranks} rank{'s' * (self.ranks > 1)}" if known else self.name

    @property
    def colour(self) -> str:
        return COLOURS[(int(self.name[:2]) - 1) % len(COLOURS)]

    def median(self, key: str) -> float:
        return median([line[key] for line in self.lines if is_figure(line.get(key))] or [0.0])


def is_figure(value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def read_runs(folder: Path) -> tuple[str, list[Run]]:
    """The runs to show, and a sentence that says which ones they are."""
    found = [read_run(path, path.name) for path in sorted(folder.glob("quickstart/[0-9][0-9]_*/"))]
    if any(run.lines for run in found):
        which = "The runs of make quickstart, which have the same settings."
        return which, [run for run in found if run.lines]
    for stage in sorted(folder.glob("[0-9][0-9]_*/")):
        logs = sorted(stage.glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
        found += [read_run(path.parent, stage.name) for path in logs[-1:]]
    which = "The newest run of each stage; only runs with the same settings have the same losses."
    return which, [run for run in found if run.lines]


def read_run(folder: Path, name: str) -> Run:
    """A run's figures. A line that is being written does not count."""
    lines = [parsed(line) for line in text_of(folder / "metrics.jsonl").splitlines()]
    ranks = parsed(text_of(folder / "config.json")).get("world_size")
    found = [line for line in lines if is_figure(line.get("step")) and is_figure(line.get("loss"))]
    return Run(name, ranks, found)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def parsed(text: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def pictures(runs: list[Run]) -> list[tuple[str, str]]:
    """A caption and an SVG for each of the three pictures."""
    if not runs:
        return []
    loss = "Loss per step, all runs on one another: the widest line is the first run, and each "
    loss += "later run is a narrower line on top of it. With the same settings every stage "
    loss += "reproduces the curve of stage 01."
    state = "Weights, gradients and optimizer state that rank 0 holds."
    sent = "Bytes that rank 0 sends when its collectives run on a ring."
    return [
        (loss, str(curves(runs))),
        (state, str(bars(runs, "Model state per rank, MB", "model_state_mb"))),
        (sent, str(bars(runs, "Sent per rank and step, MB", "comm_mb"))),
    ]


def curves(runs: list[Run]) -> Picture:
    """One line per run. Equal curves hide one another, so each is narrower than the one below."""
    ys = [line["loss"] for run in runs for line in run.lines]
    last = max(line["step"] for run in runs for line in run.lines)
    low, high = math.floor(min(ys)), math.ceil(max(ys) + 1e-9)
    picture = Picture(WIDTH, BOTTOM + 44 + 20 * -(-len(runs) // 2), "Loss")

    def y_of(value: float) -> float:
        return BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP)

    for value in range(low, high + 1, math.ceil((high - low) / 10)):
        picture.line(LEFT, y_of(value), WIDTH - 20, y_of(value), "faint", dash="1 4")
        picture.text(LEFT - 8, y_of(value) + 4, str(value), fill="faint", anchor="end")
    picture.text(LEFT, BOTTOM + 18, "step 0", fill="faint")
    picture.text(WIDTH - 20, BOTTOM + 18, f"step {last:g}", fill="faint", anchor="end")
    for i, run in enumerate(runs):
        width = 1.5 + 12 * (len(runs) - 1 - i) / max(1, len(runs) - 1)
        right = (WIDTH - 20 - LEFT) / max(last, 1)
        points = ((LEFT + line["step"] * right, y_of(line["loss"])) for line in run.lines)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        style = f'class="curve {run.colour}-curve" stroke-width="{width:.1f}"'
        picture.shapes.append(f'<polyline {style} points="{path}"/>')
        x, y = LEFT + (i % 2) * (WIDTH - LEFT) / 2, BOTTOM + 44 + 20 * (i // 2)
        picture.rect(x, y - 10, 12, 12, run.colour)
        picture.text(x + 18, y, f"{run.label}: {run.lines[-1]['loss']:.4f}")
    return picture


def bars(runs: list[Run], heading: str, key: str) -> Picture:
    picture = Picture(WIDTH, 48 + 26 * len(runs), heading)
    longest = max(run.median(key) for run in runs) or 1
    for i, run in enumerate(runs):
        y, length = 44 + 26 * i, 1 + 420 * run.median(key) / longest
        picture.text(16, y + 13, run.label)
        picture.rect(210, y, length, 18, run.colour, hint=run.label)
        picture.text(218 + length, y + 13, f"{run.median(key):.2f}")
    return picture
