"""Stage 07: data, tensor and pipeline parallelism at once, on a mesh of ranks (3D).

A rank has a place on each of three axes. Along `pp` the layers are spread, along `tp` the matrices
of each layer are cut, along `dp` the batch is shared out. Who differs in one place only forms the
group in which that axis talks:

    rank = (pp_rank * dp + dp_rank) * tp + tp_rank

`tp` is innermost, so that its ranks are neighbours: it talks several times a layer and waits for
every answer. `pp` is outermost: it talks least.

New since stage 06: the classes of 02 and 05, as they are there, beside those of 06; the mesh; a
pipeline whose stages are cut and reduce their gradients over dp as it drains; and a norm that
counts every parameter once. The micro-batches of the pipeline are the accumulation.

    memory      16 P / (pp tp) bytes a rank (norms are whole in tp); activations: as in 06, of
                1 / dp of the batch, cut as in 05
    traffic     the sum of its parts: over dp one all-reduce of the rank's own parameters a step,
                over tp what 05 sends for the rank's own units, over pp what 06 sends, of
                1 / dp of the batch. With --sequence-parallel the ranks of a tp group pass on a
                slice of the sequence each

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", 2021; and the papers of 02, 05 and 06.

Run it:

    torchrun --nproc-per-node 8 07_3d/train.py --data sample --pp 2 --tp 2 --steps 100
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.nn.utils import clip_grads_with_norm_
from torch.profiler import record_function

from common.arguments import (
    base_parser,
    check_degree,
    check_pipeline,
    model_config,
    positive_int,
    seconds,
)
from common.checkpoint import load_checkpoint, save_checkpoint, training_state
from common.collectives import (
    all_gather_single,
    all_reduce,
    all_reduce_control,
    broadcast,
    irecv,
    isend,
    reduce_scatter_single,
)
from common.data import eval_batches, load_corpus, train_batches
from common.distributed import cleanup, group_along, refuse, setup, world_size
from common.model import (
    IGNORED,
    Linear,
    Output,
    Transformer,
    in_autocast_dtype,
    initial_value,
    linear,
)
from common.optimization import adamw_settings, global_norm, learning_rate, set_learning_rate
from common.random import CounterDropout
from common.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: three axes, one mesh
# ------------------------------------------------------------------------------------------------


# ---- data parallelism: the classes of 02 ----


class DistributedDataParallel(nn.Module):
    """Keep the replicas of a module identical: same initial weights, same averaged gradients.

    module: has the same parameters in the same order on every rank. process_group: the ranks
    whose gradients are averaged; None for all. bucket_cap_mb: the most MB of gradients in one
    all-reduce; the first bucket holds at most 1 MB, so that communication starts early.

    Call `finish_gradient_synchronization` after the last backward of a step.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
    ):
        super().__init__()
        self.module = module
        self.n_ranks = dist.get_world_size(process_group)
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.detach(), group=process_group, group_src=0)
        # `parameters()` yields a tied parameter once; a frozen one has no gradient to reduce
        params = [p for p in module.parameters() if p.requires_grad]
        # in reverse order: backward finishes the last layer first
        split = split_into_buckets(params[::-1], bucket_cap_mb)
        self.buckets = [Bucket(part, process_group) for part in split]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.launched = 0  # how many buckets' reductions have started
        self.synchronizes = True
        for param in params:
            param.register_post_accumulate_grad_hook(self.mark_ready)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients: for the backward of every micro-batch but the last."""
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def mark_ready(self, param: nn.Parameter) -> None:
        """Note that the gradient of `param` is final. Autograd calls this during backward."""
        bucket = self.bucket_of[param]
        if param not in bucket.waiting_for:
            raise RuntimeError("all micro-batches but the last of a step belong in no_sync()")
        bucket.collect(param, divide_by=self.n_ranks if self.synchronizes else 1)
        if self.synchronizes:
            bucket.waiting_for.remove(param)
            self.launch_ready_buckets()

    def launch_ready_buckets(self, backward_has_ended: bool = False) -> None:
        """Reduce every bucket whose gradients are ready, while backward computes the others.

        Buckets are launched strictly in order. Ranks may finish gradients in different orders,
        but must issue their collectives in the same one.
        """
        while self.launched < len(self.buckets):
            bucket = self.buckets[self.launched]
            if bucket.waiting_for and not backward_has_ended:
                return
            bucket.start_reduction()
            self.launched += 1

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the average over the ranks. Call it once per step."""
        self.launch_ready_buckets(backward_has_ended=True)
        for bucket in self.buckets:
            bucket.finish_reduction()
        self.launched = 0


