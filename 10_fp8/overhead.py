"""What float8 costs: bytes that a cast moves, bytes saved for backward, and the matmuls' own error.

    python 10_fp8/overhead.py casts      bytes read and written per element, as written and compiled
    python 10_fp8/overhead.py memory     the bytes that a layer saves for backward
    python 10_fp8/overhead.py matmuls    the float8 matmuls of this machine against float64

`casts` and `matmuls` run on the GPU where there is one. Compiling on a CPU needs g++.
"""

from __future__ import annotations

import argparse
import re
import sys

import torch
import train
from errors import first_step
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from train import E4M3, E5M2, RECIPES, scaled_matmul, to_float8

from common.model import Transformer, init_weights

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


# ---- casts ----


class Traffic(TorchDispatchMode):
    """Count the bytes of the large tensors that operators read and write; views move none."""

    def __init__(self, numel: int):
        super().__init__()
        self.numel, self.bytes = numel, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in (*args, out) if isinstance(t, Tensor) and t.numel() == self.numel]
        if len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors):
            self.bytes += sum(t.nbytes for t in tensors)
        return out


def bytes_as_written(recipe: str, dtype: torch.dtype) -> float:
    """Bytes per element that the operators of a cast read and write, one after another."""
    x = torch.randn(256, 2048, dtype=dtype)
    with Traffic(x.numel()) as traffic:
        to_float8(x, E4M3, RECIPES[recipe])
    return traffic.bytes / x.numel()


def compiled_cast(recipe: str, dtype: torch.dtype) -> tuple[float, list[str]]:
    """Bytes per element of the compiled cast, and its kernels' names, from the generated code."""
    from torch._inductor.utils import run_and_get_code

    x = torch.randn(256, 2048, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")
    torch.compiler.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        _, codes = run_and_get_code(torch.compile(to_float8), x, E4M3, RECIPES[recipe])
    code = "\n".join(codes)
    reads = len(re.findall(r"in_ptr0(?: \+|\[)", code))  # loops over x, whose numbers are stored
    return reads * x.element_size() + 1, re.findall(r"^(\w+) = async_compile", code, re.M)


def show_casts() -> None:
    print("Bytes per element that a cast to e4m3 reads and writes\n")
    for name, dtype in DTYPES.items():
        for recipe in RECIPES:
            fused, _ = compiled_cast(recipe, dtype)
            written = bytes_as_written(recipe, dtype)
            print(f"{name:10}{recipe:12}as written {written:3.0f}   compiled {fused:3.0f}")


# ---- memory ----


def saved_by_a_layer(recipe: str | None, autocast: bool, compiled: bool = False) -> list[Tensor]:
    """The tensors that one layer saves for backward, without its parameters: one per storage."""
    config, inputs, _ = first_step()
    layer = Transformer(config, indices=[1])
    init_weights(layer, 1337)
    if recipe is not None:
        train.float8(layer, recipe)
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x
        return x

    x = torch.randn(*inputs.shape, config.d_model, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        layer(x)  # fills the cached table of rotary positions
        if compiled:
            for unit in layer.units():
                unit.compile()
            layer(x)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            layer(x)
    return [t for key, t in saved.items() if key not in own]


def saved_bytes(recipe: str | None, autocast: bool, compiled: bool = False) -> float:
    """What one layer saves for backward without its parameters, per token and feature."""
    config, inputs, _ = first_step()
    kept = saved_by_a_layer(recipe, autocast, compiled)
    return sum(t.untyped_storage().nbytes() for t in kept) / (inputs.numel() * config.d_model)


def show_memory() -> None:
    print("Bytes that a layer saves for backward, per token and feature of the model\n")
    print(f"{'':22}{'linear layers':>14}{'rowwise':>10}{'tensorwise':>12}")
    for compiled in (False, True):
        for dtype, autocast in (("float32", False), ("bfloat16", True)):
            plain, *float8 = (saved_bytes(r, autocast, compiled) for r in (None, *RECIPES))
            name = dtype + ", compiled" * compiled
            print(f"{name:22}{plain:14.1f}{float8[0]:10.1f}{float8[1]:12.1f}")


# ---- matmuls ----

ALLOWED = 0.01  # bfloat16 rounds by 0.002 on average, fast accumulation by less than 0.02 at worst
MATMULS = {  # dtypes of the operands, use_fast_accum
    "dX, e5m2 x e4m3": (E5M2, E4M3, False),
    "Y, e4m3 x e4m3": (E4M3, E4M3, True),
    "dW, e5m2 x e4m3": (E5M2, E4M3, False),
}


def matmul_error(recipe: str, name: str, out: torch.dtype, device: str) -> float:
    """Relative error of `scaled_matmul` against float64, for the same rounded operands."""
    torch.manual_seed(0)
    dtype_a, dtype_b, fast = MATMULS[name]
    a, b = torch.randn(1024, 512), torch.randn(768, 512)
    a8 = to_float8(a.to(device), dtype_a, RECIPES[recipe])
    b8 = to_float8(b.to(device), dtype_b, RECIPES[recipe])
    exact = a8.dequantize(torch.float64) @ b8.dequantize(torch.float64).t()
    got = scaled_matmul(a8, b8, out, use_fast_accum=fast)
    return ((got.double() - exact).norm() / exact.norm()).item()


def show_matmuls() -> int:
    """Print the errors, dX rowwise first: PyTorch's tests leave it out; 1 if one is too large."""
    device, worst = "cuda" if torch.cuda.is_available() else "cpu", 0.0
    print(f"Relative error of a float8 matmul on {device}, by the dtype of its result\n")
    for recipe in RECIPES:
        for name in MATMULS:
            if (recipe, name[:2]) == ("rowwise", "dW"):  # not in float8
                continue
            errors = {n: matmul_error(recipe, name, out, device) for n, out in DTYPES.items()}
            worst = max(worst, *(x if x == x else float("inf") for x in errors.values()))
            texts = "".join(f"   {n} {error:.1e}" for n, error in errors.items())
            print(f"{f'{name}, {recipe}':30}{texts}")
    return int(worst > ALLOWED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    shows = {"casts": show_casts, "memory": show_memory, "matmuls": show_matmuls}
    parser.add_argument("subject", choices=shows)
    sys.exit(shows[parser.parse_args().subject]())


if __name__ == "__main__":
    main()
