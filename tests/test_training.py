"""Stage 01 as a run: its loss curve, flags and files, resume, signals and NaN."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import time
from argparse import Namespace
from itertools import count, islice
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.nn.functional as F
from chaos import numbers
from harness import REPO, assert_same_curve, load_stage, metrics_of, stage_path
from processes import train_and_signal
from test_checkpoint import metadata_of, write_metadata
from torch import Tensor

from common.batches import train_batches
from common.distributed import replacing, save0, sync
from common.model import Transformer, TransformerConfig, init_weights
from common.optimization import learning_rate

from common.job import checkpoint_hooks as storage
from common.job import run as run_module
from common.job.checkpoint import checkpoints
from common.job.corpus import load_corpus
from common.job.metrics import Metrics, peak_flops, readable
from common.job.run import Run, git_commit
from common.job.run_folder import CURVE, SHAPE, changes_since_checkpoint
from tools.export import tensors_of

SMALL = "--d-model 32 --n-layers 2 --n-heads 2 --seq-len 16 --global-batch-size 12".split()


@pytest.fixture
def train(pools, corpus_dir):
    """`train("--steps", ...)` runs stage 01 on the small corpus and returns its metrics."""

    def run(*flags, timeout: float | None = None) -> list[dict]:
        argv = [*SMALL, "--data", str(corpus_dir), *map(str, flags)]
        return pools(1, group=False).train("01", argv, timeout)[0]

    return run


# ---- the loss curve ----


def by_hand(args, tokens: Tensor, vocab_size: int) -> list[dict]:
    """The same training, written by hand with PyTorch alone."""
    config = TransformerConfig(vocab_size, args.d_model, args.n_layers, args.n_heads, args.seq_len)
    model = Transformer(config)
    init_weights(model, args.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=args.weight_decay
    )
    lines = []
    batches = train_batches(tokens, args.batching, torch.device("cpu"))
    for step, ((inputs, targets, _),) in enumerate(islice(batches, args.steps)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm).item()
        if step < args.warmup_steps:
            lr = args.lr * (step + 1) / args.warmup_steps
        else:
            done = (step - args.warmup_steps) / (args.steps - args.warmup_steps)
            low = args.lr * args.min_lr_ratio
            lr = low + (args.lr - low) * (1 + math.cos(math.pi * done)) / 2
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        lines.append({"step": step, "loss": loss.item(), "grad_norm": norm, "lr": lr})
    return lines


def test_stage_01_has_the_loss_curve_of_a_hand_written_loop(train, corpus_dir):
    flags = "--steps 12 --log-every 1 --lr 3e-3 --warmup-steps 4 --grad-clip 0.5".split()
    metrics = train(*flags)
    corpus = load_corpus(str(corpus_dir))
    args = load_stage("01").parse_args([*SMALL, *flags])
    expected = by_hand(args, corpus.train, len(corpus.vocab))
    assert [x["step"] for x in metrics] == list(range(12))
    for ours, theirs in zip(metrics, expected, strict=True):
        assert abs(ours["loss"] - theirs["loss"]) < 1e-5, ours["step"]
        assert abs(ours["grad_norm"] / theirs["grad_norm"] - 1) < 1e-4, ours["step"]
        assert ours["lr"] == pytest.approx(theirs["lr"], rel=1e-12)
    assert max(x["grad_norm"] for x in metrics) > 0.5  # so that clipping is active


# ---- flags ----


def test_bfloat16_is_used_and_stays_close_to_float32(train):
    flags = "--steps 6 --log-every 1".split()
    exact, rough = train(*flags), train(*flags, "--dtype", "bfloat16")
    differences = [abs(a["loss"] - b["loss"]) for a, b in zip(exact, rough, strict=True)]
    assert 1e-7 < max(differences) < 0.02
    assert abs(exact[-1]["val_loss"] - rough[-1]["val_loss"]) < 0.02


def test_logging_and_evaluation_intervals(train):
    metrics = train("--steps", 10, "--log-every", 4, "--eval-every", 3)
    # the first step, every 4th, every 3rd with an evaluation, and the last
    assert [x["step"] for x in metrics] == [0, 2, 3, 5, 7, 8, 9]
    assert [x["step"] for x in metrics if "val_loss" in x] == [2, 5, 8, 9]
    assert [x["step"] for x in metrics if "test_loss" in x] == [9]
    assert all("loss" in x for x in metrics)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="the compiler's CPU code needs g++")
def test_compile_has_the_same_loss_curve(train, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    flags = "--n-layers 1 --steps 3 --log-every 1 --dropout 0.1".split()
    assert_same_curve(train(*flags, "--compile", timeout=900), train(*flags))


@pytest.mark.slow
def test_profile_writes_a_trace_of_forward_and_backward(train, tmp_path):
    train("--steps", 8, "--profile", "--run-dir", tmp_path)
    (trace,) = (tmp_path / "profile").glob("*.pt.trace.json")  # for TensorBoard and Perfetto
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e.get("name", "") for e in events}
    assert {"aten::mm", "aten::embedding", "Optimizer.step#AdamW.step"} <= names
    assert any(name.startswith("autograd::engine::evaluate_function") for name in names)
    assert {f"ProfilerStep#{i}" for i in range(3, 6)} <= names


# ---- learning rate, FLOPs and times ----


def test_learning_rate_without_warmup_or_decay():
    """The loop by hand has both."""
    assert learning_rate(0, 1000, peak=1e-3, warmup=0, min_ratio=0.1) == 1e-3
    assert learning_rate(4, 5, peak=1e-3, warmup=5, min_ratio=0.1) == 1e-3


def test_the_wait_for_the_gpu_before_a_save_counts_as_the_steps_time():
    """It would count as the time of the save."""
    run, seen = object.__new__(Run), []
    run.args = Namespace(steps=10, log_every=100, eval_every=0, checkpoint_every=2)
    run.metrics = Namespace(end_step=lambda step, loss, *_: seen.append(loss.item.called))
    for step in range(1, 5):
        run.log(step, Mock(), 1.0, 1e-3)
    assert seen == [True, False, True, False]


def test_peak_flops_of_known_and_unknown_devices():
    assert [peak_flops(f"NVIDIA {x}") for x in ("L4", "L40", "L40S")] == [121e12, 181e12, 362e12]
    assert peak_flops("NVIDIA GeForce GTX 1080") is peak_flops("") is None


GPT2 = {"step": 99999, "loss": 10.4123, "grad_norm": 1.558, "lr": 1.234e-4, "load": 7.53}
GPT2 |= {"tokens_per_s": 612.3, "step_ms": 13378.9, "model_state_mb": 2611.7, "memory_mb": 15432.1}
GPT2 |= {"comm_mb": 1141.28, "seconds_left": 5399, "save_ms": 12345.6}
GPT2 |= {"val_loss": 10.38, "val_ppl": 33278.9, "test_loss": 10.37, "test_ppl": 33123.4}
TINY = GPT2 | {"loss": 7.7624, "tokens_per_s": 212345.6, "comm_mb": 11.82}


@pytest.mark.parametrize("line", [GPT2, TINY])
def test_a_step_fits_into_100_columns_of_the_console_on_a_cpu(line, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    first, second = readable(line).splitlines()
    assert first.startswith("step 99999  loss ") and "load 7.53" in first and "MB  ETA" in first
    assert second.split() == "save 12345.6 ms val loss 10.38 val ppl 3.328e+04".split() + (
        "test loss 10.37 test ppl 3.312e+04".split()
    )
    assert len(first) <= 100 and len(second) <= 100


def test_the_eta_is_measured_without_the_first_step(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    metrics = Metrics(100, 1, 1.0, torch.device("cpu"), tmp_path)
    metrics.open(10)  # resumed
    left = []
    for step, seconds in ((10, 50.0), (11, 2.0), (12, 2.0)):
        metrics.start_step()
        now += seconds
        metrics.end_step(step, torch.zeros(()), torch.zeros(()), 1e-3, True)
        metrics.write()
        left.append(metrics.lines[-1].get("seconds_left"))
    assert left == [None, 88 * 2.0, 87 * 2.0]


# ---- a run's folder ----


def test_run_folder_holds_config_metrics_and_tensorboard_events(train, tmp_path, corpus_dir):
    flags = "--steps 4 --log-every 2 --eval-every 2 --checkpoint-every 2 --grad-clip 0".split()
    metrics = train(*flags, "--run-dir", tmp_path)
    assert metrics_of(tmp_path) == metrics
    for line in metrics:
        assert {"step", "loss", "grad_norm", "lr"} <= set(line)
        assert line["comm_mb"] == 0.0 and line["memory_mb"] > 50 and line["step_ms"] > 0
        assert line["tokens_per_s"] == pytest.approx(12 * 16 / line["step_ms"] * 1e3)
    assert "seconds_left" not in metrics[0]  # the first step warms up
    assert metrics[1]["seconds_left"] > 0 == metrics[-1]["seconds_left"]
    for name in ("val", "test"):
        assert metrics[-1][f"{name}_ppl"] == pytest.approx(math.exp(metrics[-1][f"{name}_loss"]))

    config = json.loads((tmp_path / "config.json").read_text())
    assert config["stage"] == stage_path("01").parent.name and config["world_size"] == 1
    assert config["corpus"] == load_corpus(str(corpus_dir)).digest
    assert config["arguments"]["micro_batch_size"] == 12 and config["arguments"]["grad_clip"] == 0
    assert config["versions"]["torch"] == torch.__version__
    if (REPO / ".git").exists():
        assert re.fullmatch("[0-9a-f]{40}(-dirty)?", config["git_commit"])

    tags = {"loss": "loss/train", "val_loss": "loss/val", "test_ppl": "perplexity/test"}
    tags |= {"step_ms": "speed/step_ms", "memory_mb": "memory/memory_mb", "comm_mb": "comm/comm_mb"}
    for name, tag in tags.items():
        points = dict(load_board(tmp_path, tag))
        assert points == pytest.approx({x["step"]: x[name] for x in metrics if name in x})
    names = [path.name for path in checkpoints(tmp_path / "checkpoints")]
    assert names == ["step-00000002", "step-00000004"]


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_the_commit_is_this_repositorys_and_says_if_a_file_has_changed(monkeypatch, tmp_path):
    for name in ("code", "other"):
        git = ["git", "-C", str(tmp_path / name), "-c", "user.email=a@b", "-c", "user.name=x"]
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.py").write_text(name)
        for words in ("init -q", "add run.py", f"commit -qm {name}"):
            subprocess.run([*git, *words.split()], check=True)
    monkeypatch.setattr(run_module, "__file__", str(tmp_path / "code/run.py"))
    git = ["git", "-C", str(tmp_path / "code"), "rev-parse", "HEAD"]
    head = subprocess.check_output(git, text=True).strip()
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other/.git"))
    assert git_commit() == head
    (tmp_path / "code/run.py").write_text("changed")
    assert git_commit() == f"{head}-dirty"
    shutil.copytree(tmp_path / "code", tmp_path / "other/copy", ignore=lambda *_: [".git"])
    monkeypatch.setattr(run_module, "__file__", str(tmp_path / "other/copy/run.py"))
    assert git_commit() is None


def test_a_metrics_file_that_is_removed_is_reported(tmp_path, capsys):
    metrics = Metrics(1, 1, 1.0, torch.device("cpu"), tmp_path)
    metrics.open(0)
    (tmp_path / "metrics.jsonl").unlink()
    metrics.line = {"step": 0, "loss": 1.0}
    metrics.write()
    metrics.close()
    assert f"{tmp_path}/metrics.jsonl was removed" in capsys.readouterr().err


def test_files_that_are_written_at_the_same_time_have_names_of_their_own(tmp_path, monkeypatch):
    with replacing(tmp_path / "a") as a, replacing(tmp_path / "b") as b:
        a.write(b"a"), b.write(b"b")
    assert [(tmp_path / name).read_text() for name in "ab"] == ["a", "b"]

    def save(state: str, file) -> None:
        if state == "c":  # another process saves meanwhile
            save0("d", tmp_path / "d")
        file.write(state.encode())

    monkeypatch.setattr(torch, "save", save)
    save0("c", tmp_path / "c")
    assert [(tmp_path / name).read_text() for name in "cd"] == ["c", "d"]


class Full(io.BytesIO):
    """A file on a full disk."""

    def write(self, _) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_weights_that_cannot_be_written_are_in_a_checkpoint(
    corpus_dir, tmp_path, monkeypatch, error_of
):
    run, path, main = tmp_path / "run", tmp_path / "model.pt", load_stage("01").main
    argv = [*SMALL, "--data", str(corpus_dir), "--steps", "2", "--run-dir", str(run)]
    with monkeypatch.context() as patched:
        patched.setattr("common.distributed.replacing", lambda _: Full())
        said = error_of(main, [*argv, "--save-model", str(path)], status=1)
    assert "No space left on device; the run's checkpoint is complete: the same flags and" in said
    (run / "launch.json").unlink()  # this process still has its lock
    assert main([*argv, "--save-model", str(path)]) == []
    weights = torch.load(path)
    assert weights.keys() == tensors_of(run / "checkpoints/step-00000002").keys()
    (run / "config.json").write_text("{}")
    assert "config.json is damaged: pass another --run-dir" in error_of(main, argv)


def test_a_checkpoint_folder_that_cannot_be_written_is_reported_before_the_first_step(
    corpus_dir, tmp_path, monkeypatch, error_of
):
    read_only = Mock(side_effect=OSError(errno.EROFS, "Read-only file system"))
    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    argv = [*SMALL, "--data", str(corpus_dir), "--steps", "1", "--run-dir", str(tmp_path)]
    assert "Read-only file system" in error_of(load_stage("01").main, argv)
    assert not (tmp_path / "metrics.jsonl").exists()


# ---- resume ----


def test_resume_logs_the_metrics_of_an_uninterrupted_run(train, tmp_path):
    """It drops those after the checkpoint, lines that are no metrics, and an incomplete one."""
    flags = "--steps 9 --log-every 2 --checkpoint-every 5 --run-dir".split() + [tmp_path]
    whole = train(*flags)
    newest = checkpoints(tmp_path / "checkpoints")[-1]
    (newest / ".metadata").unlink()  # it is incomplete
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'5\n\xff\n[1]\n{"step": "x"}\nnull\n{"step": 7, "lo')
    assert [x["step"] for x in train(*flags)] == [5, 7, 8]
    assert numbers(metrics_of(tmp_path)) == numbers(whole)


@pytest.fixture(scope="module")
def saved_run(pools, corpus_dir, tmp_path_factory) -> tuple[list, Path]:
    """Arguments and folder of a run of two steps with a checkpoint after each."""
    run_dir = tmp_path_factory.mktemp("saved")
    argv = [*SMALL, "--data", str(corpus_dir), "--steps", "2"]
    pools(1, group=False).train("01", [*argv, "--checkpoint-every", "1", "--run-dir", str(run_dir)])
    return argv, run_dir


def test_resume_says_where_a_run_starts_whose_folder_has_no_checkpoint(saved_run, train, tmp_path):
    """So a job that is requeued or restarted continues, with the flags that it was started with."""
    flags = ["--resume", saved_run[1], "--log-every", 1, "--checkpoint-every", 2]
    flags += ["--run-dir", tmp_path]
    assert [line["step"] for line in train(*flags, "--steps", 4)] == [2, 3]
    without = ["--run-dir", tmp_path, "--log-every", 1, "--checkpoint-every", 5]
    assert [line["step"] for line in train(*without, "--steps", 6)] == [4, 5]
    assert [line["step"] for line in train(*flags, "--steps", 7)] == [6]
    steps = [line["step"] for line in metrics_of(tmp_path)]
    assert steps == [step for step, _ in load_board(tmp_path, "loss/train")] == [*range(2, 7)]


def test_a_run_without_checkpoints_starts_again_where_it_began(saved_run, train, tmp_path):
    flags = ["--run-dir", tmp_path, "--log-every", 1, "--steps", 4]
    for more in (["--resume", saved_run[1]], []):
        assert [line["step"] for line in train(*flags, *more)] == [2, 3]


def files_in(folder: Path) -> dict[Path, bytes]:
    found = [p for p in folder.rglob("*") if p.is_file() and p.name != "launch.json"]
    return {path: path.read_bytes() for path in found}


OTHERS = [  # whether the run has checkpoints, the stage and flags of another one, what it says
    (True, "01", "--lr 0.01", "another run: --lr is now 0.01, was 0.001: pass --run-dir NEW, and"),
    (True, "01", "--n-heads 4 --dtype bfloat16", "--n-heads is now 4, was 2; --dtype is now"),
    (True, "01", "--data sample", "the hash of --data's words is now"),
    (True, "01", "--resume {run}/checkpoints/step-00000001", "--resume is now {run}/checkpoints/"),
    (True, "11", "--lr 1e-3", "; stage is now 11_muon, was '01_single_gpu'"),
    (False, "01", "--seed 5", "belongs to another run: --seed is now 5"),
    (False, "01", "--steps 3", "belongs to another run: --steps is now 3, was 2: pass --run-dir"),
    (False, "01", "--resume {saved}", "--resume is now {saved}, was None: pass --run-dir NEW, and"),
]


@pytest.mark.parametrize("saves, stage, flags, says", OTHERS)
def test_a_run_changes_nothing_in_the_folder_of_another_one(
    pools, saved_run, tmp_path, saves, stage, flags, says
):
    argv, saved = saved_run
    run = tmp_path / "run"
    if saves:
        shutil.copytree(saved, run)
    else:
        pools(1, group=False).train("01", [*argv, "--run-dir", str(run)])
    before = files_in(run)
    flags = flags.format(run=run, saved=saved).split()
    (ended,) = pools(1).attempt_train(stage, [*argv, *flags, "--run-dir", str(run)])
    assert ended.exit_status == 2 and ended.stderr.count("\n") == 1, ended
    assert str(run) in ended.stderr and says.format(run=run, saved=saved) in ended.stderr
    assert files_in(run) == before


def test_the_same_command_again_does_the_same_again(pools, saved_run, tmp_path):
    argv, _ = saved_run
    argv = [*argv, "--run-dir", str(tmp_path), "--log-every"]
    pool = pools(1, group=False)
    pool.train("01", [*argv, "1"])
    before = (tmp_path / "metrics.jsonl").read_bytes()
    (ended,) = pool.attempt_train("01", [*argv, "2"])  # without a checkpoint: from the start
    assert "the folder holds this run already (last written by process " in ended.stdout
    assert "--log-every is now 2, was 1" in ended.stdout
    assert numbers(metrics_of(tmp_path)) == numbers(map(json.loads, before.splitlines()))


def load_board(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # by itself TensorBoard sorts files of one second by name, in which a 10 comes before a 9
    files = sorted(folder.glob("events.*"), key=lambda path: path.stat().st_mtime_ns)
    events = [EventAccumulator(str(path)).Reload().Scalars(tag) for path in files]
    return [(each.step, each.value) for of_file in events for each in of_file]


def notes_of_resuming(pools, argv: list, run_dir: Path) -> list[str]:
    """The lines between the run's first line and the line about resuming."""
    argv = [*map(str, argv), "--resume", str(run_dir)]
    (ended,) = pools(1, group=False).attempt_train("01", argv)
    assert ended.exit_status is None and ended.traceback is None, ended
    lines = ended.stdout.splitlines()
    return lines[1 : next(i for i, line in enumerate(lines) if line.startswith("resumed from"))]


