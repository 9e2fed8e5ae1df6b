"""Stage 05: tensor parallelism, every matrix of a layer cut across the ranks (Megatron-LM).

A layer is two pairs of linear maps. The first of a pair is cut by columns, so that each rank
makes some heads, or some hidden units, whole; the second by rows, so that each rank makes a part
of every output. One sum over the ranks a pair is all that the forward sends, one all the backward.

New since stage 04: every rank sees the whole batch and holds a slice of every matrix, which is
never gathered; what travels is activations. The loss is computed on slices of the vocabulary.
With --sequence-parallel the residual stream is cut too, along the sequence.

    P parameters, N ranks, L layers, bytes a rank in float32:

    memory      16 P / N (norms are whole); activations: each pair's input whole, those inside of
                a pair / N, those between the pairs whole, or / N with --sequence-parallel
    traffic     4 L + 2 all-reduces of batch x seq x d_model a micro-batch, and three of
                batch x seq for the loss; --sequence-parallel makes of each large one a
                reduce-scatter and an all-gather (the same bytes), and sums the norms' gradients
                once a step; --activation-checkpointing repeats what the forward of layers sends

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", 2019, section 3; Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022, section 4.2.2 (sequence parallelism).

Run it:

    torchrun --nproc-per-node 2 05_tensor_parallel/train.py --data sample --steps 100
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.nn.utils import clip_grads_with_norm_

from common.arguments import base_parser, check_arguments, check_degree, model_config, positive
from common.checkpoint import load_checkpoint, save_checkpoint, training_state
from common.collectives import (
    all_gather_single,
    all_reduce,
    all_reduce_control,
    reduce_scatter_single,
)
from common.data import eval_batches, load_corpus, train_batches
from common.distributed import cleanup, setup
from common.model import (
    IGNORED,
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
# The technique: columns, then rows, and one sum
# ------------------------------------------------------------------------------------------------
#
#   x [batch, seq, d] --f--> x W1^T [batch, seq, 4d/tp] --gelu--> h W2^T [batch, seq, d] --g--> y
#                            W1: my rows of [4d, d]               W2: my columns of [d, 4d]
#
#                              forward                           backward
#   f, into a pair             nothing,  or gather the sequence  sum, or sum and scatter
#   g, out of it               sum,      or sum and scatter      nothing, or gather the sequence
#
# (A "column" of x W^T is a row of W, as PyTorch stores it: Megatron's names are kept.)


def start_sum(partial: Tensor, group: ProcessGroup, sequence_parallel: bool) -> tuple[Tensor, Work]:
    """Begin to add up the ranks' `partial` [batch, seq, d], in place; it is there after `wait()`.

    With sequence_parallel each rank gets its slice of the sum, [batch, seq / tp, d].
    """
    if not sequence_parallel:
        return partial, all_reduce(partial, group=group, async_op=True)
    tp = dist.get_world_size(group)
    by_rank = partial.unflatten(1, (tp, -1)).transpose(0, 1).flatten(0, 1)
    mine = torch.empty_like(by_rank[: len(partial)])  # of [tp * batch, seq / tp, d]
    return mine, reduce_scatter_single(mine, by_rank, group=group, async_op=True)


def gather_sequence(mine: Tensor, group: ProcessGroup) -> Tensor:
    """The whole sequence from the ranks' slices: [batch, seq / tp, d] -> [batch, seq, d]."""
    tp = dist.get_world_size(group)
    by_rank = mine.new_empty(tp * mine.shape[0], *mine.shape[1:])
    all_gather_single(by_rank, mine.contiguous(), group=group)
    return by_rank.unflatten(0, (tp, -1)).transpose(0, 1).flatten(1, 2)


class FThenLinear(torch.autograd.Function):
    """f, then y = x W^T. One function, so that backward can send and multiply at a time."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, group: ProcessGroup, sequence_parallel):
        if sequence_parallel:
            x = gather_sequence(x, group)
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        return F.linear(x, weight.to(x.dtype))  # [batch, seq, out / tp]

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        # each rank knows the gradient that came by its own columns: what x gets is the sum
        grad_x = grad @ weight.to(grad.dtype)  # cast again: no bf16 copy of W is kept
        grad_x, work = start_sum(grad_x, ctx.group, ctx.sequence_parallel)
        # the gradient of the weight needs nobody: it is made while the sum is on its way
        grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        work.wait()
        return grad_x, grad_weight.to(weight.dtype), None, None


class G(torch.autograd.Function):
    """The sum of the ranks' partial outputs. It overwrites them: what made them has not saved
    them for its backward."""

    @staticmethod
    def forward(ctx, partial: Tensor, group: ProcessGroup, sequence_parallel: bool):
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        total, work = start_sum(partial, group, sequence_parallel)
        work.wait()
        if total is partial:
            ctx.mark_dirty(partial)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        if ctx.sequence_parallel:
            grad = gather_sequence(grad, ctx.group)
        return grad, None, None


def my_slice(full: Tensor, dim: int | None, group: ProcessGroup) -> Tensor:
    """This rank's slice along `dim` (None: all), as a copy, so that the whole can be freed."""
    tp = 1 if dim is None else dist.get_world_size(group)
    if full.shape[dim or 0] % tp:
        raise ValueError(f"dimension {dim} of {tuple(full.shape)} does not divide by {tp} ranks")
    return full.detach().chunk(tp, dim or 0)[dist.get_rank(group) % tp].clone()


