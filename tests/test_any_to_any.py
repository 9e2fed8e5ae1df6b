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
# one run of each stage's file saves, another one loads; of a stage without, a parity run saves
SAVES = {run.stage: run for purpose in ("parity", "save") for run in runs_for(purpose)}
LOADS = {run.stage: run for run in runs_for("load")}


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
    """`saved("04")`: the folder of a run that reproduces the curve, if other stages load it, with a
    checkpoint after `AFTER` steps and one at its end."""

    @cache
    def folder_of(stage: str) -> Path:
        folder = tmp_path_factory.mktemp(f"run-{stage}")
        flags = ("--checkpoint-every", AFTER, "--run-dir", folder)
        metrics = train(SAVES[stage], *flags, "--save-model", folder / "new" / "saved.pt")
        if stage in LOADS:
            assert_same_curve(metrics, curve)
        return folder

    return folder_of


# what a stage saves is the same whatever loads it, so each saves once and loads once, in a ring
STAGES = list(LOADS)
RING = list(zip(STAGES, [*STAGES[1:], STAGES[0]], strict=True))


@pytest.mark.parametrize("of, into", RING)
def test_resume_in_any_other_stage_has_the_same_loss_curve(train, curve, saved, of, into):
    first, _ = checkpoints(saved(of) / "checkpoints")
    rest = train(LOADS[into], "--resume", first)
    assert_same_curve(rest, [line for line in curve if line["step"] >= AFTER])


@pytest.mark.parametrize("stage", SAVES)
def test_the_saved_model_equals_what_export_makes_of_the_checkpoint(saved, tmp_path, stage):
    export(checkpoints(saved(stage) / "checkpoints")[-1], tmp_path / "exported.pt")
    exported = (tmp_path / "exported.pt").read_bytes()
    assert (saved(stage) / "new" / "saved.pt").read_bytes() == exported
