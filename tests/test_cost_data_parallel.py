"""Communication and memory of stages 02, 03 and 04 match their cost tables to the byte."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import (
    PeakMemory,
    bytes_written,
    count_collectives,
    live_bytes,
    load_stage,
    true_ledger,
    whole_ledger,
)
from techniques import STRATEGIES, Trainer
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

pytestmark = pytest.mark.slow

# ---- communication ----

D, LAYERS, VOCAB = 128, 2, 256  # the corpus has fewer words; the model pads them to this
SIZE = f"--d-model {D} --n-layers {LAYERS} --n-heads 2 --seq-len 8".split()
RUN = [*SIZE, *"--global-batch-size 36 --log-every 1 --resume never".split()]
STEPS = 2

EMBED, LAYER, OUTPUT = VOCAB * D, 12 * D * D + 2 * D, VOCAB * D + D
UNITS = [EMBED, *[LAYER] * LAYERS, OUTPUT]
P = sum(UNITS)
# in reverse order; the first bucket stays below one megabyte, so communication starts as soon as
# the gradients of the last layer are ready
BUCKETS = [OUTPUT + LAYER, LAYER + EMBED]


@dataclass(frozen=True)
class Sent:
    """What one collective sends per step. The formulas do not include padding."""

    calls: int
    elements: float
    padding: int
    itemsize: int
    n_ranks: int  # of its group

    @property
    def payload(self) -> float:
        return (self.elements + self.padding) * self.itemsize

    def ring(self, op: str) -> float:
        factor = 2 if op == "all_reduce" else 1
        return factor * (self.n_ranks - 1) / self.n_ranks * self.payload


def padding(sizes: list[int], n: int) -> int:
    return sum(-size % n for size in sizes)


def table(strategy: str, n: int, m: int, gathered: int, reduced: int) -> dict[str, Sent]:
    """The formulas: m micro-batches on n ranks; gathered, reduced: bytes per element."""
    pad, b = padding(BUCKETS, n), len(BUCKETS)
    if strategy == "ddp":
        return {"all_reduce": Sent(b, P, 0, 4, n)}
    if strategy == "zero-1":
        once = Sent(b, P, pad, 4, n)
        return {"reduce_scatter_single": once, "all_gather_single": once}
    if strategy == "zero-2":
        return {
            "reduce_scatter_single": Sent(m * b, m * P, m * pad, 4, n),
            "all_gather_single": Sent(b, P, pad, 4, n),
        }
    s = {"fsdp-hybrid": 2, "fsdp-replicated": 1}.get(strategy, n)  # the size of a shard group
    pad, u = padding(UNITS, s), len(UNITS)
    # the embedding is gathered in float32: its elements are `wide` times as large
    wide, others, pad_others = 4 // gathered, P - EMBED, pad - -EMBED % s
    times = (
        1 if strategy == "fsdp-keep" else 2
    )  # not the embedding, whose backward needs no weights
    gather = Sent(
        m * (times * (u - 1) + 1),
        m * (times * others + wide * EMBED),
        m * (times * pad_others + wide * (-EMBED % s)),
        gathered,
        s,
    )
    sent = {
        "all_gather_single": gather,
        "reduce_scatter_single": Sent(m * u, m * P, m * pad, reduced, s),
    }
    if s < n:  # of float32 shards, whatever dtype the shard group reduces in
        assert (P + pad) % s == 0
        sent["all_reduce"] = Sent(u, (P + pad) // s, 0, 4, n // s)
    return sent


def start(strategy: str, n: int) -> float:
    """Bytes broadcast before the first step, so that all ranks start with equal weights."""
    if strategy.startswith("fsdp"):
        return 0  # each rank initializes its own shards
    if strategy == "ddp":
        return 4 * P
    return 4 * (P + padding(UNITS if strategy == "zero-3" else BUCKETS, n))


def sent_by(stage: str, argv: list[str]) -> tuple[dict, dict]:
    """Train without evaluation; by collective, the ledger's (calls, payload, ring bytes) and the
    dispatcher's (calls, payload, group size)."""
    module = load_stage(stage)
    with patch.object(module, "evaluate", lambda *_: 0.0):
        with true_ledger() as (ledger, counted):
            module.main(argv)
    by_ledger: dict[str, list[float]] = {}
    for (op, group), calls in ledger.calls.items():
        row = by_ledger.setdefault(op, [0, 0, 0.0])
        for i, n in enumerate((calls, ledger.payload[op, group], ledger.ring[op, group])):
            row[i] += n
    large = [r for r in counted.records if r.nbytes > 64]  # without the control scalars
    calls, payload = Counter(r.op for r in large), Counter()
    for r in large:
        payload[r.op] += r.nbytes
    groups = {r.op: r.group_size for r in large}
    return by_ledger, {op: (calls[op], payload[op], groups[op]) for op in calls}


