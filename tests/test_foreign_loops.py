"""Training loops as written for PyTorch's own classes work with 02 and 03, or are an error.

An error says what to do. The reference is a plain model that sees the data of every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from techniques import Trainer
from torch import Tensor, nn

SMALL = 0.0002  # megabytes per bucket, so that there are several
ZERO = ["zero-1", "zero-2", "zero-3"]
ADAMW = {"lr": 0.02, "weight_decay": 0.1}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3))


def trainer_of(
    strategy: str, model: nn.Module, optimizer_class=torch.optim.AdamW, **defaults
) -> Trainer:
    units = [child for child in model.children() if list(child.parameters())]
    defaults = defaults or ADAMW
    return Trainer(strategy, model, optimizer_class, units, bucket_mb=SMALL, **defaults)


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_on(model: nn.Module, step: int) -> Tensor:
    """The loss on this rank's batch."""
    return model(batch_of(step, dist.get_rank())).square().mean()


def plain_backward(plain: nn.Module, step: int) -> None:
    """Backward of the mean loss over the batches of all ranks."""
    size = dist.get_world_size()
    for rank in range(size):
        (plain(batch_of(step, rank)).square().mean() / size).backward()


def distance(trainer: Trainer, plain: nn.Module) -> float:
    ours = trainer.parameters()
    return max((ours[n] - p.detach()).abs().max().item() for n, p in plain.named_parameters())


def assert_right(pool, loop: Callable, *args) -> None:
    for off in pool.run(loop, *args):
        assert off <= 1e-6


# ---- zeroing, skipping, clipping and accumulating gradients ----


def zeroed_by(strategy: str, who: str, set_to_none: bool) -> float:
    plain = network()
    trainer = trainer_of(strategy, copy.deepcopy(plain))
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    zero_grad = trainer.optimizer.zero_grad if who == "optimizer" else trainer.plain.zero_grad
    for step in range(3):
        loss_on(trainer.model, step).backward()
        trainer.sync.finish_gradient_synchronization()
        trainer.optimizer.step()
        zero_grad(set_to_none=set_to_none)
        plain_backward(plain, step)
        optimizer.step()
        optimizer.zero_grad()
    return distance(trainer, plain)


