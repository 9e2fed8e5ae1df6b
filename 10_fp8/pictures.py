"""Draw stage 10's curves, and print the final losses of its runs.

    python 10_fp8/pictures.py outliers         10_fp8/outliers.svg
    python 10_fp8/pictures.py curves FOLDER    10_fp8/wikitext2.svg

A run's folder is FOLDER/NAME-SEED.
"""

from __future__ import annotations

import argparse
import json
import sys
from math import log10
from pathlib import Path
from statistics import mean

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from tools.pictures.svg import Picture

COLORS = ("#3b82f6", "#e8893a", "#2fa36b", "#8b5cf6", "#d9538f", "#7c8794")


def outliers() -> Picture:
    """The errors of the other elements, per format, by the size of one feature or token."""
    import errors  # needs PyTorch

    charts = {
        f"one {of} k times as large": {
            f"{kind}, {sharing}": list(
                zip(errors.SIZES, errors.outlier_errors(kind, sharing, of), strict=True)
            )
            for kind, sharing in errors.FORMATS
        }
        for of in ("feature", "token")
    }
    return draw("Relative error of the other elements", charts, log=True)


def curves(folder: Path) -> Picture:
    """Training losses of the runs FOLDER/NAME-SEED; prints their final losses."""
    runs: dict[str, dict[str, list[dict]]] = {}
    for file in sorted(folder.glob("*-*/metrics.jsonl")):
        name, _, seed = file.parent.name.rpartition("-")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        runs.setdefault(seed, {})[name] = lines
    print(f"{'':12}" + "".join(f"{head:>14}" for head in ("last 5 lines", "validation", "test")))
    for seed, of_seed in runs.items():
        for name, lines in of_seed.items():
            last = mean(line["loss"] for line in lines[-5:])
            figures = last, lines[-1]["val_loss"], lines[-1]["test_loss"]
            print(f"{name:12}" + "".join(f"{x:14.4f}" for x in figures) + f"   seed {seed}")
    charts = {
        f"seed {seed}": {
            name: [(line["step"], line["loss"]) for line in lines]
            for name, lines in of_seed.items()
        }
        for seed, of_seed in runs.items()
    }
    return draw("Training loss on WikiText-2, by step", charts)


def draw(title: str, charts: dict[str, dict[str, list]], log: bool = False) -> Picture:
    """Charts side by side: {title: {name: [(x, y), ...]}}; with log both axes are logarithmic."""
    scale = log10 if log else float
    points = [p for of_chart in charts.values() for curve in of_chart.values() for p in curve]
    (left, right), (low, high) = (
        (min(values), max(values))
        for values in zip(*((scale(x), scale(y)) for x, y in points), strict=True)
    )
    art = Picture(900, 330, title)
    for i, (name, of_chart) in enumerate(charts.items()):
        x0, y0, w, h = 70 + 430 * i, 80, 370, 200

        def place(x: float, y: float) -> tuple[float, float]:
            across, up = (scale(x) - left) / (right - left), (scale(y) - low) / (high - low)
            return x0 + w * across, y0 + h * (1 - up)  # noqa: B023  called in this turn only

        art.text(x0, y0 - 12, name, weight="bold")
        art.line(x0, y0 + h, x0 + w, y0 + h, "faint")
        art.line(x0, y0, x0, y0 + h, "faint")
        for tick in range(5):
            x, y = left + tick * (right - left) / 4, low + tick * (high - low) / 4
            texts = (f"{10**x:,.0f}", f"{10**y:.2g}") if log else (f"{x:.0f}", f"{y:.1f}")
            art.text(x0 + w * tick / 4, y0 + h + 18, texts[0], 11, "faint", "middle")
            art.text(x0 - 6, y0 + h * (1 - tick / 4) + 4, texts[1], 11, "faint", "end")
        for color, curve in zip(COLORS, of_chart.values(), strict=False):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
            art.shapes.append(
                f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'
            )
    for k, (color, name) in enumerate(zip(COLORS, next(iter(charts.values())), strict=False)):
        art.shapes.append(
            f'<rect x="{70 + 130 * k}" y="306" width="12" height="12" fill="{color}"/>'
        )
        art.text(87 + 130 * k, 316, name)
    return art


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("subject", choices=("outliers", "curves"))
    parser.add_argument("folder", nargs="?", type=Path, help="of the runs, for curves")
    args = parser.parse_args()
    if args.subject == "outliers":
        (REPO / "10_fp8/outliers.svg").write_text(str(outliers()))
    elif args.folder is None:
        parser.error("curves needs the folder of the runs")
    else:
        (REPO / "10_fp8/wikitext2.svg").write_text(str(curves(args.folder)))


if __name__ == "__main__":
    main()
