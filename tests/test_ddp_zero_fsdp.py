"""The classes of 02, 03 and 04 against the plain model."""

from __future__ import annotations

import copy
import gc
import math
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import load_stage
from techniques import STRATEGIES, Trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from common.model import Transformer, TransformerConfig, init_weights

pytestmark = pytest.mark.slow

WORDS, WIDTH = 11, 6
SMALL = 0.0002  # megabytes per bucket, so that there are several
SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


class Odd(nn.Module):
    """A model with everything that is hard to wrap: tied, frozen and unused parameters, a buffer,
    nested containers, a branch that not every forward takes, and sizes that do not divide."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 10), nn.Tanh(), nn.Sequential(nn.Linear(10, WIDTH), nn.ReLU())
        )
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(3, 3)
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


def transformer(checkpointing: bool = False) -> Transformer:
    sizes = {"vocab_size": 120, "d_model": 32, "n_layers": 2, "n_heads": 2, "seq_len": 8}
    model = Transformer(TransformerConfig(**sizes, activation_checkpointing=checkpointing))
    init_weights(model, seed=3)
    return model


def loss_of_transformer(seed: int) -> Callable[[nn.Module], Tensor]:
    tokens = torch.randint(120, (4, 9), generator=torch.Generator().manual_seed(seed))
    return lambda model: model(tokens[:, :-1], tokens[:, 1:])


def micro_batches(step: int, m: int, branch: bool, rank: int) -> list[Callable]:
    """m losses for one step of `rank`, each a function of the model."""
    rng = torch.Generator().manual_seed(1000 * step + rank)
    return [loss_on(torch.randint(WORDS, (5, 4), generator=rng), branch) for _ in range(m)]


def loss_on(tokens: Tensor, branch: bool) -> Callable[[nn.Module], Tensor]:
    def loss_of(model: nn.Module) -> Tensor:
        logits = model(tokens, takes_branch=branch)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    return loss_of


def plain_step(model: nn.Module, optimizer, losses: list[Callable], over_ranks: bool) -> Tensor:
    """One step of the plain model."""
    total = average_gradients(model, losses, over_ranks)
    optimizer.step()
    optimizer.zero_grad()
    return total


def average_gradients(model: nn.Module, losses: list[Callable], over_ranks: bool) -> Tensor:
    """Run forward and backward, optionally average over the ranks. A missing gradient is zero."""
    total = torch.zeros(())
    for loss_of in losses:
        loss = loss_of(model) / len(losses)
        loss.backward()
        total += loss.detach()
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            if over_ranks:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
    return total


def differences(ours: dict[str, Tensor], plain: nn.Module) -> dict[str, float]:
    """The largest difference of each parameter, without the parameters that are equal."""
    theirs = dict(plain.named_parameters())
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    found = {name: (ours[name] - p.detach()).abs().max().item() for name, p in theirs.items()}
    return {name: worst for name, worst in found.items() if worst}


# ---- against the plain model ----

OPTIMIZERS = {
    # a learning rate of 1/8 keeps products exact in half precision, where PyTorch's rounding
    # depends on an element's position in the tensor
    "exact": (SGD, {"lr": 0.125}),
    "sgd": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
}


def five_steps(
    strategy: str,
    optimizer: str,
    m: int = 1,
    same_data: bool = True,
    branch: str = "sometimes",
    dtype: torch.dtype = torch.float32,
) -> dict[str, float]:
    """How far `strategy` is from the plain model after five steps of m micro-batches.

    same_data: every rank has rank 0's data, so that the average equals each rank's own gradient bit
    for bit; else the plain model averages over the ranks, parameter by parameter. branch: when the
    optional branch runs: in every second step, on rank 0 only, or in the first micro-batch only.
    """
    optimizer_class, defaults = OPTIMIZERS[optimizer]
    plain = odd().to(dtype)
    plain_optimizer = optimizer_class(plain.parameters(), **defaults)
    model = copy.deepcopy(plain)
    trainer = Trainer(strategy, model, optimizer_class, bucket_mb=SMALL, **defaults)
    for step in range(5):
        rank = 0 if same_data else dist.get_rank()
        takes = step % 2 == 1 if branch == "sometimes" else branch == "rank 0" and rank == 0
        losses = micro_batches(step, m, takes, rank)
        if branch == "first micro-batch":
            losses[:1] = micro_batches(step, 1, True, rank)
        ours = trainer.step(losses)
        theirs = plain_step(plain, plain_optimizer, losses, not same_data)
        assert not same_data or torch.equal(ours, theirs), step
    return differences(trainer.parameters(), plain)


REPLICATED = ["ddp", "zero-1", "zero-2"]  # take any parameters


@pytest.mark.quick_cases("3-ddp", "3-zero-1", "1-zero-2")
@pytest.mark.parametrize("strategy", REPLICATED)
@pytest.mark.parametrize("m", [1, 3])
def test_five_steps_are_bitwise_identical_to_the_plain_model(pools, strategy, m):
    for worst in pools(2).run(five_steps, strategy, "sgd", m if strategy != "zero-2" else 1):
        assert worst == {}


@pytest.mark.parametrize("strategy", REPLICATED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_element_wise_optimizer_matches_the_plain_model(pools, strategy, optimizer):
    for worst in pools(2).run(five_steps, strategy, optimizer, m=1 if strategy == "zero-2" else 2):
        assert worst == {}


@pytest.mark.parametrize("strategy", REPLICATED)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_different_data_match_the_plain_model(pools, strategy, size):
    for worst in pools(size).run(five_steps, strategy, "sgd", m=1, same_data=False):
        assert max(worst.values(), default=0.0) <= 1e-6, worst


@pytest.mark.parametrize(
    ("strategy", "m"), [("ddp", 1), ("ddp", 2), ("zero-1", 1), ("zero-1", 2), ("zero-2", 1)]
)
def test_parameter_unused_on_some_ranks_counts_as_a_zero_gradient(pools, strategy, m):
    for worst in pools(2).run(five_steps, strategy, "sgd", m, same_data=False, branch="rank 0"):
        assert max(worst.values(), default=0.0) <= 1e-6, worst


@pytest.mark.parametrize("strategy", ["ddp", "zero-1"])
def test_parameter_unused_in_the_last_micro_batch_keeps_its_accumulated_gradient(pools, strategy):
    for worst in pools(2).run(five_steps, strategy, "sgd", m=2, branch="first micro-batch"):
        assert worst == {}


def transformer_steps(
    strategy: str, optimizer: str, checkpointing: bool = False
) -> dict[str, float]:
    """How far `strategy` is from the plain transformer after three steps of two micro-batches."""
    optimizer_class, defaults = OPTIMIZERS[optimizer]
    plain, model = transformer(), transformer(checkpointing)
    plain_optimizer = optimizer_class(plain.parameters(), **defaults)
    trainer = Trainer(strategy, model, optimizer_class, model.units(), **defaults)
    for step in range(3):
        losses = [loss_of_transformer(2 * step + i) for i in range(2)]
        trainer.step(losses)
        plain_step(plain, plain_optimizer, losses, over_ranks=False)
    return differences(trainer.parameters(), plain)


@pytest.mark.quick_cases("adamw-zero-3", "adamw-fsdp")
@pytest.mark.parametrize("strategy", ["zero-3", "fsdp", "fsdp-keep"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_unsharded_units_are_bitwise_identical_to_the_plain_model(pools, strategy, optimizer):
    for worst in pools(2).run(transformer_steps, strategy, optimizer):
        assert worst == {}


def checkpointed_steps(strategy: str, early_stop: bool) -> dict[str, float]:
    with set_checkpoint_early_stop(early_stop):
        return transformer_steps(strategy, "sgd", checkpointing=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("early_stop", [True, False], ids=["early-stop", "whole-layer"])
def test_activation_checkpointing_is_bitwise_identical(pools, strategy, early_stop):
    """With early stop, recomputation ends at the last tensor it needs, before the unit's end."""
    for worst in pools(2).run(checkpointed_steps, strategy, early_stop):
        assert worst == {}


