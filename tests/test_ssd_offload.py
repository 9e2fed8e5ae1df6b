"""Stage 12: the bits of 04 with --cpu-offload, bytes, memory, kills, and disks that fail."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import random
import signal
import tempfile
import threading
from itertools import count
from pathlib import Path
from unittest.mock import patch

import chaos
import pytest
import torch
from harness import assert_same_curve, process_bytes, train, train_in

from common.job.launch import rank
from common.job.ssd_state import StateFile, StateFolder, lock_folder
from tools.stages import load_stage

pytestmark = pytest.mark.slow

SHAPE = "--d-model 32 --n-layers 3 --n-heads 4 --seq-len 16 --global-batch-size 24 --dropout 0.1"
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
def test_the_bytes_that_are_read_and_written_are_those_of_the_formulas(
    pools, argv, ranks, micro, clip
):
    argv = [*argv, "--micro-batch-size", str(micro), "--grad-clip", str(clip), "--d-model", "64"]
    m, d, words = 24 // ranks // micro, 64, 256
    sizes = {"E": words * d, "O": words * d + d, "layer": 12 * d * d + 2 * d}
    page = {k: 4096 * math.ceil(math.ceil(n / ranks) / 1024) for k, n in sizes.items()}  # a row
    every = page["E"] + page["O"] + 3 * page["layer"]
    gathered = page["E"] + page["O"] + (2 * 3 - 1) * page["layer"]  # the last layer stays
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
LAYER = 16 * (12 * 128 * 128 + 2 * 128)  # bytes of state: 3.2 MB; of 64 layers 202 MB


def peak_of(argv: list[str]) -> int:
    """The peak of resident memory in a run, in bytes above what there was before it."""
    module, peak, ended = load_stage("12"), [0], threading.Event()
    before = process_bytes("VmRSS")

    def watch() -> None:
        while not ended.wait(0.002):
            peak[0] = max(peak[0], process_bytes("VmRSS"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        with patch.object(module, "evaluate", lambda *_: 0.0):
            module.main(argv)
    finally:
        ended.set()
        thread.join()
    return peak[0] - before


def test_memory_is_that_of_a_few_units(fresh_pool, corpus_dir, tmp_path):
    peaks = []
    for layers in (4, 64):
        argv = f"{DEEP} --n-layers {layers} --steps 2 --data {corpus_dir}".split()
        peaks += fresh_pool(1).run(peak_of, [*argv, "--run-dir", str(tmp_path / str(layers))])
    assert peaks[1] - peaks[0] < 10 * LAYER, peaks


# ---- kills ----


def kill_in(name: str, after: int, argv: list[str], is_full: bool = False) -> None:
    """Train, and die before the `after`-th call of this function of `os`, or commit, of which the
    first one is that of the start; or find the disk full from then on. Within a commit (`replace`),
    which leaves rank 0 a step ahead, and in a checkpoint (`fsync`) rank 1 alone dies."""
    owner = StateFolder if name == "commit" else os
    calls, own = count(1), getattr(owner, name)

    def dying(*args):
        if next(calls) >= after and (name not in ("replace", "fsync") or rank() == 1):
            if is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*args)

    with patch.object(owner, name, dying):
        train("12", argv)


def test_after_a_kill_at_any_moment_a_run_goes_on_from_its_last_step(fresh_pool, argv, tmp_path):
    argv = [*argv, *"--steps 20 --grad-clip 0.7 --checkpoint-every 20 --run-dir".split()]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    pool, rng = fresh_pool(2), random.Random(0)
    pool.train("12", [*argv, str(whole)])
    done, starts = 0, []
    for name in ["replace", "pwritev", "preadv", "pwritev"] * 5:
        most = 4 if name == "replace" else 25
        pool.attempt(kill_in, name, rng.randrange(1, most), [*argv, str(killed)])
        pool.close()
        with contextlib.suppress(FileNotFoundError):
            record = json.loads((killed / "state/rank-0/step.json").read_text())
            assert record["step"] >= done - 1  # rank 0 goes back, if rank 1 was killed alone
            done = record["step"]
            starts.append(done)
    assert len(set(starts)) > 1, starts
    pool.attempt(kill_in, "fsync", 1, [*argv, str(killed)])
    pool.close()
    moved = killed.rename(tmp_path / "moved")
    pool.train("12", [*argv, str(moved)])
    assert chaos.differences(moved, whole) == ""


def test_a_rank_that_goes_back_by_a_step_records_that_before_it_writes(fresh_pool, argv, tmp_path):
    argv, pool, steps = [*argv, "--run-dir", str(tmp_path)], fresh_pool(2), []
    for name, after in (("replace", 3), ("pwritev", 1)):  # the second run dies in its first write
        pool.attempt(kill_in, name, after, argv)
        pool.close()
        records = (tmp_path / f"state/rank-{r}/step.json" for r in range(2))
        steps.append([json.loads(record.read_text())["step"] for record in records])
    (ahead, first), then = steps
    assert ahead == first + 1 and then == [first, first], steps


def test_files_a_step_behind_a_checkpoint_that_is_corrupt_are_used(fresh_pool, argv, tmp_path):
    """After a kill between the save and the commit."""
    argv = [*argv, *"--checkpoint-every 4 --keep-checkpoints 1 --run-dir".split()]
    whole, killed, pool = tmp_path / "whole", tmp_path / "killed", fresh_pool(1)
    pool.train("12", [*argv, str(whole)])
    pool.attempt(kill_in, "commit", 5, [*argv, str(killed)])
    pool.close()
    (newest,) = (killed / "checkpoints").glob("step-*")
    assert newest.name == "step-00000004"
    (newest / ".metadata").write_bytes(b"")
    lines = pool.train("12", [*argv, str(killed)])[0]
    assert [line["step"] for line in lines] == [3, 4, 5, 6, 7]
    assert chaos.differences(killed, whole) == ""


def loaded(folder: Path) -> tuple[torch.Tensor, ...]:
    """Outputs before three steps, and after the state from before them was loaded. One that was
    computed between has gathered and read units."""
    stage, files = load_stage("12"), StateFolder(folder, "load", is_resumed=False)
    torch.manual_seed(0)
    units = [torch.nn.Linear(4, 4) for _ in range(4)]
    optimizer = stage.SpeculativeAdamW(files, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    model, x = stage.FullyShardedDataParallel(torch.nn.Sequential(*units), units, optimizer), None
    x = torch.ones(1, 4)
    saved = [file.mapped().clone() for file in files.files]
    with torch.no_grad():
        before = model(x)
    for _ in range(3):
        model(x).sum().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        files.commit()
    record = folder / f"rank-{torch.distributed.get_rank()}/step.json"
    with torch.no_grad():
        units[0](x)
    during = []
    states = ([during.append(json.loads(record.read_text())["step"]), each][1] for each in saved)
    optimizer.load_state(0, states)
    assert during == [3] * 4 and json.loads(record.read_text())["step"] == 0
    for file in files.files:
        file.verify()
    with torch.no_grad():
        return before, model(x), model(x)


def test_a_state_that_is_loaded_is_used_at_once_and_committed_once(pools, tmp_path):
    for before, *after in pools(2).run(loaded, tmp_path):
        for each in after:
            torch.testing.assert_close(each, before, rtol=0, atol=0)


def load_too_early(when: str, folder: Path) -> str:
    stage, files = load_stage("12"), StateFolder(folder, "load", is_resumed=False)
    unit = torch.nn.Linear(4, 4)
    optimizer = stage.SpeculativeAdamW(files, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    model = stage.FullyShardedDataParallel(torch.nn.Sequential(unit), [unit], optimizer)
    model(torch.ones(1, 4)).sum().backward()
    model.clip_grad_norm_(1.0)
    if when == "before commit":
        optimizer.step()
    try:
        optimizer.load_state(0, [file.mapped() for file in files.files])
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("when", ["in a step", "before commit"])
def test_a_state_that_is_loaded_within_a_step_is_an_error(fresh_pool, tmp_path, when):
    assert "between commit()" in fresh_pool(1).run(load_too_early, when, tmp_path)[0]


def loaded_in_part(folder: Path) -> float:
    """What a rank resumes from after rank 1 was killed in a load, before its commit."""
    files = StateFolder(folder, "part", is_resumed=False)
    StateFile(files, "unit", torch.zeros(4))
    optimizer = load_stage("12").SpeculativeAdamW(files, lr=0.1, betas=(0.9, 0.95))
    optimizer.load_state(3, [torch.ones(3, 4)])
    with patch.object(files, "commit") if rank() == 1 else contextlib.nullcontext():
        optimizer.load_state(3, [torch.full((3, 4), 2.0)])
    files.close()
    files = StateFolder(folder, "part", is_resumed=True)
    file = StateFile(files, "unit", torch.zeros(4))
    files.close()
    return file.mapped().mean().item()


def test_a_load_that_one_rank_has_not_committed_is_undone(pools, tmp_path):
    assert pools(2).run(loaded_in_part, tmp_path) == [1.0, 1.0]


# ---- bad disks and folders ----


def test_a_full_disk_in_a_step_ends_the_run_which_goes_on_from_its_last_step(
    fresh_pool, argv, tmp_path
):
    argv = [*argv, "--checkpoint-every", "8", "--run-dir"]
    whole, broken, pool = tmp_path / "whole", tmp_path / "broken", fresh_pool(1)
    pool.train("12", [*argv, str(whole)])
    (outcome,) = pool.attempt(kill_in, "pwritev", 60, [*argv, str(broken)], is_full=True)
    assert outcome.exit_status == 1 and outcome.stderr.count("\n") == 1, outcome
    assert "No space left on device; it keeps the last step that was done" in outcome.stderr
    pool.close()  # the process has the lock of the folder until it ends
    pool.train("12", [*argv, str(broken)])
    assert chaos.differences(broken, whole) == ""


def test_bad_folders_are_errors_in_one_line(pools, argv, tmp_path):
    state, argv = tmp_path / "run/state", [*argv, "--run-dir", str(tmp_path / "run"), "--steps"]

    def error(*more: str, ranks: int = 1, status: int = 2) -> str:
        outcome = pools(ranks).attempt_train("12", [*argv, "3", *more])[0]
        pools(ranks).close()  # a process has the lock of the folder until it ends
        assert outcome.exit_status == status and outcome.stderr.count("\n") == 1, outcome
        return outcome.stderr

    pools(1).train("12", [*argv, "2"])
    (tmp_path / "file").write_text("")
    assert "Not a directory" in error("--offload-dir", str(tmp_path / "file"))
    for other, differs in (
        (["--run-dir", str(tmp_path / "other")], "run .., here ../../other"),
        (["--n-heads", "8"], "n_heads 4, here 8"),
        (["--resume", "never"], "this run"),
    ):
        found = error("--offload-dir", str(state), *other)
        assert f"{state}/rank-0 holds step 2 of {differs}: pass another folder" in found
    assert "holds step 2 of ranks 1, here 2:" in error(ranks=2)
    with lock_folder(state / "rank-0"):
        assert f"{state}/rank-0 is used by process" in error()
    large = ["--lr", "1e30", "--warmup-steps", "0"]
    assert "gradient norm of step 3 is not finite" in error("--steps", "9", *large, status=1)
    assert json.loads((state / "rank-0/step.json").read_text())["step"] == 3
    file = state / "rank-0/layers.1.state"
    content = bytearray(file.read_bytes())
    record = json.loads((state / "rank-0/step.json").read_text())
    rows = len(content) // 7
    for slot, is_current in ((1 - record["slot"], False), (record["slot"], True)):
        content[3 * slot * rows + 64] ^= 1
        file.write_bytes(content)
        if is_current:
            assert "layers.1.state is corrupt" in error("--steps", "4")
        else:  # that slot is overwritten before it is read
            assert pools(1).train("12", [*argv, "3"]) == [[]]
            pools(1).close()
    os.truncate(file, 4096)
    assert "layers.1.state has 4,096 bytes instead of" in error("--steps", "4")


def test_a_rank_without_files_makes_all_start_from_the_checkpoint(pools, argv, tmp_path):
    argv = [*argv, "--run-dir", str(tmp_path), "--steps"]
    pools(2).train("12", [*argv, "2"])
    (tmp_path / "state/rank-1/step.json").unlink()
    assert [line["step"] for line in pools(2).train("12", [*argv, "3"])[0]] == [0, 1, 2]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no folder in memory")
def test_a_folder_in_memory_is_named(pools, argv):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        argv = [*argv, "--steps", "1", "--offload-dir", folder]
        assert "rank-0 is in memory (tmpfs)" in pools(1).attempt_train("12", argv)[0].stderr


def train_as_on_macos(argv: list[str]) -> list[dict]:
    with patch.object(os, "posix_fallocate"), patch.object(os, "O_DIRECT"):
        del os.posix_fallocate, os.O_DIRECT
        return train("12", argv)


def test_without_direct_io_a_run_is_the_same_and_warns(pools, argv, tmp_path):
    argv = [*argv, "--steps", "3"]
    expected = pools(1).train("12", [*argv, "--run-dir", str(tmp_path / "with")])[0]
    flags = ["--run-dir", str(tmp_path / "without")]
    (outcome,) = pools(1).attempt(train_as_on_macos, [*argv, *flags])
    assert "has no direct I/O" in outcome.stderr
    assert_same_curve(outcome.value, expected)


def test_a_restart_goes_on_from_the_files_whatever_the_flag_says_and_changes_are_printed(
    pools, argv, tmp_path
):
    argv = [*argv, "--resume", "never", "--run-dir", str(tmp_path), "--steps"]
    launch = {"TORCHELASTIC_RUN_ID": "chosen", "TORCHELASTIC_RESTART_COUNT": "0"}
    pool = pools(1)
    pool.run(train_in, launch, "12", [*argv, "2"])
    pool.close()  # the process has the lock of the folder until it ends
    launch["TORCHELASTIC_RESTART_COUNT"] = "1"
    (outcome,) = pool.attempt(train_in, launch, "12", [*argv, "3", "--lr", "0.5"])
    assert [line["step"] for line in outcome.value] == [2]
    assert "--lr is now 0.5, was 0.001" in outcome.stdout
    assert "--steps is now 3, was 2" in outcome.stdout


def test_a_folder_is_for_one_user_also_in_one_process(tmp_path, error_of):
    with lock_folder(tmp_path):
        user = f"process {os.getpid()} on {os.uname().nodename}"
        assert f"{tmp_path} is used by {user}: end it" in error_of(lock_folder, tmp_path)