class Bucket:
    """Parameters whose gradients lie side by side in one flat buffer: one all-reduce sends all.

    grads: [numel of all parameters]; grad_views: each parameter's gradient, a view into `grads`.
    waiting_for: the parameters whose gradients this backward has not finished yet.
    """

    def __init__(self, params: list[nn.Parameter], group: ProcessGroup | None):
        self.params, self.group = params, group
        self.n_ranks = dist.get_world_size(group)
        self.grads = params[0].new_zeros(sum(p.numel() for p in params))
        self.grad_views = self.views_into(self.grads)
        self.waiting_for = set(params)
        self.reduction: Work | None = None  # the collective in flight

    def views_into(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        sizes = [p.numel() for p in self.params]
        chunks = flat[: sum(sizes)].split(sizes)
        return {p: chunk.view(p.shape) for p, chunk in zip(self.params, chunks, strict=True)}

    def collect(self, param: nn.Parameter, divide_by: int = 1) -> None:
        """Move the gradient of `param` into the buffer. A missing gradient counts as zero.

        After `zero_grad(set_to_none=True)` backward allocates a new gradient outside the buffer;
        the next micro-batches then add to the view in place. Dividing by the number of ranks
        here, before the sum, makes the sum the average and costs no extra pass over the memory.
        """
        view = self.grad_views[param]
        if param.grad is None:
            view.zero_()
        elif param.grad is not view or divide_by > 1:
            torch.div(param.grad, divide_by, out=view)  # copies and divides in one pass
        param.grad = view

    def start_reduction(self) -> None:
        for param in self.waiting_for:  # unused in this backward, or on this rank
            self.collect(param, divide_by=self.n_ranks)
        self.waiting_for = set()
        self.reduction = all_reduce(self.grads, group=self.group, async_op=True)

    def finish_reduction(self) -> None:
        self.reduction.wait()
        self.reduction, self.waiting_for = None, set(self.params)


def split_into_buckets(
    params: list[nn.Parameter], cap_mb: float, first_cap_mb: float = 1
) -> list[list[nn.Parameter]]:
    """Split parameters, in order, into lists of one dtype and device and at most `cap_mb` MB.

    The first list is limited to `first_cap_mb`. A parameter above the cap gets its own list.
    """
    lists: list[list[nn.Parameter]] = []
    size = 0.0  # MB in the last list
    for param in params:
        mb = param.numel() * param.element_size() / 2**20
        cap = min(first_cap_mb, cap_mb) if len(lists) == 1 else cap_mb
        alike = lists and (param.dtype, param.device) == (lists[-1][0].dtype, lists[-1][0].device)
        if not alike or size + mb > cap:
            lists.append([])
            size = 0.0
        lists[-1].append(param)
        size += mb
    return lists


# ---- tensor parallelism: the definitions of 05 ----
#
#   x [batch, seq, d] --f--> x W1^T [batch, seq, 4d/tp] --gelu--> h W2^T [batch, seq, d] --g--> y
#                            W1: this rank's rows of [4d, d]      W2: its columns of [d, 4d]
#
#                                  forward      backward
#   f, where a pair begins         identity     all-reduce
#   g, where it ends               all-reduce   identity
#
# (PyTorch stores W as [out, in] and computes x W^T: Megatron's "columns" are rows of W.)


def tensor_parallel(
    model: Transformer, group: ProcessGroup, sequence_parallel: bool = False
) -> Transformer:
    """Replace the model's matrices, in place, with this rank's shards of them.

    The model may be on the meta device: then the shards are as well, and `init_shards` fills
    them. With sequence_parallel it only takes sequences of the configuration's length.
    """
    check_degree(model.config, dist.get_world_size(group), sequence_parallel)
    region = SequenceParallelRegion(group) if sequence_parallel else TensorParallelRegion(group)
    if model.embed is not None:
        model.embed.tokens = VocabParallelEmbedding(model.embed.tokens, region)
    for layer in model.layers.values():
        layer.attn.wqkv = ColumnParallelLinear(layer.attn.wqkv, region)  # n_heads / tp heads
        layer.attn.wo = RowParallelLinear(layer.attn.wo, region)
        layer.mlp.w1 = ColumnParallelLinear(layer.mlp.w1, region)
        layer.mlp.w2 = RowParallelLinear(layer.mlp.w2, region)
    if model.output is not None:
        model.output = VocabParallelOutput(model.output, region)
    if sequence_parallel:
        shift_dropout(model, region)
    return model


class TensorParallelModule(nn.Module):
    """Holds this rank's shards of the parameters of `plain`. shard_dims: along which dimension."""

    shard_dims: dict[str, int | None] = {}

    def __init__(self, plain: nn.Module, region: TensorParallelRegion):
        super().__init__()
        self.region = region
        for name, full in plain.named_parameters(recurse=False):
            local_shard = shard_of(full, self.shard_dims[name], region.group)
            self.register_parameter(name, nn.Parameter(local_shard))


class ColumnParallelLinear(TensorParallelModule):
    """y = x W^T, of which each rank computes some features. x [batch, seq, in], full."""

    shard_dims = {"weight": 0}  # [out / tp, in]

    def forward(self, x: Tensor) -> Tensor:  # -> [batch, seq, out / tp]
        return LinearWithAsyncCommunication.apply(in_autocast_dtype(x), self.weight, self.region)


class RowParallelLinear(TensorParallelModule):
    """y = x W^T, where each rank has some features of x: [batch, seq, in / tp]."""

    shard_dims = {"weight": 1}  # [out, in / tp]

    def forward(self, x: Tensor) -> Tensor:  # -> [batch, seq, out], full
        return ReduceFromRegion.apply(linear(x, self.weight), self.region)


class LinearWithAsyncCommunication(torch.autograd.Function):
    """f, then y = x W^T. One function, so that backward overlaps the all-reduce of dX with dW."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, region: TensorParallelRegion) -> Tensor:
        x = region.enter(x)
        ctx.save_for_backward(x, weight)
        ctx.region = region
        return F.linear(x, weight.to(x.dtype))  # [batch, seq, out / tp]

    @staticmethod
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
        ctx.region = region
        total, work = region.start_exit(partial)
        work.wait()
        if total is partial:  # reduced in place: the op that computed it does not save its output
            ctx.mark_dirty(partial)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.region.enter(grad), None


class TensorParallelRegion:
    """Between f and g, ranks compute different features; outside, all hold the full activations.

    f enters the region and g exits it; in backward the gradients pass the other way, so f's
    backward is an exit and g's backward an enter.
    """

    def __init__(self, group: ProcessGroup | None):
        self.group, self.tp = group, dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def enter(self, x: Tensor) -> Tensor:
        """The full activations, [batch, seq, d], on every rank: they are already."""
        return x

    def start_exit(self, partial: Tensor) -> tuple[Tensor, Work]:
        """Start to sum the ranks' `partial` [batch, seq, d], in place."""
        return partial, all_reduce(partial, group=self.group, async_op=True)


# ---- the vocabulary: embedding, head and loss ----


class VocabParallelEmbedding(TensorParallelModule):
    """Looks up the tokens whose rows this rank owns. The others are zeros until the all-reduce."""

    shard_dims = {"weight": 0}  # [vocab / tp, d]

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, seq] -> [batch, seq, d]
        row = tokens - self.region.rank * len(self.weight)
        remote = (row < 0) | (row >= len(self.weight))
        partial = F.embedding(row.masked_fill(remote, 0), self.weight)
        return ReduceFromRegion.apply(partial.masked_fill(remote[..., None], 0.0), self.region)


