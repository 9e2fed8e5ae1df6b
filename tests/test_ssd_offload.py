"""Stage 12: the bits of 04 with --cpu-offload, bytes, memory, kills, and disks that fail."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import random
import resource
import signal
import threading
from pathlib import Path
from unittest.mock import patch

import chaos
import pytest
import torch
from harness import train

from common import state_files
from common.checkpoint import checkpoints
from tools.stages import load_stage

SHAPE = "--d-model 32 --n-layers 3 --n-heads 4 --seq-len 16 --global-batch-size 24 --dropout 0.1"
TINY = f"{SHAPE} --log-every 1 --steps 8 --eval-every 4".split()
EXACT = ("step", "loss", "grad_norm", "lr", "val_loss", "test_loss")


def exact(lines: list[dict]) -> list[dict]:
    return [{name: line[name] for name in EXACT if name in line} for line in lines]


@pytest.fixture
def argv(corpus_dir) -> list[str]:
    return [*TINY, "--data", str(corpus_dir)]


# ---- the same bits ----


@pytest.mark.slow
@pytest.mark.parametrize("clip", ["0", "some", "0.3"])
@pytest.mark.parametrize("ranks, micro", [(1, 24), (2, 6), (3, 8)])
def test_the_same_bits_as_with_cpu_offload_also_of_steps_that_are_redone(
    pools, argv, tmp_path, ranks, micro, clip
):
    """With a clip of 0 no step is clipped, with 0.3 all are."""
    if clip == "some":
        norms = sorted(line["grad_norm"] for line in pools(ranks).train("04", argv)[0])
        clip = str(norms[len(norms) * 2 // 3])
    argv = [*argv, "--micro-batch-size", str(micro), "--grad-clip", clip, "--checkpoint-every", "8"]
    curves, states = {}, {}
    for name, stage, own in (
        ("offload", "04", ["--cpu-offload"]),
        ("speculation", "12", []),
        ("none", "12", ["--no-speculation"]),
    ):
        folder = tmp_path / name
        curves[name] = pools(ranks).train(stage, [*argv, *own, "--run-dir", str(folder)])[0]
        states[name] = chaos.tensors_of(checkpoints(folder / "checkpoints")[-1])
    for name in ("speculation", "none"):
        assert exact(curves[name]) == exact(curves["offload"])
        for tensor, value in states["offload"].items():
            assert torch.equal(states[name][tensor], value), tensor
    assert curves["none"][-1]["redone"] == 0
    assert (curves["speculation"][-1]["redone"] > 0) == (clip != "0")


# ---- bytes ----


@pytest.mark.slow
@pytest.mark.parametrize("ranks, micro, clip", [(1, 24, 0), (2, 6, 0), (3, 8, 0.3)])
def test_the_bytes_that_are_read_and_written_are_those_of_the_formulas(
    pools, argv, ranks, micro, clip
):
    argv = [*argv, "--micro-batch-size", str(micro), "--grad-clip", str(clip), "--d-model", "64"]
    m, d, words = 24 // ranks // micro, 64, 256
    sizes = {"E": words * d, "O": words * d + d, "layer": 12 * d * d + 2 * d}
    page = {k: 4096 * math.ceil(math.ceil(n / ranks) / 1024) for k, n in sizes.items()}  # a row
    every = page["E"] + page["O"] + 3 * page["layer"]
    gathered = page["E"] + page["O"] + 2 * 3 * page["layer"]
    read = m * gathered + 3 * every + (m - 1) * every
    written = m * every + 3 * every
    for lines in pools(ranks).train("12", argv):
        redone, speculated = 0, True
        for line in lines:
            is_clipped = line["grad_norm"] + 1e-6 > (clip or float("inf"))
            again = is_clipped and speculated
            redone += again
            late = again or not speculated  # the gradient is read again
            expected = read + every * (late + 3 * again)
            assert round(1e6 * line["ssd_read_mb"]) == expected, line["step"]
            assert round(1e6 * line["ssd_written_mb"]) == written + 3 * every * again
            assert line["redone"] == redone
            speculated = not is_clipped


# ---- memory ----

DEEP = "--d-model 128 --n-heads 4 --seq-len 16 --global-batch-size 2 --activation-checkpointing"


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_of(argv: list[str]) -> int:
    """The peak of resident memory above what there was before the run, in bytes."""
    module, peak, ended = load_stage("12"), [0], threading.Event()
    before = resident()

    def watch() -> None:
        while not ended.wait(0.002):
            peak[0] = max(peak[0], resident())

    thread = threading.Thread(target=watch)
    thread.start()
    with patch.object(module, "evaluate", lambda *_: 0.0):
        module.main(argv)
    ended.set()
    thread.join()
    return peak[0] - before


@pytest.mark.slow
def test_memory_is_that_of_a_few_units_whatever_their_number(fresh_pool, corpus_dir, tmp_path):
    """A layer's state is 3.2 MB, that of 60 layers 189 MB."""
    found = {}
    for layers in (4, 64):
        argv = [*DEEP.split(), "--n-layers", str(layers), "--steps", "4", "--data", str(corpus_dir)]
        (found[layers],) = fresh_pool(1).run(
            peak_of, [*argv, "--run-dir", str(tmp_path / str(layers))]
        )
    few, many = found[4], found[64]
    layer = 16 * (12 * 128 * 128 + 2 * 128)
    assert many - few < 16 * layer, found


