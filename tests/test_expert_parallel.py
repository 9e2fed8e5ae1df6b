"""Stage 09: gradients for the same routing, communication, memory, balance, checkpoints.

Runs that differ only in rounding part at near ties (`routing.py` of 09). So these use float64, the
recorded routing of one process, or one expert.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import assert_same_curve, comparably, load_stage, train
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from common.counter_rng import sample_keys
from common.model import MLP, Transformer, TransformerConfig, init_weights

from tools.dry_run import PATCHES, dry_run

pytestmark = pytest.mark.slow

SIZE = "--d-model 32 --n-layers 2 --n-heads 2 --seq-len 16 --global-batch-size 12".split()
RUN = [*SIZE, *"--steps 12 --log-every 1".split()]
CONFIG = load_stage("09").MixtureConfig(200, d_model=32, n_layers=2, n_heads=2, seq_len=16)


def group_of(size: int) -> dist.ProcessGroup:
    """This rank's group of `size` neighbours."""
    group, _ = dist.new_subgroups(size)
    return group


def expert_model(config: TransformerConfig, group: dist.ProcessGroup, seed: int = 1) -> Transformer:
    model = load_stage("09").expert_parallel(Transformer(config), group)
    init_weights(model, seed)
    return model


@contextmanager
def everything_in_float64():
    """The parameters, and what the model computes in float32 whatever their dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        with patch.object(Tensor, "float", Tensor.double):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


# ---- parity ----


@pytest.mark.quick_cases("1-float32-0")
@pytest.mark.parametrize(
    ("size", "dtype", "clip"), [(1, "float32", "0"), (1, "bfloat16", "0"), (3, "float32", "0.3")]
)
def test_one_expert_is_the_dense_model(pools, reference, corpus_dir, size, dtype, clip):
    """Without clipping, by a norm whose sum has other terms, every loss has stage 01's bits."""
    argv = [*RUN, "--steps", "50", "--dtype", dtype, "--grad-clip", clip, "--data", str(corpus_dir)]
    expected = reference(argv)
    for metrics in pools(size).train("09", [*argv, "--n-experts", "1", "--top-k", "1"]):
        assert_same_curve(metrics, expected)
        assert clip != "0" or [x["loss"] for x in metrics] == [x["loss"] for x in expected]


# ---- gradients ----


class DenseLoop(nn.Module):
    """The reference, without anything of stage 09: every expert computes every token, and weights
    that are zero for the experts not chosen add up the results."""

    def __init__(self, mixture: nn.Module):
        super().__init__()
        self.router, self.experts, self.top_k = mixture.router, mixture.experts, mixture.top_k
        self.bias = mixture.bias

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(x, self.router.weight).softmax(-1)
        ranking = (scores + self.bias).argsort(-1, descending=True).argsort(-1)
        weights = scores * (ranking < self.top_k)
        if self.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for weight, expert in zip(weights.unbind(-1), self.experts.values(), strict=True):
            w1, w2 = expert.w1.weight, expert.w2.weight
            y = y + weight[..., None] * F.linear(F.gelu(F.linear(x, w1)), w2)
        return y


def dense_loop(config: TransformerConfig) -> Transformer:
    model = expert_model(config, group_of(1))
    for layer in model.layers.values():
        layer.mlp = DenseLoop(layer.mlp)
    return model


