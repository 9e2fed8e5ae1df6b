"""The global norm is exact for millions of numbers, and the same however gradients are sharded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from common.optimization import clip_grad_norm_, global_norm


def gradient(n: int) -> torch.Tensor:
    """Like the gradient of a head over a large vocabulary: rows of very different scale."""
    generator = torch.Generator().manual_seed(1)
    scale = torch.rand(n // 128 + 1, 1, generator=generator).expand(-1, 128).flatten()[:n]
    return 1e-4 * scale * torch.randn(n, generator=generator)


def test_global_norm_of_millions_of_numbers_is_exact_and_the_same_in_shards():
    whole = gradient(25_000_000)
    exact = whole.double().norm().item()
    # the plain float32 norm is off by more than the parity tests allow
    assert abs(torch.linalg.vector_norm(whole).item() / exact - 1) > 1e-5
    assert global_norm([whole]).item() == pytest.approx(exact, rel=1e-6)
    for ranks in (2, 3, 7):
        squares = sum(global_norm([piece]).square() for piece in whole.chunk(ranks))
        assert squares.sqrt().item() == pytest.approx(exact, rel=1e-6)
    rows = whole.view(-1, 125).split(7000)
    assert global_norm(rows).item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_global_norm_of_any_shape_and_dtype(dtype):
    tensors = [torch.randn(shape, dtype=dtype) for shape in [(), (3,), (5, 700), (2, 3, 4)]]
    tensors.append(torch.ones(4))
    exact = torch.cat([t.double().flatten() for t in tensors]).norm()
    norm = global_norm(tensors)
    is_double = dtype == torch.float64
    assert norm.dtype == (dtype if is_double else torch.float32) and norm.shape == ()
    assert norm.item() == pytest.approx(exact.item(), rel=1e-12 if is_double else 1e-6)
    transposed = global_norm([tensors[2].t()])
    assert transposed.item() == pytest.approx(tensors[2].double().norm().item(), rel=1e-6)


def test_global_norm_without_gradients_is_zero():
    assert global_norm([]).item() == 0.0
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0).item() == 0.0


@pytest.mark.parametrize("max_norm", [0.1, 1e9, float("inf")])
def test_gradient_clipping_matches_pytorchs(max_norm):
    ours, theirs = ([nn.Parameter(torch.zeros(n)) for n in (20, 7, 2)] for _ in range(2))
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        a.grad = torch.randn(len(a))
        b.grad = a.grad.clone()
    norm = clip_grad_norm_(iter(ours), max_norm)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, max_norm))
    torch.testing.assert_close([p.grad for p in ours[:2]], [p.grad for p in theirs[:2]])
    assert ours[2].grad is None
