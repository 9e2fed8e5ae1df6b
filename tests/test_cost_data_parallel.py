"""02, 03 and 04: memory at every point of a step; the ledger against the bytes that are sent."""

from __future__ import annotations

import pytest
import torch
from data_parallel_trainers import STRATEGIES, Trainer
from harness import PeakMemory, fake_ranks, live_bytes, process_bytes, whole_ledger
from torch import nn

pytestmark = pytest.mark.slow

# ---- communication ----


def bytes_of_a_step(strategy: str) -> tuple[int, float]:
    """Bytes that this rank's process has written in a step, and the ledger's ring bytes."""
    trainer = Trainer(strategy, stack(), fused=True)
    loss_of = [lambda model: model(torch.randn(1, WIDTH)).sum()] * 2
    trainer.step(loss_of)
    with whole_ledger() as ledger:
        before = process_bytes("wchar")
        trainer.step(loss_of)
        after = process_bytes("wchar")
    return after - before, ledger.total_ring_bytes


@pytest.mark.quick_cases("fsdp")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_communication_ledger_matches_the_bytes_written_to_the_kernel(pools, strategy):
    """The sums over the ranks agree; single ranks differ where Gloo does not use a ring."""
    written, counted = zip(*pools(4).run(bytes_of_a_step, strategy), strict=True)
    assert sum(written) == pytest.approx(sum(counted), rel=0.01)


@fake_ranks(2)
def forward_alone(strategy: str) -> tuple[dict, int]:
    """Elements gathered by a forward without gradients, and bytes that stay unsharded."""
    trainer = Trainer(strategy, stack(), fused=True)
    before = live_bytes()
    with whole_ledger() as ledger, torch.no_grad():
        trainer.model(torch.randn(1, WIDTH))
    elements = {op: nbytes // 4 for (op, _), nbytes in ledger.payload.items()}
    return elements, live_bytes() - before


@pytest.mark.parametrize("strategy", ["zero-3", "fsdp", "fsdp-keep"])
def test_evaluation_gathers_each_unit_once_and_reshards_it(pools, strategy):
    gathered, left = pools(1, group=False).run(forward_alone, strategy)[0]
    assert gathered == {"all_gather_single": N_UNITS * UNIT}
    assert left == 0


# ---- memory: wide units and a batch of one, so that activations are small beside a shard ----

WIDTH, N_UNITS, RANKS = 256, 6, 3
MATRIX = WIDTH * WIDTH
UNIT = 2 * MATRIX
ACTIVATION = 4 * WIDTH  # bytes


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    linears = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2 * N_UNITS))
    return nn.Sequential(*(nn.Sequential(a, b) for a, b in zip(linears, linears, strict=True)))


# the dtype of the model state, and whether matmuls are in bf16 all the same: in stage 02 and ZeRO
# autocast makes the bf16 copies, FSDP gathers in bf16 and reduces in float32
PRECISIONS = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "mixed": (torch.float32, True),
}


@fake_ranks(RANKS)
def resident(strategy: str, precision: str) -> dict[str, int]:
    """Live bytes at several points of the second step; the first creates the optimizer state."""
    before = live_bytes()
    shards_weights = strategy in ABSENT
    dtype, is_mixed = PRECISIONS[precision]
    itemsize = dtype.itemsize
    trainer = Trainer(
        strategy,
        stack().to(dtype),
        bucket_mb=UNIT * itemsize / 2**20,  # one bucket per unit
        gathered=torch.bfloat16 if is_mixed and shards_weights else None,
        fused=True,
    )
    x = torch.randn(1, WIDTH, dtype=dtype)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=is_mixed and not shards_weights)
    seen = {}

    def measure(when: str) -> None:
        seen[when] = live_bytes() - before - x.numel() * x.element_size()

    measure("start")
    for _ in range(2):
        measure("idle")
        with PeakMemory() as peak:
            with PeakMemory() as forward, autocast:
                total = trainer.model(x).sum()
            total.backward()
            del total
            trainer.sync.finish_gradient_synchronization()
            measure("backward")
            trainer.optimizer.step()
            measure("step")
        trainer.optimizer.zero_grad(set_to_none=True)
    return seen | {"kept for backward": forward.left, "peak": seen["idle"] + peak.above}


