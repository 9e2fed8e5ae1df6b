"""Stage 12: the bits of 04 with --cpu-offload, bytes, memory, scratch files, disks that fail."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from copy import deepcopy
from itertools import chain, count
from pathlib import Path
from unittest.mock import patch

import chaos
import pytest
import torch
from harness import assert_same_curve, process_bytes, train
from torch import nn

from common.job.launch import rank
from tools.stages import load_stage

pytestmark = pytest.mark.slow

SHAPE = "--d-model 32 --n-layers 3 --n-heads 4 --seq-len 16 --global-batch-size 24 --dropout 0.1"
ADAMW = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1}
TINY = f"{SHAPE} --log-every 1 --steps 8 --eval-every 4".split()


@pytest.fixture
def argv(corpus_dir) -> list[str]:
    return [*TINY, "--data", str(corpus_dir)]


# ---- the same bits ----


@pytest.mark.parametrize("ranks, micro, clip", [(1, 24, "0"), (2, 6, "some"), (3, 8, "0.3")])
def test_the_same_bits_as_with_cpu_offload_also_of_steps_that_are_redone(
    pools, argv, tmp_path, ranks, micro, clip
):
    """With a clip of 0 no step is clipped, with 0.3 all are."""
    if clip == "some":
        norms = sorted(line["grad_norm"] for line in pools(ranks).train("04", argv)[0])
        clip = str(norms[len(norms) * 2 // 3])
    argv = [*argv, "--micro-batch-size", str(micro), "--grad-clip", clip, "--checkpoint-every", "8"]
    redone = {}
    for name, stage, own in (
        ("offload", "04", ["--cpu-offload"]),
        ("speculation", "12", []),
        ("none", "12", ["--no-speculation"]),
    ):
        run_dir = ["--run-dir", str(tmp_path / name)]
        redone[name] = pools(ranks).train(stage, [*argv, *own, *run_dir])[0][-1].get("redone")
        assert chaos.differences(tmp_path / name, tmp_path / "offload") == "", name
    assert redone["none"] == 0 and (redone["speculation"] > 0) == (clip != "0")


# ---- bytes ----


@pytest.mark.parametrize("ranks, micro, clip", [(1, 24, 0), (2, 6, 0), (3, 8, 0.3)])
def test_bytes_read_and_written_are_those_of_the_formulas(pools, argv, ranks, micro, clip):
    argv = [*argv, "--micro-batch-size", str(micro), "--grad-clip", str(clip), "--d-model", "64"]
    m, d, words = 24 // ranks // micro, 64, 256
    sizes = {"E": words * d, "O": words * d + d, "layer": 12 * d * d + 2 * d}
    page = {k: 4096 * math.ceil(math.ceil(n / ranks) / 1024) for k, n in sizes.items()}  # a row
    every = page["E"] + page["O"] + 3 * page["layer"]
    gathered = page["E"] + page["O"] + (2 * 3 - 1) * page["layer"]  # the last layer stays
    read = m * gathered + 3 * every + (m - 1) * every
    written = m * every + 3 * every
    for line in chain.from_iterable(pools(ranks).train("12", argv)):
        waits, again = clip > 0, clip > 0 and line["step"] == 0  # then none speculates
        assert (line["grad_norm"] > clip) and line["redone"] == waits
        # the gradient is read once more, and if the step is redone, the whole state
        assert round(1e6 * line["ssd_read_mb"]) == read + every * (waits + 3 * again)
        assert round(1e6 * line["ssd_written_mb"]) == written + every * 3 * again


# ---- memory ----

DEEP = "--d-model 128 --n-heads 4 --seq-len 16 --global-batch-size 2 --activation-checkpointing"
LAYER = 16 * (12 * 128 * 128 + 2 * 128)  # bytes of state: 3.2 MB; of 64 layers 202 MB


def peak_of(argv: list[str]) -> int:
    """The peak of resident memory in a run, in bytes above what there was before it."""
    module = load_stage("12")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before = process_bytes("VmRSS")
    with patch.object(module, "evaluate", lambda *_: 0.0):
        module.main(argv)
    return process_bytes("VmHWM") - before


def test_memory_is_that_of_a_few_units(fresh_pool, corpus_dir, tmp_path):
    peaks = []
    for layers in (4, 64):
        argv = f"{DEEP} --n-layers {layers} --steps 2 --data {corpus_dir}".split()
        peaks += fresh_pool(1).run(peak_of, [*argv, "--run-dir", str(tmp_path / str(layers))])
    assert peaks[1] - peaks[0] < 10 * LAYER, peaks


# ---- files ----


def train_and_die(in_write: int, facts: Path, has_tmpfile: bool, argv: list[str]) -> None:
    """Train. Rank 1 is killed in one of its writes; before, it notes what it has on the disk."""
    calls, write = count(1), os.pwritev

    def dying(fd, *args):
        if rank() == 1 and next(calls) == in_write:
            file = os.fstat(fd)
            facts.write_text(json.dumps([file.st_nlink, file.st_blocks]))
            os.kill(os.getpid(), signal.SIGKILL)
        return write(fd, *args)

    with (
        patch.object(os, "pwritev", dying),
        patch.object(tempfile, "_O_TMPFILE_WORKS", has_tmpfile),
    ):
        train("12", argv)


@pytest.mark.parametrize("has_tmpfile", [True, False], ids=["O_TMPFILE", "unlinked"])
def test_a_killed_rank_leaves_nothing_on_the_disk(fresh_pool, argv, tmp_path, has_tmpfile):
    folder, facts = tmp_path / "scratch", tmp_path / "facts"
    argv = [*argv, "--run-dir", str(tmp_path / "run"), "--offload-dir", str(folder)]
    ended = fresh_pool(2).attempt(train_and_die, 40, facts, has_tmpfile, argv)
    assert all(o.traceback for o in ended), ended
    links, blocks = json.loads(facts.read_text())
    assert links == 0 and blocks > 0  # so the kernel frees the blocks when the process ends
    assert os.listdir(folder) == []


def sharded(folder: Path, units: list[nn.Module]) -> tuple:
    """A wrapped module of these units, and its optimizer."""
    stage = load_stage("12")
    optimizer = stage.SpeculativeAdamW(folder, **ADAMW)
    return stage.FullyShardedDataParallel(nn.Sequential(*units), units, optimizer), optimizer


def outputs_of_two(folder: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Train two models side by side, with files in one folder, and the same ones without files."""
    torch.manual_seed(0)
    runs, x = [], torch.ones(1, 4)
    for _ in range(2):
        plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        runs.append((*sharded(folder, [*deepcopy(plain)]), plain))
        assert runs[-1][1].traffic == {"ssd_written_mb": pytest.approx(3 * 0.004096)}
    adamws = [torch.optim.AdamW(plain.parameters(), **ADAMW) for *_, plain in runs]
    for _ in range(3):
        for (model, optimizer, plain), adamw in zip(runs, adamws, strict=True):
            for each in (model, plain):
                each(x).sum().backward()
            model.finish_gradient_synchronization()
            with pytest.raises(RuntimeError):
                model(torch.ones(1, 5))  # what it has read ahead is stale after the step
            optimizer.step(1.0)
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            adamw.step()
            adamw.zero_grad()
    return [(model(x).detach(), plain(x).detach()) for model, _, plain in runs]


