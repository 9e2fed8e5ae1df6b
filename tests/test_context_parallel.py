"""Stage 08: the operator against float64, kernels, balance and overlap."""

from __future__ import annotations

import queue
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import REPO, load_stage
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.slow
stage = load_stage("08")

# ---- the operator, on rings of threads ----


class ThreadRing(stage.Ring):
    """A ring of threads of this process, of any number of ranks, that compute one after another."""

    def __init__(self, rank: int, shards: list, inboxes: list[queue.Queue]):
        self.n, self.rank, self.inboxes = len(shards), rank, inboxes
        self.length = sum(map(len, shards[rank]))

    def check(self, *_: Tensor) -> None:
        """Threads have no process group."""

    def start_exchange(self, tensor: Tensor):
        self.inboxes[(self.rank + 1) % self.n].put(tensor.clone())
        return self

    def wait(self) -> Tensor:
        return self.inboxes[self.rank].get(timeout=60)


def ring_of_threads(
    n: int, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, autocast: bool = False
) -> list[Tensor]:
    """The output and the gradients of q, k and v, in the order of the sequence. autocast: it is on
    in forward and in backward."""
    shards = [stage.zigzag(r, n, q.shape[2]) for r in range(n)]
    inboxes = [queue.Queue() for _ in range(n)]
    every = [[p for chunk in shard for p in chunk] for shard in shards]

    def work(rank: int) -> list[Tensor]:
        own = [x[:, :, every[rank]].requires_grad_() for x in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = stage.RingAttention.apply(ThreadRing(rank, shards, inboxes), *own)
            return [out.detach(), *torch.autograd.grad(out, own, grad[:, :, every[rank]])]

    with ThreadPoolExecutor(n) as pool:
        ranks = list(pool.map(work, range(n)))
    back = torch.tensor([p for positions in every for p in positions]).argsort()
    return [torch.cat(parts, dim=2)[:, :, back] for parts in zip(*ranks, strict=True)]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, *shape, generator=generator).to(dtype)[i] for i in range(4)]


def exact(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Causal attention in float64, by the book."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.double())]


def torchs(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """PyTorch's operator on the full sequence."""
    own = [x.clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*own, is_causal=True)
    return [out.detach(), *torch.autograd.grad(out, own, grad)]


def errors(ours: list[Tensor], theirs: list[Tensor]) -> list[float]:
    """The largest absolute differences."""
    return [(a.double() - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.quick
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("scale", [1.0, 30.0])  # 30: scores of a few thousand
def test_operator_matches_attention_in_float64(n, scale):
    q, k, v, grad = normal(2, 3, 384, 16)
    args = q * scale, k * scale, v, grad
    out, *grads = errors(ring_of_threads(n, *args), exact(*args))
    if scale == 1.0:
        assert out < 3e-6 and max(grads) < 8e-6
    else:  # a score's own rounding is 1e-4, and so is a weight's: PyTorch's operator is no better
        bounds = errors(torchs(*args), exact(*args))
        assert all(a <= 3 * b for a, b in zip([out, *grads], bounds, strict=True))


@pytest.mark.quick
def test_bfloat16_error_of_dk_does_not_grow_with_the_ring():
    args = normal(1, 2, 512, 16, dtype=torch.bfloat16)
    expected = exact(*args)
    alone = torchs(*args)

    def error(found: list[Tensor], i: int) -> float:
        return ((found[i].double() - expected[i]).norm() / expected[i].norm()).item()

    for n in (1, 2, 8, 32):
        found = ring_of_threads(n, *args)
        for i, most in ((0, 1.5), (2, 1.2), (3, 1.2)):  # the output, dK and dV
            assert found[i].dtype == torch.bfloat16, (n, i)
            assert error(found, i) < most * error(alone, i), (n, i)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_for_gpus_return_what_merging_and_backward_need(dtype):
    """Shapes and dtypes, on the meta device. float32's kernel pads 24 log-sum-exps to 32."""
    q = torch.zeros(2, 3, 24, 16, dtype=dtype, device="meta")
    k = torch.zeros(2, 3, 12, 16, dtype=dtype, device="meta")
    out, logsumexp = stage.attention(q, k, k, False)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert (logsumexp.shape, logsumexp.dtype) == (q.shape[:3], torch.float32)
    grads = stage.attention_backward(out, q, out, logsumexp, k, k, False)
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, dtype) for x in (q, k, k)]
    multiple = 4 if dtype == torch.float32 else 8
    with pytest.raises(ValueError, match=f"head_dim 14: GPUs need a multiple of {multiple}"):
        stage.attention(*[x[..., :14] for x in (q, k, k)], False)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_around_backward_changes_no_bit(dtype):
    args = normal(1, 2, 512, 16, dtype=dtype)
    outside = ring_of_threads(2, *args)
    for own, theirs in zip(ring_of_threads(2, *args, autocast=True), outside, strict=True):
        assert torch.equal(own, theirs)


@pytest.mark.quick
def test_float64_inputs_are_summed_in_float64():
    args = normal(2, 3, 96, 16, dtype=torch.float64)
    found = ring_of_threads(3, *args)
    assert all(x.dtype == torch.float64 for x in found)
    assert max(errors(found, exact(*args))) < 1e-12


def test_sequences_of_another_length_are_an_error():
    for length in (47, 49):  # else the last token would be dropped, or positions be missing
        with pytest.raises(ValueError, match=f"{length} tokens instead of seq_len 48"):
            stage.local_tokens(torch.zeros(1, length), stage.zigzag(0, 2, 48), 48)


def test_the_readmes_loss_is_the_mean_over_the_targets_of_all_ranks():
    """Rank 0 has no targets; a mean there is NaN."""
    readme = (REPO / "08_context_parallel/README.md").read_text()
    (loss,) = re.findall(r"each rank's loss is `(.*?)`", readme)
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[-100, -100, -100], [1, -100, 2]])
    names = {"cross_entropy": F.cross_entropy, "W": 2, "n_targets": 2}
    of_ranks = [
        eval(loss, names | {"logits": x, "targets": t})
        for x, t in zip(logits, targets, strict=True)
    ]
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(sum(of_ranks) / 2, expected)


