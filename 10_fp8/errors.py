"""What rounding does to the tensors of a training step: errors that the loss does not show.

    python 10_fp8/errors.py gradients    the error of every layer's gradients, per recipe
    python 10_fp8/errors.py underflow    how many gradients each format rounds to zero
    python 10_fp8/errors.py outliers     the error of all other elements, when a few are larger

The model is the tiny preset with its initial weights, the batch the beginning of the sample.
"""

from __future__ import annotations

import argparse
from itertools import product
from math import hypot
from unittest.mock import patch

import torch
import train
from torch import Tensor
from torch.nn.functional import ScalingType
from train import E4M3, E5M2, RECIPES, Float8, Float8Linear, to_float8

from common.model import Transformer, TransformerConfig, init_weights

from common.job.corpus import load_corpus

# ---- the error of the gradients ----


ROWWISE, TENSORWISE = RECIPES.values()


def unscaled(x: Tensor, dtype: torch.dtype, scaling: ScalingType) -> Float8:
    """`to_float8` without scales, for tensorwise: the one scale is 1."""
    return Float8(x.to(dtype), torch.ones(1, 1), scaling)


VARIANTS = {  # recipe, and what replaces names of train.py
    "bfloat16": (None, {}),
    "rowwise": ("rowwise", {}),
    "tensorwise": ("tensorwise", {}),
    "rowwise, e4m3 gradients": ("rowwise", {"E5M2": E4M3}),
    "tensorwise, e4m3 gradients": ("tensorwise", {"E5M2": E4M3}),
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

SIZES = [10**i for i in range(7)]


def rounded(x: Tensor, kind: str, sharing: str) -> Tensor:
    """x after a round trip through e4m3, e5m2 or int8, with a scale per tensor, row or block."""
    rows = {"tensor": x.view(1, -1), "row": x, "block": x.view(-1, 128)}[sharing]
    if kind != "int8":
        rows8 = to_float8(rows, E4M3 if kind == "e4m3" else E5M2, ROWWISE)
        return rows8.dequantize(x.dtype).view_as(x)
    scale = rows.abs().amax(1, keepdim=True) / 127
    return ((rows / scale).round() * scale).view_as(x)


def outlier_errors(kind: str, sharing: str, of: str = "feature") -> list[float]:
    """For each of SIZES, the relative error of all other elements, when one feature (or token) of
    random activations [tokens, features] is that many times as large."""
    torch.manual_seed(0)
    plain, errors = torch.randn(512, 512), []
    others = (slice(None), slice(1, None)) if of == "feature" else (slice(1, None),)
    for size in SIZES:
        x = plain * size
        x[others] = plain[others]
        difference = (rounded(x, kind, sharing) - x)[others]
        errors.append((difference.norm() / x[others].norm()).item())
    return errors


def show_outliers() -> None:
    for of in ("feature", "token"):
        print(f"Error of the other elements in percent, when one {of} is k times as large\n")
        print(f"{'k':16}" + "".join(f"{size:>11,}" for size in SIZES))
        for kind, sharing in product(("e4m3", "e5m2", "int8"), ("tensor", "row", "block")):
            found = outlier_errors(kind, sharing, of)
            print(f"{f'{kind}, {sharing}':16}" + "".join(f"{100 * x:11.1f}" for x in found))
        print()


# ---- underflow ----


def show_underflow() -> None:
    """How many gradients that reach the linear layers each format rounds to zero."""
    seen: list[Tensor] = []
    forward = Float8Linear.forward

    def record(self, x: Tensor) -> Tensor:
        y = forward(self, x)
        y.register_hook(lambda grad: seen.append(grad.flatten(0, -2)))
        return y

    with patch.object(Float8Linear, "forward", record):
        gradients("rowwise", autocast=False)
    rows = {
        "bfloat16": lambda g: g.bfloat16(),
        "e5m2, scales of 1": lambda g: g.to(E5M2),
        "e5m2, tensorwise": lambda g: to_float8(g, E5M2, TENSORWISE).numbers,
        "e5m2, rowwise": lambda g: to_float8(g, E5M2, ROWWISE).numbers,
        "e4m3, tensorwise": lambda g: to_float8(g, E4M3, TENSORWISE).numbers,
        "e4m3, rowwise": lambda g: to_float8(g, E4M3, ROWWISE).numbers,
    }
    count = sum((grad != 0).sum().item() for grad in seen)
    print(f"Of {count:,} gradients of activations, percent that round to zero\n")
    for name, cast in rows.items():
        zero = sum((cast(grad).float()[grad != 0] == 0).sum().item() for grad in seen)
        print(f"{name:28}{100 * zero / count:8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    shows = {"gradients": show_gradients, "underflow": show_underflow, "outliers": show_outliers}
    parser.add_argument("subject", choices=shows)
    shows[parser.parse_args().subject]()


if __name__ == "__main__":
    main()
