"""Stage 07: what a mesh does not take, and the norm of a frozen stage."""

from __future__ import annotations

import pytest
import torch
from harness import load_stage
from torch import nn

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


MISUSES = {
    "too few ranks": r"a mesh of \(1, 1, 1\) ranks on 2",
    "two stages alone": "one rank alone takes one stage",
    "an embedding before": "an input requires a gradient",
}


def misuse(case: str) -> None:
    stage = load_stage("07")
    stages = {i: stage.PipelineStage(nn.Linear(8, 8), None, False) for i in range(2)}
    with pytest.raises(ValueError, match=MISUSES[case]):
        mesh = stage.build_mesh(1, 1 if case == "too few ranks" else 2, 1, 60, CPU)
        groups = mesh.to_lower, mesh.to_higher
        if case == "an embedding before":
            del stages[1]
        pipeline = stage.Pipeline(stages, stage.one_f_one_b, *groups, lambda x: x.shape)
        pipeline.run([(torch.ones(1, 8, requires_grad=True), None, None)])


@pytest.mark.parametrize("case", MISUSES)
def test_what_a_mesh_does_not_take_is_an_error(pools, case):
    pools(2).run(misuse, case)


def norm_with_a_frozen_stage() -> float:
    """Of a gradient [8, 8] and one [8] of ones on the other rank."""
    stage = load_stage("07")
    mesh = stage.build_mesh(2, 1, 1, 60, CPU)
    layer = nn.Linear(8, 8).requires_grad_(mesh.pp.rank() > 0)
    if mesh.pp.rank() > 0:
        layer(torch.ones(1, 8)).sum().backward()
    return stage.clip_grad_norm_(layer, 1e9, mesh).item()


def test_a_frozen_stage_has_no_share_in_the_norm(pools):
    assert pools(2).run(norm_with_a_frozen_stage) == pytest.approx([(8 * 8 + 8) ** 0.5] * 2)