# ---- kills ----


def kill_in(name: str, after: int, argv: list[str]) -> None:
    """Train, and die before the `after`-th call of this function of `os`."""
    calls, own = [0], getattr(os, name)

    def dying(*args):
        calls[0] += 1
        if calls[0] == after:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*args)

    with patch.object(os, name, dying):
        train("12", argv)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_after_a_kill_at_any_moment_a_run_goes_on_from_its_last_step(
    fresh_pool, argv, tmp_path, ranks
):
    argv = [*argv, "--grad-clip", "0.7", "--checkpoint-every", "8", "--run-dir"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    pool, rng = fresh_pool(ranks), random.Random(ranks)
    pool.train("12", [*argv, str(whole)])
    done, starts = 0, []
    places = ["pwritev", "preadv", "pwritev", "replace"] * 2
    for name in places:
        most = 9 if name == "replace" else 60
        pool.attempt(kill_in, name, rng.randrange(1, most), [*argv, str(killed)])
        pool.close()
        with contextlib.suppress(FileNotFoundError):
            record = json.loads((killed / "state/rank-0/step.json").read_text())
            assert record["step"] >= done
            done = record["step"]
            starts.append(done)
    assert len(set(starts)) > 1, starts
    pool.train("12", [*argv, str(killed)])
    assert chaos.differences(killed, whole) == ""
    assert not list(killed.glob("state/earlier*"))


# ---- bad disks and folders ----


def full_disk(argv: list[str]) -> None:
    """Train on a disk that is full from the 60th write on."""
    own, writes = os.pwritev, [0]

    def write(*args):
        writes[0] += 1
        if writes[0] > 60:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return own(*args)

    with patch.object(os, "pwritev", write):
        train("12", argv)


@pytest.mark.slow
def test_a_full_disk_in_a_step_ends_the_run_which_goes_on_from_its_last_step(
    fresh_pool, argv, tmp_path
):
    argv = [*argv, "--checkpoint-every", "8", "--run-dir"]
    whole, broken, pool = tmp_path / "whole", tmp_path / "broken", fresh_pool(1)
    pool.train("12", [*argv, str(whole)])
    (outcome,) = pool.attempt(full_disk, [*argv, str(broken)])
    assert outcome.exit_status == 1 and outcome.stderr.count("\n") == 1, outcome
    assert "No space left on device; step 5 is kept there" in outcome.stderr
    pool.close()  # the process has the lock of the folder until it ends
    pool.train("12", [*argv, str(broken)])
    assert chaos.differences(broken, whole) == ""


@pytest.mark.slow
def test_bad_folders_are_errors_in_one_line(pools, argv, tmp_path):
    argv, state = (
        [*argv, "--steps", "2", "--run-dir", str(tmp_path / "run")],
        tmp_path / "run/state",
    )

    def error(*more: str) -> str:
        (outcome,) = pools(1).attempt_train("12", [*argv, *more])
        assert outcome.exit_status == 2 and outcome.stderr.count("\n") == 1, outcome
        return outcome.stderr

    pools(1).train("12", argv)
    (tmp_path / "file").write_text("")
    assert "cannot write to" in error("--offload-dir", str(tmp_path / "file"))
    other = ["--run-dir", str(tmp_path / "other"), "--offload-dir", str(state)]
    assert f"holds step 2 of the run {tmp_path / 'run'}: pass another" in error(*other)
    with open(state / "rank-0/lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another run uses" in error("--steps", "3")
    os.truncate(state / "rank-0/layers.1.state", 4096)
    assert "layers.1.state has 4,096 bytes instead of" in error("--steps", "3")


@pytest.mark.slow
def test_files_of_another_number_of_ranks_are_moved_aside(pools, argv, tmp_path):
    argv = [*argv, "--run-dir", str(tmp_path), "--steps"]
    pools(2).train("12", [*argv, "2"])
    assert pools(1).train("12", [*argv, "3"])[0][0]["step"] == 0
    moved = json.loads((tmp_path / "state/earlier-rank-0/step.json").read_text())
    assert moved["step"] == 2 and moved["content"]["ranks"] == 2


def test_a_folder_in_memory_is_named():
    if Path("/dev/shm").is_dir():
        assert state_files.file_system(Path("/dev/shm")) == "tmpfs"
