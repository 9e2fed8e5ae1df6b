"""All ranks issue matching calls: our comparison, and PyTorch's own two checks of the same."""

from __future__ import annotations

import contextlib
import json
from collections import Counter

import pytest
import torch
from harness import (
    Pool,
    assert_reproduces,
    cases,
    comparably,
    count_collectives,
    load_stage,
    stage_file,
)
from late_backend import Call, recorded_calls
from nccl_rules import assert_ranks_agree

pytestmark = pytest.mark.slow

PAIR, PIPE = ("1", "dp", (0, 1)), ("2", "to_higher", (0, 1))
REDUCE = Call("all_reduce", *PAIR, ((8, 4),), ("float32",), "SUM")
GATHER = Call("all_gather", *PAIR, ((4,), (8,)), ("bfloat16", "bfloat16"))
SEND = Call("send", *PIPE, ((2, 16),), ("float32",), peer=1)
RECV = SEND._replace(op="recv", peer=0)
RANK_0, RANK_1 = [REDUCE, GATHER, SEND, REDUCE], [REDUCE, GATHER, RECV, REDUCE]


@pytest.mark.quick
def test_matching_collectives_agree():
    assert_ranks_agree([RANK_0, RANK_1])
    # groups are independent: only the order within one of them matters
    assert_ranks_agree([RANK_0, [RECV, REDUCE, GATHER, REDUCE]])


def with_another(index: int, **change) -> list[Call]:
    changed = [*RANK_1]
    changed[index] = changed[index]._replace(**change)
    return changed


@pytest.mark.quick
@pytest.mark.parametrize(
    "changed",
    [
        with_another(0, op="broadcast", peer=0),
        with_another(0, reduce_op="AVG"),
        with_another(0, peer=1),  # the root of a broadcast
        with_another(0, group="3"),
        with_another(1, shapes=((4,), (16,))),
        with_another(2, dtypes=("float16",)),
        with_another(2, peer=1),
        [GATHER, REDUCE, RECV, REDUCE],  # another order
        [REDUCE, GATHER, RECV],  # one fewer
        [REDUCE, GATHER, REDUCE],  # no receive
        [REDUCE, GATHER, RECV, RECV, REDUCE],  # a receive more
    ],
)
def test_mismatch_in_any_field_order_or_number_of_calls_is_found(changed):
    with pytest.raises(AssertionError):
        assert_ranks_agree([RANK_0, changed])


# ---- PyTorch's own checks: TORCH_DISTRIBUTED_DEBUG=DETAIL, and the flight recorder ----

# a collective's name in the ledger: its names in the flight recorder and in the late backend
NAMES = {
    "all_reduce": ("gloo:all_reduce", "all_reduce"),
    "broadcast": ("gloo:broadcast", "broadcast"),
    "reduce": ("gloo:all_to_all", "reduce"),
    "all_gather_single": ("gloo:all_gather", "all_gather"),
    "reduce_scatter_single": ("gloo:all_to_all", "reduce_scatter"),
    "all_to_all_single": ("gloo:all_to_all", "all_to_all"),
}


@pytest.fixture(scope="module")
def detail_pool(_folders):
    """Two processes in which PyTorch compares each collective between the ranks before it runs."""
    settings = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_FR_BUFFER_SIZE": "20000"}
    with contextlib.closing(Pool(2, environment=settings)) as pool:
        yield pool


def observed(stage: str, argv: list[str]) -> tuple[list[dict], list, list[tuple]]:
    """Train; returns metrics, the dispatcher's calls, and the flight recorder's entries."""
    before = len(_flight_record())
    with count_collectives() as counted:
        metrics = load_stage(stage).main(argv)
    return metrics, counted.records, _flight_record()[before:]


def _flight_record() -> list[tuple]:
    """Name and inputs of each entry, without PyTorch's own comparisons (all-gathers of int64)."""
    entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json()).get("entries", [])
    found = [(e["profiling_name"], e["input_dtypes"], e["input_sizes"]) for e in entries]
    return [entry for entry in found if entry[:2] != ("gloo:all_gather", ["Long"])]


def record(stage: str, argv: list[str]) -> list:
    with recorded_calls() as events:
        load_stage(stage).main(argv)
    return [event for event in events if isinstance(event, Call)]


@pytest.mark.parametrize("run", cases("agreement"))
def test_debug_detail_finds_no_mismatch_and_counts_the_same_calls(
    pools, detail_pool, reference, corpus_dir, tmp_path, run
):
    data = ["--data", str(corpus_dir), "--resume", "never"]
    expected = reference([*run.reference_argv, *data], stage_file(run.stage).reference)
    argv = [*run.argv, *data, "--run-dir", str(tmp_path)]
    around = "replay", str(reference.folder), run.stage, argv
    ranks = detail_pool.run(comparably, observed, *around)
    late = pools(2, backend="late").run(comparably, record, *around)
    for (metrics, dispatched, flight), recorded in zip(ranks, late, strict=True):
        assert_reproduces(run, metrics, expected)
        collectives = [r for r in dispatched if r.op in NAMES]
        # the flight recorder sees neither sends nor receives on Gloo
        assert Counter(name for name, *_ in flight) == Counter(NAMES[r.op][0] for r in collectives)
        # the late backend has no record of groups that use Gloo on GPUs too
        ours = Counter(NAMES[r.op][1] for r in collectives if r.group != "stop")
        ours += Counter({"isend": "send", "irecv": "recv"}.get(r.op) for r in dispatched)
        del ours[None]
        assert ours == Counter(call.op for call in recorded)
    assert ranks[0][2] == ranks[1][2] or stage_file(run.stage).ranks_differ


def another_shape_on_rank_1() -> None:
    torch.distributed.all_reduce(torch.ones(4 - 2 * torch.distributed.get_rank(), 2))


def test_debug_detail_finds_a_mismatch(detail_pool):
    with pytest.raises(AssertionError, match="Detected mismatch"):
        detail_pool.run(another_shape_on_rank_1)
