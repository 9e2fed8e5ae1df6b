"""Memory in the READMEs of 03, 04, 05, 07 and 08, as runs and dry runs count them."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
from harness import REPO, PeakMemory, fake_ranks, live_bytes, load_stage
from techniques import Trainer

from common.model import Transformer, TransformerConfig, init_weights
from tools.dry_run import Report, dry_run

pytestmark = pytest.mark.slow

GB = 1e9
LAYERS, WIDTH = 48, 1600  # of --preset gpt2-xl
ROOM = 80 - 25  # GB that the model state leaves on an H100


def stated(folder: str, pattern: str) -> list[float]:
    """The figures of the pattern's groups."""
    found = re.search(pattern, (REPO / folder / "README.md").read_text(), re.M)
    assert found, f"{folder}/README.md does not say {pattern}"
    return [float(figure.replace(",", "")) for figure in found.groups()]


stated_in_05 = partial(stated, "05_tensor_parallel")
stated_in_08 = partial(stated, "08_context_parallel")


# ---- 05: what a layer keeps ----

KEPT = {  # dtype: the factors of A or A / 2 in README, without and with sequence parallelism
    "float32": r"in float32 \| A \((\d+) \+ (\d+)/N\) \| A \((\d+) \+ (\d+)/N\)",
    "bfloat16": r"in bfloat16 \| A/2 \((\d+) \+ (\d+)/N\) \| A/2 \((\d+) \+ (\d+)/N\)",
}


def halves(factors: list[float], n: int, sequence_parallel: bool, dtype: str) -> float:
    """What a layer keeps on each of n ranks, in units of A / 2."""
    full, sharded = factors[2:4] if sequence_parallel else factors[:2]
    return (full + sharded / n) * (2 if dtype == "float32" else 1)


def held(n: int, flags: str, layers: int, run: Callable[..., Report] = dry_run) -> int:
    """Bytes at the peak of a dry run that are neither weights nor optimizer state."""
    shape = "--d-model 256 --n-heads 4 --seq-len 2048 --global-batch-size 8"
    report = run("05", n, 0, f"{shape} --n-layers {layers} {flags}".split())
    return report.peak - report.parameters - report.optimizer


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("dtype", KEPT)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_layer_keeps_what_05_says_in_dry_runs(pools, dtype, sequence_parallel, checkpointing):
    flags = f"--dtype {dtype}" + " --sequence-parallel" * sequence_parallel
    flags += " --activation-checkpointing" * checkpointing
    for n in (1, 4):
        few, many = (pools(1, group=False).run(held, n, flags, layers)[0] for layers in (2, 4))
        expected = halves(stated_in_05(KEPT[dtype]), n, sequence_parallel, dtype)
        if checkpointing:
            expected = 2 / n if sequence_parallel else 2
        units = (many - few) / 2 / (2 * 8 * 2048 * 256)
        assert units == pytest.approx(expected, rel=0.02), n


def test_the_example_of_05_follows_from_the_formulas():
    tensor = 2 * 8192 * 8192 / GB
    tensors = halves(stated_in_05(KEPT["bfloat16"]), 1, False, "bfloat16")
    keeps = r"keeps ([\d.]+) GB for its backward .*? \((\d+) tensors of (\d+) MB"
    layer, count, megabytes = stated_in_05(keeps)
    assert (layer, count, megabytes) == (round(22 * tensor, 2), tensors, round(1e3 * tensor))
    every, checkpointed = stated_in_05(r"that is (\d+) GB, and FSDP.*?leaves ([\d.]+) GB")
    assert (every, checkpointed) == (round(80 * 22 * tensor), round(80 * 2 * tensor, 1))


def test_the_logits_are_in_the_figures_of_05s_experiment(pools):
    figures = stated_in_05(r"counts ([\d.]+) GB of .*? and ([\d.]+) with it\. ([\d.]+) GB of both")
    assert figures.pop() == round(4 * 8 * 512 * 33_280 / 4 / GB, 3)
    shape = "--global-batch-size 8 --n-layers 8 --seq-len 512"
    for flag, figure in zip(("", "--sequence-parallel"), figures, strict=True):
        argv = f"{shape} {flag}".split()
        (report,) = pools(1, group=False).run(dry_run, "05", 4, 0, argv)
        assert report.activations / GB == pytest.approx(figure, abs=0.0006), flag


# ---- 07: the table of layouts ----

EXAMPLE = "--d-model 5120 --n-layers 40 --n-heads 40 --seq-len 4096 --dtype bfloat16"
EXAMPLE += " --micro-batch-size 1 --sequence-parallel --global-batch-size 512"


