"""What Muon does to a gradient, who owns which matrix, and what it learns.

    python -m 11_muon.figures owners             owners and the time line of a step
    python -m 11_muon.figures singular           singular values before and after five iterations
    python -m 11_muon.figures curves FOLDER      the losses of the runs in a folder

--svg FILE draws it.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]

import torch
from torch import Tensor

from common.arguments import PRESETS
from common.data import load_corpus
from common.model import Transformer, TransformerConfig, init_weights
from tools.pictures.svg import Picture
from tools.stages import load_stage

muon = load_stage("11")

# ---- owners and the time line ----

NAMES = ("wqkv", "wo", "w1", "w2")


def matrices_of(d: int, layers: int) -> dict[Tensor, str]:
    """The matrices of a model in its order, each with its layer and name."""
    shapes = {"wqkv": (3 * d, d), "wo": (d, d), "w1": (4 * d, d), "w2": (d, 4 * d)}
    names = [(i, name) for i in range(layers) for name in NAMES]
    return {torch.empty(shapes[name], device="meta"): f"{i}.{name}" for i, name in names}


def time_line(matrices: dict[Tensor, str], ranks: int, send: float) -> tuple[dict, list]:
    """When each owner updates its matrices, and when each broadcast is in flight.

    Times are in FLOPs of an update. send: the time to broadcast an element. Broadcasts run one
    after another, in the order of the updates.
    """
    free, network = [0.0] * ranks, 0.0
    updates, broadcasts = {rank: [] for rank in range(ranks)}, []
    for matrix, owner in muon.choose_owners(matrices, ranks).items():
        end = free[owner] + muon.orthogonalization_flops(matrix)
        updates[owner].append((matrices[matrix], free[owner], end))
        start = max(network, end)
        network = start + send * matrix.numel()
        broadcasts.append((matrices[matrix], owner, start, network))
        free[owner] = end
    return updates, broadcasts


def draw_owners(ranks: int = 4) -> Picture:
    d = 128
    matrices = matrices_of(d, 2)
    whole = sum(map(muon.orthogonalization_flops, matrices))
    updates, broadcasts = time_line(matrices, ranks, send=d)
    art = Picture(760, 336, f"Two layers on {ranks} ranks: backward, updates, broadcasts")
    left, top, row, split = 80, 60, 34, 330
    lane = ranks * row
    colors = dict(zip(range(ranks), ("blue", "green", "orange", "purple"), strict=False))
    owner_of = {name: owner for name, owner, *_ in broadcasts}
    # backward computes the last layer first; each reduce follows its gradient
    elements = {name: matrix.numel() for matrix, name in matrices.items()}
    scale = (split - left - 30) / sum(elements.values())
    x, network = left, left
    for name in [*elements][::-1]:
        width = elements[name] * scale
        for rank in range(ranks):
            art.bar(x, top + rank * row, width - 1, row - 8, "grey", name)
        network = max(network, x + width)
        hint = f"reduce {name} to rank {owner_of[name]}"
        art.rect(network, top + lane + 12, 0.6 * width, 20, colors[owner_of[name]], hint)
        x, network = x + width, network + 0.6 * width
    scale = (740 - split) / whole
    for rank, spans in updates.items():
        art.text(left - 12, top + rank * row + 17, f"rank {rank}", anchor="end")
        for name, start, end in spans:
            place = split + start * scale, top + rank * row, (end - start) * scale - 1
            art.bar(*place, row - 8, colors[rank], name)
    for name, owner, start, end in broadcasts:
        place = split + start * scale, top + lane + 12, (end - start) * scale - 1
        art.rect(*place, 20, colors[owner], f"broadcast {name} from rank {owner}")
    art.text(left - 12, top + lane + 26, "network", anchor="end")
    art.text(left, 48, "backward, reduces to the owners", fill="faint")
    art.text(split, 48, "updates, broadcasts from the owners", fill="faint")
    art.line(split - 5, top - 4, split - 5, top + lane + 36, "faint", "3 3")
    y, x = top + lane + 62, split
    art.text(split - 12, y + 17, "without owners, on every rank:", anchor="end")
    for matrix, name in matrices.items():
        width = muon.orthogonalization_flops(matrix) * scale
        art.bar(x, y, width - 1, row - 8, "grey", name)
        x += width
    art.legend(left, y + 56, {colors[r]: f"owned by rank {r}" for r in range(ranks)})
    return art


def print_owners() -> None:
    print(f"{'':10}{'ranks':>8}{'max/mean':>10}{'idle':>6}")
    for preset, (d, layers, *_) in PRESETS.items():
        matrices = matrices_of(d, layers)
        for ranks in (4, 8, 64):
            work = [0] * ranks
            for matrix, owner in muon.choose_owners(matrices, ranks).items():
                work[owner] += muon.orthogonalization_flops(matrix)
            balance = max(work) * ranks / sum(work)
            print(f"{preset:10}{ranks:8}{balance:10.2f}{work.count(0):6}")


# ---- singular values ----


def gradient_of(name: str = "layers.0.attn.wqkv.weight") -> Tensor:
    """A matrix's gradient at the initial weights of the tiny preset, on 16 samples."""
    corpus = load_corpus("sample")
    config = TransformerConfig(len(corpus.vocab), *PRESETS["tiny"])
    model = Transformer(config)
    init_weights(model, 1337)
    tokens = torch.as_tensor(corpus.train[: 16 * 64 + 1], dtype=torch.int64)
    model(tokens[:-1].view(16, 64), tokens[1:].view(16, 64)).backward()
    return model.get_parameter(name).grad