class VocabParallelOutput(nn.Module):
    """The last unit: norm, head and loss. No rank ever holds all logits of a token."""

    def __init__(self, output: Output, region: TensorParallelRegion):
        super().__init__()
        self.group = region.group
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

    logits: [tokens, vocab / tp], this rank's columns. Float32 logits are overwritten: their
    memory becomes the gradient's. targets: [tokens], over the full vocabulary; IGNORED targets
    do not count. Without any target the loss is 0.
    """
    return VocabParallelCrossEntropy.apply(logits, targets, group)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits whose columns are sharded.

    loss = log(sum exp(logit - highest)) - (target's logit - highest): the ranks exchange one
    maximum and two sums per token.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
        # logits: [tokens, vocab / tp], targets: [tokens]
        ctx.dtype, logits = logits.dtype, logits.float()
        counted = targets != IGNORED
        scale = counted / counted.sum().clamp(min=1)  # [tokens], of each token in the mean
        column = targets - dist.get_rank(group) * logits.shape[-1]
        is_local = (column >= 0) & (column < logits.shape[-1])  # IGNORED is local nowhere
        column = column.masked_fill(~is_local, 0)[:, None]

        highest = logits.amax(dim=-1)
        all_reduce(highest, ReduceOp.MAX, group=group)
        logits.sub_(highest[:, None])
        target_logit = logits.gather(-1, column)[:, 0].masked_fill(~is_local, 0.0)
        all_reduce(target_logit, group=group)
        total = logits.exp_().sum(dim=-1)
        all_reduce(total, group=group)

        ctx.save_for_backward(logits, column, scale / total, scale * is_local)
        losses = (total.log() - target_logit).masked_fill(~counted, 0.0)  # -inf * 0 is NaN
        return (losses * scale).sum()

    @staticmethod
    def backward(ctx, grad: Tensor):
        exp, column, softmax_scale, target_scale = ctx.saved_tensors
        # scale * (softmax - 1 at the target), in place: autograd raises on a second backward
        grad_logits = exp.mul_((softmax_scale * grad)[:, None])
        grad_logits.scatter_add_(-1, column, (-target_scale * grad)[:, None])
        return grad_logits.to(ctx.dtype), None, None


# ---- shards of the weights, and the norm of all ----


def shard_of(full: Tensor, dim: int | None, group: ProcessGroup | None) -> Tensor:
    """A copy of this rank's shard along `dim`, so that `full` can be freed. None: of all of it."""
    if dim is None:
        return full.detach().clone()
    tp, rank = dist.get_world_size(group), dist.get_rank(group)
    if full.shape[dim] % tp:
        raise ValueError(f"dimension {dim} of {tuple(full.shape)} does not divide by {tp} ranks")
    return full.detach().chunk(tp, dim)[rank].clone()


def shard_dims_of(model: nn.Module) -> dict[str, int]:
    """Along which dimension each sharded parameter is split, by name; without the replicated."""
    return {
        f"{prefix}.{name}": dim
        for prefix, module in model.named_modules()
        if isinstance(module, TensorParallelModule)
        for name, dim in module.shard_dims.items()
        if dim is not None
    }


