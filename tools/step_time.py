"""How long communication takes: the rule that the READMEs' cost sections use."""

from __future__ import annotations


def group_bandwidth(ranks: int, per_node: int, nvlink: float, card: float) -> float:
    """Bytes/s at which each rank of a group sends on a ring: min(nvlink, per_node x card).

    ranks: members of the group; per_node: those of them that share a node; nvlink, card: bytes/s of
    one GPU inside its node, and of its network card, in one direction.

    NCCL builds as many rings as a group has network cards, each of which leaves the node by another
    card. So a ring over full nodes of eight has the bandwidth of eight cards, at most NVLink's, and
    a group with one member per node that of one card. The other groups of a node use the other
    cards: no two of them share one. If they did, at the same time, each would get its part.

    Measured: 192 GB/s on DGX A100s with eight cards of 25 GB/s (NVIDIA/nccl#812, quoted in #1576).
    One card's 12.5 GB/s per GPU would make FSDP of a 70B model on 96 H100s with 100 GB/s per node
    take three times as long as it did (README of foundation-model-stack/fms-fsdp).
    """
    return nvlink if ranks <= per_node else min(nvlink, per_node * card)
