"""Where two runs begin to differ: weights, losses, then the gradient of every parameter.

    python tools/first_difference.py RUN REFERENCE

Train both in the same way, but for the topology, with a learning rate of almost zero, without
clipping, and with a checkpoint after the first step:

    {train}

A checkpoint of any stage holds the parameters of the plain model and AdamW's first moment, a tenth
of the gradient after one step. So the runs may be of different stages and on different topologies.
RUN and REFERENCE may also be any two checkpoints of torch.distributed.checkpoint: tensors of other
names are compared as they are. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from common.distributed import fail
from common.storage import DCP, MetadataUnpickler

FLAGS = "--steps 2 --log-every 1 --checkpoint-every 1 --grad-clip 0 --lr 1e-30 --dtype float32"
TRAIN = f"""python 01_single_gpu/train.py {FLAGS} --run-dir runs/reference
    torchrun --nproc-per-node 2 02_ddp/train.py {FLAGS} --run-dir runs/a"""
GRADIENT = {"optim.exp_avg.": 10, "optim.momentum.": 20}  # gradient / state after the first step
BACKWARD = "head norm w2 w1 router mlp_norm wo wqkv attn_norm tokens".split()  # within a unit


@dataclass
class State:
    """What a run has after its first step. metrics: its first two lines, or fewer."""

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    others: dict[str, Tensor]
    metrics: list[dict]
    arguments: dict
    ranks: int


@dataclass
class Difference:
    """How a tensor differs. where: the range that does in each dimension. ratio: to the
    reference's within that range, if there is one. size: relative to the largest element."""

    name: str
    shape: tuple[int, ...]
    where: list[tuple[int, int]]
    ratio: float | None
    size: float

    def __str__(self) -> str:
        ranges = [
            f"{kind} {start} to {end - 1} of {n}"
            for kind, (start, end), n in zip(("rows", "columns"), self.where, self.shape)  # noqa: B905
            if end - start < n
        ]
        how = f"off by {self.size:.2g} of the largest" if self.ratio is None else f"x {self.ratio:.4g}"
        return f"  {self.name:32} {how:28} {', '.join(ranges)}".rstrip()


class Reader(dcp.FileSystemReader):
    """PyTorch's reader. The metadata may be from any program, but no class in it can run code."""

    def read_metadata(self, *_, **__) -> dcp.Metadata:
        class Unpickler(MetadataUnpickler):
            def find_class(self, module: str, name: str):
                known = {("pathlib", "PosixPath"), (f"{DCP}.metadata", "BytesStorageMetadata")}
                find = super(MetadataUnpickler, self) if (module, name) in known else super()
                return find.find_class(module, name)

        return Unpickler(io.BytesIO((Path(self.path) / ".metadata").read_bytes())).load()


def read(path: Path) -> State:
    """A run's folder, or any checkpoint."""
    is_checkpoint = (path / ".metadata").is_file()
    config, metrics, ranks = {}, [], 1
    checkpoint = path if is_checkpoint else path / "checkpoints" / "step-00000001"
    if not is_checkpoint:
        if not (checkpoint / ".metadata").is_file():
            fail(f"{path} has no checkpoint of step 1. Train both runs again:\n    {TRAIN}")
        description = json.loads((path / "config.json").read_text())
        config, ranks = description["arguments"], description["world_size"]
        if config["grad_clip"]:
            clip = f"--grad-clip {config['grad_clip']:g} has scaled the gradients"
            fail(f"{path}: {clip}. Train both runs again:\n    {TRAIN}")
        lines = (path / "metrics.jsonl").read_text().splitlines()[:2]
        metrics = [json.loads(line) for line in lines]
    try:
        reader = Reader(checkpoint)
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if hasattr(entry, "properties")  # others are bytes
        }
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    except Exception as error:
        fail(f"{checkpoint} cannot be read: {str(error).splitlines()[0]}", status=2)
    state = State({}, {}, {}, metrics, config, ranks)
    for name, tensor in tensors.items():
        tensor = tensor.double() if tensor.is_floating_point() else tensor
        for prefix, factor in GRADIENT.items():
            if name.startswith(prefix):
                state.gradients[name.removeprefix(prefix)] = tensor * factor
                break
        else:
            if name.startswith("model."):
                state.weights[name.removeprefix("model.")] = tensor
            elif not name.startswith("optim.exp_avg_sq.") and name != "step":
                state.others[name] = tensor
    return state


