"""Draw the load of the busiest expert over the steps of runs of stage 09, from their metrics.

    .venv/bin/python -m 09_expert_parallel.balance --svg FILE --title TITLE --most 32 \\
        --curve "rate 0" RUN ... --curve "rate 0.08" RUN ...

RUN: folders of runs with --log-every 1. A curve is the mean of its runs, in averages of four steps.
The load's axis is logarithmic and ends at `--most`, the worst possible load.
"""

from __future__ import annotations

import argparse
import json
from math import log2
from pathlib import Path
from statistics import mean

from tools.pictures.svg import Picture

FILLS = ("orange", "purple", "blue")


def loads(run: str) -> list[float]:
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["load"] for line in lines]


def draw(curves: dict[str, list[list[float]]], title: str, most: int) -> Picture:
    """curves: by name the loads of several runs by step."""
    art = Picture(760, 300, title)
    left, top, width, height = 60, 60, 670, 190
    steps = min(len(run) for runs in curves.values() for run in runs)

    def place(step: float, load: float) -> tuple[float, float]:
        return left + width * step / steps, top + height * (1 - log2(load) / log2(most))

    for load in (2**i for i in range(int(log2(most)) + 1)):
        _, y = place(0, load)
        art.line(left, y, left + width, y, "faint", "2 4")
        art.text(left - 10, y + 4, str(load), anchor="end")
    for step in range(0, steps + 1, steps // 4):
        art.text(place(step, 1)[0], top + height + 20, str(step), anchor="middle")
    art.text(left + width, top + height + 36, "steps", anchor="end", fill="faint")
    for fill, runs in zip(FILLS, curves.values(), strict=False):
        for first in range(0, steps, 4):
            x, y = place(first, mean(mean(run[first : first + 4]) for run in runs))
            art.rect(x, y - 1.5, width * 4 / steps, 3, fill)
    art.legend(160, 48, dict(zip(FILLS, curves, strict=False)))
    return art


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--curve", nargs="+", action="append", required=True)
    parser.add_argument("--title", default="Tokens of the busiest expert, relative to the mean")
    parser.add_argument("--most", type=int, required=True)
    parser.add_argument("--svg", type=Path, required=True)
    args = parser.parse_args()
    curves = {name: [loads(run) for run in runs] for name, *runs in args.curve}
    args.svg.write_text(str(draw(curves, args.title, args.most)))


if __name__ == "__main__":
    main()
