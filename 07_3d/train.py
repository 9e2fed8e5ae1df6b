"""Stage 07: data, tensor and pipeline parallelism together, on a three-dimensional mesh of ranks.

Every rank has a coordinate on each of three axes. The one on `pp` says which layers the rank owns,
the one on `tp` which shard of their matrices, and the one on `dp` which part of each batch:

    rank = (pp_rank * dp + dp_rank) * tp + tp_rank

Ranks that differ in only one coordinate form a process group, which communicates along that axis.
`tp` is innermost so that its ranks share a node: its collectives block several times per layer.
`pp` is outermost: its messages travel while other micro-batches compute.

New since 06: the mesh; gradients that are averaged over `dp` after the pipeline has drained; and a
global norm that counts every parameter once. The definitions of 05 and 06 come last, repeated.

    P parameters, of which a rank has Q, about P / (pp tp), in l layers; m micro-batches per step
    A = micro-batch x seq x d_model elements; e = 1 on the first and the last stage, 2 if pp = 1

    memory per rank   16 Q bytes, and 06's activations for 1 / dp of the batch, sharded as in 05
    sent per step     over dp: 2 (dp-1)/dp Q elements
                      over tp: 2 (tp-1)/tp m (4 l + e) A
                      over pp: m A per boundary and direction (--sequence-parallel: m A / tp)

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", 2021; and the papers of 02, 05 and 06.

Run it:

    torchrun --nproc-per-node 8 07_3d/train.py --data sample --pp 2 --tp 2 --steps 100
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A rank posts receives before its first forward. By default CUDA loads a kernel when it is first
# launched, and may wait for operations in flight: a deadlock, if a receive depends on this kernel.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
# With one hardware queue kernels start in launch order, so an all-reduce is in flight before the
# matmul that hides it starts. From Blackwell on GPUs do not need it (Megatron-LM, arguments.py).
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.nn.utils import clip_grads_with_norm_
from torch.profiler import record_function

from common.collectives import (
    all_gather_single,
    all_reduce,
    all_reduce_control,
    average_gradients,
    global_norm,
    irecv,
    isend,
    reduce_scatter_single,
)
from common.counter_rng import CounterDropout
from common.distributed import group_along
from common.loss import IGNORED, in_autocast_dtype
from common.model import Output, Transformer, initial_value, linear
from common.module_checks import check_plain, forbid_create_graph

# isort: split
from common.batches import eval_batches, train_batches
from common.optimization import adamw_settings, learning_rate, set_learning_rate
from common.shards import training_state

from common.job.arguments import base_parser, check_pipeline, model_config, positive_int
from common.job.corpus import load_corpus
from common.job.launch import cleanup, fail, setup, world_size
from common.job.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: a mesh of ranks, for the pipeline of 06 and the sharded layers of 05
# ------------------------------------------------------------------------------------------------


class Mesh(NamedTuple):
    """This rank's process groups, one per axis; along `pp` two, one per direction."""

    to_lower: ProcessGroup
    to_higher: ProcessGroup
    dp: ProcessGroup
    tp: ProcessGroup

    @property
    def pp(self) -> ProcessGroup:
        return self.to_lower  # of the same ranks as `to_higher`


def build_mesh(pp: int, dp: int, tp: int, timeout: float, device: torch.device) -> Mesh:
    """This rank's groups on the mesh: rank = (pp_rank * dp + dp_rank) * tp + tp_rank.

    In a mesh of (2, 2, 2), rank 5 is in the groups {4, 5} of tp, {5, 7} of dp and {1, 5} of pp.
    """
    shape = (pp, dp, tp)
    if pp * dp * tp != dist.get_world_size():
        raise ValueError(f"a mesh of {shape} ranks does not have {dist.get_world_size()}")
    mesh = Mesh(
        to_lower=group_along(shape, 0, "to_lower", timeout),
        to_higher=group_along(shape, 0, "to_higher", timeout),
        dp=group_along(shape, 1, "dp", timeout),
        tp=group_along(shape, 2, "tp", timeout),
    )
    # NCCL connects a group's ranks in its first collective, which can wait for a receive in flight,
    # whose sender may wait for this rank: a deadlock. So connect dp and tp now
    for group in (mesh.dp, mesh.tp):
        all_reduce_control(torch.zeros(1, device=device), group=group)
    return mesh


def message_shape(tokens: Tensor, d_model: int, sequence_shards: int) -> tuple[int, int, int]:
    """The shape of what stages send, hidden states or their gradients, between ranks that have the
    same coordinates on dp and tp: with sequence parallelism the same part of each sequence."""
    batch, seq = tokens.shape
    return batch, seq // sequence_shards, d_model


