"""The figures in the READMEs: for each README its words, and how their figures are computed.

The READMEs compute times from leading terms, so that a reader can follow: FLOPs at an achieved
rate, and ring bytes over `group_bandwidth`. Memory and communication are those of `tools/costs.py`
and of dry runs. Figures in answers to experiments are held by `make experiments`. Not held:
measured times and perplexities, and figures of other authors.
"""

from __future__ import annotations

import gc
import os
import re
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
import step_errors
import torch
from data_parallel_trainers import Trainer
from harness import REPO, PeakMemory, fake_ranks, live_bytes, load_stage, runs_for
from test_muon import matrices_of

from common.llama import LlamaConfig
from common.model import Transformer, TransformerConfig, init_weights

from benchmarks.rows import SHAPES
from common.job.arguments import PRESETS
from tools.costs import costs_of
from tools.dry_run import Report, dry_run, figures
from tools.planner import plan, step_time
from tools.planner.step_time import group_bandwidth

F, NVLINK, CARD, SLOW_CARD = 400e12, 400e9, 50e9, 12.5e9  # FLOP/s, bytes/s: the READMEs' H100s


def test_a_ring_over_full_nodes_uses_all_cards_of_a_node_at_most_nvlinks_bandwidth():
    assert group_bandwidth(64, 2, NVLINK, CARD) == 2 * CARD
    assert group_bandwidth(64, 8, NVLINK, SLOW_CARD) == 8 * SLOW_CARD
    assert group_bandwidth(64, 8, NVLINK, 2 * CARD) == NVLINK == group_bandwidth(8, 8, NVLINK, 1)


INSIDE = group_bandwidth(8, 8, NVLINK, CARD)
ONE_CARD = group_bandwidth(8, 1, NVLINK, CARD)
SLOW_NODES = group_bandwidth(64, 8, NVLINK, SLOW_CARD)
H100 = step_time.GPUS["h100"]
GPT2 = TransformerConfig(
    33_278, d_model=768, n_layers=12, n_heads=12, seq_len=1024
)  # on WikiText-2
TINY = 4 * 136.1e6  # bytes of float32 in --preset gpt2
WIDE = 12 * 4096**2  # parameters of 04's layer
AROUND = 7 / 8


def communication_over_computation(width: int, ranks: int) -> float:
    """05: communication as a fraction of computation."""
    return 2 / 9 * (ranks - 1) * F / (group_bandwidth(ranks, 8, NVLINK, CARD) * width)


