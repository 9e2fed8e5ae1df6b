"""What rounding does to the tensors of a training step: errors that the loss does not show.

    python 10_fp8/errors.py gradients      the error of every layer's gradients, per recipe
    python 10_fp8/errors.py outliers       what one large element costs the others, per format
    python 10_fp8/errors.py float16        which gradients float16 flushes to zero
    python 10_fp8/errors.py memory         the bytes that a layer saves for backward
    python 10_fp8/errors.py curves FOLDER  the losses of the runs in a folder

The model is the tiny preset with its initial weights, the batch the beginning of the sample.
--svg FILE draws the outliers or the curves.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import hypot
from pathlib import Path
from statistics import mean
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools/pictures"), str(ROOT)]

import torch
import train
from svg import Picture
from torch import Tensor
from train import E4M3, E5M2, Float8, Float8Linear, to_float8

from common.data import load_corpus
from common.model import Transformer, TransformerConfig, init_weights

# ---- the error of the gradients ----


def unscaled(x: Tensor, dtype: torch.dtype, rowwise: bool) -> Float8:
    """`to_float8` without scales: all are 1."""
    scale = torch.ones(len(x) if rowwise else 1, 1)
    return Float8(x.to(dtype), scale)


def exactly_scaled(x: Tensor, dtype: torch.dtype, rowwise: bool) -> Float8:
    """`to_float8` with amax / largest as the scale, not a power of two."""
    amax = x.abs().amax(1 if rowwise else (0, 1), keepdim=True).float().clamp(min=1e-24)
    scale = amax / torch.finfo(dtype).max
    return Float8((x / scale).to(dtype), scale)


VARIANTS = {  # recipe, and what replaces names of train.py
    "bfloat16": (None, {}),
    "rowwise": ("rowwise", {}),
    "tensorwise": ("tensorwise", {}),
    "tensorwise, exact scales": ("tensorwise", {"to_float8": exactly_scaled}),
    "rowwise, e4m3 gradients": ("rowwise", {"E5M2": E4M3}),
    "tensorwise, e4m3 gradients": ("tensorwise", {"E5M2": E4M3}),
    "rowwise, scales of 1": ("rowwise", {"to_float8": unscaled}),
    "tensorwise, scales of 1": ("tensorwise", {"to_float8": unscaled}),
}


def first_step() -> tuple[TransformerConfig, Tensor, Tensor]:
    """The tiny preset, and a batch of 24 sequences of 64 tokens."""
    corpus = load_corpus("sample")
    tokens = torch.as_tensor(corpus.train[: 24 * 64 + 1]).long()
    inputs, targets = (part.view(24, 64) for part in (tokens[:-1], tokens[1:]))
    return TransformerConfig(vocab_size=len(corpus.vocab)), inputs, targets


def gradients(recipe: str | None, autocast: bool) -> tuple[float, dict[str, Tensor]]:
    """The loss of the first step, and the gradients of the linear layers by name."""
    config, inputs, targets = first_step()
    model = Transformer(config)
    init_weights(model, 1337)
    if recipe is not None:
        train.float8(model, recipe)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(inputs, targets)
    loss.backward()
    names = ("wqkv.weight", "wo.weight", "w1.weight", "w2.weight")
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if n.endswith(names)}


def gradient_errors(variant: str) -> tuple[float, dict[str, float]]:
    """Loss, and the relative error of each gradient and of all together, against float32."""
    recipe, replaced = VARIANTS[variant]
    with patch.dict(vars(train), replaced):
        loss, grads = gradients(recipe, autocast=recipe is None)
    _, exact = gradients(None, autocast=False)
    off = {n: (grads[n] - g).norm().item() for n, g in exact.items()}
    size = {n: g.norm().item() for n, g in exact.items()}
    return loss, {n: off[n] / size[n] for n in off} | {
        "all": hypot(*off.values()) / hypot(*size.values())
    }


def show_gradients() -> None:
    print("Error of the gradients in the first step, against float32, in percent\n")
    for i, variant in enumerate(VARIANTS):
        loss, errors = gradient_errors(variant)
        if i == 0:
            heads = [n.removeprefix("layers.").removesuffix(".weight") for n in errors]
            print(f"{'':28}{'loss':>8}" + "".join(f"{h.replace('.', ' '):>13}" for h in heads))
        print(f"{variant:28}{loss:8.4f}" + "".join(f"{100 * e:13.1f}" for e in errors.values()))


# ---- outliers ----

BLOCK = 128  # elements of a row that share a scale, as in DeepSeek-V3
SIZES = [10**i for i in range(7)]


def rounded(x: Tensor, kind: str, sharing: str) -> Tensor:
    """x after a round trip through e4m3 or int8, with scales per tensor, row or block of a row."""
    shape = x.shape
    x = x.reshape(-1, BLOCK) if sharing == "block" else x
    if kind == "e4m3":
        return to_float8(x, E4M3, sharing != "tensor").dequantize(x.dtype).view(shape)
    scale = x.abs().amax(None if sharing == "tensor" else 1, keepdim=True) / 127
    return ((x / scale).round() * scale).view(shape)


def outlier_errors(kind: str, sharing: str, of: str) -> list[float]:
    """For each of SIZES, the relative error of all other elements, when one feature or one token
    of random activations [tokens, features] is that many times as large."""
    torch.manual_seed(0)
    plain, errors = torch.randn(512, 512), []
    for size in SIZES:
        x, others = plain.clone(), torch.ones(512, 512, dtype=torch.bool)
        where = (slice(None), 0) if of == "feature" else 0
        x[where] *= size
        others[where] = False
        difference = (rounded(x, kind, sharing) - x)[others]
        errors.append((difference.norm() / x[others].norm()).item())
    return errors


def changed_by_an_outlier(size: float) -> float:
    """The share of one rank's elements that rounds differently with the scale of a second rank,
    which has an outlier, than with its own: one scale per tensor."""
    torch.manual_seed(0)
    x = torch.randn(512, 512)
    joined = torch.cat([x, torch.full((1, 512), size)])
    both = to_float8(joined, E4M3, rowwise=False).dequantize(x.dtype)[:-1]
    return (both != rounded(x, "e4m3", "tensor")).float().mean().item()


FORMATS = [(kind, sharing) for kind in ("e4m3", "int8") for sharing in ("tensor", "row", "block")]


def show_outliers(svg: str | None) -> None:
    charts = {}
    for of in ("feature", "token"):
        print(f"\nOne {of} k times as large: error of the others, in percent")
        print(f"{'scale per':16}" + "".join(f"{f'k = {size:,}':>14}" for size in SIZES))
        charts[f"one {of} k times as large"] = curves = {}
        for kind, sharing in FORMATS:
            errors = curves[f"{kind}, {sharing}"] = outlier_errors(kind, sharing, of)
            print(f"{kind + ', ' + sharing:16}" + "".join(f"{100 * e:14.2f}" for e in errors))
    print(
        "\nElements that round differently where the other rank's outlier sets the scale, percent"
    )
    print(
        f"{'e4m3, tensor':16}" + "".join(f"{100 * changed_by_an_outlier(k):14.2f}" for k in SIZES)
    )
    if svg:
        points = {
            title: {name: list(zip(SIZES, errors, strict=True)) for name, errors in curves.items()}
            for title, curves in charts.items()
        }
        draw(svg, "Relative error of the other elements", points, log=True)


# ---- float16 ----


def show_float16() -> None:
    """How much of the gradients that reach the linear layers has left the range of a format."""
    seen: list[Tensor] = []
    forward = Float8Linear.forward

    def record(self, x: Tensor) -> Tensor:
        y = forward(self, x)
        y.register_hook(lambda grad: seen.append(grad.flatten(0, -2)))
        return y

    with patch.object(Float8Linear, "forward", record):
        gradients("rowwise", autocast=False)
    rows = {
        "float16": lambda g: g.half(),
        "float16, loss times 1,024": lambda g: (g * 2**10).half(),
        "float16, loss times 65,536": lambda g: (g * 2**16).half(),
        "bfloat16": lambda g: g.bfloat16(),
        "e5m2, scales of 1": lambda g: g.to(E5M2),
        "e5m2, tensorwise": lambda g: to_float8(g, E5M2, False).numbers,
        "e5m2, rowwise": lambda g: to_float8(g, E5M2, True).numbers,
    }
    count = sum((grad != 0).sum().item() for grad in seen)
    print(f"{count:,} gradients of activations, largest {max(g.abs().max() for g in seen):.2g}\n")
    print(f"{'percent of them':28}{'below the normal range':>24}{'zero':>8}{'infinite':>10}")
    for name, cast in rows.items():
        low = zero = infinite = 0
        for grad in seen:
            number = cast(grad)
            value = number.float()[grad != 0].abs()
            low += (value < torch.finfo(number.dtype).tiny).sum().item()
            zero, infinite = zero + (value == 0).sum().item(), infinite + value.isinf().sum().item()
        shares = [100 * n / count for n in (low, zero, infinite)]
        print(f"{name:28}{shares[0]:24.1f}{shares[1]:8.1f}{shares[2]:10.1f}")


# ---- memory ----


@contextmanager
def saved_storages() -> Iterator[dict[int, Tensor]]:
    """The tensors that autograd saves, one per storage."""
    saved: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield saved


def saved_bytes(recipe: str | None, autocast: bool) -> float:
    """What one layer saves for backward without its parameters, per token and feature."""
    config, inputs, _ = first_step()
    layer = Transformer(config, units=[1])
    init_weights(layer, 1337)
    if recipe is not None:
        train.float8(layer, recipe)
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    x = torch.randn(*inputs.shape, config.d_model, requires_grad=True)
    layer(x)  # fills the cached table of rotary positions
    with saved_storages() as saved, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        layer(x)
    kept = [t.untyped_storage().nbytes() for key, t in saved.items() if key not in own]
    return sum(kept) / x.numel()


def show_memory() -> None:
    print("Bytes that a layer saves for backward, per token and feature of the model\n")
    print(f"{'':12}{'linear layers':>14}{'rowwise':>10}{'tensorwise':>12}")
    for dtype, autocast in (("float32", False), ("bfloat16", True)):
        plain, *float8 = (saved_bytes(r, autocast) for r in (None, "rowwise", "tensorwise"))
        print(f"{dtype:12}{plain:14.1f}{float8[0]:10.1f}{float8[1]:12.1f}")


# ---- curves ----


def show_curves(folder: Path, svg: str | None) -> None:
    """Final losses of the runs FOLDER/NAME-SEED, and a picture of their training losses."""
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
    if svg:
        points = {
            f"seed {seed}": {
                name: [(line["step"], line["loss"]) for line in lines]
                for name, lines in of_seed.items()
            }
            for seed, of_seed in runs.items()
        }
        draw(svg, "Training loss on WikiText-2, by step", points)


COLORS = ("#3b82f6", "#e8893a", "#2fa36b", "#8b5cf6", "#d9538f", "#7c8794")


def draw(file: str, title: str, charts: dict[str, dict[str, list]], log: bool = False) -> None:
    """Charts side by side: {title: {name: [(x, y), ...]}}; with log both axes are logarithmic."""
    scale = (lambda v: torch.tensor(float(v)).log10().item()) if log else float
    points = [p for curves in charts.values() for curve in curves.values() for p in curve]
    (left, right), (low, high) = (
        (min(values), max(values))
        for values in zip(*((scale(x), scale(y)) for x, y in points), strict=True)
    )
    art = Picture(900, 330, title)
    for i, (name, curves) in enumerate(charts.items()):
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
        for color, curve in zip(COLORS, curves.values(), strict=False):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
            art.shapes.append(
                f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'
            )
    for k, (color, name) in enumerate(zip(COLORS, next(iter(charts.values())), strict=False)):
        art.shapes.append(
            f'<rect x="{70 + 130 * k}" y="306" width="12" height="12" fill="{color}"/>'
        )
        art.text(87 + 130 * k, 316, name)
    Path(file).write_text(str(art))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("subject", choices="gradients outliers float16 memory curves".split())
    parser.add_argument("folder", nargs="?", type=Path, help="of the runs, for curves")
    parser.add_argument("--svg", help="file of the picture")
    args = parser.parse_args()
    show = {
        "gradients": show_gradients,
        "outliers": lambda: show_outliers(args.svg),
        "float16": show_float16,
        "memory": show_memory,
        "curves": lambda: show_curves(args.folder, args.svg),
    }
    show[args.subject]()


if __name__ == "__main__":
    main()