# ---- clipping: one norm for the whole model ----


def clip_grad_norm_(model: nn.Module, max_norm: float, mesh: Mesh) -> Tensor:
    """Scale the gradients to at most this global norm; returns the norm before clipping."""
    dims = shard_dims_of(model)
    params = dict(model.named_parameters())  # frozen: an empty grad keeps the norm on the device
    grads = {n: p.new_zeros(0) if p.grad is None else p.grad for n, p in params.items()}
    sharded = [grad for name, grad in grads.items() if name in dims]
    replicated = [grad for name, grad in grads.items() if name not in dims]
    # Every parameter counts once. Squares of sharded gradients add up over `tp`, and those of all
    # stages over `pp`. Replicated gradients are equal over `tp`, and all gradients over `dp`.
    norm = global_norm(replicated)
    squares = norm.square()
    if sharded:  # with tp = 1, nothing is
        squares = squares + all_reduce_control(global_norm(sharded).square(), group=mesh.tp)
        check_equal(norm.to(squares), mesh.tp)  # a norm of no gradients is on the CPU
    total_norm = all_reduce_control(squares, group=mesh.pp).sqrt()
    clip_grads_with_norm_(model.parameters(), max_norm, total_norm)
    return total_norm


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--pp", type=positive_int, default=1, help="pipeline-parallel degree")
    parser.add_argument("--tp", type=positive_int, default=1, help="tensor-parallel degree")
    parser.add_argument("--sequence-parallel", action="store_true", help="shard the sequence too")
    schedules = ["1f1b", "interleaved"]
    parser.add_argument("--schedule", choices=schedules, default="1f1b", help="pipeline schedule")
    stages = "stages per rank (default: 2 if interleaved, else 1)"
    parser.add_argument("--virtual-stages", type=positive_int, help=stages)
    args = parser.parse_args(argv)
    dp, rest = divmod(world_size(), args.pp * args.tp)
    if rest:
        ranks = f"{world_size()} ranks (--nproc-per-node)"
        fail(f"--pp {args.pp} times --tp {args.tp} does not divide the {ranks}")
    return check_pipeline(args, args.pp, "--pp", dp, args.tp)  # with args.dp, args.virtual_stages