FLAGS = {
    "ddp": "",
    **{f"zero-{stage}": f"--zero-stage {stage}" for stage in (1, 2, 3)},
    "fsdp": "",
    "fsdp-keep": "--no-reshard-after-forward",
    "fsdp-hybrid": "--shard-size 2",
    "fsdp-replicated": "--shard-size 1",
    "fsdp-reduced-in-bf16": "--reduce-dtype bfloat16",
}
EACH_STRATEGY = ["ddp", "zero-1", "zero-2", "zero-3", "fsdp", "fsdp-keep", "fsdp-replicated"]
BF16 = "--dtype bfloat16"


def assert_sends(pool, corpus_dir, strategy: str, m: int, flags: str, gathered: int, reduced: int):
    stage = STRATEGIES[strategy][0] if strategy in STRATEGIES else "04"
    micro = 36 // pool.size // m
    argv = [*RUN, *f"--steps {STEPS} --micro-batch-size {micro} {flags} {FLAGS[strategy]}".split()]
    argv += ["--data", str(corpus_dir)]
    expected = table(strategy, pool.size, m, gathered, reduced)
    with_run_dir = [*argv, "--run-dir", os.path.join(os.environ["RUNS_ROOT"], "cost")]
    for by_ledger, by_dispatcher in pool.run(sent_by, stage, with_run_dir):
        at_start = by_ledger.pop("broadcast", (0, 0, 0))[1]
        assert at_start == by_dispatcher.pop("broadcast", (0, 0))[1] == start(strategy, pool.size)
        assert set(by_ledger) == set(by_dispatcher) == set(expected)
        for op, sent in expected.items():
            calls, payload = STEPS * sent.calls, STEPS * sent.payload
            assert by_dispatcher[op] == (calls, payload, sent.n_ranks), op
            assert tuple(by_ledger[op][:2]) == (calls, payload), op
            assert by_ledger[op][2] == pytest.approx(STEPS * sent.ring(op), rel=1e-12), op


@pytest.mark.quick
@pytest.mark.parametrize("strategy", EACH_STRATEGY)
def test_communication_of_one_micro_batch_matches_the_table(pools, corpus_dir, strategy):
    assert padding(UNITS, 2) == padding(BUCKETS, 2) == 0  # so the formulas hold without padding
    assert_sends(pools(2), corpus_dir, strategy, 1, "", 4, 4)


@pytest.mark.quick_cases("zero-2", "fsdp")
@pytest.mark.parametrize("strategy", EACH_STRATEGY)
def test_communication_of_three_micro_batches_on_three_ranks_matches_the_table(
    pools, corpus_dir, strategy
):
    """Activation checkpointing repeats the forward, and must not repeat its all-gathers."""
    assert padding(UNITS, 3) and padding(BUCKETS, 3)
    assert_sends(pools(3), corpus_dir, strategy, 3, "--activation-checkpointing", 4, 4)