def differences_from_a_dense_loop(
    ep: int, micro_batches: int = 1, starved: int = 0, **changes
) -> dict[str, float]:
    """Relative differences of the gradients and the norm from those of a dense loop in one process,
    in float64. starved: the last experts that biases keep from being chosen."""
    stage, rank, size = load_stage("09"), dist.get_rank(), dist.get_world_size()
    config, n = replace(CONFIG, **changes), micro_batches
    batch = torch.randint(200, (n, size, 17), generator=torch.Generator().manual_seed(5))
    group, replicas = group_of(ep), stage.group_along((size // ep, ep), 0, "replicas", 60)
    with everything_in_float64():
        bias = 0.3 * torch.randn(config.n_experts, generator=torch.Generator().manual_seed(6))
        bias[config.n_experts - starved :] = -9.0
        whole, model = dense_loop(config), expert_model(config, group)
        for layer in (*whole.layers.values(), *model.layers.values()):
            layer.mlp.bias.copy_(bias)
        for i, tokens in enumerate(batch):
            keys = sample_keys(1, 0, torch.arange(size) + size * i)
            (whole(tokens[:, :-1], tokens[:, 1:], keys) / n).backward()
            own = slice(rank, rank + 1)
            (model(tokens[own, :-1], tokens[own, 1:], keys[own]) / n).backward()
        replicated, sharded = stage.replicated_and_sharded(model)
        stage.average_gradients(replicated)
        stage.average_gradients(sharded, replicas)
        expected = {name: p.grad for name, p in whole.named_parameters()}
        norm = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()
        found = {"norm": abs(stage.clip_grad_norm_(model, 1e9) / norm - 1).item()}
    for name, p in model.named_parameters():
        scale = expected[name].norm().clamp(min=1e-9)
        found[name] = ((p.grad - expected[name]).norm() / scale).item()
    assert all(g.any() for name, g in expected.items() if "router" in name)
    return found


SHAPES = [  # ranks, ranks of a set, and what else
    (2, 2, {"top_k": 8}),
    (3, 3, {"n_experts": 12, "top_k": 8}),
    (4, 4, {"top_k": 1, "micro_batches": 2}),
    (4, 2, {"dropout": 0.1, "activation_checkpointing": True}),
    (4, 2, {"micro_batches": 2, "starved": 5}),
    (4, 1, {"n_experts": 3}),
]


@pytest.mark.quick_cases("3-3-n_experts-top_k")
@pytest.mark.parametrize(
    ("size", "ep", "changes"), SHAPES, ids=["-".join(map(str, [n, ep, *c])) for n, ep, c in SHAPES]
)
def test_every_gradient_equals_that_of_a_dense_loop_in_float64(pools, size, ep, changes):
    """The router's too, which every rank has from its own tokens only."""
    every = pools(size).run(differences_from_a_dense_loop, ep, **changes)
    worst = max((off, name) for found in every for name, off in found.items())
    assert worst[0] < 1e-12, worst


# ---- memory ----


def balanced(self, scores: Tensor) -> Tensor:
    """In place of `choose`: every expert gets as many rows."""
    return (torch.arange(len(scores) * self.top_k) % self.n_experts).view(-1, self.top_k)


def real_step(argv: list[str]):
    stage = load_stage("09")
    with patch.multiple(stage, **PATCHES), patch.object(stage.MixtureOfExperts, "choose", balanced):
        return stage.main(argv)


@pytest.mark.parametrize("own", [["--ep", "2"], ["--ep", "4", "--activation-checkpointing"]])
def test_dry_run_holds_and_sends_what_a_balanced_run_does(pools, corpus_dir, own):
    argv = [*SIZE, *own]
    dry = pools(1, group=False).run(dry_run, "09", 4, 3, argv, 201)[0]
    real = pools(4).run(real_step, [*argv, "--data", str(corpus_dir)])[3]
    for kind in ("sent", "parameters", "gradients", "optimizer"):
        assert getattr(dry, kind) == getattr(real, kind), kind


def saved_for_backward(top_k: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of floating-point activations that a balanced mixture keeps, and tokens."""
    stage, d = load_stage("09"), 256
    config, group = replace(CONFIG, d_model=d, top_k=top_k), dist.group.WORLD
    mixture = stage.MixtureOfExperts(d, config.n_experts, top_k, lambda _: MLP(config), group)
    init_weights(mixture, 1)
    weights = {p.untyped_storage().data_ptr() for p in mixture.parameters()}
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    x = torch.randn(8, 16, d, requires_grad=True)
    with (
        patch.object(stage.MixtureOfExperts, "choose", balanced),
        saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16),
    ):
        mixture(x)
    return sum(storage.nbytes() for storage in kept.values()), 8 * 16


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_a_mixture_keeps_what_the_formula_says(pools, top_k):
    d, formula = 256, {torch.float32: 4 * (9 + 2 * top_k), torch.bfloat16: 20 + 4 * top_k}
    for dtype, per_feature in formula.items():
        for kept, tokens in pools(2).run(saved_for_backward, top_k, dtype):
            scores = 4 * tokens * (2 * 8 + top_k)  # at most: logits, scores, the chosen's weights
            assert 0 <= kept - tokens * d * per_feature <= scores, (dtype, kept)


# ---- balance and the number of parameters ----


def gradient_of_copies() -> float:
    """Under bfloat16, the error of a token's gradient against the float64 sum over its copies."""
    stage = load_stage("09")
    config = replace(CONFIG, top_k=8)
    mixture = stage.MixtureOfExperts(32, config.n_experts, 8, lambda _: MLP(config), group_of(1))
    x, grad = torch.randn(64, 32, requires_grad=True), torch.randn(64, 32)
    weights, chosen = torch.randn(64, 8).softmax(-1), torch.arange(8).expand(64, 8)
    with (
        torch.autocast("cpu", torch.bfloat16),
        patch.object(mixture, "route", lambda _: (weights, chosen)),
        patch.object(mixture, "run_experts", lambda rows, _: rows),
    ):
        mixture(x).backward(grad)
    copies = (grad[:, None] * weights[..., None]).bfloat16().double()
    return ((x.grad - copies.sum(1)).norm() / x.grad.norm()).item()


def test_gradients_of_a_tokens_copies_add_up_in_float32(pools):
    assert pools(1).run(gradient_of_copies)[0] < 1e-6


def balanced_by(rate: float) -> tuple:
    stage = load_stage("09")
    model = expert_model(replace(CONFIG, n_experts=4, n_layers=2), group_of(2))
    first, second = stage.mixtures_of(model)
    first.load = torch.tensor([[7, 1, 2, 0], [1, 1, 2, 2]][dist.get_rank()])  # 8, 2, 4, 2
    second.load = torch.tensor([2, 2, 2, 2])
    load = stage.balance_load(model, rate)
    assert first.load == 0  # the next step counts again
    return load.item(), first.bias.tolist(), second.bias.tolist()


def test_biases_move_against_the_load_of_all_ranks(pools):
    """By steps of rate / E, and their mean stays zero."""
    for load, first, second in pools(2).run(balanced_by, 2.0):
        assert load == (2.0 + 1.0) / 2
        assert first == [-0.625, 0.375, -0.125, 0.375] and second == [0.0] * 4


def weights_far_below(gap: float) -> tuple:
    """The weights of two experts that biases choose, whose logits are `gap` and `gap` + 1 below the
    largest, under bfloat16; and the gradient of the first weight for all logits."""
    mixture = expert_model(replace(CONFIG, n_experts=4), group_of(1)).layers["0"].mlp
    with torch.no_grad():
        mixture.router.weight[:, 0] = torch.tensor([0.0, -gap, -gap - 1, -3.0])
    mixture.bias.copy_(torch.tensor([-9.0, 9.0, 8.0, 0.0]))
    with torch.autocast("cpu", torch.bfloat16):
        weights, chosen = mixture.route(torch.eye(32)[:1])
    assert chosen.tolist() == [[1, 2]]
    weights[0, 0].backward()
    return weights[0].tolist(), mixture.router.weight.grad[:, 0].tolist()


@pytest.mark.parametrize("gap", [20.0, 95.0, 110.0, 1000.0])
def test_biases_choose_experts_and_weights_are_exact_far_below_the_largest_logit(pools, gap):
    """Their scores are zero in float32 from a gap of about 104 on; a ratio of scores is NaN.
    bfloat16 has no 1001."""
    weights, gradient = pools(1).run(weights_far_below, gap)[0]
    larger, smaller = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))
    assert weights == pytest.approx([larger, smaller], rel=1e-6)
    slope = larger * smaller
    assert gradient == pytest.approx([0, slope, -slope, 0], rel=1e-5)


def of_mixture(case: str) -> object:
    """What a copier's loop may do with a mixture; returns an error, or what it should leave."""
    stage, group = load_stage("09"), dist.group.WORLD
    sizes = {"two sizes": [4, 8], "five experts": [5]}.get(case, [4])
    make = lambda index: nn.Linear(8, 8)  # noqa: E731
    try:
        top_k = 9 if case == "nine per token" else 2
        model = nn.Sequential(*(stage.MixtureOfExperts(8, n, top_k, make, group) for n in sizes))
        mixture = model[0].train(case != "evaluation")
        if case == "bfloat16":
            model.bfloat16()
            assert mixture.route(torch.ones(2, 8).bfloat16())[0].dtype == torch.float32
            for _ in range(400):
                mixture.load = torch.tensor([0, 2, 1, 1])
                stage.balance_load(model, rate=0.0004)
            return mixture.bias[0].item()
        with torch.autocast("cpu", torch.float16, enabled=case == "float16"):
            y = model(x := torch.ones(3, 8, requires_grad=True))
        if case == "second derivative":
            (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            grad.sum().backward()
        if case == "frozen":
            mixture.router.requires_grad_(False)
            mixture.experts[str(2 * dist.get_rank())].bias.requires_grad_(False)
            model.zero_grad()
            model(x).sum().backward()
            return stage.clip_grad_norm_(model, 1.0).isfinite().item()
        if case == "meta device":
            mixture.bias.fill_(7)  # what the memory held before
            for module in model.modules():
                getattr(module, "reset_parameters", lambda: None)()
            return mixture.bias.abs().sum().item()
        if case == "new experts":  # as of to_empty, after the mixture was built
            state = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
            model(x).sum().backward()
            return sum(expert.bias.grad.sum() for expert in mixture.experts.values()).item()
        stage.balance_load(nn.Tanh() if case == "no mixture" else model, 0.1)
    except (RuntimeError, ValueError) as error:
        return str(error)


MIXTURES = {
    "two sizes": "equal size, but got [4] at entry 0 and [8]",
    "no mixture": "non-empty",
    "five experts": "5 experts on 2 ranks",
    "nine per token": "9 per token",
    "evaluation": "counted no tokens",
    "float16": "GradScaler",
    "second derivative": "once_differentiable",
}


@pytest.mark.quick
@pytest.mark.parametrize("case", MIXTURES)
def test_a_misuse_of_a_mixture_is_an_error(pools, case):
    for said in pools(2).run(of_mixture, case):
        assert MIXTURES[case] in said, said


@pytest.mark.quick
def test_a_cast_frozen_or_replaced_mixture_is_exact(pools):
    assert pools(2).run(of_mixture, "bfloat16") == pytest.approx([400 * 0.0001] * 2, rel=1e-3)
    assert all(pools(2).run(of_mixture, "frozen"))
    assert pools(2).run(of_mixture, "meta device") == [0, 0]
    # of 3 tokens per rank the weights add up to 3, for each of 8 features, averaged over the ranks
    assert sum(pools(2).run(of_mixture, "new experts")) == pytest.approx(3 * 8)


def test_a_configuration_counts_the_active_parameters():
    """test_costs.py counts all."""
    dense = TransformerConfig(200, 32, 2, 2, 16).num_parameters()
    for top_k in (1, 2, 4):
        active = replace(CONFIG, top_k=top_k).num_active_parameters()
        assert active == dense + 2 * 32 * 8  # the routers of two layers


# ---- checkpoints ----


def test_a_checkpoint_resumes_on_other_meshes(pools, corpus_dir, tmp_path):
    """The biases too: without them a replayed run would choose other experts, and it fails if its
    choice differs from the recorded one without a near tie."""

    def run(size: int, how: str, argv: list[str]) -> list[list[dict]]:
        return pools(size).run(comparably, train, how, str(tmp_path), "09", argv)

    argv = [*RUN, "--data", str(corpus_dir), "--dropout", "0.1"]
    flags = lambda name, *more: [*argv, "--run-dir", str(tmp_path / name), *more]  # noqa: E731
    (whole,) = run(1, "record", flags("whole", "--micro-batch-size", "3"))
    _, step_of = torch.load(next(tmp_path.glob("routing-*.pt")), weights_only=True)
    assert {*step_of.values()} == {*range(len(whole))}
    saved = flags("saved", "--checkpoint-every", "8", "--keep-checkpoints", "9")
    run(2, "replay", saved)
    after_8 = str(tmp_path / "saved" / "checkpoints" / "step-00000008")
    for size, own in ((1, []), (4, []), (4, ["--ep", "2"])):
        rest = flags(f"resumed-{size}{len(own)}", "--resume", after_8, *own)
        for metrics in run(size, "replay", rest):
            assert_same_curve(metrics, whole[8:])