@torch.no_grad()
def init_shards(
    model: nn.Module, seed: int, group: ProcessGroup | None, device: torch.device
) -> None:
    """Give a model on the meta device this rank's shards of the plain model's initial weights.

    One parameter at a time is drawn in full: the full model exists nowhere.
    """
    model.to_empty(device=device)
    dims = shard_dims_of(model)
    for name, parameter in model.named_parameters():
        shape, dim = list(parameter.shape), dims.get(name)
        if dim is not None:
            shape[dim] *= dist.get_world_size(group)
        parameter.copy_(shard_of(initial_value(name, shape, seed), dim, group))


# ---- sequence parallelism: outside of the regions, activations are sharded by the sequence ----
#
#                                  forward          backward
#   f, where a pair begins         all-gather       reduce-scatter
#   g, where it ends               reduce-scatter   all-gather


class SequenceParallelRegion(TensorParallelRegion):
    """Outside of it a rank holds only its part of every sequence: [batch, seq / tp, d].

    An all-reduce is a reduce-scatter and an all-gather. g does the first and the next f the
    second; norms, dropout and residual additions between them work on seq / tp positions.
    """

    def enter(self, x: Tensor) -> Tensor:
        """All-gather along the sequence: [batch, seq / tp, d] -> [batch, seq, d]."""
        by_rank = x.new_empty(self.tp * x.shape[0], *x.shape[1:])
        all_gather_single(by_rank, x.contiguous(), group=self.group)
        return by_rank.unflatten(0, (self.tp, -1)).transpose(0, 1).flatten(1, 2)

    def start_exit(self, partial: Tensor) -> tuple[Tensor, Work]:
        """Start to reduce-scatter along the sequence: [batch, seq, d] -> [batch, seq / tp, d]."""
        by_rank = partial.unflatten(1, (self.tp, -1)).transpose(0, 1).flatten(0, 1)
        total = torch.empty_like(by_rank[: len(partial)])  # of [tp * batch, seq / tp, d]
        return total, reduce_scatter_single(total, by_rank, group=self.group, async_op=True)


def shift_dropout(model: Transformer, region: SequenceParallelRegion) -> None:
    """Tell each dropout where this rank's part begins: masks depend on the position."""
    for module in model.modules():
        if isinstance(module, CounterDropout):
            module.first_position = region.rank * model.config.seq_len // region.tp


@torch.no_grad()
def all_reduce_replicated_gradients(model: nn.Module, group: ProcessGroup) -> None:
    """Sum the norms' gradients, once per step: each rank's are of its part of the sequence."""
    dims = shard_dims_of(model)
    grads = [p.grad for name, p in model.named_parameters() if name not in dims]
    flat = torch.cat([grad.flatten() for grad in grads])
    all_reduce(flat, group=group)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


# ---- the pipeline: those of 06 ----


class Action(NamedTuple):
    """What a rank does at a time: `F` a forward, `B` a backward, or backward in two parts, `I`
    for the gradient of the input and `W` for those of the weights."""

    kind: str
    micro: int  # micro-batch
    chunk: int = 0  # the rank's virtual stage: stage = chunk * p + rank


# ---- schedules: p ranks, m micro-batches, v virtual stages a rank -> one rank's actions ----


def forwards(p: int, m: int, v: int) -> list[Action]:
    """All forwards of a rank: p micro-batches through its first chunk, then the next, and so on."""
    return [
        Action("F", micro, chunk)
        for start in range(0, m, p)
        for chunk in range(v)
        for micro in range(start, min(start + p, m))
    ]


def backwards(p: int, m: int, v: int) -> list[Action]:
    """All backwards in the same order of micro-batches, through the chunks from the last one."""
    return [Action("B", micro, v - 1 - chunk) for _, micro, chunk in forwards(p, m, v)]


def warm_up_then_alternate(p: int, m: int, v: int, warm_up: int) -> list[Action]:
    """Some forwards; then by turns one forward, one backward (steady state); then cool-down."""
    fs, bs = forwards(p, m, v), backwards(p, m, v)
    steady = zip(fs[warm_up:], bs, strict=False)  # ends with the forwards
    return fs[:warm_up] + [action for pair in steady for action in pair] + bs[len(fs) - warm_up :]


def gpipe(p: int, m: int, v: int, rank: int) -> list[Action]:
    """All forwards, then all backwards: m micro-batches in flight. Huang et al., 2019."""
    return forwards(p, m, v) + backwards(p, m, v)


def one_f_one_b(p: int, m: int, v: int, rank: int) -> list[Action]:
    """As many forwards as it takes until the first gradient is back: p - rank in flight."""
    return warm_up_then_alternate(p, m, v, min(m, p - rank - 1))


def interleaved_1f1b(p: int, m: int, v: int, rank: int) -> list[Action]:
    """1F1B where a rank has v short stages instead of a long one: the pipeline fills v times
    faster, for v times the traffic. Micro-batches come by p, so m is a multiple of p."""
    if v == 1:
        return one_f_one_b(p, m, v, rank)
    return warm_up_then_alternate(p, m, v, min(v * m, (v - 1) * p + 2 * (p - rank - 1)))


