"""Stage 11, Muon: the update bit for bit, owners, costs, and checkpoints on other ranks."""

from __future__ import annotations

from functools import partial
from itertools import chain
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import WorkerExit, load_stage, stage_path
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from common.model import Transformer, TransformerConfig, init_weights

from common.job.arguments import PRESETS

stage = load_stage("11")

SIZE = "--d-model 32 --n-layers 2 --n-heads 4 --seq-len 16 --global-batch-size 24 --log-every 1"
BASE = [*SIZE.split(), "--lr", "1e-2"]
CONFIG = TransformerConfig(201, 32, 2, 4, 16)  # of BASE, with the vocabulary of the tests' corpus

# ---- orthogonalization ----


def polynomial(s: Tensor) -> Tensor:
    """What five iterations do to a singular value."""
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


@pytest.mark.parametrize("shape", [(96, 32), (32, 32), (32, 128)], ids=str)
@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 2e-5), (torch.bfloat16, 0.1)])
def test_orthogonalize_changes_the_singular_values_alone(shape, dtype, off):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    expected = u @ polynomial(s / s.norm()).diag() @ v
    found = stage.orthogonalize(matrix.to(dtype))
    assert (found.dtype, found.shape) == (dtype, matrix.shape)
    assert (found.double() - expected).norm() <= off * expected.norm()
    values = torch.linalg.svdvals(found.double())
    assert 0.6 < values.min() and values.max() < 1.3


def test_the_readme_says_where_five_iterations_bring_singular_values():
    five = polynomial(torch.linspace(1 / 660, 1, 100_001, dtype=torch.float64))
    readme = stage_path("11").with_name("README.md").read_text()
    assert f"is between {five.min():.2f} and {five.max():.2f}" in readme


def test_a_zero_gradient_is_no_direction():
    assert not stage.orthogonalize(torch.zeros(4, 8)).any()


# ---- the update ----


def weights_of_one_process() -> list[Tensor]:
    """The matrices after three steps of `torch.optim.Muon`, which computes in bfloat16.

    With nesterov=False it normalizes its momentum in place in PyTorch 2.13 and 2.14.1, not in 2.15.
    """
    model = Transformer(CONFIG)
    init_weights(model, seed=1)
    weights = [p for p in model.layers.parameters() if p.dim() == 2]
    muon = torch.optim.Muon(weights, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        muon.param_groups[0]["lr"] = 0.01 * (step + 1)
        for weight, grad in zip(weights, gradients(weights, step), strict=True):
            weight.grad = grad
        muon.step()
    return [w.detach() for w in weights]


def gradients(weights: list[Tensor], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(w.shape, generator=generator) for w in weights]


def model_and_owners() -> tuple[Transformer, dict[nn.Parameter, int]]:
    model = Transformer(CONFIG)
    init_weights(model, seed=1)
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    return model, stage.choose_owners(matrices, dist.get_world_size())


def owners_weights(reduces: bool) -> list[Tensor]:
    """The matrices after three steps, when all ranks have the same gradients.

    reduces: through the reduce to the owner, which is exact for a power of two of equal numbers.
    Otherwise the owner is given the gradient.
    """
    model, owners = model_and_owners()
    named = {name: p for name, p in model.named_parameters() if p in owners}
    weights = list(named.values())
    muon = stage.Muon(owners, lr=0.1, dtype=torch.bfloat16)
    for step in range(3):
        stage.set_learning_rate(muon, 0.01 * (step + 1))
        for w, g in zip(weights, gradients(weights, step), strict=True):
            w.grad = g if reduces or w in muon.owned else stage.NoGradient(w)
        if reduces:
            stage.reduce_gradients(named.items(), muon)
        muon.step()
        muon.zero_grad(set_to_none=True)
    return [w.detach() for w in weights]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_update_equals_muon_on_one_process_bit_for_bit(pools, ranks):
    expected = pools(1, group=False).run(weights_of_one_process)[0]
    for reduces in [False] if ranks == 3 else [False, True]:
        for found in pools(ranks).run(owners_weights, reduces):
            assert all(map(torch.equal, found, expected)), f"reduces: {reduces}"


# ---- owners ----


def matrices_of(d: int, layers: int) -> list[Tensor]:
    """The matrices of a model, in its order."""
    shapes = [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)] * layers
    return [torch.empty(shape, device="meta") for shape in shapes]