@torch.no_grad()
def evaluate(model, pipeline, tokens, args, device, mesh: Mesh) -> float:
    """Mean loss in nats over every token of a split but the first, each predicted once."""
    model.eval()
    share = eval_batches(tokens, args.batching, device, mesh.dp.rank(), mesh.dp.size())
    batches = [(inputs, targets, None) for inputs, targets in share]
    counts = torch.stack([(targets != IGNORED).sum() for _, targets, _ in batches])
    losses = pipeline.run(batches).double()
    total = all_reduce_control((losses * counts).sum()) / mesh.tp.size()  # equal losses over tp
    count = all_reduce_control(counts.sum(), group=mesh.dp)  # ranks of dp have their own batches
    model.train()
    return (total / count).item()


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the flags say; returns the lines of metrics.jsonl."""
    args = parse_args(argv)
    world = setup(args.timeout)
    device = world.device
    corpus = load_corpus(args.data)

    config = model_config(args, corpus)
    mesh = build_mesh(args.pp, args.dp, args.tp, args.timeout, device)
    dp, tp = mesh.dp, mesh.tp
    # pp chooses this rank's layers, then tp its shards of their matrices; dp chooses its batches
    n_stages = args.pp * args.virtual_stages
    own_stages = range(mesh.pp.rank(), n_stages, args.pp)
    units = {stage: units_of(stage, n_stages, config.n_layers) for stage in own_stages}
    with torch.device("meta"):
        model = Transformer(config, indices=[unit for own in units.values() for unit in own])
    if args.tp > 1:
        tensor_parallel(model, tp, args.sequence_parallel)
    init_shards(model, args.seed, tp, device)
    stages = {s: PipelineStage(*parts_of(model, units[s]), args.autocast) for s in own_stages}
    schedule = partial(interleaved_1f1b, v=args.virtual_stages)  # v = 1: 1F1B
    sequence_shards = args.tp if args.sequence_parallel else 1
    shape = partial(message_shape, d_model=config.d_model, sequence_shards=sequence_shards)
    pipeline = Pipeline(stages, schedule, mesh.to_lower, mesh.to_higher, shape)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_settings(args.lr, args.weight_decay))

    run = Run(args, __file__, config, device, corpus)
    state = training_state(model, optimizer, shard_dims_of(model), tp)
    first_step = run.checkpoints.load(run.resume, state, optimizer)
    batches = train_batches(corpus.train, args.batching, device, first_step, dp.rank(), dp.size())

    for step in run.steps(first_step):
        lr = learning_rate(step, args.steps, args.lr, args.warmup_steps, args.min_lr_ratio)
        set_learning_rate(optimizer, lr)
        micro_batches = next(batches)
        losses = pipeline.run(micro_batches)
        average_gradients(model.named_parameters(), dp)
        if args.sequence_parallel and args.tp > 1:
            all_reduce_replicated_gradients(model, tp)
        # losses are zeros but on the last stage, where the ranks of tp have the same ones
        loss = all_reduce_control(losses.mean()) / (args.dp * args.tp)
        grad_norm = clip_grad_norm_(model, args.max_norm, mesh)
        optimizer.step()
        run.log(step, loss, grad_norm, lr)
        optimizer.zero_grad(set_to_none=True)

        if run.evaluates(step):
            run.log_evaluation("val", evaluate(model, pipeline, corpus.valid, args, device, mesh))
        if run.is_last(step):
            run.log_evaluation("test", evaluate(model, pipeline, corpus.test, args, device, mesh))
        run.write()
        if run.agree_to_save_or_stop(step):
            run.checkpoints.save(step + 1, state, args.keep_checkpoints)
    for group in mesh:
        dist.destroy_process_group(group)
    return run.finish(state)


# ------------------------------------------------------------------------------------------------
# Repeated to the letter from 05 and 06
# ------------------------------------------------------------------------------------------------


# ---- from 05: tensor parallelism (f begins a pair of linear layers, g ends it) ----


def tensor_parallel(
    model: Transformer, group: ProcessGroup, sequence_parallel: bool = False
) -> Transformer:
    """Replace the model's matrices, in place, with this rank's shards of them.

    The model may be on the meta device: then the shards are as well, and `init_shards` fills
    them. With sequence_parallel the model takes only sequences of config.seq_len.
    """
    region = SequenceParallelRegion(group) if sequence_parallel else TensorParallelRegion(group)
    if model.embed is not None:  # a part of a model may lack the embedding or the output
        model.embed.tokens = VocabParallelEmbedding(model.embed.tokens, region)
    for layer in model.layers.values():
        layer.attn.wqkv = ColumnParallelLinear(layer.attn.wqkv, region)  # rows: complete heads
        layer.attn.wo = RowParallelLinear(layer.attn.wo, region)
        layer.mlp.w1 = ColumnParallelLinear(layer.mlp.w1, region)
        layer.mlp.w2 = RowParallelLinear(layer.mlp.w2, region)
    if model.output is not None:
        model.output = VocabParallelOutput(model.output, region)
    if sequence_parallel:  # dropout masks depend on positions: set this rank's
        length = model.config.seq_len // region.tp
        for dropout in (m for m in model.modules() if isinstance(m, CounterDropout)):
            dropout.positions = (range(region.rank * length, (region.rank + 1) * length),)
    return model


class TensorParallelModule(nn.Module):
    """Holds this rank's shard of the weight of `plain`, split along dimension `shard_dim`."""

    shard_dim: int

    def __init__(self, plain: nn.Module, region: TensorParallelRegion):
        super().__init__()
        check_plain(plain, "weight")  # a bias, for example, would be lost
        self.region, self.training = region, plain.training
        shard = shard_of(plain.weight, self.shard_dim, region.group)
        self.weight = nn.Parameter(shard, plain.weight.requires_grad)

    def reset_parameters(self) -> None:
        raise RuntimeError("initialize the plain layer before it is sharded, or use init_shards")


class ColumnParallelLinear(TensorParallelModule):
    """y = x W^T in the dtype of autocast; each rank computes some features from all of x."""

    shard_dim = 0  # weight: [out / tp, in]

    def forward(self, x: Tensor) -> Tensor:  # -> [batch, seq, out / tp]
        return LinearWithAsyncCommunication.apply(in_autocast_dtype(x), self.weight, self.region)


class RowParallelLinear(TensorParallelModule):
    """y = x W^T, where each rank has some features of x: [batch, seq, in / tp]."""

    shard_dim = 1  # weight: [out, in / tp]

    def forward(self, x: Tensor) -> Tensor:  # -> [batch, seq, out], full
        return ReduceFromRegion.apply(linear(x, self.weight), self.region)


