"""Pictures of what runs have left in their `metrics.jsonl`: losses, memory and communication."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from svg import Picture

COLOURS = ["grey", "blue", "green", "orange", "purple", "pink", "teal"]
WIDTH, LABELS = 720, 210  # of a picture, and of the names on its left


@dataclass
class Run:
    """A run's figures. name: of its folder; stage: the number. ranks: 0 if nothing says."""

    name: str
    stage: str
    ranks: int
    lines: list[dict]

    @property
    def label(self) -> str:
        ranks = f", {self.ranks} rank{'s' if self.ranks > 1 else ''}" if self.ranks else ""
        return self.name + ranks

    @property
    def colour(self) -> str:
        return COLOURS[(int(self.stage) - 1) % len(COLOURS)]

    def values(self, key: str) -> list[float]:
        """The finite values of a metric."""
        found = (line.get(key) for line in self.lines)
        return [x for x in found if isinstance(x, (int, float)) and math.isfinite(x)]


def read_runs(folder: Path) -> tuple[str, list[Run]]:
    """The runs to show, and a sentence that says which ones they are."""
    runs = [read_run(path, path.name) for path in sorted(folder.glob("quickstart/[0-9][0-9]_*/"))]
    if any(runs):
        return "The runs of make quickstart, which have the same settings.", [*filter(None, runs)]
    for stage in sorted(folder.glob("[0-9][0-9]_*/")):
        logs = sorted(stage.glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
        runs += [read_run(path.parent, stage.name) for path in logs[-1:]]
    text = "The newest run of each stage; only runs with the same settings have the same losses."
    return text, [*filter(None, runs)]


def read_run(folder: Path, name: str) -> Run | None:
    """A run's figures; None if there are none. A line that is being written does not count."""
    lines = [line for text in lines_of(folder / "metrics.jsonl") if (line := parsed(text))]
    described = parsed("".join(lines_of(folder / "config.json")))
    ranks = described.get("world_size", 0)
    run = Run(name, name[:2], ranks if isinstance(ranks, int) else 0, lines)
    return run if run.values("loss") else None


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []


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
    memory = bars(
        runs,
        "Model state per rank, MB",
        lambda run: (run.values("model_state_mb") or [0.0])[-1],
    )
    sent = bars(
        runs,
        "Sent per rank and step, MB",
        lambda run: median(run.values("comm_mb") or [0.0]),
    )
    return [
        (
            "Loss per step, all runs on one another: the widest line is the first run, and each "
            "later run is a narrower line on top of it. With the same settings every stage "
            "reproduces the curve of stage 01.",
            str(curves(runs)),
        ),
        ("Weights, gradients and optimizer state that rank 0 holds.", str(memory)),
        ("Bytes that rank 0 sends when its collectives run on a ring.", str(sent)),
    ]


# ---- loss ----


def curves(runs: list[Run]) -> Picture:
    """One line per run. Equal curves hide one another, so each is narrower than the one below."""
    points = [(run, [p for line in run.lines if (p := point(line))]) for run in runs]
    xs = [x for _, each in points for x, _ in each]
    ys = [y for _, each in points for _, y in each]
    legend_rows = -(-len(runs) // 2)
    left, top, bottom = 56, 44, 330
    picture = Picture(WIDTH, bottom + 44 + 20 * legend_rows, "Loss")
    x_of = scale(0, max(xs), left, WIDTH - 20)
    low, high, step = ticks(min(ys), max(ys))
    y_of = scale(low, high, bottom, top)
    for i in range(round((high - low) / step) + 1):
        value = low + i * step
        picture.line(left, y_of(value), WIDTH - 20, y_of(value), "faint", dash="1 4")
        picture.text(left - 8, y_of(value) + 4, f"{value:g}", fill="faint", anchor="end")
    picture.text(left, bottom + 18, "step 0", fill="faint")
    picture.text(WIDTH - 20, bottom + 18, f"step {max(xs):g}", fill="faint", anchor="end")
    for i, (run, each) in enumerate(points):
        width = 1.5 + 12 * (len(runs) - 1 - i) / max(1, len(runs) - 1)
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in each)
        style = f'class="curve {run.colour}-curve" stroke-width="{width:.1f}"'
        picture.shapes.append(f'<polyline {style} points="{path}"/>')
        x, y = left + (i % 2) * (WIDTH - left) / 2, bottom + 44 + 20 * (i // 2)
        picture.rect(x, y - 10, 12, 12, run.colour)
        picture.text(x + 18, y, f"{run.label}: {each[-1][1]:.4f}")
    return picture


def point(line: dict) -> tuple[float, float] | None:
    """Step and loss of a line, if both are numbers."""
    both = [line.get("step"), line.get("loss")]
    if all(isinstance(x, (int, float)) and math.isfinite(x) for x in both):
        return both[0], both[1]
    return None


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda x: start + (x - low) / ((high - low) or 1) * (end - start)


def ticks(low: float, high: float) -> tuple[float, float, float]:
    """Round limits around the values, and the distance between lines, so that 4 to 10 are drawn."""
    rough = ((high - low) or 1) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return math.floor(low / step) * step, math.ceil(high / step) * step, step


# ---- memory, communication ----


def bars(runs: Iterable[Run], heading: str, value: Callable[[Run], float]) -> Picture:
    runs = list(runs)
    picture = Picture(WIDTH, 48 + 26 * len(runs), heading)
    longest = max(map(value, runs)) or 1
    for i, run in enumerate(runs):
        y = 44 + 26 * i
        length = (WIDTH - LABELS - 90) * value(run) / longest
        picture.text(16, y + 13, run.label)
        picture.rect(LABELS, y, max(length, 1), 18, run.colour, hint=run.label)
        picture.text(LABELS + max(length, 1) + 8, y + 13, f"{value(run):.2f}")
    return picture
