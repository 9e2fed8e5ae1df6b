"""Stage 05: tensor parallelism: shard every matrix of a layer across the ranks (Megatron-LM).

A layer is two pairs of linear layers: wqkv and wo, w1 and w2. The first of a pair is sharded by
columns, so that each rank computes some heads, or some hidden units, completely. The second is
sharded by rows, so that each rank computes a partial sum of every output. Each pair needs one
all-reduce in forward and one in backward; the embedding, the LM head and the loss add a few more.

New since stage 01: each rank holds a shard of every matrix. All ranks read the whole batch and
exchange activations; no weight is ever gathered. The loss is computed on logits sharded by the
vocabulary. With --sequence-parallel, activations outside of the pairs are sharded too, along the
sequence.

    P parameters, N ranks, L layers, m micro-batches per step; H = micro-batch x seq x d_model

    memory per rank           16 P / N bytes (norms are replicated); activations: 1 / N inside of a
                              pair, full outside of it (--sequence-parallel: 1 / N, except for the
                              gathered input of each pair and of the LM head, kept for backward)
    communication per step    (4 L + 2) m all-reduces of H elements, 3 m of micro-batch x seq (loss)
    --sequence-parallel       each large all-reduce becomes a reduce-scatter and an all-gather, with
                              as many bytes in total; an all-reduce of the norms' gradients per step
    --activation-checkpointing  repeats the collectives of each layer's forward; recomputation
                              stops before the last one, unless a dropout follows it

Shoeybi et al., "Megatron-LM", 2019, section 3. Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022, section 4.2.2 (sequence parallelism).

Run it:

    torchrun --nproc-per-node 2 05_tensor_parallel/train.py --data sample --steps 100
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.nn.utils import clip_grads_with_norm_

from common.collectives import (
    all_gather_single,
    all_reduce,
    all_reduce_control,
    global_norm,
    reduce_scatter_single,
)
from common.counter_rng import CounterDropout
from common.loss import IGNORED, forbid_create_graph, in_autocast_dtype
from common.model import Output, Transformer, initial_value, linear
from common.module_checks import check_dtype, check_plain

# isort: split
from common.batches import eval_batches, train_batches
from common.optimization import adamw_settings, learning_rate, set_learning_rate
from common.shards import split_over, training_state

from common.job.arguments import base_parser, check_arguments, model_config
from common.job.corpus import load_corpus
from common.job.launch import cleanup, setup, world_size
from common.job.run import Run

# With one hardware queue kernels start in launch order, so an all-reduce is in flight before the
# matmul that hides it starts. From Blackwell on GPUs do not need it (Megatron-LM, arguments.py).
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

# ------------------------------------------------------------------------------------------------
# The technique: column-parallel, then row-parallel, and one all-reduce
# ------------------------------------------------------------------------------------------------
#
#   x [batch, seq, d] --f--> x W1^T [batch, seq, 4d/tp] --gelu--> h W2^T [batch, seq, d] --g--> y
#                            W1: this rank's rows of [4d, d]      W2: its columns of [d, 4d]
#
#                              forward                   backward
#   f, where a pair begins     enter: identity           start_exit: all-reduce
#   g, where it ends           start_exit: all-reduce    enter: identity
#
# (PyTorch stores W as [out, in] and computes x W^T: Megatron's "columns" are rows of W.)


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
        check_dtype(x)
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
        check_dtype(partial)
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
    is_lookup = True  # as `nn.Embedding`: no matmul reads the weight, and it stays in float32

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


# ---- shards of the weights ----


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


# ---- sequence parallelism: outside of the regions, activations are sharded along the sequence ----
#
#                              forward                        backward
#   f, where a pair begins     enter: all-gather              start_exit: reduce-scatter
#   g, where it ends           start_exit: reduce-scatter     enter: all-gather


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


# ---- clipping: the norm is that of all ranks' gradients ----


def clip_grad_norm_(model: nn.Module, max_norm: float, group: ProcessGroup) -> Tensor:
    """Scale the gradients to at most this global norm; returns the norm before clipping."""
    dims = shard_dims_of(model)
    params = dict(model.named_parameters())  # frozen: an empty grad keeps the norm on the device
    grads = {n: p.new_zeros(0) if p.grad is None else p.grad for n, p in params.items()}
    sharded = [grad for name, grad in grads.items() if name in dims]
    replicated = [grad for name, grad in grads.items() if name not in dims]
    # squares of sharded gradients add up over the ranks; replicated gradients count once
    squares = all_reduce_control(global_norm(sharded).square(), group=group)
    norm = global_norm(replicated).to(squares)  # a norm of no gradients is on the CPU
    check_equal(norm, group)
    total_norm = (squares + norm.square()).sqrt()
    clip_grads_with_norm_(model.parameters(), max_norm, total_norm)
    return total_norm


def check_equal(norm: Tensor, group: ProcessGroup) -> None:
    """Raise if the norm of the replicated gradients differs between ranks by more than rounding."""
    highest, minus_lowest = all_reduce_control(torch.stack([norm, -norm]), group, ReduceOp.MAX)
    # private, but unlike `if` it does not wait for the GPU; a NaN norm passes
    is_equal = ~(highest + minus_lowest > 1e-3 * highest)
    torch._assert_async(is_equal, "gradients of replicated parameters differ between ranks")


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--sequence-parallel", action="store_true", help="shard the sequence too")
    return check_arguments(parser.parse_args(argv), tensor_parallel_size=world_size())


@torch.no_grad()
def evaluate(model, tokens, args, device) -> float:
    """Mean loss in nats over every token of a split but the first, each predicted once."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, tokens
    for inputs, targets in eval_batches(tokens, args.batching, device):
        with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
            loss = model(inputs, targets)
        count = (targets != IGNORED).sum()
        total += torch.stack([loss * count, count])
    model.train()
    return (total[0] / total[1]).item()


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the flags say; returns the lines of metrics.jsonl."""
    args = parse_args(argv)
    world = setup(args.timeout)
    device = world.device
    group = dist.group.WORLD
    corpus = load_corpus(args.data)

    config = model_config(args, corpus)
    with torch.device("meta"):
        model = Transformer(config)
    tensor_parallel(model, group, args.sequence_parallel)
    init_shards(model, args.seed, group, device)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_settings(args.lr, args.weight_decay))

    run = Run(args, __file__, config, device, corpus)
    state = split_over(group, shard_dims_of(model), training_state(model, optimizer))
    first_step = run.checkpoints.load(args.resume, state, optimizer)
    batches = train_batches(corpus.train, args.batching, device, first_step)

    for step in run.steps(first_step):
        lr = learning_rate(step, args.steps, args.lr, args.warmup_steps, args.min_lr_ratio)
        set_learning_rate(optimizer, lr)
        micro_batches = next(batches)
        loss = torch.zeros((), device=device)
        for inputs, targets, keys in micro_batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
                micro_loss = model(inputs, targets, keys) / len(micro_batches)
            micro_loss.backward()
            loss += micro_loss.detach()
        if args.sequence_parallel:
            all_reduce_replicated_gradients(model, group)
        grad_norm = clip_grad_norm_(model, args.max_norm, group)
        optimizer.step()
        run.log(step, loss, grad_norm, lr)
        optimizer.zero_grad(set_to_none=True)

        if run.evaluates(step):
            run.log_evaluation("val", evaluate(model, corpus.valid, args, device))
        if run.is_last(step):
            run.log_evaluation("test", evaluate(model, corpus.test, args, device))
        run.write()
        if run.agree_to_save_or_stop(step):
            run.checkpoints.save(step + 1, state, args.keep_checkpoints)
    return run.finish(state)


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