# ---- tensors that a ring was not built for ----


def attend(kind: str, seq_len: int, shape: tuple, of_rank_1: dict, kv_heads: int = 9) -> str:
    """The error of attention, or of its second derivative; q on both ranks: [1, *shape]."""
    group = dist.group.WORLD
    own = {"size": (1, *shape)} | (of_rank_1 if dist.get_rank() == 1 else {})
    q = torch.zeros(**own, requires_grad=True)
    k = q[:, :kv_heads]
    try:
        attention = stage.UlyssesAttention(group)
        if kind == "ring":
            attention = partial(stage.RingAttention.apply, stage.Ring(group, seq_len, q.device))
        y = attention(q, k, k)
        (x,) = torch.autograd.grad(y.sum(), q, create_graph=True)
        x.sum().backward()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


MISFITS = [  # kind, seq_len of the ring, [heads, tokens, head_dim], rank 1's, message
    ("ring", 12, (2, 4, 4), {}, "4 tokens on a rank, in a ring for 6"),
    ("ring", 8, (2, 6, 4), {}, "6 tokens on a rank, in a ring for 4"),
    ("ring", 6, (2, 3, 4), {}, "seq_len 6 on 2 ranks: not a multiple of 4"),
    ("ring", 8, (2, 4, 4), {"size": (1, 3, 4, 4)}, "differ between ranks"),
    ("ring", 8, (2, 4, 4), {"dtype": torch.bfloat16}, "differ between ranks"),
    ("ring", 8, (2, 4, 4), {}, "one shape and dtype", 1),
    ("ring", 8, (2, 4, 4), {}, "no second derivative"),
    ("ulysses", 8, (2, 4, 4), {"size": (1, 2, 3, 4)}, "differ between ranks"),
    ("ulysses", 8, (3, 4, 4), {}, "3 heads for 2 ranks"),
    ("ulysses", 8, (2, 4, 4), {}, "once_differentiable"),
]


@pytest.mark.quick
@pytest.mark.parametrize("case", MISFITS, ids=str)
def test_other_tensors_than_the_ranks_expect_are_an_error(pools, case):
    kind, seq_len, shape, of_rank_1, message, *kv_heads = case
    for said in pools(2).run(attend, kind, seq_len, shape, of_rank_1, *kv_heads):
        assert message in said, said


# ---- balance ----


@pytest.mark.quick
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_every_rank_computes_as_many_blocks_of_scores_in_every_turn(n):
    """By which queries see which keys: all that the mask leaves, and nothing else."""
    length = 16
    for rank in range(n):
        for turn, source in enumerate((rank - turn) % n for turn in range(n)):
            q, k = (
                [p for chunk in stage.zigzag(r, n, length * n) for p in chunk]
                for r in (rank, source)
            )
            seen = torch.zeros(length, length, dtype=torch.bool)
            seen[stage.visible(rank, source, length)] = True
            assert seen.sum() == length * length * (0.5 if turn else 1)
            if turn == 0:
                seen = seen.tril()
            assert torch.equal(seen, torch.tensor(q)[:, None] >= torch.tensor(k))
    positions = [p for rank in range(n) for chunk in stage.zigzag(rank, n, 16 * n) for p in chunk]
    assert sorted(positions) == list(range(16 * n))


# ---- overlap ----


def ends_of_kernels_and_receives(backward: bool) -> tuple[list[float], list[float]]:
    """On rank 0 of three, in microseconds; the previous rank, 2, starts to send late.

    forward: half a second before its first block; backward: before its first gradients.
    """
    ring = stage.Ring(dist.group.WORLD, 96, torch.device("cpu"))
    q, k, v, grad = (x.requires_grad_() for x in normal(1, 2, 32, 16))
    start_exchange, calls = ring.start_exchange, []

    def late(tensor: Tensor):
        calls.append(tensor)
        # in each direction two exchanges of keys and values; the third one is of gradients
        if ring.rank == 2 and len(calls) == (5 if backward else 1):
            time.sleep(0.5)
        return start_exchange(tensor)

    ring.start_exchange = late
    tracing = profile(activities=[ProfilerActivity.CPU])
    dist.barrier()
    with nullcontext() if backward else tracing:
        out = stage.RingAttention.apply(ring, q, k, v)
    with tracing if backward else nullcontext():
        out.backward(grad.detach())
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu" + "_backward" * backward
    ends = {kernel: [], "gloo:recv": []}
    for event in tracing.events():
        ends.setdefault(event.name, []).append(event.time_range.end)
    return sorted(ends[kernel]), sorted(ends["gloo:recv"])


@pytest.mark.wall_clock
@pytest.mark.quick
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_block_travels_while_another_one_computes(pools, backward):
    """In backward the gradients travel, too."""
    kernels, receives = pools(3).run(ends_of_kernels_and_receives, backward)[0]
    late, last = (2, -1) if backward else (0, 0)
    assert len(kernels) == 3 and len(receives) == (4 if backward else 2)
    assert receives[late] - kernels[last] > 200e3, "a turn has waited for another one's message"
