"""A dry run reports what a real run does, and follows the formulas up to 4096 ranks."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from harness import REPO, PeakMemory, cases, load_stage
from torch.utils._python_dispatch import _disable_current_modes

from common import collectives

from tools.dry_run import PATCHES, Report, dry_run

pytestmark = pytest.mark.slow

VOCABULARY = 201  # of the tests' corpus, with <eos>


def reduce_scatter_with_unseen_wait(
    *args, own=collectives._reduce_scatter_single, async_op=False, **kwargs
):
    work = own(*args, async_op=True, **kwargs)

    def wait() -> None:
        with _disable_current_modes():
            work.wait()

    return SimpleNamespace(wait=wait) if async_op else wait()


def real(stage: str, argv: list[str]) -> Report:
    """The same step for real. A dry run predicts runs on NCCL, whose reduce-scatter has no buffer:
    that of PyTorch's own on Gloo is seen in its wait only."""
    module = load_stage(stage)
    native = patch.object(collectives, "_is_gloo", lambda *_: False)
    unseen = patch.object(collectives, "_reduce_scatter_single", reduce_scatter_with_unseen_wait)
    with native, unseen, patch.multiple(module, **PATCHES), PeakMemory() as memory:
        report = module.main(argv)
    report.peak = memory.above
    return report


@pytest.mark.wall_clock  # a thread of Gloo may still hold what it has sent
@pytest.mark.parametrize("run", cases("dry-run"))
def test_dry_run_matches_the_memory_and_communication_of_eight_real_ranks(pools, corpus_dir, run):
    stage, argv = run.stage, run.argv
    alone = pools(1, group=False)
    dry = {rank: alone.run(dry_run, stage, 8, rank, argv, VOCABULARY)[0] for rank in (0, 7)}
    peak = dict.fromkeys(dry, math.inf)
    for _ in range(6):  # a thread of Gloo may still hold a sent tensor
        every = pools(8).run(real, stage, [*argv, "--data", str(corpus_dir)])
        peak = {rank: min(peak[rank], every[rank].peak) for rank in dry}
        if all(peak[rank] <= 1.02 * dry[rank].peak for rank in dry):
            break
    for rank, ours in ((0, every[0]), (7, every[7])):
        for kind in ("parameters", "gradients", "optimizer"):
            assert getattr(dry[rank], kind) == getattr(ours, kind), kind
        assert dry[rank].sent == ours.sent
        assert dry[rank].peak == pytest.approx(peak[rank], rel=0.02)


def test_dry_run_of_a_model_larger_than_this_machines_memory(pools):
    giant = "--d-model 131072 --n-layers 2 --n-heads 2 --global-batch-size 8".split()
    (got,) = pools(1, group=False).run(dry_run, "04", 8, 0, giant, VOCABULARY)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 8 * got.states > 16 * 2 * 12 * 131072**2 > memory


def test_wrong_arguments_have_the_same_error_in_a_dry_run():
    words = "07 --ranks 1024 --pp 8 --tp 8 --preset gpt2-xl --global-batch-size 24".split()
    command = [sys.executable, "-m", "tools.dry_run", *words]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "--global-batch-size 24" in done.stderr