@pytest.mark.parametrize("strategy", ["ddp", *ZERO])
@pytest.mark.parametrize("who", ["optimizer", "model"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["set-to-none", "zeroed"])
def test_the_model_or_the_optimizer_zeroes_the_gradients(pools, strategy, who, set_to_none):
    assert_right(pools(2), zeroed_by, strategy, who, set_to_none)


def skip_a_step(strategy: str, who: str, set_to_none: bool, finishes: bool) -> float:
    """Skip the second step: its gradients are dropped."""
    plain = network()
    trainer = trainer_of(strategy, copy.deepcopy(plain))
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    zero_grad = trainer.optimizer.zero_grad if who == "optimizer" else trainer.plain.zero_grad
    for step in range(3):
        loss_on(trainer.model, step).backward()
        if finishes or step != 1:
            trainer.sync.finish_gradient_synchronization()
        if step != 1:
            trainer.optimizer.step()
            plain_backward(plain, step)
            optimizer.step()
            optimizer.zero_grad()
        zero_grad(set_to_none=set_to_none)
    return distance(trainer, plain)


@pytest.mark.parametrize("strategy", ZERO)
@pytest.mark.parametrize("who", ["optimizer", "model"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["set-to-none", "zeroed"])
@pytest.mark.parametrize("finishes", [True, False], ids=["finished", "unfinished"])
def test_a_skipped_step_leaves_no_gradient(pools, strategy, who, set_to_none, finishes):
    assert_right(pools(2), skip_a_step, strategy, who, set_to_none, finishes)


def step_after_zero_grad(strategy: str, who: str) -> float:
    """Call the optimizer's step after the gradients were dropped: it must change nothing."""
    plain = network()
    trainer = trainer_of(strategy, copy.deepcopy(plain))
    loss_on(trainer.model, 0).backward()
    trainer.sync.finish_gradient_synchronization()
    (trainer.optimizer if who == "optimizer" else trainer.plain).zero_grad()
    trainer.optimizer.step()
    return distance(trainer, plain)


@pytest.mark.parametrize("strategy", ["ddp", *ZERO])
@pytest.mark.parametrize("who", ["optimizer", "model"])
def test_a_step_without_gradients_changes_nothing(pools, strategy, who):
    assert_right(pools(2), step_after_zero_grad, strategy, who)


def no_last_micro_batch(strategy: str, finishes: bool) -> float:
    """Accumulate with every backward under `no_sync()`."""
    plain = network()
    trainer = trainer_of(strategy, copy.deepcopy(plain))
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    for step in range(2):
        for micro_batch in (2 * step, 2 * step + 1):
            with trainer.sync.no_sync():
                (loss_on(trainer.model, micro_batch) / 2).backward()
            plain_backward(plain, micro_batch)
        if finishes:
            trainer.sync.finish_gradient_synchronization()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        for p in plain.parameters():
            p.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    return distance(trainer, plain)


@pytest.mark.parametrize("strategy", ["ddp", *ZERO])
def test_every_backward_may_be_under_no_sync(pools, strategy):
    assert_right(pools(2), no_last_micro_batch, strategy, True)


@pytest.mark.parametrize("strategy", ZERO)
def test_step_reduces_gradients_that_were_accumulated_under_no_sync(pools, strategy):
    assert_right(pools(2), no_last_micro_batch, strategy, False)


def without_finish(strategy: str, clips: bool) -> float:
    plain = network()
    trainer = trainer_of(strategy, copy.deepcopy(plain))
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    off = 0.0
    for step in range(3):
        loss_on(trainer.model, step).backward()
        plain_backward(plain, step)
        if clips:
            ours = trainer.optimizer.clip_grad_norm_(0.05)
            off = max(off, (ours - nn.utils.clip_grad_norm_(plain.parameters(), 0.05)).abs().item())
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return max(off, distance(trainer, plain))


@pytest.mark.parametrize("strategy", ZERO)
@pytest.mark.parametrize("clips", [False, True], ids=["step", "clip"])
def test_zero_finishes_the_reductions_that_are_outstanding(pools, strategy, clips):
    assert_right(pools(2), without_finish, strategy, clips)


def never_finished() -> None:
    trainer = trainer_of("ddp", network())
    loss_on(trainer.model, 0).backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="finish_gradient_synchronization.*no_sync"):
        loss_on(trainer.model, 1).backward()
    trainer.sync.finish_gradient_synchronization()


def test_ddp_step_without_finishing_the_synchronization_is_an_error(pools):
    pools(2).run(never_finished)


def clipped_by_pytorch(strategy: str, clip: str, norm_of: str) -> None:
    trainer = trainer_of(strategy, network())
    trainer.backward([lambda model: loss_on(model, 0)])
    before = trainer.parameters()
    with pytest.raises(RuntimeError, match="clip_grad_norm_ and zero_grad of ZeroRedundancy"):
        if clip == "norm":
            nn.utils.clip_grad_norm_(trainer.plain.parameters(), 0.1, foreach=norm_of == "all")
        else:
            nn.utils.clip_grad_value_(trainer.plain.parameters(), 0.1, foreach=norm_of == "all")
    with pytest.raises(RuntimeError, match="sharded"):
        sum(p.grad.norm() for p in trainer.plain.parameters() if p.grad is not None)
    trainer.optimizer.zero_grad()
    assert all(p.grad is None for p in trainer.plain.parameters())
    assert all(torch.equal(p, before[n]) for n, p in trainer.parameters().items())


@pytest.mark.parametrize("strategy", ZERO)
@pytest.mark.parametrize("clip", ["norm", "value"])
@pytest.mark.parametrize("norm_of", ["all", "each"])
def test_clipping_sharded_gradients_by_pytorchs_functions_is_an_error(
    pools, strategy, clip, norm_of
):
    pools(2).run(clipped_by_pytorch, strategy, clip, norm_of)


class Fails(nn.Module):
    """A layer whose backward raises an error once."""

    def __init__(self):
        super().__init__()
        self.linear, self.fails = nn.Linear(9, 9), True

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.fails:
            x.register_hook(self.fail)
        return x

    def fail(self, _: Tensor) -> None:
        self.fails = False
        raise ArithmeticError("in backward")


def after_an_exception(strategy: str) -> float:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 9), Fails(), nn.Linear(9, 9), nn.Linear(9, 3))
    trainer = trainer_of(strategy, copy.deepcopy(plain))
    plain[1].fails = False
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    with pytest.raises(ArithmeticError):
        loss_on(trainer.model, 7).backward()
    trainer.optimizer.zero_grad()
    for step in range(2):
        trainer.step([lambda model, step=step: loss_on(model, step)])
        plain_backward(plain, step)
        optimizer.step()
        optimizer.zero_grad()
    return distance(trainer, plain)


