"""The classes of 02, 03 and 04 against the plain model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from data_parallel_trainers import STRATEGIES, Trainer
from torch import Tensor, nn

from common.collectives import split_into_buckets

pytestmark = pytest.mark.slow

WORDS, WIDTH = 11, 6
SMALL = 0.0002  # megabytes per bucket, so that there are several
SGD = torch.optim.SGD


class Odd(nn.Module):
    """A model with everything that is hard to wrap: tied and frozen parameters, a buffer, nested
    containers, a branch that not every forward takes, and sizes that do not divide."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 10), nn.Tanh(), nn.Sequential(nn.Linear(10, WIDTH), nn.ReLU())
        )
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.rows = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)])
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)

    def forward(self, tokens: Tensor, takes_branch: bool = True) -> Tensor:
        x = self.embed(tokens)
        x = self.frozen(x + self.inner(x)) * self.scale.to(x.dtype)
        if takes_branch:
            x = x + self.branch(x)
        for row in self.rows:
            x = row(x)
        return self.head(x)


def odd(seed: int = 0) -> Odd:
    torch.manual_seed(seed)
    return Odd()


def micro_batches(step: int, m: int) -> list[Callable]:
    """m losses for one step, each a function of the model. The last one takes the branch, the
    others do so in every second step."""
    rng = torch.Generator().manual_seed(step)
    tokens = [torch.randint(WORDS, (5, 4), generator=rng) for _ in range(m)]
    return [loss_on(x, step % 2 == 1 or i == m - 1) for i, x in enumerate(tokens)]


def loss_on(tokens: Tensor, branch: bool) -> Callable[[nn.Module], Tensor]:
    def loss_of(model: nn.Module) -> Tensor:
        logits = model(tokens, takes_branch=branch)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    return loss_of


def plain_step(model: nn.Module, optimizer, losses: list[Callable]) -> Tensor:
    total = torch.zeros(())
    for loss_of in losses:
        loss = loss_of(model) / len(losses)
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


def differences(ours: dict[str, Tensor], plain: nn.Module) -> dict[str, float]:
    """The largest difference of each parameter, without the parameters that are equal."""
    theirs = dict(plain.named_parameters())
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    found = {name: (ours[name] - p.detach()).abs().max().item() for name, p in theirs.items()}
    return {name: worst for name, worst in found.items() if worst}


# ---- against the plain model ----

OPTIMIZERS = {
    "sgd": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
}


CHANGES = {  # of a wrapped model that stays exact, by DDP
    "data": lambda model: setattr(model.branch.bias, "data", model.branch.bias.data.clone()),
    "moved to zeros": lambda model: nn.init.zeros_(model.inner[0].weight),
}


def five_steps(strategy: str, optimizer: str, m: int, change: str = "") -> dict[str, float]:
    """How far `strategy`, whose ranks start with other weights and buffers, is from rank 0's plain
    model after five steps of m micro-batches.

    Every rank has the same data, so that the average equals each rank's own gradient bit for bit.
    change: of CHANGES, after the second step.
    """
    optimizer_class, defaults = OPTIMIZERS[optimizer]
    plain, model = odd(), odd(seed=dist.get_rank())
    plain_optimizer = optimizer_class(plain.parameters(), **defaults)
    trainer = Trainer(strategy, model, optimizer_class, bucket_mb=SMALL, **defaults)
    for step in range(5):
        losses = micro_batches(step, m)
        ours = trainer.step(losses)
        theirs = plain_step(plain, plain_optimizer, losses)
        assert torch.equal(ours, theirs), step
        if change and step == 1:
            CHANGES[change](plain)
            CHANGES[change](model)
    return differences(trainer.parameters(), plain)


@pytest.mark.quick_cases("sgd-ddp", "adamw-zero-1", "adamw-zero-2")
@pytest.mark.parametrize("strategy", ["ddp", "zero-1", "zero-2"])  # they take any parameters
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_element_wise_optimizer_matches_the_plain_model(pools, strategy, optimizer):
    for worst in pools(2).run(five_steps, strategy, optimizer, m=1 if strategy == "zero-2" else 3):
        assert worst == {}


@pytest.mark.parametrize("change", CHANGES)
def test_ddp_follows_a_change_of_values(pools, change):
    for worst in pools(2).run(five_steps, "ddp", "adamw", m=2, change=change):
        assert worst == {}


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


def error_of_the_average() -> float:
    """Of bf16 gradients that are equal on all ranks: how far their average is from them."""
    torch.manual_seed(0)
    plain, x = nn.Linear(7, 5, bias=False), torch.randn(2, 7).bfloat16()
    twin = copy.deepcopy(plain).bfloat16()
    twin(x).float().square().sum().backward()
    trainer = Trainer("fsdp", nn.Sequential(plain), SGD, gathered=torch.bfloat16, lr=0.1)
    trainer.backward([lambda model: model(x).float().square().sum()])
    (unit,) = trainer.sync.units
    full = torch.cat([twin.weight.grad.float().flatten(), torch.zeros(unit.sizes[-1])])
    return ((unit.shard.grad - full[unit.owned]).norm() / full.norm()).item()


def test_gradients_of_bf16_weights_are_averaged_in_float32(pools):
    """On three ranks, because a third of a bf16 number is rounded."""
    assert max(pools(3).run(error_of_the_average)) < 1e-6


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