def in_order_of_backward(name: str) -> tuple:
    """The last unit first: output, layers, embedding."""
    layer = re.search(r"layers\.(\d+)\.", name)
    unit = -1 if name.startswith("output") else 10**6 if layer is None else -int(layer[1]) + 10**5
    places = [i for i, part in enumerate(BACKWARD) if part in name.split(".")]
    return unit, places[0] if places else len(BACKWARD)


def differences(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float
) -> list[Difference]:
    """The tensors that differ by more than `tolerance` of their largest element, in the order of
    backward. A gradient that is almost zero everywhere is rounding noise: the largest counts."""
    most = max((float(t.abs().max()) for t in theirs.values() if t.numel()), default=0.0)
    found = []
    for name in sorted(ours.keys() & theirs.keys(), key=in_order_of_backward):
        a, b = ours[name], theirs[name]
        if a.shape != b.shape:
            fail(f"{name} is {list(a.shape)} and {list(b.shape)}: these are two models")
        if not a.numel():
            continue
        least = tolerance * float(b.abs().max()) + 1e-2 * tolerance * most + 1e-12
        wrong = ~((a - b).abs() <= least)  # a NaN differs
        if not wrong.any():
            continue
        where = []
        for dim in range(a.dim()):
            others = [d for d in range(a.dim()) if d != dim]
            hit = (wrong.any(others[0]) if others else wrong).nonzero().flatten()
            where.append((int(hit[0]), int(hit[-1]) + 1))
        box = tuple(slice(*each) for each in where)
        x, y = a[box].flatten(), b[box].flatten()
        ratio = float(x @ y / (y @ y)) if (y @ y) > 0 else math.inf
        if not x.isfinite().all():
            ratio = math.nan
        elif not ((x - ratio * y).abs() <= 20 * tolerance * y.abs().max()).all():
            ratio = None
        elif abs(ratio) < 20 * tolerance:
            ratio = 0.0
        size = float((a - b).abs().max() / max(float(b.abs().max()), 1e-30))
        found.append(Difference(name, tuple(a.shape), where, ratio, size))
    return found


def likely_cause(found: list[Difference], names: list[str], parts: set[int]) -> str:
    """What a clear pattern of the gradients usually means; "" without one.

    names: all parameters in the order of backward. parts: into how many parts a run is split: its
    ranks, its micro-batches, degrees of its mesh.
    """
    ratios = {f.ratio if f.ratio is None else round(f.ratio, 2) for f in found}
    if any(f.ratio is not None and math.isnan(f.ratio) for f in found):
        return "NaN: a buffer was used before its collective's wait()"
    if ratios == {0.0}:
        return "zero: these gradients are computed and lost, or never asked for"
    if len(ratios) == 1 and (ratio := ratios.pop()) is not None:
        for n in sorted(parts - {1}):
            if abs(ratio - n) < 0.01 * n:
                return f"x {n}: a sum where a mean belongs, over {n} ranks or micro-batches"
            if abs(ratio * n - 1) < 0.03:
                return f"x 1/{n}: divided twice, or one of {n} equal parts is not added"
    if all("norm" in f.name for f in found):
        return (
            "only norms, which every rank holds: partial sums that are not all-reduced (each rank "
            "has a part of the sequence under sequence parallelism)"
        )
    if all(is_one_part(f, parts) for f in found):
        return "one shard of each: what a single rank holds, or the order of the shards, is wrong"
    first = names.index(found[0].name)
    if 0 < first and [f.name for f in found] == names[first:]:
        return (
            f"{found[0].name} and all before it in the model: the gradient of the hidden states "
            "is wrong from there on"
        )
    return ""


