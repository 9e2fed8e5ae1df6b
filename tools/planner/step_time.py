"""How long a training step takes: an analytical model, validated on published runs.

A step is computation, and communication that computation does not hide. Computation is FLOPs at an
achieved rate plus bytes at the memory's bandwidth; communication is ring bytes over the bandwidth
of the group. Every term is a formula of the model's shape and the layout (`Job`), with the data
sheet's figures (`GPUS`), constants that are set by hand, with their reason (`BY_HAND`), and three
that are fitted to the published runs (`FITTED`; tests/step_errors.py fits and judges them). What
differs between programs is a field of `Job`; no constant belongs to one program.
Not modelled: experts, CPU offload, checkpoints, data, stragglers, kernel launches (`TOO_SHORT`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

# ---- what is given: data sheets, constants by hand, fitted constants ----


@dataclass(frozen=True)
class Gpu:
    """A device. Rates in FLOP/s and bytes/s, in one direction."""

    matmul: float  # dense bfloat16, as the data sheet says
    memory_bandwidth: float
    nvlink: float  # of one GPU, to the other GPUs of its node
    memory: float  # bytes
    efficiency: str | float  # achieved part of `matmul`: a name in FITTED, or a measured value
    attention: float  # achieved part of `matmul` in fused attention
    held_to: str  # what the predictions were compared with


# NVIDIA's data sheets: A100 (2021), H100 SXM and H200 (2023 and 2024), HGX B200 (2024). H100-500W
# is torchtitan's, with 2.4 TB/s. Fused attention: Dao, "FlashAttention-2", 2023, figures 4 to 7,
# causal, forward and backward: 90 to 100 TFLOP/s (version 1) and 130 to 180 (version 2) on A100;
# version 2 reaches 200 to 300 on H100.
_A100 = Gpu(312e12, 2.039e12, 300e9, 80e9, "A100", 0.38, "205 published runs")
_H100 = Gpu(989e12, 3.35e12, 450e9, 80e9, "H100", 0.22, "65 published runs")
GPUS = {
    "a100": _A100,
    "a100-40": replace(_A100, memory_bandwidth=1.555e12, memory=40e9),
    "h100": _H100,
    "h100-500w": replace(_H100, memory_bandwidth=2.4e12),
    "h200": replace(_H100, memory_bandwidth=4.8e12, memory=141e9, held_to="nothing: as H100"),
    "b200": Gpu(2250e12, 8.0e12, 900e9, 180e9, "H100", 0.22, "nothing: as H100"),
}

# Fitted to the even rows of benchmarks/published_runs.csv inside the domain.
FITTED = {"A100": 0.8, "H100": 0.607, "link": 0.526}
BY_HAND = {  # name: (value, why)
    "memory": (0.8, "achieved part of the memory's bandwidth: large copies reach 0.8 to 0.9"),
    "float8": (1.5, "rate of float8 matmuls over bfloat16's: twice, less the casts to float8"),
    "norms, forward": (10, "passes over [tokens, d]: two norms 4, two residual additions 6"),
    "norms, backward": (12, "two norms 6, two sums of residual gradients 6"),
    "inner, forward": (14, "passes inside of a tensor-parallel pair: rotary of q, k, v 6, GELU 8"),
    "inner, backward": (18, "rotary 6, GELU 12"),
    "scores, forward": (6, "passes over scores in memory: matmul 1, softmax 2, dropout 2, read 1"),
    "scores, backward": (9, "matmul 1, dropout 2, softmax 3, read by three matmuls 3"),
    # 8 where the matmul itself adds to the float32 sum, 10 in Megatron-LM, 20 in DeepSpeed
    "gradients": (14, "bytes per weight and micro-batch to add to the float32 sum"),
    "casts": (16, "the same more where float32 weights are cast, in forward and in backward"),
    "logits": (40, "bytes per logit: float32 and bf16 copies, softmax, gradient"),
    "optimizer": (30, "bytes per owned weight: AdamW reads 4 and writes 3 float32, and bf16"),
    "op-sac": (0.5, "matmuls that selective activation checkpointing by operators repeats"),
    # NCCL, src/graph/tuning.cc: a ring in the "simple" protocol
    "call": (8.4e-6, "seconds per collective"),
    "hop": (3.4e-6, "seconds per hop inside a node"),
    "network hop": (9.6e-6, "seconds per hop between nodes"),
}
HAND = {name: value for name, (value, _) in BY_HAND.items()}
TOO_SHORT = 64, 0.5  # GPUs, seconds: shorter steps on so many are latency-bound, not predicted


# ---- one run ----


@dataclass(frozen=True)
class Job:
    """A model, its layout on the ranks, and how the program runs it. Lengths in elements."""

    layers: int
    d_model: int
    heads: int
    seq: int
    vocab: int
    global_batch: int  # sequences per step
    ranks: int
    gpu: Gpu
    per_node: int = 8
    network: float = math.inf  # bytes/s of one GPU's network card, in one direction
    tp: int = 1
    pp: int = 1
    cp: int = 1
    micro_batch: int = 1
    schedule: str = "1f1b"  # gpipe, 1f1b, interleaved, zero-bubble (zb-1p), zb-2p
    virtual: int = 1
    sequence_parallel: bool = False
    sharding: str = "ddp"  # ddp, zero1, zero2, zero3, fsdp
    shard_ranks: int | None = None  # hybrid sharding: ranks of a shard group
    reshards: bool = True  # FSDP: gathers the weights again for backward
    recompute: str = "none"  # none, selective (attention scores), op-sac, full
    layer_weights: float | None = None  # of a layer's matrices; 12 d^2
    dtype: str = "bfloat16"  # bfloat16, float32, float8
    fused_attention: bool = True
    gather_bytes: int = 2  # per weight that ZeRO or FSDP gathers
    reduce_bytes: int = 4  # per gradient
    casts_weights: bool = False  # float32 weights, cast once per use
    overlaps_reduction: bool = True  # gradients are reduced while backward continues
    overlaps_gather: bool = True  # weights are gathered while the previous unit computes
    overlaps_tp: bool = True  # backward's dX is all-reduced beside the matmul of dW
    overlaps_messages: bool = True  # a pipeline's messages travel during the next action

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.pp * self.cp)

    @property
    def micro_batches(self) -> int:
        return max(1, round(self.global_batch / self.dp / self.micro_batch))

    @property
    def tokens(self) -> float:
        """Tokens per micro-batch that a rank computes, before tensor parallelism."""
        return self.micro_batch * self.seq / self.cp

    @property
    def weights_per_layer(self) -> float:
        return self.layer_weights or 12.0 * self.d_model**2

    @property
    def weights_per_rank(self) -> float:
        """Of the rank with the most: an equal part of the layers, and the head or the embedding."""
        ends = (2 if self.pp == 1 else 1) * self.vocab * self.d_model
        return (self.layers / self.pp * self.weights_per_layer + ends) / self.tp


@dataclass
class Step:
    """Seconds of a step by part, and the formulas that gave them (`explain`)."""

    parts: dict[str, float] = field(default_factory=dict)
    explain: list[str] = field(default_factory=list)

    def add(self, part: str, seconds: float, formula: str) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + seconds
        self.explain.append(f"{part:9} {seconds:9.4f} s = {formula}")

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


# ---- the domain: what the model claims to predict ----


def caveats(job: Job, seconds: float) -> list[str]:
    """Why a job lies outside of the domain; nothing if it lies inside. seconds: as predicted."""
    width = job.d_model / job.heads
    found = {
        "d_model under 2,048: small kernels": job.d_model < 2048,
        "sequences above 8,192": job.seq > 8192,
        "d_model / tp is not a multiple of 64: slow matmuls": job.d_model % (64 * job.tp) != 0,
        "the heads' width is not a multiple of 8: slow attention": width % 8 != 0,
        "latency-bound": job.ranks >= TOO_SHORT[0] and seconds < TOO_SHORT[1],
    }
    return [reason for reason, holds in found.items() if holds]


# ---- communication ----


def group_bandwidth(ranks: int, per_node: int, nvlink: float, card: float) -> float:
    """Bytes/s at which each rank of a group sends on a ring: min(nvlink, per_node x card).

    ranks: members of the group; per_node: those of them that share a node; nvlink, card: bytes/s of
    one GPU inside its node, and of its network card, in one direction.

    NCCL builds as many rings as a group has network cards, each leaving the node by its own card.
    So a ring over full nodes of eight has the bandwidth of eight cards, at most NVLink's, and a
    group with one member per node that of one card. The other groups of a node use the other cards:
    no two of them share one. If they did, at the same time, each would get its part.

    Measured: 192 GB/s on DGX A100s with eight cards of 25 GB/s (NVIDIA/nccl#812, quoted in #1576).
    One card's 12.5 GB/s per GPU would make FSDP of a 70B model on 96 H100s with 100 GB/s per node
    take three times as long as it did (README of foundation-model-stack/fms-fsdp).
    """
    return nvlink if ranks <= per_node else min(nvlink, per_node * card)


@dataclass(frozen=True)
class Ring:
    """A process group: `ranks` members, `per_node` of them in each node."""

    ranks: int
    per_node: int
    bandwidth: float  # bytes/s, achieved

    def seconds(self, payload: float, rounds: int = 1) -> float:
        """Of `rounds` half rings over `payload` bytes: 1 a reduce-scatter or an all-gather, 2 an
        all-reduce. Bytes over bandwidth, and the latency of every hop."""
        n, nodes = self.ranks, max(1, self.ranks // self.per_node)
        if n == 1:
            return 0.0
        hops = (n - nodes) * HAND["hop"] + (nodes - 1) * HAND["network hop"]
        return rounds * (payload * (n - 1) / n / self.bandwidth + hops) + HAND["call"]


def ring(job: Job, ranks: int, stride: int) -> Ring:
    """The group of `ranks` members whose numbers differ by `stride`."""
    per_node = max(1, min(ranks, job.per_node // stride))
    link = FITTED["link"] if isinstance(job.gpu.efficiency, str) else 1.0
    speed = group_bandwidth(ranks, per_node, job.gpu.nvlink, job.network)
    return Ring(ranks, per_node, link * speed)


# ---- computation: one layer, one micro-batch ----


@dataclass(frozen=True)
class Layer:
    """Seconds of one layer and one micro-batch on a rank; `tp_`: communication that is exposed."""

    forward: float
    backward: float
    recomputed: float
    tp_forward: float
    tp_backward: float

    @property
    def computes(self) -> float:
        return self.forward + self.backward + self.recomputed

    @property
    def tp(self) -> float:
        return self.tp_forward + self.tp_backward


def matmul_rate(job: Job) -> float:
    """FLOP/s that large matmuls achieve."""
    efficiency = job.gpu.efficiency
    return job.gpu.matmul * (FITTED[efficiency] if isinstance(efficiency, str) else efficiency)


def layer_of(job: Job) -> Layer:
    rate, memory = matmul_rate(job), job.gpu.memory_bandwidth * HAND["memory"]
    element = 4 if job.dtype == "float32" else 2  # bytes
    tokens, d, tp, weights = job.tokens, job.d_model, job.tp, job.weights_per_layer / job.tp

    # the four matmuls, and the operands and results that they read and write: w, x and y of each
    matmuls = 2 * weights * tokens / rate / (HAND["float8"] if job.dtype == "float8" else 1)
    matmuls += element * (weights + tokens * d * (4 + 12 / tp)) / memory

    # element-wise operators: norms and residuals outside of the pairs, GELU and rotary inside
    one_pass = element * tokens * d / memory
    outside = tp if job.sequence_parallel else 1
    forward = one_pass * (HAND["norms, forward"] / outside + HAND["inner, forward"] / tp)
    backward = one_pass * (HAND["norms, backward"] / outside + HAND["inner, backward"] / tp)

    # attention: 2 matmuls of 2 tokens seq d FLOPs, half of them causal if fused
    flops = 4 * tokens * job.seq * d / tp
    if job.fused_attention:
        core = flops / 2 / (job.gpu.matmul * job.gpu.attention)
        core_backward = 2.5 * core  # computes the scores again
    else:
        scores = element * tokens * job.seq * job.heads / tp / memory  # one pass
        core = flops / rate + HAND["scores, forward"] * scores
        core_backward = 2 * flops / rate + HAND["scores, backward"] * scores

    forward += matmuls + core
    backward += 2 * matmuls + core_backward + HAND["gradients"] * weights / memory
    if job.casts_weights:
        backward += HAND["casts"] * weights / memory
    recomputed = {
        "none": 0.0,
        "selective": core,
        "op-sac": forward - core - (1 - HAND["op-sac"]) * matmuls,
        "full": forward,
    }[job.recompute]

    # two all-reduces in forward and two in backward. Under sequence parallelism each is a reduce-
    # scatter and an all-gather, and in backward only the reduce-scatters (of dX) can be hidden
    all_reduce = ring(job, tp, 1).seconds(element * tokens * d, rounds=2)
    tp_forward = 2 * all_reduce * (2 if job.recompute == "full" else 1)
    hidden = 7 / 12 * matmuls if job.overlaps_tp else 0.0  # dW of wqkv and w1
    can_hide = (1 if job.sequence_parallel else 2) * all_reduce
    tp_backward = 2 * all_reduce - min(can_hide, hidden)
    return Layer(forward, backward, recomputed, tp_forward, tp_backward)


def head_of(job: Job) -> float:
    """Seconds of the head and the loss, forward and backward, one micro-batch."""
    logits = job.tokens * job.vocab / job.tp
    memory = job.gpu.memory_bandwidth * HAND["memory"]
    return 6 * logits * job.d_model / matmul_rate(job) + HAND["logits"] * logits / memory


# ---- the step ----


def step_time(job: Job) -> Step:
    """Seconds of a step, by part: compute, tp, pipeline, dp, optimizer."""
    step, layer, head, m = Step(), layer_of(job), head_of(job), job.micro_batches
    own, own_head = slowest_stage(job, layer, head)
    step.add(
        "compute",
        m * (own * layer.computes + own_head),
        f"{m} micro-batches x ({own:g} layers x (forward {layer.forward:.3g} + backward"
        f" {layer.backward:.3g} + recomputed {layer.recomputed:.3g}) + head {own_head:.3g} s);"
        f" matmuls at {matmul_rate(job) / 1e12:.4g} TFLOP/s",
    )
    if job.tp > 1:
        formula = f"(forward {layer.tp_forward:.3g} + backward {layer.tp_backward:.3g} s), exposed"
        formula += f"; ring at {ring(job, job.tp, 1).bandwidth / 1e9:.3g} GB/s"
        step.add("tp", m * own * layer.tp, f"{m} micro-batches x {own:g} layers x {formula}")
    if job.pp > 1:
        add_pipeline(step, job, layer, head)
    if job.dp * job.cp > 1:
        add_data_parallel(step, job, layer, head)
    owned = job.weights_per_rank
    if job.sharding not in ("ddp", "none"):
        owned /= job.shard_ranks or job.dp * job.cp
    memory = job.gpu.memory_bandwidth * HAND["memory"]
    formula = f"{HAND['optimizer']} bytes x {owned:.4g} weights / {memory / 1e12:.3g} TB/s"
    step.add("optimizer", HAND["optimizer"] * owned / memory, formula)
    return step


def slowest_stage(job: Job, layer: Layer, head: float) -> tuple[float, float]:
    """Layers of the slowest pipeline stage, and the seconds of its head (0: it has none).

    Where layers + 2 is divisible by pp and layers is not, embedding and head count as a layer each.
    """
    each = (job.layers + 2) / job.pp
    if job.pp == 1 or job.layers % job.pp == 0:
        longest = last = job.layers / job.pp
    elif each == int(each):
        longest, last = each, each - 1
    else:
        longest, last = math.ceil(job.layers / job.pp), job.layers // job.pp
    seconds = layer.computes + layer.tp
    return (longest, 0.0) if longest * seconds > last * seconds + head else (last, head)


def add_pipeline(step: Step, job: Job, layer: Layer, head: float) -> None:
    """The bubble, and messages that nothing hides."""
    p, v = job.pp, job.virtual
    average = (job.layers * (layer.computes + layer.tp) + head) / p
    shrinks = {"interleaved": v, "zb-1p": 3, "zero-bubble": 3, "zb-2p": math.inf}
    by = shrinks.get(job.schedule, 1)
    formula = f"(pp - 1 = {p - 1}) x {average:.3g} s of a micro-batch / {by} ({job.schedule})"
    step.add("pipeline", (p - 1) / by * average, formula)
    if not job.overlaps_messages:
        crosses = job.ranks > job.per_node
        speed = ring(job, 2, job.per_node if crosses else 1).bandwidth
        size = 2 * job.tokens * job.d_model / (job.tp if job.sequence_parallel else 1)
        count = 2 * v * job.micro_batches
        formula = f"{count} messages x {size / 1e6:.3g} MB / {speed / 1e9:.3g} GB/s"
        step.add("pipeline", count * size / speed, formula)


def add_data_parallel(step: Step, job: Job, layer: Layer, head: float) -> None:
    """What computation does not hide of gradients and weights on the ring of the replicas."""
    m, own, size = job.micro_batches, job.layers / job.pp, job.weights_per_rank
    forward = own * (layer.forward + layer.tp_forward) + head / 3  # of one micro-batch
    backward = own * (layer.backward + layer.recomputed + layer.tp_backward) + head * 2 / 3
    shards = job.shard_ranks or job.dp * job.cp
    group = ring(job, shards, job.tp)
    hops = (own - 1) * group.seconds(0.0)  # one collective per layer
    gather = group.seconds(job.gather_bytes * size) + hops
    reduce = group.seconds(job.reduce_bytes * size) + hops

    def exposed(communication: float, computation: float, hides: bool) -> float:
        return max(0.0, communication - computation) if hides else communication

    first, again, times = exposed(gather, forward, job.overlaps_gather), 0.0, 1  # times per step
    if job.sharding in ("fsdp", "zero3"):
        stay = job.overlaps_gather / own  # FSDP: the last layer's weights
        times, again = m, gather * (1 - stay) if job.reshards else 0.0
    elif job.sharding in ("zero1", "zero2"):
        times = m if job.sharding == "zero2" else 1
        first /= times  # the weights are gathered once, after the step
    else:
        reduce, first = 2 * reduce, 0.0  # an all-reduce; nothing is gathered
    waits = exposed(reduce + again * job.overlaps_gather, backward, job.overlaps_reduction)
    waits += again * (not job.overlaps_gather)
    step.add(
        "dp",
        times * (first + waits),
        f"{times} x (gather {first:.3g}, exposed, of {gather:.3g}; gather {again:.3g} and reduce"
        f" {reduce:.3g}, {waits:.3g} not behind backward {backward:.3g} s);"
        f" ring of {shards} at {group.bandwidth / 1e9:.3g} GB/s",
    )
    if shards < job.dp * job.cp:  # hybrid: replicas all-reduce their shards, after backward
        replicas = ring(job, job.dp // shards, job.tp * shards)
        seconds = replicas.seconds(job.reduce_bytes * size / shards, rounds=2) + 2 * hops
        formula = f"all-reduce of 1/{shards} over {replicas.ranks} replicas, {seconds:.3g} s"
        step.add("dp", seconds, f"{formula}, after backward")