def test_resume_with_other_arguments_prints_one_line_for_each(pools, saved_run):
    argv, run_dir = saved_run
    changed = {"seed": 1, "seq-len": 8, "global-batch-size": 6, "lr": 0.01, "warmup-steps": 3}
    changed |= {"min-lr-ratio": 0.5, "steps": 3, "weight-decay": 0.2, "grad-clip": 0.0}
    changed |= {"dropout": 0.1, "dtype": "bfloat16"}
    flags = [str(x) for name, value in changed.items() for x in (f"--{name}", value)]
    notes = notes_of_resuming(pools, [*argv, *flags], run_dir)
    before = dict(zip(argv[::2], argv[1::2], strict=True))
    for (name, value), note in zip(sorted(changed.items()), sorted(notes), strict=True):
        assert note.startswith(f"--{name} is now {value}, was {before.get(f'--{name}', '')}"), note
    silent = "--micro-batch-size 3 --log-every 1 --checkpoint-every 5".split()
    assert notes_of_resuming(pools, [*argv, *silent], run_dir) == []


def test_resume_with_another_model_alpha_or_recipe_prints_one_line_for_each():
    same = dict.fromkeys((*SHAPE, *CURVE), 1)
    saved, run = (
        {"arguments": same | {"recipe": m, "model": m, "lora_alpha": a}} for m, a in ("a1", "b2")
    )
    assert changes_since_checkpoint(saved, run) == [
        "--recipe is now b, was 'a'",
        "--model is now b, was 'a'",
        "--lora-alpha is now 2, was '1'",
    ]


