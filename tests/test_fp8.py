"""Stage 10: every float8 matmul against an emulation, and runs against their one-process run."""

from __future__ import annotations

import importlib
import io
import re
import shutil
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from harness import REPO, load_stage
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion

from common.model import Transformer, TransformerConfig, init_weights

from tools.stages import lacks_on_cpu, stage_file

stage = load_stage("10")
overhead, errors = importlib.import_module("overhead"), importlib.import_module("errors")
E4M3, E5M2 = stage.E4M3, stage.E5M2
ROWWISE, TENSORWISE = stage.RECIPES.values()
README = (REPO / "10_fp8/README.md").read_text()
recipes = pytest.mark.parametrize("recipe", stage.RECIPES)
pytestmark = pytest.mark.skipif(bool(lacks_on_cpu("10")), reason=lacks_on_cpu("10"))
compiler = pytest.mark.skipif(not shutil.which("g++"), reason="compiled CPU code needs g++")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# ---- an emulation that uses none of PyTorch's float8 ----

MANTISSA = {E4M3: 3, E5M2: 2}  # bits
LEAST_EXPONENT = {E4M3: -6, E5M2: -14}  # of normal numbers
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def emulate(x: Tensor, dtype: torch.dtype, rowwise: bool) -> Tensor:
    """x [rows, columns] rounded to `dtype` and back."""
    amax = x.double().abs().amax(1, keepdim=True) if rowwise else x.double().abs().max()
    fraction, exponent = torch.frexp(amax / LARGEST[dtype])
    exponent = exponent - (fraction == 0.5).int()  # the least power of two that is large enough
    scale = torch.where(amax > 0, torch.ldexp(torch.ones_like(amax), exponent), 1.0)
    scaled = x.double() / scale
    exponent = (torch.frexp(scaled).exponent - 1).clamp(min=LEAST_EXPONENT[dtype])
    step = torch.ldexp(torch.ones_like(scaled), exponent - MANTISSA[dtype])
    return ((scaled / step).round() * step * scale).float()