def zero_bubble(p: int, m: int, v: int, rank: int) -> list[Action]:
    """1F1B whose weight gradients, for which nobody waits, fill the time that it idles.

    A micro-batch is in flight until its W is done: it makes room for the forward of the p-th
    after it just before that. Behind the last forward a W follows each I, while the next gradient
    is on its way.
    """
    kinds: list[str] = []
    for kind, micro, _ in one_f_one_b(p, m, v, rank):
        if kind == "F":
            kinds += ["W", "F"] if micro >= p else ["F"]
        else:
            kinds += ["I", "W"] if micro >= m - (p - rank) else ["I"]
    kinds += ["W"] * (m - kinds.count("W"))
    number = {kind: count() for kind in "FIW"}  # each kind in the order of the micro-batches
    return [Action(kind, next(number[kind])) for kind in kinds]


def forward_only(p: int, m: int, v: int, rank: int) -> list[Action]:
    """For evaluation."""
    return forwards(p, m, v)


SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved_1f1b,
    "zero-bubble": zero_bubble,
}
Schedule = Callable[[int, int, int, int], list[Action]]


# ---- what the actions make the ranks send ----


class Message(NamedTuple):
    """What an action waits for: `F` vectors, `B` their gradients, [micro batch, seq, d_model]."""

    kind: str
    micro: int
    stage: int  # that takes it

    def sender(self, p: int) -> int:
        return (self.stage + (-1 if self.kind == "F" else 1)) % p


def messages(action: Action, p: int, v: int, rank: int) -> tuple[Message | None, Message | None]:
    """What a rank's action starts from and what it ends with, where that is a message.

    The first stage starts from tokens, and nobody wants its gradient; the last ends with a loss.
    """
    if action.kind == "W":
        return None, None
    stage, last = action.chunk * p + rank, p * v - 1
    before = Message("F", action.micro, stage) if stage > 0 else None
    after = Message("B", action.micro, stage) if stage < last else None
    if action.kind == "F":
        return before, after and Message("F", action.micro, stage + 1)
    return after, before and Message("B", action.micro, stage - 1)


@lru_cache
def plan(
    schedule: Schedule, p: int, m: int, v: int, rank: int, ahead: int = 2
) -> list[tuple[list[Message], Action]]:
    """A rank's actions, each with the messages for which to post a receive before it starts.

    Posted `ahead` actions before they are needed, so that data flows while the rank computes. A
    transport may match by order alone (NCCL ignores tags): under every schedule here a rank makes
    its messages to another in the order in which that one needs them.
    """
    actions = schedule(p, m, v, rank)
    needed = [messages(action, p, v, rank)[0] for action in actions]
    steps = []
    for i, action in enumerate(actions):
        posts = needed[i + ahead if i else 0 : i + ahead + 1]
        steps.append(([message for message in posts if message], action))
    return steps


# ---- backward in two parts ----


class SplitLinear(torch.autograd.Function):
    """y = x W^T, whose backward makes the gradient of x and notes what that of W is made of.

    W comes as an attribute: were it an input, autograd would run its hooks with no gradient there.
    """

    @staticmethod
    def forward(ctx, x: Tensor, linear: Linear, queue: list) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.queue = linear.weight, queue
        return F.linear(x, linear.weight.to(x.dtype))

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x,) = ctx.saved_tensors
        ctx.queue.append((ctx.weight, x.flatten(0, -2), grad.flatten(0, -2)))
        # cast again: no bf16 copy of W is kept
        return grad @ ctx.weight.to(grad.dtype), None, None


def split_backward(module: nn.Module, queue: list[tuple[nn.Parameter, Tensor, Tensor]]) -> None:
    """From now on backward through the linear maps of `module` makes no gradient of a weight: it
    appends weight, input [tokens, in] and gradient of the output [tokens, out] to `queue`."""
    for child in module.modules():
        if isinstance(child, Linear):
            child.forward = lambda x, child=child: SplitLinear.apply(
                in_autocast_dtype(x), child, queue
            )


# ---- a stage, and the pipeline ----


def units_of(stage: int, n_stages: int, n_layers: int) -> range:
    """The units of a stage: layers as evenly as they go. The embedding is with the first, the
    output with the last; that is the heavy end, so layers left over go to the first stages."""
    each, rest = divmod(n_layers, n_stages)
    first = 1 + stage * each + min(stage, rest)  # unit 0 is `embed`, layer i is unit i + 1
    end = first + each + (stage < rest)
    return range(first if stage else 0, end if stage < n_stages - 1 else n_layers + 2)