def copy_of_corpus(corpus_dir: Path, folder: Path, name: str, old: str, new: str) -> list[str]:
    shutil.copytree(corpus_dir, folder)
    file = folder / f"{name}.txt"
    file.write_text(file.read_text().replace(old, new))
    return ["--data", str(folder)]


def test_resume_with_another_corpus_prints_a_line_and_another_vocabulary_or_model_is_an_error(
    pools, saved_run, corpus_dir, tmp_path
):
    argv, run_dir = saved_run
    other = copy_of_corpus(corpus_dir, tmp_path / "valid", "valid", "\n", "\n\n")
    (note,) = notes_of_resuming(pools, [*argv, *other], run_dir)
    assert load_corpus(other[1]).digest in note and load_corpus(str(corpus_dir)).digest in note
    words = copy_of_corpus(corpus_dir, tmp_path / "words", "train", "word1 ", "ward1 ")
    shape = "--n-layers 3 --d-model 48 --preset small --seq-len 16".split()
    for flags, says in (
        (words, "the hash of --data's words is now "),
        (["--n-heads", "4"], "--n-heads is now 4, was 2"),
        (shape, "--d-model is now 48, was 32; --n-layers is now 3, was 2"),
    ):
        flags = [*argv, *flags, "--resume", str(run_dir)]
        (ended,) = pools(1, group=False).attempt_train("01", flags)
        assert ended.exit_status == 2 and ended.stderr.count("\n") == 1, ended
        assert "does not fit this model" in ended.stderr and says in ended.stderr


