"""What a rank holds and sends per step in every stage: one table of formulas.

    costs = costs_of("04", args, n_ranks, rank, vocab)     args: of the stage's `parse_args`
    costs.held      bytes by kind: parameters, gradients, optimizer
    costs.sent      ring bytes by (collective, group); `sent_before`: of the initial weights, once

tests/test_costs.py holds the table to dry runs of 02 to 12 and 14, exactly; `make plan` uses it.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from tools.stages import load_stage, stage_file


class Costs:
    """What the formulas need: sizes in elements, and the costs as they are added up.

    E, layer, O: of the embedding, a layer and the output unit; P of all. A: hidden states of a
    micro-batch, c: bytes of one of their elements. m: micro-batches of a replica.
    """

    def __init__(self, args: Namespace, n: int, rank: int, vocab: int):
        self.args, self.rank, self.n = args, rank, n
        self.d, self.L = args.d_model, args.n_layers
        d = self.d
        self.E, self.layer, self.O = vocab * d, 12 * d * d + 2 * d, vocab * d + d
        self.P = self.E + self.L * self.layer + self.O
        self.T = args.micro_batch_size * args.seq_len
        self.A, self.c = self.T * d, 2 if args.dtype == "bfloat16" else 4
        self.m = args.global_batch_size // args.micro_batch_size  # with one replica
        self.held = Counter()  # bytes by kind
        self.sent = Counter()  # ring bytes by (collective, group)
        self.sent_before = Counter()  # the same, once: of the initial weights

    def hold(self, parameters: float, gradients: float, optimizer: float) -> None:
        self.held = Counter(parameters=parameters, gradients=gradients, optimizer=optimizer)

    def start_equal(self, group: str, n: int, nbytes: float) -> None:
        """Broadcast the initial weights."""
        self.sent_before["broadcast", group] += nbytes * (n - 1) / n

    def send(self, op: str, group: str, n: int, nbytes: float) -> None:
        """Add a collective's bytes on a ring of n ranks; a point-to-point message is `isend`."""
        around = {"all_reduce": 2 * (n - 1) / n, "isend": 1}.get(op, (n - 1) / n)
        if nbytes * around:
            self.sent[op, group] += nbytes * around


def averaged(x: Costs) -> None:
    x.hold(4 * x.P, 4 * x.P, 8 * x.P)
    x.send("all_reduce", "world", x.n, 4 * x.P)


def ddp(x: Costs) -> None:
    averaged(x)
    x.start_equal("world", x.n, 4 * x.P)


def gathered(x: Costs, again: int, itemsize: int = 4) -> float:
    """Bytes of the weights that a micro-batch gathers; those of `again` layers for backward too."""
    return 4 * x.E + itemsize * (x.P - x.E + again * x.layer)


def zero(x: Costs) -> None:
    zero_stage, m = x.args.zero_stage, x.m // x.n
    shard = 4 * x.P / x.n
    x.start_equal("world", x.n, 4 * x.P)
    if zero_stage == 3:
        x.hold(shard, shard, 2 * shard)
        x.send("all_gather_single", "world", x.n, m * gathered(x, x.L))
    else:
        x.hold(4 * x.P, 4 * x.P if zero_stage == 1 else shard, 2 * shard)
        x.send("all_gather_single", "world", x.n, 4 * x.P)
    x.send("reduce_scatter_single", "world", x.n, (1 if zero_stage == 1 else m) * 4 * x.P)