class PipelineStage:
    """A run of the units of `model`, and the micro-batches that are in flight in it.

    model: built with this rank's units alone, which may be several runs (virtual stages).
    autocast: compute in bfloat16; what goes from stage to stage is float32 all the same.
    """

    def __init__(self, model: Transformer, units: range, split: bool, autocast: bool):
        self.part = Transformer(model.config, units=())  # embedding and layers
        self.part.embed = model.embed if 0 in units else None
        for name, layer in model.layers.items():
            if int(name) + 1 in units:
                self.part.layers[name] = layer
        self.output = model.output if model.config.n_units - 1 in units else None
        self.autocast = autocast
        # input, place of the output in the graph, gradient of the output if that is a loss
        self.in_flight: dict[int, tuple[Tensor, GradientEdge, Tensor | None]] = {}
        self.queue: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        self.put_off: dict[int, list[tuple[nn.Parameter, Tensor, Tensor]]] = {}
        self.gradient_ready: Callable[[nn.Parameter], None] = lambda weight: None
        if split:
            # the layers' products alone: embedding and norms have none that costs, and the
            # head's gradient is made with the loss
            split_backward(self.part, self.queue)

    def forward(self, micro: int, x: Tensor, targets: Tensor, keys: Tensor | None, m: int):
        """x: vectors, or the first stage's tokens. Returns vectors, or the last stage's loss.

        m: number of micro-batches; the gradients are those of their mean loss.
        """
        if x.is_floating_point():
            x.requires_grad_(torch.is_grad_enabled())
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocast):
            y = self.part(x, keys=keys)  # [micro batch, seq, d_model]
        result, grad = y.detach(), None
        if self.output is not None:
            result, grad = self.loss(result, targets, m)
        if torch.is_grad_enabled():
            self.in_flight[micro] = x, get_gradient_edge(y), grad
        return result

    def loss(self, x: Tensor, targets: Tensor, m: int) -> tuple[Tensor, Tensor | None]:
        """The loss, and at once the gradient of x. The function has made the head's in forward,
        and one as large as the head for each micro-batch in flight would be too much to keep."""
        x.requires_grad_(torch.is_grad_enabled())
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocast):
            loss = self.output(x, targets)
        if torch.is_grad_enabled():
            (loss / m).backward()
        return loss.detach(), x.grad

    def backward(self, micro: int, grad: Tensor | None) -> Tensor | None:
        """grad: of what `forward` returned, None in the last stage. Returns that of its input;
        those of the weights are added up, or put off if backward is split."""
        x, edge, grad_of_loss = self.in_flight.pop(micro)
        torch.autograd.backward([edge], [grad_of_loss if grad is None else grad])
        if self.queue:
            self.put_off[micro], self.queue[:] = self.queue[:], []
        return x.grad

    @torch.no_grad()
    def weight_gradients(self, micro: int) -> None:
        """The products that were put off. Autograd runs no hook of these weights: whoever listens
        to gradients, as data parallelism does, is told by `gradient_ready`."""
        for weight, x, grad in self.put_off.pop(micro):
            product = (grad.t() @ x).to(weight.dtype)
            weight.grad = product if weight.grad is None else weight.grad.add_(product)
            self.gradient_ready(weight)


class Pipeline:
    """Runs a schedule over the stages of all ranks: what to send and receive follows from it.

    runs: the units of each stage of this rank. groups: the same ranks twice, first for what goes
    to a lower rank, then for what goes to a higher one. So between two ranks a group carries one
    direction, and where it does one thing at a time, as NCCL does, no send is stuck behind a
    receive that waits for this very rank.
    """

    def __init__(
        self,
        model: Transformer,
        runs: list[range],
        schedule: Schedule,
        groups: list[ProcessGroup],
        autocast: bool = False,
    ):
        self.schedule, self.groups = schedule, groups
        self.p, self.v, self.rank = groups[0].size(), len(runs), groups[0].rank()
        split = schedule is zero_bubble
        self.stages = [PipelineStage(model, units, split, autocast) for units in runs]
        self.device, self.d_model = next(model.parameters()).device, model.config.d_model
        self.receives: dict[Message, tuple[Work, Tensor]] = {}  # under way
        self.sends: deque[tuple[Work, Tensor]] = deque()  # under way, the oldest first
        self.open_channels()

    def open_channels(self) -> None:
        """Send a number through each channel, in an order common to all ranks. NCCL connects two
        ranks in their first call and waits there for the other, which no schedule allows for."""
        for src in range(self.p):
            for dst in sorted({(src - 1) % self.p, (src + 1) % self.p} - {src}):
                group, number = self.groups[dst > src], torch.zeros(1, device=self.device)
                if self.rank == src:
                    isend(number, group=group, group_dst=dst).wait()
                if self.rank == dst:
                    irecv(number, group=group, group_src=src).wait()

    def run(self, micro_batches: list[tuple[Tensor, Tensor, Tensor | None]]) -> Tensor:
        """Forward and backward of all micro-batches (tokens, targets, dropout keys), as scheduled;
        under `no_grad` forward alone. Returns their losses: [m] on the last rank, zeros elsewhere.
        """
        schedule = self.schedule if torch.is_grad_enabled() else forward_only
        m, shape = len(micro_batches), self.shape_sent(micro_batches[0][0])
        losses = torch.zeros(m, device=self.device)
        for posts, action in plan(schedule, self.p, m, self.v, self.rank):
            needed, made = messages(action, self.p, self.v, self.rank)
            for message in posts:
                self.post(message, torch.empty(shape, device=self.device))
            received = self.receive(needed) if needed else None
            with record_function(f"{action.kind} {action.micro} {action.chunk}"):  # --profile
                result = self.do(action, received, micro_batches, losses)
            if made:
                self.send(made, result)
        while self.sends:
            self.sends.popleft()[0].wait()
        return losses

    def shape_sent(self, tokens: Tensor) -> tuple[int, ...]:
        """Of what goes from stage to stage: [micro batch, seq, d_model]."""
        return *tokens.shape, self.d_model

    def do(self, action: Action, received: Tensor | None, micro_batches, losses) -> Tensor | None:
        """One action on what was received for it; returns what is to be sent, if anything is."""
        stage = self.stages[action.chunk]
        if action.kind == "W":
            return stage.weight_gradients(action.micro)
        if action.kind in "BI":  # alike: in a split stage it is but the input's part
            return stage.backward(action.micro, received)
        inputs, targets, keys = micro_batches[action.micro]
        x = inputs if received is None else received
        result = stage.forward(action.micro, x, targets, keys, len(micro_batches))
        if stage.output is not None:
            losses[action.micro] = result
        return result

    def post(self, message: Message, buffer: Tensor) -> None:
        """Begin to receive."""
        src = message.sender(self.p)
        work = irecv(buffer, group=self.groups[self.rank > src], group_src=src)
        self.receives[message] = work, buffer

    def receive(self, message: Message) -> Tensor:
        work, buffer = self.receives.pop(message)
        work.wait()
        return buffer

    def send(self, message: Message, tensor: Tensor) -> None:
        """Begin to send. No more than p sends are under way: what has arrived is to be freed."""
        dst = message.stage % self.p
        work = isend(tensor, group=self.groups[dst > self.rank], group_dst=dst)
        self.sends.append((work, tensor))
        if len(self.sends) > self.p:
            self.sends.popleft()[0].wait()