@pytest.mark.parametrize("strategy", ["ddp", "zero-2", "zero-3", "fsdp", "fsdp-keep"])
def test_communication_is_unchanged_by_activation_checkpointing(pools, corpus_dir, strategy):
    assert_sends(pools(2), corpus_dir, strategy, 1, "--activation-checkpointing", 4, 4)


@pytest.mark.quick_cases("fsdp")
@pytest.mark.parametrize("strategy", EACH_STRATEGY)
def test_communication_in_bfloat16_halves_the_all_gathers_and_reduces_in_float32(
    pools, corpus_dir, strategy
):
    """Under autocast (02, ZeRO's stages 1 and 2) weights and gradients stay float32."""
    assert_sends(pools(2), corpus_dir, strategy, 3, BF16, 2, 4)


def test_bucket_cap_changes_the_number_of_all_reduces_and_not_the_bytes(pools, corpus_dir):
    parameters = 1 + 6 * LAYERS + 2
    argv = [*RUN, "--steps", "1", "--data", str(corpus_dir)]
    argv += ["--run-dir", os.path.join(os.environ["RUNS_ROOT"], "cost"), "--bucket-cap-mb"]
    for cap, calls in (("25", len(BUCKETS)), ("0.0001", parameters)):
        for _, by_dispatcher in pools(2).run(sent_by, "02", [*argv, cap]):
            assert by_dispatcher["all_reduce"] == (calls, 4 * P, 2)


@pytest.mark.parametrize("flags", [BF16, "--dtype float32 --param-dtype bfloat16"])
def test_param_dtype_and_reduce_dtype_set_the_communication(pools, corpus_dir, flags):
    assert_sends(pools(2), corpus_dir, "fsdp-reduced-in-bf16", 3, flags, 2, 2)
    assert_sends(pools(2), corpus_dir, "fsdp", 1, flags, 2, 4)


@pytest.mark.parametrize("m", [1, 3])
def test_hybrid_sharding_adds_one_all_reduce_of_the_shards_per_step(pools, corpus_dir, m):
    assert_sends(pools(4), corpus_dir, "fsdp-hybrid", m, "", 4, 4)


def test_zero_1_and_full_replication_send_the_ring_bytes_of_02():
    ddp = table("ddp", 2, 3, 4, 4)["all_reduce"].ring("all_reduce")
    for strategy in ("zero-1", "fsdp-replicated"):
        assert sum(sent.ring(op) for op, sent in table(strategy, 2, 3, 4, 4).items()) == ddp


def bytes_of_a_step(strategy: str) -> tuple[int, float]:
    """Bytes that this rank's process has written in a step, and the ledger's ring bytes."""
    trainer = Trainer(strategy, stack(), fused=True)
    loss_of = [lambda model: model(torch.randn(1, WIDTH)).sum()] * 2
    trainer.step(loss_of)
    with whole_ledger() as ledger:
        before = bytes_written()
        trainer.step(loss_of)
        after = bytes_written()
    return after - before, ledger.total_ring_bytes


@pytest.mark.quick_cases("fsdp-2")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_communication_ledger_matches_the_bytes_written_to_the_kernel(pools, strategy, ranks):
    """The sums over the ranks agree; single ranks differ where Gloo does not use a ring."""
    written, counted = zip(*pools(ranks).run(bytes_of_a_step, strategy), strict=True)
    assert sum(written) == pytest.approx(sum(counted), rel=0.01)


def forward_alone(strategy: str) -> tuple[dict, int]:
    """Elements gathered by a forward without gradients, and bytes that stay unsharded."""
    with fake_ranks(2):
        trainer = Trainer(strategy, stack(), fused=True)
        before = live_bytes()
        with count_collectives() as counted, torch.no_grad():
            trainer.model(torch.randn(1, WIDTH))
        elements = Counter()
        for r in counted.records:
            elements[r.op] += r.nbytes // 4
        return dict(elements), live_bytes() - before


