"""Stage 09: parity for the same routing, communication, memory, balance, checkpoints.

Runs that differ only in rounding part at near ties (`tools/routing.py`). So these use float64, the
recorded routing of one process, or one expert.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from dry_run import PATCHES, dry_run
from generate import continued, load_run
from harness import PeakMemory, WorkerExit, assert_same_curve, load_stage, true_ledger
from routing import record, replay
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import all_to_all_single_autograd

from common.counter_rng import sample_keys
from common.model import Transformer, TransformerConfig, init_weights

pytestmark = pytest.mark.slow

SIZE = "--d-model 32 --n-layers 2 --n-heads 2 --seq-len 16 --global-batch-size 12".split()
RUN = [*SIZE, *"--steps 12 --log-every 1 --resume never".split()]
EVERYTHING = "--activation-checkpointing --dropout 0.1 --grad-clip 0.3".split()
CONFIG = TransformerConfig(200, d_model=32, n_layers=2, n_heads=2, seq_len=16, n_experts=8, top_k=2)


def group_of(size: int) -> dist.ProcessGroup:
    """This rank's group of `size` neighbours."""
    group, _ = dist.new_subgroups(size)
    return group


def expert_model(config: TransformerConfig, group: dist.ProcessGroup, seed: int = 1) -> Transformer:
    model = load_stage("09").expert_parallel(Transformer(config), group)
    init_weights(model, seed)
    return model


@contextmanager
def everything_in_float64():
    """The parameters, and what the model computes in float32 whatever their dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        with patch.object(Tensor, "float", Tensor.double):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


# ---- parity ----


@pytest.mark.quick_cases("1-float32-0")
@pytest.mark.parametrize(
    ("size", "dtype", "clip"),
    [(1, "float32", "0"), (1, "bfloat16", "0"), (1, "float32", "0.3"), (3, "float32", "0.3")],
)
def test_one_expert_is_the_dense_model(pools, reference, corpus_dir, size, dtype, clip):
    """Without clipping, by a norm whose sum has other terms, every loss has stage 01's bits."""
    argv = [*RUN, "--steps", "50", "--dtype", dtype, "--grad-clip", clip, "--data", str(corpus_dir)]
    expected = reference(argv)
    for metrics in pools(size).train("09", [*argv, "--n-experts", "1", "--top-k", "1"]):
        assert_same_curve(metrics, expected)
        assert clip != "0" or [x["loss"] for x in metrics] == [x["loss"] for x in expected]


def train(argv: list[str], around=everything_in_float64, *folder: str) -> list[dict]:
    """Within `record` or `replay` of a folder; a replayed run fails if its own routing differs
    from the recorded one without a near tie."""
    with around(*folder):
        return load_stage("09").main(argv)


def shape(own: list[str]) -> list[str]:
    """Those of the flags that change what is computed: the reference run needs them too."""
    words = "--n-experts --top-k --dropout --grad-clip".split()
    return [w for flag in words if flag in own for w in own[own.index(flag) :][:2]]


MESHES = [  # ranks, flags
    (2, []),
    (3, "--n-experts 6 --top-k 4 --micro-batch-size 2".split()),
    (4, "--top-k 1".split()),
    (4, ["--ep", "2", "--micro-batch-size", "1", *EVERYTHING]),
    (4, ["--ep", "1", "--top-k", "4", "--bucket-cap-mb", "0.01"]),
    (4, ["--n-experts", "4", "--top-k", "4", *EVERYTHING]),
]
meshes = pytest.mark.parametrize(("size", "own"), MESHES, ids=lambda x: "".join(map(str, [x])))


@meshes
def test_every_mesh_equals_one_process_in_float64(pools, corpus_dir, tmp_path, size, own):
    argv = [*RUN, "--data", str(corpus_dir), "--run-dir"]
    (expected,) = pools(1).run(train, [*argv, str(tmp_path / "one"), *shape(own)])
    for metrics in pools(size).run(train, [*argv, str(tmp_path / "many"), *own]):
        assert_same_curve(metrics, expected, loss=2e-6, norm=1e-6)  # losses are float32