def test_two_runs_share_a_folder_and_write_only_parameters_at_the_start(pools, tmp_path):
    for outputs in pools(2).run(outputs_of_two, tmp_path):
        for ours, plain in outputs:
            torch.testing.assert_close(ours, plain)


# ---- disks and numbers that fail ----


def full_disk(name: str, fails: Callable[[int], bool]) -> AbstractContextManager:
    """In it this function of `os` finds the disk full in the calls whose number `fails`."""
    calls, own = count(), getattr(os, name)

    def full(*args):
        if fails(next(calls)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return own(*args)

    return patch.object(os, name, full)


def train_on_a_full_disk(name: str, argv: list[str], after: int = 0) -> list[dict]:
    with full_disk(name, lambda call: call >= after):
        return train("12", argv)


def test_a_disk_that_is_too_small_is_an_error_before_the_first_step(pools, argv, tmp_path):
    argv = [*argv, "--offload-dir", str(tmp_path)]
    size = 28 * (2 * 256 * 32 + 32 + 3 * (12 * 32 * 32 + 64)) / 1e6
    needs = f"the files of this rank need {size:,.1f} MB"
    for after in (0, 2):
        (full,) = pools(1).attempt(train_on_a_full_disk, "posix_fallocate", argv, after)
        assert full.exit_status == 2 and full.stderr.count("\n") == 1
        assert f"--offload-dir {tmp_path}: No space left on device; {needs}" in full.stderr
        assert "step     0" not in full.stdout


def test_a_disk_that_fills_up_in_a_step_ends_the_run_and_is_named(fresh_pool, argv, tmp_path):
    argv = [*argv, "--offload-dir", str(tmp_path)]
    (full,) = fresh_pool(1).attempt(train_on_a_full_disk, "pwritev", argv, 40)
    assert f"OSError: [Errno 28] No space left on device: '{tmp_path}'" in full.traceback


def steps_after_a_failed_update(folder: Path) -> int:
    """An update cannot be written; returns how many optimizer steps have succeeded since."""
    (model, optimizer), succeeded = sharded(folder, [nn.Linear(4, 4)]), 0
    with full_disk("pwritev", lambda call: call == 1):  # the first one writes the gradient
        model(torch.ones(1, 4)).sum().backward()
        model.finish_gradient_synchronization()
        for _ in range(2):
            with suppress(OSError):
                optimizer.step()
                succeeded += 1
    return succeeded


def test_after_a_failed_update_no_step_succeeds(pools, tmp_path):
    assert pools(1).run(steps_after_a_failed_update, tmp_path) == [0]


def test_a_folder_that_cannot_be_is_an_error_in_one_line(pools, argv, tmp_path):
    (tmp_path / "file").write_text("")
    for path, why in (("file", "File exists"), ("file/below", "Not a directory")):
        (bad,) = pools(1).attempt_train("12", [*argv, "--offload-dir", str(tmp_path / path)])
        assert bad.exit_status == 2 and bad.stderr.count("\n") == 1, bad
        assert f"--offload-dir {tmp_path / path}: {why};" in bad.stderr


def train_as_on_macos(argv: list[str]) -> list[dict]:
    with patch.object(os, "posix_fallocate"), patch.object(os, "O_DIRECT"):
        del os.posix_fallocate, os.O_DIRECT
        return train("12", argv)


def test_without_direct_io_a_run_is_the_same(pools, argv):
    expected = pools(1).train("12", argv)[0]
    (outcome,) = pools(1).attempt(train_as_on_macos, [*argv, "--run-dir", tempfile.mkdtemp()])
    assert_same_curve(outcome.value, expected)


def test_a_gradient_that_is_not_finite_ends_the_run_as_in_04(pools, argv):
    argv = [*argv, "--lr", "1e30", "--warmup-steps", "0", "--grad-clip", "1"]
    ends = [pools(2).attempt_train(stage, argv) for stage in ("04", "12")]
    said = ["".join(each.stderr for each in ended).partition(" (rank")[0] for ended in ends]
    assert "is nan" in said[0] and said[0].strip() == said[1].strip()


def test_that_a_kill_loses_a_run_without_checkpoints_is_said_at_the_start(pools, argv):
    warning = "without --checkpoint-every, a run that is killed starts again at step 0"
    for flags, is_said in (([], True), (["--checkpoint-every", "1"], False)):
        (outcome,) = pools(1).attempt_train("12", [*argv, "--steps", "1", *flags])
        assert (warning in outcome.stdout) == is_said