def emulated_matmuls(
    x: Tensor, weight: Tensor, grad: Tensor, rowwise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Y, dX and dW: round and dequantize the operands, then multiply in float32."""
    x8, weight8 = emulate(x, E4M3, rowwise), emulate(weight, E4M3, rowwise)
    grad8 = emulate(grad, E5M2, rowwise)
    columns8 = emulate(weight.t().contiguous(), E4M3, rowwise)
    exact_or_not = (grad if rowwise else grad8).t().contiguous()
    grad_weight = exact_or_not @ x8.t().contiguous().t()
    return x8 @ weight8.t(), grad8 @ columns8.t(), grad_weight


def matmuls(
    x: Tensor, weight: Tensor, grad: Tensor, rowwise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = stage.Float8Matmuls.apply(x, weight, ROWWISE if rowwise else TENSORWISE)
    return y.detach(), *torch.autograd.grad(y, (x, weight), grad)


def outlier(x: Tensor) -> Tensor:
    return x.index_fill(1, torch.tensor([3]), 1e4)


def zero_tokens(x: Tensor) -> Tensor:
    return x.index_fill(0, torch.arange(0, len(x), 3), 0.0)


# case: sizes (tokens, in, out), and what changes x and the gradient
CASES: dict[str, tuple[tuple[int, int, int], Callable, Callable]] = {
    "square": ((64, 64, 64), torch.clone, torch.clone),
    "wide": ((48, 32, 128), torch.clone, torch.clone),
    "narrow": ((32, 128, 32), torch.clone, torch.clone),
    "one-token": ((1, 32, 48), torch.clone, torch.clone),
    "outlier-feature": ((64, 32, 64), outlier, outlier),
    "outlier-token": ((64, 32, 64), lambda x: outlier(x.t()).t().contiguous(), torch.clone),
    "zero-tokens": ((64, 32, 64), zero_tokens, zero_tokens),
    "all-zero": ((16, 32, 48), torch.zeros_like, torch.zeros_like),
    "tiny-gradients": ((64, 32, 64), torch.clone, lambda g: g * 1e-12),
    "huge": ((64, 32, 64), lambda x: x * 1e9, lambda g: g * 1e9),
}


@recipes
@pytest.mark.parametrize("case", CASES)
def test_every_matmul_equals_an_emulation(case, recipe):
    (tokens, n_in, out), of_x, of_grad = CASES[case]
    x, weight = of_x(torch.randn(tokens, n_in)), torch.randn(out, n_in) * n_in**-0.5
    grad = of_grad(torch.randn(tokens, out) * 1e-4)
    # oneDNN may choose another order of the sums, by the processor
    with torch.backends.mkldnn.flags(enabled=False):
        expected = emulated_matmuls(x, weight, grad, recipe == "rowwise")
        exact = matmuls(x, weight, grad, recipe == "rowwise")
    for name, ours, theirs in zip(("Y", "dX", "dW"), exact, expected, strict=True):
        # a matrix-vector multiplication may sum in another order, as oneDNN may
        assert case == "one-token" or torch.equal(ours, theirs), name
        assert case == "all-zero" or theirs.norm() > 0
    for ours, theirs in zip(matmuls(x, weight, grad, recipe == "rowwise"), expected, strict=True):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


@recipes
def test_under_autocast_the_matmuls_round_the_bfloat16_input_once(recipe):
    x, weight = torch.randn(32, 64).bfloat16(), torch.randn(48, 64)
    grad = torch.randn(32, 48).bfloat16()
    got = matmuls(x, weight, grad, recipe == "rowwise")
    assert [t.dtype for t in got] == [torch.bfloat16, torch.bfloat16, torch.float32]
    expected = emulated_matmuls(x.float(), weight, grad.float(), recipe == "rowwise")
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours.float() - theirs).norm() <= 4e-3 * theirs.norm()


# ---- scales ----

EVERY_EXPONENT = torch.exp2(torch.arange(-60.0, 90.0))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_a_scale_is_the_least_power_of_two_that_is_large_enough(dtype):
    """Exact powers of two times the largest number, and the floats beside them."""
    power = EVERY_EXPONENT
    exact = power * LARGEST[dtype]
    for amax, expected in (
        (exact, power),
        (exact.nextafter(torch.tensor(0.0)), power),
        (exact.nextafter(exact * 2), power * 2),
        (power, power / 2 ** (8 if dtype == E4M3 else 15)),
    ):
        assert torch.equal(stage.to_float8(amax[:, None], dtype, ROWWISE).scale[:, 0], expected)
    for amax in (0.0, 1e-45):  # the least float32
        zeros = stage.to_float8(torch.full((1, 4), amax), dtype, ROWWISE)
        assert zeros.scale.item() > 0 and not zeros.numbers.float().any()


@recipes
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_an_infinity_or_a_nan_is_seen(recipe, bad):
    x, weight, grad = torch.randn(32, 32), torch.randn(48, 32), torch.randn(32, 48)
    broken = x.clone()
    broken[5, 7] = bad
    y, _, grad_weight = matmuls(broken, weight, grad, recipe == "rowwise")
    assert y[5].isnan().all() and grad_weight[:, 7].isnan().all()
    assert recipe == "tensorwise" or not y[:5].isnan().any()
    broken = grad.clone()
    broken[5, 7] = bad
    _, grad_x, grad_weight = matmuls(x, weight, broken, recipe == "rowwise")
    assert grad_x[5].isnan().all() and not grad_weight[7].isfinite().any()


@recipes
@pytest.mark.parametrize("needed", ["x", "weight"])
def test_a_gradient_that_nobody_needs_is_not_computed(recipe, needed):
    x, weight, grad = torch.randn(32, 16), torch.randn(48, 16), torch.randn(32, 48)
    _, grad_x, grad_weight = matmuls(x, weight, grad, recipe == "rowwise")
    wanted, expected = (x, grad_x) if needed == "x" else (weight, grad_weight)
    wanted.requires_grad_()
    y = stage.Float8Matmuls.apply(x, weight, stage.RECIPES[recipe])
    with (
        patch.object(stage, "scaled_matmul", wraps=stage.scaled_matmul) as calls,
        patch.object(stage, "to_float8", wraps=stage.to_float8) as casts,
    ):
        (got,) = torch.autograd.grad(y, wanted, grad)
    assert torch.equal(got, expected)
    in_float8 = (recipe, needed) != ("rowwise", "weight")
    assert calls.call_count == in_float8 and casts.call_count == in_float8 + (needed == "x")


# ---- on a GPU, whose constraints PyTorch's fake tensors know ----


@recipes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_matmuls_meet_the_constraints_of_cuda(recipe, dtype):
    seen, scaled_mm = [], stage.F.scaled_mm

    def record(a, b, **how):
        seen.append((how["output_dtype"], how["use_fast_accum"]))
        assert a.stride(1) == 1 and b.stride(0) == 1, "row-major times column-major"
        assert all(how[name].stride(-1) == 1 for name in ("scale_a", "scale_b"))
        assert how["scale_recipe_a"] == how["scale_recipe_b"] == stage.RECIPES[recipe]
        return scaled_mm(a, b, **how)

    def contiguous(x: Tensor) -> Tensor:
        return x if x.is_contiguous() else x.new_empty(x.shape)

    with (
        torch.no_grad(),  # as in a backward
        FakeTensorMode(),
        patch.object(stage.F, "scaled_mm", record),
        patch.object(Tensor, "contiguous", contiguous),  # a copy needs a real device
    ):
        # and so does autograd: call the functions themselves
        tokens = 48 if recipe == "tensorwise" else 17  # rowwise, dW is not in float8
        x = torch.empty(tokens, 32, dtype=dtype, device="cuda")
        weight = torch.empty(64, 32, device="cuda")
        saved: list[Tensor] = []
        ctx = SimpleNamespace(save_for_backward=lambda *tensors: saved.extend(tensors))
        ctx.needs_input_grad = (True, True, False)
        y = stage.Float8Matmuls.forward(ctx, x, weight, stage.RECIPES[recipe])
        ctx.saved_tensors = saved
        grad_x, grad_weight, _ = stage.Float8Matmuls.backward(ctx, torch.empty_like(y))
    assert (y.dtype, grad_x.dtype, grad_weight.dtype) == (dtype, dtype, torch.float32)
    if recipe == "rowwise":
        assert seen == [(torch.bfloat16, True), (torch.bfloat16, False)]
    else:
        assert seen == [(dtype, True), (dtype, False), (torch.float32, False)]


def test_a_gpu_without_float8_is_an_error(error_of, monkeypatch):
    check = stage.check_float8, SimpleNamespace(d_model=128), torch.device("cuda", 0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 9))
    check[0](*check[1:])
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 6))
    said = error_of(*check)
    assert "A100" in said and "8.9" in said


def test_on_a_cpu_an_older_pytorch_is_an_error(error_of, monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cpu"))
    said = error_of(stage.check_float8, SimpleNamespace(d_model=128), torch.device("cpu"))
    assert f"no float8 matmuls on a CPU: install {stage_file('10').cpu_torch}" in said
    assert "on a CPU 10 needs" in lacks_on_cpu("10") and not lacks_on_cpu("01")


# ---- the model ----

SIZE = "--d-model 32 --n-layers 2 --n-heads 2 --seq-len 16".split()
BASE = [*SIZE, *"--log-every 1 --global-batch-size 24".split()]


def model(recipe: str | None, **shape) -> Transformer:
    config = TransformerConfig(256, **{"d_model": 64, "n_layers": 2, **shape})
    made = Transformer(config)
    init_weights(made, 1)
    return made if recipe is None else stage.float8(made, recipe)


@recipes
def test_the_parameters_keep_their_names_order_and_values(recipe):
    plain, ours = model(None), model(recipe)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in plain.named_parameters()]
    for ours_p, plain_p in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours_p, plain_p) and ours_p.dtype == torch.float32
    count = sum(isinstance(m, stage.Float8Linear) for m in ours.modules())
    assert count == 4 * plain.config.n_layers


def linear(n_in: int = 32, n_out: int = 16) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False)


@recipes
def test_a_layer_from_the_meta_device_is_initialized_as_nn_linear(recipe):
    with torch.device("meta"):
        layer = stage.Float8Linear(linear(), recipe)
    torch.manual_seed(0)
    layer.to_empty(device="cpu").reset_parameters()
    torch.manual_seed(0)
    assert torch.equal(layer.weight, linear().weight)


@recipes
def test_one_token_without_a_batch_is_a_row(recipe):
    layer, x = stage.Float8Linear(linear(), recipe), torch.randn(32, requires_grad=True)
    torch.save(layer, io.BytesIO())  # it can be pickled
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y, layer(x[None])[0]) and x.grad.shape == x.shape


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (nn.Embedding(32, 16), "Embedding"),
        (linear(n_in=24), "multiples of 16"),
        (linear(n_out=40), "multiples of 16"),
    ],
)
def test_a_layer_that_does_not_fit_is_an_error(layer, said):
    """What it would lose: test_tensor_parallel.py."""
    with pytest.raises(ValueError, match=said):
        stage.Float8Linear(layer, "rowwise")


@recipes
def test_a_frozen_weight_stays_frozen_and_dtypes_with_a_narrow_range_are_an_error(recipe):
    plain = linear().requires_grad_(False)
    layer = stage.Float8Linear(plain, recipe)
    x = torch.randn(16, 32, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight is plain.weight and layer.weight.grad is None and x.grad is not None
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(TypeError, match=f"not {dtype}"):
            layer(x.to(dtype))
    with pytest.raises(TypeError, match="torch.float16"):
        stage.Float8Linear(linear().half(), recipe)(x)
    with torch.autocast("cpu", torch.float16), pytest.raises(TypeError, match="float16"):
        layer(x)


@recipes
@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17])
def test_any_number_of_tokens_is_multiplied_as_the_shape_that_a_gpu_takes(tokens, recipe):
    """An expert may get no token at all."""
    layer = stage.Float8Linear(linear(), recipe)
    x, grad = torch.randn(tokens, 1, 32, requires_grad=True), torch.randn(tokens, 1, 16)
    with patch.object(stage, "scaled_matmul", wraps=stage.scaled_matmul) as calls:
        layer(x).backward(grad)
    for call in calls.call_args_list:
        a, b = call.args[0].numbers, call.args[1].numbers
        assert a.shape[1] % 16 == len(b) % 16 == 0 < a.shape[1]
    assert x.grad.shape == x.shape and layer.weight.grad.isfinite().all()
    if tokens:
        expected = matmuls(x[:, 0].detach(), layer.weight.detach(), grad[:, 0], recipe == "rowwise")
        torch.testing.assert_close(layer(x)[:, 0], expected[0])
        torch.testing.assert_close(x.grad[:, 0], expected[1])
        torch.testing.assert_close(layer.weight.grad, expected[2])
    else:
        assert not layer.weight.grad.any()


@recipes
def test_a_second_derivative_is_an_error(recipe):
    x = torch.randn(16, 32, requires_grad=True)
    y = stage.Float8Linear(linear(), recipe)(x)
    for constant_or_not in (y.sum(), y.square().sum()):
        with pytest.raises(RuntimeError, match="create_graph"):
            torch.autograd.grad(constant_or_not, x, create_graph=True, retain_graph=True)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_what_a_layer_saves_is_what_the_readme_says(autocast):
    name = "bfloat16" if autocast else "float32"
    stated = re.search(rf"^\| {name} \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", README, re.M)
    for recipe, figure in zip((None, *stage.RECIPES), stated.groups(), strict=True):
        assert abs(overhead.saved_bytes(recipe, autocast) - float(figure)) < 0.2


# ---- what the casts cost ----


@recipes
def test_a_cast_moves_the_bytes_of_the_readme(recipe):
    for name, dtype in overhead.DTYPES.items():
        (stated,) = re.findall(rf"^\| {name} \| (\d+) \| \d+ \|$", README, re.M)
        assert overhead.bytes_as_written(recipe, dtype) == int(stated)


@pytest.mark.slow
@compiler
@recipes
def test_a_compiled_cast_reads_its_input_twice_and_writes_float8(recipe):
    for name, dtype in overhead.DTYPES.items():
        (stated,) = re.findall(rf"^\| {name} \| \d+ \| (\d+) \|$", README, re.M)
        fused, kernels = overhead.compiled_cast(recipe, dtype)
        assert fused == int(stated) and len(kernels) == 1


# ---- compiled ----


@pytest.mark.slow
@compiler
def test_a_compiled_model_is_a_graph_per_unit_with_the_same_loss_and_gradients():
    """With dropout."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    ours, plain = (model("rowwise", n_layers=1, dropout=0.1) for _ in range(2))
    for unit in ours.units():
        unit.compile(backend="aot_eager")  # to generate code, as for the cast, would take a minute
    tokens, keys = torch.arange(32).view(2, 16), torch.tensor([5, 7], dtype=torch.int32)
    losses = [each(tokens, tokens, keys) for each in (ours, plain)]
    for loss in losses:
        loss.backward()
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == len(list(ours.units())) == 3
    assert not counters["graph_break"]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-5)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 1e-2 * b.grad.norm()


