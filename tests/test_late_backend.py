"""Every stage over a backend that completes as late as NCCL may (`late_backend.py`).

One run per stage, flag and schedule is checked for three things: stage 01's loss curve, matching
calls on all ranks, and an order of calls that cannot deadlock on NCCL (`nccl_rules.py`).
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from data_parallel_trainers import STRATEGIES, Trainer
from harness import StageRun, assert_reproduces, cases, load_stage, runs_for, stage_file
from late_backend import Wait, assert_all_waited_for, recorded_calls
from nccl_rules import assert_completes, assert_connects_early, assert_ranks_agree
from torch import Tensor, nn

from common.collectives import reduce_scatter_single

pytestmark = pytest.mark.slow

# ---- the backend itself ----


def seeded_bug(kind: str) -> None:
    """Make one kind of mistake around an all-reduce or a reduce-scatter."""
    x, n = torch.ones(64), dist.get_world_size()
    if kind == "in place, written to":
        part = x.chunk(n)[dist.get_rank()]
        work = reduce_scatter_single(part, x, async_op=True)
        x.chunk(n)[dist.get_rank() - 1].zero_()  # what the other rank gets
        work.wait()
    elif kind == "not contiguous":
        dist.all_reduce(torch.ones(4, 4).t())
    else:
        work = dist.all_reduce(x, async_op=True)
        if kind == "read":
            assert not x.isnan().all(), "read too early"
        elif kind == "scaled":
            x.div_(n)  # turns a signalling NaN into a quiet one
        elif kind == "freed":
            x.untyped_storage().resize_(0)
        if kind != "not waited for":
            work.wait()
    assert_all_waited_for()


@pytest.mark.quick_cases(
    "read-read too early", "in place, written to-input was written to while in flight"
)
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("read", "read too early"),
        ("scaled", "output was written to while in flight"),
        ("freed", "the storage of its output was freed"),
        ("not waited for", "never waited for: all_reduce of \\[64\\] in default_pg"),
        ("in place, written to", "input was written to while in flight"),
        ("not contiguous", "contiguous tensors only"),
    ],
)
def test_mistakes_that_gloo_forgives_are_errors(pools, kind, said):
    with pytest.raises(AssertionError, match=said):
        pools(2, backend="late").run(seeded_bug, kind)


# ---- backward's first gradients belong to the bucket that was reduced last ----


class OutOfOrder(nn.Module):
    """Runs its last layer first. ZeRO's stages 2 and 3 and FSDP have a single layer instead."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.b(self.c(x)).relu())


def train_late_bucket(strategy: str) -> dict[str, Tensor]:
    """In order this happens with a single bucket only: the previous micro-batch's is in flight."""
    torch.manual_seed(0)
    takes_any_order = strategy in ("ddp", "zero-1")
    model = OutOfOrder() if takes_any_order else nn.Sequential(nn.Linear(16, 16, bias=False))
    trainer = Trainer(strategy, model, torch.optim.SGD, lr=0.1, bucket_mb=1e-4)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        batches = [torch.randn(4, 16) for _ in range(3)]
        trainer.step([lambda model, x=x: model(x).square().mean() for x in batches])
    parameters = trainer.parameters()
    assert_all_waited_for()
    return parameters


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_for_the_bucket_in_flight(pools, strategy):
    late = pools(2, backend="late").run(train_late_bucket, strategy)
    for ours, theirs in zip(late, pools(2).run(train_late_bucket, strategy), strict=True):
        torch.testing.assert_close(ours, theirs)


# ---- every stage ----


@pytest.mark.quick
@pytest.mark.parametrize("number", sorted({run.stage for run in runs_for("late")}))
def test_cases_have_every_flag_and_schedule_of_a_stage(number):
    runs = [*stage_file(number).for_("late"), *stage_file(number).for_("late-bf16")]
    tried = {word for run in runs for word in run.flags}
    module = load_stage(number)
    schedules = set(getattr(module, "SCHEDULES", ()))
    assert {*stage_file(number).flags} | schedules <= tried, "add a late run to its stage.toml"


def train(stage: str, argv: list[str]) -> tuple[list[dict], list]:
    """The metrics of this rank, and its calls and waits."""
    with recorded_calls() as events:
        metrics = load_stage(stage).main(argv)
    assert_all_waited_for()
    return metrics, events


def deeper(ranks: int, pp: int, more: str):
    """A run of 07 whose pipeline has ranks that are neither the first nor the last."""
    flags = tuple(f"--pp {pp} --tp 2 --micro-batch-size 3 {more}".split())
    run = StageRun("07", "late", ranks, flags, own_flags=stage_file("07").flags)
    return pytest.param(run, id=run.id)


DEEPER = [
    deeper(6, 3, "--n-layers 3"),
    deeper(8, 4, "--n-layers 8 --schedule interleaved --sequence-parallel"),
]


@pytest.mark.parametrize("run", [*cases("late"), *cases("late-bf16"), *DEEPER])
def test_parity_over_the_late_backend(reproduce, run):
    every, expected = reproduce(run, train, "late")
    metrics, records = zip(*every, strict=True)
    for lines in metrics:
        assert_reproduces(run, lines, expected)
    assert all(records)
    assert_ranks_agree(records)
    assert_completes(records)
    assert_connects_early(records)


def test_parity_in_a_mixed_configuration(reproduce):
    """As on GPUs, where a group has a backend for each device."""
    flags = ("--shard-degree", "1", "--micro-batch-size", "6")
    run = StageRun("04", "late", 2, flags, own_flags=("--shard-degree",))
    every, expected = reproduce(run, train, "cpu:late,meta:gloo")
    for lines, record in every:
        assert_reproduces(run, lines, expected)
        calls = {(e.op, e.desc) for e in record if not isinstance(e, Wait)}
        assert {("reduce_scatter", "shard"), ("all_reduce", "replicate")} <= calls


@pytest.mark.parametrize("run", cases("resume"))
def test_checkpoint_and_resume_over_the_late_backend(pools, corpus_dir, tmp_path, run):
    """A save must not copy parameters or optimizer state in flight: the resumed run must be bitwise
    identical."""
    pool = pools(run.ranks, backend="late")
    argv = [*run.argv, "--data", str(corpus_dir), "--keep-checkpoints", "2"]
    argv += ["--checkpoint-every", "2", "--run-dir"]
    whole, _ = pool.run(train, run.stage, [*argv, str(tmp_path / "whole")])[0]
    after_two = str(tmp_path / "whole" / "checkpoints" / "step-00000002")
    argv += [str(tmp_path / "resumed"), "--resume", after_two]
    resumed, _ = pool.run(train, run.stage, argv)[0]
    names = ("step", "loss", "grad_norm", "test_loss")
    assert [[line.get(n) for n in names] for line in resumed] == [
        [line.get(n) for n in names] for line in whole[2:]
    ]
