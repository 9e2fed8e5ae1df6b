"""Stage 07: when a mesh reduces its gradients."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from harness import load_stage, with_run_dir
from torch import nn

pytestmark = pytest.mark.slow

MESH = "--pp 2 --n-layers 4 --d-model 16 --n-heads 2 --seq-len 8 --micro-batch-size 1 --steps 1"
M = 4  # micro-batches per data-parallel rank


def actions_of_reductions(argv: list[str]) -> list[str]:
    """The action in which each all-reduce over dp starts; every parameter is a bucket."""
    stage = load_stage("07")
    all_reduce, running, found = stage.all_reduce, [], []

    class Watched(stage.MeshPipeline):
        def run_action(self, action, *rest):
            running[:] = [f"{action.kind}{action.micro}"]
            return super().run_action(action, *rest)

        def finish_gradient_synchronization(self):
            running[:] = ["after backward"]
            super().finish_gradient_synchronization()
            running.clear()

    def launched(tensor, **kwargs):
        found.extend(running)
        return all_reduce(tensor, **kwargs)

    with (
        patch.object(stage, "MeshPipeline", Watched),
        patch.object(stage, "split_into_buckets", lambda params, cap_mb: [[p] for p in params]),
        patch.object(stage, "all_reduce", launched),
    ):
        stage.main(argv)
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_gradients_are_reduced_with_the_last_micro_batch(pools, corpus_dir, schedule):
    """The head and its norm already in its forward, which runs their backward."""
    forward, backward = f"F{M - 1}", f"B{M - 1}"
    argv = f"{MESH} --global-batch-size {2 * M} --schedule {schedule}".split()
    argv = with_run_dir([*argv, "--data", str(corpus_dir)])
    for rank, found in enumerate(pools(4).run(actions_of_reductions, argv)):
        assert found.count(forward) == (2 if rank >= 2 else 0)  # pp is the outermost axis
        assert set(found) <= {forward, backward} and found.count(backward) > 2


# ---- the contract ----

MISUSES = {
    "too few ranks": r"a mesh of \(1, 1, 1\) ranks on 2",
    "tied": "share a parameter",
    "two stages alone": "one rank alone takes one stage",
}


def misuse(case: str) -> None:
    stage, layers = load_stage("07"), [nn.Linear(8, 8), nn.Linear(8, 8)]
    if case == "tied":
        layers[1].weight = layers[0].weight
    stages = {0: stage.PipelineStage(layers[0], layers[1], False)}
    if case == "two stages alone":
        stages = {i: stage.PipelineStage(layer, None, False) for i, layer in enumerate(layers)}
    with pytest.raises(ValueError, match=MISUSES[case]):
        mesh = stage.build_mesh(1, 1 if case == "too few ranks" else 2, 1, timeout=60)
        stage.MeshPipeline(stages, stage.one_f_one_b, mesh, d_model=8)


@pytest.mark.parametrize("case", MISUSES)
def test_what_a_mesh_does_not_take_is_an_error(pools, case):
    pools(2).run(misuse, case)


def norms(frozen: bool) -> tuple[float, float]:
    """With one stage frozen, whose gradients are missing."""
    stage = load_stage("07")
    mesh = stage.build_mesh(2, 1, 1, timeout=60)
    layer = nn.Linear(8, 8).requires_grad_(not (frozen and mesh.pp.rank() == 0))
    if layer.weight.requires_grad:
        layer(torch.ones(1, 8)).sum().backward()
    return stage.clip_grad_norm_(layer, 1e9, mesh).item(), 3.0 * (1 if frozen else 2**0.5) * 8**0.5


def test_a_frozen_stage_has_no_share_in_the_norm(pools):
    for frozen in (False, True):
        for found, expected in pools(2).run(norms, frozen):
            assert found == pytest.approx(expected)
