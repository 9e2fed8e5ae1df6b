"""The model: its formulas, its units, and the chunked loss.

The by-hand versions follow the papers' formulas in float64, and share no code with the model.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from harness import PeakMemory
from torch import Tensor

from common.counter_rng import sample_keys
from common.loss import IGNORED, linear_cross_entropy
from common.model import (
    Layer,
    Linear,
    RMSNorm,
    Transformer,
    TransformerConfig,
    init_weights,
    initial_value,
)

CONFIG = TransformerConfig(vocab_size=100, d_model=32, n_layers=3, n_heads=4, seq_len=16)


def built(config: TransformerConfig = CONFIG, seed: int = 1, units=None) -> Transformer:
    model = Transformer(config, units)
    init_weights(model, seed)
    return model


def tokens_of(batch: int = 3, seq: int = 16, seed: int = 0) -> Tensor:
    return torch.randint(100, (batch, seq), generator=torch.Generator().manual_seed(seed))


def normal(*shape: int, seed: int = 0, dtype=torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ---- formulas ----


def head_by_hand(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One causal attention head of x [seq, d] with weights q, k, v [head_dim, d], in float64."""
    seq, half = len(x), len(q) // 2
    angle = torch.arange(seq).double()[:, None] * 10000.0 ** -(torch.arange(half).double() / half)
    rotation = torch.polar(torch.ones_like(angle), angle)  # [seq, half], complex

    def rotated(w: Tensor) -> Tensor:
        y = x @ w.t()
        z = torch.complex(y[:, 0::2], y[:, 1::2]) * rotation
        return torch.stack((z.real, z.imag), dim=-1).flatten(-2)

    queries, keys, values = rotated(q), rotated(k), x @ v.t()
    rows = []
    for t in range(seq):
        scores = keys[: t + 1] @ queries[t] / math.sqrt(2 * half)
        weights = scores.exp() / scores.exp().sum()
        rows.append(weights @ values[: t + 1])
    return torch.stack(rows)


def attention_by_hand(x: Tensor, wqkv: Tensor, wo: Tensor, heads: int) -> Tensor:
    """x: [seq, d], float64. wqkv: [3 d, d] in rows of (head, q/k/v, head_dim)."""
    by_head = wqkv.view(heads, 3, -1, wqkv.shape[1])
    parts = [head_by_hand(x, *by_head[h]) for h in range(heads)]
    return torch.cat(parts, dim=-1) @ wo.t()


def test_layer_is_pre_norm_with_residual_connections():
    layer = Layer(CONFIG, 1)
    init_weights(layer, 3, "layers.1.")
    with torch.no_grad():  # with offsets of zero, a norm without its offset would not show
        layer.attn_norm.offset.copy_(normal(32, seed=5))
        layer.mlp_norm.offset.copy_(normal(32, seed=6))
    w = {name: p.double() for name, p in layer.named_parameters()}

    def norm(x: Tensor, offset: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + offset)

    x = normal(16, 32)
    y = norm(x.double(), w["attn_norm.offset"])
    y = x + attention_by_hand(y, w["attn.wqkv.weight"], w["attn.wo.weight"], heads=4)
    z = norm(y, w["mlp_norm.offset"]) @ w["mlp.w1.weight"].t()
    z = 0.5 * z * (1 + (z / math.sqrt(2)).erf())
    by_hand = y + z @ w["mlp.w2.weight"].t()
    torch.testing.assert_close(layer(x[None])[0].double(), by_hand, rtol=1e-4, atol=1e-5)


def test_norm_computes_in_float32_or_float64_and_returns_the_dtype_of_its_input():
    norm = RMSNorm(32)
    offset = (0.01 * normal(32, seed=5)).bfloat16().double()
    x = normal(16, 32).bfloat16()
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + offset)
    # bfloat16 represents these offsets exactly, but has only 1/128 between 1 and 2
    for of_norm, of_x, error in (
        (torch.bfloat16, torch.float32, 1e-6),
        (torch.float32, torch.bfloat16, 2**-8),
        (torch.float64, torch.float64, 1e-14),
    ):
        norm.offset = torch.nn.Parameter(offset.to(of_norm))
        y = norm(x.to(of_x))
        assert y.dtype == of_x
        assert ((y.double() - exact) / exact).abs().max() < error


def test_number_of_parameters_and_flops():
    d, layers, seq = 32, 3, 16
    assert [TransformerConfig(n).padded_vocab for n in (1, 128, 129, 33278)] == [
        *(128, 128, 256, 33280)
    ]
    matrices = layers * (3 * d * d + d * d + 4 * d * d + 4 * d * d) + 128 * d
    norms = (2 * layers + 1) * d
    assert CONFIG.num_parameters() == 128 * d + matrices + norms
    assert sum(p.numel() for p in built().parameters()) == CONFIG.num_parameters()
    # per weight 2 in forward and 4 in backward; attention: 2 matmuls of 2 seq d, three times
    assert CONFIG.flops_per_token() == 6 * (matrices + norms) + 3 * layers * 2 * (2 * seq * d)


