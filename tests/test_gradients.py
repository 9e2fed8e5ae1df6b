"""A law of all stages: after one step every gradient is that of the stage's reference.

AdamW's first moment after one step is a tenth of the gradient, and Muon's momentum a twentieth. A
checkpoint has them unsharded and by the plain model's names, so whatever the ranks hold is compared
in full. The runs are those of the stages' files, with dropout and without clipping.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from harness import StageRun, assert_reproduces, comparably, load_stage, runs_for, stage_file
from torch import Tensor

from common import collectives

from common.job.checkpoint import checkpoints
from tools.export import tensors_of

pytestmark = pytest.mark.slow

ONE_STEP = "--steps 1 --checkpoint-every 1 --grad-clip 0".split()


def cases() -> list:
    """Each run in float32, once: the purposes differ in the flags that are given here."""
    purposes = ("accumulation", "parity", "late", "load")
    runs = [run for purpose in purposes for run in runs_for(purpose)]
    quick = {run.id for run in runs if run.quick}
    once = {run.id: replace(run, purpose="accumulation") for run in runs}
    return [
        pytest.param(run, id=id, marks=[pytest.mark.quick] if id in quick else [])
        for id, run in sorted(once.items())
    ]


def one_step(stage: str, argv: list[str]) -> list[dict]:
    with patch.object(load_stage(stage), "evaluate", lambda *_: 0.0):
        return load_stage(stage).main(argv)


def through_host_memory(stage: str, argv: list[str]) -> list[dict]:
    """Send as ranks that share a GPU do over Gloo."""
    with patch.object(collectives, "_goes_through_host", lambda *_: True):
        return one_step(stage, argv)


@pytest.fixture(scope="module")
def trained(pools, corpus_dir, tmp_path_factory):
    """`trained(how, stage, ranks, argv)`: metrics and first moments, of references once."""
    replays, known = str(tmp_path_factory.mktemp("replay")), {}

    def results(how: str, stage: str, ranks: int, argv: list[str], job=one_step) -> tuple:
        key = (stage, *argv)
        if how == "record" and key in known:
            return known[key]
        run_dir = tmp_path_factory.mktemp("run")
        argv = [*argv, *ONE_STEP, "--data", str(corpus_dir), "--run-dir", str(run_dir)]
        pool = pools(ranks, group=stage != "01")
        metrics = pool.run(comparably, job, how, replays, stage, argv)
        found = metrics, first_moments(run_dir)
        return known.setdefault(key, found) if how == "record" else found

    return results


def first_moments(run_dir: Path) -> dict[str, Tensor]:
    (checkpoint,) = checkpoints(run_dir / "checkpoints")
    tensors = tensors_of(checkpoint, "optim.")
    return {name: x for name, x in tensors.items() if not name.startswith("exp_avg_sq.")}


def assert_same_gradients(trained, run: StageRun, job=one_step) -> None:
    reference = stage_file(run.stage).reference
    (expected,), theirs = trained("record", reference, 1, run.reference_argv)
    every, ours = trained("replay", run.stage, run.ranks, run.argv, job)
    for metrics in every:
        assert_reproduces(run, metrics, expected)
    assert ours.keys() == theirs.keys() and len(ours) > 8
    # errors of single gradients partly cancel in the norm of all
    file = stage_file(run.stage)
    norm = {"norm": 1e-4, **file.tolerance, **dict(run.tolerance)}["norm"]
    within = 2 * (file.gradient_tolerance or norm)
    size = torch.stack([x.norm() for x in theirs.values()]).norm()
    for name, x in theirs.items():
        assert torch.isfinite(ours[name]).all() and x.any(), name
        error = (ours[name] - x).norm() / size
        assert error <= within, f"{name}: off by {error:.2g} of all gradients' norm"


@pytest.mark.parametrize("run", cases())
def test_every_gradient_is_that_of_the_reference(trained, run):
    assert_same_gradients(trained, run)


def test_every_gradient_is_that_of_the_reference_when_sent_through_host_memory(trained):
    runs = [run for run in runs_for("late") if "interleaved" in run.flags]
    assert_same_gradients(trained, replace(runs[0], purpose="accumulation"), through_host_memory)