class LinearWithAsyncCommunication(torch.autograd.Function):
    """f, then y = x W^T. One function, so that backward computes dW while dX is being reduced."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, region: TensorParallelRegion) -> Tensor:
        x = region.enter(x)
        ctx.save_for_backward(x, weight)
        ctx.region = region
        return F.linear(x, weight.to(x.dtype))  # [batch, seq, out / tp]

    @staticmethod
    @forbid_create_graph
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        # each rank holds a partial dX, from its own features of y: reduce them
        partial = grad @ weight.to(grad.dtype)  # cast again: no bf16 copy of W is kept
        grad_x, work = ctx.region.start_exit(partial)
        # dW needs no communication: compute it while dX is in flight
        grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        work.wait()
        return grad_x, grad_weight.to(weight.dtype), None


class ReduceFromRegion(torch.autograd.Function):
    """g: the sum of the ranks' partial outputs."""

    @staticmethod
    def forward(ctx, partial: Tensor, region: TensorParallelRegion) -> Tensor:
        if partial.dtype == torch.float16:
            # a shard's gradient can overflow on one rank alone, whose GradScaler skips the step
            raise ValueError("float16 needs a GradScaler, which decides per rank: use bfloat16")
        ctx.region = region
        total, work = region.start_exit(partial)
        work.wait()
        if total is partial:  # overwritten: safe, because its producer has not saved it
            ctx.mark_dirty(partial)  # tells autograd that the input is returned, modified
        return total

    @staticmethod
    @forbid_create_graph
    def backward(ctx, grad: Tensor):
        return ctx.region.enter(grad), None


class TensorParallelRegion:
    """The region between f and g, where ranks hold different features. Outside of it each rank
    holds full activations.

    Activations enter the region in f and exit it in g. Gradients travel the other way: in backward
    they enter it in g and exit it in f.
    """

    def __init__(self, group: ProcessGroup):
        self.group, self.tp, self.rank = group, group.size(), group.rank()

    def enter(self, x: Tensor) -> Tensor:
        """Return the full activations [batch, seq, d]: every rank already has them."""
        return x

    def start_exit(self, partial: Tensor) -> tuple[Tensor, Work]:
        """Start to all-reduce the ranks' `partial` [batch, seq, d], in place."""
        return partial, all_reduce(partial, group=self.group, async_op=True)


# ---- the vocabulary: embedding, LM head and loss ----


class VocabParallelEmbedding(TensorParallelModule):
    """Looks up the tokens whose rows this rank owns, zeros for others. g sums over the ranks."""

    shard_dim = 0  # weight: [vocab / tp, d]

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, seq] -> [batch, seq, d]
        row, is_local = local_index(tokens, len(self.weight), self.region.group)
        partial = F.embedding(row, self.weight)
        return ReduceFromRegion.apply(partial.masked_fill(~is_local[..., None], 0.0), self.region)


class VocabParallelOutput(nn.Module):
    """Norm, LM head and loss. No rank ever holds all logits of a token."""

    def __init__(self, output: Output, region: TensorParallelRegion):
        super().__init__()
        check_plain(output, "norm", "head")
        self.group, self.training = region.group, output.training
        self.norm = output.norm
        self.head = ColumnParallelLinear(output.head, region)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """This rank's logits [batch, seq, vocab / tp], or with targets their mean loss."""
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return vocab_parallel_cross_entropy(logits.flatten(0, -2), targets.flatten(), self.group)


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
    """Mean cross-entropy, a float32 scalar, the same on every rank of the group.

    logits: [tokens, vocab / tp], this rank's columns. The function overwrites them if they are
    float32. targets: [tokens], ids in the full vocabulary; IGNORED ones do not count, and if all
    are, the loss is 0."""
    return VocabParallelCrossEntropy.apply(logits, targets, group)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """A token's loss is log(sum exp(logit - highest)) - (target's logit - highest): the ranks
    exchange one maximum and two sums per token. The gradient overwrites float32 logits."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
        ctx.dtype, logits = logits.dtype, logits.float()
        counted = targets != IGNORED
        scale = counted.float() / counted.sum().clamp(min=1)  # [tokens], weights of the mean
        column, is_local = local_index(targets.masked_fill(~counted, 0), logits.shape[-1], group)
        column, is_local = column[:, None], is_local & counted

        highest = logits.amax(dim=-1)
        all_reduce(highest, ReduceOp.MAX, group=group)
        logits.sub_(highest[:, None])  # in place; mark_dirty is only for inputs that are returned
        target_logit = logits.gather(-1, column)[:, 0].masked_fill(~is_local, 0.0)
        all_reduce(target_logit, group=group)
        total = logits.exp_().sum(dim=-1)  # in place: after the target's logit has been read
        all_reduce(total, group=group)

        ctx.save_for_backward(logits, column, scale / total, scale * is_local)  # logits: now exp
        losses = (total.log() - target_logit).masked_fill(~counted, 0.0)  # NaN * 0 would be NaN
        return (losses * scale).sum()

    @staticmethod
    @forbid_create_graph
    def backward(ctx, grad: Tensor):
        exp, column, softmax_scale, target_scale = ctx.saved_tensors
        # scale * (softmax - 1 at the target), in place: autograd raises on a second backward
        grad_logits = exp.mul_((softmax_scale * grad)[:, None])
        grad_logits.scatter_add_(-1, column, (-target_scale * grad)[:, None])
        return grad_logits.to(ctx.dtype), None, None


def local_index(ids: Tensor, n: int, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Each id's row in this rank's shard of n rows (0 if another rank owns it), and whether this
    rank owns it. An id outside of the vocabulary stays out of range, so that the lookup raises."""
    row = ids - group.rank() * n
    is_local = (row >= 0) & (row < n)
    is_outside = (ids < 0) | (ids >= group.size() * n)
    return torch.where(is_local, row, ids * is_outside), is_local


