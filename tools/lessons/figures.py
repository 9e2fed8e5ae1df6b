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


class Run(NamedTuple):
    """A run's figures. name: of its folder. lines: those that have a step and a loss."""

    name: str
    ranks: object
    lines: list[dict]

    def median(self, key: str) -> float:
        return median([line[key] for line in self.lines if is_figure(line.get(key))] or [0.0])


def is_figure(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def read_runs(folder: Path) -> list[Run]:
    found = []
    for path in sorted(folder.glob("quickstart/[0-9][0-9]_*/")):
        lines = [parsed(line) for line in text_of(path / "metrics.jsonl").splitlines()]
        lines = [x for x in lines if is_figure(x.get("step")) and is_figure(x.get("loss"))]
        ranks = parsed(text_of(path / "config.json")).get("world_size")
        found += [Run(path.name, ranks, lines)] if lines else []
    return found


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def parsed(text: str) -> dict:
    """An object of JSON; of a line that is being written, an empty one."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def curves(runs: list[Run]) -> Picture:
    """A square for each loss. Equal ones hide one another, so each run's are smaller."""
    losses = [line["loss"] for run in runs for line in run.lines]
    last = max(line["step"] for run in runs for line in run.lines)
    low, high = math.floor(min(losses)), math.ceil(max(losses) + 1e-9)
    picture = Picture(WIDTH, BOTTOM + 74, "Loss")

    def y_of(value: float) -> float:
        return BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP)

    for value in range(low, high + 1, math.ceil((high - low) / 10)):
        picture.line(LEFT, y_of(value), WIDTH - 20, y_of(value), "faint", dash="1 4")
        picture.text(LEFT - 8, y_of(value) + 4, str(value), fill="faint", anchor="end")
    picture.text(LEFT, BOTTOM + 18, "step 0", fill="faint")
    picture.text(WIDTH - 20, BOTTOM + 18, f"step {last:g}", fill="faint", anchor="end")
    for i, run in enumerate(runs):
        colour, size = COLOURS[i % len(COLOURS)], 3 + 9 * (len(runs) - i) / len(runs)
        for line in run.lines:
            x = LEFT + line["step"] * (WIDTH - 20 - LEFT) / max(last, 1)
            picture.rect(x - size / 2, y_of(line["loss"]) - size / 2, size, size, colour, run.name)
        picture.legend(LEFT + i % 5 * 130, BOTTOM + 44 + i // 5 * 20, {colour: run.name})
    return picture
