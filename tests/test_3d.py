"""Stage 07: when a mesh reduces its gradients."""

from __future__ import annotations

import copy
from functools import partial
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


class Sometimes(nn.Sequential):
    """Runs its second layer or not."""

    runs = True

    def forward(self, x, keys=None):
        return super().forward(x) if self.runs else self[0](x)


def interleaved_with_a_missing_gradient() -> list[torch.Tensor]:
    """Two stages per rank; one replica of the last one skips a layer in its last micro-batch."""
    stage = load_stage("07")
    mesh = stage.build_mesh(2, 2, 1, timeout=60)
    torch.manual_seed(0)
    layers = [Sometimes(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4)]
    plain = copy.deepcopy(nn.Sequential(*layers))
    layers[3].runs = mesh.dp.rank() == 0
    own = [mesh.pp.rank(), mesh.pp.rank() + 2]
    loss = {3: nn.MSELoss()}
    stages = {i: stage.PipelineStage(layers[i], loss.get(i), False) for i in own}
    schedule = partial(stage.interleaved_1f1b, v=2)
    pipeline = stage.MeshPipeline(stages, schedule, mesh, d_model=8)
    x = torch.ones(1, 3, 8)
    pipeline.run([(x, x, None)] * 2)
    pipeline.finish_gradient_synchronization()
    found = [p.grad for i in own for p in layers[i].parameters()]

    expected = [torch.zeros_like(g) for g in found]
    for plain[3].runs in (True, False):  # the replicas, one after the other
        plain.zero_grad()
        loss[3](plain(x), x).backward()
        params = [p for i in own for p in plain[i].parameters()]
        for total, p in zip(expected, params, strict=True):
            total += 0 if p.grad is None else p.grad / 2
    return [a - b for a, b in zip(found, expected, strict=True)]


def test_a_missing_gradient_keeps_the_order_of_the_stages_reductions(pools):
    for differences in pools(4).run(interleaved_with_a_missing_gradient):
        assert max(d.abs().max() for d in differences) < 1e-6


def norm_with_a_frozen_stage() -> float:
    """Of a gradient [8, 8] and one [8] of ones on the other rank."""
    stage = load_stage("07")
    mesh = stage.build_mesh(2, 1, 1, timeout=60)
    layer = nn.Linear(8, 8).requires_grad_(mesh.pp.rank() > 0)
    if mesh.pp.rank() > 0:
        layer(torch.ones(1, 8)).sum().backward()
    return stage.clip_grad_norm_(layer, 1e9, mesh).item()


def test_a_frozen_stage_has_no_share_in_the_norm(pools):
    assert pools(2).run(norm_with_a_frozen_stage) == pytest.approx([(8 * 8 + 8) ** 0.5] * 2)