# ---- the chunked loss ----


def plain_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    summed = F.cross_entropy(x @ weight.t(), targets, ignore_index=IGNORED, reduction="sum")
    return summed / (targets != IGNORED).sum().clamp(min=1)


def loss_and_gradients(function, x, weight, targets, scale=1.0, **kwargs):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = function(x, weight, targets, **kwargs)
    (scale * loss).backward()
    return loss.detach(), x.grad, weight.grad


@pytest.mark.parametrize("rows", [1, 3, 4, 10, 11, 1024])
@pytest.mark.parametrize("ignored", ["none", "some", "a whole chunk", "all"])
def test_chunked_loss_and_its_gradients_match_cross_entropy(rows, ignored):
    x, weight = normal(11, 8), normal(20, 8, seed=1)
    targets = torch.arange(11) % 20
    which = {"none": [], "some": [0, 5, 10], "a whole chunk": [0, 1, 2, 3], "all": ...}
    targets[which[ignored]] = IGNORED
    ours = loss_and_gradients(linear_cross_entropy, x, weight, targets, scale=3.0, rows=rows)
    plain = loss_and_gradients(plain_loss, x.double(), weight.double(), targets, scale=3.0)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)
    assert (ours[0] == 0.0) == (ignored == "all")


def test_chunked_loss_with_a_second_backward_or_a_frozen_input():
    x, weight, targets = normal(11, 8), normal(20, 8, seed=1), torch.arange(11)
    _, grad_x, grad_weight = loss_and_gradients(linear_cross_entropy, x, weight, targets)
    w = weight.clone().requires_grad_()
    loss = linear_cross_entropy(x, w, targets)
    loss.backward(retain_graph=True)
    (2 * loss).backward()
    torch.testing.assert_close(w.grad, 3 * grad_weight)
    leaf = x.clone().requires_grad_()
    loss = linear_cross_entropy(leaf, weight, targets)
    assert loss.grad_fn.saved_tensors[1] is None  # no gradient of a frozen weight is computed
    loss.backward()
    torch.testing.assert_close(leaf.grad, grad_x)


@pytest.mark.parametrize(
    "targets", [[1, -1, 2], [1, 8, 2], [1, -101, 2], [1], [1, 2, 3, 4]], ids=str
)
def test_targets_outside_the_vocabulary_or_of_another_number_are_an_error(targets):
    with pytest.raises((RuntimeError, ValueError)):
        linear_cross_entropy(torch.randn(3, 4), torch.randn(8, 4), torch.tensor(targets))


def test_a_second_derivative_of_the_chunked_loss_is_an_error():
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(8, 4)
    loss = linear_cross_entropy(x, weight, torch.tensor([1, IGNORED, 2]))
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_linear_layer_under_autocast_is_bitwise_identical_to_pytorchs():
    """Ours only keeps fewer tensors for backward."""
    torch.manual_seed(0)
    ours, theirs = Linear(24, 40), torch.nn.Linear(24, 40, bias=False)
    torch.nn.init.normal_(ours.weight)
    theirs.weight.data.copy_(ours.weight.data)
    x, grad = torch.randn(3, 8, 24), torch.randn(3, 8, 40, dtype=torch.bfloat16)
    results = []
    for layer in (ours, theirs):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(leaf)
        y.backward(grad)
        results.append((y, leaf.grad, layer.weight.grad))
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_chunked_loss_under_bfloat16_autocast_stays_close_to_float32():
    x, weight, targets = normal(64, 32), 0.2 * normal(100, 32, seed=1), torch.arange(64)
    exact = loss_and_gradients(linear_cross_entropy, x, weight, targets, rows=24)
    with torch.autocast("cpu", torch.bfloat16):
        rough = loss_and_gradients(linear_cross_entropy, x, weight, targets, rows=24)
        bf16 = loss_and_gradients(linear_cross_entropy, x.bfloat16(), weight, targets, rows=24)
    assert [t.dtype for t in rough] == [torch.float32] * 3
    assert [t.dtype for t in bf16] == [torch.float32, torch.bfloat16, torch.float32]
    for results in (rough, bf16):
        assert abs(results[0] - exact[0]) < 1e-2
        for a, b in zip(results[1:], exact[1:], strict=True):
            assert 1e-5 < (a.float() - b).norm() / b.norm() < 2e-2  # bf16 was used, and is close


def test_gradient_of_a_bf16_head_is_as_exact_with_many_chunks():
    """Compared with float64 on the same bf16 values."""
    x, weight = normal(1024, 32).bfloat16(), normal(64, 32, seed=1).bfloat16()
    targets = torch.arange(1024) % 64
    _, _, exact = loss_and_gradients(plain_loss, x.double(), weight.double(), targets)
    for rows in (1024, 2):
        _, _, grad = loss_and_gradients(linear_cross_entropy, x, weight, targets, rows=rows)
        assert grad.dtype == torch.bfloat16 and (grad - exact).norm() / exact.norm() < 6e-3