def to_two_experts(argv: list[str]) -> list[dict]:
    """Train with every token at experts 0 and 1; the gradients of all others must be zeros."""
    stage, average, found = load_stage("09"), load_stage("09").average_expert_gradients, []

    def look(model, *others):
        for mixture in stage.mixtures_of(model):
            for number, expert in mixture.experts.items():
                found.append((int(number) < 2) == all(p.grad.any() for p in expert.parameters()))
        average(model, *others)

    def choose(self, scores):
        return torch.arange(2).expand(len(scores), 2)

    with (
        patch.object(stage.MixtureOfExperts, "choose", choose),
        patch.object(stage, "average_expert_gradients", look),
    ):
        metrics = stage.main(argv)
    assert all(found)
    return metrics


def test_experts_without_tokens_have_zero_gradients_and_no_rank_hangs(pools, corpus_dir, tmp_path):
    argv = [*RUN, "--data", str(corpus_dir), "--run-dir"]
    (expected,) = pools(1).run(to_two_experts, [*argv, str(tmp_path / "one")])
    assert {round(line["load"], 5) for line in expected} == {4.0}
    for own in ([], [*EVERYTHING[:1], "--ep", "2"]):
        argv_of_many = [*argv, str(tmp_path / "many"), "--micro-batch-size", "1", *own]
        for metrics in pools(4).run(to_two_experts, argv_of_many):
            assert_same_curve(metrics, expected)


# ---- gradients ----