@pytest.mark.parametrize("saved", [None, {storage.RUN: {"arguments": {}}}, {storage.RUN: [1]}])
def test_checkpoint_of_another_version_is_one_clear_line(pools, saved_run, tmp_path, saved):
    argv, run_dir = saved_run
    folder = tmp_path / "checkpoints"
    newest = checkpoints(run_dir / "checkpoints")[-1]
    shutil.copytree(newest, folder / newest.name)
    metadata = metadata_of(folder)
    metadata.planner_data = saved
    write_metadata(folder, metadata)
    (ended,) = pools(1, group=False).attempt_train("01", [*argv, "--resume", str(tmp_path)])
    assert ended.exit_status == 2 and ended.stderr.count("\n") == 1, ended
    assert "another version of this code saved it" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU])
def test_signal_saves_a_checkpoint_after_the_step_and_stops(
    pools, train, tmp_path, corpus_dir, number
):
    flags = ["--steps", "9", "--log-every", "1"]  # a signal saves without --checkpoint-every too
    argv = [*SMALL, "--data", str(corpus_dir), *flags, "--run-dir", str(tmp_path)]
    job = train_and_signal, "01", argv, number, 0, 3
    ((metrics, restored),) = pools(1, group=False).run(*job)
    assert restored
    assert [x["step"] for x in metrics] == [0, 1, 2, 3]
    assert [p.name for p in checkpoints(tmp_path / "checkpoints")] == ["step-00000004"]
    train(*flags, "--run-dir", tmp_path)
    assert numbers(metrics_of(tmp_path)) == numbers(train(*flags))


