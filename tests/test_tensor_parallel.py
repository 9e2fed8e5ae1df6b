"""Stage 05: the sharded loss, dropout, memory and overlap; logits stay sharded."""

from __future__ import annotations

import itertools
import time
from statistics import mode

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import PeakMemory, live_bytes, load_stage
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.counter_rng import sample_keys
from common.loss import IGNORED
from common.model import Transformer, TransformerConfig, init_weights

pytestmark = pytest.mark.slow

CONFIG = TransformerConfig(vocab_size=200, d_model=64, n_layers=2, n_heads=4, seq_len=32)
BATCH, TOKENS = 3, 3 * 32


def config(**changes) -> TransformerConfig:
    return TransformerConfig(**{**vars(CONFIG), **changes})


def batch(ignored: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.randint(200, (BATCH, 33), generator=torch.Generator().manual_seed(5))
    targets = tokens[:, 1:].clone()
    targets[0, :ignored] = IGNORED
    return tokens[:, :-1], targets, sample_keys(1, 0, torch.arange(BATCH))


def plain_model(config: TransformerConfig, seed: int = 1) -> Transformer:
    model = Transformer(config)
    init_weights(model, seed)
    return model


def parallel_model(config: TransformerConfig, sequence_parallel: bool, seed: int = 1):
    stage, group = load_stage("05"), dist.group.WORLD
    with torch.device("meta"):
        model = Transformer(config)
    stage.tensor_parallel(model, group, sequence_parallel)
    stage.init_shards(model, seed, group, torch.device("cpu"))
    return model


def region_of(sequence_parallel: bool):
    stage = load_stage("05")
    kind = stage.SequenceParallelRegion if sequence_parallel else stage.TensorParallelRegion
    return kind(dist.group.WORLD)


def gathered(local: torch.Tensor, dim: int | None) -> torch.Tensor:
    """All-gather the shards along `dim`; with None, check that all ranks hold equal replicas."""
    shards = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, local.contiguous())
    if dim is None:
        assert all(torch.equal(local, s) for s in shards), "a replica differs"
        return local
    return torch.cat(shards, dim)


# ---- the loss ----


def cross_entropy_alone(scale: float, n_ignored: int, dtype: torch.dtype) -> None:
    stage, rank, size = load_stage("05"), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
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
    close = {"rtol": 0.01, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 0, "atol": 1e-6}
    torch.testing.assert_close(gathered(local.grad, 1), logits.grad, **close)