def is_one_part(difference: Difference, parts: set[int]) -> bool:
    """Whether one of n equal parts along some dimension differs, and the others do not."""
    return any(
        n > 1 and end - start <= size // n < size and start // (size // n) == (end - 1) // (size // n)
        for (start, end), size in zip(difference.where, difference.shape, strict=True)
        for n in parts
    )


def compare(run: State, reference: State, tolerance: float = 1e-4) -> tuple[list[str], bool]:
    """The report's lines, and whether the runs differ. tolerance: of gradients, relative."""
    if not run.weights.keys() & reference.weights.keys() and not (
        run.others.keys() & reference.others.keys()
    ):
        fail("the two have no tensor's name in common")
    lines = []
    for missing, where in ((reference, run), (run, reference)):
        names = sorted({*missing.weights, *missing.others} - {*where.weights, *where.others})
        if names:
            lines.append(f"only in {'REFERENCE' if where is run else 'RUN'}: {', '.join(names[:4])}")
    weights = differences(run.weights, reference.weights, min(tolerance, 1e-5))
    others = differences(run.others, reference.others, tolerance)
    gradients = differences(run.gradients, reference.gradients, tolerance)
    if run.weights.keys() & reference.weights.keys():
        how = f"{len(weights)} of {len(reference.weights)} differ" if weights else "equal"
        lines.append(f"weights before the first step: {how}")
        lines += map(str, weights[:8])
    loss_differs = None
    for ours, theirs in zip(run.metrics, reference.metrics, strict=False):
        off = ours["loss"] - theirs["loss"]
        if not abs(off) <= 0.1 * tolerance * abs(theirs["loss"]):
            loss_differs = ours["step"]
            both = f"{ours['loss']:.7g}, reference {theirs['loss']:.7g}"
            lines.append(f"loss: step {loss_differs} is the first that differs: {both}")
            break
    else:
        if run.metrics and reference.metrics:
            lines.append("loss: equal")
    if run.gradients:
        how = f"{len(gradients)} of {len(reference.gradients)} differ" if gradients else "equal"
        lines.append(f"gradients of the first step, in the order of backward: {how}")
        lines += map(str, gradients)
    if others:
        lines.append(f"other state: {len(others)} of {len(reference.others)} differ")
        lines += map(str, others)
    cause = ""
    names = sorted(reference.gradients, key=in_order_of_backward)
    if weights:
        cause = "initial values, their broadcast, or which part of them a rank takes"
    elif gradients:
        cause = likely_cause(gradients, names, parts_of(run))
        if loss_differs == 0 and not cause.startswith(("NaN", "x")):
            cause = "the first forward: its loss differs with equal weights, gradients follow"
    elif run.metrics and reference.metrics:
        ours, theirs = run.metrics[0], reference.metrics[0]
        if not abs(ours["grad_norm"] - theirs["grad_norm"]) <= 1e-3 * theirs["grad_norm"]:
            both = f"{ours['grad_norm']:.7g}, reference {theirs['grad_norm']:.7g}"
            lines.append(f"the global norm of these gradients differs: {both}")
            cause = "the norm: each rank's own shards alone, or replicated gradients counted twice"
        elif loss_differs is not None:
            cause = "not the gradients: the loss as it is logged, or data and dropout of a later step"
    if cause:
        lines.append(f"likely cause: {cause}")
    differs = bool(weights or gradients or others or loss_differs is not None or cause)
    if not differs:
        lines.append("no difference in the first step")
    return lines, differs


def parts_of(run: State) -> set[int]:
    a = run.arguments
    if not a:
        return {run.ranks}
    micro = a["global_batch_size"] // (a.get("dp", 1) * a["micro_batch_size"])
    degrees = {a.get(name) or 1 for name in ("dp", "tp", "pp", "cp", "ep", "shard_size")}
    return {run.ranks, micro, *degrees}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.replace("{train}", TRAIN),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("reference", type=Path, metavar="REFERENCE")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of gradients, relative")
    args = parser.parse_args()
    lines, differs = compare(read(args.run), read(args.reference), args.tolerance)
    print("\n".join(lines))
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
