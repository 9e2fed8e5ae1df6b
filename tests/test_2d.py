"""14: shards of shards. Tests of all stages have its curves, gradients, bytes and checkpoints."""

from __future__ import annotations

from itertools import product
from math import prod
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import load_stage
from torch import nn

from common import shards
from common.unit_parameters import is_lookup

# ---- checkpoints ----

SHAPES = {"norm": (5,), "rows": (8, 3), "columns": (3, 8), "bias": (1,)}
DIMS = {"rows": 0, "columns": 1}


def chunks_of_a_rank(tp_rank: int, tp: int, start: int, stop: int) -> dict[str, shards.Shard]:
    """Of the elements `start` to `stop` of a flat buffer that holds a tp rank's shards. The full
    tensors count up from 0."""
    flat, shapes = [], {}
    for name, shape in SHAPES.items():
        full = torch.arange(prod(shape)).view(shape)
        part = full.chunk(tp, DIMS[name])[tp_rank] if name in DIMS else full
        flat.append(part.flatten())
        shapes[name] = part.shape
    tensors = {"model": torch.cat(flat)[start:stop]}
    fake = SimpleNamespace(get_rank=lambda _: tp_rank, get_world_size=lambda _: tp)
    with patch.object(shards, "dist", fake):
        return shards.state_of_flat_tensors(tensors, shapes, start, DIMS, None)


@pytest.mark.parametrize("tp, n_shards", [*product((1, 2, 4), (1, 2, 3, 7))])
def test_chunks_of_all_ranks_tile_each_tensor_once(tp, n_shards):
    total = sum(prod(shape) // (tp if name in DIMS else 1) for name, shape in SHAPES.items())
    length = -(-total // n_shards)
    found = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in SHAPES.items()}
    for tp_rank, rank in product(range(tp), range(n_shards)):
        state = chunks_of_a_rank(tp_rank, tp, rank * length, (rank + 1) * length)
        assert {*state} == {f"model.{name}" for name in SHAPES}
        for name, shape in SHAPES.items():
            assert state[f"model.{name}"].size() == shape
            for offset, chunk in state[f"model.{name}"].chunks.items():
                place = tuple(slice(o, o + n) for o, n in zip(offset, chunk.shape, strict=True))
                assert torch.equal(chunk, torch.arange(prod(shape)).view(shape)[place]), name
                found[name][place] += 1
    for name, count in found.items():
        assert (count == (1 if name in DIMS else tp)).all(), name


# ---- gradients ----


def layers_of_05(stage) -> SimpleNamespace:
    """The definitions of the file beside 14's script."""
    return SimpleNamespace(**stage.tensor_parallel.__globals__)


def norms_and_sums() -> tuple[float, float, list[float], list[float]]:
    """Of a norm with 8 elements and a matrix with 128, whose gradients are ones. Returns the norm
    before and after clipping, the values of this rank's gradients, and those after the sum."""
    stage = load_stage("14")
    mesh, layers = stage.build_mesh(1, 2, 2, 60), layers_of_05(stage)
    torch.manual_seed(0)
    region = layers.TensorParallelRegion(mesh.tp)
    matrix = layers.ColumnParallelLinear(nn.Linear(8, 16, bias=False), region)
    unit = nn.Sequential(nn.RMSNorm(8), matrix)
    model = stage.FullyShardedTensorParallel(nn.Sequential(unit), [unit], mesh)
    (shard,) = model.parameters()
    assert shard.shape == (36,)  # of 8 + 64 elements: the norm is in the first shard
    shard.grad = torch.ones_like(shard)
    before, after = model.clip_grad_norm_(1.0).item(), model.clip_grad_norm_(9.0).item()
    shard.grad = torch.ones_like(shard)
    values = [part.sum().item() for part in model.gradients_of(sharded=False)]
    model.all_reduce_replicated_gradients()
    return before, after, values, shard.grad.tolist()


def test_a_norm_layer_counts_once_and_is_summed_over_tp_alone(pools):
    for rank, (before, after, values, summed) in enumerate(pools(4).run(norms_and_sums)):
        assert before == pytest.approx((8 + 128) ** 0.5) and after == pytest.approx(1.0, abs=1e-5)
        has_norm = rank // 2 == 0
        assert sum(values) == 8 * has_norm and len(values) == 1 + has_norm
        assert summed == [2.0] * 8 * has_norm + [1.0] * (36 - 8 * has_norm)


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
    embedding = layers.VocabParallelEmbedding(nn.Embedding(8, 4), region)
    assert is_lookup(embedding) and not is_lookup(matrix)


def test_another_group_and_a_mesh_of_other_ranks_are_errors(pools):
    pools(2).run(mistakes)


def ranks_of_a_mesh() -> dict[str, list[int]]:
    mesh = load_stage("14").build_mesh(2, 2, 2, 60)
    return {axis: dist.get_process_group_ranks(each) for axis, each in mesh._asdict().items()}


@pytest.mark.slow
def test_the_groups_of_a_rank_are_those_of_the_docstring(pools):
    assert pools(8).run(ranks_of_a_mesh)[5] == {"replicate": [1, 5], "shard": [5, 7], "tp": [4, 5]}
