"""Stages 02, 03 and 04 send and hold what their tables say, to the byte."""

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
    assert_ledger_is_true,
    bytes_written,
    count_collectives,
    live_bytes,
    load_stage,
    whole_ledger,
)
from techniques import STRATEGIES, Trainer
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

pytestmark = pytest.mark.slow

# ---- traffic ----

D, LAYERS, VOCAB = 128, 2, 256  # the corpus has fewer words; the model pads them to this
SIZE = f"--d-model {D} --n-layers {LAYERS} --n-heads 2 --seq-len 8".split()
RUN = [*SIZE, *"--global-batch-size 36 --log-every 1 --resume never".split()]
STEPS = 2

EMBED, LAYER, OUTPUT = VOCAB * D, 12 * D * D + 2 * D, VOCAB * D + D
UNITS = [EMBED, *[LAYER] * LAYERS, OUTPUT]
P = sum(UNITS)
# from the last parameter backwards; the first bucket stays below one megabyte, and so traffic
# begins when the last layer is done
BUCKETS = [OUTPUT + LAYER, LAYER + EMBED]


@dataclass(frozen=True)
class Sent:
    """What one collective carries in a step; padding is part of no formula."""

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


def table(strategy: str, n: int, a: int, gathered: int, reduced: int) -> dict[str, Sent]:
    """The design's formulas: `a` micro-batches on `n` ranks, in elements of so many bytes."""
    pad, b = padding(BUCKETS, n), len(BUCKETS)
    if strategy == "ddp":
        return {"all_reduce": Sent(b, P, 0, 4, n)}
    if strategy == "zero-1":
        once = Sent(b, P, pad, 4, n)
        return {"reduce_scatter_single": once, "all_gather_single": once}
    if strategy == "zero-2":
        return {
            "reduce_scatter_single": Sent(a * b, a * P, a * pad, 4, n),
            "all_gather_single": Sent(b, P, pad, 4, n),
        }
    s = {"fsdp-hybrid": 2, "fsdp-replicated": 1}.get(strategy, n)  # ranks that share out
    pad, u = padding(UNITS, s), len(UNITS)
    # the embedding is gathered in float32: so many times the elements of the others
    wide, others, pad_others = 4 // gathered, P - EMBED, pad - -EMBED % s
    turns = (
        1 if strategy == "fsdp-keep" else 2
    )  # of the others; the embedding's backward needs none
    gather = Sent(
        a * (turns * (u - 1) + 1),
        a * (turns * others + wide * EMBED),
        a * (turns * pad_others + wide * (-EMBED % s)),
        gathered,
        s,
    )
    sent = {
        "all_gather_single": gather,
        "reduce_scatter_single": Sent(a * u, a * P, a * pad, reduced, s),
    }
    if s < n:  # of float32 shards, whatever the reduction within the group was in
        assert (P + pad) % s == 0
        sent["all_reduce"] = Sent(u, (P + pad) // s, 0, 4, n // s)
    return sent


def start(strategy: str, n: int) -> float:
    """Bytes broadcast before the first step, so that all ranks start alike."""
    if strategy.startswith("fsdp"):
        return 0  # each draws its own slice
    if strategy == "ddp":
        return 4 * P
    return 4 * (P + padding(UNITS if strategy == "zero-3" else BUCKETS, n))


def sent_by(stage: str, argv: list[str]) -> tuple[dict, dict]:
    """(calls, payload, ring) a collective of a run without evaluation: ledger's, dispatcher's."""
    module = load_stage(stage)
    with patch.object(module, "evaluate", lambda *_: 0.0):
        with whole_ledger() as ledger, count_collectives() as counted:
            module.main(argv)
    assert_ledger_is_true(ledger, counted)
    by_ledger: dict[str, list[float]] = {}
    for (op, group), calls in ledger.calls.items():
        row = by_ledger.setdefault(op, [0, 0, 0.0])
        for i, n in enumerate((calls, ledger.payload[op, group], ledger.ring[op, group])):
            row[i] += n
    large = [r for r in counted.records if r.nbytes > 64]  # not the scalars that steer the run
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


def assert_sends(pool, corpus_dir, strategy: str, a: int, flags: str, gathered: int, reduced: int):
    stage = STRATEGIES[strategy][0] if strategy in STRATEGIES else "04"
    micro = 36 // pool.size // a
    argv = [*RUN, *f"--steps {STEPS} --micro-batch-size {micro} {flags} {FLAGS[strategy]}".split()]
    argv += ["--data", str(corpus_dir)]
    expected = table(strategy, pool.size, a, gathered, reduced)
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
    assert padding(UNITS, 2) == padding(BUCKETS, 2) == 0  # so the formulas hold as they stand
    assert_sends(pools(2), corpus_dir, strategy, 1, "", 4, 4)


@pytest.mark.quick_cases("zero-2", "fsdp")
@pytest.mark.parametrize("strategy", EACH_STRATEGY)
def test_communication_of_three_micro_batches_on_three_ranks_matches_the_table(
    pools, corpus_dir, strategy
):
    """And activation checkpointing, which runs forward again, gathers nothing again."""
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
    """Under autocast (02, ZeRO's stages 1 and 2) weights and gradients are float32 all along."""
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


@pytest.mark.parametrize("a", [1, 3])
def test_hybrid_sharding_adds_one_all_reduce_of_the_shards_per_step(pools, corpus_dir, a):
    assert_sends(pools(4), corpus_dir, "fsdp-hybrid", a, "", 4, 4)


def test_zero_1_and_full_replication_send_the_ring_bytes_of_02():
    ddp = table("ddp", 2, 3, 4, 4)["all_reduce"].ring("all_reduce")
    for strategy in ("zero-1", "fsdp-replicated"):
        assert sum(sent.ring(op) for op, sent in table(strategy, 2, 3, 4, 4).items()) == ddp


def step_on_the_wire(strategy: str) -> tuple[int, float]:
    """Bytes that this rank's process has written in a step, and those of the ledger."""
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
    """In sum over the ranks: only on a ring does each of them send the same."""
    written, said = zip(*pools(ranks).run(step_on_the_wire, strategy), strict=True)
    assert sum(written) == pytest.approx(sum(said), rel=0.01)


def forward_alone(strategy: str) -> tuple[dict, int]:
    """Elements gathered by a forward without gradients, and what stays gathered: bytes."""
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
    for gathered, left in pools(2).run(forward_alone, strategy):
        assert gathered == {"all_gather_single": N_UNITS * UNIT}
        assert left == 0


# ---- memory: wide units and a batch of one, so that activations are nothing beside a slice ----

WIDTH, N_UNITS = 256, 6
UNIT = WIDTH * WIDTH
ACTIVATION = 4 * WIDTH  # bytes


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(N_UNITS)))


