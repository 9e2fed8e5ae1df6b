"""Draw one training step as two lanes, computation and communication, from the run's own trace.

    make run-02 ARGS="--data sample --steps 8 --profile --run-dir runs/traced"
    python -m tools.pictures.overlap runs/traced     # writes runs/traced/overlap.svg

A run with --profile leaves the traces of three steps in its folder. This tool draws the step of
median length, as one rank saw it. The upper lane holds the operators of the training thread,
colored by phase and labeled with the unit that they belong to. Where the lane is empty, the thread
waits or runs Python. The lower lane holds the collectives, each from its launch until it has
finished on this rank. The tool reads traces of CPU runs (Gloo) without a pipeline, whose actions
`make schedule-06` draws; open a GPU's in https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_right
from collections import Counter
from itertools import product
from pathlib import Path
from typing import NamedTuple

from tools.pictures.svg import Picture

PHASES = {"blue": "forward", "green": "backward", "orange": "optimizer", "grey": "other"}
COLLECTIVES = {  # fill and meaning, by the operator that launches it and by Gloo's name for it
    ("allreduce", "all_reduce"): ("purple", "all-reduce"),
    ("_allgather_base", "all_gather"): ("teal", "all-gather"),
    ("alltoall_base", "all_to_all"): ("pink", "reduce-scatter"),  # of common/collectives.py
    ("recv", "recv"): ("pink", "receive"),
    ("send", "send"): ("teal", "send"),
}


class Span(NamedTuple):
    """From `start` to `end`, in ms since the step began."""

    start: float
    end: float
    fill: str
    label: str = ""


def load_trace(folder: Path, rank: int) -> list[dict]:
    """The events of a rank's trace that have a duration, in the order of their start."""
    paths = sorted(folder.glob(f"profile/rank{rank}.*pt.trace.json"))
    if not paths:
        raise SystemExit(f"overlap.py: no trace of rank {rank} in {folder}/profile: use --profile")
    trace = json.loads(paths[-1].read_text())
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    if any(e.get("cat") == "kernel" for e in events):
        raise SystemExit("overlap.py: this is a GPU's trace; open it in https://ui.perfetto.dev")
    return sorted(events, key=lambda e: (e["ts"], -e["dur"]))


def median_step(events: list[dict]) -> dict:
    marks = [e for e in events if e["name"].startswith("ProfilerStep")]
    return sorted(marks, key=lambda e: e["dur"])[len(marks) // 2]


def computation(events: list[dict], step: dict, n_layers: int) -> list[Span]:
    """The outermost `aten` operators of the training thread, each with its phase and its unit.

    Only `aten` operators count as computation: the events around them (autograd's nodes, hooks, the
    optimizer) may wait for a collective. The trace does not name modules, so units are found by
    their operators: an embedding lookup begins a forward, and each layer has two norms, the output
    one. A backward operator has the sequence number of its forward operator, and so belongs to the
    same unit.
    """
    end = step["ts"] + step["dur"]
    operators = [e for e in events if e["tid"] == step["tid"] and step["ts"] < e["ts"] < end]
    starts: list[tuple[int, str]] = []  # the sequence number at which each unit's forward begins
    spans, stack, phase, unit, norms = [], [], "grey", "", 0
    for event in operators:
        stack = [e for e in stack if e["ts"] + e["dur"] > event["ts"]] + [event]
        name, number = event["name"], event["args"].get("Sequence number")
        if stack == [event]:
            if name.startswith("autograd::engine"):
                phase = "green"
                if number is not None:  # None: the accumulation of a parameter's gradient
                    unit = starts[max(0, bisect_right(starts, (number, "~")) - 1)][1]
            elif name == "aten::embedding":
                phase, unit, norms = "blue", "embed", 0
                starts.append((number, unit))
            elif name == "aten::rms_norm" and phase == "blue":
                if norms % 2 == 0:
                    unit = f"layer {norms // 2}" if norms < 2 * n_layers else "output"
                    starts.append((number, unit))
                norms += 1
            elif phase != "blue":
                phase = "orange" if name.startswith("Optimizer.step") else "grey"
        if [e["name"][:6] for e in stack].count("aten::") == 1 and name.startswith("aten::"):
            start = (event["ts"] - step["ts"]) / 1e3
            label = unit if phase in ("blue", "green") else ""
            spans.append(Span(start, start + event["dur"] / 1e3, phase, label))
    return spans


def communication(events: list[dict], step: dict) -> list[Span]:
    """Each collective from its launch on the training thread to its end on one of Gloo's."""
    spans = []
    for (call_name, work_name), (fill, meaning) in COLLECTIVES.items():
        works = [e for e in events if e["name"] == f"gloo:{work_name}"]
        for call in (e for e in events if e["name"].rstrip("_") == f"c10d::{call_name}"):
            work = next((e for e in works if e["ts"] >= call["ts"]), None)
            if work is None or call["tid"] != step["tid"]:
                continue
            works.remove(work)
            start = (call["ts"] - step["ts"]) / 1e3
            if 0 <= start < step["dur"] / 1e3:
                end = (work["ts"] + work["dur"] - step["ts"]) / 1e3
                spans.append(Span(start, end, fill, meaning))
    return sorted(spans)


# ---- intervals ----


def merged(spans: list[Span], gap: float) -> list[Span]:
    """Join neighbors of one phase and unit that are less than `gap` ms apart."""
    result: list[Span] = []
    for span in spans:
        last = result[-1] if result else None
        if last and last[2:] == span[2:] and span.start - last.end < gap:
            result[-1] = last._replace(end=max(last.end, span.end))
        else:
            result.append(span)
    return result


def union(spans: list[Span]) -> list[Span]:
    return merged([s._replace(fill="", label="") for s in sorted(spans)], gap=1e-9)


def duration(spans: list[Span]) -> float:
    """ms in which at least one of the spans is active."""
    return sum(span.end - span.start for span in union(spans))


def overlapped(first: list[Span], second: list[Span]) -> float:
    """ms in which a span of each list is active."""
    pairs = product(union(first), union(second))
    return sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a, b in pairs)


