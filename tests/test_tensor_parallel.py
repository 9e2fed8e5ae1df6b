"""Stage 05: the sharded loss, memory and overlap; logits stay sharded."""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import REPO, PeakMemory, live_bytes, load_stage
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.loss import IGNORED
from common.model import Output, Transformer, TransformerConfig

pytestmark = pytest.mark.slow

CONFIG = TransformerConfig(vocab_size=200, d_model=64, n_layers=2, n_heads=4, seq_len=32)
BATCH, TOKENS = 3, 3 * 32


def parallel_model(config: TransformerConfig, sequence_parallel: bool) -> Transformer:
    stage, group = load_stage("05"), dist.group.WORLD
    with torch.device("meta"):
        model = Transformer(config)
    stage.tensor_parallel(model, group, sequence_parallel)
    stage.init_shards(model, 1, group, torch.device("cpu"))
    return model


def gathered(local: torch.Tensor, dim: int | None) -> torch.Tensor:
    """All-gather the shards along `dim`; with None, check that all ranks hold equal replicas."""
    shards = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, local.contiguous())
    if dim is None:
        assert all(torch.equal(local, s) for s in shards), "a replica differs"
        return local
    return torch.cat(shards, dim)


# ---- the loss ----


def cross_entropy_alone(scale: float, dtype: torch.dtype) -> None:
    """With some targets ignored, none, and all."""
    stage, rank, size = load_stage("05"), dist.get_rank(), dist.get_world_size()
    close = {"rtol": 0.01, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 0, "atol": 1e-6}
    torch.manual_seed(0)
    for n_ignored in (7, 0, 20):
        logits = (torch.randn(20, 32) * scale).to(dtype).requires_grad_()
        targets = torch.randint(32, (20,))
        targets[:n_ignored] = IGNORED
        local = logits.detach().chunk(size, 1)[rank].clone().requires_grad_()
        loss = stage.vocab_parallel_cross_entropy(local * 1.0, targets, dist.group.WORLD)
        (3.0 * loss).backward()
        if n_ignored == 20:
            assert loss == 0.0 and not local.grad.any()
            return
        expected = F.cross_entropy(logits.float(), targets)
        (3.0 * expected).backward()
        assert loss.dtype == torch.float32 and gathered(loss.detach(), None).isfinite()
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gathered(local.grad, 1), logits.grad, **close)


@pytest.mark.quick_cases("torch.float32-1.0", "torch.bfloat16-10000.0")
@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_vocab_parallel_cross_entropy_matches_the_plain_loss(pools, scale, dtype):
    pools(4).run(cross_entropy_alone, scale, dtype)


def cross_entropy_of_masked_logits() -> None:
    """Mask some logits, all of one rank's, and all of an ignored token with minus infinity."""
    stage, rank, size = load_stage("05"), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    logits = torch.randn(6, 32)
    logits[:, ::2] = logits[1, :16] = logits[2, 16:] = -torch.inf
    targets = torch.tensor([1, 17, 3, 5, 31, IGNORED])
    for ignored_is_masked in (False, True):
        if ignored_is_masked:
            logits[5] = -torch.inf
        plain = logits.clone().requires_grad_()
        local = logits.chunk(size, 1)[rank].clone().requires_grad_()
        loss = stage.vocab_parallel_cross_entropy(local * 1.0, targets, dist.group.WORLD)
        loss.backward()
        expected = F.cross_entropy(plain, targets)
        expected.backward()
        assert expected.isfinite()
        torch.testing.assert_close(loss, expected)
        # PyTorch's gradient of an ignored token without a finite logit is NaN
        counted = slice(5 if ignored_is_masked else 6)
        torch.testing.assert_close(gathered(local.grad, 1)[counted], plain.grad[counted])


@pytest.mark.quick
def test_logit_of_minus_infinity_leaves_the_loss_finite(pools):
    pools(2).run(cross_entropy_of_masked_logits)