class Sliced(nn.Module):
    """Holds this rank's slices of a plain module's parameters, a copy of those not in `cut`."""

    cut: dict[str, int] = {}  # along which dimension

    def __init__(self, plain: nn.Module, group: ProcessGroup, sequence_parallel: bool = False):
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.register_parameter("bias", None)
        for name, whole in plain.named_parameters(recurse=False):
            mine = nn.Parameter(my_slice(whole, self.cut.get(name), group))
            self.register_parameter(name, mine)


class ColumnParallelLinear(Sliced):
    """Some outputs of a linear map. x, whole or by the sequence -> [batch, seq, out / tp]."""

    cut = {"weight": 0, "bias": 0}  # [out / tp, in] and [out / tp]

    def forward(self, x: Tensor) -> Tensor:
        x = in_autocast_dtype(x)
        y = FThenLinear.apply(x, self.weight, self.group, self.sequence_parallel)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class RowParallelLinear(Sliced):
    """A linear map of some inputs. x [batch, seq, in / tp] -> whole, or cut by the sequence."""

    cut = {"weight": 1}  # [out, in / tp], and the bias whole

    def forward(self, x: Tensor) -> Tensor:
        y = G.apply(linear(x, self.weight), self.group, self.sequence_parallel)
        # behind the sum, or it would count once a rank
        return y if self.bias is None else y + self.bias.to(y.dtype)