def test_what_an_outlier_costs_is_what_the_readme_says():
    k = errors.SIZES.index(100)
    int8 = [errors.outlier_errors("int8", sharing)[k] for sharing in ("row", "tensor")]
    e4m3 = errors.outlier_errors("e4m3", "row")[: k + 2]
    lost = [f"{100 * x:.0f} %" for x in int8]
    assert f"int8 loses {lost[0]} rowwise and {lost[1]} tensorwise" in README
    assert {f"{x:.1%}" for x in e4m3} == {"2.7%"} and "stays 2.7 %" in README
    for kind in ("e4m3", "e5m2"):
        found = errors.outlier_errors(kind, "tensor", "token")[k + 1 :]
        row = "".join(f" {100 * x:.1f} % |" for x in found)
        assert f"| {kind} |{row}\n" in README
        assert found == pytest.approx(errors.outlier_errors(kind, "tensor")[k + 1 :], rel=0.01)


def test_the_gradient_error_tells_a_broken_recipe_from_a_working_one():
    loss, exact = errors.gradient_errors("bfloat16")
    assert max(exact.values()) < 0.02
    for variant in (*stage.RECIPES, *(f"{recipe}, e4m3 gradients" for recipe in stage.RECIPES)):
        scaled_loss, scaled = errors.gradient_errors(variant)
        assert abs(scaled_loss - loss) < 0.01 and max(scaled.values()) < 0.14
        name = variant.replace("e4m3 gradients", "dY in e4m3")
        (stated,) = re.findall(rf"^\| {name} \| [\d.]+ \| [\d.]+ \| ([\d.]+) \|$", README, re.M)
        assert abs(100 * scaled["all"] - float(stated)) < 0.2
    broken_loss, broken = errors.gradient_errors("tensorwise, scales of 1")
    assert abs(broken_loss - loss) < 0.01  # the loss does not show it
    assert max(broken.values()) > 0.5
    assert f"as the {100 * broken['all']:.0f} % of scales of 1, is a fault in the recipe" in README


