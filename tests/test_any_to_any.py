"""Resume a checkpoint of any stage on any topology in any other: the loss curve stays the same."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from harness import Pool, StageRun, assert_same_curve, runs_for

from common.job.checkpoint import checkpoints
from tools.export import export

pytestmark = pytest.mark.slow

AFTER = 20  # steps, so that the optimizer state is far from zero
# one run of each stage's file saves, another one loads
SAVES, LOADS = ({run.stage: run for run in runs_for(purpose)} for purpose in ("save", "load"))


@pytest.fixture(scope="module")
def train(pools, corpus_dir):
    """`train(run, "--resume", ...)`: rank 0's metrics of a stage's run."""

    def metrics(run: StageRun, *flags) -> list[dict]:
        pool: Pool = pools(run.ranks, group=run.stage != "01")
        return pool.train(run.stage, [*run.argv, "--data", str(corpus_dir), *map(str, flags)])[0]

    return metrics


@pytest.fixture(scope="module")
def curve(reference, corpus_dir) -> list[dict]:
    """The metrics of stage 01's uninterrupted run."""
    return reference([*SAVES["01"].argv, "--data", str(corpus_dir)])


@pytest.fixture(scope="module")
def saved(train, curve, tmp_path_factory):
    """`saved("04")`: a checkpoint after `AFTER` steps, of a run that reproduces the curve."""

    @cache
    def checkpoint(stage: str) -> Path:
        folder = tmp_path_factory.mktemp(f"run-{stage}")
        flags = ("--checkpoint-every", AFTER, "--run-dir", folder)
        assert_same_curve(train(SAVES[stage], *flags), curve)
        first, _ = checkpoints(folder / "checkpoints")
        return first

    return checkpoint


# what a stage saves is the same whatever loads it, so each saves once and loads once, in a ring
STAGES = list(SAVES)
RING = list(zip(STAGES, [*STAGES[1:], STAGES[0]], strict=True))
# and 14, which saves shards of shards, to and from those that it builds on
OTHERS = [pair for other in ("04", "05", "07") for pair in ((other, "14"), ("14", other))]


@pytest.mark.parametrize("of, into", RING + OTHERS)
def test_resume_in_any_other_stage_has_the_same_loss_curve(train, curve, saved, of, into):
    rest = train(LOADS[into], "--resume", saved(of))
    assert_same_curve(rest, [line for line in curve if line["step"] >= AFTER])


LAST = {run.stage: run for run in runs_for("parity")}
RUNS = {run.id: run for runs in (LAST, SAVES, LOADS) for run in runs.values()}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_the_saved_model_equals_what_export_makes_of_the_checkpoint(train, tmp_path, run):
    flags = "--steps", 2, "--eval-every", 0, "--checkpoint-every", 2, "--run-dir", tmp_path
    train(run, *flags, "--save-model", tmp_path / "new" / "saved.pt")
    export(checkpoints(tmp_path / "checkpoints")[-1], tmp_path / "exported.pt")
    saved = (tmp_path / "new" / "saved.pt").read_bytes()
    assert saved == (tmp_path / "exported.pt").read_bytes()
