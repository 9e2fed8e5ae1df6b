"""What the runs of `make quickstart` have left in their `metrics.jsonl`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import NamedTuple

from svg import Picture

COLOURS = ["grey", "blue", "green", "orange", "purple", "pink", "teal"]
WIDTH, LEFT, TOP, BOTTOM = 720, 56, 44, 330


class QuickstartRun(NamedTuple):
    """A run's figures. name: of its folder. lines: those that have a loss."""

    name: str
    ranks: int
    lines: list[dict]

    def median(self, key: str) -> float:
        return median([line[key] for line in self.lines if is_figure(line.get(key))] or [0.0])


def is_figure(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def read_runs(folder: Path) -> list[QuickstartRun]:
    found = []
    for path in sorted(folder.glob("quickstart/[0-9][0-9]_*/metrics.jsonl")):
        written = path.read_text().split("\n")[:-1]  # the last line may be incomplete
        lines = [line for line in map(json.loads, written) if is_figure(line.get("loss"))]
        if lines:
            ranks = json.loads(path.with_name("config.json").read_text())["world_size"]
            found.append(QuickstartRun(path.parent.name, ranks, lines))
    return found


def curves(runs: list[QuickstartRun]) -> Picture:
    """One curve per run. Equal ones hide one another, so each is narrower than the one below."""
    losses = [line["loss"] for run in runs for line in run.lines]
    last = max(line["step"] for run in runs for line in run.lines)
    low, high = math.floor(min(losses)), math.ceil(max(losses) + 1e-9)
    picture = Picture(WIDTH, BOTTOM + 54 + 20 * (len(runs) // 4), "Loss")

    def y_of(value: float) -> float:
        return BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP)

    for value in range(low, high + 1, math.ceil((high - low) / 10)):
        picture.line(LEFT, y_of(value), WIDTH - 20, y_of(value), "faint", dash="1 4")
        picture.text(LEFT - 8, y_of(value) + 4, str(value), fill="faint", anchor="end")
    picture.text(LEFT, BOTTOM + 18, "step 0", fill="faint")
    picture.text(WIDTH - 20, BOTTOM + 18, f"step {last:g}", fill="faint", anchor="end")
    for i, run in enumerate(runs):
        colour, width = COLOURS[i % len(COLOURS)], 12 * (len(runs) - i) / len(runs)
        right = (WIDTH - 20 - LEFT) / max(last, 1)
        points = [(LEFT + line["step"] * right, y_of(line["loss"])) for line in run.lines]
        edges = [(x, y - width / 2) for x, y in points]
        edges += [(x, y + width / 2) for x, y in reversed(points)]
        picture.path("M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in edges), colour, run.name)
        picture.legend(LEFT + i % 4 * 165, BOTTOM + 44 + i // 4 * 20, {colour: run.name})
    return picture