def rows_of(spans: list[Span]) -> list[int]:
    """A row for each span, so that spans of one row do not overlap."""
    ends: list[float] = []
    rows = []
    for span in spans:
        row = next((i for i, end in enumerate(ends) if end <= span.start), len(ends))
        ends[row : row + 1] = [span.end]
        rows.append(row)
    return rows


# ---- drawing ----


def picture(compute: list[Span], messages: list[Span], length: float, title: str) -> Picture:
    left, width, lane, bar = 116, 900, 34, 18
    scale = (width - left - 16) / length
    height = bar * (max(rows_of(messages), default=0) + 1) + 8
    bottom = 44 + lane + 12 + height
    art = Picture(width, bottom + 62, title)
    art.rect(left, 44, length * scale, lane, "track")
    art.text(16, 44 + lane / 2 + 4, "computation")
    for span in merged(compute, gap=0.004 * length):
        w = (span.end - span.start) * scale
        art.bar(left + span.start * scale, 44, w, lane, span.fill, span.label)
    y = 44 + lane + 12
    art.rect(left, y, length * scale, height, "track")
    art.text(16, y + height / 2 + 4, "communication")
    count: Counter = Counter()
    for span, row in zip(messages, rows_of(messages), strict=True):
        w = (min(span.end, length) - span.start) * scale
        place = left + span.start * scale, y + 4 + row * bar, w, bar - 3
        art.bar(*place, span.fill, str(count[span.label]))
        count[span.label] += 1
    art.axis(left, bottom + 6, scale, length, "ms")
    meanings = {span.fill: span.label for span in messages}
    phases = {fill: name for fill, name in PHASES.items() if fill in {s.fill for s in compute}}
    art.legend(left, bottom + 48, phases | meanings)
    return art


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of a run with --profile")
    parser.add_argument("--rank", type=int, default=0)
    args = parser.parse_args()
    config = json.loads((args.run / "config.json").read_text())
    events = load_trace(args.run, args.rank)
    step = median_step(events)
    messages = communication(events, step)
    compute = computation(events, step, config["arguments"]["n_layers"])
    in_flight, hidden = duration(messages), overlapped(compute, messages)
    print(
        f"step {step['dur'] / 1e3:.1f} ms, communication {in_flight:.1f} ms: "
        f"{hidden:.1f} ms hidden behind computation, {in_flight - hidden:.1f} ms exposed"
    )
    where = f"{config['stage']} on {config['world_size']} ranks"
    title, path = f"{where}: one step of rank {args.rank}, traced", args.run / "overlap.svg"
    path.write_text(str(picture(compute, messages, step["dur"] / 1e3, title)))
    print(f"written: {path}")


if __name__ == "__main__":
    main()