@dataclass(frozen=True)
class Precision:
    """Of weights, gradients and moments; mixed: products in bf16, over float32.

    In stage 02 and ZeRO's stages 1 and 2 autocast makes the bf16 copies; stage 3 and FSDP gather
    in bf16, reduce in float32.
    """

    states: torch.dtype
    mixed: bool = False


PRECISIONS = {
    "float32": Precision(torch.float32),
    "bfloat16": Precision(torch.bfloat16),
    "mixed": Precision(torch.float32, mixed=True),
}


@contextlib.contextmanager
def ranks_without_wires(size: int) -> Iterator[None]:
    """This process as rank 0 of `size`, whose collectives do nothing: Gloo's own copies of what
    it reduces live until its threads let go of them."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def resident(strategy: str, precision: Precision, size: int) -> dict[str, int]:
    with ranks_without_wires(size):
        return resident_in_group(strategy, precision)


def resident_in_group(strategy: str, precision: Precision) -> dict[str, int]:
    """Bytes that live at the points of a second step, moments being there since the first."""
    before = live_bytes()
    shards_weights = strategy in SHARDED
    itemsize = precision.states.itemsize
    trainer = Trainer(
        strategy,
        stack().to(precision.states),
        bucket_mb=UNIT * itemsize / 2**20,  # a bucket a unit
        gathered=torch.bfloat16 if precision.mixed and shards_weights else None,
        fused=True,
    )
    x = torch.randn(1, WIDTH, dtype=precision.states)
    if strategy == "zero-3" and precision.mixed:
        x = x.bfloat16()  # FSDP casts inputs itself
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision.mixed and not shards_weights)
    seen = {}

    def look(when: str) -> None:
        seen[when] = live_bytes() - before - x.numel() * x.element_size()

    look("start")
    for _ in range(2):
        look("idle")
        with PeakMemory() as peak:
            with PeakMemory() as forward, autocast:
                total = trainer.model(x).sum()
            total.backward()
            del total
            trainer.sync.finish_gradient_synchronization()
            look("backward")
            trainer.optimizer.step()
            look("step")
        trainer.optimizer.zero_grad(set_to_none=True)
    return seen | {"kept for backward": forward.left, "peak": seen["idle"] + peak.above}


SHARDED = ("zero-3", "fsdp", "fsdp-keep")  # the ways that gather weights


def states(strategy: str, slice_: int, whole: int) -> tuple[int, int, int]:
    """Bytes of a unit's weights, gradients and moments that lie on a rank between steps.

    slice_: of a padded unit. whole: a unit as it is, for DDP, else padded.
    """
    return {
        "ddp": (whole, whole, 2 * whole),
        "zero-1": (whole, whole, 2 * slice_),
        "zero-2": (whole, slice_, 2 * slice_),
    }.get(strategy, (slice_, slice_, 2 * slice_))


def highest(strategy: str, idle: int, n: int, itemsize: int, mixed: bool) -> int:
    """Bytes at the peak, which is in backward, when autograd has just made a unit's gradient.

    Then there are besides what lies there between steps
    - that gradient, which goes into the bucket or the flat buffer next;
    - with sharded gradients the buffer that it goes into and that of the unit before, which is
      being reduced, and the slices that are left of all earlier ones, in FSDP also the one that
      is being reduced to;
    - with sharded weights what is gathered: the unit and the next, whose slice is on its way.
    """
    gathers_in = 2 if mixed and strategy in SHARDED else itemsize
    a_gradient = UNIT * gathers_in
    if strategy in ("ddp", "zero-1"):
        return idle + a_gradient
    padded = UNIT + -UNIT % n
    moments = []
    for unit in range(N_UNITS):
        in_flight = 0 if strategy.startswith("fsdp") else 1
        reduced = max(0, N_UNITS - 1 - in_flight - unit) * padded // n
        buffers = min(2, N_UNITS - unit) * padded
        gathered = {"zero-2": 0, "zero-3": 1, "fsdp": min(2, unit + 1), "fsdp-keep": unit + 1}[
            strategy
        ]
        cast = padded // n if mixed and strategy == "fsdp" and unit > 0 else 0
        moments.append(
            idle + (reduced + buffers) * itemsize + (gathered * padded + cast) * gathers_in
        )
    return max(moments) + a_gradient


@pytest.mark.quick_cases(
    "ddp-float32-2",
    "zero-1-float32-2",
    "zero-2-float32-2",
    "zero-3-float32-2",
    "fsdp-float32-2",
    "fsdp-mixed-3",
)
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
    padded = UNIT + -UNIT % size  # 2 elements a unit on 3 ranks
    weights, grads, moments = states(
        strategy, padded // size * itemsize, (UNIT if strategy == "ddp" else padded) * itemsize
    )
    steps = 4 * N_UNITS  # AdamW's count, a float32 for each tensor
    # the gradients of 02 and of ZeRO's stage 1 live in buffers that stay
    stays = grads if strategy in ("ddp", "zero-1") else 0
    # the NaN that freed parameters of ZeRO-3 and FSDP read as, one number per unit
    gathers_in = 2 if chosen.mixed else itemsize
    nans = N_UNITS * gathers_in if strategy == "zero-3" or strategy.startswith("fsdp") else 0
    idle = N_UNITS * (weights + stays + moments) + steps + nans
    assert got["start"] == N_UNITS * (weights + (grads if strategy == "ddp" else 0)) + nans
    assert got["idle"] == idle
    assert got["backward"] == got["step"] == N_UNITS * (weights + grads + moments) + steps + nans

    little = 8 * ACTIVATION  # a tenth of the smallest slice
    uses_autocast = chosen.mixed and strategy not in SHARDED
    # the first unit's input wants no gradient, so that its weights are not kept
    copies = (N_UNITS - 1) * UNIT * 2 if uses_autocast else 0
    kept = copies + (N_UNITS * padded * gathers_in if strategy == "fsdp-keep" else 0)
    assert 0 <= got["kept for backward"] - kept <= little
    peak = highest(strategy, idle, size, itemsize, chosen.mixed)
    assert 0 <= got["peak"] - peak <= little + copies


def peak_with_frozen_units(strategy: str) -> int:
    """Bytes above what lies there between steps, all units frozen but the first and the last."""
    with ranks_without_wires(2):
        model = stack()
        for unit in model[1:-1]:
            unit.requires_grad_(False)
        trainer = Trainer(strategy, model, torch.optim.SGD, lr=0.1)
        x = torch.randn(1, WIDTH)
        with PeakMemory() as peak:
            trainer.step([lambda model: model(x).sum()])
        return peak.above


def test_frozen_units_are_resharded_during_backward(pools):
    """The peak is the last unit's backward: it and the one before it, its gradient, which
    autograd has made and the buffer takes over, and the slice that it is reduced to."""
    most = pools(1, group=False).run(peak_with_frozen_units, "fsdp")[0]
    assert 0 <= most - 4 * (4 * UNIT + UNIT // 2) <= 8 * ACTIVATION


@pytest.mark.quick
def test_model_state_in_bytes_per_parameter_matches_the_papers():
    """Of float32 and a parameter of one unit on n ranks: 16, 8 + 8/n, 4 + 12/n, 16/n."""
    n, whole = 4, 4 * UNIT
    for strategy, of_n, of_one in [
        ("ddp", 16, 0),
        ("zero-1", 8, 8),
        ("zero-2", 4, 12),
        ("zero-3", 0, 16),
        ("fsdp", 0, 16),
    ]:
        assert sum(states(strategy, whole // n, whole)) == (of_n + of_one / n) * UNIT


# ---- what a run reports ----


@pytest.mark.quick
def test_metrics_report_memory_and_communication(fresh_pool, corpus_dir):
    """The same weights, gradients and moments as a share of 16 P bytes, from the whole program."""
    pool = fresh_pool(4)
    shares = {"ddp": 16, "zero-1": 8 + 8 / 4, "zero-2": 4 + 12 / 4, "zero-3": 4, "fsdp": 4}
    shares |= {"fsdp-hybrid": 8, "fsdp-replicated": 16}
    for strategy, bytes_a_parameter in shares.items():
        stage = STRATEGIES[strategy][0] if strategy in STRATEGIES else "04"
        argv = [*RUN, *f"--steps 1 --micro-batch-size 3 {FLAGS[strategy]}".split()]
        argv += ["--data", str(corpus_dir)]
        sent = table(strategy, 4, 3, 4, 4)
        ring = sum(s.ring(op) for op, s in sent.items()) / 1e6
        # PyTorch keeps what a hook on a parameter refers to, here the models of the runs before
        before = pool.run(live_bytes)
        for metrics, old in zip(pool.train(stage, argv), before, strict=True):
            assert metrics[0]["comm_mb"] == pytest.approx(ring, rel=1e-9), strategy
            held = (metrics[0]["model_state_mb"] * 1e6 - old) / P
            assert held == pytest.approx(bytes_a_parameter, rel=0.01), strategy


@pytest.mark.parametrize(
    ("stage", "own"), [("03", ["--zero-stage", "3"]), ("04", [])], ids=["zero-3", "fsdp"]
)
def test_autocast_keeps_no_copy_of_weights_gathered_in_bf16(stage, own):
    args = load_stage(stage).parse_args([*RUN, *own, *BF16.split()])
    assert args.autocast is False and args.dtype == "bfloat16"
