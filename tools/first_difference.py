"""Where two runs begin to differ: weights, losses, then the gradient of every parameter.

    python -m tools.first_difference RUN REFERENCE

Train both in the same way, but for the topology: with a learning rate of almost zero, without
clipping, and with a checkpoint after the first step. For example:

    {train}

Of two other runs it compares the logged losses and norms, and the weights in their checkpoints.

A checkpoint of any stage holds the parameters of the plain model and AdamW's first moment, a tenth
of the gradient after one step, so the two may be of different stages and on different topologies.
Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from common.job.checkpoint_hooks import checkpoints
from common.job.launch import fail
from common.job.metrics import step_of
from tools.export import tensors_of

FLAGS = "--steps 2 --log-every 1 --checkpoint-every 1 --grad-clip 0 --lr 1e-30 --dtype float32"
TRAIN = f"""python 01_single_gpu/train.py {FLAGS} --run-dir runs/reference
    torchrun --nproc-per-node 2 02_ddp/train.py {FLAGS} --run-dir runs/a"""
FACTORS = {"optim.exp_avg.": 10, "optim.momentum.": 20}  # from the state of one step to a gradient
NAMES = ("loss", "grad_norm", "val_loss", "test_loss")  # of metrics to compare
BACKWARD = "head norm w2 w1 router mlp_norm wo wqkv attn_norm tokens".split()  # within a unit
FIRST = "checkpoints/step-00000001"
Tensors = dict[str, Tensor]


class State(NamedTuple):
    """A run after its first step. others: buffers. metrics: its first lines. parts: into how many
    parts it is split, as ranks, as micro-batches, and along the axes of its mesh."""

    weights: Tensors
    gradients: Tensors
    others: Tensors
    metrics: list[dict]
    parts: set[int]


class Difference(NamedTuple):
    """where: per dimension, the first index that differs and the one after the last. ratio: to the
    reference in this range, None if there is none. size: relative to the largest element."""

    name: str
    shape: torch.Size
    where: list[tuple[int, int]]
    ratio: float | None
    size: float

    def __str__(self) -> str:
        off = f"off by {self.size:.1g} of the largest"
        how = off if self.ratio is None else f"x {self.ratio:.4g}"
        named = zip(("rows", "columns"), self.where, self.shape, strict=False)
        ranges = [f"{axis} {a} to {b - 1} of {n}" for axis, (a, b), n in named if b - a < n]
        return f"  {self.name:32} {how:26} {', '.join(ranges)}".rstrip()


def read(run: Path) -> State:
    """A run's folder, if it `shows_gradients`."""
    config = json.loads((run / "config.json").read_text())
    flags = config["arguments"]
    lines = (run / "metrics.jsonl").read_text().splitlines()
    micro_batches = flags["global_batch_size"] // flags["dp"] // flags["micro_batch_size"]
    degrees = [flags.get(axis) or 1 for axis in ("dp", "tp", "pp", "cp", "ep", "shard_degree")]
    parts = {config["world_size"], micro_batches, *degrees} - {1}
    state = State({}, {}, {}, [*map(json.loads, lines[:2])], parts)
    found = tensors_of(run / FIRST, "")
    for name, tensor in found.items():
        prefix = next((prefix for prefix in FACTORS if name.startswith(prefix)), "")
        if prefix:
            state.gradients[name.removeprefix(prefix)] = tensor.double() * FACTORS[prefix]
        elif any(f"{prefix}{name.removeprefix('model.')}" in found for prefix in FACTORS):
            state.weights[name.removeprefix("model.")] = tensor.double()  # others are buffers
        elif name != "step" and not name.startswith("optim.exp_avg_sq."):
            state.others[name] = tensor.double()
    return state


def in_order_of_backward(name: str) -> tuple[int, int]:
    layer = re.search(r"layers\.(\d+)\.", name)
    unit = -int(layer[1]) if layer else 1 if name.startswith("embed") else -(10**6)
    return unit, next((i for i, part in enumerate(BACKWARD) if part in name.split(".")), 99)


def differences(ours: Tensors, theirs: Tensors, tolerance: float) -> list[Difference]:
    """The tensors that differ by more than `tolerance` of their largest element. Where all of it is
    almost zero, that is rounding: a hundredth of the largest of all tensors counts as well."""
    largest = {name: float(t.abs().max()) for name, t in theirs.items() if t.numel()}
    found = []
    for name in sorted(ours.keys() & largest.keys(), key=in_order_of_backward):
        a, b = ours[name], theirs[name]
        if a.shape != b.shape:
            fail(f"{name} is {list(a.shape)} in one and {list(b.shape)} in the other")
        scale = max(largest[name], 0.01 * max(largest.values()), 1e-8)
        differs = ~((a - b).abs() <= tolerance * scale)  # also where a is NaN
        if not differs.any():
            continue
        indices = differs.nonzero()  # [elements, dimensions]
        where = [(int(i.min()), int(i.max()) + 1) for i in indices.t()]
        box = tuple(slice(*each) for each in where)
        x, y = a[box].flatten(), b[box].flatten()
        ratio = float(x @ y / (y @ y).clamp(min=1e-300))
        if (x - ratio * y).abs().max() > 20 * tolerance * scale:
            ratio = None
        found.append(Difference(name, a.shape, where, ratio, float((a - b).abs().max()) / scale))
    return found


