"""02, 03 and 04: how buckets are split, and what a step leaves behind."""

from __future__ import annotations

import math

import pytest
import torch
from data_parallel_trainers import STRATEGIES, Trainer
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.collectives import split_into_buckets
from common.unit_parameters import is_in_checkpoint

pytestmark = pytest.mark.slow

SGD = torch.optim.SGD


def norm_after_a_skipped_step(strategy: str) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1, bias=False))  # on two ranks with one element of padding
    trainer = Trainer(strategy, model)
    for factor in (math.nan, 1.0):
        trainer.backward([lambda model, c=factor: c * model(torch.ones(1, 3)).sum()])
        norm = trainer.sync.clip_grad_norm_(1.0)
        trainer.optimizer.zero_grad(set_to_none=True)
    return norm.item()


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "ddp"])
def test_a_skipped_step_with_a_nan_leaves_nothing_behind(pools, strategy):
    assert pools(2).run(norm_after_a_skipped_step, strategy) == [pytest.approx(3**0.5)] * 2


@pytest.mark.quick
@pytest.mark.parametrize(
    ("mbs", "cap_mb", "numbers"),
    [
        ([0.5] * 13, 3, [2, 6, 5]),
        ([2, 0.5, 4, 1], 3, [1, 1, 1, 1]),
        ([0.5] * 4, 0.5, [1, 1, 1, 1]),
        ([0.1, 0.1, -0.1, 0.1], 25, [2, 1, 1]),  # negative: in bfloat16
    ],
    ids=str,
)
def test_buckets_are_split_by_size_and_dtype_and_the_first_is_small(mbs, cap_mb, numbers):
    dtypes = [torch.bfloat16 if mb < 0 else torch.float32 for mb in mbs]
    sizes = [int(abs(mb) * 2**20) // dtype.itemsize for mb, dtype in zip(mbs, dtypes, strict=True)]
    params = [torch.empty(n, dtype=dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
    assert [len(part) for part in split_into_buckets(params, cap_mb, first_cap_mb=1)] == numbers


def is_kept(strategy: str) -> bool:
    """Whether a gradient stays as it was while the next one is computed."""
    trainer = Trainer(strategy, nn.Sequential(nn.Linear(3, 2)), SGD, lr=0.1)
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    param = optimizer.param_groups[0]["params"][0]
    trainer.backward([lambda model: model(torch.ones(3)).sum()])
    kept, expected = param.grad, param.grad.clone()
    trainer.optimizer.zero_grad()
    trainer.backward([lambda model: model(torch.zeros(3)).sum()])
    return torch.equal(kept, expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_that_someone_keeps_does_not_change(pools, strategy):
    assert all(pools(2).run(is_kept, strategy))


@pytest.mark.quick
def test_other_hooks_on_saved_tensors_are_no_checkpoint():
    """Units would not put their own in place of them, and the graph would keep full parameters."""
    found = []

    def see(x: torch.Tensor) -> torch.Tensor:
        found.append(is_in_checkpoint())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        see(x)
    checkpoint(see, x, use_reentrant=False).sum().backward()  # and again in backward
    assert found == [False, True, True]