# ---- the three together ----


class SplitFThenLinear(torch.autograd.Function):
    """`LinearWithAsyncCommunication` with the backward of `SplitLinear`."""

    @staticmethod
    def forward(ctx, x: Tensor, linear: ColumnParallelLinear, queue: list) -> Tensor:
        x = linear.region.enter(x)
        ctx.save_for_backward(x)
        ctx.linear, ctx.queue = linear, queue
        return F.linear(x, linear.weight.to(x.dtype))  # [batch, seq, out / tp]

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x,) = ctx.saved_tensors
        ctx.queue.append((ctx.linear.weight, x.flatten(0, -2), grad.flatten(0, -2)))
        grad_x, work = ctx.linear.region.start_exit(grad @ ctx.linear.weight.to(grad.dtype))
        work.wait()
        return grad_x, None, None


def split_parallel_backward(module: nn.Module, queue: list) -> None:
    """What `split_backward` does to plain linear maps, for those that are cut."""
    for child in module.modules():
        if isinstance(child, ColumnParallelLinear):
            child.forward = lambda x, child=child: SplitFThenLinear.apply(
                in_autocast_dtype(x), child, queue
            )
        elif isinstance(child, RowParallelLinear):
            child.forward = lambda x, child=child: ReduceFromRegion.apply(
                SplitLinear.apply(in_autocast_dtype(x), child, queue), child.region
            )


