"""A law of all stages: model state and bytes sent per step are those of one table of formulas.

Dry runs give the numbers: they execute a stage's own `main` as one rank. tests/test_dry_run.py
holds them to real runs, test_cost_data_parallel.py the ledger to the bytes given to the kernel.
The runs are those of the stages' files.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from unittest.mock import patch

import pytest
import torch
from dry_run import Report, dry_run
from harness import StageRun, load_stage, runs_for, stage_file, true_ledger
from torch import nn

pytestmark = pytest.mark.slow

VOCABULARY = 201  # of the tests' corpus; the model pads it to 256 words
PURPOSES = ("accumulation", "bf16", "late", "late-bf16", "parity")


class Expected:
    """What the formulas need: sizes in elements, and the costs as they are added up.

    E, layer, O: of the embedding, a layer and the output unit; P of all. A: hidden states of a
    micro-batch, c: bytes of one of their elements. m: micro-batches of a replica.
    """

    def __init__(self, run: StageRun, rank: int):
        stage = load_stage(run.stage)
        launch = {"RANK": str(rank), "WORLD_SIZE": str(run.ranks)}
        with patch.dict(os.environ, launch):
            self.args = args = stage.parse_args(run.argv)
        self.rank, self.n = rank, run.ranks
        self.d, self.L = args.d_model, args.n_layers
        d, vocab = self.d, 256
        self.E, self.layer, self.O = vocab * d, 12 * d * d + 2 * d, vocab * d + d
        self.P = self.E + self.L * self.layer + self.O
        self.T = args.micro_batch_size * args.seq_len
        self.A, self.c = self.T * d, 2 if args.dtype == "bfloat16" else 4
        self.m = args.global_batch_size // args.micro_batch_size  # with one replica
        self.held = Counter()  # bytes by kind
        self.sent = Counter()  # ring bytes by (collective, group)
        self.sent_before = Counter()  # the same, once: of the initial weights

    def hold(self, parameters: float, gradients: float, optimizer: float) -> None:
        self.held = Counter(parameters=parameters, gradients=gradients, optimizer=optimizer)

    def start_equal(self, group: str, n: int, nbytes: float) -> None:
        """Broadcast the initial weights."""
        self.sent_before["broadcast", group] += nbytes * (n - 1) / n

    def send(self, op: str, group: str, n: int, nbytes: float) -> None:
        """Add a collective's bytes on a ring of n ranks; a point-to-point message is `isend`."""
        around = {"all_reduce": 2 * (n - 1) / n, "isend": 1}.get(op, (n - 1) / n)
        if nbytes * around:
            self.sent[op, group] += nbytes * around


def ddp(x: Expected) -> None:
    x.hold(4 * x.P, 4 * x.P, 8 * x.P)
    x.start_equal("world", x.n, 4 * x.P)
    x.send("all_reduce", "world", x.n, 4 * x.P)


def gathered(x: Expected, reshards: bool) -> float:
    """Bytes of the unsharded weights of a micro-batch; the embedding's backward needs none."""
    bf16 = (getattr(x.args, "param_dtype", None) or x.args.dtype) == "bfloat16"
    return 4 * x.E + (2 if reshards else 1) * (x.P - x.E) * (2 if bf16 else 4)


def zero(x: Expected) -> None:
    zero_stage, m = x.args.zero_stage, x.m // x.n
    shard = 4 * x.P / x.n
    x.start_equal("world", x.n, 4 * x.P)
    if zero_stage == 3:
        assert not x.args.autocast  # units compute in the dtype that they are gathered in
        x.hold(shard, shard, 2 * shard)
        x.send("all_gather_single", "world", x.n, m * gathered(x, True))
    else:
        x.hold(4 * x.P, 4 * x.P if zero_stage == 1 else shard, 2 * shard)
        x.send("all_gather_single", "world", x.n, 4 * x.P)
    x.send("reduce_scatter_single", "world", x.n, (1 if zero_stage == 1 else m) * 4 * x.P)


