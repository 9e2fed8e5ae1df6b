"""Stage 07: parity on every mesh; communication and memory are the sums of their parts."""

from __future__ import annotations

import ast
import re
from functools import partial
from unittest.mock import patch

import pytest
import torch
from dry_run import dry_run
from harness import REPO, assert_same_curve, load_stage, stage_path, true_ledger

from common.counter_rng import sample_keys
from common.model import Transformer, TransformerConfig, init_weights

pytestmark = pytest.mark.slow

SIZE = "--d-model 32 --n-layers 4 --n-heads 4 --seq-len 16 --global-batch-size 24".split()
RUN = [*SIZE, *"--steps 20 --log-every 1 --eval-every 10 --resume never".split()]
EVERYTHING = "--activation-checkpointing --dropout 0.1 --grad-clip 0.3".split()
SEQUENCE = ["--sequence-parallel"]


def mesh(pp: int, dp: int, tp: int) -> tuple[int, list[str]]:
    """The number of ranks, and the flags."""
    return pp * dp * tp, ["--pp", str(pp), "--tp", str(tp)]


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


# ---- parity ----

MESHES = [*((pp, dp, tp) for pp in (1, 2) for dp in (1, 2) for tp in (1, 2)), (3, 1, 2)]
# collectives take most of the time, and each layer adds some: use as few layers as possible
TWO_LAYERS = ["--n-layers", "2"]


