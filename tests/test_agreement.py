"""`assert_ranks_agree` sees a difference in any field, in the order, and in the number of calls."""

from __future__ import annotations

import pytest
from late_backend import Call
from nccl_rules import assert_ranks_agree

PAIR = ("1", "dp", (0, 1))
REDUCE = Call("all_reduce", *PAIR, ((8, 4),), ("float32",), "SUM")
GATHER = Call("all_gather", *PAIR, ((4,), (8,)), ("bfloat16", "bfloat16"))
SEND = Call("send", "2", "to_higher", (0, 1), ((2, 16),), ("float32",), peer=1)
RECV = SEND._replace(op="recv", peer=0)


def test_groups_are_independent_only_the_order_within_one_of_them_matters():
    assert_ranks_agree([[REDUCE, GATHER, SEND], [RECV, REDUCE, GATHER]])


@pytest.mark.parametrize(
    "changed",
    [
        [REDUCE, GATHER._replace(shapes=((4,), (16,))), RECV],
        [REDUCE._replace(group="3"), GATHER, RECV],
        [REDUCE._replace(op="broadcast"), GATHER, RECV],
        [REDUCE._replace(reduce_op="AVG"), GATHER, RECV],
        [REDUCE._replace(peer=1), GATHER, RECV],  # the root of a broadcast
        [REDUCE, GATHER, RECV._replace(dtypes=("float16",))],
        [REDUCE, GATHER, RECV._replace(peer=1)],
        [GATHER, REDUCE, RECV],  # another order
        [REDUCE, RECV],  # one fewer
        [REDUCE, GATHER],  # no receive
        [REDUCE, GATHER, RECV, RECV],  # a receive more
    ],
)
def test_mismatch_in_any_field_order_or_number_of_calls_is_found(changed):
    with pytest.raises(AssertionError):
        assert_ranks_agree([[REDUCE, GATHER, SEND], changed])
