"""Stage 05: the sharded loss, memory and overlap; logits stay sharded."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import PeakMemory, live_bytes, load_stage
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.loss import IGNORED
from common.model import Transformer, TransformerConfig

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


def second_backward() -> None:
    stage = load_stage("05")
    logits = torch.randn(4, 8, requires_grad=True)
    loss = stage.vocab_parallel_cross_entropy(logits * 1.0, torch.arange(4), dist.group.WORLD)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_second_backward_is_an_error(pools):
    pools(2).run(second_backward)


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


# ---- what a layer does not take ----


def sizes_and_biases() -> None:
    stage, region = load_stage("05"), region_of(False)
    for module in (stage.ColumnParallelLinear, stage.RowParallelLinear):
        with pytest.raises(ValueError, match=r"of \(6, 6\) is not divisible by 4 ranks"):
            module(nn.Linear(6, 6, bias=False), region)
        with pytest.raises(ValueError, match="too many values"):
            module(nn.Linear(8, 8), region)
    with pytest.raises(ValueError, match=r"dimension 0 of \(6, 8\) is not divisible by 4 ranks"):
        stage.VocabParallelEmbedding(nn.Embedding(6, 8), region)


def test_a_width_that_is_not_divisible_and_a_bias_are_errors(pools):
    pools(4).run(sizes_and_biases)
