"""Every stage reproduces its reference: stage 01, or its own one-process run.

The runs stand in the stages' files (`NN_*/stage.toml`, see `tools/stages.py`).
"""

from __future__ import annotations

import gc

import pytest
from harness import StageRun, assert_reproduces, cases, load_stage, runs_for, stage_file
from torch import nn

pytestmark = pytest.mark.slow

SHORTER = {  # but for the first parity run of a stage and the runs in `make test`
    "parity": "--steps 10 --eval-every 5",
    "accumulation": "--steps 6 --eval-every 3",  # with dropout and clipping
    "bf16": "--steps 10",
}


def flags_of(run: StageRun) -> list[str]:
    is_first = run == next(iter(stage_file(run.stage).for_("parity")), None)
    return [] if is_first or run.quick else SHORTER[run.purpose].split()


def every_case() -> list:
    """Without what test_late_backend.py trains with the same flags, dropout and clipping."""
    late = {run.id for run in runs_for("late")}
    found = [(purpose, case, *case.values) for purpose in SHORTER for case in cases(purpose)]
    return [
        pytest.param(run, id=f"{purpose} {run.id}", marks=case.marks)
        for purpose, case, run in found
        if not (purpose == "accumulation" and run.id in late and flags_of(run))
    ]


@pytest.mark.parametrize("run", every_case())
def test_parity_with_the_reference(reproduce, run):
    every, expected = reproduce(run, flags=flags_of(run))
    for metrics in every:
        assert_reproduces(run, metrics, expected)


def modules_left_by(stage: str, argv: list[str]) -> list[str]:
    before = modules()
    load_stage(stage).main(argv)
    return [type(each).__name__ for name, each in modules().items() if name not in before]


def modules() -> dict[int, nn.Module]:
    gc.collect()
    return {id(each): each for each in gc.get_objects() if issubclass(type(each), nn.Module)}


@pytest.mark.parametrize("run", cases("agreement"))
def test_a_run_leaves_no_module_behind(pools, corpus_dir, tmp_path, run):
    """Hooks that hold a wrapper would: the garbage collector does not see them."""
    argv = [*run.argv, "--data", str(corpus_dir), "--run-dir", str(tmp_path), "--steps", "2"]
    assert pools(run.ranks).run(modules_left_by, run.stage, argv) == [[]] * run.ranks