@pytest.mark.parametrize("degrees", [(8, 4), (8, 8), (4, 4)], ids="tp {0[0]}, pp {0[1]}".format)
def test_memory_in_07_is_that_of_the_dry_run_and_of_the_formula(pools, degrees):
    tp, pp = degrees
    assert f'ARGS="--ranks 1024 {EXAMPLE} --tp 8 --pp 4"' in (REPO / "07_3d/README.md").read_text()
    figures = stated("07_3d", rf"^\| {tp} \| {pp} \| \d+ \| \d+ \| ([\d.]+) \| ([\d.]+) ")
    argv = [*EXAMPLE.split(), "--tp", str(tp), "--pp", str(pp)]
    (report,) = pools(1, group=False).run(dry_run, "07", 1024, 0, argv, timeout=600)
    found = [report.states / GB, report.peak / GB]
    assert figures == pytest.approx(found, abs=0.06)  # rounded to 0.1
    a_layer = (1 + 10 / tp) * 4 * 4096 * 5120  # in bfloat16 on a CPU; pp are in flight
    assert report.activations == pytest.approx(pp * (40 / pp) * a_layer, rel=0.05)


# ---- 08: when checkpointing suffices, and when it takes more ranks ----


def allocate_gradients(model: torch.nn.Module, *_) -> None:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


def activations(stage: str, ranks: int, flags: str, layers: int, tokens: int) -> float:
    """GB of a dry run of gpt2-xl, in which gradients have memory from the start."""
    argv = f"--preset gpt2-xl --dtype bfloat16 --n-layers {layers} --seq-len {tokens} {flags}"
    with patch.object(load_stage(stage), "init_weights", allocate_gradients):
        report = dry_run(stage, ranks, 0, f"{argv} --global-batch-size 1".split())
    return report.activations / GB


LIMITS = [  # stage, ranks, flags, what the text says
    ("02", 1, "--activation-checkpointing", r"to about ([\d,]+) tokens with checkpointing"),
    ("08", 8, "", r"up to ([\d,]+) tokens with cp 8 alone"),
]


@pytest.mark.parametrize(("stage", "ranks", "flags", "limit"), LIMITS)
def test_the_limits_in_08_are_those_of_dry_runs(pools, stage, ranks, flags, limit):
    """Dry runs are linear in the layers, and from 16,384 tokens per rank on in the tokens."""

    def counted(layers: int, tokens: int) -> float:
        return pools(1, group=False).run(activations, stage, ranks, flags, layers, tokens)[0]

    start = 16_384 * ranks
    base = counted(2, start)
    per_layer = (counted(4, start) - base) / 2 / start  # and token
    others = (counted(2, 2 * start) - base) / start - 2 * per_layer
    fixed = base - start * (2 * per_layer + others)
    per_token = LAYERS * per_layer + others
    assert stated_in_08(limit) == [pytest.approx((ROOM - fixed) / per_token, rel=0.01)]
    assert stated_in_08(r"leaves (\d+) GB of an H100's memory") == [ROOM]


def kept_by_a_layer_of_08(ranks: int, kind: str) -> float:
    shape = "--d-model 256 --n-heads 4 --seq-len 512 --global-batch-size 1"
    flags = f"{shape} --context-parallel-kind {kind} --n-layers"
    with patch.object(load_stage("08"), "init_weights", allocate_gradients):
        few, many = (dry_run("08", ranks, 0, f"{flags} {n}".split()).activations for n in (2, 4))
    return (many - few) / 2


@pytest.mark.parametrize("kind", load_stage("08").KINDS)
def test_what_layers_of_08_keep_is_divided_by_the_ranks(pools, kind):
    alone = pools(1, group=False)
    one, two, four = (alone.run(kept_by_a_layer_of_08, n, kind)[0] for n in (1, 2, 4))
    assert (two, four) == (pytest.approx(one / 2, rel=0.01), pytest.approx(one / 4, rel=0.01))


def test_other_memory_figures_of_08():
    tensor = 2 * WIDTH * 131_072 / GB
    (layer,) = stated_in_08(r"as much as (\d+) tensors")
    each, every = stated_in_08(r"takes ([\d.]+) GB per tensor: (\d+) GB in total")
    assert (each, every) == (round(tensor, 2), round(LAYERS * layer * tensor))


# ---- 03 and 04: the pictures of a step's memory ----

PANELS = {  # strategy and bucket size
    "03_zero": [("ddp", 25), ("zero-1", 25), ("zero-2", 25), ("zero-2", 0.5), ("zero-3", 25)],
    "04_fsdp": [("zero-3", 25), ("fsdp", 25), ("fsdp-keep", 25)],
}


@fake_ranks(2)
def peak_of_a_step(strategy: str, bucket_mb: float) -> float:
    """MB on a rank, with the tiny model and a micro-batch of two samples."""
    gc.collect()
    others = live_bytes()
    model = Transformer(TransformerConfig(vocab_size=2304))  # of the sample, padded
    init_weights(model, 0)
    trainer = Trainer(strategy, model, units=model.units(), bucket_mb=bucket_mb, fused=True)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    trainer.step([lambda model: model(tokens, tokens)])  # creates the optimizer state
    with PeakMemory() as peak:
        trainer.step([lambda model: model(tokens, tokens)])
    return (peak.bytes - others) / 1e6


@pytest.mark.parametrize("folder", PANELS)
def test_the_pictures_of_a_steps_memory_show_the_measured_peaks(folder):
    shown = re.findall(r"peak ([\d.]+) MB", (REPO / folder / "memory.svg").read_text())
    found = [peak_of_a_step(*panel) for panel in PANELS[folder]]
    assert [float(peak) for peak in shown] == pytest.approx(found, abs=0.1)
