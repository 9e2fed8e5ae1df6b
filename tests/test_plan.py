"""`make plan` lists layouts that the stages accept, with bytes and memory as in the dry run."""

from __future__ import annotations

import random
import re
import time
from dataclasses import replace
from unittest.mock import patch

import pytest
from harness import load_stage, stages

from tools.dry_run import dry_run
from tools.planner import plan
from tools.planner.step_time import GPUS, Job

# stage, ranks, rank, the stage's flags and the fields of the job that they set
ZERO_1 = {"sharding": "zero1", "gather_bytes": 4}
FSDP, FULL, MESH = {"sharding": "fsdp"}, {"recompute": "full"}, {"pp": 2, "tp": 2, **plan.MESH}
INTERLEAVED = {"pp": 4, "schedule": "interleaved", "virtual": 2, "layers": 8}
LARGE = "--micro-batch-size 8"  # one micro-batch: gradients appear while activations go
LAYOUTS = [
    ("02", 4, 0, "", {}),
    ("02", 4, 0, "--activation-checkpointing", FULL),
    ("03", 8, 0, "--zero-stage 1", ZERO_1),
    ("03", 8, 0, "--zero-stage 2", {"sharding": "zero2", "gather_bytes": 4}),
    ("03", 8, 0, "--zero-stage 3", {"sharding": "zero3", "overlaps_gather": False}),
    ("04", 8, 0, "", FSDP),
    ("04", 8, 0, "--shard-degree 4", {**FSDP, "shard_ranks": 4}),
    ("04", 4, 0, "--no-reshard-after-forward", {**FSDP, "reshards": False}),
    ("05", 4, 0, "--sequence-parallel", {"tp": 4, "sequence_parallel": True}),
    ("03", 8, 0, f"--zero-stage 1 {LARGE}", {**ZERO_1, "micro_batch": 8}),
    ("04", 8, 0, f"--activation-checkpointing {LARGE}", {**FSDP, **FULL, "micro_batch": 8}),
    ("05", 4, 0, "--micro-batch-size 64", {"tp": 4, "micro_batch": 64}),
    ("06", 4, 3, "--schedule 1f1b", {"pp": 4}),
    ("06", 4, 0, "--schedule interleaved --n-layers 8", INTERLEAVED),
    ("07", 8, 0, "--pp 2 --tp 2 --sequence-parallel", {**MESH, "sequence_parallel": True}),
    ("07", 8, 0, "--pp 2 --tp 2 --micro-batch-size 1", {**MESH, "micro_batch": 1}),
]
TWO_D = {**FSDP, "tp": 2}
LAYOUTS += [
    ("14", 8, 0, "--tp 2 --sequence-parallel", {**TWO_D, "sequence_parallel": True}),
    ("14", 8, 0, "--tp 2 --no-reshard-after-forward", {**TWO_D, "reshards": False}),
    ("14", 8, 0, f"--tp 2 --activation-checkpointing {LARGE}", {**TWO_D, **FULL, "micro_batch": 8}),
]
LAYOUTS = [layout for layout in LAYOUTS if layout[0] in stages()]


@pytest.mark.slow
@pytest.mark.parametrize("stage, ranks, rank, flags, fields", LAYOUTS, ids=str)
def test_bytes_and_memory_in_closed_form_are_the_dry_runs(pools, stage, ranks, rank, flags, fields):
    model = "--d-model 768 --n-layers 4 --n-heads 12 --seq-len 256 --global-batch-size 64"
    argv = f"{model} --micro-batch-size 4 --dtype bfloat16 {flags}".split()
    job = Job(4, 768, 12, 256, plan.VOCABULARY, 64, ranks, GPUS["h100"], micro_batch=4)
    job = replace(job, **fields)
    (dry,) = pools(1, group=False).run(dry_run, stage, ranks, rank, argv)
    last = rank > 0 or job.pp == 1
    assert plan.costs(stage, job, rank > 0).sent.total() == pytest.approx(
        dry.sent.total_ring_bytes, abs=1
    )
    assert plan.memory_of_rank(stage, job, 256, last) == pytest.approx(dry.peak, rel=0.03)