def shard_of(full: Tensor, dim: int | None, group: ProcessGroup) -> Tensor:
    """A copy of this rank's shard along `dim`, so that `full` can be freed. None: `full` itself."""
    if dim is None:
        return full
    if full.shape[dim] % group.size():
        sizes = f"dimension {dim} of {tuple(full.shape)}"
        raise ValueError(f"{sizes} is not divisible by {group.size()} ranks")
    return full.detach().chunk(group.size(), dim)[group.rank()].clone()


def shard_dims_of(model: nn.Module) -> dict[str, int]:
    """The dimension along which each sharded parameter is split, by name; no replicated ones."""
    return {
        f"{name}.weight".removeprefix("."): module.shard_dim
        for name, module in model.named_modules()
        if isinstance(module, TensorParallelModule)
    }


def init_shards(model: nn.Module, seed: int, group: ProcessGroup, device: torch.device) -> None:
    """Give a model on the meta device this rank's shards of the plain model's initial weights."""
    model.to_empty(device=device)  # replaces the parameters: build the optimizer after this
    dims = shard_dims_of(model)
    for name, parameter in model.named_parameters():  # drawn in full, one by one
        shape, dim = list(parameter.shape), dims.get(name)
        if dim is not None:
            shape[dim] *= group.size()
        with torch.no_grad():
            parameter.copy_(shard_of(initial_value(name, shape, seed), dim, group))


def check_equal(norm: Tensor, group: ProcessGroup) -> None:
    """Raise if the norm of the replicated gradients differs between ranks by more than rounding."""
    highest, minus_lowest = all_reduce_control(torch.stack([norm, -norm]), group, ReduceOp.MAX)
    # private, but unlike `if` it does not wait for the GPU; a NaN norm passes
    is_equal = ~(highest + minus_lowest > 1e-3 * highest)
    torch._assert_async(is_equal, "gradients of replicated parameters differ between ranks")


# ---- sequence parallelism: outside of the regions, activations are sharded along the sequence ----


class SequenceParallelRegion(TensorParallelRegion):
    """A region outside of which a rank has only its part of each sequence: [batch, seq / tp, d].

    An all-reduce is a reduce-scatter, then an all-gather. g does the first half and the next f the
    second; norms, dropout and residual additions between them work on seq / tp positions."""

    def enter(self, x: Tensor) -> Tensor:
        """All-gather along the sequence: [batch, seq / tp, d] -> [batch, seq, d]."""
        by_rank = x.new_empty(self.tp * x.shape[0], *x.shape[1:])  # [tp * batch, seq / tp, d]
        all_gather_single(by_rank, x.contiguous(), group=self.group)
        return by_rank.unflatten(0, (self.tp, -1)).transpose(0, 1).flatten(1, 2)

    def start_exit(self, partial: Tensor) -> tuple[Tensor, Work]:
        """Start to reduce-scatter along the sequence: [batch, seq, d] -> [batch, seq / tp, d]."""
        # [tp * batch, seq / tp, d]: the part of each rank is contiguous
        by_rank = partial.unflatten(1, (self.tp, -1)).transpose(0, 1).flatten(0, 1)
        total = torch.empty_like(by_rank[: len(partial)])
        return total, reduce_scatter_single(total, by_rank, group=self.group, async_op=True)