def differences_of_gradients(top_k: int, ep: int) -> dict[str, float]:
    """Relative differences from the gradients of one process, by parameter, in float64."""
    stage, rank, size = load_stage("09"), dist.get_rank(), dist.get_world_size()
    tokens = torch.randint(200, (size, 17), generator=torch.Generator().manual_seed(5))
    keys = sample_keys(1, 0, torch.arange(size))
    group, replicas = group_of(ep), stage.group_along((size // ep, ep), 0, "replicas", 60)
    with everything_in_float64():
        whole = expert_model(replace(CONFIG, top_k=top_k), group_of(1))
        model = expert_model(replace(CONFIG, top_k=top_k), group)
        whole(tokens[:, :-1], tokens[:, 1:], keys).backward()
        with stage.without_experts(model):
            parallel = stage.DistributedDataParallel(model)
        own = slice(rank, rank + 1)
        parallel(tokens[own, :-1], tokens[own, 1:], keys[own]).backward()
        parallel.finish_gradient_synchronization()
        stage.average_expert_gradients(model, size, replicas)
        norms = [
            stage.clip_grad_norm_(m, 1e9, g) for m, g in ((whole, group_of(1)), (model, group))
        ]
    expected = {name: p.grad for name, p in whole.named_parameters()}
    found = {"norm": abs(norms[1] / norms[0] - 1).item()}
    for name, p in model.named_parameters():
        found[name] = (
            (p.grad - expected[name]).norm() / expected[name].norm().clamp(min=1e-9)
        ).item()
    assert all(g.any() for name, g in expected.items() if "router" in name)
    return found


@pytest.mark.quick_cases("2-4")
@pytest.mark.parametrize(("top_k", "ep"), [(1, 4), (2, 4), (2, 2), (2, 1)])
def test_every_gradient_equals_that_of_one_process_in_float64(pools, top_k, ep):
    """The router's too, which every rank has from its own tokens only."""
    every = pools(4).run(differences_of_gradients, top_k, ep)
    worst = max((off, name) for found in every for name, off in found.items())
    assert worst[0] < 1e-10, worst


def exchange_both_ways(seed: int) -> bool:
    """Ours and PyTorch's all-to-all of the same rows with the same gradients: equal bits?"""
    stage, rank, size = load_stage("09"), dist.get_rank(), dist.get_world_size()
    splits = torch.randint(4, (size, size), generator=torch.Generator().manual_seed(seed))
    splits[seed % size] = 0  # a rank that sends nothing
    send, receive = splits[rank].tolist(), splits[:, rank].tolist()
    torch.manual_seed(rank)
    rows, weight = torch.randn(sum(send), 3), torch.randn(sum(receive), 3)
    results = []
    for exchange, splits in (
        (stage.AllToAll.apply, (send, receive)),
        (all_to_all_single_autograd, (receive, send)),
    ):
        x = rows.clone().requires_grad_()
        y = exchange(x, *splits, dist.group.WORLD)
        (y * weight).sum().backward()
        results.append((y.detach().clone(), x.grad))
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_all_to_all_and_its_backward_equal_those_of_pytorch(pools):
    for seed in range(4):
        assert all(pools(3).run(exchange_both_ways, seed))


# ---- communication ----


def communication(argv: list[str]) -> tuple:
    """The ledger of a run, and the rows from and to other ranks that each exchange of counts has
    announced: in forwards of training, recomputed ones too, and of evaluation."""
    stage, rows = load_stage("09"), {True: [], False: []}
    exchange_counts = stage.exchange_counts

    def listen(counts, group):
        both = exchange_counts(counts, group)
        away = [sum(map(sum, part)) - sum(part[group.rank()]) for part in both]
        rows[torch.is_grad_enabled()].append(sum(away))
        return both

    with (
        patch.object(stage, "exchange_counts", listen),
        true_ledger() as (ledger, _),
    ):
        stage.main(argv)
    return ledger, rows


SPLITS = [(2, 2, False, 4), (4, 2, True, 4), (4, 4, False, 2), (2, 2, True, 2)]


@pytest.mark.parametrize(("size", "ep", "checkpointing", "width"), SPLITS)
def test_bytes_follow_from_the_actual_splits(
    pools, corpus_dir, tmp_path, size, ep, checkpointing, width
):
    """width: bytes per element of a row."""
    steps, micro_batches, layers, d, experts = 3, 4 // size, 2, 32, 8
    argv = [*SIZE, "--micro-batch-size", "3", "--steps", str(steps), "--ep", str(ep)]
    argv += ["--data", str(corpus_dir), "--run-dir", str(tmp_path), "--resume", "never"]
    argv += ["--dtype", {4: "float32", 2: "bfloat16"}[width]]
    argv += ["--activation-checkpointing"] * checkpointing
    every = pools(size).run(communication, argv)
    expert = 2 * d * 2 * d  # elements of w1 and w2
    dense = replace(CONFIG, vocab_size=201).num_parameters() - layers * experts * expert
    for ledger, rows in every:
        forwards = steps * micro_batches * layers * (1 + checkpointing)
        assert len(rows[True]) == forwards and rows[False]
        # backward repeats each layer's two exchanges once, whether forward ran once or twice
        sent = sum(rows[True]) * (1.5 if checkpointing else 2) + sum(rows[False])
        exchanges = forwards + len(rows[False])
        counts = exchanges * experts * (1 - 1 / ep) * 8  # int64
        assert round(ledger.ring["all_to_all_single", "ep"]) == sent * d * width + counts
        backwards = 2 * steps * micro_batches * layers
        assert ledger.calls["all_to_all_single", "ep"] == 3 * exchanges + backwards
        assert ledger.payload["all_reduce", "world"] == steps * (4 * dense + 8 * layers * experts)
        shared = steps * 4 * layers * experts // ep * expert if ep < size else 0
        assert ledger.payload["all_reduce", "replicas"] == shared
        named = ("all_to_all_single", "ep"), ("all_reduce", "world"), ("all_reduce", "replicas")
        assert set(ledger.calls) <= {*named, ("broadcast", "world")}


# ---- memory ----


def balanced(self, scores: Tensor) -> Tensor:
    """In place of `choose`: every expert gets as many rows."""
    return (torch.arange(len(scores) * self.top_k) % self.n_experts).view(-1, self.top_k)


def real_step(argv: list[str]):
    stage = load_stage("09")
    with patch.multiple(stage, **PATCHES), patch.object(stage.MixtureOfExperts, "choose", balanced):
        return stage.main(argv)


@pytest.mark.parametrize("own", [["--ep", "2"], ["--ep", "4", "--activation-checkpointing"]])
def test_dry_run_holds_and_sends_what_a_balanced_run_does(pools, corpus_dir, own):
    argv = [*SIZE, *own]
    dry = pools(1, group=False).run(dry_run, "09", 4, 3, argv, 201)[0]
    real = pools(4).run(real_step, [*argv, "--data", str(corpus_dir)])[3]
    assert dry.sent == real.sent
    experts = 2 * 8 * 2 * 32 * 64
    held = replace(CONFIG, vocab_size=201).num_parameters() - experts + experts // int(own[1])
    for report in (dry, real):
        kinds = report.parameters, report.gradients, report.optimizer
        assert kinds == (4 * held, 4 * held, 8 * held)


def saved_for_backward(top_k: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of floating-point activations that a balanced mixture keeps, and tokens."""
    stage, d = load_stage("09"), 256
    mixture = stage.MixtureOfExperts(replace(CONFIG, d_model=d, top_k=top_k), dist.group.WORLD)
    init_weights(mixture, 1)
    weights = {p.untyped_storage().data_ptr() for p in mixture.parameters()}
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    x = torch.randn(8, 16, d, requires_grad=True)
    with (
        patch.object(stage.MixtureOfExperts, "choose", balanced),
        saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16),
    ):
        mixture(x)
    return sum(storage.nbytes() for storage in kept.values()), 8 * 16


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_a_mixture_keeps_what_the_formula_says(pools, top_k):
    d, formula = 256, {torch.float32: 4 * (9 + 2 * top_k), torch.bfloat16: 20 + 4 * top_k}
    for dtype, per_feature in formula.items():
        for kept, tokens in pools(2).run(saved_for_backward, top_k, dtype):
            scores = 4 * tokens * (8 + 4 * top_k)  # at most: scores, and the chosen ones' weights
            assert 0 <= kept - tokens * d * per_feature <= scores, (dtype, kept)


def peak_of_averaging(bucket_cap_mb: float) -> int:
    stage = load_stage("09")
    model = expert_model(replace(CONFIG, d_model=128), group_of(1))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with PeakMemory() as memory:
        stage.average_expert_gradients(model, 2, dist.group.WORLD, bucket_cap_mb)
    assert all((p.grad == 1.0).all() for p in stage.expert_parameters(model))
    return memory.above


def test_averaging_over_replicas_copies_at_most_two_buckets_at_a_time(pools):
    for above in pools(2).run(peak_of_averaging, 0.5):
        assert above <= 2 * 0.5 * 2**20  # the experts have 4 MB


# ---- balance and the number of parameters ----


def balanced_by(rate: float) -> tuple:
    stage = load_stage("09")
    model = expert_model(replace(CONFIG, n_experts=4, n_layers=2), group_of(2))
    first, second = stage.mixtures_of(model)
    first.load = torch.tensor([[7, 1, 2, 0], [1, 1, 2, 2]][dist.get_rank()])  # 8, 2, 4, 2
    second.load = torch.tensor([2, 2, 2, 2])
    load = stage.balance_load(model, rate)
    assert first.load == 0  # the next step counts again
    return load.item(), first.bias.tolist(), second.bias.tolist()


def test_biases_move_against_the_load_of_all_ranks(pools):
    for load, first, second in pools(2).run(balanced_by, 0.5):
        assert load == (2.0 + 1.0) / 2
        assert first == [-0.5, 0.5, 0.0, 0.5] and second == [0.0] * 4


def weights_with_bias() -> tuple:
    """The chosen experts, the error of their weights against the scores alone, and their dtype."""
    mixture = expert_model(replace(CONFIG, n_experts=4), group_of(1)).layers["0"].mlp
    mixture.bias.copy_(torch.tensor([-9.0, 9.0, 9.0, 0.0]))
    tokens = torch.randn(1, 32)
    with torch.autocast("cpu", torch.bfloat16):
        weights, chosen = mixture.route(tokens)
    scores = mixture.router(tokens).softmax(-1)[0, chosen[0]]
    off = (weights[0] - scores / scores.sum()).abs().max().item()
    return chosen.sort().values.tolist(), off, weights.dtype


def test_biases_choose_experts_and_float32_scores_weight_them(pools):
    chosen, off, dtype = pools(1).run(weights_with_bias)[0]
    assert chosen == [[1, 2]] and off < 1e-6 and dtype == torch.float32


def counted_parameters(top_k: int) -> tuple[int, int]:
    model = expert_model(replace(CONFIG, top_k=top_k), group_of(1))
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if "experts" in name)
    return sum(sizes.values()), sum(sizes.values()) - experts + experts * top_k // 8


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_configuration_counts_all_and_active_parameters(pools, top_k):
    made = replace(CONFIG, top_k=top_k)
    expected = made.num_parameters(), made.num_parameters(active=True)
    assert pools(1).run(counted_parameters, top_k)[0] == expected
    dense = replace(CONFIG, n_experts=0, top_k=1)
    assert expected[1] == dense.num_parameters() + 2 * 32 * 8  # the routers of two layers


# ---- checkpoints ----


def test_a_checkpoint_resumes_on_other_meshes_and_is_exported(pools, corpus_dir, tmp_path):
    """The biases too: without them a replayed run would choose other experts."""
    argv = [*RUN, "--data", str(corpus_dir), "--dropout", "0.1"]
    flags = lambda name, *more: [*argv, "--run-dir", str(tmp_path / name), *more]  # noqa: E731
    (whole,) = pools(1).run(train, flags("whole"), record, str(tmp_path))
    saved = flags("saved", "--checkpoint-every", "8", "--keep-checkpoints", "9")
    pools(2).run(train, saved, replay, str(tmp_path))
    after_8 = str(tmp_path / "saved" / "checkpoints" / "step-00000008")
    for size, own in ((1, []), (4, []), (4, ["--ep", "2"])):
        rest = flags(f"resumed-{size}{len(own)}", "--resume", after_8, *own)
        for metrics in pools(size).run(train, rest, replay, str(tmp_path)):
            assert_same_curve(metrics, whole[8:])
    loss = pools(1).run(loss_of_exported, str(tmp_path / "saved"), [*argv, "--run-dir", "none"])[0]
    assert abs(loss - whole[-1]["test_loss"]) < 1e-4  # evaluated with this run's own routing


def loss_of_exported(run_dir: str, argv: list[str]) -> float:
    stage, world = load_stage("09"), load_stage("09").setup()
    model, vocab = load_run(Path(run_dir))
    assert len(continued(model, [1, 2], 3, 0.8, 0)) == 5
    args = stage.parse_args(argv)
    corpus = stage.load_corpus(args.data)
    return stage.evaluate(model, corpus.test, args, world.device, world)


@pytest.mark.parametrize(("of", "into"), [("01", "09"), ("09", "01"), ("09", "09")])
def test_a_checkpoint_of_another_model_is_an_error(pools, corpus_dir, tmp_path, of, into):
    argv = [*SIZE, "--steps", "2", "--data", str(corpus_dir), "--run-dir"]
    pools(1, group=of != "01").train(of, [*argv, str(tmp_path / "of"), "--checkpoint-every", "2"])
    argv += [str(tmp_path / "into"), "--resume", str(tmp_path / "of")]
    argv += ["--top-k", "4"] if of == into else []
    with pytest.raises(WorkerExit) as exit:
        pools(1, group=into != "01").train(into, argv)
    assert exit.value.statuses == [2]
    assert "does not fit this model" in exit.value.stderr[0], exit.value.stderr