@pytest.mark.parametrize("strategy", ZERO)
def test_zero_grad_recovers_after_an_exception_in_backward(pools, strategy):
    assert_right(pools(2), after_an_exception, strategy)


# ---- the optimizer: schedulers, closures, state, loss scaling ----

SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    "one-cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=4),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
}


def scheduled(strategy: str, name: str) -> float:
    plain = network()
    trainer = trainer_of(strategy, copy.deepcopy(plain))
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    schedules = [SCHEDULERS[name](o) for o in (trainer.optimizer, optimizer)]
    for step in range(3):
        trainer.step([lambda model, step=step: loss_on(model, step)])
        plain_backward(plain, step)
        optimizer.step()
        optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
    rates, expected = (set(schedule.get_last_lr()) for schedule in schedules)
    assert rates == expected != {ADAMW["lr"]}
    return distance(trainer, plain)


@pytest.mark.parametrize("strategy", ["ddp", *ZERO])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_sets_the_learning_rate(pools, strategy, name):
    assert_right(pools(2), scheduled, strategy, name)


def with_closure(strategy: str) -> float:
    plain = network()
    trainer = trainer_of(strategy, copy.deepcopy(plain))
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            trainer.optimizer.zero_grad()
            loss = loss_on(trainer.model, step)
            loss.backward()
            return loss

        with torch.no_grad():
            expected = loss_on(plain, step)
        assert torch.equal(trainer.optimizer.step(closure).detach(), expected) or step > 0
        plain_backward(plain, step)
        optimizer.step()
        optimizer.zero_grad()
    return distance(trainer, plain)


@pytest.mark.parametrize("strategy", ZERO)
def test_step_takes_a_closure(pools, strategy):
    assert_right(pools(2), with_closure, strategy)


def reloaded(strategy: str) -> float:
    """Load the state of the optimizer into a new one after some steps."""
    plain = network()
    trainer = trainer_of(strategy, copy.deepcopy(plain))
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    for step in range(4):
        if step == 2:
            model = network()
            model.load_state_dict(trainer.parameters())
            state = copy.deepcopy(trainer.optimizer.state_dict())
            trainer = trainer_of(strategy, model, lr=1.0)
            trainer.optimizer.load_state_dict(state)
            assert trainer.optimizer.param_groups[0]["lr"] == ADAMW["lr"]
        trainer.step([lambda model, step=step: loss_on(model, step)])
        plain_backward(plain, step)
        optimizer.step()
        optimizer.zero_grad()
    return distance(trainer, plain)


@pytest.mark.parametrize("strategy", ZERO)
def test_state_dict_and_load_state_dict_carry_this_ranks_state(pools, strategy):
    assert_right(pools(2), reloaded, strategy)