@pytest.mark.parametrize(
    ("preset", "ranks", "balance", "idle"),
    [("gpt2", 8, 1.02, 0), ("gpt2", 64, 1.71, 16), ("gpt2-xl", 64, 1.10, 0)],
)
def test_work_is_balanced_while_there_are_more_matrices_than_ranks(preset, ranks, balance, idle):
    matrices = matrices_of(*PRESETS[preset][:2])
    owners = stage.choose_owners(matrices, ranks)
    assert set(owners) == set(matrices)
    work = [0] * ranks
    for matrix, owner in owners.items():
        work[owner] += stage.orthogonalization_flops(matrix)
    assert max(work) * ranks / sum(work) == pytest.approx(balance, abs=0.005)
    assert work.count(0) == idle
    # in the order of the updates every rank has one matrix before any has two
    first = list(owners.values())[: ranks - idle]
    assert len(set(first)) == ranks - idle


def test_flops_of_an_orthogonalization_are_those_of_its_matmuls():
    for shape in ((96, 32), (32, 32), (32, 128)):
        with FlopCounterMode(display=False) as counter:
            stage.orthogonalize(torch.randn(shape))
        assert counter.get_total_flops() == stage.orthogonalization_flops(torch.empty(shape))


def owned_here() -> list[bool]:
    """Of each matrix. This rank alone has its momentum, and its average gradient."""
    model, owners = model_and_owners()
    muon = stage.Muon(owners, lr=0.1)
    assert {p for p in muon.state if "momentum_buffer" in muon.state[p]} == muon.owned.keys()
    order = [id(p) for p in owners]  # a set's would depend on the process, and so the norm's bits
    assert [id(p) for p in muon.owned] == sorted(map(id, muon.owned), key=order.index)
    tokens = torch.arange(16)[None] + dist.get_rank()
    model(tokens, tokens + 1).backward()
    averages = [p.grad / dist.get_world_size() for p in model.parameters()]
    for grad in averages:
        dist.all_reduce(grad)
    stage.reduce_gradients(model.named_parameters(), muon)
    total = torch.cat([grad.flatten() for grad in averages]).norm()
    norm = stage.clip_grad_norm_(model, muon, 0.5 * float(total))
    torch.testing.assert_close(norm, total, rtol=1e-5, atol=0)
    for p, grad in zip(model.parameters(), averages, strict=True):
        if p in owners and p not in muon.owned:
            assert isinstance(p.grad, stage.NoGradient)
        else:
            torch.testing.assert_close(p.grad, 0.5 * grad, rtol=1e-4, atol=1e-7)
    return [p in muon.owned for p in owners]


def test_each_matrix_has_one_owner_that_alone_has_its_gradient_and_momentum(pools):
    every = pools(3).run(owned_here)
    assert all(sum(of_ranks) == 1 for of_ranks in zip(*every, strict=True))


def order_of_a_step() -> tuple[list[str], list[str]]:
    """The calls of a rank in a step, and those expected."""
    _, owners = model_and_owners()
    muon, order = stage.Muon(owners, lr=0.1), []
    for p in owners:
        p.grad = torch.ones_like(p) if p in muon.owned else stage.NoGradient(p)

    class Sending:
        def wait(self) -> None:
            order.append("wait")

    compute = muon.orthogonalize
    muon.orthogonalize = lambda x: (order.append("compute"), compute(x))[1]
    with patch.object(stage, "broadcast", lambda *_, **__: (order.append("send"), Sending())[1]):
        muon.step(meanwhile=lambda: order.append("AdamW"))
    each = [["compute"] * (p in muon.owned) + ["send"] for p in owners]
    return order, [*chain(*each), "AdamW", *["wait"] * len(each)]


def test_an_update_is_broadcast_while_the_next_is_computed(pools):
    for order, expected in pools(2).run(order_of_a_step):
        assert order == expected


# ---- what is right, or an error ----


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


