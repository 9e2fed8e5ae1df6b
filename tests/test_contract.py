"""The contracts of 02, 03, 04 and 12: every misuse is an error, and what is allowed is exact."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from data_parallel_trainers import Trainer, no_sync_of
from harness import fake_ranks, live_bytes, whole_ledger
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from common.guards import guard

from tools.stages import load_stage

SGD = partial(torch.optim.SGD, fused=True)  # which counts no versions, as our AdamW
DDP, STAGES_1_2, FSDP = ("ddp",), ("zero-1", "zero-2"), ("fsdp", "fsdp-keep")
REPLICAS, UNITS = (*DDP, *STAGES_1_2), ("zero-3", *FSDP)
ALL, SSD = (*REPLICAS, *UNITS), ("ssd",)
ABSENT = (*UNITS, *SSD)


class Unit(nn.Module):
    """A unit that does what `how` says, between two plain ones."""

    def __init__(self, how: str = ""):
        super().__init__()
        self.how, self.linear, self.other = how, nn.Linear(6, 6), nn.Linear(6, 6)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor):
        y = self.linear(x).tanh()
        if self.how == "float16":
            with torch.autocast("cpu", torch.float16):
                y = self.linear(x).float()
        if self.how == "keeps a tensor":  # such as an auxiliary loss, computed after the output
            y = self.other(y)
            self.kept = [self.linear(x.sin()).tanh() * self.other.bias]
            return y
        if self.how == "unused parameter":
            return y
        if self.how == "changes a parameter":
            with torch.no_grad():
                self.other.weight.clamp_(-0.1, 0.1)
        if self.how == "a part recomputed":
            return checkpoint(self.other, y, use_reentrant=False)
        y = self.other(y)
        if self.how == "saves its output":
            return y.exp()
        if self.how == "a complex view":
            turns = torch.view_as_complex(self.linear.bias.view(3, 2)).conj()
            return y + (torch.complex(y[:, :3], y[:, 3:]) * turns).real.repeat(1, 2)
        if self.how == "a sparse tensor":
            return torch.sparse.mm(torch.eye(len(y)).to_sparse(), y)
        if self.how == "detached weight":  # read in backward after all gradients have arrived
            y = y + nn.functional.linear(x.sin(), self.other.weight.detach()).tanh()
        return (y, {"x": [x.cos()]}) if self.how == "tuple" else y


class Chain(nn.Module):
    """Three units; `how` is what forward does with them."""

    def __init__(self, how: str = "", unit: str = ""):
        super().__init__()
        self.how, self.units = how, nn.ModuleList([Unit(), Unit(unit), Unit()])

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, *rest = self.units
        nested = partial(checkpoint, b, use_reentrant=True)  # a backward of its own for each use
        orders = {"other order": [a, c, b], "twice": [a, b, b, c], "skipped": [a, c]}
        orders |= {"last skipped": [a, b], "two nested backwards": [a, nested, nested, c]}
        orders["checkpointed"] = [a, partial(checkpoint, b, use_reentrant=False), c]
        for unit in orders.get(self.how, [a, b, c, *rest]):
            x = unit(x.detach() if self.how == "detached" else x)
            if self.how == "in place":
                x = x.add_(1)
            if isinstance(x, tuple):
                x = x[0] + (x[1]["x"][0] if isinstance(x[1], dict) else 0)
        return x


def chain(how: str = "", unit: str = "", change: Callable = lambda model: None) -> Chain:
    torch.manual_seed(0)
    model = Chain(how, unit)
    change(model)
    return model


frozen = partial(chain, change=lambda model: model.units[0].requires_grad_(False))
recurrent = partial(chain, change=lambda model: model.units.append(nn.LSTM(6, 6)))


def trainer_of(strategy: str, model: Chain, **options) -> Trainer:
    """strategy: "fsdp/2" has replicas of groups of two ranks."""
    if strategy == "ssd":
        return trainer_of_12(model)
    strategy, _, shards = strategy.partition("/")
    groups = {}
    if shards:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // int(shards), int(shards)))
        groups = {"replicate_group": mesh.get_group(0), "shard_group": mesh.get_group(1)}
    # small buckets, so that ZeRO's stages 1 and 2 have several
    units, mb = list(model.units), 0.0002
    return Trainer(strategy, model, SGD, units, bucket_mb=mb, groups=groups, lr=0.1, **options)


def trainer_of_12(model: Chain) -> SimpleNamespace:
    """For misuses: as `Trainer`, with a `zero_grad` that does nothing."""
    stage, folder = load_stage("12"), TemporaryDirectory()
    settings = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.0}
    optimizer = stage.SpeculativeAdamW(Path(folder.name), **settings)
    sync = stage.FullyShardedDataParallel(model, list(model.units), optimizer)
    guard(sync)
    optimizer.zero_grad = lambda **_: None
    parts = {"model": sync, "sync": sync, "plain": model, "optimizer": optimizer}
    return SimpleNamespace(**parts, strategy="ssd", folder=folder)


def batch(seed: int = 0) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))


def loss_of(trainer: Trainer, seed: int = 0) -> Tensor:
    return trainer.model(batch(seed)).square().sum()


def train(trainer: Trainer, steps: int = 2) -> None:
    """What must not go unnoticed after a misuse: more steps, in the order of the contract."""
    for step in range(steps):
        loss_of(trainer, step).backward()
        trainer.sync.finish_gradient_synchronization()
        if trainer.strategy not in ("ddp", "ssd"):
            trainer.sync.clip_grad_norm_(1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)


# ---- misuses ----


def tie(unit: Unit) -> None:
    unit.other.weight = unit.linear.weight


def tie_data(unit: Unit) -> None:
    unit.other.weight.data = unit.linear.weight.data


def keep_in_a_partial(linear: nn.Linear) -> None:
    linear.forward = partial(nn.functional.linear, weight=linear.weight)


def bias_of(trainer: Trainer) -> Tensor:
    return trainer.plain.units[1].linear.bias


WORDS = {  # parts of a training loop
    "train": train,
    "backward": lambda t: loss_of(t).backward(),
    "unit_alone": lambda t: t.plain.units[1](batch()).sum().backward(),
    "double_backward": lambda t: loss_of(t).backward(create_graph=True),
    "add_layer": lambda t: t.model.add_module("more", nn.Linear(6, 6)),
    "replace_layer": lambda t: setattr(t.plain.units[1], "linear", nn.Linear(6, 6)),
    "freeze": lambda t: t.plain.units[1].requires_grad_(False),
    "unfreeze": lambda t: t.plain.requires_grad_(),
    "finish": lambda t: t.sync.finish_gradient_synchronization(),
    "assign": lambda t: t.plain.load_state_dict(copy.deepcopy(t.plain.state_dict()), assign=True),
    "scale_grads": lambda t: [setattr(p, "grad", 2 * p.grad) for p in t.plain.parameters()],
    "replace_grads": lambda t: [setattr(p.grad, "data", 2 * p.grad) for p in t.plain.parameters()],
    "zero_bias": lambda t: nn.init.zeros_(bias_of(t)),
    "clone_bias": lambda t: setattr(bias_of(t), "data", bias_of(t).data.clone()),
    "shorten_bias": lambda t: setattr(bias_of(t), "data", bias_of(t).data[:1].clone()),
    "step": lambda t: t.optimizer.step(),
    "zero_grad": lambda t: t.optimizer.zero_grad(set_to_none=True),
    "model.zero_grad": lambda t: t.plain.zero_grad(),
    "grad_of_shards": lambda t: torch.autograd.grad(loss_of(t), [*t.model.parameters()]),
    "clip": lambda t: nn.utils.clip_grad_norm_(t.plain.parameters(), 0.1),
    "clip_ours": lambda t: t.sync.clip_grad_norm_(1.0),
    "guard": lambda t: guard(t.model, t.optimizer),
    "late_hooks": lambda t: [p.register_post_accumulate_grad_hook(triple) for p in params_of(t)],
    "late_tensor_hooks": lambda t: [p.register_hook(lambda g: 2 * g) for p in params_of(t)],
    "replace_inner": lambda t: setattr(t.sync, "optimizer", SGD(t.sync.shards, lr=0.1)),
    "step_elsewhere": lambda t: SGD(t.sync.shards, lr=0.1).step(),
    "change_lr": lambda t: t.optimizer.param_groups[0].update(lr=0.2),
}


def params_of(trainer: Trainer) -> list[nn.Parameter]:
    """Those of the model that a loop sees: in 04 and 12 the shards."""
    return [*trainer.model.parameters()]


def triple(param: nn.Parameter) -> None:
    param.grad.mul_(3)


def step_in_backward(param: nn.Parameter) -> None:
    with torch.no_grad():
        param -= 0.1 * param.grad


def hook_before_the_guard(strategy: str) -> None:
    trainer = trainer_of(strategy, chain(), guarded=False)
    WORDS["late_hooks"](trainer)
    guard(trainer.model, trainer.optimizer)


def failed_backward(trainer: Trainer) -> None:
    def fail(_, x: Tensor, y: Tensor) -> None:
        y.register_hook(lambda grad: 1 / 0)

    handle = trainer.plain.units[1].linear.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss_of(trainer).backward()
    handle.remove()
    trainer.optimizer.zero_grad()
    train(trainer)


def old_graph(trainer: Trainer, of_input: bool = False) -> None:
    """Backward through a graph that is older than the step; of_input: to the input alone."""
    x = batch().requires_grad_(of_input)
    loss = trainer.model(x).square().sum()
    train(trainer, 1)
    torch.autograd.grad(loss, x) if of_input else loss.backward()


def kept_tensor_alone(trainer: Trainer) -> None:
    trainer.plain.units[1].how = "keeps a tensor"
    trainer.model(batch())
    trainer.plain.units[1].kept[0].sum().backward()
    trainer.sync.finish_gradient_synchronization()


def changed_in_an_evaluation(trainer: Trainer) -> None:
    trainer.plain.units[1].how = "changes a parameter"
    with torch.no_grad():
        trainer.model(batch())


def copied_with_a_group(trainer: Trainer) -> None:
    flat_buffers(trainer.sync)[0].group = dist.group.WORLD
    copy.deepcopy(trainer.sync)


def train_in_float16(trainer: Trainer) -> None:
    with torch.autocast("cpu", torch.float16):
        train(trainer)


def wrapped_twice(strategy: str) -> None:
    trainer = trainer_of(strategy, chain())
    Trainer(strategy, trainer.plain.units[0])


def sparse_gradients(strategy: str) -> None:
    trainer = Trainer(strategy, nn.Embedding(5, 2, sparse=True), SGD, lr=0.1)
    trainer.model(torch.ones(3, dtype=torch.int)).sum().backward()


def loop(do: str | Callable[[Trainer], object], model: Callable[[], Chain] = chain) -> Callable:
    """do: a function of the trainer, or WORDS. The word before a `+` runs under no_sync()."""

    def run(strategy: str) -> None:
        trainer = trainer_of(strategy, model())
        if callable(do):
            return do(trainer)
        for word in do.split():
            with no_sync_of(trainer.sync) if word.endswith("+") else nullcontext():
                WORDS[word.removesuffix("+")](trainer)

    return run


def changed(change: Callable[[Chain], object]) -> Callable[[str], None]:
    """Change a model before it is wrapped, and train it."""
    return loop(train, partial(chain, change=change))


def like(how: str = "", unit: str = "") -> Callable[[str], None]:
    return loop(train, partial(chain, how, unit))


def of_linear(change: Callable[[nn.Linear], object]) -> Callable[[str], None]:
    return changed(lambda model: change(model.units[1].linear))


STRIDED = torch.randn(6, 12)[:, ::2]
AT_THE_END = ("ddp", "zero-1")  # gradients are reduced in a step's last backward
ONE_STEP = "come step() and zero_grad"
DIFFER = "differ between ranks"
UNUSED = {ABSENT: "not used all", REPLICAS: "left out"}
STALE = {REPLICAS: "modified by an inplace operation", ABSENT: "optimizer's last step"}
MISUSES = {  # what is done: WORDS, or a function of the strategy; and the message by strategies
    # of the model, before it is wrapped
    "tied": (changed(lambda model: tie(model.units[1])), {ABSENT: "tied"}),
    "tied as data": (changed(lambda model: tie_data(model.units[1])), {ABSENT: "tied"}),
    "outside of all units": (
        changed(lambda model: model.register_parameter("a", nn.Parameter(torch.ones(1)))),
        {ABSENT: "in no unit"},
    ),
    "frozen": (of_linear(lambda linear: linear.bias.requires_grad_(False)), {ABSENT: "frozen"}),
    "a hook": (of_linear(lambda it: it.bias.register_hook(torch.zeros_like)), {ABSENT: "hooks"}),
    "mixed dtypes": (of_linear(nn.Module.double), {ABSENT: "dtype"}),
    "float16": (
        loop(lambda t: t.model(batch().half()), partial(chain, change=nn.Module.half)),
        {(*STAGES_1_2, *UNITS): "float16", SSD: "not float32"},
    ),
    "autocast to float16": (loop(train_in_float16), {(*STAGES_1_2, *ABSENT): "float16"}),
    "float16 in a unit": (like("", "float16"), {(*STAGES_1_2, *ABSENT): "float16"}),
    "float16 in a checkpointed unit": (
        like("checkpointed", "float16"),
        {(*STAGES_1_2, *ABSENT): "float16"},
    ),
    "cast to float8": (
        lambda s: Trainer(s, chain(), gathered=torch.float8_e4m3fn),
        {FSDP: "use bfloat16"},
    ),
    "batch norm in bfloat16": (
        lambda s: Trainer(s, nn.ModuleList([nn.BatchNorm1d(6)]), gathered=torch.bfloat16),
        {FSDP: "takes no param_dtype"},
    ),
    "max_norm": (
        lambda s: Trainer(s, nn.Sequential(nn.EmbeddingBag(5, 2, max_norm=1.0))),
        {(*REPLICAS, "zero-3"): "max_norm"},
    ),
    "cast to float16": (lambda s: Trainer(s, chain(), gathered=torch.float16), {FSDP: "float16"}),
    "meta device": (changed(lambda model: model.to("meta")), {ABSENT: "meta"}),
    "kept in a partial": (of_linear(keep_in_a_partial), {ABSENT: "has been sharded"}),
    "buffer on the meta device": (
        changed(lambda model: model.register_buffer("b", torch.empty(1, device="meta"))),
        {ABSENT: "without values"},
    ),
    "buffers in another order": (
        changed(lambda model: model.register_buffer("b", torch.arange(2.0).roll(dist.get_rank()))),
        {(*FSDP, *SSD): DIFFER},
    ),
    "empty unit": (changed(lambda model: model.units.append(nn.Tanh())), {ABSENT: "no param"}),
    "strides": (of_linear(lambda it: setattr(it.weight, "data", STRIDED)), {DDP: "contiguous"}),
    "two wrappers share a unit": (wrapped_twice, {DDP: "another wrapper"}),
    "two wrappers share an optimizer": (
        loop(lambda trainer: type(trainer.sync)(chain(), [], trainer.optimizer)),
        {SSD: "another wrapper"},
    ),
    "two guards": ("guard", {(*ALL, *SSD): "already has"}),
    "other dtypes": (
        lambda s: Trainer(s, chain(), gathered=(torch.bfloat16, torch.float32)[dist.get_rank()]),
        {FSDP: DIFFER},
    ),
    "cpu_offload on one rank": (
        lambda s: Trainer(s, chain(), groups={"cpu_offload": dist.get_rank() == 0}),
        {FSDP: DIFFER},
    ),
    "other sizes": (lambda s: Trainer(s, nn.Linear(6, 1 + dist.get_rank())), {DDP: DIFFER}),
    "other names": (  # such as experts that are sharded over the ranks
        lambda s: Trainer(s, nn.ModuleDict({f"expert {dist.get_rank()}": nn.Linear(6, 6)})),
        {DDP: DIFFER},
    ),
    "replicas without shards": (
        lambda s: Trainer(s, chain(), groups={"replicate_group": dist.group.WORLD}),
        {FSDP: "needs a shard_group"},
    ),
    # of what forward and backward do
    "an unused parameter": (like("", "unused parameter"), UNUSED),
    "a skipped unit": (like("skipped"), {REPLICAS: "left out"}),
    "the last unit skipped": (
        like("last skipped"),
        {REPLICAS: "left out ['units.2.linear.weight', 'units.2.linear.bias'"},
    ),
    "a unit that one micro-batch skips": (  # ZeRO-2 reduces each micro-batch
        loop(lambda t: backward(skipped_at_first, t.model, partial(no_sync_of, t.sync))),
        {("zero-2",): "incomplete"},
    ),
    "a unit alone": ("unit_alone finish", {REPLICAS: "left out"}),
    "a backward that misses units": (like("detached"), {REPLICAS: "left out"}),
    "a saved tensor changed": (like("in place", "saves its output"), {ABSENT: "changed in place"}),
    "a part of a unit recomputed": (
        like("", "a part recomputed"),
        {ABSENT: "not in a checkpoint()"},
    ),
    "changed in place": (
        like("", "changes a parameter"),
        {ABSENT: "modified inplace", REPLICAS: "a forward has changed"},
    ),
    "two nested backwards": (like("two nested backwards"), {REPLICAS: "use_reentrant=False"}),
    "create_graph": ("double_backward", {(*ALL, *SSD): "create_graph=True"}),
    "sparse gradients": (sparse_gradients, {REPLICAS: "sparse"}),
    "autograd.grad of the shards": ("grad_of_shards", {FSDP: "no autograd.grad"}),
    "a hook after the guard": (
        "late_hooks train",
        {REPLICAS: "a gradient hook", FSDP: "hook a unit's output"},
    ),
    "a hook before the guard": (hook_before_the_guard, {REPLICAS: "a gradient hook"}),
    "a tensor hook on a shard": ("late_tensor_hooks train", {FSDP: "hook a unit's output"}),
    "an update in backward": (
        changed(
            lambda model: [
                p.register_post_accumulate_grad_hook(step_in_backward) for p in model.parameters()
            ]
        ),
        {REPLICAS: "step after the finish"},
    ),
    "gradients clipped in flight": ("backward clip finish", {AT_THE_END: "incomplete"}),
    "second backward": ("backward backward", {AT_THE_END: "no_sync"}),
    "no_sync too late": ("backward backward+", {AT_THE_END: "no_sync"}),
    "failed backward": (
        loop(failed_backward),
        {(*REPLICAS, *FSDP): "restart the run", SSD: "not 1 backward"},
    ),
    "an old graph": (loop(old_graph), STALE),
    "an input's gradient by an old graph": (loop(partial(old_graph, of_input=True)), STALE),
    "a loss of a kept tensor alone": (loop(kept_tensor_alone), UNUSED),
    "a parameter changed in an evaluation": (loop(changed_in_an_evaluation), {ABSENT: "in place"}),
    # of the order of a step
    "step before finish": ("backward step", {(*DDP, *FSDP): "incomplete", SSD: "and a finish"}),
    "step under no_sync": ("backward+ step", {AT_THE_END: "incomplete"}),
    "another inner optimizer": ("replace_inner", {STAGES_1_2: "has no setter"}),
    "an optimizer from elsewhere": (
        "backward finish step_elsewhere",
        {STAGES_1_2: "no all-gather"},
    ),
    "step without a backward": ("finish step", {REPLICAS: "left out", SSD: "not 1 backward"}),
    "a backward too many": ("backward backward finish step", {SSD: "not 1 backward"}),
    "every backward under no_sync": ("backward+ finish+", {AT_THE_END: "no_sync() left out"}),
    "PyTorch's clipping": ("backward finish clip", {STAGES_1_2: "sharded", ABSENT: "shards only"}),
    "04's clipping": ("backward finish clip_ours", {SSD: "step(max_norm) clips"}),
    "a late learning rate": ("backward finish change_lr step", {SSD: "learning rate"}),
    "no zero_grad": ("backward finish step backward", {FSDP: ONE_STEP, STAGES_1_2: "sharded"}),
    "two rounds and no step": (
        "backward finish backward finish",
        {FSDP: ONE_STEP, STAGES_1_2: "step() and zero_grad()"},
    ),
    "model.zero_grad": ("backward finish step model.zero_grad backward", {STAGES_1_2: ONE_STEP}),
    "clipping before finish": ("backward clip_ours", {(*STAGES_1_2, *FSDP): "incomplete"}),
    "zero_grad between micro-batches": ("backward+ zero_grad backward finish", {FSDP: ONE_STEP}),
    "zero_grad before finish": ("backward zero_grad finish", {(*DDP, *FSDP): ONE_STEP}),
    "gradients replaced before finish": ("backward scale_grads finish", {DDP: "incomplete"}),
    "other data": ("backward replace_grads finish", {DDP: "incomplete"}),
    "other data under no_sync": (
        "backward+ replace_grads backward",
        {AT_THE_END: "was replaced"},
    ),
    # of the model, after it was wrapped
    "a new layer": ("add_layer backward finish", {(*ALL, *SSD): "wrapped"}),
    "another layer": ("replace_layer backward finish", {REPLICAS: "wrapped", ABSENT: "not used"}),
    "all parameters assigned": ("assign backward finish", {REPLICAS: "before they are"}),
    "frozen afterwards": ("train freeze train", {REPLICAS: "freeze"}),
    "unfrozen": (loop("unfreeze train", frozen), {REPLICAS: "unfreeze"}),
    "resized": ("shorten_bias train", {REPLICAS: "resize"}),
    "another tensor as data": (
        "clone_bias train",
        {STAGES_1_2: "move or cast", ABSENT: "has been sharded"},
    ),
    "a parameter changed in place": ("train zero_bias train", {ABSENT: "has been sharded"}),
    "to": (loop(lambda trainer: trainer.model.to(torch.float64)), {ABSENT: "shards only"}),
    "state_dict": (loop(lambda trainer: trainer.model.state_dict()), {ABSENT: "shards only"}),
    "load_state_dict": (loop(lambda t: t.model.load_state_dict({})), {ABSENT: "shards only"}),
    "a copy": (loop(copied_with_a_group), {(*ALL, *SSD): "copy"}),
}


def misuse(strategy: str, name: str) -> str:
    do, _ = MISUSES[name]
    try:
        (loop(do) if isinstance(do, str) else do)(strategy)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        return f"error: {error}"
    return ""


@pytest.mark.parametrize(
    ("strategy", "name", "message"),
    [
        pytest.param(s, name, message, id=f"{s}-{name}")
        for name, (_, messages) in MISUSES.items()
        for strategies, message in messages.items()
        for s in strategies
    ],
)
def test_what_breaks_the_contract_is_an_error(pools, strategy, name, message):
    for said in pools(2).run(misuse, strategy, name):
        assert said and message in said, said


def flat_buffers(sync) -> list:
    return [*getattr(sync, "buckets", ()), *getattr(sync, "units", ())]


# ---- what is allowed is exact ----


# functions of the model and of `no_sync` run backward, or return what it begins with


def evaluate_around_a_backward(model: nn.Module, _) -> None:
    with torch.inference_mode():
        model(batch(7))
    model(batch()).square().sum().backward()
    with torch.no_grad():
        model(batch(8))


def kept_too(model: nn.Module, _) -> Tensor:
    return torch.cat([model(batch()), units_of(model)[1].kept[0]])


def units_of(model: nn.Module) -> nn.ModuleList:
    return getattr(model, "module", model).units


def of_batch(model: nn.Module, _) -> Tensor:
    return model(batch())


def of_input(model: nn.Module, _) -> Tensor:
    return model(batch().requires_grad_())


def skipped_at_first(model: nn.Module, no_sync: Callable) -> Tensor:
    """By the first of two micro-batches."""
    module = getattr(model, "module", model)
    module.how = "skipped"
    with no_sync():
        model(batch()).square().sum().backward()
    module.how = ""
    return model(batch(1))


def zeros_in_a_bias(model: nn.Module, _) -> Tensor:
    nn.init.zeros_(units_of(model)[1].linear.bias)
    return model(batch())


def other_data_in_a_bias(model: nn.Module, _) -> Tensor:
    bias = units_of(model)[1].linear.bias
    bias.data = bias.data.clone()
    return model(batch())


def twice_backward(model: nn.Module, no_sync: Callable) -> None:
    loss = model(batch()).square().sum()
    with no_sync():
        loss.backward(retain_graph=True)
    loss.backward()


def no_sync_alone(model: nn.Module, no_sync: Callable) -> None:
    with no_sync():
        model(batch()).square().sum().backward()


def gradient_penalty(model: nn.Module, _) -> Tensor:
    x = batch().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return torch.cat([model(x), grad])


def gradient_of_an_input_first(model: nn.Module, _) -> Tensor:
    x = batch().requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    return model(batch())


def gradient_of_an_input_last(model: nn.Module, _) -> None:
    x = batch().requires_grad_()
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, x)


def checkpointed_units(model: nn.Module, _, use_reentrant: bool = False) -> Tensor:
    for unit in units_of(model):
        if not hasattr(unit, "plain_forward"):
            unit.plain_forward = unit.forward
            unit.forward = partial(checkpoint, unit.forward, use_reentrant=use_reentrant)
    return of_input(model, _)


ALLOWED = {
    "a step": (of_batch, chain()),
    "other values": (of_batch, chain(change=lambda m: m.register_buffer("b", torch.ones(1)))),
    "tied": (of_batch, chain(change=lambda m: tie(m.units[1]))),
    "frozen": (of_batch, chain(change=lambda m: m.units[1].linear.bias.requires_grad_(False))),
    "a unit that one micro-batch skips": (skipped_at_first, chain()),
    "a parameter changed in place": (zeros_in_a_bias, chain()),
    "another tensor as data": (other_data_in_a_bias, chain()),
    "a forward of stale parameters": (of_batch, chain()),
    "two forwards": (lambda model, _: model(batch()) * model(batch(1)).cos(), chain()),
    "evaluations around a backward": (evaluate_around_a_backward, chain()),
    "an output changed in place": (of_batch, chain("in place")),
    "a tensor kept beside the output": (kept_too, chain("", "keeps a tensor")),
    "a detached weight": (of_input, chain("", "detached weight")),
    "two backward passes of a graph": (twice_backward, chain()),
    "checkpoints around units": (checkpointed_units, chain()),
    "reentrant checkpoints": (partial(checkpointed_units, use_reentrant=True), chain()),
    "every backward under no_sync": (no_sync_alone, chain()),
    "units in another order": (of_batch, chain("other order")),
    "a unit twice": (of_batch, chain("twice")),
    "a skipped unit": (of_batch, chain("skipped")),
    "the last unit skipped": (of_batch, chain("last skipped")),
    "a complex view of a weight": (of_batch, chain("", "a complex view")),
    "a sparse tensor": (of_batch, chain("", "a sparse tensor")),
    "the gradient of an input alone, last": (gradient_of_an_input_last, chain()),
    "a backward that misses units": (of_batch, chain("detached")),
    "a tuple with a dict of lists": (of_batch, chain("", "tuple")),
    "a recurrent unit, which keeps a list of its parameters": (of_batch, recurrent()),
    "gradient penalty": (gradient_penalty, chain()),
    "the gradient of an input alone, first": (gradient_of_an_input_first, chain()),
    "a checkpoint": (lambda model, _: checkpoint(model, batch(), use_reentrant=False), chain()),
    "a unit alone": (lambda model, _: units_of(model)[1](batch()), chain()),
    "two nested backwards": (of_batch, chain("two nested backwards")),
}


def backward(run: Callable, model: nn.Module, no_sync: Callable = nullcontext) -> None:
    output = run(model, no_sync)
    if output is not None:
        output.square().sum().backward()


def distance(strategy: str, name: str) -> float:
    """The largest difference of a parameter from the plain model's, after two steps. With replicas
    each has two micro-batches."""
    run, model = ALLOWED[name]
    plain, ours = copy.deepcopy(model), copy.deepcopy(model)
    # without a guard a step leaves the versions of what it changes as they are
    is_guarded = name != "a forward of stale parameters"
    if name == "other values":  # the first rank's count; units take equal buffers alone
        buffers = ours.buffers() if strategy in REPLICAS else ()
        for tensor in (*ours.parameters(), *buffers):
            tensor.data += dist.get_rank()
    trainer, replicas = trainer_of(strategy, ours, guarded=is_guarded), "/" in strategy
    optimizer = SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        if replicas:
            backward(run, trainer.model)
            backward(run, plain)
        backward(run, trainer.model, partial(no_sync_of, trainer.sync))
        trainer.sync.finish_gradient_synchronization()
        if strategy not in DDP:
            assert any(each.shard.grad is not None for each in flat_buffers(trainer.sync))
        if name == "a forward of stale parameters":
            trainer.model(batch(7))  # they are unsharded once more before the step
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)
        backward(run, plain)
        optimizer.step()
        optimizer.zero_grad()
    found = trainer.parameters()
    assert all(map(torch.equal, ours.buffers(), plain.buffers()))
    return max((found[n] - p.detach()).abs().max().item() for n, p in plain.named_parameters())


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        (name, strategy)
        for name, strategy in product(ALLOWED, (*ALL, "fsdp/2"))
        if not any(strategy.split("/")[0] in on for on in MISUSES.get(name, ("", ()))[1])
    ],
)
def test_what_the_contract_allows_is_exact_also_with_replicas(pools, name, strategy):
    for off in pools(4 if "/" in strategy else 2).run(distance, strategy, name):
        assert off <= 1e-6


@fake_ranks(2)
def gathers_and_bytes_left(strategy: str, trains: bool) -> tuple[int, int]:
    """Of a forward whose output is dropped. The last of four units, an LSTM, keeps a list of its
    parameters."""
    trainer = trainer_of(strategy, recurrent())
    gc.collect()
    before = live_bytes()
    with whole_ledger() as ledger, torch.set_grad_enabled(trains):
        trainer.model(batch())
    if trains:  # frees the unit that FSDP keeps for backward
        trainer.sync.finish_gradient_synchronization()
    gc.collect()
    return sum(ledger.calls.values()), live_bytes() - before


@pytest.mark.parametrize(
    "strategy, trains",
    [("zero-3", True), ("fsdp", True), *((strategy, False) for strategy in UNITS)],
)
def test_a_forward_without_a_backward_gathers_each_unit_once_and_leaves_none(
    pools, strategy, trains
):
    assert pools(1, group=False).run(gathers_and_bytes_left, strategy, trains) == [(4, 0)]


@fake_ranks(2)
def train_compiled_units(strategy: str) -> None:
    trainer = trainer_of(strategy, chain())
    for unit in trainer.plain.units:
        unit.compile(backend="eager")
    train(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero-3", "fsdp"])
def test_units_can_be_compiled_under_a_guard(pools, strategy):
    pools(1, group=False).run(train_compiled_units, strategy)


def pickled(strategy: str) -> None:
    trainer, file = trainer_of(strategy, chain()), io.BytesIO()
    train(trainer)
    torch.save(trainer.model, file)
    file.seek(0)
    found = torch.load(file, weights_only=False)
    assert torch.equal(found(batch()), trainer.model(batch())) and not hasattr(found, "guard")


@pytest.mark.parametrize("strategy", ["ddp", "zero-2"])
def test_a_module_that_stays_complete_can_be_pickled(pools, strategy):
    pools(2).run(pickled, strategy)
