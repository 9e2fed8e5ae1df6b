"""Draw the load of the busiest expert over the steps of runs of stage 09, from their metrics.

    .venv/bin/python tools/pictures/balance.py --balanced RUN ... --free RUN ... --svg FILE

RUN: folders of runs with --log-every 1. A curve is the mean of its runs, in averages of four steps.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean

from svg import Picture


def loads(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["load"] for line in lines]


def draw(series: dict[str, list[list[float]]], title: str, steps: int, most: float) -> Picture:
    """series: for each fill the loads of several runs by step. most: the worst possible load."""
    art = Picture(760, 300, title)
    left, top, width, height = 60, 60, 670, 190

    def place(step: float, load: float) -> tuple[float, float]:
        return left + width * step / steps, top + height * (most - load) / (most - 1)

    for load in range(1, round(most) + 1):
        _, y = place(0, load)
        art.line(left, y, left + width, y, "faint", "2 4")
        art.text(left - 10, y + 4, str(load), anchor="end")
    for step in range(0, steps + 1, steps // 4):
        art.text(place(step, 1)[0], top + height + 20, str(step), anchor="middle")
    art.text(left + width, top + height + 36, "steps", anchor="end", fill="faint")
    for fill, runs in series.items():
        for first in range(0, steps, 4):
            x, y = place(first, mean(mean(run[first : first + 4]) for run in runs))
            art.rect(x, y - 1.5, width * 4 / steps, 3, fill)
    return art


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--balanced", nargs="+", type=Path, required=True)
    parser.add_argument("--free", nargs="+", type=Path, required=True)
    parser.add_argument("--svg", type=Path, required=True)
    args = parser.parse_args()
    series = {"orange": [*map(loads, args.free)], "blue": [*map(loads, args.balanced)]}
    steps = min(len(run) for runs in series.values() for run in runs)
    art = draw(series, "Tokens of the busiest expert, relative to the mean", steps, most=4)
    art.legend(300, 48, {"orange": "--balance-rate 0", "blue": "--balance-rate 0.01"})
    args.svg.write_text(str(art))


if __name__ == "__main__":
    main()
