"""Stage 06: backward in two parts, the trace, and the memory of the micro-batches in flight."""

from __future__ import annotations

import re
from collections import Counter, deque
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from dry_run import dry_run
from harness import REPO, load_stage
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from common.counter_rng import sample_keys
from common.model import Transformer, TransformerConfig, init_weights

pytestmark = pytest.mark.slow

CONFIG = TransformerConfig(vocab_size=200, d_model=32, n_layers=8, n_heads=4, seq_len=16)
MICRO, SEQ = 2, 16


def micro_batches(m: int) -> list[tuple]:
    tokens = torch.randint(200, (m, MICRO, SEQ + 1), generator=torch.Generator().manual_seed(5))
    keys = sample_keys(1, 0, torch.arange(m * MICRO)).view(m, MICRO)
    return [(t[:, :-1], t[:, 1:], k) for t, k in zip(tokens, keys, strict=True)]


def pipeline_of(schedule: str, config: TransformerConfig, autocast: bool = False):
    """A pipeline over all ranks, and this rank's part of the model."""
    stage, p, rank = load_stage("06"), dist.get_world_size(), dist.get_rank()
    units = stage.units_of(rank, p, config.n_layers)
    model = Transformer(config, indices=units)
    init_weights(model, 1)
    groups = [dist.new_group(group_desc=to) for to in ("to_lower", "to_higher")]
    kind = stage.ZeroBubbleStage if schedule == "zero-bubble" else stage.PipelineStage
    stages = {rank: kind(*stage.parts_of(model, units), autocast)}
    return stage.Pipeline(stages, stage.SCHEDULES[schedule], *groups, config.d_model), model


# ---- backward in two parts ----


def test_zero_bubble_takes_no_linear_layer_with_a_bias():
    """Its weight gradient is computed apart, and nobody would compute the bias's."""
    with pytest.raises(ValueError):
        load_stage("06").DeferredLinear(nn.Linear(4, 4), deque())


MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmm_")


class MatmulCounter(TorchDispatchMode):
    """Counts matmuls by operator and by the shapes of the operands in their order."""

    def __init__(self):
        super().__init__()
        self.seen: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in MATMULS:
            shapes = [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]
            self.seen[(name.rstrip("_"), *shapes)] += 1
        return func(*args, **(kwargs or {}))


def gradients_and_matmuls(schedule: str, changes: dict, bf16: bool) -> tuple[dict, Counter, dict]:
    """Of a run whose gradients are added to existing ones."""
    pipeline, model = pipeline_of(schedule, replace(CONFIG, **changes), autocast=bf16)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 1 + number)
    by_kind: dict = {}
    total = MatmulCounter()
    run_action = pipeline.run_action

    def counted(action, *rest):
        with MatmulCounter() as matmuls:
            result = run_action(action, *rest)
        by_kind[action.kind] = matmuls.seen
        total.seen.update(matmuls.seen)
        return result

    pipeline.run_action = counted
    pipeline.run(micro_batches(5))
    return {n: p.grad for n, p in model.named_parameters()}, total.seen, by_kind


@pytest.mark.quick_cases("float32")
@pytest.mark.parametrize(
    ("changes", "bf16"),
    [({}, False), ({"activation_checkpointing": True, "dropout": 0.2}, True)],
    ids=["float32", "bfloat16-checkpointing"],
)
def test_all_schedules_are_bitwise_identical_with_the_same_matmuls(pools, changes, bf16):
    """Also where backward has two parts."""
    expected = pools(2).run(gradients_and_matmuls, "1f1b", changes, bf16)
    for schedule in ("gpipe", "zero-bubble"):
        found = pools(2).run(gradients_and_matmuls, schedule, changes, bf16)
        for (theirs, matmuls, _), (ours, same, by_kind) in zip(expected, found, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours), schedule
            assert matmuls and matmuls == same
            if schedule == "zero-bubble":
                # four linear layers in each of a rank's four layers: W computes the weight
                # gradients, B the gradients of the inputs, and what is recomputed
                assert by_kind["W"].total() == 4 * 4
                assert by_kind["B"].total() == 4 * 4 * (2 if changes else 1)


# ---- the trace ----


def actions_traced(schedule: str) -> tuple[list[str], list[str]]:
    """The names in the trace of a run, and the schedule's actions; without a profiler, none."""
    pipeline, _ = pipeline_of(schedule, CONFIG)
    batch = micro_batches(2)
    spans: list[str] = []
    with patch("torch.profiler.record_function", lambda name: spans.append(name) or nullcontext()):
        pipeline.run(batch)
    assert not spans, "record_function is slow even if nothing is traced"
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        pipeline.run(batch)
    actions = pipeline.schedule(pipeline.rank, pipeline.p, len(batch))
    expected = [f"{action.kind} {action.micro} {action.stage}" for action in actions]
    return [event.name for event in trace.events() if event.name in expected], expected


def test_a_trace_names_every_action(pools):
    for found, expected in pools(2).run(actions_traced, "zero-bubble"):
        assert sorted(found) == sorted(expected)


# ---- memory ----


def test_activation_memory_is_that_of_the_micro_batches_in_flight(pools):
    """1F1B holds what GPipe holds with p - rank micro-batches, whatever their number is."""
    shape = "--d-model 64 --n-layers 4 --n-heads 4 --seq-len 64 --micro-batch-size 2"
    message = 2 * 64 * 64 * 4

    def held(schedule: str, m: int, rank: int = 0, flags: str = "") -> float:
        """In messages. GPipe's peak, where nothing is recomputed, is before the first gradients."""
        argv = f"{shape} {flags} --global-batch-size {2 * m} --schedule {schedule}".split()
        (report,) = pools(1, group=False).run(dry_run, "06", 4, rank, argv, 200)
        is_before = schedule == "gpipe" and not flags
        return (report.activations + report.gradients * is_before) / message

    four = held("gpipe", 4)
    assert held("gpipe", 8) - four > 4 * 10
    assert held("1f1b", 8) == pytest.approx(four, abs=3)
    assert held("1f1b", 8, rank=2) == pytest.approx(held("gpipe", 2, rank=2), abs=3)
    assert held("zero-bubble", 8) <= four + 2  # between B and W less is kept
    # a layer per stage, recomputed: only its input is kept
    few, many = (held("gpipe", m, flags="--activation-checkpointing") for m in (4, 8))
    assert (many - few) / 4 == pytest.approx(1, abs=0.01)


MODEL = "--d-model 1024 --n-layers 16 --n-heads 16 --seq-len 1024"
MODEL += " --global-batch-size 8 --micro-batch-size 1"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_activations_in_the_readme_are_those_of_the_dry_run(pools, schedule):
    readme = (REPO / "06_pipeline/README.md").read_text()
    assert f'RANKS=4 RANK=0 ARGS="{MODEL}"' in readme
    (row,) = re.findall(rf"^\| `{schedule}`((?: \| \d\.\d\d){{4}}) \|$", readme, re.M)
    found = []
    for dtype, rank in product(("float32", "bfloat16"), (0, 3)):
        argv = [*MODEL.split(), "--schedule", schedule, "--dtype", dtype]
        (report,) = pools(1, group=False).run(dry_run, "06", 4, rank, argv)
        found.append(report.activations / 1e9)
    stated = [float(figure) for figure in row.split("|")[1:]]
    assert stated == pytest.approx(found, abs=0.006)  # rounded to 0.01