ABSENT = ("fsdp", "fsdp-keep")  # the strategies that cast weights as they gather them


def states(strategy: str, shard: int, full: int) -> tuple[int, int, int]:
    """Bytes of a unit's weights, gradients and optimizer state on a rank between steps.

    shard: bytes of a shard of the padded unit. full: bytes of the full unit, padded except for DDP.
    """
    return {
        "ddp": (full, full, 2 * full),
        "zero-1": (full, full, 2 * shard),
        "zero-2": (full, shard, 2 * shard),
    }.get(strategy, (shard, shard, 2 * shard))


def highest(strategy: str, idle: int, itemsize: int, mixed: bool) -> int:
    """Peak bytes. The peak is in backward, when autograd has computed a unit's last gradient.

    In addition to the `idle` bytes between steps, these are live then:
    - that gradient, which 02 and ZeRO-1 and -2 copy into the bucket next;
    - in 02 and ZeRO-1 the buffers of all buckets;
    - with sharded gradients, the buffer that it is copied into, the buffer of the previous unit,
      whose reduce-scatter is in flight, and the gradient shards of all units before;
    - with sharded weights, the gradient of each parameter of the unit and the buffer in which they
      are joined (the unit's parameters have just been freed), the next unit, whose all-gather is in
      flight, and one more gradient shard: its own in ZeRO-3, else the previous unit's. In bfloat16
      the joined gradients are copied to float32.
    """
    padded, n, at_unit = UNIT + -UNIT % RANKS, RANKS, []
    if strategy in ("ddp", "zero-1"):
        buffers = N_UNITS * (UNIT if strategy == "ddp" else padded)
        return idle + (buffers + MATRIX) * itemsize
    for unit in range(N_UNITS):
        later = N_UNITS - 1 - unit  # units that backward has left
        if strategy == "zero-2":
            held = max(0, later - 1) * padded // n + min(1, later) * padded
            at_unit.append((held + padded + MATRIX) * itemsize)
        elif strategy == "zero-3":
            at_unit.append((later * padded // n + UNIT + padded + padded // n) * itemsize)
        else:
            held = (max(0, later - 1) * padded // n + min(1, later) * padded) * itemsize
            gathers_in = 2 if mixed else itemsize
            others = unit if strategy == "fsdp-keep" else min(1, unit)
            sent = padded // n if mixed and strategy == "fsdp" and unit > 0 else 0
            held += (others * padded + sent + UNIT) * gathers_in
            at_unit.append(held + mixed * padded * gathers_in + padded * itemsize)
            at_unit.append(held + (padded + min(1, later) * padded // n) * itemsize)
    return idle + max(at_unit)


@pytest.mark.quick_cases("ddp-float32", "zero-1-float32", "zero-3-float32", "fsdp-mixed")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_matches_the_table_at_every_point_of_a_step(pools, strategy, precision):
    dtype, is_mixed = PRECISIONS[precision]
    got = pools(1, group=False).run(resident, strategy, precision)[0]
    itemsize = dtype.itemsize
    padded = UNIT + -UNIT % RANKS  # 2 more elements per unit
    full = (UNIT if strategy == "ddp" else padded) * itemsize
    weights, grads, optimizer = states(strategy, padded // RANKS * itemsize, full)
    # AdamW's step count, one float32 per tensor
    steps = 4 * N_UNITS * (2 if strategy == "ddp" else 1)
    gathers_in = 2 if is_mixed else itemsize
    idle = N_UNITS * (weights + optimizer) + steps
    assert got["start"] == N_UNITS * weights
    assert got["idle"] == idle
    assert got["backward"] == got["step"] == N_UNITS * (weights + grads + optimizer) + steps

    little = 16 * ACTIVATION  # a fifth of the smallest shard
    uses_autocast = is_mixed and strategy not in ABSENT
    # the first matrix's input requires no gradient, so its copy is not kept
    copies = (N_UNITS * UNIT - MATRIX) * 2 if uses_autocast else 0
    stay = {"fsdp": 1, "fsdp-keep": N_UNITS}.get(strategy, 0)  # units that forward does not free
    kept = copies + stay * padded * gathers_in
    assert 0 <= got["kept for backward"] - kept <= little
    peak = highest(strategy, idle, itemsize, is_mixed)
    assert 0 <= got["peak"] - peak <= little + copies