def all_reduce_replicated_gradients(model: nn.Module, group: ProcessGroup) -> None:
    """Sum the norms' gradients, once per step: each rank's are of its part of the sequence."""
    dims = shard_dims_of(model)
    params = [p for n, p in model.named_parameters() if n not in dims and p.requires_grad]
    if any(p.grad is None for p in params):  # ranks could all-reduce different sizes
        raise RuntimeError("a replicated parameter without a gradient: freeze it")
    if not params:
        return
    flat = torch.cat([p.grad.flatten() for p in params])
    all_reduce(flat, group=group)
    for p, total in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad.copy_(total.view_as(p))


# ---- from 06: the pipeline ----


class Action(NamedTuple):
    kind: str  # F: forward, B: backward (zero bubble: of the inputs), W: backward of the weights
    micro: int  # micro-batch
    stage: int  # on rank stage % p


def source_and_destination(action: Action, n_stages: int) -> tuple[int | None, int | None]:
    """The stages that an action receives from and sends to: activations go to the next stage (F),
    their gradients to the previous one (B). None where there is no message."""
    previous = action.stage - 1 if action.stage > 0 else None
    following = action.stage + 1 if action.stage < n_stages - 1 else None
    ends = {"F": (previous, following), "B": (following, previous), "W": (None, None)}
    return ends[action.kind]


Schedule = Callable[[int, int, int], list[Action]]  # of a rank, p ranks and m micro-batches


def one_f_one_b(rank: int, p: int, m: int) -> list[Action]:
    """1F1B: p - rank - 1 forwards, then a forward and a backward in turn: p - rank in flight."""
    forwards = [Action("F", micro, rank) for micro in range(m)]
    backwards = [Action("B", micro, rank) for micro in range(m)]
    return alternate(forwards, backwards, min(m, p - rank - 1))


def alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """Warm-up: forwards. Steady state: one forward, one backward. Cool-down: backwards."""
    pairs = zip(forwards[warm_up:], backwards, strict=False)  # until the forwards run out
    steady_state = [action for pair in pairs for action in pair]
    return forwards[:warm_up] + steady_state + backwards[len(forwards) - warm_up :]


