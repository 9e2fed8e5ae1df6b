"""Every stage over a backend that completes as late as NCCL may (`late_backend.py`).

One run per stage, flag and schedule is checked for three things: stage 01's loss curve, matching
calls on all ranks, and an order of calls that cannot deadlock on NCCL (`nccl_rules.py`).
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import StageRun, assert_reproduces, cases, load_stage, runs_for, stage_file
from late_backend import Wait, assert_all_waited_for, recorded_calls
from nccl_rules import assert_completes, assert_connects_early, assert_ranks_agree
from techniques import STRATEGIES, Trainer
from torch import Tensor, nn

from common.collectives import all_gather_single, reduce_scatter_single

pytestmark = pytest.mark.slow

# ---- the backend itself ----


def results(x: Tensor) -> list[Tensor]:
    """The results of every operation on this rank for the input x [8], and the outputs before
    `wait()`."""
    rank, n = dist.get_rank(), dist.get_world_size()
    total, wide, part, swapped = x.clone(), x.new_empty(8 * n), x.new_empty(8 // n), x.clone()
    seen = x.clone() if rank == 0 else torch.zeros_like(x)
    at_root = x.clone()
    neighbor = torch.zeros_like(x)
    works = [
        dist.all_reduce(total, async_op=True),
        dist.broadcast(seen, src=0, async_op=True),
        dist.reduce(at_root, dst=0, async_op=True),
        all_gather_single(wide, x, async_op=True),
        reduce_scatter_single(part, x, async_op=True),
        dist.all_to_all_single(swapped, x, async_op=True),
        dist.irecv(neighbor, (rank - 1) % n),
        dist.isend(x, (rank + 1) % n),
    ]
    got = [total, seen, at_root, wide, part, swapped, neighbor]
    early = [t.clone() for t in got]
    for work in works:
        work.wait()
    objects: list = [None] * n
    dist.all_gather_object(objects, rank)
    dist.barrier()
    if rank != 0:
        at_root.zero_()  # what it holds here is undefined
    return [*got, torch.tensor(objects)], early


def results_in(dtype: torch.dtype) -> tuple:
    return results((torch.arange(8) + 10 * dist.get_rank() + 1).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_results_match_gloo_and_arrive_at_the_wait(pools, dtype):
    late, gloo = pools(2, backend="late").run(results_in, dtype), pools(2).run(results_in, dtype)
    for (ours, early), (theirs, _) in zip(late, gloo, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)
        if dtype.is_floating_point:
            # before the wait all outputs are NaN, except the root's own broadcast
            assert sum(bool(t.isnan().all()) for t in early) >= len(early) - 1


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
            assert x.sum().item() == 64 * n, "read too early"
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


@pytest.mark.parametrize("run", [*cases("late"), *cases("late-bf16")])
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