class MeshPipeline(Pipeline):
    """A pipeline on a mesh: its stages may be cut over `tp`, and average gradients over `dp`.

    Each stage is a `DistributedDataParallel` of its own, whose last micro-batch alone
    synchronises: as soon as a stage is through with its gradients they are on their way, while
    the pipeline drains.
    """

    def __init__(
        self,
        model: Transformer,
        runs: list[range],
        schedule: Schedule,
        groups: list[ProcessGroup],
        dp: ProcessGroup,
        slices_of_sequence: int = 1,
        autocast: bool = False,
    ):
        super().__init__(model, runs, schedule, groups, autocast)
        self.slices_of_sequence = slices_of_sequence
        self.replicas: list[DistributedDataParallel] = []  # a stage each; none without dp
        for stage in self.stages:
            if schedule is zero_bubble:
                split_parallel_backward(stage.part, stage.queue)
            if dp.size() > 1:
                units = [unit for unit in (stage.part, stage.output) if unit is not None]
                replica = DistributedDataParallel(nn.ModuleList(units), dp)
                stage.gradient_ready = replica.mark_ready
                self.replicas.append(replica)

    def shape_sent(self, tokens: Tensor) -> tuple[int, ...]:
        batch, seq = tokens.shape
        return batch, seq // self.slices_of_sequence, self.d_model

    def do(self, action: Action, received: Tensor | None, micro_batches, losses) -> Tensor | None:
        is_last = action.micro == len(micro_batches) - 1
        quiet = bool(self.replicas) and not is_last
        with self.replicas[action.chunk].no_sync() if quiet else nullcontext():
            return super().do(action, received, micro_batches, losses)

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the average over `dp`. Once a step."""
        for replica in self.replicas:
            replica.finish_gradient_synchronization()


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, tp: ProcessGroup, pp: ProcessGroup
) -> Tensor:
    """Scale the gradients to at most this global norm; returns the norm before.

    Every parameter counts once: slices add up over `tp`, where replicated gradients are alike,
    and stages over `pp`. Over `dp` all gradients are alike.
    """
    cut = shard_dims_of(model)
    sliced = [p.grad for name, p in model.named_parameters() if name in cut]
    whole = [p.grad for name, p in model.named_parameters() if name not in cut]
    squares = global_norm(whole).square()
    if sliced:
        squares += all_reduce_control(global_norm(sliced).square(), group=tp)
    total_norm = all_reduce_control(squares, group=pp).sqrt()
    clip_grads_with_norm_(model.parameters(), max_norm, total_norm)
    return total_norm


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--pp", type=positive_int, default=1, help="pipeline-parallel degree")
    parser.add_argument("--tp", type=positive_int, default=1, help="tensor-parallel degree")
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="shard the sequence as well"
    )
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="order of the work")
    parser.add_argument(
        "--virtual-stages", type=positive_int, help="a rank's (default: interleaved 2, or 1)"
    )
    parser.add_argument("--timeout", type=seconds, default=600, help="seconds until a hang ends")
    args = parser.parse_args(argv)
    args.dp, rest = divmod(world_size(), args.pp * args.tp)
    if rest:
        refuse(
            f"--pp {args.pp} times --tp {args.tp} does not divide the {world_size()} ranks "
            "(--nproc-per-node); data parallelism takes what is left over"
        )
    return check_pipeline(args, args.pp, "--pp", data_parallel_size=args.dp)


@torch.no_grad()
def evaluate(model, pipeline, tokens, args, device, dp: ProcessGroup) -> float:
    """Mean loss in nats over every token of a split but the first, each predicted once."""
    model.eval()
    share = eval_batches(tokens, args, device, dp.rank(), dp.size())
    batches = [(inputs, targets, None) for inputs, targets in share]
    counts = torch.stack([(targets != IGNORED).sum() for _, targets, _ in batches])
    # every rank adds its counts, but of pp ranks one alone has losses
    losses = pipeline.run(batches).double() * args.pp
    total = all_reduce_control(torch.stack([(losses * counts).sum(), counts.sum()]))
    model.train()
    return (total[0] / total[1]).item()


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the flags say; returns the lines of metrics.jsonl."""
    args = parse_args(argv)
    world = setup(args.timeout)
    device = world.device
    corpus = load_corpus(args.data)

    mesh = (args.pp, args.dp, args.tp)
    axes = {"to_lower": 0, "to_higher": 0, "dp": 1, "tp": 2}
    groups = {name: group_along(mesh, axis, name, args.timeout) for name, axis in axes.items()}
    pp, dp, tp = groups["to_lower"], groups["dp"], groups["tp"]
    config = model_config(args, corpus.vocab)
    n_stages = args.pp * args.virtual_stages
    mine = range(pp.rank(), n_stages, args.pp)  # my stages
    runs = [units_of(stage, n_stages, config.n_layers) for stage in mine]
    with torch.device("meta"):
        model = Transformer(config, units=[unit for run in runs for unit in run])
    if args.tp > 1:
        tensor_parallel(model, tp, args.sequence_parallel)
    init_shards(model, args.seed, tp, device)
    pipeline = MeshPipeline(
        model,
        runs,
        SCHEDULES[args.schedule],
        [groups["to_lower"], groups["to_higher"]],
        dp,
        slices_of_sequence=args.tp if args.sequence_parallel else 1,
        autocast=args.autocast,
    )
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_settings(args))

    run = Run(args, __file__, config, device)
    state = training_state(model, optimizer, shard_dims_of(model), tp)
    first_step = load_checkpoint(run.checkpoints, args.resume, state, optimizer)
    batches = train_batches(corpus.train, args, device, first_step, dp.rank(), dp.size())

    for step in run.steps(first_step):
        lr = learning_rate(args, step)
        set_learning_rate(optimizer, lr)
        micro_batches = next(batches)
        losses = pipeline.run(micro_batches)
        pipeline.finish_gradient_synchronization()
        if args.sequence_parallel and args.tp > 1:
            all_reduce_replicated_gradients(model, tp)
        # every rank of dp has its own losses, every one of tp the same
        loss = all_reduce_control(losses.mean()) / (args.dp * args.tp)
        grad_norm = clip_grad_norm_(model, args.grad_clip, tp, pp)
        optimizer.step()
        run.log(step, loss, grad_norm, lr)
        optimizer.zero_grad(set_to_none=True)

        if run.evaluates(step):
            run.log_evaluation("val", evaluate(model, pipeline, corpus.valid, args, device, dp))
        if run.is_last(step):
            run.log_evaluation("test", evaluate(model, pipeline, corpus.test, args, device, dp))
        run.write()
        if run.saves(step):
            save_checkpoint(run.checkpoints, step + 1, state, args.keep_checkpoints)
    for group in groups.values():
        dist.destroy_process_group(group)
    return run.finish()


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
