"""Every stage on fake CUDA tensors: `make dry-run-NN ARGS="--device cuda"`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from unittest.mock import patch

import pytest
from harness import REPO, Pool, StageRun, cases, stage_file, stage_path
from slurm_cluster import need

pytestmark = pytest.mark.slow

VOCABULARY = 200
ONE = StageRun("01", "late", 1, ("--micro-batch-size", "6"), quick=True)


def runs() -> list:
    """Of each stage as few late runs as have all of its flags, schedules and dtypes."""
    every, seen = [*cases("late"), *cases("late-bf16")], set()
    found = [pytest.param(ONE, id="01", marks=pytest.mark.quick)]
    for case in sorted(every, key=lambda case: (not case.marks, -len(case.values[0].flags))):
        (run,) = case.values
        words = {(run.stage, word) for word in (run.purpose, *run.flags) if not word[0].isdigit()}
        found += [case] if words - seen else []
        seen |= words
    return found


# what the host does outside of a step, in every stage
OUTSIDE = {
    "log": {"Run.log waits", "Run._check_finite waits", "Metrics.end_step waits"},
    "evaluate": {"evaluate waits"},
    "save": {"AtomicWriter.stage waits", "Run._check_finite waits"},  # once, for all copies
}
OUTSIDE["log"] |= {"Metrics.end_step.<locals>.<dictcomp> waits"}


@pytest.fixture(scope="module")
def process():
    """One process for all runs: it believes in GPUs until it ends."""
    need("g++", packages="g++")
    with contextlib.closing(Pool(1, group=False)) as pool:
        yield pool


def on_fake_cuda(stage: str, ranks: int, rank: int, argv: list[str], script: Path | None = None):
    """Report, and what the host does in each phase."""
    from tools import fake_cuda

    # stages are cached by their path
    with patch.dict(os.environ, {f"SCRIPT_{stage}": str(script or stage_path(stage))}):
        report, events = fake_cuda.run(stage, ranks, rank, argv, VOCABULARY)
    found: dict[str, set[str]] = {}
    for phase, function, what, _ in events:
        found.setdefault(phase, set()).add(f"{function} {what.partition(':')[0]}")
    return report, found


def named(run: StageRun) -> set[str]:
    """What the stage's file says that the host does in a step of this run."""
    reasons = stage_file(run.stage).host.items()
    flags = {key: why.partition(":")[0].split() for key, why in reasons if why.startswith("--")}
    return {key for key, _ in reasons if set(flags.get(key, ())) <= set(run.argv)}


@pytest.mark.parametrize("run", runs())
def test_the_host_waits_and_computes_in_a_step_only_where_the_stages_file_says(process, run):
    rank = 0 if run.purpose == "late-bf16" else run.ranks - 1
    ((_, found),) = process.run(on_fake_cuda, run.stage, run.ranks, rank, run.argv)
    assert found.get("step", set()) == named(run)
    for phase, known in OUTSIDE.items():
        assert found[phase] <= known | named(run) and found[phase] & known, phase


@pytest.mark.parametrize("stage", ["13", "15"])
@pytest.mark.parametrize("flags", ["", "--activation-checkpointing --shard-degree 2"])
def test_the_host_does_not_wait_in_a_step_of_a_pretrained_model(process, stage, flags):
    argv = f"--model {REPO}/tests/golden/qwen3 --data any --seq-len 32 --dtype bfloat16 {flags}"
    ((_, found),) = process.run(on_fake_cuda, stage, 4, 3, argv.split())
    # the host computes: it joins the step's documents
    assert not [each for each in found.get("step", ()) if not each.endswith(" computes")]
    assert found["log"] & OUTSIDE["log"]


# ---- planted bugs ----

LOSS, STEP = "loss += micro_loss.detach()", "optimizer.step()"
PLANTED = {  # text of 02's script, its replacement, what the dry run says
    "a number on the CPU": (" / len(micro_batches)", " / torch.tensor(4.0)", "on the CPU"),
    "another rank's GPU": ("= world.device", '= torch.device("cuda:0")', "another GPU"),
    "a weight on the CPU": ("model.to(device)", "pass", "two devices"),
    "a loss that is read": (LOSS, "loss += micro_loss.item()", "main waits: item()"),
    "a synchronization": (STEP, f"{STEP}; torch.cuda.synchronize()", "main waits: synch"),
    "a mask": (LOSS, f"{LOSS}; inputs[keys > 0] = inputs[0]", "main waits: index_put_"),
    "a collective on the CPU": (
        "loss = all_reduce_control(loss)",
        "loss = all_reduce_control(torch.zeros(()))",
        "main computes: allreduce_",
    ),
}


def with_bug(script: Path) -> str:
    """What a dry run of this script says."""
    from tools import fake_cuda

    argv = "--d-model 32 --n-heads 2 --seq-len 16 --micro-batch-size 6 --dtype bfloat16".split()
    with patch.dict(os.environ, {"SCRIPT_02": str(script)}):
        try:
            _, events = fake_cuda.run("02", 2, 1, argv, VOCABULARY)
        except RuntimeError as error:
            return f"{fake_cuda.place_of(error)}: {error}"
    return ", ".join(f"{f} {what} in {line}" for phase, f, what, line in events if phase == "step")


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found_at_its_place(process, tmp_path, bug):
    old, new, said = PLANTED[bug]
    text = stage_path("02").read_text()
    assert text.count(old) == 1
    script = tmp_path / "train.py"
    script.write_text(text.replace(old, new))
    (found,) = process.run(with_bug, script)
    line = text[: text.index(old)].count("\n") + 1
    place = f"{tmp_path.name}/train.py:{line}" if said.startswith("main") else ""
    assert said in found and place in found