class VocabParallelEmbedding(Sliced):
    """Vectors of the tokens whose rows this rank has, zeros for the others; then the sum."""

    cut = {"weight": 0}  # [vocab / tp, d]

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, seq] -> [batch, seq, d]
        row = tokens - dist.get_rank(self.group) * len(self.weight)
        others = (row < 0) | (row >= len(self.weight))
        mine = F.embedding(row.masked_fill(others, 0), self.weight)
        return G.apply(mine.masked_fill(others[..., None], 0.0), self.group, self.sequence_parallel)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits of which each rank has some columns.

    loss = log(sum exp(logit - highest)) - (target's logit - highest): a maximum and two sums of
    one number a token are all that the ranks must exchange.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
        # logits: [tokens, vocab / tp], targets: [tokens]
        ctx.dtype, logits = logits.dtype, logits.float()
        counted = targets != IGNORED
        count = counted.sum().clamp(min=1)
        column = targets - dist.get_rank(group) * logits.shape[-1]
        mine = (column >= 0) & (column < logits.shape[-1])  # IGNORED is nobody's
        column = column.masked_fill(~mine, 0)[:, None]

        highest = logits.amax(dim=-1)
        all_reduce(highest, ReduceOp.MAX, group=group)
        logits.sub_(highest[:, None])
        target_logit = logits.gather(-1, column)[:, 0].masked_fill(~mine, 0.0)  # -inf * 0 is NaN
        all_reduce(target_logit, group=group)
        total = logits.exp_().sum(dim=-1)
        all_reduce(total, group=group)

        ctx.save_for_backward(logits, column, mine / count, counted / (count * total))
        return (total.log() - target_logit).masked_fill(~counted, 0.0).sum() / count

    @staticmethod
    def backward(ctx, grad: Tensor):
        exp, column, mine, scale = ctx.saved_tensors
        # softmax less one at the target. In place: autograd refuses a second backward
        grad_logits = exp.mul_((scale * grad)[:, None])
        grad_logits.scatter_add_(-1, column, (-mine * grad)[:, None])
        return grad_logits.to(ctx.dtype), None, None


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
    """Mean cross-entropy, a float32 scalar, the same on every rank of the group.

    logits: [tokens, vocab / tp], this rank's columns; float32 ones are consumed, their memory
    becomes the gradient's. targets: [tokens], over the whole vocabulary, IGNORED ones left out.
    With nothing to count the loss is 0.
    """
    return VocabParallelCrossEntropy.apply(logits, targets, group)


class VocabParallelOutput(nn.Module):
    """The last unit: norm, head and loss. No rank ever has all the logits of a token."""

    def __init__(self, output: Output, group: ProcessGroup, sequence_parallel=False):
        super().__init__()
        self.group = group
        self.norm = output.norm
        self.head = ColumnParallelLinear(output.head, group, sequence_parallel)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """This rank's logits [batch, seq, vocab / tp], or with targets their mean loss."""
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return vocab_parallel_cross_entropy(logits.flatten(0, -2), targets.flatten(), self.group)


def tensor_parallel(
    model: Transformer, group: ProcessGroup, sequence_parallel: bool = False
) -> Transformer:
    """Replace the model's matrices, in place, by this rank's slices of them.

    The model may be on the meta device: then so are the slices (`init_slices` fills them). With
    sequence_parallel it takes sequences of the configuration's length alone.
    """
    tp, rank = dist.get_world_size(group), dist.get_rank(group)
    check_degree(model.config, tp, sequence_parallel)
    how = group, sequence_parallel
    if model.embed is not None:
        model.embed.tokens = VocabParallelEmbedding(model.embed.tokens, *how)
    for layer in model.layers.values():
        layer.attn.wqkv = ColumnParallelLinear(layer.attn.wqkv, *how)  # whole heads
        layer.attn.wo = RowParallelLinear(layer.attn.wo, *how)
        layer.mlp.w1 = ColumnParallelLinear(layer.mlp.w1, *how)
        layer.mlp.w2 = RowParallelLinear(layer.mlp.w2, *how)
    if model.output is not None:
        model.output = VocabParallelOutput(model.output, *how)
    for module in model.modules():
        if sequence_parallel and isinstance(module, CounterDropout):
            module.first_position = rank * model.config.seq_len // tp
    return model


def cut_dimensions(model: nn.Module) -> dict[str, int]:
    """Along which dimension each sliced parameter is cut, by its name; replicated ones are out."""
    return {
        f"{prefix}.{name}": dim
        for prefix, module in model.named_modules()
        for name, dim in getattr(module, "cut", {}).items()
        if getattr(module, name) is not None
    }


@torch.no_grad()
def init_slices(model: nn.Module, seed: int, group: ProcessGroup, device: torch.device) -> None:
    """Fill a model on the meta device with this rank's slices of the plain model's weights.

    One parameter at a time is drawn whole and cut: the model is whole nowhere.
    """
    model.to_empty(device=device)
    cut = cut_dimensions(model)
    for name, parameter in model.named_parameters():
        shape, dim = list(parameter.shape), cut.get(name)
        if dim is not None:
            shape[dim] *= dist.get_world_size(group)
        parameter.copy_(my_slice(initial_value(name, shape, seed), dim, group))


@torch.no_grad()
def sum_replicated_gradients(model: nn.Module, group: ProcessGroup) -> None:
    """Under sequence parallelism a norm has seen a slice of each sequence: once a step, the sum."""
    cut = cut_dimensions(model)
    grads = [p.grad for name, p in model.named_parameters() if name not in cut]
    flat = torch.cat([grad.flatten() for grad in grads])
    all_reduce(flat, group=group)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, group: ProcessGroup) -> Tensor:
    """Scale the gradients to at most this global norm; returns the norm before.

    Slices add up over the ranks, replicated gradients count once.
    """
    cut = cut_dimensions(model)
    sliced = [p.grad for name, p in model.named_parameters() if name in cut]
    whole = [p.grad for name, p in model.named_parameters() if name not in cut]
    squares = all_reduce_control(global_norm(sliced).square(), group=group)
    total_norm = (squares + global_norm(whole).square()).sqrt()
    clip_grads_with_norm_(model.parameters(), max_norm, total_norm)
    return total_norm


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--sequence-parallel", action="store_true", help="cut the sequence too")
    parser.add_argument("--timeout", type=positive, default=600, help="seconds until a hang ends")
    return check_arguments(parser.parse_args(argv))


@torch.no_grad()
def evaluate(model, tokens, args, device) -> float:
    """Mean loss in nats over every token of a split but the first, each predicted once."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, tokens
    for inputs, targets in eval_batches(tokens, args, device):
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

    config = model_config(args, corpus.vocab)
    with torch.device("meta"):
        model = Transformer(config)
    tensor_parallel(model, group, args.sequence_parallel)
    init_slices(model, args.seed, group, device)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_settings(args))

    run = Run(args, __file__, config, device)
    state = training_state(model, optimizer, cut_dimensions(model), group)
    first_step = load_checkpoint(run.checkpoints, args.resume, state, optimizer)
    batches = train_batches(corpus.train, args, device, first_step)

    for step in run.steps(first_step):
        lr = learning_rate(args, step)
        set_learning_rate(optimizer, lr)
        micro_batches = next(batches)
        loss = torch.zeros((), device=device)
        for inputs, targets, keys in micro_batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
                micro_loss = model(inputs, targets, keys) / len(micro_batches)
            micro_loss.backward()
            loss += micro_loss.detach()
        if args.sequence_parallel:
            sum_replicated_gradients(model, group)
        grad_norm = clip_grad_norm_(model, args.grad_clip, group)
        optimizer.step()
        run.log(step, loss, grad_norm, lr)
        optimizer.zero_grad(set_to_none=True)

        if run.evaluates(step):
            run.log_evaluation("val", evaluate(model, corpus.valid, args, device))
        if run.is_last(step):
            run.log_evaluation("test", evaluate(model, corpus.test, args, device))
        run.write()
        if run.saves(step):
            save_checkpoint(run.checkpoints, step + 1, state, args.keep_checkpoints)
    return run.finish()


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
