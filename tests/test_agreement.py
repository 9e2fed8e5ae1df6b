"""`assert_ranks_agree` sees a difference in any field, in the order, and in the number of calls."""

from __future__ import annotations

import pytest
from late_backend import Call
from nccl_rules import assert_ranks_agree

PAIR, PIPE = ("1", "dp", (0, 1)), ("2", "to_higher", (0, 1))
REDUCE = Call("all_reduce", *PAIR, ((8, 4),), ("float32",), "SUM")
GATHER = Call("all_gather", *PAIR, ((4,), (8,)), ("bfloat16", "bfloat16"))
SEND = Call("send", *PIPE, ((2, 16),), ("float32",), peer=1)
RECV = SEND._replace(op="recv", peer=0)
RANK_0, RANK_1 = [REDUCE, GATHER, SEND, REDUCE], [REDUCE, GATHER, RECV, REDUCE]


def test_matching_collectives_agree():
    assert_ranks_agree([RANK_0, RANK_1])
    # groups are independent: only the order within one of them matters
    assert_ranks_agree([RANK_0, [RECV, REDUCE, GATHER, REDUCE]])


def with_another(index: int, **change) -> list[Call]:
    changed = [*RANK_1]
    changed[index] = changed[index]._replace(**change)
    return changed


@pytest.mark.parametrize(
    "changed",
    [
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