def singular_values(dtype: torch.dtype = torch.float32) -> dict[int, Tensor]:
    """Of the gradient over its Frobenius norm, after 0 to 5 iterations, the largest first."""
    grad = gradient_of()
    return {
        n: torch.linalg.svdvals(muon.orthogonalize(grad.to(dtype), n).double()) for n in range(6)
    }


def draw_singular(values: dict[int, Tensor]) -> Picture:
    art = Picture(760, 330, "Singular values of a gradient, before and after Newton-Schulz")
    left, top, width, height = 70, 62, 660, 210
    low, high = -3.0, 0.2

    def place(i: float, value: float) -> tuple[float, float]:
        exponent = max(low, math.log10(value))
        y = top + height * (high - exponent) / (high - low)
        return left + width * i / len(values[0]), y

    for exponent in range(int(low), 1):
        _, y = place(0, 10.0**exponent)
        art.line(left, y, left + width, y, "faint", "2 4")
        art.text(left - 10, y + 4, f"{10.0**exponent:g}", anchor="end")
    fills = {0: "grey", 1: "teal", 3: "blue", 5: "orange"}
    for n, fill in fills.items():
        for i, value in enumerate(values[n].tolist()):
            x, y = place(i, value)
            art.rect(x, y - 2, 4, 4, fill, f"{n} iterations, singular value {i}: {value:.2g}")
    art.legend(left, 46, {fill: f"{n} iterations" for n, fill in fills.items()})
    art.text(
        left + width, top + height + 22, "singular values, by size", anchor="end", fill="faint"
    )
    return art


# ---- curves ----


def losses(run: Path, window: int = 100) -> list[tuple[int, float]]:
    """The mean loss of every `window` steps, and the step in their middle."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found: dict[int, list[float]] = {}
    for line in lines:
        found.setdefault(line["step"] // window, []).append(line["loss"])
    return [(i * window + window // 2, mean(each)) for i, each in found.items()]


def last(run: Path) -> dict:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


def draw_curves(folder: Path, step_time: float) -> Picture:
    """Training perplexity of folder/adamw* and folder/muon* over steps, and over time; at the end
    of each curve the validation perplexity. step_time: of Muon, relative to AdamW's."""
    art = Picture(760, 340, "Training perplexity, mean of 100 steps; larger squares: validation")
    top, height, low, high = 70, 200, math.log(100), math.log(1000)
    runs = {
        fill: [path.parent for path in sorted(folder.glob(f"{name}*/metrics.jsonl"))]
        for fill, name in (("blue", "adamw"), ("orange", "muon"))
    }
    steps = 1 + max(last(run)["step"] for many in runs.values() for run in many)
    for left, stretch, unit in ((60, 1.0, "steps"), (430, step_time, "time, in steps of AdamW")):
        scale = 290 / steps / stretch

        def height_of(loss: float) -> float:
            return top + height * (high - min(loss, high)) / (high - low)

        for ppl in (100, 200, 500, 1000):
            y = height_of(math.log(ppl))
            art.line(left, y, left + 300, y, "faint", "2 4")
            art.text(left - 8, y + 4, f"{ppl:,}", anchor="end")
        art.axis(left, top + height + 6, 1000 * scale, steps / 1000 * stretch, "k")
        for fill, many in runs.items():
            each = scale * (stretch if fill == "orange" else 1.0)
            for run in many:
                for step, loss in losses(run)[1:]:  # the first mean is off the scale
                    hint = f"step {step}: {math.exp(loss):.0f}"
                    art.rect(left + step * each - 1.5, height_of(loss) - 1.5, 3, 3, fill, hint)
                if "val_loss" in last(run):
                    x, y = left + steps * each, height_of(last(run)["val_loss"])
                    art.rect(x - 4, y - 4, 8, 8, fill, f"validation: {last(run)['val_ppl']:.1f}")
        art.text(left + 300, top + height + 46, unit, anchor="end", fill="faint")
    art.legend(60, 48, {"blue": "AdamW", "orange": "Muon"})
    return art


def print_curves(folder: Path) -> None:
    for path in sorted(folder.glob("*/metrics.jsonl")):
        line = last(path.parent)
        if "test_ppl" in line:
            print(f"{path.parent.name:28}{line['val_ppl']:8.1f}{line['test_ppl']:8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("owners", "singular", "curves"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--step-time", type=float, default=1.07, help="Muon's, over AdamW's")
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    if args.what == "owners":
        print_owners()
        art = draw_owners()
    elif args.what == "singular":
        values = singular_values()
        for n, each in values.items():
            print(f"{n} iterations   largest {each[0]:.3g}   median {each.median():.3g}", end="")
            print(f"   smallest {each[-1]:.3g}")
        art = draw_singular(values)
    else:
        print_curves(args.folder)
        art = draw_curves(args.folder, args.step_time)
    if args.svg:
        args.svg.write_text(str(art))


if __name__ == "__main__":
    main()
