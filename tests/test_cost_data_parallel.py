"""02, 03 and 04: what forward keeps, and the peak of a step. The model state: test_costs.py."""

from __future__ import annotations

import pytest
import torch
from data_parallel_trainers import STRATEGIES, Trainer
from harness import PeakMemory, fake_ranks, live_bytes, whole_ledger
from torch import nn

pytestmark = pytest.mark.slow


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
def resident(strategy: str, precision: str) -> tuple[int, int, int]:
    """Bytes between steps, those that forward keeps in addition, and the peak in the second step;
    the first creates the optimizer state."""
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
    for _ in range(2):
        idle = live_bytes() - before - x.nbytes
        with PeakMemory() as peak:
            with PeakMemory() as forward, autocast:
                total = trainer.model(x).sum()
            total.backward()
            del total
            trainer.sync.finish_gradient_synchronization()
            trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)
    return idle, forward.left, idle + peak.above


ABSENT = ("fsdp", "fsdp-keep")  # the strategies that cast weights as they gather them


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
def test_forward_keeps_and_a_step_needs_at_most_the_memory_of_the_table(pools, strategy, precision):
    dtype, is_mixed = PRECISIONS[precision]
    idle, kept_by_forward, most = pools(1, group=False).run(resident, strategy, precision)[0]
    padded = UNIT + -UNIT % RANKS  # 2 more elements per unit
    gathers_in = 2 if is_mixed else dtype.itemsize
    little = 16 * ACTIVATION  # a fifth of the smallest shard
    uses_autocast = is_mixed and strategy not in ABSENT
    # the first matrix's input requires no gradient, so its copy is not kept
    copies = (N_UNITS * UNIT - MATRIX) * 2 if uses_autocast else 0
    stay = {"fsdp": 1, "fsdp-keep": N_UNITS}.get(strategy, 0)  # units that forward does not free
    kept = copies + stay * padded * gathers_in
    assert 0 <= kept_by_forward - kept <= little
    peak = highest(strategy, idle, dtype.itemsize, is_mixed)
    assert 0 <= most - peak <= little + copies
