"""Stage 06: the contract, backward in two parts; the mesh of 07."""

from __future__ import annotations

import copy
from collections import Counter, deque
from dataclasses import replace
from functools import partial
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from harness import load_stage
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from common.counter_rng import sample_keys
from common.model import Transformer, TransformerConfig, init_weights

pytestmark = pytest.mark.slow

CONFIG = TransformerConfig(vocab_size=200, d_model=32, n_layers=8, n_heads=4, seq_len=16)
MICRO, SEQ = 2, 16


def micro_batches(m: int) -> list[tuple]:
    tokens = torch.randint(200, (m, MICRO, SEQ + 1), generator=torch.Generator().manual_seed(5))
    keys = sample_keys(1, 0, torch.arange(m * MICRO)).view(m, MICRO)
    return [(t[:, :-1], t[:, 1:], k) for t, k in zip(tokens, keys, strict=True)]


def pipeline_of(schedule: str, config: TransformerConfig, autocast: bool = False):
    """A pipeline over all ranks, and this rank's part of the model."""
    stage, p, rank = load_stage("06"), dist.get_world_size(), dist.get_rank()
    units = stage.units_of(rank, p, config.n_layers)
    model = Transformer(config, indices=units)
    init_weights(model, 1)
    groups = [dist.new_group(group_desc=to) for to in ("to_lower", "to_higher")]
    kind = stage.ZeroBubbleStage if schedule == "zero-bubble" else stage.PipelineStage
    stages = {rank: kind(*stage.parts_of(model, units), autocast)}
    shape = lambda tokens: (*tokens.shape, config.d_model)  # noqa: E731
    return stage.Pipeline(stages, stage.SCHEDULES[schedule], *groups, shape), model


# ---- the contract ----


class Part(nn.Sequential):
    def forward(self, x: torch.Tensor, keys=None) -> torch.Tensor:
        return super().forward(x)


class Constant(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.ones_like(x))


