"""Validates `step_time` on published runs: which it can predict, and how well.

    python -m tests.step_errors benchmarks/published_runs.csv
    python -m tests.step_errors fit

The **domain** is what the model claims to predict. It was set before any error was computed, and
depends on the run and on the prediction, never on the measurement. Rows inside of it with even
numbers fit the three constants; a test bounds the errors of the odd ones. A source's error when the
constants were fitted without it (`left_out`) is what an unknown program and cluster have to expect,
and gives the range that `make plan` prints.
"""

from __future__ import annotations

import csv
import math
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from typing import NamedTuple
from unittest.mock import patch

from tools.planner import step_time
from tools.planner.step_time import FITTED, GPUS, Job, caveats

PUBLISHED = Path(__file__).resolve().parents[1] / "benchmarks/published_runs.csv"
NAMES = {"a100-80": "a100", "a100-80gb": "a100", "a100-40gb": "a100-40", "h100-80": "h100"}
KNOWN = {  # the values that a column may have, or nothing: the default
    "recompute": ("none", "selective", "op-sac", "full"),
    "sharding": ("none", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "hybrid"),
    "schedule": ("gpipe", "1f1b", "interleaved", "zero-bubble", "zb-1p", "zb-2p"),
}


def job_of(row: dict[str, str]) -> Job:
    """The run of a row. Raises ValueError, KeyError or ZeroDivisionError where a field is missing
    that the model needs; degrees that are not stated are 1."""

    def number(name: str, default: float | None = None) -> float:
        text = (row.get(name) or "").strip()
        return default if not text and default is not None else float(text)

    name = row["gpu"].strip().lower()
    layers, d_model, vocab = int(number("layers")), int(number("d_model")), int(number("vocab"))
    tp, pp, cp = (int(number(axis, 1)) for axis in ("tp", "pp", "cp"))
    ranks, per_node = int(number("n_gpus")), int(number("gpus_per_node", 8))
    # matrices of another shape (grouped queries, gated MLPs): from the number of parameters
    weights = None
    if row.get("params_b"):
        embeddings = (2 if row.get("output_layer") == "untied" else 1) * vocab * d_model
        weights = (1e9 * number("params_b") - embeddings) / layers
        if not 0.7 < weights / (12 * d_model**2) < 1.6:
            weights = None
    dtype, sharding = row.get("dtype", ""), row.get("sharding") or "ddp"
    hybrid = sharding in ("hsdp", "hybrid")
    overlapped = row.get("dp_communication", "") != "after backward"
    virtual = int(number("virtual", 1))
    return Job(
        layers=layers,
        d_model=d_model,
        heads=int(number("heads")),
        seq=int(number("seq")),
        vocab=vocab,
        global_batch=int(number("global_batch")),
        ranks=ranks,
        gpu=GPUS[NAMES.get(name, name)],
        per_node=per_node,
        network=1e9 * number("network_gb_per_s_per_gpu", 0 if ranks <= per_node else None),
        tp=tp,
        pp=pp,
        cp=cp,
        micro_batch=int(number("micro_batch")),
        schedule=row.get("schedule") or ("interleaved" if virtual > 1 else "1f1b"),
        virtual=virtual,
        sequence_parallel=row.get("sequence_parallel") == "yes",
        sharding="fsdp" if hybrid else sharding,
        shard_ranks=per_node if hybrid else None,
        recompute=row.get("recompute") or "none",
        layer_weights=weights,
        dtype="float8" if "fp8" in dtype or "float8" in dtype else "bfloat16",
        fused_attention=row.get("attention", "") != "scores in memory",
        reduce_bytes=2 if "fp16" in dtype or "PURE" in dtype else 4,
        overlaps_reduction=overlapped,
        overlaps_gather=overlapped,
        overlaps_tp=row.get("tp_backward", "") != "waits",
        overlaps_messages=overlapped,
    )


def measured(row: dict[str, str], job: Job) -> float:
    """Seconds of a step, as stated, or from the tokens per second and GPU."""
    if row.get("step_s"):
        return float(row["step_s"])
    return job.global_batch * job.seq / job.ranks / float(row["tokens_per_s_per_gpu"])


class Row(NamedTuple):
    """A published run. job: None if it lacks a field that the model needs."""

    number: int  # from 0
    source: str
    job: Job | None
    seconds: float  # per step, as measured