@pytest.mark.quick_cases("(2, 2, 2)")
@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_parity_with_stage_01(pools, reference, corpus_dir, degrees):
    size, flags = mesh(*degrees)
    argv = [*RUN, "--data", str(corpus_dir), *(TWO_LAYERS if degrees[0] < 3 else [])]
    # micro-batches: one without a pipeline, two with two pipeline stages, four with more
    micro = ["--micro-batch-size", str(24 // degrees[1] // {1: 1, 2: 2}.get(degrees[0], 4))]
    for metrics in pools(size).train("07", [*argv, *flags, *micro]):
        assert_same_curve(metrics, reference(argv))


@pytest.mark.parametrize(
    ("degrees", "own", "extra"),
    [
        ((2, 2, 1), ["--schedule", "interleaved"], ["--dropout", "0.1"]),
        ((2, 2, 2), ["--schedule", "interleaved"], EVERYTHING),
        ((2, 2, 2), SEQUENCE, EVERYTHING),
        ((1, 2, 2), SEQUENCE, ["--dropout", "0.1"]),
        ((2, 1, 2), ["--schedule", "interleaved", *SEQUENCE], []),
        ((2, 1, 1), SEQUENCE, []),  # without tp there is nothing to shard
    ],
    ids=str,
)
def test_parity_with_stage_01_under_other_flags(pools, reference, corpus_dir, degrees, own, extra):
    size, flags = mesh(*degrees)
    argv = [*RUN, "--steps", "10", "--data", str(corpus_dir), *extra]
    argv += [] if "interleaved" in own else TWO_LAYERS
    micro = ["--micro-batch-size", str(24 // degrees[1] // 4)]
    for metrics in pools(size).train("07", [*argv, *flags, *own, *micro]):
        assert_same_curve(metrics, reference(argv))


# ---- gradients ----

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


def gradients(degrees: tuple[int, int, int], schedule: str, sequence_parallel: bool) -> None:
    """Every gradient and the global norm match the plain model's, before and after clipping."""
    stage, mesh, model, pipeline = pipeline_on(degrees, schedule, sequence_parallel)
    data = batches(degrees[1])
    plain = Transformer(CONFIG)
    init_weights(plain, 1)
    tokens, targets, keys = map(torch.cat, zip(*[b for share in data for b in share], strict=True))
    plain(tokens, targets, keys).backward()
    pipeline.run(data[mesh.dp.rank()])
    pipeline.finish_gradient_synchronization()
    if sequence_parallel:
        stage.all_reduce_replicated_gradients(model, mesh.tp)
    shard_dims, twins = stage.shard_dims_of(model), dict(plain.named_parameters())

    def assert_gradients_match() -> None:
        for name, p in model.named_parameters():
            grad = twins[name].grad
            if name in shard_dims:
                grad = grad.chunk(degrees[2], shard_dims[name])[mesh.tp.rank()]
            torch.testing.assert_close(p.grad, grad, atol=1e-6, rtol=0, msg=name)

    assert_gradients_match()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    norm = stage.clip_grad_norm_(model, 0.1, mesh)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    assert_gradients_match()


@pytest.mark.quick_cases("1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_gradients_match_the_plain_model(pools, schedule):
    for sequence_parallel in (False, True):
        pools(8).run(gradients, (2, 2, 2), schedule, sequence_parallel)


# ---- communication ----


def sent_in_a_step(degrees, schedule: str, sequence_parallel: bool):
    stage, mesh, model, pipeline = pipeline_on(degrees, schedule, sequence_parallel)
    with true_ledger() as (ledger, _):
        pipeline.run(batches(degrees[1])[mesh.dp.rank()])
        pipeline.finish_gradient_synchronization()
        if sequence_parallel:
            stage.all_reduce_replicated_gradients(model, mesh.tp)
        stage.clip_grad_norm_(model, 1.0, mesh)
    parameters = sum(p.numel() for p in model.parameters())
    norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    return ledger.payload, ledger.ring, parameters, norms


@pytest.mark.quick_cases("sp-1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_communication_is_the_sum_of_the_parts_each_in_its_group(
    pools, schedule, sequence_parallel
):
    v = 2 if schedule == "interleaved" else 1
    ranks = pools(8).run(sent_in_a_step, (2, 2, 2), schedule, sequence_parallel)
    for rank, (payload, ring, parameters, norms) in enumerate(ranks):
        is_last = rank >= 4  # pp is the outermost axis
        hidden = 4 * MICRO * 16 * 32  # bytes of a micro-batch's hidden states
        # over pp: each of the 2v - 1 boundaries is between the two ranks; m times, it carries
        # hidden states in one direction and gradients in the other
        nbytes = hidden // 2 if sequence_parallel else hidden
        to_neighbor, other = ("to_lower", "to_higher") if is_last else ("to_higher", "to_lower")
        assert payload["isend", to_neighbor] == (2 * v - 1) * M * nbytes
        assert payload["isend", other] == 0
        # over dp: this rank's own parameters, once
        assert payload["all_reduce", "dp"] == 4 * parameters
        assert ring["all_reduce", "dp"] == 4 * parameters  # 2 (N - 1) / N = 1 for two ranks
        # over tp: four all-reduces per layer, one for the embedding or the head, three small ones
        # for the loss
        large, small = 4 * 2 + 1, 3 if is_last else 0
        tokens = 4 * MICRO * 16
        if sequence_parallel:
            assert payload["all_gather_single", "tp"] == M * large * hidden
            assert payload["reduce_scatter_single", "tp"] == M * large * hidden
            assert payload["all_reduce", "tp"] == M * small * tokens + 4 * norms
        else:
            assert payload["all_reduce", "tp"] == M * (large * hidden + small * tokens)
        names = {group for _, group in payload}
        assert names <= {"dp", "tp", "to_higher", "to_lower"}


# ---- memory ----


@pytest.mark.wall_clock  # a thread of Gloo may still hold what it has sent
@pytest.mark.quick
def test_model_state_is_sharded_over_pp_and_tp(fresh_pool, corpus_dir):
    flags = mesh(2, 1, 2)[1]
    argv = [*SIZE, "--steps", "2", "--log-every", "1", "--data", str(corpus_dir)]
    every = fresh_pool(4).train("07", [*argv, *flags])
    full = TransformerConfig(vocab_size=201, d_model=32, n_layers=4, n_heads=4, seq_len=16)
    norms = 9 * 32
    total = 16 * (full.num_parameters() + norms)  # norms are replicated over tp
    held = sum(metrics[-1]["model_state_mb"] for metrics in every) * 1e6
    assert held == pytest.approx(total, rel=0.02)


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