class Shift(nn.Linear):
    """The gradient of its matrix `shift` has the memory of the one that flows on."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(8, 8)
        self.shift = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x).unsqueeze(0) + self.shift.unsqueeze(0)) * 3


def stepped(case: str) -> list[Tensor]:
    """The parameters after two clipped steps, on equal inputs of all ranks."""
    build, choose, frozen = RIGHT[case]
    model = build()
    params = dict(model.named_parameters())
    if frozen:
        params[frozen].requires_grad_(False)
    matrices = [p for name, p in params.items() if choose(name, p)]
    owners = stage.choose_owners(matrices, dist.get_world_size())
    others = [p for p in params.values() if p not in owners]
    muon = stage.Muon(owners, lr=0.1, dtype=torch.float32)
    optimizers = muon, torch.optim.AdamW(others, lr=0.1)
    x = torch.randn(16, 8)
    for _ in range(2):
        model(x).square().sum().backward()
        stage.reduce_gradients(model.named_parameters(), muon)
        stage.clip_grad_norm_(model, muon, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in params.values()]


def is_matrix(name: str, p: Tensor) -> bool:
    return p.dim() == 2


RIGHT = {  # model, what Muon gets, and what is frozen
    "a frozen bias": (small, is_matrix, "0.bias"),
    "a frozen matrix": (small, lambda name, p: name == "0.weight", "1.weight"),
    "one matrix on several ranks": (small, lambda name, p: name == "0.weight", ""),
    "a gradient that flows on": (lambda: nn.Sequential(Shift()), is_matrix, ""),
}


@pytest.mark.parametrize("case", RIGHT)
def test_unusual_parameters_are_as_on_one_process(case, pools):
    (expected,) = pools(1).run(stepped, case)
    for found in pools(2).run(stepped, case):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def trained_once() -> tuple:
    model = small()
    owners = stage.choose_owners([model[0].weight, model[1].weight], dist.get_world_size())
    muon = stage.Muon(owners, lr=0.1)
    model(torch.ones(1, 8)).sum().backward()
    stage.reduce_gradients(model.named_parameters(), muon)
    return model, muon


def another_ranks_state(model, muon) -> None:
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, muon.state_dict())
    muon.load_state_dict(states[dist.get_rank() - 1])


def step_too_early(model, muon) -> None:
    muon.zero_grad()
    model(torch.ones(1, 8)).sum().backward()
    muon.step()


def reduce_again(model, muon) -> None:
    stage.reduce_gradients(model.named_parameters(), muon)


def backward_again(model, muon) -> None:
    model(torch.ones(1, 8)).sum().backward()


def missing(name: str, model, muon) -> None:
    model.zero_grad()
    model(torch.ones(1, 8)).sum().backward()
    model.get_parameter(name).grad = None
    with patch.object(dist, "all_reduce", None), patch.object(dist, "all_to_all_single", None):
        stage.reduce_gradients(model.named_parameters(), muon)


def stale_graph(model, muon) -> None:
    """On a rank that does not own the last matrix, too."""
    loss = model(torch.ones(1, 8)).sum()
    muon.step()
    loss.backward()


ERRORS = {  # what is done on every rank after one backward, and what is said
    "a stale graph": (stale_graph, "modified by an inplace operation"),
    "a step before the gradients": (step_too_early, "before reduce_gradients"),
    "gradients reduced twice": (reduce_again, "this gradient is incomplete or sharded"),
    "backward before zero_grad": (backward_again, "this gradient is incomplete or sharded"),
    "a matrix without a gradient": (partial(missing, "1.weight"), "no gradient: 1.weight"),
    "a bias without a gradient": (partial(missing, "1.bias"), "no gradient, .*: 1.bias"),
    "a convolution": (lambda *_: stage.Muon({nn.Conv1d(8, 8, 1).weight: 0}, 0.1), "2-D"),
    "a complex matrix": (
        lambda *_: stage.Muon({nn.Linear(8, 8, dtype=torch.complex64).weight: 0}, 0.1),
        "takes real",
    ),
    "float16": (
        lambda model, _: stage.Muon({model[0].weight: 0}, 0.1, dtype=torch.float16),
        "become zero in torch.float16",
    ),
    "a vector": (lambda model, _: stage.Muon({model[0].bias: 0}, 0.1), "2-D"),
    "a frozen matrix": (
        lambda model, _: stage.Muon({model[0].weight.requires_grad_(False): 0}, 0.1),
        "parameters that train",
    ),
    "a closure": (lambda model, muon: muon.step(lambda: 0.0), "positional argument"),
    "a second group": (
        lambda model, muon: muon.add_param_group({"params": [model[0].bias]}),
        "Muon has one group",
    ),
    "another rank's state": (another_ranks_state, "the momentum of another rank"),
}


def error_of(case: str) -> str:
    misuse, said = ERRORS[case]
    with pytest.raises((ValueError, RuntimeError, TypeError), match=said) as error:
        misuse(*trained_once())
    return str(error.value)


@pytest.mark.parametrize("case", ERRORS)
def test_a_misuse_is_an_error_on_every_rank(case, pools):
    assert all(pools(2).run(error_of, case))


# ---- checkpoints ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "into", "lacks"), [("02", "11", "optim.exp_avg.layers"), ("11", "02", "optim.momentum")]
)
def test_a_checkpoint_of_the_other_optimizer_is_an_error(
    pools, corpus_dir, tmp_path, of, into, lacks
):
    argv = [*BASE, "--steps", "2", "--data", str(corpus_dir)]
    pools(2).train(of, [*argv, "--run-dir", str(tmp_path), "--checkpoint-every", "2"])
    with pytest.raises(WorkerExit) as exit:
        pools(2).train(into, [*argv, "--resume", str(tmp_path)])
    assert exit.value.statuses == [2, 2]
    said = "".join(exit.value.stderr)
    assert said.count("\n") == 1 and f"has {lacks}" in said and "which this model lacks" in said
