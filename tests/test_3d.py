"""Stage 07: when a mesh reduces its gradients."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from harness import load_stage, with_run_dir

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