@pytest.mark.quick_cases("torch.float32-7-1.0", "torch.bfloat16-7-10000.0")
@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("n_ignored", [0, 7, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_vocab_parallel_cross_entropy_matches_the_plain_loss(pools, scale, n_ignored, dtype):
    for size in (2, 4):
        pools(size).run(cross_entropy_alone, scale, n_ignored, dtype)


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


def second_backward() -> None:
    stage = load_stage("05")
    logits = torch.randn(4, 8, requires_grad=True)
    loss = stage.vocab_parallel_cross_entropy(logits * 1.0, torch.arange(4), dist.group.WORLD)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_second_backward_is_an_error(pools):
    pools(2).run(second_backward)


def dropped() -> None:
    """Pass ones through every dropout: the masks are those of the plain model."""
    inputs, _, keys = batch()
    changes = config(dropout=0.5)
    plain = plain_model(changes)
    for sequence_parallel in (False, True):
        model = parallel_model(changes, sequence_parallel)
        sites = [m for m in model.modules() if type(m).__name__ == "CounterDropout"]
        twins = [m for m in plain.modules() if type(m).__name__ == "CounterDropout"]
        assert len(sites) == 1 + 2 * changes.n_layers
        size = dist.get_world_size() if sequence_parallel else 1
        for ours, theirs in zip(sites, twins, strict=True):
            local = ours(torch.ones(BATCH, 32 // size, 64), keys)
            full = gathered(local, 1 if sequence_parallel else None)
            assert torch.equal(full, theirs(torch.ones(BATCH, 32, 64), keys))


@pytest.mark.quick
def test_dropout_is_bitwise_identical_to_the_plain_model(pools):
    pools(2).run(dropped)
    pools(4).run(dropped)


# ---- communication ----


L = CONFIG.n_layers


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
    inputs, targets, _ = batch()
    changes = config(vocab_size=5000)
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
        model = parallel_model(config(n_layers=6), False)
    shards = sum(p.numel() for p in model.parameters()) * 4
    assert live_bytes() - before == shards == peak.left
    return shards, peak.above, 256 * 64 * 4


@pytest.mark.parametrize("size", [2, 4])
def test_model_is_never_materialized_unsharded(pools, size):
    full, norms = config(n_layers=6).num_parameters() * 4, 13 * 64 * 4
    for shards, peak, largest in pools(size).run(start_up):
        assert shards == (full - norms) // size + norms
        # one full parameter as it is sampled, and its scaled copy
        assert peak <= shards + 2 * largest < full


def kept_between_layers(sequence_parallel: bool) -> int:
    """Bytes that a forward keeps for backward under activation checkpointing."""
    inputs, _, _ = batch()
    changes = config(activation_checkpointing=True)
    model = Transformer(changes, units=range(L + 1))  # all but the output unit
    stage = load_stage("05")
    stage.tensor_parallel(model, dist.group.WORLD, sequence_parallel)
    for p in model.parameters():
        nn.init.normal_(p, std=0.02)
    left, outputs = [], []
    for _ in range(7):  # the mode: a thread of Gloo may still hold a sent tensor
        with PeakMemory() as peak:
            outputs.append(model(inputs))
        left.append(peak.left)
    assert all(y.requires_grad for y in outputs)
    return mode(left)


@pytest.mark.wall_clock  # a thread of Gloo may still hold what it has sent
@pytest.mark.quick_cases("2")
@pytest.mark.parametrize("size", [2, 4])
def test_activation_memory_between_layers_is_divided_by_the_degree(pools, size):
    replicated = pools(size).run(kept_between_layers, False)[0]
    assert replicated == (L + 1) * TOKENS * 64 * 4
    assert pools(size).run(kept_between_layers, True) == [replicated // size] * size


def saved_shapes(sequence_parallel: bool) -> list[tuple[int, ...]]:
    """Shapes of the activations that one layer saves for backward, each storage once."""
    model = parallel_model(CONFIG, sequence_parallel)
    parameters = {p.data_ptr() for p in model.parameters()}
    seq = 32 // dist.get_world_size() if sequence_parallel else 32
    x = torch.randn(BATCH, seq, 64, requires_grad=True)
    saved = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.is_floating_point() and t.data_ptr() not in parameters:
            saved[t.untyped_storage().data_ptr()] = t
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        y = model.layers["0"](x)
    assert y.requires_grad
    return [tuple(t.shape) for t in saved.values()]


def test_activations_saved_under_sequence_parallelism(pools):
    """Attention and MLP keep their all-gathered inputs: gathering them again in backward would cost
    communication. All other activations are sharded."""
    total = pools(2).run(saved_shapes, False)[0].count((BATCH, 32, 64))
    assert total >= 4  # the inputs of two norms, of attention and of the MLP, and the norms' own
    for shapes in pools(2).run(saved_shapes, True):
        assert shapes.count((BATCH, 32, 64)) == 2
        assert shapes.count((BATCH, 16, 64)) == total - 2


# ---- overlap ----


def ends_of_matmul_and_collective(sequence_parallel: bool) -> tuple[float, float] | None:
    """When the weight gradient's matmul and the collective end, with rank 1 half a second late.

    In microseconds of rank 0's trace.
    """
    stage, rank, size = load_stage("05"), dist.get_rank(), dist.get_world_size()
    plain = nn.Linear(64, 96, bias=False)
    linear = stage.ColumnParallelLinear(plain, region_of(sequence_parallel))
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


# ---- sizes that are not divisible ----


def odd_width() -> None:
    stage, region = load_stage("05"), region_of(False)
    for module, plain in itertools.product(
        (stage.ColumnParallelLinear, stage.RowParallelLinear), [nn.Linear(6, 6, bias=False)]
    ):
        with pytest.raises(ValueError, match=r"of \(6, 6\) is not divisible by 4 ranks"):
            module(plain, region)
    with pytest.raises(ValueError, match=r"dimension 0 of \(6, 8\) is not divisible by 4 ranks"):
        stage.VocabParallelEmbedding(nn.Embedding(6, 8), region)


def a_bias_is_not_ignored() -> None:
    stage, region = load_stage("05"), region_of(False)
    for module in (stage.ColumnParallelLinear, stage.RowParallelLinear):
        with pytest.raises(ValueError, match="too many values"):
            module(nn.Linear(8, 8), region)


def test_a_linear_layer_with_a_bias_is_an_error(pools):
    pools(2).run(a_bias_is_not_ignored)


def test_widths_that_are_not_divisible_are_an_error(pools):
    pools(4).run(odd_width)