def fsdp(x: Costs) -> None:
    assert not x.args.autocast  # units compute in the dtype that they are gathered in
    s, m = x.args.shard_degree or x.n, x.m // x.n
    shard = 4 * x.P / s
    x.hold(shard, shard, 2 * shard)
    reduced = 2 if x.args.reduce_dtype == "bfloat16" else 4
    itemsize = 2 if x.args.param_dtype == "bfloat16" else 4
    again = 0 if x.args.no_reshard_after_forward else x.L - 1  # the last layer stays
    parameters = gathered(x, again, itemsize)
    x.send("all_gather_single", "shard", s, m * parameters)
    x.send("reduce_scatter_single", "shard", s, m * reduced * x.P)
    x.send("all_reduce", "replicate", x.n // s, 4 * x.P / s)
    if s < x.n:
        x.start_equal("replicate", x.n // s, 4 * x.P / s)


def ssd_offload(x: Costs) -> None:
    m, itemsize = x.m // x.n, 2 if x.args.dtype == "bfloat16" else 4
    x.hold(0, 0, 0)  # it is in files
    x.send("all_gather_single", "world", x.n, m * gathered(x, x.L - 1, itemsize))
    x.send("reduce_scatter_single", "world", x.n, m * 4 * x.P)


def tensor_parallel(
    x: Costs, group: str, tp: int, layers: int, is_first=True, is_last=True, own_norms=None
):
    """The communication of the layers, the embedding and the loss of a rank, and its parameters.
    own_norms: elements of norms of which a rank has gradients, if not all."""
    norms = 2 * layers * x.d + x.d * is_last
    full = layers * x.layer + x.E * is_first + x.O * is_last
    recomputed = layers * x.args.activation_checkpointing
    # recomputation stops at the last tensor that backward needs: before the MLP's second collective
    # unless dropout follows it
    again = recomputed * (2 if x.args.dropout else 1)
    large = 4 * layers * x.c * x.A  # two forward and two backward
    large += (x.c * is_last + 4 * is_first) * x.A  # the embedding's stays in float32
    if x.args.sequence_parallel and tp > 1:
        x.send("all_gather_single", group, tp, x.m * (large + 2 * recomputed * x.c * x.A))
        x.send("reduce_scatter_single", group, tp, x.m * (large + again * x.c * x.A))
        x.send("all_reduce", group, tp, 4 * (norms if own_norms is None else own_norms))
    else:
        x.send("all_reduce", group, tp, x.m * (large + again * x.c * x.A))
    x.send("all_reduce", group, tp, x.m * 3 * 4 * x.T * is_last)
    return (full - norms) / tp + norms


def tensor(x: Costs) -> None:
    own = tensor_parallel(x, "world", x.n, x.L)
    x.hold(4 * own, 4 * own, 8 * own)


def pipeline(x: Costs, pp: int, rank: int, nbytes: float) -> tuple[int, bool, bool]:
    """The sends of a pipeline's rank, `nbytes` per message; its layers, first and last."""
    v = x.args.virtual_stages if x.args.schedule == "interleaved" else 1
    n_stages = pp * v
    layers = 0
    for stage in range(rank, n_stages, pp):
        layers += x.L // n_stages + (stage < x.L % n_stages)
        for other in (stage + 1, stage - 1):  # hidden states, gradients
            if 0 <= other < n_stages and pp > 1:
                towards = "to_higher" if other % pp > rank else "to_lower"
                x.send("isend", towards, 2, x.m * nbytes)
    return layers, rank == 0, rank == pp - 1


def pipelined(x: Costs) -> None:
    layers, is_first, is_last = pipeline(x, x.n, x.rank, 4 * x.A)
    own = layers * x.layer + x.E * is_first + x.O * is_last
    x.hold(4 * own, 4 * own, 8 * own)


def mesh(x: Costs) -> None:
    pp, tp = x.args.pp, x.args.tp
    dp = x.n // pp // tp
    x.m //= dp
    shards = tp if x.args.sequence_parallel else 1
    part = pipeline(x, pp, x.rank // (dp * tp), 4 * x.A / shards)
    own = tensor_parallel(x, "tp", tp, *part)
    x.hold(4 * own, 4 * own / dp, 8 * own / dp)  # until they are reduced, all gradients
    x.send("reduce_scatter_single", "dp", dp, 4 * own)
    x.send("all_gather_single", "dp", dp, 4 * own)


def context_parallel(x: Costs) -> None:
    x.hold(4 * x.P, 4 * x.P, 8 * x.P)
    x.send("all_reduce", "world", x.n, 4 * x.P)
    cp = x.args.cp or x.n
    x.m //= x.n // cp
    forwards = 1 + x.args.activation_checkpointing
    times = x.m * x.L * (cp - 1) / cp * x.A
    if x.args.context_parallel_kind == "ring":  # keys and values; then also their gradients
        x.send("isend", "cp", 2, 2 * times * x.c * (forwards + 1) + 2 * times * 4)
    else:  # an all-to-all of a shard
        x.sent["all_to_all_single", "cp"] += 4 * times / cp * x.c * (forwards + 1)


def expert_parallel(x: Costs) -> None:
    args, ep = x.args, x.args.ep or x.n
    expert = 8 * x.d * x.d // args.top_k  # k experts per token have the size of the dense MLP
    router = args.n_experts * x.d
    sharded = x.L * args.n_experts * expert / ep
    dense = x.P - x.L * (8 * x.d * x.d - router)
    x.hold(4 * (dense + sharded), 4 * (dense + sharded), 8 * (dense + sharded))
    x.send("all_reduce", "world", x.n, 4 * dense + 8 * x.L * args.n_experts)  # and the loads
    x.send("all_reduce", "replicas", x.n // ep, 4 * sharded)
    again = args.activation_checkpointing
    rows = (4 + 2 * again) * args.top_k * x.T * x.d * x.c  # in a dry run the load is balanced
    counts = (1 + again) * 8 * args.n_experts
    x.send("all_to_all_single", "ep", ep, x.m // x.n * x.L * (rows + counts))


def muon(x: Costs) -> None:
    d = x.d
    shapes = [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)] * x.L
    matrices = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    owners = load_stage("11").choose_owners(matrices, x.n)
    owned = sum(p.numel() for p in matrices if owners[p] == x.rank)
    every = 12 * d * d * x.L
    x.hold(4 * x.P, 4 * (x.P - every + owned), 8 * (x.P - every) + 4 * owned)
    x.send("all_reduce", "world", x.n, 4 * (x.P - every))
    x.send("reduce", "world", x.n, 4 * every)
    x.send("broadcast", "world", x.n, (2 if x.args.autocast else 4) * every)


def fsdp_and_tensor_parallel(x: Costs) -> None:
    args, d, tp, s = x.args, x.d, x.args.tp, x.args.shard_degree
    if tp == 1:
        return fsdp(x)
    replicas = x.n // tp // s
    embed, layer, output = x.E / tp, (x.layer - 2 * d) / tp + 2 * d, (x.O - d) / tp + d
    length_of = {unit: math.ceil(unit / s) for unit in (layer, output)}  # of a shard, padded
    shard_rank = x.rank // tp % s

    def owned(unit: float, begin: float) -> float:
        """Elements that this rank owns of a norm that begins there in a unit."""
        first = shard_rank * length_of[unit]
        return max(0, min(begin + d, first + length_of[unit]) - max(begin, first))

    second = d + 4 * d * d / tp  # a layer's second norm follows the first one, wqkv and wo
    norms = x.L * (owned(layer, 0) + owned(layer, second)) + owned(output, 0)
    itemsize = 2 if args.param_dtype == "bfloat16" else 4
    x.m, x.c = x.m // (replicas * s), itemsize  # units cast their inputs
    q = tensor_parallel(x, "tp", tp, x.L, own_norms=norms)
    x.hold(4 * q / s, 4 * q / s, 8 * q / s)
    again = 0 if args.no_reshard_after_forward else x.L  # the output stays
    gathered = 4 * embed + itemsize * (q - embed + again * layer)
    reduced = 2 if args.reduce_dtype == "bfloat16" else 4
    x.send("all_gather_single", "shard", s, x.m * gathered)
    x.send("reduce_scatter_single", "shard", s, x.m * reduced * q)
    x.send("all_reduce", "replicate", replicas, 4 * q / s)
    if replicas > 1:
        x.start_equal("replicate", replicas, 4 * q / s)


# a stage that is not here costs what the stage costs that it is compared with
COSTS: dict[str, Callable[[Costs], None]] = {
    "01": averaged,  # over one rank
    "02": ddp,
    "03": zero,
    "04": fsdp,
    "05": tensor,
    "06": pipelined,
    "07": mesh,
    "08": context_parallel,
    "09": expert_parallel,
    "11": muon,
    "12": ssd_offload,
    "14": fsdp_and_tensor_parallel,
}


def costs_of(stage: str, args: Namespace, n: int, rank: int, vocab: int) -> Costs:
    """vocab: words, padded."""
    if stage not in COSTS:
        return costs_of(stage_file(stage).compare, args, n, rank, vocab)
    costs = Costs(args, n, rank, vocab)
    COSTS[stage](costs)
    return costs