def hybrid(model: nn.Module, shards: int = 2, **defaults) -> Trainer:
    mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("replicate", "shard"))
    groups = {f"{name}_group": mesh[name].get_group() for name in mesh.mesh_dim_names}
    return Trainer("fsdp", model, SGD, groups=groups, **defaults)


def clipped(strategy: str) -> tuple[float, float, float]:
    """The global norm, the plain model's, and the difference of the parameters after the step."""
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
    try:
        plain, model = transformer(), transformer()
        if strategy == "fsdp-hybrid":
            trainer = hybrid(model, units=model.units(), lr=1.0)
        else:
            trainer = Trainer(strategy, model, SGD, model.units(), lr=1.0)
        losses = [loss_of_transformer(2 * dist.get_rank() + i) for i in range(2)]
        trainer.backward(losses)
        norm = trainer.sync.clip_grad_norm_(0.1)
        trainer.optimizer.step()
        average_gradients(plain, losses, over_ranks=True)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        SGD(plain.parameters(), lr=1.0).step()
        worst = max(differences(trainer.parameters(), plain).values(), default=0.0)
        return norm.item(), expected.item(), worst
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.quick_cases("zero-1-2", "fsdp-2")
@pytest.mark.parametrize(
    ("strategy", "size"),
    [*((s, size) for s in STRATEGIES if s != "ddp" for size in (2, 3)), ("fsdp-hybrid", 4)],
)
def test_gradient_clipping_uses_the_global_norm(pools, strategy, size):
    for norm, expected, worst in pools(size).run(clipped, strategy):
        assert norm == pytest.approx(expected, rel=1e-5) and expected > 0.1
        assert worst <= 1e-6