def runs_of(path: str | Path) -> list[Row]:
    """All rows. Exits with a line at a value that the model does not know."""
    found = []
    with open(path, newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            for name, values in KNOWN.items():
                if row.get(name) and row[name] not in values:
                    sys.exit(f"{path}, row {number + 1}: {name} {row[name]!r} is not in {values}")
            try:
                job = job_of(row)
                found.append(Row(number, row.get("source", ""), job, measured(row, job)))
            except (ValueError, KeyError, TypeError, ZeroDivisionError):
                found.append(Row(number, row.get("source", ""), None, math.nan))
    return found


Errors = list[tuple[Row, float]]  # predicted / measured - 1


def errors(rows: list[Row], constants: dict[str, float] = FITTED) -> Errors:
    """Of the rows that can be modelled."""
    with patch.dict(step_time.FITTED, constants):
        return [
            (row, step_time.step_time(row.job).seconds / row.seconds - 1)
            for row in rows
            if row.job is not None
        ]


def in_domain(rows: list[Row], constants: dict[str, float] = FITTED) -> list[Row]:
    with patch.dict(step_time.FITTED, constants):
        return [
            row
            for row in rows
            if row.job is not None and not caveats(row.job, step_time.step_time(row.job).seconds)
        ]


def fit(rows: list[Row]) -> dict[str, float]:
    """The three constants with the least mean |log(predicted / measured)|. A row weighs one over
    the root of its source's number of rows: else one program with many rows decides alone."""
    rows = in_domain(rows)
    count = Counter(row.source for row in rows)

    def loss(constants: dict[str, float]) -> float:
        found = errors(rows, constants)
        weights = [count[row.source] ** -0.5 for row, _ in found]
        misses = [abs(math.log1p(error)) for _, error in found]
        return sum(w * x for w, x in zip(weights, misses, strict=True)) / sum(weights)

    constants, width = {"A100": 0.8, "H100": 0.6, "link": 0.6}, 0.1
    best = loss(constants)
    while width > 0.002:  # coordinate descent: three constants, no gradient needed
        moves = [
            constants | {k: v * (1 + s * width)} for k, v in constants.items() for s in (1, -1)
        ]
        least, move = min(((loss(m), m) for m in moves), key=lambda pair: pair[0])
        if least < best:
            best, constants = least, move
        else:
            width /= 2
    return constants


def left_out(rows: list[Row]) -> Errors:
    """Every source's errors inside the domain, by constants that were fitted without it."""
    found = []
    for source in sorted({row.source for row in rows}):
        constants = fit([row for row in rows if row.source != source])
        own = [row for row in rows if row.source == source]
        found += errors(in_domain(own, constants), constants)
    return found


def quantile(values: list[float], part: float) -> float:
    values = sorted(values)
    return values[min(len(values) - 1, math.ceil(part * len(values)) - 1)]


def summary(found: Errors) -> tuple[float, float, float]:
    """Median and 90th percentile of |error|, and the bias (the median error), in percent."""
    percent = [100 * error for _, error in found]
    sizes = [abs(x) for x in percent]
    return median(sizes), quantile(sizes, 0.9), median(percent)


def report(rows: list[Row], found: Errors) -> None:
    """One line per source, and one for all: rows, those modelled, median, 90th percentile, bias."""
    for source in [*Counter(row.source for row in rows), "all"]:
        own = [each for each in found if source in ("all", each[0].source)]
        count = sum(source in ("all", row.source) for row in rows)
        line = "{:9.1f} %{:7.1f} %{:+8.1f} %".format(*summary(own)) if own else ""
        print(f"{source:20}{count:6}{len(own):6}{line}")


def main() -> None:
    if sys.argv[1:] == ["fit"]:
        rows = runs_of(PUBLISHED)
        print("fitted to the even rows:", fit([row for row in rows if row.number % 2 == 0]))
        report(rows, left_out(rows))
    elif len(sys.argv) == 2 and Path(sys.argv[1]).is_file():
        rows = runs_of(sys.argv[1])
        report(rows, errors(rows))
    else:
        sys.exit("usage: step_errors.py fit, or FILE.csv like published_runs.csv")


if __name__ == "__main__":
    main()