def model(**changes) -> Job:
    """7 billion parameters on 16 nodes of eight H100s."""
    job = Job(32, 4096, 32, 4096, plan.VOCABULARY, 512, 128, GPUS["h100"], network=50e9)
    return replace(job, **changes)


FREE = plan.Namespace(micro_batch_size=None, activation_checkpointing=False)


def test_every_listed_layout_passes_the_arguments_check_of_its_stage():
    ranks = 16
    found, dropped = plan.plan(model(ranks=ranks, global_batch=96, gpu=GPUS["h200"]), FREE)
    expected = {"02", "03", "04", "05", "06", "07", "14"} & {*stages()}
    assert {layout.stage for _, layout in found} == expected
    assert dropped["too little memory"] and not dropped["sizes that do not divide"]
    shape = "--d-model 4096 --n-layers 32 --n-heads 32 --seq-len 4096 --global-batch-size 96"
    for _, layout in random.Random(0).sample(found, 60):
        module = load_stage(layout.stage)
        with patch.object(module, "world_size", lambda: ranks):
            args = module.parse_args(f"{shape} {layout.flags}".split())
        assert args.micro_batch_size == layout.job.micro_batch
        degrees = getattr(args, "tp", 1), getattr(args, "pp", None) or layout.job.pp
        if layout.stage in ("07", "14"):
            assert degrees == (layout.job.tp, layout.job.pp) and args.dp == layout.job.dp


def test_layouts_that_do_not_divide_or_do_not_fit_are_dropped():
    found, dropped = plan.plan(model(), FREE)
    assert dropped["sizes that do not divide"] and found == sorted(found, key=lambda x: x[0])
    assert all(layout.memory < 80e9 for _, layout in found)
    assert not [x for _, x in found if x.stage == "05"]  # 32 heads on 128 ranks


@pytest.fixture
def command(monkeypatch, capsys):
    """`make plan` in this process: exit status, stdout, stderr."""

    def run(words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["plan.py", *words.split()])
        status = 0
        try:
            plan.main()
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()

    return run


CLUSTER = "--nodes 16 --gpus 8 --gpu-type h100 --network 50"
SHAPE = "--d-model 4096 --n-layers 32 --n-heads 32 --seq-len 4096 --global-batch-size 512"


@pytest.mark.parametrize(
    "words, said",
    [
        ("--gpus 8 --gpu-type v100", "--gpu-type"),
        ("--gpus 8", "--gpu-type"),
        ("--gpus 8 --gpu-type h100 --nodes 2", "--network"),
        ("--gpus 8 --gpu-type h100 --nodes two", "--nodes"),
        ("--gpus 8 --gpu-type h100 --nodes 2 --network fast", "--network"),
        ("--gpu-type a100-40", "no layout fits"),
        ("--gpus 8 --gpu-type h100 --efficiency 55", "--efficiency 55"),
    ],
)
def test_wrong_arguments_end_with_one_line_and_status_2(command, words, said):
    status, _, errors = command(f"{SHAPE} {words}")
    assert status == 2 and errors.count("\n") == 1 and said in errors


def test_the_plan_of_the_example_takes_at_most_20_seconds(command):
    start = time.process_time()
    status, said, _ = command(f"{SHAPE} {CLUSTER} --explain")
    assert time.process_time() - start < 20
    assert status == 0 and 'make submit-04 NODES=16 GPUS=8 ARGS="--d-model 4096' in said
    assert "a tie: measure these" in said and "by formula" in said


def test_a_lower_efficiency_makes_the_fastest_step_longer(command):
    words = f"{SHAPE} --gpus 8 --gpu-type h200 --efficiency"
    fast, slow = (command(f"{words} {part}")[1] for part in (0.5, 0.25))
    seconds = [float(re.search(r"^ 1 (\S+) s,", said, re.MULTILINE)[1]) for said in (fast, slow)]
    assert seconds[0] < seconds[1]