@pytest.mark.parametrize("strategy", ["zero-3", "fsdp", "fsdp-keep"])
def test_evaluation_gathers_each_unit_once_and_reshards_it(pools, strategy):
    gathered, left = pools(1, group=False).run(forward_alone, strategy)[0]
    assert gathered == {"all_gather_single": N_UNITS * UNIT}
    assert left == 0


# ---- memory: wide units and a batch of one, so that activations are small beside a shard ----

WIDTH, N_UNITS = 256, 6
MATRIX = WIDTH * WIDTH
UNIT = 2 * MATRIX
ACTIVATION = 4 * WIDTH  # bytes


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    linears = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2 * N_UNITS))
    return nn.Sequential(*(nn.Sequential(a, b) for a, b in zip(linears, linears, strict=True)))


@dataclass(frozen=True)
class Precision:
    """The dtype of the model state; mixed: matmuls in bf16 with a float32 model state.

    In stage 02 and ZeRO's stages 1 and 2 autocast creates the bf16 copies. Stage 3 and FSDP gather
    in bf16 and reduce in float32.
    """

    states: torch.dtype
    mixed: bool = False


PRECISIONS = {
    "float32": Precision(torch.float32),
    "bfloat16": Precision(torch.bfloat16),
    "mixed": Precision(torch.float32, mixed=True),
}