def changed_afterwards(strategy: str, change: str) -> None:
    model = network()
    model[2].requires_grad_(False)
    trainer = trainer_of(strategy, model)
    if change == "group":
        with pytest.raises(RuntimeError, match="constructor"):
            trainer.optimizer.add_param_group({"params": list(model[2].parameters())})
        return
    changes = {
        "double": lambda: model.double(),
        "data": lambda: setattr(model[4].bias, "data", model[4].bias.data.clone()),
        "unfrozen": lambda: model[2].requires_grad_(True),
        "frozen": lambda: model[4].requires_grad_(False),
    }
    changes[change]()
    message = "move or cast" if change in ("double", "data") else "freeze"
    with pytest.raises(RuntimeError, match=message):
        loss = model(batch_of(0, 0).to(next(model.parameters()).dtype)).square().mean()
        loss.backward()
        trainer.optimizer.step()


@pytest.mark.parametrize("strategy", ZERO)
@pytest.mark.parametrize("change", ["double", "data", "unfrozen", "frozen", "group"])
def test_parameters_that_change_after_the_buckets_were_made_are_an_error(pools, strategy, change):
    pools(2).run(changed_afterwards, strategy, change)


def moved_to_where_it_is(strategy: str) -> float:
    """A `.to` without effect is allowed, and so is a copy of a model that is not sharded."""
    plain = network()
    trainer = trainer_of(strategy, copy.deepcopy(plain))
    trainer.plain.to(torch.float32).to("cpu").train()
    if strategy != "zero-3":
        assert all(
            torch.equal(p, q)
            for p, q in zip(
                copy.deepcopy(trainer.plain).parameters(), plain.parameters(), strict=True
            )
        )
        trainer.plain.load_state_dict(plain.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    trainer.step([lambda model: loss_on(model, 0)])
    plain_backward(plain, 0)
    optimizer.step()
    return distance(trainer, plain)


@pytest.mark.parametrize("strategy", ["ddp", *ZERO])
def test_moving_a_model_to_its_own_device_or_copying_it_changes_nothing(pools, strategy):
    assert_right(pools(2), moved_to_where_it_is, strategy)


def scaled(strategy: str, recipe: bool) -> tuple[float, list[float]]:
    """Train with a loss scale; one gradient of step 1, in one rank's shard, overflows."""
    plain = network()
    trainer = trainer_of(strategy, copy.deepcopy(plain))
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scales = []
    for step in range(3):
        loss = loss_on(trainer.model, step)
        if step == 1 and dist.get_rank() == 0:
            loss = loss + trainer.plain[4].bias[2] * torch.inf
        scaler.scale(loss).backward()
        trainer.sync.finish_gradient_synchronization()
        if recipe:
            trainer.optimizer.share_overflow()
        scaler.step(trainer.optimizer)
        scaler.update()
        trainer.optimizer.zero_grad()
        scales.append(scaler.get_scale())
        if step != 1:
            plain_backward(plain, step)
            optimizer.step()
            optimizer.zero_grad()
    return distance(trainer, plain), scales


@pytest.mark.parametrize("strategy", ["ddp", *ZERO])
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_skip_the_step_in_which_the_gradient_of_one_overflows(pools, strategy, size):
    for off, scales in pools(size).run(scaled, strategy, strategy != "ddp"):
        assert scales == [2.0**10, 2.0**9, 2.0**9]
        assert off <= 1e-6


# ---- ZeRO stage 3: units with any outputs ----


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


@dataclass
class Boxed:
    value: Tensor


class Box:
    def __init__(self, value: Tensor):
        self.value = value


class Unit(nn.Module):
    """Two linear layers that return their result in a container of this kind."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.up, self.down = kind, nn.Linear(5, 11), nn.Linear(11, 5)

    def forward(self, x: Tensor, filled: list | None = None):
        if self.kind == "detach":
            # backward reaches this part after the gradients of all parameters have been computed
            hidden = torch.tanh(F.linear(x, self.up.weight.detach()))
            return F.linear(hidden, self.down.weight.detach()) + self.down(torch.tanh(self.up(x)))
        y = self.down(torch.tanh(self.up(x)))
        if self.kind in ("list argument", "None"):
            filled.append(y)
            return None if self.kind == "None" else x * 1.0
        kinds = {
            "tuple": lambda: (y, 3),
            "named tuple": lambda: Pair(y, None),
            "dict": lambda: {"y": y, "n": [1, None]},
            "dataclass": lambda: Boxed(y),
            "object": lambda: Box(y),
            "tensor and object": lambda: (x * 1.0, Box(y)),
            "in place": lambda: y,
        }
        return kinds[self.kind]()


class Units(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.units = nn.ModuleList([Unit(kind) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            filled: list[Tensor] = []
            output = unit(x, filled) if self.kind in ("list argument", "None") else unit(x)
            x = filled[0] if filled else self.opened(output)
        return x

    def opened(self, output) -> Tensor:
        kinds = {
            "tuple": lambda: output[0],
            "named tuple": lambda: output.first,
            "dict": lambda: output["y"],
            "dataclass": lambda: output.value,
            "object": lambda: output.value,
            "tensor and object": lambda: output[1].value + output[0],
        }
        return kinds[self.kind]() if self.kind in kinds else output


def steps_of_units(kind: str) -> float:
    torch.manual_seed(0)
    plain = Units(kind)
    model = copy.deepcopy(plain)
    trainer = Trainer("zero-3", model, units=list(model.units), **ADAMW)
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    for step in range(2):
        for losses in range(2):  # the second time the input requires a gradient too
            x = batch_of(step, 0).requires_grad_(losses == 1)
            y = x.detach().clone().requires_grad_(losses == 1)
            trainer.model(x).square().mean().backward()
            plain(y).square().mean().backward()
            if losses:
                torch.testing.assert_close(x.grad, y.grad)
        trainer.sync.finish_gradient_synchronization()
        assert all(b.full.untyped_storage().nbytes() == 0 for b in trainer.optimizer.buckets)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return distance(trainer, plain)


KINDS = ["tuple", "named tuple", "None", "dict", "dataclass", "object", "tensor and object"]


@pytest.mark.parametrize("kind", [*KINDS, "list argument", "detach"])
def test_stage_3_trains_units_that_return_anything(pools, kind):
    assert_right(pools(2), steps_of_units, kind)


def gradient_of_an_input() -> float:
    """Compute the gradient of an input between steps, without any parameter's gradient."""
    plain = network()
    trainer = trainer_of("zero-3", copy.deepcopy(plain))
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    off = 0.0
    for step in range(2):
        x = batch_of(step, 0).requires_grad_()
        (ours,) = torch.autograd.grad(trainer.model(x).sum(), x)
        (theirs,) = torch.autograd.grad(plain(x).sum(), x)
        off = max(off, (ours - theirs).abs().max().item())
        assert all(
            not bucket.in_backward and bucket.full.untyped_storage().nbytes() == 0
            for bucket in trainer.optimizer.buckets
        )
        assert all(bucket.shard.grad is None for bucket in trainer.optimizer.buckets)
        trainer.step([lambda model, step=step: loss_on(model, step)])
        plain_backward(plain, step)
        optimizer.step()
        optimizer.zero_grad()
    return max(off, distance(trainer, plain))


def test_stage_3_leaves_nothing_unsharded_after_the_gradient_of_an_input(pools):
    assert_right(pools(2), gradient_of_an_input)


def use_freed_parameters() -> None:
    model = network()
    trainer = trainer_of("zero-3", model)
    for p in model.parameters():
        assert p.isnan().all() and (p.detach() * 1.0).isnan().all()
    torch.save([p.detach() for p in model.parameters()], "parameters.pt")
    for use in (model.state_dict, lambda: model.load_state_dict({}), lambda: copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match="shards only"):
            use()
    trainer.step([lambda model: loss_on(model, 0)])
    assert not any(p.isnan().any() for p in trainer.parameters().values())


def test_parameters_that_stage_3_has_freed_read_as_nan(pools):
    pools(2).run(use_freed_parameters)
