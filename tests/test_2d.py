"""14: its mesh. Tests of all stages have its curves, gradients, bytes and checkpoints."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness import load_stage
from torch import nn


def layers_of_05(stage) -> SimpleNamespace:
    """The definitions of the file beside 14's script."""
    return SimpleNamespace(**stage.tensor_parallel.__globals__)


def gradients_after_each_finish() -> list[torch.Tensor]:
    stage = load_stage("14")
    mesh, layers = stage.build_mesh(1, 1, 2, 60), layers_of_05(stage)
    torch.manual_seed(0)
    region = layers.SequenceParallelRegion(mesh.tp)
    matrix = layers.ColumnParallelLinear(nn.Linear(8, 16, bias=False), region)
    unit = nn.Sequential(nn.RMSNorm(8), matrix)
    model = stage.FullyShardedTensorParallel(nn.Sequential(unit), [unit], mesh)
    (shard,) = model.parameters()
    found = []
    for finishes in (1, 2):
        model(torch.ones(1, 2, 8)).sum().backward()
        for _ in range(finishes):
            model.finish_gradient_synchronization()
        found.append(shard.grad)
        shard.grad = None
    return found


def test_a_second_finish_in_a_step_sums_nothing_again(pools):
    for once, twice in pools(2).run(gradients_after_each_finish):
        assert torch.equal(once, twice) and once[:8].any()


def mistakes() -> None:
    stage, world = load_stage("14"), dist.group.WORLD
    with pytest.raises(ValueError, match=r"a mesh of \(1, 1, 1\) ranks does not have 2"):
        stage.build_mesh(1, 1, 1, 60)
    mesh, layers = stage.build_mesh(1, 2, 1, 60), layers_of_05(stage)
    region = layers.TensorParallelRegion(world)
    matrix = layers.ColumnParallelLinear(nn.Linear(8, 16, bias=False), region)
    with pytest.raises(ValueError, match="another group than mesh.tp"):
        stage.FullyShardedTensorParallel(nn.Sequential(matrix), [matrix], mesh)


def test_another_group_and_a_mesh_of_other_ranks_are_errors(pools):
    pools(2).run(mistakes)


def ranks_of_a_mesh() -> dict[str, list[int]]:
    mesh = load_stage("14").build_mesh(2, 2, 2, 60)
    return {axis: dist.get_process_group_ranks(each) for axis, each in mesh._asdict().items()}


@pytest.mark.slow
def test_the_groups_of_a_rank_are_those_of_the_docstring(pools):
    assert pools(8).run(ranks_of_a_mesh)[5] == {"replicate": [1, 5], "shard": [5, 7], "tp": [4, 5]}