def fsdp(x: Expected) -> None:
    assert not x.args.autocast  # units compute in the dtype that they are gathered in
    s, m = x.args.shard_degree or x.n, x.m // x.n
    shard = 4 * x.P / s
    x.hold(shard, shard, 2 * shard)
    reduced = 2 if x.args.reduce_dtype == "bfloat16" else 4
    x.send("all_gather_single", "shard", s, m * gathered(x, not x.args.no_reshard_after_forward))
    x.send("reduce_scatter_single", "shard", s, m * reduced * x.P)
    x.send("all_reduce", "replicate", x.n // s, 4 * x.P / s)


def tensor_parallel(x: Expected, group: str, tp: int, layers: int, is_first=True, is_last=True):
    """The communication of the layers, the embedding and the loss of a rank, and its parameters."""
    norms = 2 * layers * x.d + x.d * is_last
    full = layers * x.layer + x.E * is_first + x.O * is_last
    recomputed = layers * x.args.activation_checkpointing
    # recomputation stops at the last tensor that backward needs: before the MLP's second collective
    # unless dropout follows it
    again = recomputed * (2 if x.args.dropout else 1)
    large = 4 * layers * x.c * x.A  # two forward and two backward
    large += (x.c * is_last + 4 * is_first) * x.A  # the embedding's stays in float32
    if x.args.sequence_parallel and tp > 1:
        x.send("all_gather_single", group, tp, x.m * (large + 2 * recomputed * x.c * x.A))
        x.send("reduce_scatter_single", group, tp, x.m * (large + again * x.c * x.A))
        x.send("all_reduce", group, tp, 4 * norms)
    else:
        x.send("all_reduce", group, tp, x.m * (large + again * x.c * x.A))
    x.send("all_reduce", group, tp, x.m * 3 * 4 * x.T * is_last)
    return (full - norms) / tp + norms


def tensor(x: Expected) -> None:
    own = tensor_parallel(x, "world", x.n, x.L)
    x.hold(4 * own, 4 * own, 8 * own)


def pipeline(x: Expected, pp: int, rank: int, nbytes: float) -> tuple[int, bool, bool]:
    """The sends of a pipeline's rank, `nbytes` per message; its layers, first and last."""
    v = x.args.virtual_stages if x.args.schedule == "interleaved" else 1
    n_stages = pp * v
    layers = 0
    for stage in range(rank, n_stages, pp):
        layers += x.L // n_stages + (stage < x.L % n_stages)
        for other in (stage + 1, stage - 1):  # hidden states, gradients
            if 0 <= other < n_stages and pp > 1:
                towards = "to_higher" if other % pp > rank else "to_lower"
                x.send("isend", towards, 2, x.m * nbytes)
    return layers, rank == 0, rank == pp - 1


def pipelined(x: Expected) -> None:
    layers, is_first, is_last = pipeline(x, x.n, x.rank, 4 * x.A)
    own = layers * x.layer + x.E * is_first + x.O * is_last
    x.hold(4 * own, 4 * own, 8 * own)


def mesh(x: Expected) -> None:
    pp, tp = x.args.pp, x.args.tp
    dp = x.n // pp // tp
    x.m //= dp
    shards = tp if x.args.sequence_parallel else 1
    part = pipeline(x, pp, x.rank // (dp * tp), 4 * x.A / shards)
    own = tensor_parallel(x, "tp", tp, *part)
    x.hold(4 * own, 4 * own, 8 * own)
    x.start_equal("dp", dp, 4 * own)
    x.send("all_reduce", "dp", dp, 4 * own)


def context_parallel(x: Expected) -> None:
    ddp(x)
    cp = x.args.cp or x.n
    x.m //= x.n // cp
    forwards = 1 + x.args.activation_checkpointing
    times = x.m * x.L * (cp - 1) / cp * x.A
    if x.args.context_parallel_kind == "ring":  # keys and values; then also their gradients
        x.send("isend", "cp", 2, 2 * times * x.c * (forwards + 1) + 2 * times * 4)
    else:  # an all-to-all of a shard
        x.sent["all_to_all_single", "cp"] += 4 * times / cp * x.c * (forwards + 1)


def expert_parallel(x: Expected) -> None:
    args, ep = x.args, x.args.ep or x.n
    expert = 8 * x.d * x.d // args.top_k  # k experts per token have the size of the dense MLP
    router = args.n_experts * x.d
    sharded = x.L * args.n_experts * expert / ep
    dense = x.P - x.L * (8 * x.d * x.d - router)
    x.hold(4 * (dense + sharded), 4 * (dense + sharded), 8 * (dense + sharded))
    x.start_equal("world", x.n, 4 * dense + 4 * x.L * args.n_experts)  # and the biases
    x.start_equal("replicas", x.n // ep, 4 * sharded)
    x.send("all_reduce", "world", x.n, 4 * dense + 8 * x.L * args.n_experts)  # and the loads
    x.send("all_reduce", "replicas", x.n // ep, 4 * sharded)
    again = args.activation_checkpointing
    rows = (4 + 2 * again) * args.top_k * x.T * x.d * x.c  # in a dry run the load is balanced
    counts = (1 + again) * 8 * args.n_experts
    x.send("all_to_all_single", "ep", ep, x.m // x.n * x.L * (rows + counts))


# a stage that is not here costs what the stage costs that it is compared with
def muon(x: Expected) -> None:
    d = x.d
    shapes = [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)] * x.L
    matrices = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    owners = load_stage("11").choose_owners(matrices, x.n)
    owned = sum(p.numel() for p in matrices if owners[p] == x.rank)
    every = 12 * d * d * x.L
    x.start_equal("world", x.n, 4 * x.P)
    x.hold(4 * x.P, 4 * (x.P - every + owned), 8 * (x.P - every) + 4 * owned)
    x.send("all_reduce", "world", x.n, 4 * (x.P - every))
    x.send("reduce", "world", x.n, 4 * every)
    x.send("broadcast", "world", x.n, 4 * every)


COSTS: dict[str, Callable[[Expected], None]] = {
    "02": ddp,
    "03": zero,
    "04": fsdp,
    "05": tensor,
    "06": pipelined,
    "07": mesh,
    "08": context_parallel,
    "09": expert_parallel,
    "11": muon,
}


def formulas(stage: str) -> Callable[[Expected], None]:
    return COSTS.get(stage) or formulas(stage_file(stage).compare)


def cases() -> list:
    """Each run on several ranks, by dtype; where ranks differ, the first one and the last one."""
    runs = [run for purpose in PURPOSES for run in runs_for(purpose)]
    found, quick = {}, {run.id for run in runs if run.quick}
    for run in runs:
        ranks = {0, run.ranks - 1} if stage_file(run.stage).ranks_differ else {0}
        for rank in sorted(ranks) if run.ranks > 1 else []:
            dtype = "bf16" if "bf16" in run.purpose else "float32"
            found.setdefault(f"{run.id} {dtype} {rank}", (run, rank))
    return [
        pytest.param(run, rank, id=id, marks=[pytest.mark.quick] if run.id in quick else [])
        for id, (run, rank) in sorted(found.items())
    ]


@cache
def expected_of(run: StageRun, rank: int) -> Expected:
    expected = Expected(run, rank)
    formulas(run.stage)(expected)
    return expected


def assert_costs(pools, run: StageRun, rank: int) -> Report:
    expected = expected_of(run, rank)
    job = dry_run, run.stage, run.ranks, rank, run.argv, VOCABULARY
    (report,) = pools(1, group=False).run(*job)
    # without padding, unless a size is not divisible by the ranks: then at most one element per
    # rank in each buffer, of which a step has as many as calls, and of which a unit has four
    odd = 4 * (run.ranks - 1) * (expected.d % run.ranks > 0)
    for kind, nbytes in expected.held.items():
        assert nbytes <= getattr(report, kind) <= nbytes + 2 * odd * (expected.L + 2), kind
    assert_sent(report.sent.ring, expected.sent, odd, report.sent.calls)
    before = {key: n for key, n in report.sent_before.items() if key[0] == "broadcast"}
    assert_sent(before, expected.sent_before, odd, Counter(dict.fromkeys(before, expected.L + 2)))
    return report


def assert_sent(found: dict, expected: Counter, odd: int, calls: Counter) -> None:
    assert {key for key, nbytes in found.items() if nbytes} == (+expected).keys()
    for key, nbytes in (+expected).items():
        padded = nbytes + odd * calls[key]
        assert nbytes - 1e-3 <= found[key] <= padded + 1e-3, key


@pytest.mark.parametrize("run, rank", cases())
def test_model_state_and_communication_are_those_of_the_formulas(pools, run, rank):
    assert_costs(pools, run, rank)


@pytest.mark.parametrize(
    "stage, ranks, flags",
    [
        ("02", 4096, "--global-batch-size 4096"),
        ("03", 4096, "--global-batch-size 4096 --zero-stage 1"),
        ("03", 4096, "--global-batch-size 4096 --zero-stage 3"),
        ("04", 4096, "--global-batch-size 4096 --shard-degree 512"),
        ("07", 4096, "--global-batch-size 512 --pp 2 --tp 4"),
        ("04", 2, "--param-dtype bfloat16"),  # of a float32 run
        ("04", 2, "--param-dtype bfloat16 --reduce-dtype bfloat16"),
    ],
)
def test_the_formulas_hold_on_4096_ranks_and_for_each_dtype(pools, stage, ranks, flags):
    for rank in {3 % ranks, ranks - 1}:
        assert_costs(pools, StageRun(stage, "agreement", ranks, tuple(flags.split())), rank)


@pytest.mark.parametrize("stage, op", [("02", "all_reduce"), ("03", "reduce_scatter_single")])
def test_the_cap_of_a_bucket_sets_the_number_of_calls_and_not_the_bytes(pools, stage, op):
    # the first bucket has at most a megabyte: here the head and a layer
    for cap, calls in (("25", 2), ("0.0001", 1 + 6 * 2 + 2)):
        flags = ("--d-model", "128", "--bucket-cap-mb", cap)
        report = assert_costs(pools, StageRun(stage, "agreement", 2, flags), 0)
        assert report.sent.calls[op, "world"] == calls


# ---- real runs: one per stage, on two ranks ----

REAL = [pytest.param(run, id=run.id) for run in runs_for("agreement")]


def counted(stage: str, argv: list[str]) -> None:
    """Train; at the end the ledger must agree with the calls that PyTorch's dispatcher has seen."""
    with patch.object(load_stage(stage), "evaluate", lambda *_: 0.0), true_ledger():
        load_stage(stage).main(argv)


@pytest.mark.quick
@pytest.mark.parametrize("run", REAL)
def test_an_independent_count_confirms_the_ledger(reproduce, run):
    reproduce(run, job=counted)


@pytest.mark.wall_clock  # a thread of Gloo may still hold what it has sent
@pytest.mark.parametrize("run", REAL)
def test_metrics_report_the_model_state_and_the_bytes_that_were_sent(fresh_pool, corpus_dir, run):
    ranks = fresh_pool(run.ranks).train(run.stage, [*run.argv, "--data", str(corpus_dir)])
    for rank, metrics in enumerate(ranks):
        expected = expected_of(run, rank)
        for line in metrics:  # evaluations do not count
            sent = sum(expected.sent.values()) / 1e6
            assert line["comm_mb"] == pytest.approx(sent, rel=0.05 if run.stage == "09" else 1e-9)
        held = metrics[-1]["model_state_mb"] * 1e6
        assert held == pytest.approx(sum(expected.held.values()), rel=0.03)