def test_a_factor_of_the_loss_is_not_rounded_to_bfloat16():
    """As 1/3 for three micro-batches would be, to 1.002/3."""
    inputs = normal(1024, 32).bfloat16(), normal(64, 32, seed=1).bfloat16()
    targets = torch.arange(1024) % 64
    _, *whole = loss_and_gradients(linear_cross_entropy, *inputs, targets)
    _, *third = loss_and_gradients(linear_cross_entropy, *inputs, targets, scale=1 / 3)
    for a, b in zip(third, whole, strict=True):
        ratio = (a.double() * b.double()).sum() / b.double().square().sum()
        assert abs(3 * ratio - 1) < 5e-4


def test_chunked_loss_never_materializes_the_logits():
    x = normal(512, 16).requires_grad_()
    weight = normal(2048, 16, seed=1).requires_grad_()
    targets = torch.arange(512)
    logits, gradients = 512 * 2048 * 4, (512 + 2048) * 16 * 4
    with PeakMemory() as one_chunk:
        linear_cross_entropy(x, weight, targets, rows=512)
    with PeakMemory() as chunks:
        linear_cross_entropy(x, weight, targets, rows=16)
    with PeakMemory() as evaluation, torch.no_grad():
        linear_cross_entropy(x, weight, targets, rows=16)
    assert one_chunk.above >= 2 * logits
    assert chunks.above < gradients + 2.5 * logits / 32  # a chunk's logits and their softmax
    assert evaluation.above < 2.5 * logits / 32


# ---- units ----


def test_initial_weights_do_not_depend_on_which_layers_are_built_or_their_order():
    torch.manual_seed(0)
    whole = dict(built().named_parameters())
    torch.manual_seed(99)
    torch.randn(5)
    for units in ([4], [3, 0], [2], [1, 2, 3]):
        for name, value in built(units=units).named_parameters():
            assert torch.equal(value, whole[name]), name
    alone = Layer(CONFIG, 2)
    init_weights(alone, 1, "layers.2")
    for name, value in alone.named_parameters():
        assert torch.equal(value, whole[f"layers.2.{name}"]), name
        assert torch.equal(value, initial_value(f"layers.2.{name}", value.shape, 1))


def test_initial_weights_differ_between_seeds_and_names():
    shape = (64, 64)
    names = [f"layers.{i}.attn.{w}.weight" for i in (0, 1, 11) for w in ("wqkv", "wo")]
    values = [initial_value(name, shape, seed).flatten() for name in names for seed in (0, 1)]
    correlation = torch.corrcoef(torch.stack(values)) - torch.eye(len(values))
    assert correlation.abs().max() < 5 / 64  # five standard deviations of 4096 samples
    assert initial_value("layers.0.attn_norm.offset", (64,), 0).eq(0).all()


@pytest.mark.parametrize("module", [torch.nn.Linear(2, 3), torch.nn.LayerNorm(3)])
def test_parameter_without_a_rule_for_its_initial_value_is_an_error(module):
    with pytest.raises(ValueError, match=r"layers.0.new.(weight|bias) \[3\]: no initial value"):
        init_weights(module, 0, "layers.0.new.")


def test_initial_weights_have_the_documented_standard_deviation():
    for name, shape, std in (
        ("embed.tokens.weight", (400, 100), 0.02),
        ("output.head.weight", (400, 100), 0.02),
        ("layers.0.attn.wqkv.weight", (300, 100), 0.1),
        ("layers.0.mlp.w1.weight", (400, 100), 0.1),
        ("layers.0.attn.wo.weight", (100, 100), 0.1 / 3),
        ("layers.0.mlp.w2.weight", (100, 400), 0.05 / 3),
    ):
        value = initial_value(name, shape, 0)
        assert abs(value.std() / std - 1) < 0.03 and abs(value.mean() / std) < 0.05, name


# ---- activation checkpointing ----


def trained(config: TransformerConfig):
    model = built(config)
    with PeakMemory() as peak:
        loss = model(tokens_of(), tokens_of(seed=1), sample_keys(1, 5, torch.arange(3)))
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()], peak.left


def test_activation_checkpointing_is_bitwise_identical_with_less_memory():
    config = replace(CONFIG, dropout=0.3)
    loss, gradients, held = trained(config)
    loss_2, gradients_2, held_2 = trained(replace(config, activation_checkpointing=True))
    assert torch.equal(loss, loss_2)
    assert all(map(torch.equal, gradients, gradients_2))
    hidden = 3 * 16 * 32 * 4  # bytes of one [batch, seq, d_model]
    # a recomputed layer keeps its input only; a plain one at least q, k, v and the MLP's two
    # tensors of width 4 d_model
    assert held - held_2 > 3 * 10 * hidden


def test_a_model_trains_after_an_evaluation_under_inference_mode():
    """What the evaluation has cached must have a version counter."""
    model = Transformer(TransformerConfig(40, d_model=24, n_layers=1, n_heads=2, seq_len=13))
    init_weights(model, seed=0)
    tokens = torch.arange(13)[None]
    with torch.inference_mode():
        model(tokens, tokens)
    model(tokens, tokens).backward()