def train_badly(argv: list[str], what: str) -> list[dict]:
    """Train where a function that is called around the steps fails."""

    def fails(handle: int = -1, *_, fsync=os.fsync, **__) -> None:
        if what != "os.fsync":
            raise OSError(errno.ENOSPC, "No space left on device")
        if stat.S_ISDIR(os.fstat(handle).st_mode):  # as on some network file systems
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(handle)

    run = Run.steps

    def steps(self, first):
        with patch(what, fails):
            yield from run(self, first)

    with patch.object(Run, "steps", steps):
        return load_stage("01").main(argv)


BOARD = "torch.utils.tensorboard.SummaryWriter."


@pytest.mark.parametrize(
    "what", ["builtins.print", BOARD + "add_scalar", BOARD + "__init__", "os.fsync"]
)
def test_what_cannot_be_logged_or_synced_ends_no_run(pools, tmp_path, corpus_dir, what):
    argv = [*SMALL, "--data", str(corpus_dir), *"--steps 4 --log-every 1".split()]
    argv += ["--checkpoint-every", "2", "--run-dir", str(tmp_path)]
    pool = pools(1, group=False)
    pool.close()  # a warning is printed once in a process
    (ended,) = pool.attempt(train_badly, argv, what)
    assert ended.exit_status is None and ended.traceback is None, ended
    assert [x["step"] for x in metrics_of(tmp_path)] == [0, 1, 2, 3]
    assert len(checkpoints(tmp_path / "checkpoints")) == 2
    if what != "builtins.print":  # which prints the warnings, too
        assert "(the run continues)" in ended.stderr and ended.stderr.count("\n") <= 3


