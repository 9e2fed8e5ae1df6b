"""Every stage reproduces its reference: stage 01, or its own one-process run.

The runs stand in the stages' files (`NN_*/stage.toml`, see `tools/stages.py`).
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from harness import Run, assert_reproduces, assert_same_curve, cases, load_stage, stage_file

pytestmark = pytest.mark.slow

# for a purpose's runs that are neither the first of their stage nor in `make test`
SHORTER = {
    "parity": "--steps 20 --eval-every 10",
    "accumulation": "--steps 8 --eval-every 4",
    "bf16": "--steps 10",
}


def flags_of(run: Run) -> list[str]:
    is_first = run == stage_file(run.stage).for_(run.purpose)[0]
    return [] if is_first or run.quick else SHORTER[run.purpose].split()


@pytest.mark.parametrize("run", cases("parity"))
def test_parity_in_float32(reproduce, run):
    every, expected = reproduce(run, flags=flags_of(run))
    for metrics in every:
        assert_reproduces(run, metrics, expected)


@pytest.mark.parametrize("run", cases("accumulation"))
def test_parity_of_gradient_accumulation_with_dropout_and_clipping(reproduce, run):
    every, expected = reproduce(run, flags=flags_of(run))
    for metrics in every:
        assert_reproduces(run, metrics, expected)


@pytest.mark.parametrize("run", cases("bf16"))
def test_parity_in_bfloat16(reproduce, run):
    every, expected = reproduce(run, flags=flags_of(run))
    for metrics in every:
        assert_reproduces(run, metrics, expected)


@pytest.mark.parametrize("stage, own", [("03", ["--zero-stage", "3"]), ("04", [])], ids=str)
def test_bfloat16_follows_the_bfloat16_curve_of_stage_01_on_the_sample(
    pools, reference, stage, own
):
    """With norms that multiply by a bf16 factor, which has no value between 1 and 1.0078, the loss
    is 1.2e-3 off here."""
    size = "--d-model 64 --n-layers 2 --n-heads 4 --seq-len 64 --global-batch-size 16".split()
    argv = [*size, *"--steps 30 --log-every 1 --resume never --dtype bfloat16".split()]
    argv += "--lr 1e-3 --data sample".split()
    expected = reference(argv)
    for metrics in pools(2).train(stage, [*argv, *own]):
        assert_same_curve(metrics, expected, loss=3e-4, norm=1e-2)


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
    argv = "--d-model 32 --n-layers 2 --n-heads 2 --seq-len 16 --global-batch-size 12".split()
    argv += ["--steps", "3", "--data", str(corpus_dir), "--run-dir", str(tmp_path)]
    argv += ["--resume", "never"]
    expected = pools(1, group=False).run(batches_of_run, "01", argv)[0]
    assert len(expected) == 3 and not torch.equal(expected[0], expected[1])
    for size in (2, 3):
        for stage, own in (("02", []), ("03", ["--zero-stage", "2"]), ("04", [])):
            ranks = pools(size).run(batches_of_run, stage, [*argv, *own, "--micro-batch-size", "2"])
            for step, whole in enumerate(expected):
                assert torch.equal(torch.cat([seen[step] for seen in ranks]), whole)