class Transposed(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # as of nn.MultiheadAttention
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Float16(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return super().forward(x).float()


MISUSES = {  # what is wrong, and the message of at least one rank
    "autocast": "not [2, 3, 8] in torch.bfloat16",
    "width": "a message is [2, 3, 16]",
    "another width": "ranks differ",
    "another number": "ranks differ",
    "one evaluates": "ranks differ",
    "no layers": "needs layers",
    "float16": "float16",
    "all frozen": "all frozen",
    "odd": "multiple of 2",
    "not contiguous": "isend takes contiguous tensors",
    "two stages": "exactly once",
    "another stage class": "exactly once",
    "hooks": "would never run",
    "an embedding before": "an input requires a gradient",
    "unused input": "a part does not use its input",
}
ALLOWED = ["plain", "uneven", "shared weight", "frozen layers", "evaluation", "autocast outside"]


def small_pipeline(case: str) -> tuple[list, list, tuple[float, float], list]:
    """Losses, norms and weight gradients of four small layers on two ranks with what `case` names:
    the pipeline's and the plain model's."""
    stage, rank = load_stage("06"), dist.get_rank()
    torch.manual_seed(0)
    v = 2 if case in ("odd", "two stages", "evaluation") else 1
    m = 3 if case in ("odd", "evaluation") else 2
    layers = [nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()) for _ in range(4)]
    x, y = torch.randn(2, 2 * m, 3, 8)
    if case == "an embedding before":
        x = nn.Embedding(8, 8)(torch.randint(8, (4, 3)))
    if case == "unused input":
        layers[2] = Constant(8, 8)
    if case == "uneven":
        x, y = x[:3], y[:3]
    if case == "autocast":
        layers = [layer[:1] for layer in layers]
    if case == "not contiguous":
        layers[1] = Transposed()
    if case in ("all frozen", "frozen layers"):
        layers[0].requires_grad_(False)
        layers[2].requires_grad_(False)
    if case == "all frozen":
        layers[1], x = layers[1].requires_grad_(False), torch.randint(8, (4, 3))
        layers[0] = nn.Embedding(8, 8).requires_grad_(False)
    if case == "shared weight":
        layers[1][0].weight, layers[3][0].weight = layers[0][0].weight, layers[2][0].weight
    if case == "float16":
        layers[2 * rank] = Float16(8, 8)
    if case == "no layers":
        layers = [nn.Sequential(), nn.Sequential(), *layers[2:]]
    plain, each, loss = copy.deepcopy(nn.Sequential(*layers)), 2 // v, nn.MSELoss()
    batches = [(a, b, None) for a, b in zip(x.chunk(m), y.chunk(m), strict=True)]
    if case == "another number":
        batches += batches * rank
    zero_bubble = case in ("another stage class", "hooks", "frozen layers", "shared weight")
    parts = {s: Part(*layers[s * each : (s + 1) * each]) for s in range(rank, 2 * v, 2)}
    stages = {}
    for s, part in parts.items():
        stages[s] = stage.PipelineStage(part, loss if s == 2 * v - 1 else None, case == "autocast")
        if zero_bubble:
            stages[s].__class__, stages[s].pending = stage.ZeroBubbleStage, deque()
            for layer in part:
                layer[0] = stage.DeferredLinear(layer[0], stages[s].pending)
                if case == "hooks":
                    layer[0].weight.register_hook(lambda grad: grad)
    takes_both = zero_bubble and case != "another stage class"
    schedule = stage.zero_bubble if takes_both else stage.one_f_one_b
    if m == 3:
        schedule = partial(stage.interleaved_1f1b, v=2)
    width = 16 if case == "width" or (case == "another width" and rank) else 8
    groups = dist.new_group(), dist.new_group()
    pipeline = stage.Pipeline(stages, schedule, *groups, lambda x: (*x.shape[:2], width))
    with torch.set_grad_enabled(case != "evaluation" and not (case == "one evaluates" and rank)):
        with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast outside"):
            losses = pipeline.run(batches).tolist()
        expected = [loss(plain(a), b) for a, b, _ in batches]
        if torch.is_grad_enabled():
            (sum(expected) / len(batches)).backward()
    own = [parameter for part in parts.values() for parameter in part.parameters()]
    theirs = [plain[s * each : (s + 1) * each].parameters() for s in parts]
    pairs = [(p.grad, q.grad) for p, q in zip(own, chain(*theirs), strict=True)]
    norm = stage.clip_grad_norm_(nn.ModuleList(parts.values()), 1e9).item()
    plain_norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item()
    return losses, [value.item() * rank for value in expected], (norm, plain_norm), pairs


def test_an_outer_autocast_keeps_no_weights_of_an_earlier_step():
    class Half(nn.Linear):
        def forward(self, x, keys=None):
            return super().forward(x).float()

    part = Half(8, 8)
    stage_ = load_stage("06").PipelineStage(part, nn.MSELoss(), autocast=True)
    batch = x, *_ = torch.ones(2, 8), torch.zeros(2, 8), None, 1
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            first = stage_.forward(0, *batch)
            part.weight.mul_(2)
        assert stage_.forward(0, *batch) > 1.5 * first
        stage_.backward(0, None)
    assert part.weight.grad is not None and not x.requires_grad  # the caller's own


@pytest.mark.parametrize("case", MISUSES)
def test_what_does_not_fit_is_an_error(pools, case):
    ended = pools(2).attempt(small_pipeline, case)
    assert any(MISUSES[case] in (outcome.traceback or "") for outcome in ended), ended


@pytest.mark.parametrize("case", ALLOWED)
def test_what_the_contract_allows_is_exact(pools, case):
    for losses, expected, norms, pairs in pools(2).run(small_pipeline, case):
        assert losses == pytest.approx(expected) and norms[0] == pytest.approx(norms[1])
        for ours, theirs in pairs:
            assert (ours is None) == (theirs is None)
            torch.testing.assert_close(ours, theirs)


def tied_norm() -> tuple[float, float]:
    """As the README says: of a parameter that two ranks hold."""
    stage, weight = load_stage("06"), nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 1.0 + dist.get_rank())
    dist.all_reduce(weight.grad)
    weight.grad /= 2**0.5
    norm = stage.clip_grad_norm_(nn.ParameterList([weight]), 1.0).item()
    return norm, (weight.grad * 2**0.5).norm().item()


def test_tied_parameters_are_clipped_as_the_readme_says(pools):
    for norm, after in pools(2).run(tied_norm):
        assert norm == pytest.approx(27**0.5) and after == pytest.approx(1.0)


# ---- 07's mesh ----

MESHES = {
    "too few ranks": r"a mesh of \(1, 1, 1\) ranks does not have 2",
    "two stages alone": "one rank alone takes one stage",
}


def misuse_of_a_mesh(case: str) -> None:
    stage = load_stage("07")
    stages = {i: stage.PipelineStage(nn.Linear(8, 8), None, False) for i in range(2)}
    with pytest.raises(ValueError, match=MESHES[case]):
        mesh = stage.build_mesh(1, 1 if case == "too few ranks" else 2, 1, 60, torch.device("cpu"))
        groups = mesh.to_lower, mesh.to_higher
        stage.Pipeline(stages, stage.interleaved_1f1b, *groups, lambda x: x.shape)


@pytest.mark.parametrize("case", MESHES)
def test_what_a_mesh_does_not_take_is_an_error(pools, case):
    pools(2).run(misuse_of_a_mesh, case)


def sharded_optimizer(pp: int, dp: int) -> tuple:
    """Of a layer with a frozen bias and one that trains, on a mesh of pp x dp."""
    stage = load_stage("07")
    mesh = stage.build_mesh(pp, dp, 1, 60, torch.device("cpu"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 8))
    model[0].bias.requires_grad_(False)
    optimizer = stage.DistributedOptimizer(model, torch.optim.AdamW, mesh.dp, lr=0.1)
    return stage, mesh, model, optimizer


