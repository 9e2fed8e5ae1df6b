"""Which layout on these GPUs: every layout that a stage can run, the fastest first.

    make plan ARGS="--nodes 16 --gpus 8 --gpu-type h100 --network 50 --d-model 4096 ..."

Step times come from `step_time`, bytes from `costs`. Memory is a formula, because a dry run takes
seconds per layout; tests compare both with the dry run.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from common.job.arguments import PRESETS, SHAPE, base_parser, positive, positive_int
from common.job.launch import fail
from tools.costs import Costs, costs_of
from tools.planner.step_time import GPUS, Job, caveats, step_time
from tools.stages import stages

VOCABULARY = 33_280  # WikiText-2's 33,278, padded
USABLE = 0.92  # of a GPU's memory: the CUDA context, NCCL's buffers and fragmentation take the rest
RANGE = 0.88, 1.25  # measured / predicted of left-out sources, 10 and 90 %: tests/step_errors.py
TIE = 1.10
MOST_MICRO_BATCH = 64


@dataclass(frozen=True)
class Layout:
    """One way to run the model. memory: peak bytes on the fullest rank."""

    stage: str
    flags: str
    job: Job
    memory: float


# ---- what a stage can run ----

# 07: ZeRO-1 in float32, after the pipeline has drained
MESH = dict(sharding="zero1", gather_bytes=4, overlaps_gather=False, overlaps_reduction=False)


def layouts(model: Job) -> Iterator[tuple[str, str, Job]]:
    """(stage, flags, job) of every layout whose sizes divide, and of others; `divides` tells."""
    n, nodes = model.ranks, model.ranks // model.per_node
    dp = replace(model, casts_weights=True)
    yield "02", "", dp
    for zero in (1, 2, 3):
        job = replace(dp, sharding=f"zero{zero}", gather_bytes=4, overlaps_gather=False)
        yield "03", f"--zero-stage {zero}", job
    for keep in ("", "--no-reshard-after-forward"):
        job = replace(model, sharding="fsdp", overlaps_gather=True, reshards=not keep)
        yield "04", keep, job
        if nodes > 1 and model.per_node > 1:
            hybrid = f"--shard-degree {model.per_node} {keep}".strip()
            yield "04", hybrid, replace(job, shard_ranks=model.per_node)
    for sp in ("", "--sequence-parallel"):
        yield "05", sp, replace(dp, tp=n, sequence_parallel=bool(sp))
    schedules = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1}  # virtual stages
    for schedule, virtual in schedules.items():
        job = replace(dp, pp=n, schedule=schedule, virtual=virtual)
        yield "06", f"--schedule {schedule}", job
    degrees = [(pp, tp) for pp in range(1, n + 1) for tp in range(1, n + 1) if n % (pp * tp) == 0]
    for pp, tp in degrees:
        if 1 in (pp, tp) and pp * tp in (1, n):
            continue  # 02, 05 and 06 have it
        for schedule in ("1f1b", "interleaved") if pp > 1 else ("1f1b",):
            for sp in ("", " --sequence-parallel") if tp > 1 else ("",):
                name = f" --schedule {schedule}" if pp > 1 else ""
                job = replace(dp, pp=pp, tp=tp, schedule=schedule, virtual=schedules[schedule])
                job = replace(job, sequence_parallel=bool(sp), **MESH)
                yield "07", f"--pp {pp} --tp {tp}{name}{sp}", job
    for tp in range(2, model.per_node + 1):  # within a node
        if "14" not in stages() or model.per_node % tp or n == tp:
            continue
        for sp in ("", " --sequence-parallel"):
            for keep in ("", " --no-reshard-after-forward"):
                job = replace(model, tp=tp, sequence_parallel=bool(sp), sharding="fsdp")
                yield "14", f"--tp {tp}{sp}{keep}", replace(job, reshards=not keep)


def divides(job: Job) -> bool:
    """Whether the stage accepts these sizes, micro-batch apart: check_arguments and its like."""
    batch = job.global_batch % job.dp == 0
    heads = job.heads % job.tp == 0 and job.vocab % job.tp == 0
    sequence = not job.sequence_parallel or job.seq % job.tp == 0
    interleaves = job.schedule != "interleaved" or job.pp > 1
    return batch and heads and sequence and interleaves and job.layers >= job.pp * job.virtual


def micro_batches(job: Job) -> list[int]:
    """Samples per micro-batch to try: powers of two, and all that a rank has."""
    share = job.global_batch // job.dp
    sizes = {2**k for k in range(share.bit_length()) if share % 2**k == 0} | {share}
    multiple = job.pp if job.schedule == "interleaved" else 1
    return [b for b in sorted(sizes) if b <= MOST_MICRO_BATCH and share // b % multiple == 0]


# ---- bytes: what a rank sends per step, and holds ----


def costs(stage: str, job: Job, last: bool = False) -> Costs:
    """Of the first rank or of the last one, by the table that is held to dry runs."""
    args = Namespace(
        **vars(job),
        n_layers=job.layers,
        seq_len=job.seq,
        global_batch_size=job.global_batch,
        micro_batch_size=job.micro_batch,
        activation_checkpointing=job.recompute == "full",
        dropout=0.0,
        autocast=False,
        zero_stage=int(job.sharding[-1]) if job.sharding.startswith("zero") else 0,
        shard_degree=job.shard_ranks or job.dp,
        no_reshard_after_forward=not job.reshards,
        param_dtype="bfloat16",
        reduce_dtype="float32",
        virtual_stages=job.virtual,
    )
    return costs_of(stage, args, job.ranks, (job.ranks - 1) * last, job.vocab)


def flops(job: Job) -> float:
    """Of a step, as MFU counts them (`TransformerConfig.flops_per_token`)."""
    weights = parameters(job) - job.vocab * job.d_model
    per_token = 6 * weights + 12 * job.layers * job.d_model * job.seq
    return per_token * job.global_batch * job.seq


def parameters(job: Job) -> float:
    return costs("02", job).P


def peak_memory(stage: str, job: Job, rows: int = 2048) -> float:
    """Peak bytes of the rank that has the most. rows: of a chunk of logits (common/loss.py)."""
    ranks = (False, True) if job.pp > 1 else (True,)
    return max(memory_of_rank(stage, job, rows, last) for last in ranks)


def memory_of_rank(stage: str, job: Job, rows: int, last: bool) -> float:
    """Model state, activations of the micro-batches in flight, and the larger of the head's and a
    layer's backward. See Cost in the stages' READMEs for what a layer keeps."""
    e, d, tokens = 4 if job.dtype == "float32" else 2, job.d_model, job.tokens
    table, shards = costs(stage, job, last), job.shard_ranks or job.dp
    # with ZeRO-1 they are full until they are reduced
    gradients = table.held["parameters" if job.sharding == "zero1" else "gradients"]
    state = table.held["parameters"] + table.held["optimizer"]
    outside = job.tp if job.sequence_parallel else 1
    # a layer keeps: residuals and norms float32, inputs of column-parallel layers, all inside
    kept = tokens * ((16 * d + 8) / outside + 2 * e * d + (12 * e * d + 4 * job.heads) / job.tp)
    layer = kept
    boundary = 4 if job.gather_bytes == 4 or job.sharding == "ddp" else e  # FSDP casts what enters
    if job.recompute == "full":
        kept = boundary * tokens * d / outside  # its input
    layers, most, in_flight, messages = job.layers, 1.0, 1.0, 0.0
    if job.pp > 1:
        m, v, pp = job.micro_batches, job.virtual, job.pp
        layers = math.ceil(layers / pp) if not last else layers // pp
        held = {"gpipe": m, "interleaved": ((v + 1) * pp - 1) / v, "zero-bubble": pp + 0.7}
        most = held.get(job.schedule, pp) if not last or job.schedule == "gpipe" else 1
        in_flight = min(m, most)
        messages = 16 * tokens * d / outside
    # a layer's backward: what it keeps, if it is recomputed, gradients of activations, of a weight
    full = job.recompute == "full"
    temporary = 7 / outside + 7 / job.tp if full else 6.5 / outside + 16 / job.tp
    backward = temporary * tokens * d + 24 * d * d / job.tp + (layer - kept) * full
    if job.sharding in ("fsdp", "zero3"):  # unsharded units, one unit's gradients, and the head's
        units = (1 + job.overlaps_gather) * job.reshards
        ends = 4 * job.vocab * d * (1 - 1 / shards) * full
        backward += ((units * job.gather_bytes + 4) * 12 * d * d + ends) / job.tp
    peak = backward
    if last:
        stays = (job.sharding == "fsdp" and job.reshards) * job.gather_bytes * 12 * d * d  # a layer
        if job.sharding == "fsdp" and job.tp > 1:  # the head (if all stays, 2 bytes more of the
            stays = (job.gather_bytes + 4) * job.vocab * d / job.tp  # embedding), and gradients
        peak = max(peak, head_memory(job, rows, outside) + stays)
    elif job.pp > 1:  # the embedding's gradient, when the micro-batch's layers are done
        peak = max(peak, 4 * job.vocab * d / job.tp + 12 * tokens * d - layers / job.virtual * kept)
    messages += 0 if job.reshards else job.gather_bytes * table.P / job.tp
    first = in_flight * layers * kept + peak + messages
    # gradients come with the first backward: full where the second one begins, or ends
    more = min(most, job.micro_batches - 1)
    second = more * layers * kept + (peak if more else backward) + messages
    # 07 reduces a copy of all gradients
    reduced = 2 * gradients + table.held["gradients"] if stage == "07" else 0
    return state + max(first, gradients + second, reduced)


def head_memory(job: Job, rows: int, outside: int) -> float:
    e, d, tokens, logits = 4 if job.dtype == "float32" else 2, job.d_model, job.tokens, job.vocab
    if job.tp > 1:  # all of the rank's logits: in float32, and their gradient
        return tokens * (logits / job.tp * (4 + e) + d * (8 / outside + e))
    chunk = rows * logits * (4 + e)
    memory = 16 * tokens * d + 8 * logits * d + chunk
    if job.sharding in ("zero2", "zero3", "fsdp") and job.micro_batches > 1:
        shards = job.shard_ranks or job.dp  # the previous micro-batch's last gradients in full
        memory += 4 * logits * d * (1 - 1 / shards)
    return memory


# ---- the plan ----


def plan(model: Job, fixed: Namespace) -> tuple[list[tuple[float, Layout]], Counter]:
    """(seconds, layout), the fastest first, and how many were dropped, by reason."""
    found, dropped = [], Counter()
    for stage, flags, job in layouts(model):
        sizes = micro_batches(job) if divides(job) else []
        if fixed.micro_batch_size:
            sizes = [b for b in sizes if b == fixed.micro_batch_size]
        if not sizes:
            dropped["sizes that do not divide"] += 1
        for size in sizes:
            for full in (True,) if fixed.activation_checkpointing else (False, True):
                sized = replace(job, micro_batch=size, recompute="full" if full else "none")
                memory = peak_memory(stage, sized)
                if memory > USABLE * model.gpu.memory:
                    dropped["too little memory"] += 1
                    continue
                words = [flags, f"--micro-batch-size {size}", "--activation-checkpointing" * full]
                layout = Layout(stage, " ".join(filter(None, words)), sized, memory)
                found.append((step_time(sized).seconds, layout))
    return sorted(found, key=lambda pair: pair[0]), dropped


def show(found: list[tuple[float, Layout]], model: Job, command: str, explain: bool) -> None:
    best, tied = found[0][0], 0
    print(f"{'':3}{'step, and its range':26}{'memory':>8}{'MFU':>7}{'tokens/s':>10}", end="")
    print("".join(f"{part:>10}" for part in PARTS))
    for number, (seconds, layout) in enumerate(found[:10], 1):
        job, parts = layout.job, step_time(layout.job).parts
        reasons = caveats(job, seconds)
        tied += seconds <= TIE * best
        figure = f"{seconds:.3g} s, {RANGE[0] * seconds:.2g} to {RANGE[1] * seconds:.2g}"
        rate = job.global_batch * job.seq / seconds / job.ranks
        mfu = f"{flops(job) / seconds / job.ranks / job.gpu.matmul:.0%}"
        row = f"{figure:26}{layout.memory / 1e9:6.1f}GB{mfu:>7}{rate:10,.0f}"
        row += "".join(f"{parts.get(part, 0.0) / seconds:>10.0%}" for part in PARTS)
        if "latency-bound" in reasons:
            row = f"{'latency-bound, not predicted':26}{layout.memory / 1e9:6.1f}GB"
        print(f"{number:2} {row}\n     {command.format(stage=layout.stage, flags=layout.flags)}")
        for reason in reasons:
            print(f"     outside of what the model was validated on: {reason}")
    if tied > 1:
        print(f"\nThe first {tied} are within {TIE - 1:.0%} of each other, a tie: measure these.")
    if explain:
        print("\nThe first one's step, by formula:")
        print("\n".join(step_time(found[0][1].job).explain))
        for (op, group), count in costs(found[0][1].stage, found[0][1].job).sent.items():
            print(f"the first rank sends by {op} in {group}: {count / 1e9:.3g} GB")


PARTS = ("compute", "tp", "pipeline", "dp", "optimizer")


def parse_args() -> Namespace:
    parser = base_parser(__doc__)
    add = parser.add_argument_group("the machine").add_argument
    add("--nodes", type=positive_int, default=1)
    add("--gpus", type=positive_int, default=1, help="per node")
    add("--gpu-type", choices=GPUS, required=True)
    add("--network", type=positive, help="GB/s of one GPU's network card, in one direction")
    add("--efficiency", type=positive, help="the achieved part of the matmul rate, such as 0.55")
    add("--explain", action="store_true", help="print the best layout's formulas with its numbers")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    nodes, per_node = args.nodes, args.gpus
    if args.efficiency and args.efficiency > 1:
        fail(f"--efficiency {args.efficiency:g}: pass a part, such as 0.55")
    for field, value in zip(SHAPE, PRESETS[args.preset], strict=True):
        if getattr(args, field) is None:
            setattr(args, field, value)
    if args.d_model % args.n_heads:
        fail(f"--d-model {args.d_model} is not a multiple of --n-heads {args.n_heads}")
    ranks = nodes * per_node
    gpu = GPUS[args.gpu_type]
    if args.efficiency:
        gpu = replace(gpu, efficiency=args.efficiency)
    if nodes > 1 and not args.network:
        fail(f"--nodes {nodes} needs --network, the GB/s of a GPU's network card")
    model = Job(
        layers=args.n_layers,
        d_model=args.d_model,
        heads=args.n_heads,
        seq=args.seq_len,
        vocab=VOCABULARY,
        global_batch=args.global_batch_size,
        ranks=ranks,
        gpu=gpu,
        per_node=per_node,
        network=1e9 * args.network if args.network else math.inf,
        dtype=args.dtype or "bfloat16",
    )
    found, dropped = plan(model, args)
    gpus = f"{nodes} x {per_node} {args.gpu_type} (held to {gpu.held_to})"
    batch = f"{model.global_batch} sequences of {model.seq} tokens"
    print(f"{gpus}, {parameters(model):,.0f} parameters, {batch}")
    left_out = "; ".join(f"{count} with {reason}" for reason, count in dropped.items())
    print(f"{len(found)} layouts; dropped: {left_out or 'none'}\n", flush=True)
    if not found:
        fail(f"no layout fits on {ranks} x {args.gpu_type}: {left_out}")
    shape = " ".join(f"--{k.replace('_', '-')} {getattr(args, k)}" for k in SHAPE)
    words = f"{shape} --global-batch-size {args.global_batch_size}"
    start = f"make run-{{stage}} NPROC={per_node}"
    if nodes > 1:
        start = f"make submit-{{stage}} NODES={nodes} GPUS={per_node}"
    show(found, model, f'{start} ARGS="{words} {{flags}}"', args.explain)


if __name__ == "__main__":
    main()