def likely_cause(found: list[Difference], names: list[str], parts: set[int]) -> str:
    """What a clear pattern of the gradients usually means; "" where there is none.

    names: of all gradients, in the order of backward.
    """
    ratios = {each.ratio if each.ratio is None else round(each.ratio, 2) for each in found}
    if any(each.ratio is not None and math.isnan(each.ratio) for each in found):
        return "NaN: a buffer is used before its collective's wait()"
    ratio = ratios.pop() if len(ratios) == 1 else None
    if ratio == 0:
        return "zero: these gradients are lost, or never computed"
    for n in parts if ratio is not None else ():
        if abs(ratio - n) < 0.01 * n:
            return f"x {n}: a sum in place of a mean, over {n} ranks or micro-batches"
        if abs(ratio - 1 / n) < 0.01:
            return f"x 1/{n}: divided twice, or one of {n} equal parts is not added"
    if all("norm" in each.name for each in found):
        return "only norms: with the sequence sharded, a rank has partial sums of their gradients"
    first = names.index(found[0].name)
    if first > 0 and [each.name for each in found] == names[first:]:
        return f"the gradient of the hidden states is wrong from {names[first]} on backwards"
    return ""


def table(found: list[Difference], among: Tensors, what: str) -> list[str]:
    return [f"{len(found)} of {len(among)} {what}:", *map(str, found)] if found else []


def first_other(name: str, run: list[dict], reference: list[dict], tolerance: float) -> tuple:
    """The first step in which a metric differs, and both of its values; () if it never does."""
    for ours, theirs in zip(run, reference, strict=False):
        a, b = ours[name], theirs[name]
        if not math.isclose(a, b, rel_tol=tolerance):
            return ours["step"], f"{a:.7g}, in the reference {b:.7g}"
    return ()


def compare(run: State, reference: State, tolerance: float = 1e-4) -> list[str]:
    """What differs, line by line; empty if nothing does. tolerance: of gradients, relative."""
    names, known = ({*state.weights, *state.others} for state in (run, reference))
    alone = sorted(names ^ known)
    weights = differences(run.weights, reference.weights, 1e-5)
    gradients = differences(run.gradients, reference.gradients, tolerance)
    others = differences(run.others, reference.others, tolerance)
    loss = first_other("loss", run.metrics, reference.metrics, 0.1 * tolerance)
    norm = first_other("grad_norm", run.metrics[:1], reference.metrics, tolerance)

    lines = [f"in one of the two only: {', '.join(alone[:4])}"] if alone else []
    lines += table(weights, reference.weights, "weights differ before the step")
    if loss:
        lines.append(f"step {loss[0]} is the first whose loss differs: {loss[1]}")
    order = "gradients differ in the first step, in the order of backward"
    lines += table(gradients, reference.gradients, order)
    lines += table(others, reference.others, "other tensors differ")
    if norm and not weights and not gradients:
        lines.append(f"the gradients agree, but not their norm: {norm[1]}")

    cause = ""
    if weights:
        cause = "initial values, their broadcast, or which part of them a rank takes"
    elif gradients:
        order = sorted(reference.gradients, key=in_order_of_backward)
        cause = likely_cause(gradients, order, run.parts)
        if loss and loss[0] == run.metrics[0]["step"] and not cause.startswith(("NaN", "x")):
            cause = "forward or its data: the first loss differs, with equal weights"
    elif norm:
        cause = "the norm is that of one rank's part, or counts replicated gradients once per rank"
    elif loss and loss[0] == run.metrics[0]["step"]:
        cause = "the loss as a number, as it is added up or logged: its gradients agree"
    elif loss and not others:
        cause = "data or dropout of a later step: the first one agrees"
    return [*lines, f"likely cause: {cause}"] if cause else lines


def shows_gradients(run: Path) -> bool:
    """Whether the run's first checkpoint holds the gradient of its first step."""
    config = run / "config.json"
    has_first = (run / FIRST / ".metadata").is_file()
    return has_first and not json.loads(config.read_text())["arguments"]["grad_clip"]


def compare_curves(run: Path, reference: Path, tolerance: float = 1e-5) -> list[str]:
    """Where any two runs first differ: in a logged step, and in a checkpoint; [] if nowhere."""
    lines = []
    for folder in (run, reference):
        if not (folder / "metrics.jsonl").is_file():
            fail(f"{folder} has no metrics.jsonl: name the folders of two runs")
        each = (folder / "metrics.jsonl").read_bytes().splitlines()
        # a kill can leave an incomplete line
        each = [json.loads(line) for line in each if step_of(line) < math.inf]
        lines.append({line["step"]: line for line in each})
    ours, theirs = lines
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        fail("no step is logged in both runs")
    found, found_weights = [], []
    for step, name in ((s, n) for s in both for n in NAMES if n in ours[s] and n in theirs[s]):
        a, b = ours[step][name], theirs[step][name]
        if not math.isclose(a, b, rel_tol=tolerance):
            what = f"step {step} is the first of {len(both)} in both logs whose {name} differs"
            found.append(f"{what}: {a:.7g}, in the reference {b:.7g}")
            break
    for path in checkpoints(run / "checkpoints"):
        other = reference / "checkpoints" / path.name
        if not found_weights and (other / ".metadata").is_file():
            a, b = tensors_of(path), tensors_of(other)
            found_weights = table(differences(a, b, tolerance), b, f"weights differ in {path.name}")
    return [*found, *found_weights]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.replace("{train}", TRAIN),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("reference", type=Path, metavar="REFERENCE")
    args = parser.parse_args()
    if all(map(shows_gradients, (args.run, args.reference))):
        lines, same = compare(read(args.run), read(args.reference)), "weights, losses and gradients"
        same += " in the first step"
    else:
        lines, same = compare_curves(args.run, args.reference), "losses, norms and weights"
        same += ", where both have logged or saved them"
    print("\n".join(lines or [f"the same {same}"]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
