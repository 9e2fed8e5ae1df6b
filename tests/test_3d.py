"""Stage 07: definitions as in 02, 05 and 06; when gradients are reduced."""

from __future__ import annotations

import ast
import re
from functools import partial
from unittest.mock import patch

import pytest
import torch
from dry_run import dry_run
from harness import REPO, load_stage, stage_path

from common.counter_rng import sample_keys
from common.model import Transformer, TransformerConfig

pytestmark = pytest.mark.slow

# ---- the definitions are those of 02, 05 and 06 ----


ADDITIONS = "# ---- zero bubble"  # begins the comment above what 07 leaves out of 06


def definitions(stage: str) -> dict[str, str]:
    """The source of each top-level class, function and constant, decorators included.

    The zero bubble of 06, which 07 leaves out, is left out here too.
    """
    text = stage_path(stage).read_text()
    lines, found = text.splitlines(), {}
    loop = lines.index("# The training loop")
    additions = next((i for i, line in enumerate(lines) if line.startswith(ADDITIONS)), loop)
    for node in ast.parse(text).body:
        if additions < node.lineno <= loop:
            continue
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign):
            found[node.targets[0].id] = ast.get_source_segment(text, node)
    return found


# functions that use one technique in 02, 05 and 06, and three in 07: these differ
OWN = {"parse_args", "evaluate", "main", "clip_grad_norm_"}
LEFT_OUT = {"gpipe"}  # 1F1B takes as long and less memory


@pytest.mark.quick
@pytest.mark.parametrize("stage", ["02", "05", "06"])
def test_definitions_shared_with_02_05_06_are_identical(stage):
    theirs, ours = definitions(stage), definitions("07")
    shared = (theirs.keys() & ours.keys()) - OWN
    missing = theirs.keys() - ours.keys() - OWN - LEFT_OUT
    assert not missing, f"07 lacks {missing} of {stage}"
    for name in sorted(shared):
        pairs = zip(theirs[name].splitlines(), ours[name].splitlines(), strict=False)
        for number, (a, b) in enumerate(pairs, 1):
            assert a == b, f"{name} drifts in its line {number}\n{stage}: {a}\n07: {b}"
        assert theirs[name] == ours[name], f"{name} is longer in one of them"


# ---- when gradients are reduced ----

CONFIG = TransformerConfig(vocab_size=200, d_model=32, n_layers=4, n_heads=4, seq_len=16)
M, MICRO = 4, 2  # micro-batches per data-parallel rank, and their size


def batches(dp: int) -> list[list[tuple]]:
    """The micro-batches of each data-parallel rank."""
    n = dp * M * MICRO
    tokens = torch.randint(200, (n, 17), generator=torch.Generator().manual_seed(5))
    keys = sample_keys(1, 0, torch.arange(n))
    cut = [x.split(MICRO) for x in (tokens[:, :-1], tokens[:, 1:], keys)]
    every = list(zip(*cut, strict=True))
    return [every[r * M : (r + 1) * M] for r in range(dp)]


def pipeline_on(
    degrees: tuple[int, int, int], schedule: str, sequence_parallel: bool, autocast: bool = False
):
    stage = load_stage("07")
    mesh = stage.build_mesh(*degrees, 60)
    pp, v = degrees[0], 2 if schedule == "interleaved" else 1
    units = {
        s: stage.units_of(s, pp * v, CONFIG.n_layers) for s in range(mesh.pp.rank(), pp * v, pp)
    }
    with torch.device("meta"):
        model = Transformer(CONFIG, units=[unit for part in units.values() for unit in part])
    if mesh.tp.size() > 1:
        stage.tensor_parallel(model, mesh.tp, sequence_parallel)
    stage.init_shards(model, 1, mesh.tp, torch.device("cpu"))
    actions = partial(stage.interleaved_1f1b, v=v)
    sequence_shards = mesh.tp.size() if sequence_parallel else 1
    parts = {number: stage.parts_of(model, units[number]) for number in units}
    stages = {number: stage.PipelineStage(*part, autocast) for number, part in parts.items()}
    pipeline = stage.MeshPipeline(stages, actions, mesh, CONFIG.d_model, sequence_shards)
    return stage, mesh, model, pipeline


EXAMPLE = "--d-model 5120 --n-layers 40 --n-heads 40 --seq-len 4096 --dtype bfloat16"
EXAMPLE += " --micro-batch-size 1 --sequence-parallel --global-batch-size 512"


@pytest.mark.parametrize("degrees", [(8, 4), (8, 8), (4, 4)], ids="tp {0[0]}, pp {0[1]}".format)
def test_memory_in_the_readme_is_that_of_the_dry_run_and_of_the_formula(pools, degrees):
    tp, pp = degrees
    readme = (REPO / "07_3d/README.md").read_text()
    assert f'RANKS=1024 ARGS="{EXAMPLE} --tp 8 --pp 4"' in readme
    (row,) = re.findall(rf"^\| {tp} \| {pp} \| \d+ \| \d+ \| ([\d.]+) \| ([\d.]+) ", readme, re.M)
    argv = [*EXAMPLE.split(), "--tp", str(tp), "--pp", str(pp)]
    (report,) = pools(1, group=False).run(dry_run, "07", 1024, 0, argv)
    found = [report.states / 1e9, report.peak / 1e9]
    assert [float(figure) for figure in row] == pytest.approx(found, abs=0.06)  # rounded to 0.1
    a_layer = (1 + 10 / tp) * 4 * 4096 * 5120  # in bfloat16 on a CPU; pp are in flight
    assert report.activations == pytest.approx(pp * (40 / pp) * a_layer, rel=0.05)


# ---- when gradients are reduced ----


def actions_of_reductions(schedule: str) -> list[str]:
    """The action in which each all-reduce over dp starts."""
    stage = load_stage("07")
    with patch.object(stage, "split_into_buckets", lambda params, cap_mb: [[p] for p in params]):
        _, mesh, _, pipeline = pipeline_on((2, 2, 1), schedule, False)
    run_action, all_reduce, running, found = pipeline.run_action, stage.all_reduce, [], []

    def watched(action, *rest):
        running[:] = [f"{action.kind}{action.micro}"]
        return run_action(action, *rest)

    def launched(tensor, **kwargs):
        found.extend(running)
        return all_reduce(tensor, **kwargs)

    pipeline.run_action = watched
    with patch.object(stage, "all_reduce", launched):
        pipeline.run(batches(2)[mesh.dp.rank()])
    pipeline.finish_gradient_synchronization()
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_gradients_are_reduced_with_the_last_micro_batch(pools, schedule):
    """The head and its norm already in its forward, which runs their backward."""
    forward, backward = f"F{M - 1}", f"B{M - 1}"
    for rank, found in enumerate(pools(4).run(actions_of_reductions, schedule)):
        assert found.count(forward) == (2 if rank >= 2 else 0)  # pp is the outermost axis
        assert set(found) <= {forward, backward}