def test_an_io_error_of_a_sync_is_not_a_warning(tmp_path):
    with patch("os.fsync", side_effect=OSError(errno.EIO, "Input/output error")):
        with pytest.raises(OSError, match="Input/output"):
            sync(tmp_path)


# ---- NaN ----


def poisoned(argv: list[str], step: int, what: str) -> None:
    """Train with NaN in a weight from `step` on, or in a gradient."""
    stage, steps = load_stage("01"), count()

    def poison(parameters, most, clip=stage.clip_grad_norm_):
        parameters = list(parameters)
        if next(steps) == step:
            target = parameters[3].grad if what == "gradient" else parameters[3]
            target.data[0] = math.nan
        return clip(parameters, most)

    with patch.object(stage, "clip_grad_norm_", poison):
        stage.main(argv)


@pytest.mark.parametrize(
    "what, at, log_every, said, saved",
    [
        ("weight", 6, 100, 7, ["step-00000004"]),
        ("gradient", 7, 100, 7, ["step-00000004"]),  # in the step of a save
        ("weight", 0, 1, 1, []),  # in the first line that shows it
    ],
)
def test_nan_ends_the_run_with_a_line_and_does_not_overwrite_the_last_good_checkpoint(
    pools, train, tmp_path, corpus_dir, what, at, log_every, said, saved
):
    argv = [*SMALL, "--data", str(corpus_dir), "--steps", "12", "--run-dir", str(tmp_path)]
    argv += f"--log-every {log_every} --checkpoint-every 4 --keep-checkpoints 1".split()
    (ended,) = pools(1, group=False).attempt(poisoned, argv, at, what)
    assert ended.exit_status == 1, ended
    assert ended.stderr.count("\n") == 1 and f"step {said} is nan" in ended.stderr
    assert [p.name for p in checkpoints(tmp_path / "checkpoints")] == saved
    assert all(math.isfinite(x["loss"]) for x in metrics_of(tmp_path))
    metrics = train(*argv[len(SMALL) + 2 :])
    assert math.isfinite(metrics[-1]["test_loss"]) and metrics[-1]["step"] == 11