class Pipeline:
    """Run a schedule: forward and backward of all micro-batches through all stages.

    stages: this rank's, by number; stage s is on rank s % p. to_lower, to_higher: two groups of the
    same ranks, for messages to a lower and to a higher rank. NCCL runs the operations between two
    ranks of a group in order: in a single group, a send could wait behind a receive that depends on
    it. message_shape: maps a micro-batch's tokens to the shape of the activations between stages.
    """

    def __init__(
        self,
        stages: dict[int, PipelineStage],
        schedule: Schedule,
        to_lower: ProcessGroup,
        to_higher: ProcessGroup,
        message_shape: Callable[[Tensor], tuple[int, ...]],
    ):
        self.schedule, self.to_lower, self.to_higher = schedule, to_lower, to_higher
        self.p, self.rank = to_lower.size(), to_lower.rank()
        self.stages, self.n_stages = stages, self.p * len(stages)
        if self.p == 1 and len(stages) > 1:
            raise ValueError(f"one rank alone takes one stage, not {len(stages)}")
        parameter = next(next(iter(stages.values())).part.parameters(), None)
        if parameter is None:
            raise ValueError(f"rank {self.rank} of the pipeline needs layers")
        self.device, self.message_shape = parameter.device, message_shape
        self.receives: dict[Action, tuple[Work, Tensor]] = {}  # in flight, by the action that waits
        self.sends: deque[tuple[Work, Tensor]] = deque()  # in flight, the oldest first
        self.open_channels()

    def run(self, micro_batches: list[tuple[Tensor, Tensor, Tensor | None]]) -> Tensor:
        """Forward and backward of micro-batches (tokens, targets, dropout keys); under `no_grad`
        forward only. Returns their losses, [m]: zeros except on the last rank."""
        if torch.is_grad_enabled() and any(x.requires_grad for x, _, _ in micro_batches):
            raise ValueError("an input requires a gradient, which it would not get: detach it")
        losses = torch.zeros(len(micro_batches), device=self.device)
        shapes = [self.message_shape(tokens) for tokens, _, _ in micro_batches]
        self.compare(torch.is_grad_enabled(), *shapes)
        actions = self.actions_for(len(micro_batches))
        # post each receive one action early: data arrives meanwhile (two early could deadlock)
        self.start_receive(actions[0], shapes[actions[0].micro])
        for action, upcoming in pairwise([*actions, None]):
            if upcoming is not None:
                self.start_receive(upcoming, shapes[upcoming.micro])
            received = self.finish_receive(action) if action in self.receives else None
            name = f"{action.kind} {action.micro} {action.stage}"
            # a stage's forward enables autocast itself; backward runs without it
            with record_function(name), torch.autocast(self.device.type, enabled=False):
                result = self.run_action(action, received, micro_batches)
            _, destination = source_and_destination(action, self.n_stages)
            if destination is not None:
                self.start_send(result, destination, shapes[action.micro])
            elif action.kind == "F":
                losses[action.micro] = result  # of the last stage
        while self.sends:
            self.finish_oldest_send()
        return losses

    def compare(self, *facts) -> None:
        """Raise if the ranks disagree: messages would not fit the buffers that receive them."""
        digest = torch.full((), hash(facts) % 2**32, device=self.device)
        extremes = torch.stack([digest, -digest])
        all_reduce_control(extremes, self.to_lower, ReduceOp.MAX)
        # private, but unlike `if` it does not wait for the GPU
        torch._assert_async(extremes.sum() == 0, "ranks differ in no_grad or micro-batch shapes")

    def actions_for(self, m: int) -> list[Action]:
        """This rank's actions with m micro-batches, under `no_grad` only its forwards (any m)."""
        trains = torch.is_grad_enabled()
        # interleaving needs a multiple of p: evaluation adds micro-batches that `return` drops
        micros = range(m if trains else ceil(m / self.p) * self.p)
        actions = self.schedule(self.rank, self.p, len(micros))
        needed = [(k, i, s) for s in self.stages for k in self.stages[s].kinds for i in micros]
        if sorted(actions) != sorted(needed):
            raise ValueError("the schedule must have each action of these stages exactly once")
        return [a for a in actions if trains or (a.kind == "F" and a.micro < m)]

    def run_action(self, action: Action, received: Tensor | None, micro_batches) -> Tensor | None:
        """Run an action. received: an F's activations or a B's gradient; None in an F of the first
        stage, which starts from tokens, and in a B of the last one, which starts from the loss."""
        stage = self.stages[action.stage]
        if action.kind == "W":
            return stage.weight_gradients()
        if action.kind == "B":
            return stage.backward(action.micro, received)
        tokens, targets, keys = micro_batches[action.micro]
        x = tokens if received is None else received
        return stage.forward(action.micro, x, targets, keys, len(micro_batches))

    def start_receive(self, action: Action, shape: tuple[int, ...]) -> None:
        """Post the receive of the message that an action needs, if it needs one."""
        source, _ = source_and_destination(action, self.n_stages)
        if source is None:
            return
        src = source % self.p
        buffer = torch.empty(shape, device=self.device, dtype=torch.float32)
        work = irecv(buffer, group=self.group_for(src, self.rank), group_src=src)
        self.receives[action] = work, buffer

    def finish_receive(self, action: Action) -> Tensor:
        work, buffer = self.receives.pop(action)
        work.wait()
        return buffer

    def start_send(self, tensor: Tensor | None, destination: int, shape: tuple[int, ...]) -> None:
        """Send without waiting. Beyond p sends in flight, wait for the oldest and free it."""
        if tensor is None:
            raise ValueError("a part does not use its input, so there is no gradient to send")
        if (tensor.shape, tensor.dtype) != (shape, torch.float32):
            found = f"{list(tensor.shape)} in {tensor.dtype}"
            raise ValueError(f"a message is {list(shape)} in float32, not {found}")
        dst = destination % self.p
        work = isend(tensor, group=self.group_for(self.rank, dst), group_dst=dst)
        self.sends.append((work, tensor))
        if len(self.sends) > self.p:
            self.finish_oldest_send()

    def finish_oldest_send(self) -> None:
        send, tensor = self.sends.popleft()  # `tensor` must stay alive until it is sent
        send.wait()

    def open_channels(self) -> None:
        """Send one number between all neighbours, in an order common to all ranks: NCCL's first
        operation between two ranks connects them, and blocks until both have issued it."""
        # the last rank and the first one are neighbours with interleaving only
        forward = {((stage - 1) % self.p, stage % self.p) for stage in range(1, self.n_stages)}
        for src, dst in sorted(forward | {(dst, src) for src, dst in forward}):
            number, group = torch.zeros(1, device=self.device), self.group_for(src, dst)
            if self.rank == src:
                isend(number, group=group, group_dst=dst).wait()
            if self.rank == dst:
                irecv(number, group=group, group_src=src).wait()

    def group_for(self, src: int, dst: int) -> ProcessGroup:
        return self.to_higher if dst > src else self.to_lower