def norm_after_a_skipped_step(strategy: str) -> float:
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


# ---- DistributedDataParallel ----


def ranks_start_apart() -> None:
    model = odd(seed=dist.get_rank())
    first = odd(seed=0)
    load_stage("02").DistributedDataParallel(model)
    for ours, theirs in zip(model.state_dict().values(), first.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.quick
def test_ddp_broadcasts_weights_and_buffers_from_rank_0(pools):
    pools(2).run(ranks_start_apart)


def gradients_in_buckets() -> None:
    stage, model = load_stage("02"), odd()
    ddp = stage.DistributedDataParallel(model, bucket_cap_mb=SMALL)
    trained = {p for p in model.parameters() if p.requires_grad}
    in_buckets = [p for bucket in ddp.buckets for p in bucket.params]
    assert set(in_buckets) == trained and len(in_buckets) == len(trained)  # tied parameters once
    assert len(ddp.buckets) > 3
    for step in range(4):
        for loss_of in micro_batches(step, 1, step % 2 == 1, 0):
            loss_of(ddp).backward()
        ddp.finish_gradient_synchronization()
        for bucket in ddp.buckets:
            for p in bucket.params:
                assert (
                    p.grad.untyped_storage().data_ptr() == bucket.grads.untyped_storage().data_ptr()
                )
        assert model.frozen.weight.grad is None and not model.never.weight.grad.any()
        assert model.branch.weight.grad.any() == (step % 2 == 1)
        for p in trained:
            p.grad = None  # like zero_grad(set_to_none=True)


def test_ddp_keeps_gradients_in_their_buckets_after_zero_grad_or_reassignment(pools):
    pools(2).run(gradients_in_buckets)


def backward_twice(strategy: str) -> None:
    if strategy == "fsdp-hybrid":
        trainer = hybrid(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), shards=1, lr=0.1)
    else:
        trainer = Trainer(strategy, nn.Linear(5, 3), SGD, lr=0.1)
    trainer.model(torch.ones(2, 5)).sum().backward()
    try:
        with pytest.raises(RuntimeError, match="no_sync"):
            trainer.model(torch.ones(2, 5)).sum().backward()
    finally:
        with suppress(RuntimeError):  # ZeRO and FSDP do not continue after an error
            trainer.sync.finish_gradient_synchronization()


@pytest.mark.parametrize("strategy", ["ddp", "zero-1", "fsdp-hybrid"])
def test_second_backward_outside_no_sync_is_an_error(pools, strategy):
    pools(2).run(backward_twice, strategy)


