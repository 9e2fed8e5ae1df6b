"""Stages 02, 03 and 04 reproduce stage 01's loss curve on any ranks, shards and micro-batches."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from harness import assert_same_curve, load_stage

pytestmark = pytest.mark.slow

SIZE = "--d-model 32 --n-layers 2 --n-heads 2 --seq-len 16".split()
RUN = [*SIZE, *"--steps 50 --log-every 1 --eval-every 25 --resume never".split()]
ONE = ["--global-batch-size", "12"]
# the same 48 samples per step in four micro-batches per rank, on any number of ranks
FOUR = "--global-batch-size 48 --dropout 0.1 --grad-clip 0.3".split()
CHECKPOINTING = ["--activation-checkpointing"]

ZERO = [["--zero-stage", stage] for stage in "123"]
KEEP, OFFLOAD, HYBRID = ["--no-reshard-after-forward"], ["--cpu-offload"], ["--shard-size", "2"]
EVERY = [("02", []), *(("03", own) for own in ZERO), ("04", [])]


def name(value) -> str:
    """A test id from a stage with its flags, or from flags: 03--zero-stage1, --dropout0.1."""
    stage, flags = value if isinstance(value, tuple) else ("", value)
    return stage + "".join(flags) if isinstance(flags, list) else str(value)


@pytest.mark.quick_cases(
    "02-2", "03--zero-stage1-3", "03--zero-stage2-2", "03--zero-stage3-3", "04-2"
)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", EVERY, ids=name)
def test_parity_with_stage_01(pools, reference, corpus_dir, size, strategy):
    stage, own = strategy
    argv = [*RUN, *ONE, "--data", str(corpus_dir)]
    expected = reference(argv)
    for metrics in pools(size).train(stage, [*argv, *own]):
        assert_same_curve(metrics, expected)


@pytest.mark.quick_cases("3-03--zero-stage2-", "2-04---activation-checkpointing")
@pytest.mark.parametrize(
    ("size", "strategy", "extra"),
    [
        *((2, strategy, CHECKPOINTING) for strategy in EVERY),
        *((3, strategy, []) for strategy in EVERY),
        (3, ("04", KEEP), CHECKPOINTING),
        (4, ("04", KEEP), []),
        (4, ("04", HYBRID), CHECKPOINTING),
        (4, ("04", [*HYBRID, *KEEP]), []),
        (2, ("04", ["--shard-size", "1"]), []),
        (2, ("04", OFFLOAD), CHECKPOINTING),
    ],
    ids=name,
)
def test_parity_of_gradient_accumulation_with_dropout(
    pools, reference, corpus_dir, size, strategy, extra
):
    stage, own = strategy
    argv = [*RUN, *FOUR, "--steps", "20", "--data", str(corpus_dir)]
    expected = reference(argv)
    accumulation = ["--micro-batch-size", str(12 // size)]
    for metrics in pools(size).train(stage, [*argv, *accumulation, *extra, *own]):
        assert_same_curve(metrics, expected)


def batches_of_run(stage: str, argv: list[str]) -> list[torch.Tensor]:
    """The inputs of every step that this rank's `main` gets, micro-batches concatenated."""
    module = load_stage(stage)
    train_batches, seen = module.train_batches, []

    def spy(*args, **kwargs):
        for micro_batches in train_batches(*args, **kwargs):
            seen.append(torch.cat([inputs for inputs, *_ in micro_batches]))
            yield micro_batches

    with patch.object(module, "train_batches", spy):
        module.main(argv)
    return seen


def test_every_stage_reads_the_same_global_batches_in_the_same_order(pools, corpus_dir, tmp_path):
    argv = [*SIZE, *ONE, "--steps", "3", "--data", str(corpus_dir), "--run-dir", str(tmp_path)]
    expected = pools(1, group=False).run(batches_of_run, "01", [*argv, "--resume", "never"])[0]
    assert len(expected) == 3 and not torch.equal(expected[0], expected[1])
    for size in (2, 3):
        for stage, own in EVERY:
            micro = ["--micro-batch-size", "2", "--resume", "never"]
            ranks = pools(size).run(batches_of_run, stage, [*argv, *own, *micro])
            for step, whole in enumerate(expected):
                assert torch.equal(torch.cat([seen[step] for seen in ranks]), whole)


PARALLEL = [("05", []), ("05", ["--sequence-parallel"]), ("06", []), ("07", ["--pp", "2"])]


@pytest.mark.quick_cases("04")
@pytest.mark.parametrize("strategy", [*EVERY, ("04", KEEP), *PARALLEL], ids=name)
def test_bfloat16_follows_the_bfloat16_curve_of_stage_01(pools, reference, corpus_dir, strategy):
    stage, own = strategy
    argv = [*SIZE, *ONE, *"--steps 30 --log-every 1 --resume never --dtype bfloat16".split()]
    argv += ["--data", str(corpus_dir)]
    expected = reference(argv)
    for metrics in pools(2).train(stage, [*argv, *own]):
        assert_same_curve(metrics, expected, loss=3e-4, norm=1e-2)


@pytest.mark.parametrize("strategy", [("03", ZERO[2]), ("04", [])], ids=name)
def test_bfloat16_follows_the_bfloat16_curve_of_stage_01_on_the_sample(pools, reference, strategy):
    """With the norms' weights unsharded in bf16, which has no number between 1 and 1.0078, the
    loss is 1.2e-3 off here."""
    stage, own = strategy
    size = "--d-model 64 --n-layers 2 --n-heads 4 --seq-len 64 --global-batch-size 16".split()
    argv = [
        *size,
        *"--steps 30 --log-every 1 --resume never --dtype bfloat16 --data sample".split(),
    ]
    expected = reference(argv)
    for metrics in pools(2).train(stage, [*argv, *own]):
        assert_same_curve(metrics, expected, loss=3e-4, norm=1e-2)


@pytest.mark.quick_cases("04")
@pytest.mark.parametrize(
    "strategy", [*EVERY, ("04", KEEP), ("04", ["--reduce-dtype", "bfloat16"])], ids=name
)
def test_parity_with_stage_01_in_bfloat16(pools, reference, corpus_dir, strategy):
    stage, own = strategy
    argv = [*SIZE, *ONE, *"--steps 20 --log-every 1 --resume never --dtype bfloat16".split()]
    argv += ["--data", str(corpus_dir)]
    extra = ["--micro-batch-size", "3", "--activation-checkpointing"]
    expected = reference(argv)
    for metrics in pools(2).train(stage, [*argv, *extra, *own]):
        assert_same_curve(metrics, expected, loss=0.02, norm=0.1)
