"""Validates `step_time` on published runs: which it can predict, and how well.

    python tools/planner/step_errors.py benchmarks/published_runs.csv
    python tools/planner/step_errors.py fit

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
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median
from unittest.mock import patch

import step_time
from step_time import FITTED, GPUS, TOO_SHORT, Job

RUNS = Path(__file__).resolve().parents[2] / "benchmarks" / "published_runs.csv"
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


def caveats(job: Job, seconds: float | None = None) -> list[str]:
    """Why a job lies outside of the domain; nothing if it lies inside. seconds: as predicted."""
    found = {
        "d_model under 2,048: small kernels": job.d_model < 2048,
        "sequences above 8,192": job.seq > 8192,
        "d_model / tp is not a multiple of 64: slow matmuls": job.d_model % (64 * job.tp) != 0,
        "the heads' width is not a multiple of 8: slow attention": job.d_model % (8 * job.heads)
        != 0,
        "latency-bound": seconds is not None
        and job.ranks >= TOO_SHORT[0]
        and seconds < TOO_SHORT[1],
    }
    return [reason for reason, holds in found.items() if holds]


def runs_of(path: str | Path) -> list[tuple[int, str, Job | None, float]]:
    """(number, source, run, measured seconds) of every row; None for a run that lacks a field.
    Exits with status 2 at a value that the model does not know."""
    found = []
    with open(path, newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            for name, values in KNOWN.items():
                if row.get(name) and row[name] not in values:
                    problem = f"{name} {row[name]!r} is not one of {', '.join(values)}"
                    print(f"{path}, row {number + 1}: {problem}", file=sys.stderr)
                    sys.exit(2)
            try:
                job = job_of(row)
                found.append((number, row.get("source", ""), job, measured(row, job)))
            except (ValueError, KeyError, TypeError, ZeroDivisionError):
                found.append((number, row.get("source", ""), None, math.nan))
    return found


def errors(runs, constants: dict[str, float] = FITTED) -> list[tuple[int, str, Job, float]]:
    """(number, source, run, predicted / measured - 1) of the runs that can be modelled."""
    with patch.dict(step_time.FITTED, constants):
        return [
            (number, source, job, step_time.step_time(job).seconds / seconds - 1)
            for number, source, job, seconds in runs
            if job is not None
        ]


def in_domain(runs, constants: dict[str, float] = FITTED) -> list:
    with patch.dict(step_time.FITTED, constants):
        return [
            run
            for run in runs
            if run[2] is not None and not caveats(run[2], step_time.step_time(run[2]).seconds)
        ]


def fit(runs) -> dict[str, float]:
    """The three constants with the least mean |log(predicted / measured)|. A row weighs one over
    the root of its source's number of rows: else one program with many rows decides alone."""
    runs = in_domain(runs)
    rows = defaultdict(int)
    for _, source, *_ in runs:
        rows[source] += 1

    def loss(constants: dict[str, float]) -> float:
        found = errors(runs, constants)
        weights = [rows[source] ** -0.5 for _, source, *_ in found]
        misses = [abs(math.log1p(error)) for *_, error in found]
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


def left_out(runs) -> list[tuple[int, str, Job, float]]:
    """Every source's errors inside the domain, by constants that were fitted without it."""
    found = []
    for source in sorted({source for _, source, *_ in runs}):
        constants = fit([run for run in runs if run[1] != source])
        found += errors(in_domain([run for run in runs if run[1] == source], constants), constants)
    return found


def quantile(values: list[float], part: float) -> float:
    values = sorted(values)
    return values[min(len(values) - 1, math.ceil(part * len(values)) - 1)]


def summary(found) -> tuple[float, float, float]:
    """Median and 90th percentile of |error|, and the bias (the median error), in percent."""
    sizes = [100 * abs(error) for *_, error in found]
    return median(sizes), quantile(sizes, 0.9), 100 * median(error for *_, error in found)


def report(path: str | Path) -> None:
    """One line per source, then one for all."""
    runs = runs_of(path)
    found = errors(runs)
    inside = {number for number, *_ in in_domain(runs)}
    print(
        f"{'source':20}{'rows':>6}{'modelled':>10}{'in domain':>11}"
        f"{'median':>9}{'90 %':>8}{'bias':>9}"
    )
    for source in dict.fromkeys(source for _, source, *_ in runs):
        own = [run for run in found if run[1] == source]
        rows = sum(s == source for _, s, *_ in runs)
        line = f"{source:20}{rows:6}{len(own):10}{sum(r[0] in inside for r in own):11}"
        if own:
            middle, high, bias = summary(own)
            line += f"{middle:7.1f} %{high:6.1f} %{bias:+7.1f} %"
        print(line)
    if len(found) < len(runs):
        print(f"{len(runs) - len(found)} rows lack a field that the model needs")
    for name, own in (("in domain", [r for r in found if r[0] in inside]), ("all", found)):
        if own:
            middle, high, _ = summary(own)
            print(f"{name}: {len(own)} rows, median {middle:.1f} %, 90th percentile {high:.1f} %")
        elif name == "all":
            print("all: 0 rows")


def judge_constants() -> None:
    """Fit the constants again, and print the errors of each source when it is left out."""
    runs = runs_of(RUNS)
    print("fitted to the even rows:", fit([run for run in runs if run[0] % 2 == 0]))
    outside = left_out(runs)
    print(
        "left-out sources: median {:.1f} %, 90 % {:.1f} %, bias {:+.1f} %".format(*summary(outside))
    )
    ratios = [1 / (1 + error) for *_, error in outside]
    print(
        f"measured / predicted: 10 % {quantile(ratios, 0.1):.2f}, 90 % {quantile(ratios, 0.9):.2f}"
    )
    by = defaultdict(list)
    for run in outside:
        by[run[1]].append(run)
    for source, own in by.items():
        print(f"  {source:20}{len(own):4}   {summary(own)[0]:5.1f} {summary(own)[1]:6.1f}")
    print(f"mean {fmean(abs(e) for *_, e in outside):.3f}")


if __name__ == "__main__":
    if sys.argv[1:] == ["fit"]:
        judge_constants()
    elif len(sys.argv) == 2 and Path(sys.argv[1]).is_file():
        report(sys.argv[1])
    else:
        print("usage: step_errors.py fit, or FILE.csv like published_runs.csv", file=sys.stderr)
        sys.exit(2)