# ---- memory ----


class LargestTensor(TorchDispatchMode):
    """The size of the largest floating-point tensor that any operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                self.elements = max(self.elements, t.numel())
        return out


def largest(sequence_parallel: bool) -> tuple[int, int]:
    changes = replace(CONFIG, vocab_size=5000)
    inputs, targets = torch.randint(5000, (2, BATCH, 32))
    model = parallel_model(changes, sequence_parallel)
    with LargestTensor() as seen:
        model(inputs, targets).backward()
    with LargestTensor() as seen_in_evaluation, torch.no_grad():
        model(inputs, targets)
        assert model(inputs).shape[-1] == changes.padded_vocab // dist.get_world_size()
    return seen.elements, seen_in_evaluation.elements


@pytest.mark.quick_cases("tp")
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_logits_are_never_gathered(pools, sequence_parallel):
    for elements in pools(4).run(largest, sequence_parallel):
        assert elements == (TOKENS * 5120 // 4, TOKENS * 5120 // 4)


def start_up() -> tuple[int, int, int]:
    """Bytes of the shards, the peak while they are initialized, and the largest parameter."""
    before = live_bytes()
    with PeakMemory() as peak:
        model = parallel_model(replace(CONFIG, n_layers=6), False)
    shards = sum(p.numel() for p in model.parameters()) * 4
    assert live_bytes() - before == shards == peak.left
    return shards, peak.above, 256 * 64 * 4


def test_model_is_never_materialized_unsharded(pools):
    full, norms = replace(CONFIG, n_layers=6).num_parameters() * 4, 13 * 64 * 4
    for shards, peak, largest in pools(4).run(start_up):
        assert shards == (full - norms) // 4 + norms
        # one full parameter as it is sampled, and its scaled copy
        assert peak <= shards + 2 * largest < full


# ---- overlap ----


def ends_of_matmul_and_collective(sequence_parallel: bool) -> tuple[float, float] | None:
    """When the weight gradient's matmul and the collective end, with rank 1 half a second late.

    In microseconds of rank 0's trace.
    """
    stage, rank, size = load_stage("05"), dist.get_rank(), dist.get_world_size()
    kind = stage.SequenceParallelRegion if sequence_parallel else stage.TensorParallelRegion
    linear = stage.ColumnParallelLinear(nn.Linear(64, 96, bias=False), kind(dist.group.WORLD))
    x = torch.randn(4, 16 // (size if sequence_parallel else 1), 64, requires_grad=True)
    y = linear(x)
    grad = torch.randn_like(y)
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        y.backward(grad)
    events = trace.events()
    matmuls = sorted(e.time_range.end for e in events if e.name == "aten::mm")
    collectives = [e.time_range.end for e in events if e.name.startswith("gloo:")]
    assert len(matmuls) == 2 and len(collectives) == 1
    return None if rank else (matmuls[1], collectives[0])


@pytest.mark.wall_clock
@pytest.mark.quick
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_backward_overlaps_the_all_reduce_with_the_weight_gradients_matmul(
    pools, sequence_parallel
):
    matmul, collective = pools(2).run(ends_of_matmul_and_collective, sequence_parallel)[0]
    assert collective - matmul > 200e3, "the matmul has waited for the collective"


# ---- the contract: what does not fit is an error (07's copies are equal: test_diffs.py) ----


def plain_linear(size: int = 8) -> nn.Linear:
    return nn.Linear(size, size, bias=False)


LOST = {  # what is done to a linear layer, and what is said by each module that replaces one
    "a bias": (lambda layer: nn.Linear(16, 16), "bias"),
    "a parametrization": (nn.utils.parametrizations.spectral_norm, "original|parametrizations"),
    "an older one": (nn.utils.spectral_norm, "weight_orig"),
    "a subclass of the same name": (
        lambda layer: type("Linear", (nn.Linear,), {})(16, 16, bias=False),
        "class Linear",
    ),
    "a hook": (lambda layer: layer.register_forward_hook(lambda *_: None), "_forward_hooks"),
    "a buffer": (lambda layer: layer.register_buffer("mask", torch.ones(16)), "mask|_buffers"),
    "a forward of its own": (lambda layer: setattr(layer, "forward", torch.abs), "forward"),
}
OF_A_WEIGHT = {
    "a hook": (lambda layer: layer.weight.register_hook(torch.zeros_like), "hooks of a parameter"),
    "an attribute": (lambda layer: setattr(layer.weight, "no_decay", True), "attributes or"),
    "a complex dtype": (lambda layer: layer.to(torch.complex64), "specific to torch.complex64"),
}
FIELDS = [{"padding_idx": 0}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}]


def what_is_replaced() -> None:
    stage = load_stage("05")
    region = stage.TensorParallelRegion(dist.group.WORLD)
    sharded = stage.ColumnParallelLinear, stage.RowParallelLinear
    deferred = partial(load_stage("06").DeferredLinear, pending=deque())
    float8 = partial(load_stage("10").Float8Linear, recipe="rowwise")
    checked = [*(partial(module, region=region) for module in sharded), deferred, float8]
    for replacement, (change, said) in product(checked, (*LOST.values(), *OF_A_WEIGHT.values())):
        changed = change(plain := plain_linear(16))
        with pytest.raises(ValueError, match=said):
            replacement(changed if isinstance(changed, nn.Module) else plain)
    for module in sharded:
        with pytest.raises(ValueError, match=r"of \(6, 6\) is not divisible by 4 ranks"):
            module(nn.Linear(6, 6, bias=False), region)
        ours = module(plain_linear().double().requires_grad_(False).eval(), region)
        with pytest.raises(RuntimeError, match="before it is sharded"):
            ours.reset_parameters()
        carried = ours.weight.dtype, ours.weight.requires_grad, ours.training
        assert carried == (torch.float64, False, False)
    for fields in FIELDS:
        with pytest.raises(ValueError, match=f"would lose: {[*fields][0]}"):
            stage.VocabParallelEmbedding(nn.Embedding(8, 8, **fields), region)
    with pytest.raises(ValueError, match=r"dimension 0 of \(6, 8\) is not divisible by 4 ranks"):
        stage.VocabParallelEmbedding(nn.Embedding(6, 8), region)
    output = Output(CONFIG)
    output.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match="would lose: _forward_pre_hooks"):
        stage.VocabParallelOutput(output, region)


def test_a_replaced_module_loses_nothing(pools):
    pools(4).run(what_is_replaced)


def out_of_vocabulary() -> None:
    stage, group = load_stage("05"), dist.group.WORLD
    embedding = stage.VocabParallelEmbedding(nn.Embedding(8, 4), stage.TensorParallelRegion(group))
    local = torch.randn(2, 4)
    for wrong in (-1, 8, -101):
        with pytest.raises(IndexError):
            embedding(torch.tensor([[1, wrong]]))
        targets = torch.tensor([1, wrong])
        with pytest.raises(RuntimeError, match=f"index {wrong} is out of bounds"):
            stage.vocab_parallel_cross_entropy(local.clone(), targets, group)


@pytest.mark.quick
def test_ids_outside_of_the_vocabulary_are_errors(pools):
    pools(2).run(out_of_vocabulary)


def derivatives_and_dtypes() -> None:
    stage, group = load_stage("05"), dist.group.WORLD
    region = stage.TensorParallelRegion(group)
    column = stage.ColumnParallelLinear(plain_linear(), region)
    row = stage.RowParallelLinear(plain_linear(), region)
    x = torch.randn(2, 3, 8, requires_grad=True)
    loss = partial(stage.vocab_parallel_cross_entropy, targets=torch.arange(6), group=group)
    for y in (column(x), row(column(x)), loss(column(x).flatten(0, 1))):
        with pytest.raises(RuntimeError, match="create_graph"):
            torch.autograd.grad(y.sum(), x, create_graph=True)
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="float16"):
        row(column(x))
    for dtype in (torch.float16, torch.complex64, torch.int32):  # in f alone
        with pytest.raises(ValueError, match=str(dtype).removeprefix("torch.")):
            column(x.detach().to(dtype))
    with torch.autocast("cpu", torch.bfloat16):  # which casts neither of them
        for dtype in (torch.complex64, torch.int32):
            with pytest.raises(ValueError, match=str(dtype).removeprefix("torch.")):
                column(x.detach().to(dtype))


def test_second_derivatives_and_float16_are_errors(pools):
    pools(2).run(derivatives_and_dtypes)


def replicated_gradients(number: str) -> None:
    """07 has a `clip_grad_norm_` of its own."""
    stage, group = load_stage(number), dist.group.WORLD
    names = SimpleNamespace(**stage.tensor_parallel.__globals__)  # of the file that defines it
    column = names.ColumnParallelLinear(plain_linear(), names.TensorParallelRegion(group))
    assert [*stage.shard_dims_of(column)] == ["weight"]
    column.norm, rank = nn.RMSNorm(4), dist.get_rank()
    column(torch.ones(1, 1, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="without a gradient: freeze it"):
        stage.all_reduce_replicated_gradients(column, group)
    column.norm.weight.grad = torch.full((4,), 1.0 + rank)  # of each rank's own features or heads
    if number == "07":
        alone = dist.new_subgroups(1)[0]
        optimizer = stage.DistributedOptimizer(column, torch.optim.AdamW, alone)
        optimizer.reduce_scatter_gradients()
        arguments = optimizer, 1.0, SimpleNamespace(tp=group, pp=alone, dp=alone)
    else:
        arguments = 1.0, group
    with pytest.raises(RuntimeError, match="replicated parameters differ"):
        stage.clip_grad_norm_(column, *arguments)


@pytest.mark.parametrize("number", ["05", "07"])
def test_replicated_gradients_that_differ_or_are_missing_are_errors(pools, number):
    pools(2).run(replicated_gradients, number)


def test_dropout_seeded_as_the_readme_says_differs_between_shards():
    """As a rank's own state and rank tell: other places on another rank, the same ones again."""
    readme = (REPO / "05_tensor_parallel/README.md").read_text()
    (lines,) = re.findall(r"`(with torch.random.fork_rng.*?)`", readme)

    def drop(rank: int, micro: int = 0) -> torch.Tensor:
        names = {"seed": 1, "step": 2, "micro": micro, "layer": 3, "rank": rank}
        space = {"torch": torch, "dropout": nn.Dropout(0.5), "x": torch.ones(64, 64), **names}
        exec(lines, space)
        return space["x"] == 0

    state = torch.get_rng_state()
    assert torch.equal(drop(0), drop(0)) and torch.equal(state, torch.get_rng_state())
    for other in (drop(1), drop(0, micro=1)):
        assert 0.4 < (drop(0) == other).float().mean() < 0.6


def norm_with_frozen_layers() -> float:
    """Of a sharded layer [8, 8], a replicated bias [8], and as many frozen ones."""
    stage, group = load_stage("05"), dist.group.WORLD
    region, frozen = stage.TensorParallelRegion(group), plain_linear().requires_grad_(False)
    model = nn.Sequential(
        stage.ColumnParallelLinear(plain_linear(), region),
        nn.Linear(8, 8),
        stage.RowParallelLinear(frozen, region),
    )
    model[1].weight.requires_grad_(False)
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    stage.all_reduce_replicated_gradients(nn.Sequential(model[0], frozen), group)
    return stage.clip_grad_norm_(model, 1.0, group).item()


def test_a_frozen_parameter_has_no_share_in_the_norm(pools):
    assert pools(2).run(norm_with_frozen_layers) == pytest.approx([(8 * 8 + 8) ** 0.5] * 2)