@pytest.mark.quick
def test_buckets_are_split_by_size_and_dtype_and_the_first_is_small():
    def params(*mbs: float, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
        itemsize = dtype.itemsize
        return [nn.Parameter(torch.empty(int(mb * 2**20) // itemsize, dtype=dtype)) for mb in mbs]

    for number in ("02", "03"):
        split = load_stage(number).split_into_buckets

        def sizes(ps: list[nn.Parameter], cap_mb: float, split=split) -> list[int]:
            return [len(run) for run in split(ps, cap_mb)]

        assert sizes(params(*[0.5] * 13), 3) == [2, 6, 5]
        assert sizes(params(2, 0.5, 4, 1), 3) == [1, 1, 1, 1]
        assert sizes(params(*[0.5] * 4), 0.5) == [1, 1, 1, 1]
        mixed = [*params(0.1, 0.1), *params(0.1, dtype=torch.bfloat16), *params(0.1)]
        assert sizes(mixed, 25) == [2, 1, 1]
        assert sizes([], 25) == []


# ---- FullyShardedDataParallel ----


def backward_under_no_sync() -> float:
    """How far the gradients are from the average if every backward ran under `no_sync()`."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    trainer = hybrid(copy.deepcopy(plain), shards=1, lr=1.0)
    losses = [lambda model: model(torch.full((2, 5), 1.0 + dist.get_rank())).sum()]
    with trainer.sync.no_sync():
        losses[0](trainer.model).backward()
    trainer.sync.finish_gradient_synchronization()
    average_gradients(plain, losses, over_ranks=True)
    ours = torch.cat([flat.shard.grad for flat in trainer.sync.buckets[::-1]])
    theirs = torch.cat([p.grad.flatten() for p in plain.parameters()])
    assert theirs.any()
    return (ours - theirs).abs().max().item()


def test_finishing_reduces_over_the_replicas_after_backwards_under_no_sync(pools):
    assert pools(2).run(backward_under_no_sync) == [0.0, 0.0]


def error_of_the_average(strategy: str) -> float:
    """The relative error of an average of bf16 gradients that are equal on all ranks."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    twin, x = copy.deepcopy(plain).bfloat16(), torch.randn(2, 7).bfloat16()
    twin(x).float().square().sum().backward()
    trainer = Trainer(strategy, plain, SGD, gathered=torch.bfloat16, lr=0.1)
    trainer.backward([lambda model: model(x).float().square().sum()])
    grads = {name: p.grad for name, p in twin.named_parameters()}
    worst = 0.0
    for owner in trainer.sync.buckets:
        flat = [grads[name].flatten() for name in owner.shapes]
        whole = torch.cat([*flat, torch.zeros(owner.padding)])
        difference = owner.shard.grad - whole[owner.owned]
        worst = max(worst, (difference.norm() / whole.norm()).item())
    return worst


@pytest.mark.parametrize("strategy", ["zero-3", "fsdp"])
def test_gradients_of_bf16_weights_are_averaged_in_float32(pools, strategy):
    """On three ranks, because a third of a bf16 number is rounded."""
    assert max(pools(3).run(error_of_the_average, strategy)) < 1e-6


def seconds_per_unit(n_units: int) -> float:
    """CPU time of this process per unit, without garbage collection."""
    units = (nn.Linear(2, 2) for _ in range(n_units))
    trainer = Trainer("fsdp", nn.Sequential(*units), SGD, lr=0.1)
    fastest = math.inf
    gc.disable()
    try:
        for _ in range(3):
            start = time.process_time()
            trainer.backward([lambda model: model(torch.ones(1, 2)).sum()])
            fastest = min(fastest, time.process_time() - start)
            trainer.optimizer.zero_grad(set_to_none=True)
    finally:
        gc.enable()
    return fastest / n_units


@pytest.mark.wall_clock  # also the CPU time of the same work is longer on a busy machine
def test_the_cost_of_a_units_hooks_does_not_grow_with_the_number_of_units(pools):
    few, many = (pools(1).run(seconds_per_unit, n)[0] for n in (200, 2000))
    assert many < 1.5 * few


# ---- gradients of several uses ----


class Twice(nn.Module):
    """A layer's gradient is accumulated twice: reentrant checkpointing runs a backward per use."""

    def __init__(self):
        super().__init__()
        self.first, self.twice, self.last = (nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.twice, x.tanh(), use_reentrant=True)
        return self.last(x)


def final_twice(strategy: str) -> dict[str, float] | str:
    torch.manual_seed(0)
    plain = Twice()
    trainer = Trainer(strategy, copy.deepcopy(plain), SGD, bucket_mb=1, lr=0.1)
    losses = [lambda model: model(torch.ones(5, 7)).square().mean()]
    try:
        trainer.step(losses)
    except RuntimeError as error:
        return str(error)
    plain_step(plain, SGD(plain.parameters(), lr=0.1), losses, over_ranks=False)
    return differences(trainer.parameters(), plain)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_layer_with_two_nested_backward_passes_is_exact_or_an_error(pools, strategy):
    expected = {"ddp": "no_sync", "zero-1": "use_reentrant=False", "zero-2": "use_reentrant=False"}
    for said in pools(2).run(final_twice, strategy):
        assert said == {} if strategy not in expected else expected[strategy] in said


def gradient_of_a_shared_row(strategy: str, tokens: int) -> float:
    """The gradient of an embedding row that all tokens share, divided by its exact value."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 1, bias=False))
    nn.init.ones_(model[1].weight)
    trainer = Trainer(strategy, model, SGD, units=list(model), gathered=torch.bfloat16, lr=1.0)
    before = trainer.parameters()["0.weight"].clone()
    trainer.step([lambda model: model(torch.ones(1, tokens, dtype=torch.long)).float().sum()])
    change = before - trainer.parameters()["0.weight"]
    return (change[1] / tokens).mean().item()


@pytest.mark.parametrize("strategy", ["zero-3", "fsdp"])
def test_embedding_row_of_many_tokens_has_its_full_gradient_in_bf16(pools, strategy):
    """A sum of equal numbers in bfloat16 stops growing at 256 of them."""
    for ratio in pools(2).run(gradient_of_a_shared_row, strategy, 4096):
        assert abs(ratio - 1) < 1e-3