def mesh(tp: int, pp: int) -> list[float]:
    """07: bubble, tp exposed, dp and step in seconds, of 1,024 ranks.

    With --sequence-parallel three of a layer's four all-reduces are exposed."""
    layers, width, seq, vocab = 40, 5120, 4096, 33_280
    parameters = layers * (12 * width**2 + 2 * width) + 2 * vocab * width + width
    flops = 6 * (parameters - vocab * width) + 12 * layers * width * seq
    compute = flops * 512 * seq / (1024 * F)
    dp = 1024 // (tp * pp)
    m = 512 // dp
    bubble = (pp - 1) / m * compute
    activation = 2 * seq * width
    over_tp = 3 * 2 * layers / pp * m * (tp - 1) / tp * activation
    over_tp *= (1 + (pp - 1) / m) / group_bandwidth(tp, tp, NVLINK, CARD)
    over_dp = 2 * (dp - 1) / dp * 4 * parameters / (tp * pp)
    over_dp /= group_bandwidth(dp, 8 // tp, NVLINK, CARD)
    return [bubble, over_tp, over_dp, compute + bubble + over_tp + over_dp]


def fsdp_and_tensor(ranks: int) -> dict[str, float]:
    """14: seconds of the same step with tp = 8 and FSDP over the nodes, in one micro-batch."""
    layers, width, seq, vocab = 40, 5120, 4096, 33_280
    layer, tokens = 12 * width**2 / 8, 512 * 8 * seq / ranks  # of a rank, of a tp group
    embedding, card = vocab * width / 8, group_bandwidth(ranks // 8, 1, NVLINK, CARD)
    flops = 6 * (layers * 8 * layer + vocab * width) + 12 * layers * width * seq
    over_tp = 3 * 2 * layers * 7 / 8 * 2 * tokens * width / INSIDE
    forward = (2 * layer + 4 * width * seq / 8) * tokens / F  # with attention
    gather, reduction = 2 * layer / card, 4 * layer / card
    exposed = max(0, gather - forward) + max(0, gather + reduction - 2 * forward)
    found = {"compute": flops * 512 * seq / (ranks * F), "tp": over_tp}
    found["step"] = found["compute"] + over_tp + layers * exposed
    ends = gather + reduction + 8 * embedding / card  # of the first layer and the embedding
    return found | {"forward": forward, "gather": gather, "ends": ends}


def interleaved_mesh(ranks: int, pp: int) -> float:
    """14: seconds of the same step with tp = 8 and an interleaved pipeline of two stages per rank,
    by 07's formulas."""
    assert 40 % (2 * pp) == 0, "all of its stages have as many layers"
    found, m = fsdp_and_tensor(ranks), 512 * 8 * pp / ranks
    parameters = 40 * 12 * 5120**2 + 2 * 33_280 * 5120
    over_dp = 2 * 4 * parameters / (8 * pp) / CARD
    share = (pp - 1) / (2 * m)
    return found["compute"] * (1 + share) + found["tp"] * (1 + share) + over_dp


def compute(tokens: int) -> float:
    """Milliseconds of forward and backward of --preset gpt2 on one H100."""
    return 1e3 * GPT2.flops_per_token() * tokens / F


# ---- memory and communication ----

MB, GB = 1e6, 1e9


def preset_of(preset: str, words: int = 33_278) -> TransformerConfig:
    return TransformerConfig(words, *PRESETS[preset])


def state(preset: str, words: int) -> list[float]:
    """Parameters, MB of model state, and the same with rotary positions and counts of steps."""
    config = preset_of(preset, words)
    n, rotary = config.num_parameters(), 12 * config.seq_len * config.d_model // config.n_heads
    counts = 4 * (6 * config.n_layers + 3)
    return [n, 16 * n / MB, (16 * n + rotary + counts) / MB]


ROTARY = state("tiny", 2304)[2] - state("tiny", 2304)[1]


def costs(stage: str, flags: str = "", ranks: int = 2, words: int = 2304) -> list[float]:
    """MB that rank 0 holds and sends, without rotary positions. By default of --preset tiny, on the
    sample."""
    with patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": str(ranks)}):
        args = load_stage(stage).parse_args(flags.split())
    found = costs_of(stage, args, ranks, 0, words)
    return [sum(found.held.values()) / MB, sum(found.sent.values()) / MB]


def muon_share(config: TransformerConfig, tokens: int) -> float:
    """FLOPs of 11's orthogonalization over those of the model, through which `tokens` pass."""
    matrices = matrices_of(config.d_model, config.n_layers)
    work = sum(map(load_stage("11").orthogonalization_flops, matrices))
    return work / (tokens * config.flops_per_token())


def owners_over_all(ranks: int, share: float) -> list[float]:
    """11: a rank's FLOPs if it updates its own matrices, if it updates all, and their ratio. share:
    of orthogonalization in the FLOPs of all ranks together."""
    own, every = 1 + share, 1 + ranks * share
    return [own, every, own / every]


# ---- dry runs: functions of `alone` (a fixture) and of what follows in a tuple of the table ----


def report_of(stage: str, ranks: int, flags: str, rank: int = 0) -> Report:
    return dry_run(stage, ranks, rank, flags.split())


def planned_report(stage: str, ranks: int, flags: str) -> str:
    (run,) = (x for x in runs_for("dry-run-all") if (x.stage, x.ranks) == (stage, ranks))
    return figures(stage, ranks, [*run.argv, *flags.split()])


def planned(alone, stage: str, ranks: int, flags: str = "") -> list[float]:
    """GB of `make dry-run-all`: the peak, and what is sent."""
    return [float(x) for x in alone(planned_report, stage, ranks, flags).split(" | ")[1:]]


def planned_in_07(alone) -> list[float]:
    """On 512 ranks, by fewer micro-batches than 64 on each of eight replicas: nine reach the peak
    of eight stages, and what is sent is linear in their number."""
    few = [planned(alone, "07", 512, f"--global-batch-size {8 * m}") for m in (1, 9)]
    (_, one), (peak, nine) = few
    return [peak, one + 63 * (nine - one) / 8]


def kept_by_a_layer(alone, flags: str) -> list[float]:
    """05: the hidden states in bfloat16 that a layer keeps for backward, in full and sharded."""
    shape = "--d-model 256 --n-heads 4 --seq-len 2048 --global-batch-size 8 --n-layers"

    def kept(ranks: int) -> float:
        reports = [alone(report_of, "05", ranks, f"{shape} {n} {flags}") for n in (1, 2)]
        few, many = (x.peak - x.parameters - x.optimizer for x in reports)
        return (many - few) / (2 * 8 * 2048 * 256)

    one, four = kept(1), kept(4)
    sharded = (one - four) * 4 / 3
    return [one - sharded, sharded]


def kept_in_05(alone, dtype: str) -> list[float]:
    """The same without and with sequence parallelism, in units of A, or A/2 in bfloat16."""
    flags = f"--dtype {dtype}", f"--dtype {dtype} --sequence-parallel"
    kept = [x for each in flags for x in kept_by_a_layer(alone, each)]
    return [x / 2 for x in kept] if dtype == "float32" else kept


def example_of_05(alone, *chosen: int) -> list[float]:
    """Of: tensors of a layer, MB of each, GB of the layer, of 80, and of 80 with checkpointing."""
    tensor = 2 * 8192 * 8192
    kept, input = (
        round(sum(kept_by_a_layer(alone, f"--dtype bfloat16 {flags}")))
        for flags in ("", CHECKPOINTING)
    )
    figures = [kept, tensor / MB, *(n * tensor / GB for n in (kept, 80 * kept, 80 * input))]
    return [figures[i] for i in chosen]


def peaks_of_05(alone) -> list[float]:
    argv = "--global-batch-size 8 --n-layers 8 --seq-len 512"
    reports = [alone(report_of, "05", 4, f"{argv} {x}") for x in ("", "--sequence-parallel")]
    return [x.activations / GB for x in reports]


def activations_in_06(alone, schedule: str) -> list[float]:
    """GB on ranks 0 and 3."""
    argv = text_of("06").split('make dry-run-06 ARGS="--ranks 4 ')[1].split('"')[0]
    argv += f" --dtype float32 --schedule {schedule}"
    return [alone(report_of, "06", 4, argv, rank).activations / GB for rank in (0, 3)]


def peak_in_07(alone, tp: int, pp: int) -> list[float]:
    """GB. It is linear in the number of layers, from three per stage on, and pp + 1 micro-batches
    reach it."""
    command = text_of("07").split('make dry-run-07 ARGS="--ranks 1024 ')[1].split(" --tp")[0]
    argv = f"{command} --tp {tp} --pp {pp} --global-batch-size {1024 // (tp * pp) * (pp + 1)}"
    few, many = (alone(report_of, "07", 1024, f"{argv} --n-layers {n * pp}") for n in (3, 4))
    return [(few.peak + (40 / pp - 3) * (many.peak - few.peak)) / GB]


def sent_in_14(group: str, flags: str, ranks: int, words: int = 2304) -> float:
    """Bytes that rank 0 sends over a group."""
    with patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": str(ranks)}):
        args = load_stage("14").parse_args(flags.split())
    sent = costs_of("14", args, ranks, 0, words).sent
    return sum(nbytes for (_, over), nbytes in sent.items() if over == group)


def row_of_14(tp: int) -> list[float]:
    """GB over tp, GB over shard, network cards of a shard group in a node, and its milliseconds."""
    flags = "--d-model 4096 --n-layers 16 --n-heads 64 --seq-len 1024 --dtype bfloat16"
    flags += f" --global-batch-size 64 --sequence-parallel --tp {tp}"
    over_tp, over_shard = (sent_in_14(group, flags, 64, 33_280) for group in ("tp", "shard"))
    seconds = over_shard / group_bandwidth(64 // tp, 8 // tp, NVLINK, CARD)
    return [over_tp / GB, over_shard / GB, 8 // tp, 1e3 * seconds]


def peak_in_14(alone) -> list[float]:
    """GB. It is linear in the number of layers."""
    argv = text_of("14").split('make dry-run-14 ARGS="--ranks 1024 ')[1].split('"')[0]
    few, many = (alone(report_of, "14", 1024, f"{argv} --n-layers {n}") for n in (2, 4))
    return [(few.peak + 19 * (many.peak - few.peak)) / GB]


CHECKPOINTING = "--activation-checkpointing"
ROOM = 80 - 25  # GB that the model state of --preset gpt2-xl leaves on an H100


def with_gradients(stage: str, ranks: int, flags: str) -> Report:
    """A dry run in which gradients have memory from the start."""

    def allocate_gradients(model: torch.nn.Module, *_) -> None:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)

    with patch.object(load_stage(stage), "init_weights", allocate_gradients):
        return report_of(stage, ranks, flags)


def tokens_of_xl(alone, stage: str, ranks: int, flags: str) -> list[float]:
    """Tokens of a sequence whose activations fit into ROOM. They are linear in the number of
    layers, and here in the tokens. Rounded to thousands."""

    def activations(tokens: int) -> float:
        argv = f"--preset gpt2-xl --dtype bfloat16 --global-batch-size 1 --seq-len {tokens} {flags}"
        reports = [alone(with_gradients, stage, ranks, f"{argv} --n-layers {n}") for n in (1, 2)]
        few, many = (report.activations / GB for report in reports)
        return few + 47 * (many - few)

    start = 16_384 * ranks
    short, long = activations(start), activations(2 * start)
    return [start * (1 + (ROOM - short) / (long - short))]


STEP = compute(24 * 1024)  # of 01's example
ADAMW = 1e3 * 28 * GPT2.num_parameters() / H100.memory_bandwidth
SEND = 1e3 * 2 * AROUND * TINY  # of an all-reduce, for milliseconds
LAYER = 1e3 * AROUND * WIDE
LAYER_FORWARD = 1e3 * 2 * WIDE * 4096 / F  # of 04's 4,096 tokens
GIANT = 13e9  # parameters of the pipeline in 06
TURN = 6 * GIANT / 8 * 2048 / F  # of a micro-batch in one of its eight stages, seconds
FSDP = 8 * GIANT / SLOW_NODES
MATRICES = 12 * 12 * 768**2  # parameters of --preset gpt2 in its layers' matrices
MUON_IN_BENCH = muon_share(SHAPES["wide"].config, SHAPES["wide"].batch * SHAPES["wide"].seq_len)
EXPERTS = 2 * 8 * 2 * 128 * 256  # parameters of 09's experiment
DENSE = load_stage("09").MixtureConfig(2304).num_parameters() - EXPERTS
FLOAT8 = 6 * 48 * 12 * 1600**2 / preset_of("gpt2-xl").flops_per_token()  # share of 10's layers
CASTS = H100.matmul / H100.memory_bandwidth  # FLOPs of the saved half of a matmul per byte
# what casts and copies move per token and d, by the number of matmuls in float8
FLOAT8_BYTES = {3: 5 * (7 + 9) + 2 * (7 + 9), 2: 5 * (7 + 9) + 3 * 7}
LLAMA_7B = dict(model_type="llama", architectures="LlamaForCausalLM", hidden_act="silu")
LLAMA_7B |= dict(vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, rms_norm_eps=1e-6)
LLAMA_7B |= dict(num_hidden_layers=32, num_attention_heads=32, max_position_embeddings=2048)
LLAMA = LlamaConfig(LLAMA_7B)
LLAMA_TOKEN = LLAMA.flops_per_token() / 160e12  # seconds on an A100
SENT_BY_LLAMA = [  # GB per micro-batch on four ranks: gathered, the embedding in float32; reduced
    3 / 4 * 2 * (2 * LLAMA.num_parameters() - 32_000 * 4096) / GB,
    3 / 4 * 4 * LLAMA.num_parameters() / GB,
]
NODES_1024 = fsdp_and_tensor(1024)
HOP, NETWORK_HOP = (step_time.HAND[name] for name in ("hop", "network hop"))


def adapters(c: LlamaConfig, r: int = 16) -> int:
    """The parameters in 15's A and B."""
    width = c.n_kv_heads * c.head_dim
    sides = 4 * c.d_model + 2 * (c.d_model + width) + 3 * (c.d_model + c.d_hidden)
    return r * c.n_layers * sides


ADAPTERS = adapters(LLAMA)
LLAMA_8B = LlamaConfig(
    LLAMA_7B | dict(vocab_size=128_256, intermediate_size=14_336, num_key_value_heads=8)
)
LAYOUTS = ((8, 1), (8, 4), (8, 8), (4, 4))  # tp, pp in 07's table
# milliseconds of a layer there, with tp = 8: four sequences, and its weights in bfloat16 over dp
FORWARD = 1e3 * (24 * 5120**2 + 4 * 5120 * 4096) / 8 * 4 * 4096 / F  # with attention
GATHER = 1e3 * 2 * 12 * 5120**2 / 8 * 127 / 128 / group_bandwidth(128, 1, NVLINK, CARD)
# beginning of a folder: patterns of its README with groups for figures, and what each group rounds
# to: numbers, or a function that dry runs, with its arguments
STATED = {
    "01": {
        r"of its peak of (\d+) needs (\d+) ms": [H100.matmul / 1e12, STEP],
        r"At ([\d.]+) TB/s that is ([\d.]+) ms": [3.35, ADAMW],
        **{
            rf"^\| {preset} \| {data} \| ([\d,]+) \| ([\d.]+) MB \| ([\d.]+) MB": state(
                preset, words
            )
            for preset, data, words in (
                ("tiny", "sample", 2304),
                *((preset, "WikiText-2", 33_278) for preset in ("tiny", "small", "gpt2")),
            )
        },
    },
    "02": {
        r"One H100 needs (\d+) ms": [STEP],
        r"an eighth of the batch each take (\d+) ms": [STEP / 8],
        r"Their backward takes (\d+) ms": [2 / 3 * compute(3072)],
        r"card of 50 GB/s, this takes (\d+) ms": [SEND / ONE_CARD],
        r"hidden if T > ([\d,]+) tokens per GPU. With one GPU per node, T > ([\d,]+) is": [
            2 * F / INSIDE * AROUND,
            2 * F / ONE_CARD * AROUND,
        ],
        (
            r"this takes ([\d.]+) ms and is hidden. With one GPU per node it takes (\d+) ms, of"
            r" which (\d+) ms"
        ): [SEND / INSIDE, SEND / ONE_CARD, SEND / ONE_CARD - 1e3 * TINY * 3072 / F],
        r"^\| model state per rank \| 16 P \| ([\d.]+) MB": costs("02")[:1],
        r"^\| sent per rank and step \| 2 \(N−1\)/N · 4 P.*? \| ([\d.]+) MB": costs("02")[1:],
    },
    "03": {
        r"hidden if \| T > (\d+) \| T > ([\d,]+)": [F / INSIDE * AROUND, F / ONE_CARD * AROUND],
        r"exposed all-gathers \| \+ ([\d.]+) ms \| \+ ([\d.]+) ms": [
            SEND / 2 / INSIDE,
            SEND / 2 / ONE_CARD,
        ],
        r"^\| AdamW on .*? \| − ([\d.]+) ms": [AROUND * ADAMW],
        r"3,072 tokens per GPU, computes for (\d+) ms": [compute(3072)],
        **{
            rf"^\| ZeRO-{zero_stage} \| .* \| ([\d.]+) GB": [nbytes * 7]
            for zero_stage, nbytes in ((1, 8 + 8 / 8), (2, 4 + 12 / 8), (3, 16 / 8))
        },
        **{
            rf"^\| ZeRO-{zero_stage} \| .*? measured ([\d.]+) MB \| .* = ([\d.]+) MB": [
                ROTARY + costs("03", f"--micro-batch-size 6 --zero-stage {zero_stage}")[0],
                costs("03", f"--micro-batch-size 6 --zero-stage {zero_stage}")[1],
            ]
            for zero_stage in (1, 2, 3)
        },
    },
    "04": {
        r"its forward computes 4,096 tokens in ([\d.]+) ms": [LAYER_FORWARD],
        r"forward: computes ([\d.]+) ms \| backward: computes ([\d.]+) ms": [
            LAYER_FORWARD,
            2 * LAYER_FORWARD,
        ],
        r"([\d.]+) exposed \| [\d.]+ ms, ([\d.]+) exposed": [
            2 * LAYER / ONE_CARD - LAYER_FORWARD,
            6 * LAYER / ONE_CARD - 2 * LAYER_FORWARD,
        ],
        r"a layer takes (\d+) ms instead of (\d+)": [8 * LAYER / ONE_CARD, 3 * LAYER_FORWARD],
        r"Its all-gather takes ([\d.]+) ms": [2 * LAYER / ONE_CARD],
        r"inside a node, 400 GB/s \| ([\d.]+) ms, hidden \| ([\d.]+) ms, hidden \| T > ([\d,]+)": [
            2 * LAYER / INSIDE,
            6 * LAYER / INSIDE,
            1.5 * F / INSIDE * AROUND,
        ],
        r"per node, 50 GB/s \| ([\d.]+) ms, .*? \| ([\d.]+) ms, .*? \| T > ([\d,]+)": [
            2 * LAYER / ONE_CARD,
            6 * LAYER / ONE_CARD,
            1.5 * F / ONE_CARD * AROUND,
        ],
        r"^\| model state per rank \| 16P/N \| ([\d.]+) MB": [ROTARY + costs("04")[0]],
        **{
            rf"^\| {row}.* \| ([\d.]+) MB": costs("04", f"--micro-batch-size 6 {flags}")[1:]
            for row, flags in (
                ("sent per rank and step", ""),
                ("with `--no-reshard-after-forward`", "--no-reshard-after-forward"),
                ("with `--param-dtype bfloat16`", "--param-dtype bfloat16"),
                ("hybrid sharding", "--shard-degree 1"),
            )
        },
    },
    "05": {
        **{
            (rf"^\| {width:,} \|" + r" ([\d.]+) \|" * 4): [
                communication_over_computation(width, ranks) for ranks in (2, 4, 8, 16)
            ]
            for width in (1024, 4096, 8192)
        },
        r"from a width of ([\d,]+) on for `wqkv` and ([\d,]+) for `w1`": [
            2 / 3 * 7 * F / INSIDE,
            1 / 2 * 7 * F / INSIDE,
        ],
        r"in float32 \| A \((\d+) \+ (\d+)/N\) \| A \((\d+) \+ (\d+)/N\)": (kept_in_05, "float32"),
        r"in bfloat16 \| A/2 \((\d+) \+ (\d+)/N\) \| A/2 \((\d+) \+ (\d+)/N\)": (
            kept_in_05,
            "bfloat16",
        ),
        r"keeps ([\d.]+) GB for its backward .*? \((\d+) tensors of (\d+) MB": (
            example_of_05,
            2,
            0,
            1,
        ),
        r"that is (\d+) GB, and FSDP.*?leaves ([\d.]+) GB": (example_of_05, 3, 4),
        r"counts ([\d.]+) GB of .*? and ([\d.]+) with it\.": (peaks_of_05,),
    },
    "06": {
        r"which take ([\d.]+) s to compute on these 64 GPUs": [6 * GIANT * 131_072 / (64 * F)],
        r"= 2\.7 GB, or ([\d.]+) s": [131_072 * 5120 * 4 / SLOW_NODES],
        r"That takes ([\d.]+) s, and more": [8 * GIANT / SLOW_NODES],
        r"= (\d+) ms for a micro-batch": [1e3 * TURN],
        r"1F1B takes \(m.*? = ([\d.]+) s, .*? node ([\d.]+) s, and FSDP at least the ([\d.]+) s": [
            15 * TURN,
            2 * AROUND * 4 * GIANT / 8 / INSIDE,
            FSDP,
        ],
        r"1F1B takes ([\d.]+) s, and FSDP ([\d.]+) s if": [71 * TURN, 64 * TURN],
        **{
            (rf"^\| `{schedule}` \| (\d\.\d\d) \| (\d\.\d\d) \|$"): (activations_in_06, schedule)
            for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble")
        },
    },
    "07": {
        r"width 4,096 communicates ([\d.]+) times": [communication_over_computation(4096, 8)],
        r"the ratio is ([\d.]+) if eight": [communication_over_computation(4096, 16)],
        r"and ([\d.]+) with cards of 12.5 GB/s": [
            communication_over_computation(4096, 16) * NVLINK / (8 * SLOW_CARD)
        ],
        **{
            (rf"^\| {tp} \| {pp} \|(?: [\d.]+ \|){{3}}" + r"[ *]+([\d.]+)[ *]+\|" * 4): mesh(tp, pp)
            for tp, pp in LAYOUTS
        },
        **{
            rf"^\| {tp} \| {pp} \| \d+ \| \d+ \| ([\d.]+) ": (peak_in_07, tp, pp)
            for tp, pp in LAYOUTS
        },
        r"and ([\d.]+) GB in 04, which .* and ([\d.]+) GB in 04\.": (planned, "04", 512),
        r"a peak of ([\d.]+) GB per rank, .* A step sends ([\d.]+) GB": (planned_in_07,),
        r"half of dp's (\d+) ms is": [1e3 * mesh(8, 4)[2]],
        r"2/3 · c/m = (\d+) ms": [1e3 * 2 / 3 * mesh(8, 4)[0] / 3],
        r"layer computes for ([\d.]+) ms, while .*? takes ([\d.]+) ms": [FORWARD, GATHER],
        r"backward computes for ([\d.]+) ms, .*? take ([\d.]+) ms": [2 * FORWARD, 3 * GATHER],
        r"a step takes c \+ ([\d.]+) = ([\d.]+) s": [mesh(8, 1)[1], mesh(8, 1)[3] - mesh(8, 1)[2]],
    },
    "08": {
        # backward computes the scores again: 5 matmuls
        r"of one sequence keep an H100 busy for (\d+) s": [
            48 * (72 * 131_072 * 1600**2 + 7 * 131_072**2 * 1600) / F
        ],
        r"T must be ([\d,]+) tokens per rank: ([\d,]+) per sequence": [
            2.4 * F / INSIDE,
            8 * 2.4 * F / INSIDE,
        ],
        # a message between two ranks uses one card
        r"T must be ([\d,]+) per rank, and sequences ([\d,]+) tokens": [
            2.4 * F / CARD,
            16 * 2.4 * F / CARD,
        ],
        r"only ([\d.]+) % of attention's time": [100 * 4 * AROUND * F / INSIDE / 131_072],
        r"to about ([\d,]+) tokens with checkpointing": (tokens_of_xl, "02", 1, CHECKPOINTING),
        r"up to ([\d,]+) tokens with cp 8 alone": (tokens_of_xl, "08", 8, ""),
        r"leaves (\d+) GB of an H100's memory": [ROOM],
        r"as much as (\d+) tensors": (example_of_05, 0),
        r"takes ([\d.]+) GB per tensor: (\d+) GB in total": [
            2 * 1600 * 131_072 / GB,
            48 * 22 * 2 * 1600 * 131_072 / GB,
        ],
    },
    "09": {
        **{
            (rf"^\| {width:,} \|" + r" ([\d.]+) \|" * 4): [
                k * f * F / (9 * b * width) for f, b in ((7 / 8, INSIDE), (1, CARD)) for k in (2, 8)
            ]
            for width in (1024, 4096, 8192)
        },
        r"D = ([\d,]+), X = ([\d,]+) and": [DENSE, EXPERTS],
        r"16 \(D \+ X/2\) = ([\d.]+) MB": [16 * (DENSE + EXPERTS / 2) / MB],
    },
    "10": {
        r"cost / saving = (\d+) · \(([\d.]+) / d \+ ([\d.]+) / T\)": [
            *(CASTS, FLOAT8_BYTES[3] / 36, 8 * 12 / 36),
        ],
        r"rowwise: (\d+) · \(([\d.]+) / d \+ ([\d.]+) / T\)": [
            *(CASTS, FLOAT8_BYTES[2] / 24, 8 * 12 / 24),
        ],
        **{
            (rf"^\| {recipe} \|" + r" ([\d.]+) \|" * 3 + r" d = ([\d,]+) \|$"): [
                *(
                    CASTS * (FLOAT8_BYTES[n] / (12 * n * d) + 8 / (n * 8192))
                    for d in (768, 1600, 4096)
                ),
                CASTS * FLOAT8_BYTES[n] / (12 * n) / (1 - CASTS * 8 / n / 8192),
            ]
            for recipe, n in (("tensorwise", 3), ("rowwise", 2))
        },
        r"\| sum \| (\d+) d T \+ (\d+) d² \| (\d+) d T \+ (\d+) d² \|": [
            *(of for n in (3, 2) for of in (FLOAT8_BYTES[n], 8 * 12)),
        ],
        r"have (\d+) % of the FLOPs\. .* ([\d.]+) times as fast .* and ([\d.]+) times": [
            100 * FLOAT8,
            1 / (1 - FLOAT8 / 2),
            1 / (1 - FLOAT8 / 3),
        ],
        **{
            (rf"^\| {name} \| {bits} \| \d+" + r" \| ([\d.,e-]+)" * 3): [
                torch.finfo(dtype).max,
                torch.finfo(dtype).smallest_normal,
                torch.finfo(dtype).eps,
            ]
            for name, bits, dtype in (
                ("float32", 8, torch.float32),
                ("bfloat16", 8, torch.bfloat16),
                ("e4m3", 4, torch.float8_e4m3fn),
                ("e5m2", 5, torch.float8_e5m2),
            )
        },
    },
    "11": {
        r"^\| model state .* \| ([\d.]+) MB \(02: ([\d.]+)\)": [costs("11")[0], costs("02")[0]],
        r"^\| sent .* \| ([\d.]+) MB \(02: ([\d.]+)\)": [costs("11")[1], costs("02")[1]],
        r"^\| with `--dtype bfloat16` \| .* \| ([\d.]+) MB": costs("11", "--dtype bfloat16")[1:],
        r"needs ([\d.]+) GB of model state on each of 8 .*? against ([\d.]+) GB in stage 02": [
            costs(stage, "--preset gpt2", 8, 33_280)[0] / 1e3 for stage in ("11", "02")
        ],
        **{
            rf"^\| `{preset}`.* \| ([\d,]+) \| ([\d.]+) %": [
                batch * PRESETS[preset][3],
                100 * muon_share(preset_of(preset), batch * PRESETS[preset][3]),
            ]
            for preset, batch in (("tiny", 16), ("gpt2", 24), ("gpt2-xl", 24))
        },
        r"gpt2 on 8 ranks: ([\d.]+) / ([\d.]+) = ([\d.]+)": owners_over_all(
            8, muon_share(GPT2, 24 * 1024)
        ),
        # 7/8 of the bytes leave a rank
        r"they take ([\d.]+) ms at 400 GB/s or ([\d.]+) ms": [
            1e3 * 2 * MATRICES * AROUND / bandwidth for bandwidth in (INSIDE, ONE_CARD)
        ],
        r"AdamW's all-reduce could .*: ([\d.]+) or ([\d.]+) ms more\.": [
            1e3 * 4 * (MATRICES + 2 * (GPT2.num_parameters() - MATRICES)) * AROUND / bandwidth
            for bandwidth in (INSIDE, ONE_CARD)
        ],
    },
    "12": {
        r"2F/B is ([\d,]+) tokens, and 5\.3F/B is ([\d,]+)\.": [2 * F / 7e9, 32 / 6 * F / 7e9],
        r"cannot hold the (\d+) GB of .* eight disks they are (\d+) GB": [
            2 * F / 7e9 * 2 * 80 * 10240 / GB / n for n in (1, 8)
        ],
    },
    "13": {
        r"per rank: ([\d.]+) of ([\d.]+) GB, into ([\d.]+) GB of shards": [
            n * LLAMA.num_parameters() / GB for n in (2 / 4, 2, 4 / 4)
        ],
        r"\*\*State\*\* per rank: ([\d.]+) GB": [16 / 4 * LLAMA.num_parameters() / GB],
        r"([\d.]+) GB gathered .*?, ([\d.]+) GB reduced .* is ([\d.]+) s\. .* takes ([\d.]+)": [
            *SENT_BY_LLAMA,
            sum(SENT_BY_LLAMA) / 250,
            2048 * LLAMA_TOKEN,
        ],
        r"are ([\d,]+) tokens per rank, or ([\d.]+) s\. The ([\d,]+) steps take some (\d+)": [
            129 * 32,
            129 * 32 * LLAMA_TOKEN,
            52_002 * 3 / 128,
            52_002 * 3 / 128 * 129 * 32 * LLAMA_TOKEN / 60,
        ],
    },
    "14": {
        r"with ([\d.]+) µs per hop inside a node and ([\d.]+) µs between nodes": [
            1e6 * HOP,
            1e6 * NETWORK_HOP,
        ],
        r"over these 512 ranks takes ([\d.]+) ms before .* moves its data in ([\d.]+) ms": [
            1e3 * ((512 - 64) * HOP + 63 * NETWORK_HOP),
            1e3 * 2 * 12 * 5120**2 / INSIDE,
        ],
        r"would communicate ([\d.]+) times": [communication_over_computation(5120, 16)],
        r"^\| model state \| .* \| ([\d.]+) MB": [ROTARY + costs("14", "--tp 2", 4)[0]],
        r"^\| sent over `shard` .* \| ([\d.]+) MB": [sent_in_14("shard", "--tp 2", 4) / MB],
        r"^\| sent over `tp` .* \| ([\d.]+) MB": [sent_in_14("tp", "--tp 2", 4) / MB],
        **{(rf"^\| {tp} \|" + r" ([\d.]+) \|" * 4): row_of_14(tp) for tp in (1, 2, 4, 8)},
        r"state is ([\d.]+) GB per rank": [
            costs(
                "04", "--d-model 4096 --n-layers 16 --n-heads 64 --global-batch-size 64", 64, 33_280
            )[0]
            / 1e3
        ],
        r"added: ([\d.]+) GB at 400 GB/s take (\d+) ms": [
            row_of_14(8)[0],
            1e3 * row_of_14(8)[0] * GB / INSIDE,
        ],
        r"^computation +([\d.]+) s": [NODES_1024["compute"]],
        r"^tp, exposed +([\d.]+) s": [NODES_1024["tp"]],
        r"^a layer's forward +([\d.]+) ms +.* nodes, ([\d.]+) ms": [
            1e3 * NODES_1024["forward"],
            1e3 * NODES_1024["gather"],
        ],
        r"^a step +([\d.]+) s": [NODES_1024["step"]],
        r"four stages, with which a step takes ([\d.]+) s": [mesh(8, 4)[-1]],
        r"A rank's peak is ([\d.]+) GB": (peak_in_14,),
        r"last reductions, about (\d+) ms": [1e3 * NODES_1024["ends"]],
        r"That is ([\d,]+) tokens, and ([\d,]+) in backward": [F / CARD, 1.5 * F / CARD],
        r"waits: a step takes ([\d.]+) s\. .* four takes ([\d.]+) s": [
            fsdp_and_tensor(4096)["step"],
            interleaved_mesh(4096, 4),
        ],
    },
    "15": {
        r"that is ([\d.]+) in place of ([\d.]+) GB": [
            4 * ADAPTERS / GB,
            16 * ADAPTERS / GB,
        ],
        r"would pay: ([\d.]+) in place of ([\d.]+) GB": [64 * ADAPTERS / GB, 256 * ADAPTERS / GB],
        r"7B has ([\d.]+) billion parameters, and ([\d.]+) million": [
            LLAMA.num_parameters() / GB,
            ADAPTERS / 1e6,
        ],
        r"\*\*State\*\* per rank: ([\d.]+) GB, with full fine-tuning ([\d.]+) GB": [
            (2 / 4 * LLAMA.num_parameters() + 16 * ADAPTERS) / GB,
            16 / 4 * LLAMA.num_parameters() / GB,
        ],
        r"([\d.]+) GB gathered\. Per step: ([\d.]+) GB .* 13 sends ([\d.]+) GB": [
            SENT_BY_LLAMA[0] - 3 / 4 * 2 * 32_000 * 4096 / GB,
            3 / 2 * 4 * ADAPTERS / GB,
            sum(SENT_BY_LLAMA),
        ],
        r"takes ([\d.]+) s, and the gathers take ([\d.]+) s": [
            4 / 6 * 2048 * LLAMA_TOKEN,
            SENT_BY_LLAMA[0] / 250,
        ],
        r"8B has ([\d.]+) billion parameters, and ([\d.]+) million": [
            LLAMA_8B.num_parameters() / GB,
            adapters(LLAMA_8B) / 1e6,
        ],
        r"([\d.]+) GB of weights in bfloat16 and ([\d.]+) GB for .* holds (\d+) GB": [
            2 * LLAMA_8B.num_parameters() / GB,
            16 * adapters(LLAMA_8B) / GB,
            16 * LLAMA_8B.num_parameters() / GB,
        ],
    },
    "benchmarks": {
        r"takes ([\d.]+) times\s+as\s+many FLOPs[^|]*?([\d.]+) times as long on two ranks": [
            MUON_IN_BENCH,
            (1 + MUON_IN_BENCH / 2) / (1 + MUON_IN_BENCH),
        ],
    },
}


def text_of(stage: str) -> str:
    return next(REPO.glob(f"{stage}*/README.md")).read_text()


@pytest.fixture(scope="module")
def alone(pools):
    """`alone(function, ...)`: what it returns in another process. Each call happens once."""
    return cache(lambda *job: pools(1, group=False).run(*job, timeout=600)[0])


@pytest.mark.parametrize(
    ("stage", "pattern", "expected"),
    [
        pytest.param(stage, *row, marks=[pytest.mark.slow] * isinstance(row[1], tuple))
        for stage, rows in STATED.items()
        for row in rows.items()
    ],
)
def test_a_figure_in_a_readme_is_what_is_computed(request, stage, pattern, expected):
    if isinstance(expected, tuple):
        function, *arguments = expected
        expected = function(request.getfixturevalue("alone"), *arguments)
    found = re.search(pattern, text_of(stage), re.M)
    assert found, f"the README of {stage} does not say {pattern}"
    for text, value in zip(found.groups(), expected, strict=True):
        stated = float(text.replace(",", ""))
        assert abs(stated - value) <= rounding(text) * 1.001, (text, value)


def rounding(text: str) -> float:
    """Half a unit of the last digit; the zeros at the end of a figure of thousands are none."""
    digits, _, exponent = text.replace(",", "").partition("e")
    zeros = len(digits) - len(digits.rstrip("0")) if digits.isdigit() and len(digits) > 3 else 0
    return 0.5 * 10 ** (zeros - len(digits.partition(".")[2]) + int(exponent or 0))


@pytest.mark.slow
def test_with_checkpointing_a_layer_of_05_keeps_its_input(alone):
    flags = f"--dtype bfloat16 {CHECKPOINTING}"
    for more, kept in (("", [2, 0]), ("--sequence-parallel", [0, 2])):
        assert kept_by_a_layer(alone, f"{flags} {more}") == pytest.approx(kept, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("kind", load_stage("08").KINDS)
def test_what_layers_of_08_keep_is_divided_by_the_ranks(alone, kind):
    shape = "--d-model 256 --n-heads 4 --seq-len 512 --global-batch-size 1"
    argv = f"{shape} --context-parallel-kind {kind} --n-layers"

    def kept(ranks: int) -> float:
        few, many = (alone(with_gradients, "08", ranks, f"{argv} {n}") for n in (1, 2))
        return many.activations - few.activations

    assert [2 * kept(2), 4 * kept(4)] == pytest.approx([kept(1)] * 2, rel=0.01)


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


@pytest.mark.slow
@pytest.mark.parametrize("folder", PANELS)
def test_the_pictures_of_a_steps_memory_show_the_measured_peaks(folder):
    shown = re.findall(r"peak ([\d.]+) MB", (REPO / folder / "memory.svg").read_text())
    found = [peak_of_a_step(*panel) for panel in PANELS[folder]]
    assert [float(peak) for peak in shown] == pytest.approx(found, abs=0.1)


# ---- step times ----


def test_no_layout_of_07_is_2_percent_faster_than_the_one_that_its_readme_recommends():
    """The first three are within 2 %: measured, any of them may win."""
    gpu = replace(H100, efficiency=F / H100.matmul, nvlink=NVLINK)
    job = plan.Job(40, 5120, 40, 4096, 33_280, 512, 1024, gpu, network=CARD, sequence_parallel=True)
    job = replace(job, **plan.MESH)
    seconds = {
        (tp, pp): step_time.step_time(replace(job, tp=tp, pp=pp)).seconds for tp, pp in LAYOUTS
    }
    readme = (REPO / "07_3d/README.md").read_text()
    recommended = 8, int(re.search(r"prefer pp = (\d+)", readme)[1])
    assert seconds[recommended] <= 1.02 * min(seconds.values()), seconds


# ---- the model, held to published runs ----


@cache
def published() -> list:
    return step_errors.runs_of(step_errors.PUBLISHED)


@pytest.mark.slow
def test_the_constants_and_the_range_are_those_that_the_fit_gives():
    even = [run for run in published() if run.number % 2 == 0]
    for name, value in step_errors.fit(even).items():
        assert step_time.FITTED[name] == pytest.approx(value, rel=0.02), name
    found = step_errors.left_out(published())
    ratios = [1 / (1 + error) for *_, error in found]
    for stated, part in zip(plan.RANGE, (0.1, 0.9), strict=True):
        assert stated == pytest.approx(step_errors.quantile(ratios, part), abs=0.02)
    # the table: rows, median and 90th percentile of a source and of all
    columns = r"^\| [^|]+ \| (\d+) \| ([\d.]+) % \| ([\d.]+) % \|$"
    table = re.findall(columns, (REPO / "benchmarks/README.md").read_text(), re.M)
    sources = {row.source for row, _ in found}
    by_source = [[each for each in found if each[0].source == s] for s in sources]
    expected = [(len(own), *step_errors.summary(own)[:2]) for own in (*by_source, found)]
    stated = sorted(tuple(map(float, row)) for row in table)
    for row, counted in zip(stated, sorted(expected), strict=True):
        assert row == pytest.approx(counted, abs=0.5)


def test_the_errors_in_the_text_are_those_of_the_model():
    text = (REPO / "benchmarks/README.md").read_text()
    usable = [run for run in published() if run.job is not None]
    assert f"holds {len(published())} runs that others" in text
    assert f"all {len(usable)} that can be modelled" in text
    odd = step_errors.in_domain([run for run in published() if run.number % 2])
    assert len(odd) > 90
    for words, runs in ((r"On the odd ones", odd), (r"that can be modelled have", usable)):
        found = re.search(
            words + r"[^%]*?median\s.*?([\d.]+) %.*?percentile .*?([\d.]+) %", text, re.S
        )
        figures = [float(figure) for figure in found.groups()]
        assert figures == pytest.approx(step_errors.summary(step_errors.errors(runs))[:2], abs=0.06)