def norm_and_weights(pp: int, dp: int) -> list:
    """The norm of gradients of ones on each pipeline stage, and the weights after a step."""
    stage, mesh, model, optimizer = sharded_optimizer(pp, dp)
    for p in optimizer.params.values():
        p.grad = torch.ones_like(p)
    optimizer.zero_grad()  # of a step that the loop skips
    assert all(p.grad is None for p in model.parameters())
    for p in optimizer.params.values():  # on average over dp, ones
        p.grad = torch.full_like(p, 2 * mesh.dp.rank() / (dp - 1) if dp > 1 else 1.0)
    optimizer.reduce_scatter_gradients()
    assert all(p.grad is None for p in model.parameters())
    parts = optimizer.gradients()
    assert sum(map(torch.numel, parts.values())) + optimizer.padding * (
        mesh.dp.rank() == dp - 1
    ) == len(optimizer.shard)
    norm = stage.clip_grad_norm_(model, optimizer, 1e9, mesh).item()
    optimizer.step()
    optimizer.zero_grad()
    return [norm, [p.detach().clone() for p in model.parameters()]]


@pytest.mark.parametrize("pp, dp", [(1, 2), (2, 1), (1, 3)])
def test_the_optimizer_updates_what_trains_as_one_without_shards(pools, pp, dp):
    """56 elements, which are no multiple of 3: the last shard is padded."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 8))
    plain[0].bias.requires_grad_(False)
    adamw = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    for p in adamw.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    adamw.step()
    for norm, weights in pools(pp * dp).run(norm_and_weights, pp, dp):
        assert norm == pytest.approx((pp * (24 + 24 + 8)) ** 0.5)
        torch.testing.assert_close(weights, [p.detach() for p in plain.parameters()])


def misuse_of_the_optimizer() -> None:
    stage, mesh, model, optimizer = sharded_optimizer(1, 2)
    with pytest.raises(RuntimeError, match="no gradient: 0.weight, 1.weight, 1.bias"):
        optimizer.reduce_scatter_gradients()
    frozen = nn.Linear(8, 8).requires_grad_(False)
    for wrong in (frozen, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).half())):
        with pytest.raises(ValueError, match="parameters that train, all of one dtype"):
            stage.DistributedOptimizer(wrong, torch.optim.AdamW, mesh.dp)


def test_a_missing_gradient_and_parameters_that_it_cannot_take_are_errors(pools):
    pools(2).run(misuse_of_the_optimizer)


# ---- backward in two parts ----


def test_zero_bubble_takes_no_layer_that_it_cannot_train():
    stage, embedding = load_stage("06"), nn.Embedding(4, 4).requires_grad_(False)
    deferred = stage.DeferredLinear(nn.Linear(4, 4, bias=False), deque())
    nn.init.zeros_(deferred.weight)
    deferred.reset_parameters()  # as nn.Linear's: uniform in (-1/2, 1/2)
    assert 0.1 < deferred.weight.std() < 0.5
    with pytest.raises(ValueError, match="x needs a gradient"):
        deferred(embedding(torch.arange(4)))
    x = torch.ones(1, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(deferred(x).sum(), x, create_graph=True)


MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmm_")


class MatmulCounter(TorchDispatchMode):
    """Counts matmuls by operator and by the shapes of the operands in their order."""

    def __init__(self):
        super().__init__()
        self.seen: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in MATMULS:
            shapes = [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]
            self.seen[(name.rstrip("_"), *shapes)] += 1
        return func(*args, **(kwargs or {}))


def gradients_and_matmuls(schedule: str, changes: dict, bf16: bool) -> tuple[dict, Counter, dict]:
    """Of a run whose gradients are added to existing ones."""
    pipeline, model = pipeline_of(schedule, replace(CONFIG, **changes), autocast=bf16)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 1 + number)
    by_kind: dict = {}
    total = MatmulCounter()
    run_action = pipeline.run_action

    def counted(action, *rest):
        with MatmulCounter() as matmuls:
            result = run_action(action, *rest)
        by_kind[action.kind] = matmuls.seen
        total.seen.update(matmuls.seen)
        return result

    pipeline.run_action = counted
    pipeline.run(micro_batches(5))
    return {n: p.grad for n, p in model.named_parameters()}, total.seen, by_kind


@pytest.mark.quick_cases("float32")
@pytest.mark.parametrize(
    ("changes", "bf16"),
    [({}, False), ({"activation_checkpointing": True, "dropout": 0.2}, True)],
    ids=["float32", "bfloat16-checkpointing"],
)
def test_all_schedules_are_bitwise_identical_with_the_same_matmuls(pools, changes, bf16):
    """Also where backward has two parts."""
    expected = pools(2).run(gradients_and_matmuls, "1f1b", changes, bf16)
    for schedule in ("gpipe", "zero-bubble"):
        found = pools(2).run(gradients_and_matmuls, schedule, changes, bf16)
        for (theirs, matmuls, _), (ours, same, by_kind) in zip(expected, found, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours), schedule
            assert matmuls and matmuls == same
            if schedule == "zero-bubble":
                # four linear layers in each of a rank's four layers: W computes the weight
                # gradients, B the gradients of the inputs, and what is recomputed
                assert by_kind["W"].total() == 4 * 4
                assert by_kind["B"].total() == 4 * 4 * (2 if changes else 1)