class InFlight(NamedTuple):
    """What a stage keeps of a micro-batch between its forward and its backward."""

    x: Tensor  # the input, a leaf of the graph: backward leaves its gradient in x.grad
    edge: GradientEdge  # where backward starts: a node of the graph, and which of its outputs
    grad: Tensor | None  # the gradient there; None: the next stage will send it


class PipelineStage:
    """A contiguous range of units, and its micro-batches in flight.

    part: maps tokens or activations to activations. output: in the last stage, maps activations and
    targets to their mean loss; else None. autocast: compute in bfloat16; `part` returns float32."""

    kinds = "FB"  # of the actions that a schedule must have for each micro-batch

    def __init__(self, part: nn.Module, output: nn.Module | None, autocast: bool):
        if any(p.dtype == torch.float16 for p in nn.ModuleList([part, output]).parameters()):
            # a gradient can overflow on one rank alone, whose GradScaler skips the step
            raise ValueError("float16 needs a GradScaler, which decides per rank: use bfloat16")
        self.part, self.output, self.autocast = part, output, autocast
        self.in_flight: dict[int, InFlight] = {}  # by micro-batch

    def forward(self, micro: int, x: Tensor, targets: Tensor, keys: Tensor | None, m: int):
        """x: activations, in the first stage tokens. Returns activations, in the last stage a loss.
        m: the number of micro-batches. Gradients are those of the mean of their losses."""
        trains = torch.is_grad_enabled()
        x = x.detach().requires_grad_(trains and x.is_floating_point())  # tokens have no gradient
        # no cache: inside an outer autocast, it would keep the cast weights until that one ends
        with torch.autocast(x.device.type, torch.bfloat16, self.autocast, cache_enabled=False):
            y = self.part(x, keys=keys)  # [micro-batch, seq, d_model]
            detached = y.detach().requires_grad_(trains)  # a leaf: the loss's backward ends here
            result = detached if self.output is None else self.output(detached, targets)
        if trains:
            if not y.requires_grad:
                raise ValueError("a first stage that is all frozen: run it before the pipeline")
            if self.output is not None:
                # now: the logits or the head's gradient are too large to keep for each micro-batch
                (result / m).backward()
            # the edge and not y: nothing needs y's values any more
            self.in_flight[micro] = InFlight(x, get_gradient_edge(y), detached.grad)
        return result.detach()

    def backward(self, micro: int, grad: Tensor | None) -> Tensor | None:
        """grad: of y; None in the last stage. Accumulates the weights' gradients, returns x's."""
        kept = self.in_flight.pop(micro)
        torch.autograd.backward([kept.edge], [kept.grad if grad is None else grad])
        return kept.x.grad


def units_of(stage: int, n_stages: int, n_layers: int) -> range:
    """The units of a stage: its share of the layers; in the first stage also the embedding, in the
    last one the output. Remaining layers go to the first stages, because the output is heavy."""
    each, rest = divmod(n_layers, n_stages)
    first = 1 + stage * each + min(stage, rest)  # unit 0 is `embed`, layer i is unit i + 1
    end = first + each + (stage < rest)
    return range(first if stage else 0, end if stage < n_stages - 1 else n_layers + 2)


def parts_of(model: Transformer, units: range) -> tuple[Transformer, nn.Module | None]:
    """The given units of a model: those before the output unit, and that unit or None."""
    part = Transformer(model.config, indices=())
    part.embed = model.embed if 0 in units else None
    for name, layer in model.layers.items():
        if int(name) + 1 in units:
            part.layers[name] = layer
    return part, model.output if model.config.n_units - 1 in units else None


def interleaved_1f1b(rank: int, p: int, m: int, v: int = 1) -> list[Action]:
    """1F1B in which a micro-batch passes every rank v times. The pipeline fills v times faster,
    with messages over v p - 1 boundaries. Micro-batches go round in groups of p: p divides m."""
    if v == 1:
        return one_f_one_b(rank, p, m)
    if m % p:
        raise ValueError(f"interleaving needs a multiple of {p} micro-batches, not {m}")
    rounds = [  # chunk: which of this rank's v stages
        (micro, chunk)
        for start in range(0, m, p)
        for chunk in range(v)
        for micro in range(start, start + p)
    ]
    forwards = [Action("F", micro, chunk * p + rank) for micro, chunk in rounds]
    backwards = [Action("B", micro, (v - 1 - chunk) * p + rank) for micro, chunk in rounds]
    # the factor 2 gives messages time to arrive: with 1, each is needed the moment it is sent
    warm_up = min(v * m, (v - 1) * p + 2 * (p - rank - 1))
    return alternate(forwards, backwards, warm_up)


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