@contextlib.contextmanager
def fake_ranks(size: int) -> Iterator[None]:
    """Make this process rank 0 of `size`, with collectives that do nothing.

    With Gloo, the copies that its threads hold for a while would count as memory.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def resident(strategy: str, precision: Precision, size: int) -> dict[str, int]:
    with fake_ranks(size):
        return resident_in_group(strategy, precision)


def resident_in_group(strategy: str, precision: Precision) -> dict[str, int]:
    """Live bytes at several points of the second step; the first creates the optimizer state."""
    before = live_bytes()
    shards_weights = strategy in SHARDED
    itemsize = precision.states.itemsize
    trainer = Trainer(
        strategy,
        stack().to(precision.states),
        bucket_mb=UNIT * itemsize / 2**20,  # one bucket per unit
        gathered=torch.bfloat16 if precision.mixed and shards_weights else None,
        fused=True,
    )
    x = torch.randn(1, WIDTH, dtype=precision.states)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision.mixed and not shards_weights)
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


SHARDED = ("zero-3", "fsdp", "fsdp-keep")  # the strategies that gather weights


def states(strategy: str, shard: int, full: int) -> tuple[int, int, int]:
    """Bytes of a unit's weights, gradients and optimizer state on a rank between steps.

    shard: bytes of a shard of the padded unit. full: bytes of the full unit, padded except for DDP.
    """
    return {
        "ddp": (full, full, 2 * full),
        "zero-1": (full, full, 2 * shard),
        "zero-2": (full, shard, 2 * shard),
    }.get(strategy, (shard, shard, 2 * shard))


def highest(strategy: str, idle: int, n: int, itemsize: int, mixed: bool) -> int:
    """Peak bytes. The peak is in backward, when autograd has computed a unit's last gradient.

    In addition to the `idle` bytes between steps, these are live then:
    - that gradient, which 02 and ZeRO's stages 1 and 2 copy into the bucket next;
    - with sharded gradients, the buffer that it is copied into, the buffer of the previous unit,
      whose reduce-scatter is in flight, and the gradient shards of all units before;
    - with sharded weights, all gradients of the unit, which autograd has just joined in one tensor,
      the unsharded unit, and the next one, whose all-gather is in flight. Where gathered
      parameters are bfloat16, the unit is freed next, its gradients are copied to float32, and the
      shard of the previous unit's average is created.
    """
    padded, at_unit = UNIT + -UNIT % n, []
    if strategy in ("ddp", "zero-1"):
        return idle + MATRIX * itemsize
    for unit in range(N_UNITS):
        previous = min(1, N_UNITS - 1 - unit) * padded
        reduced = max(0, N_UNITS - 2 - unit) * padded // n
        held = idle + (reduced + previous) * itemsize
        if strategy == "zero-2":
            at_unit.append(held + (padded + MATRIX) * itemsize)
        else:
            gathered = {"zero-3": 1, "fsdp": min(2, unit + 1), "fsdp-keep": unit + 1}[strategy]
            gathers_in = 2 if mixed else itemsize
            cast = padded // n if mixed and strategy == "fsdp" and unit > 0 else 0  # what is sent
            held += (gathered * padded + cast) * gathers_in
            at_unit.append(held + (UNIT + padded) * gathers_in)
            at_unit.append(held + mixed * (padded + padded // n) * itemsize)
    return max(at_unit)


@pytest.mark.quick_cases(
    "ddp-float32-2",
    "zero-1-float32-2",
    "zero-2-float32-2",
    "zero-3-float32-2",
    "fsdp-float32-2",
    "fsdp-mixed-3",
)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_matches_the_table_at_every_point_of_a_step(pools, strategy, precision, size):
    chosen = PRECISIONS[precision]
    got = pools(1, group=False).run(resident, strategy, chosen, size)[0]
    itemsize = chosen.states.itemsize
    padded = UNIT + -UNIT % size  # 2 more elements per unit on 3 ranks
    weights, grads, optimizer = states(
        strategy, padded // size * itemsize, (UNIT if strategy == "ddp" else padded) * itemsize
    )
    # AdamW's step count, one float32 per tensor
    steps = 4 * N_UNITS * (2 if strategy == "ddp" else 1)
    # the gradients of 02 and of ZeRO's stage 1 are in buffers that stay allocated
    stays = grads if strategy in ("ddp", "zero-1") else 0
    gathers_in = 2 if chosen.mixed else itemsize
    idle = N_UNITS * (weights + stays + optimizer) + steps
    assert got["start"] == N_UNITS * (weights + (grads if strategy == "ddp" else 0))
    assert got["idle"] == idle
    assert got["backward"] == got["step"] == N_UNITS * (weights + grads + optimizer) + steps

    little = 16 * ACTIVATION  # a fifth of the smallest shard
    uses_autocast = chosen.mixed and strategy not in SHARDED
    # the first matrix's input requires no gradient, so its copy is not kept
    copies = (N_UNITS * UNIT - MATRIX) * 2 if uses_autocast else 0
    kept = copies + (N_UNITS * padded * gathers_in if strategy == "fsdp-keep" else 0)
    assert 0 <= got["kept for backward"] - kept <= little
    peak = highest(strategy, idle, size, itemsize, chosen.mixed)
    assert 0 <= got["peak"] - peak <= little + copies


def peak_with_accumulation(strategy: str, size: int) -> int:
    """Peak bytes above the idle ones, in a step of three micro-batches."""
    with fake_ranks(size):
        trainer = Trainer(strategy, stack(), bucket_mb=4 * UNIT / 2**20, fused=True)
        x = torch.randn(1, WIDTH)
        losses = [lambda model: model(x).sum()] * 3
        trainer.step(losses)  # creates the optimizer state
        with PeakMemory() as peak:
            trainer.step(losses)
        return peak.above


@pytest.mark.parametrize("strategy", ["zero-2", "zero-3", "fsdp"])
def test_accumulation_holds_the_full_gradients_of_two_units(pools, strategy):
    """In addition to all shards of gradients, the gradients that autograd has just computed, and
    the unsharded units: the last reduction of a micro-batch ends in the next backward."""
    computed = {"zero-2": 1, "zero-3": 2, "fsdp": 2}[strategy] * MATRIX
    gathered = {"zero-2": 0, "zero-3": 1, "fsdp": 2}[strategy]
    peak = 4 * ((N_UNITS // 2 + 2 + gathered) * UNIT + computed)
    got = pools(1, group=False).run(peak_with_accumulation, strategy, 2)[0]
    assert 0 <= got - peak <= 16 * ACTIVATION


def full_gradients_after_backward(strategy: str) -> list[list[bool]]:
    """Whether each bucket has its full gradients, after each of two micro-batches' backward and
    after the last wait."""
    with fake_ranks(2):
        trainer = Trainer(strategy, stack(), torch.optim.SGD, bucket_mb=UNIT * 4 / 2**20, lr=0.1)
        found = []
        for _ in range(2):
            trainer.model(torch.randn(1, WIDTH)).sum().backward()
            found.append([bucket.grads is not None for bucket in trainer.sync.buckets])
        trainer.sync.finish_gradient_synchronization()
        return [*found, [bucket.grads is not None for bucket in trainer.sync.buckets]]


@pytest.mark.parametrize("strategy", ["zero-2", "zero-3", "fsdp"])
def test_between_micro_batches_only_the_last_reduction_is_in_flight(pools, strategy):
    """It overlaps with the next forward, and keeps the full gradients of its bucket alive."""
    others = [False] * (N_UNITS - 1)
    got = pools(1, group=False).run(full_gradients_after_backward, strategy)[0]
    assert got == [[*others, True], [*others, True], [*others, False]]


@pytest.mark.quick
def test_model_state_in_bytes_per_parameter_matches_the_papers():
    """In float32 on n ranks: 16, 8 + 8/n, 4 + 12/n and 16/n bytes per parameter."""
    n, full = 4, 4 * UNIT
    for strategy, of_n, of_one in [
        ("ddp", 16, 0),
        ("zero-1", 8, 8),
        ("zero-2", 4, 12),
        ("zero-3", 0, 16),
        ("fsdp", 0, 16),
    ]:
        assert sum(states(strategy, full // n, full)) == (of_n + of_one / n) * UNIT


# ---- metrics ----


@pytest.mark.wall_clock  # a thread of Gloo may still hold what it has sent
@pytest.mark.quick
def test_metrics_report_memory_and_communication(fresh_pool, corpus_dir):
    """The model state and the communication that a whole run reports match the formulas."""
    pool = fresh_pool(4)
    shares = {"ddp": 16, "zero-1": 8 + 8 / 4, "zero-2": 4 + 12 / 4, "zero-3": 4, "fsdp": 4}
    shares |= {"fsdp-hybrid": 8, "fsdp-replicated": 16}
    for strategy, bytes_per_parameter in shares.items():
        stage = STRATEGIES[strategy][0] if strategy in STRATEGIES else "04"
        argv = [*RUN, *f"--steps 1 --micro-batch-size 3 {FLAGS[strategy]}".split()]
        argv += ["--data", str(corpus_dir)]
        sent = table(strategy, 4, 3, 4, 4)
        ring = sum(s.ring(op) for op, s in sent.items()) / 1e6
        # PyTorch keeps objects that a parameter's hook refers to: here the models of earlier runs
        before = pool.run(live_bytes)
        for metrics, old in zip(pool.train(stage, argv), before, strict=True):
            assert metrics[0]["comm_mb"] == pytest.approx(ring, rel=1e-9), strategy
            held = (metrics[0]["model_state_mb"] * 1e6 - old) / P
            assert held == pytest.approx(bytes_per_parameter, rel=0.01), strategy


@pytest.mark.parametrize(
    ("stage", "own"), [("03", ["--zero-stage", "3"]), ("04", [])], ids=["zero-3", "fsdp"]
)
def test_autocast_keeps_no_copy_of_weights_gathered_in_bf16(stage, own):
    args = load_stage(stage).parse_args([*RUN, *own, *BF16.split()])
    assert args.autocast is False and args.dtype == "bfloat16"