def differences_within_units(recipe: str) -> list[bool]:
    """Of each unit, whether its shard's gradient in stage 04 has the bits of the module alone."""
    plain, sharded = model(recipe), model(recipe)
    fsdp = load_stage("04").FullyShardedDataParallel(sharded, sharded.units())
    tokens = torch.arange(64).view(4, 16)
    for each in (plain, fsdp):
        each(tokens, tokens).backward()
    fsdp.finish_gradient_synchronization()
    equal = []
    for unit, own in zip(fsdp.units, plain.units(), strict=True):
        flat = torch.cat([p.grad.flatten() for p in own.parameters()])
        padded = nn.functional.pad(flat, (0, unit.sizes[-1]))
        equal.append(torch.equal(unit.shard.grad, padded[unit.owned]))
    return equal


@recipes
def test_float8_within_the_units_of_fsdp_has_the_bits_of_the_module_alone(pools, recipe):
    """Two ranks with the same batch: their average is exact."""
    assert pools(2).run(differences_within_units, recipe) == [[True] * 4] * 2


# ---- runs ----


def curve(pools, recipe: str, ranks: int, *flags: str) -> list[dict]:
    return pools(ranks).train("10", [*BASE, "--recipe", recipe, *flags])[0]


@pytest.mark.quick_cases("rowwise")
@pytest.mark.parametrize(
    ("recipe", "loss", "norm"),
    [("rowwise", 1e-5, 1e-4), ("tensorwise", 1e-4, 1e-3)],
    ids=stage.RECIPES,
)
def test_step_0_on_any_ranks_and_micro_batches(pools, corpus_dir, recipe, loss, norm):
    """Before the optimizer's first step, which is large wherever a gradient's sign has changed."""
    flags = ["--data", str(corpus_dir), "--steps", "1"]
    (expected,) = curve(pools, recipe, 1, *flags)
    for ranks, more in [(4, []), (2, ["--micro-batch-size", "4"])]:
        (got,) = curve(pools, recipe, ranks, *flags, *more)
        assert got["loss"] == pytest.approx(expected["loss"], abs=loss, rel=0)
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=norm)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "dtype"), [("rowwise", "float32"), ("tensorwise", "bfloat16")])
def test_fifty_steps_follow_stage_01(pools, reference, corpus_dir, recipe, dtype):
    flags = ["--data", str(corpus_dir), "--steps", "50", "--dtype", dtype]
    lines = curve(pools, recipe, 1, *flags)  # more ranks: the runs of stage.toml
    expected = reference([*BASE, *flags])
    for ours, plain in zip(lines, expected, strict=True):
        assert abs(ours["loss"] - plain["loss"]) <= 0.01 * plain["loss"]
    first, plain = lines[0]["grad_norm"], expected[0]["grad_norm"]
    assert 1e-6 < abs(first - plain) < 0.05 * plain, "no float8 in the matmuls"
