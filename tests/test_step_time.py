"""Times that the READMEs print follow from the rule for a group's bandwidth."""

from __future__ import annotations

import re

import pytest
from harness import REPO
from step_time import group_bandwidth

F, NVLINK, CARD, SLOW_CARD = 400e12, 400e9, 50e9, 12.5e9  # FLOP/s, bytes/s: the READMEs' H100s


def test_a_ring_over_full_nodes_uses_all_cards_of_a_node():
    assert group_bandwidth(8, 8, NVLINK, CARD) == NVLINK
    assert group_bandwidth(8, 1, NVLINK, CARD) == CARD
    assert group_bandwidth(64, 2, NVLINK, CARD) == 2 * CARD
    assert group_bandwidth(64, 8, NVLINK, CARD) == NVLINK
    assert group_bandwidth(64, 8, NVLINK, SLOW_CARD) == 8 * SLOW_CARD
    assert group_bandwidth(64, 8, NVLINK, 2 * CARD) == NVLINK


INSIDE = group_bandwidth(8, 8, NVLINK, CARD)
ONE_CARD = group_bandwidth(8, 1, NVLINK, CARD)
SLOW_NODES = group_bandwidth(64, 8, NVLINK, SLOW_CARD)
SLOW_RING = group_bandwidth(8, 1, NVLINK, SLOW_CARD)
TINY = 4 * 136.1e6  # bytes of float32 in --preset gpt2
WIDE = 12 * 4096**2  # parameters of 04's layer
AROUND = 7 / 8


def communication_over_computation(width: int, ranks: int) -> float:
    """05: communication as a fraction of computation."""
    return 2 / 9 * (ranks - 1) * F / (group_bandwidth(ranks, 8, NVLINK, CARD) * width)


def mesh(tp: int, pp: int) -> list[float]:
    """07: bubble, tp exposed, dp exposed and step in seconds, of 1,024 ranks."""
    layers, width, seq, vocab = 40, 5120, 4096, 33_280
    parameters = layers * (12 * width**2 + 2 * width) + 2 * vocab * width + width
    flops = 6 * (parameters - vocab * width) + 12 * layers * width * seq
    compute = flops * 512 * seq / (1024 * F)
    dp = 1024 // (tp * pp)
    m = 512 // dp
    bubble = (pp - 1) / m * compute
    activation = 2 * seq * width
    over_tp = 4 * layers / pp * m * (tp - 1) / tp * activation
    over_tp *= (1 + (pp - 1) / m) / group_bandwidth(tp, tp, NVLINK, CARD)
    over_dp = 2 * (dp - 1) / dp * 4 * parameters / (tp * pp)
    over_dp = over_dp / group_bandwidth(dp, 8 // tp, NVLINK, CARD) - 2 / 3 * compute / m
    return [bubble, over_tp, over_dp, compute + bubble + over_tp + over_dp]


SEND = 1e3 * 2 * AROUND * TINY  # of an all-reduce, for milliseconds
LAYER = 1e3 * AROUND * WIDE
GIANT = 13e9  # parameters of the pipeline in 06 and 07
STATED = {  # README, a pattern with groups for figures, and what each of them must round to
    "02, problem": ("02_ddp", r"all-reduce of them takes (\d+) ms", [SEND / ONE_CARD]),
    "02, hidden if": (
        "02_ddp",
        r"hides if T > ([\d,]+) tokens per GPU. With one GPU per node.{0,30} T > ([\d,]+)\.",
        [2 * F / INSIDE * AROUND, 2 * F / ONE_CARD * AROUND],
    ),
    "02, example": (
        "02_ddp",
        r"MB: ([\d.]+) ms inside a node, hidden, and (\d+) ms with one GPU per node, of which"
        r" (\d+) ms",
        [SEND / INSIDE, SEND / ONE_CARD, SEND / ONE_CARD - 1e3 * TINY * 3072 / F],
    ),
    "03, hidden if": (
        "03_zero",
        r"hidden if \| T > (\d+) \| T > ([\d,]+)",
        [F / INSIDE * AROUND, F / ONE_CARD * AROUND],
    ),
    "03, all-gather": (
        "03_zero",
        r"all-gather \| \+ ([\d.]+) ms \| \+ ([\d.]+) ms",
        [SEND / 2 / INSIDE, SEND / 2 / ONE_CARD],
    ),
    "04, problem": ("04_fsdp", r"from the others: ([\d.]+) ms", [2 * LAYER / ONE_CARD]),
    "04, inside": (
        "04_fsdp",
        r"inside a node, 400 GB/s \| ([\d.]+) ms, hidden \| ([\d.]+) ms, hidden \| T > ([\d,]+)",
        [2 * LAYER / INSIDE, 6 * LAYER / INSIDE, 1.5 * F / INSIDE * AROUND],
    ),
    "04, across": (
        "04_fsdp",
        r"per node, 50 GB/s \| ([\d.]+) ms, .*? \| ([\d.]+) ms, .*? \| T > ([\d,]+)",
        [2 * LAYER / ONE_CARD, 6 * LAYER / ONE_CARD, 1.5 * F / ONE_CARD * AROUND],
    ),
    "04, hybrid": ("04_fsdp", r"one card: ([\d.]+) ms at 50 GB/s", [1e3 * WIDE / ONE_CARD]),
    **{
        f"05, width {width:,}": (
            "05_tensor_parallel",
            rf"^\| {width:,} \|" + r" ([\d.]+) \|" * 4,
            [communication_over_computation(width, ranks) for ranks in (2, 4, 8, 16)],
        )
        for width in (1024, 4096, 8192)
    },
    "05, example": (
        "05_tensor_parallel",
        r"two nodes it takes ([\d.]+) times as long",
        [communication_over_computation(4096, 16)],
    ),
    "06, FSDP": ("06_pipeline", r"That takes ([\d.]+) s, and more", [8 * GIANT / SLOW_NODES]),
    "07, hybrid": (
        "07_3d",
        r"bytes from each node: ([\d.]+) s instead of ([\d.]+) s",
        [7 * GIANT / 8 / SLOW_RING, 8 * GIANT / SLOW_NODES],
    ),
    "06, faster cards": (
        "06_pipeline",
        r"the 104 GB of the example in ([\d.]+) s",
        [8 * GIANT / group_bandwidth(64, 8, NVLINK, CARD)],
    ),
    "07, inside": ("07_3d", r"once per step \((\d+) ms\)", [1e3 * AROUND * GIANT / INSIDE]),
    "07, message": ("07_3d", r"takes ([\d.]+) ms, while", [4e3 * 2048 * 5120 / SLOW_RING]),
    "07, problem": (
        "07_3d",
        r"width 4,096 communicates ([\d.]+) times",
        [communication_over_computation(4096, 16)],
    ),
    **{
        f"07, tp {tp}, pp {pp}": (
            "07_3d",
            rf"^\| {tp} \| {pp} \|(?: [\d.]+ \|){{4}}" + r"[ *]+([\d.]+)[ *]+\|" * 4,
            mesh(tp, pp),
        )
        for tp, pp in ((8, 1), (8, 2), (8, 4), (8, 8), (4, 4))
    },
}


@pytest.mark.parametrize("case", STATED)
def test_a_time_in_a_readme_follows_from_the_bandwidth_of_its_group(case):
    folder, pattern, expected = STATED[case]
    found = re.search(pattern, (REPO / folder / "README.md").read_text(), re.M)
    assert found, f"{folder}/README.md does not say {pattern}"
    for text, value in zip(found.groups(), expected, strict=True):
        decimals = len(text.partition(".")[2])
        stated = float(text.replace(",", ""))
        # a figure of thousands is rounded to two or more digits
        rounding = max(0.5 * 10**-decimals, 0.02 * value if stated >= 1000 else 0)
        assert abs(stated - value) <= rounding * 1.001, (text, value)
