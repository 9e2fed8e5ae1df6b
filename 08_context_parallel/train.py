"""Stage 08: context parallelism (ring attention): every sequence is sharded over a group of ranks.

Each rank has the full model and a part of every sequence. Norms, MLPs and the loss treat each token
independently; only attention mixes positions. There the keys and values of all ranks travel around
a ring: a rank attends to one block while the next arrives, and merges the results.

New since stage 01: `context_parallel` replaces the attention of every layer, and each rank gets its
chunks of the inputs and targets. With `--cp` below the number of ranks there are several rings, for
different sequences. At the end of a step the gradients are averaged over all ranks.
`--context-parallel-kind ulysses` exchanges sequence shards for heads instead.

    P parameters, N = cp ranks; A = micro-batch x seq x d_model elements

    memory per rank              16 P bytes as in 02, and 1 / N of the activations
    per step                     an all-reduce of P elements over all ranks, as in 02
    per layer and micro-batch,   ring, forward: 2 (N-1)/N A (keys and values)
    elements sent by a rank      ring, backward: 4 (N-1)/N A (these and their float32 gradients)
                                 Ulysses: 4 (N-1)/N^2 A in forward, and as many in backward
    --activation-checkpointing   sends once more what forward sends

Liu et al., "Ring Attention with Blockwise Transformers", 2023. Jacobs et al., "DeepSpeed Ulysses",
2023. The kernel of a block: Dao et al., "FlashAttention", 2022.

Run it:

    torchrun --nproc-per-node 2 08_context_parallel/train.py --data sample --steps 100
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A rank posts receives before it computes. By default CUDA loads a kernel when it is first
# launched, and may wait for operations in flight: a deadlock, if a receive depends on this kernel.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, Work

from common.collectives import (
    all_reduce_control,
    all_to_all_single,
    average_gradients,
    check_same,
    irecv,
    isend,
)
from common.counter_rng import Positions

# isort: split
from common.batches import eval_batches, train_batches
from common.counter_rng import CounterDropout
from common.distributed import World, group_along
from common.loss import IGNORED
from common.model import Attention, Transformer, init_weights
from common.optimization import adamw_settings, clip_grad_norm_, learning_rate, set_learning_rate
from common.shards import training_state

from common.job.arguments import base_parser, check_arguments, model_config, positive_int
from common.job.corpus import load_corpus
from common.job.launch import cleanup, fail, setup, world_size
from common.job.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: keys and values travel around a ring, and log-sum-exps merge the results
# ------------------------------------------------------------------------------------------------

KINDS = ("ring", "ulysses")


def context_parallel(model: Transformer, group: ProcessGroup, kind: str = "ring") -> Positions:
    """Replace the model's attention, in place, by attention across the ranks of `group`.

    Returns the positions of this rank's chunks. Feed the model the output of `local_tokens`."""
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
    n, rank, seq_len = group.size(), group.rank(), model.config.seq_len
    if kind == "ring":
        ring = Ring(group, seq_len, next(model.parameters()).device)
        chunks, attend = ring.positions, partial(RingAttention.apply, ring)
    else:
        chunks = (range(rank * seq_len // n, (rank + 1) * seq_len // n),)
        attend = UlyssesAttention(group)
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = attend
        if isinstance(module, Attention | CounterDropout):
            module.positions = chunks
    return chunks


def zigzag(rank: int, n: int, seq_len: int) -> Positions:
    """The positions of a rank: of 2n chunks, one from the front and its mirror image at the back.

    Chunk i sees i earlier chunks of keys and half of its own: 2n for the two, on every rank.
    """
    ends = [i * seq_len // (2 * n) for i in range(2 * n + 1)]
    return tuple(range(ends[i], ends[i + 1]) for i in (rank, 2 * n - 1 - rank))


def local_tokens(tokens: Tensor, chunks: Positions, seq_len: int) -> Tensor:
    """This rank's part of inputs or targets: [batch, seq_len] -> [batch, seq_len / n]."""
    if tokens.shape[1] != seq_len:  # the chunks cover seq_len: others would be dropped
        raise ValueError(f"sequences of {tokens.shape[1]} tokens instead of seq_len {seq_len}")
    return torch.cat([tokens[:, chunk.start : chunk.stop] for chunk in chunks], dim=1)


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's queries to the keys and values of all ranks.

    In each of n turns a rank attends to one block of keys and values, while it passes this block
    on and receives the next. Backward sends the blocks around once more. The gradients of a block
    follow it one turn later: each rank adds its part and passes the sum on, until its owner has it.
    """

    @staticmethod
    def forward(ctx, ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # q, k, v and the result: [batch, heads, seq / n, head_dim]; kv: [2, batch, ...]
        ring.check(q, k, v)
        if q.shape[2] != ring.length:
            raise ValueError(f"{q.shape[2]} tokens on a rank, in a ring for {ring.length}")
        q, kv = q.contiguous(), torch.stack((k, v))
        out = zeros_for_sums(q)
        logsumexp = torch.full_like(out[..., 0], -torch.inf)
        for source, block in ring.circulate(kv):
            rows, columns = visible(ring.rank, source, ring.length)
            keys, values = block[..., columns, :]
            part = attention(q[:, :, rows], keys, values, causal=source == ring.rank)
            merge(out[:, :, rows], logsumexp[:, :, rows], *part)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, logsumexp)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        if torch.is_grad_enabled():  # once_differentiable would not raise if grad_out has no graph
            raise RuntimeError("create_graph=True: RingAttention has no second derivative")
        (q, kv, out, logsumexp), ring = ctx.saved_tensors, ctx.ring
        grad_out, grad_q = grad_out.contiguous(), zeros_for_sums(q)
        exchange = None  # of the gradients of the previous block
        for source, block in ring.circulate(kv):
            rows, columns = visible(ring.rank, source, ring.length)
            keys, values = block[..., columns, :]
            of_queries = [x[:, :, rows] for x in (grad_out, q, out, logsumexp)]
            grads = attention_backward(*of_queries, keys, values, causal=source == ring.rank)
            grad_q[:, :, rows] += grads[0]
            grad_block = zeros_for_sums(block)
            grad_block[0, :, :, columns] = grads[1]
            grad_block[1, :, :, columns] = grads[2]
            if source == ring.rank:  # the first turn
                grad_home = grad_block  # a rank's own part does not travel
                continue
            if exchange is not None:
                grad_block += exchange.wait()
            exchange = ring.start_exchange(grad_block)
        if exchange is not None:
            grad_home += exchange.wait()
        return None, grad_q.to(q.dtype), *grad_home.to(kv.dtype)  # of ring, q, k and v


def zeros_for_sums(x: Tensor) -> Tensor:
    """Zeros like x, at least in float32: in bfloat16 the sum over the turns would be inaccurate."""
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


def visible(rank: int, source: int, length: int) -> tuple[slice, slice]:
    """Which of a rank's queries see which keys of the block of `source`. Both have `length` tokens.

    Of an earlier rank's block, every query sees the front chunk and none the back chunk. Of a later
    rank's block, the back chunk of queries sees every key and the front chunk none. So only a
    rank's own block needs a causal mask.
    """
    front, back, both = slice(length // 2), slice(length // 2, None), slice(None)
    if source == rank:
        return both, both
    return (both, front) if source < rank else (back, both)


def merge(out: Tensor, logsumexp: Tensor, part: Tensor, part_logsumexp: Tensor) -> None:
    """Merge the attention to other keys into `out` and `logsumexp`, in place.

    The weight of a part is its fraction of the sum of exp(score) over all keys so far.
    """
    # exp(a) / (exp(a) + exp(b)) = sigmoid(a - b), which cannot overflow; the first time it is 1
    weight = torch.sigmoid(part_logsumexp - logsumexp)
    out.lerp_(part.to(out.dtype), weight.unsqueeze(-1))
    logsumexp.copy_(torch.logaddexp(logsumexp, part_logsumexp))


# ---- one block: a kernel of PyTorch's, which keeps no scores in memory ----

aten = torch.ops.aten


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ / sqrt(head_dim)) v, and per query log(sum(exp(score))), at least in float32."""
    if q.is_cpu:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal)
    if q.shape[-1] % (16 // q.itemsize):
        raise ValueError(f"head_dim {q.shape[-1]}: GPUs need a multiple of {16 // q.itemsize}")
    if q.dtype == torch.float32:
        kernel = aten._scaled_dot_product_efficient_attention
        out, logsumexp, *_ = kernel(q, k, v, None, compute_log_sumexp=True, is_causal=causal)
        return out, logsumexp[..., : q.shape[2]]  # the kernel pads it to a multiple of 32
    return aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)[:2]


def attention_backward(
    grad: Tensor, q: Tensor, out: Tensor, logsumexp: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, as far as these keys contribute to them.

    out, logsumexp: the merged ones, so that exp(score - logsumexp) is the weight of a key among the
    keys of all ranks.
    """
    logsumexp = logsumexp.contiguous()  # GPU kernels assume contiguous memory
    if q.is_cpu:
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(grad, q, k, v, out, logsumexp, dropout_p=0.0, is_causal=causal)
    options = {"dropout_p": 0.0, "is_causal": causal, "philox_seed": None, "philox_offset": None}
    if q.dtype == torch.float32:
        kernel = aten._scaled_dot_product_efficient_attention_backward
        options |= {"attn_bias": None, "grad_input_mask": [True, True, True, False]}
        # padded queries get weight exp(-inf) = 0
        logsumexp = F.pad(logsumexp, (0, -q.shape[2] % 32), value=torch.inf)
    else:
        kernel = aten._scaled_dot_product_flash_attention_backward
        options |= {"cum_seq_q": None, "cum_seq_k": None, "max_q": q.shape[2], "max_k": k.shape[2]}
    return kernel(grad, q, k, v, out=out, logsumexp=logsumexp, **options)[:3]


# ---- the ring ----


class ShapeCheck:
    """Compares the ranks' shapes and dtypes: each receives into a tensor like the one it sends."""

    checked: set[tuple] | None = None  # the shape and dtype that were last compared

    def check(self, *tensors: Tensor) -> None:
        """Raise ValueError unless q, k and v are alike, and the same on every rank of the group."""
        kinds = {(*x.shape, x.dtype) for x in tensors}
        if len(kinds) > 1:
            raise ValueError(f"q, k and v must have one shape and dtype: {kinds}")
        if kinds != self.checked:  # if shapes change on some ranks only, these hang until a timeout
            check_same("shapes or dtypes of q", kinds, tensors[0].device, self.group)
            self.checked = kinds


class Ring(ShapeCheck):
    """The ranks of a group in a circle. positions: those of this rank's tokens, by `zigzag`."""

    def __init__(self, group: ProcessGroup, seq_len: int, device: torch.device):
        self.group, self.n, self.rank = group, group.size(), group.rank()
        if self.n > 1 and seq_len % (2 * self.n):
            raise ValueError(f"seq_len {seq_len} on {self.n} ranks: not a multiple of {2 * self.n}")
        self.positions = zigzag(self.rank, self.n, seq_len)
        self.length = seq_len // self.n
        if self.n > 1:
            # NCCL's first operation between two ranks connects them, and blocks until both have
            # issued it: do that here, one by one, while no other operation is in flight
            sent, received = torch.zeros(2, 1, device=device)
            for call in self.send_and_receive(sent, received):
                call().wait()

    def circulate(self, block: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, block) for the block of every rank: this rank's own first, then the previous
        rank's, and so on. While the caller uses a block, the next one is in flight."""
        for turn in range(self.n):
            exchange = self.start_exchange(block) if turn < self.n - 1 else None
            yield (self.rank - turn) % self.n, block
            if exchange is not None:
                block = exchange.wait()

    def start_exchange(self, tensor: Tensor) -> Exchange:
        """Start to send a tensor to the next rank, and to receive the previous rank's."""
        received = torch.empty_like(tensor)
        works = [call() for call in self.send_and_receive(tensor, received)]
        return Exchange(works, tensor, received)

    def send_and_receive(self, tensor: Tensor, received: Tensor) -> list[Callable[[], Work]]:
        """The two calls of an exchange, in the order to issue them, in which NCCL and a GPU's
        hardware queues run them. If every rank sent first, no receive would ever start. So even
        ranks send first, and odd ranks receive first."""
        send = partial(isend, tensor, group=self.group, group_dst=(self.rank + 1) % self.n)
        receive = partial(irecv, received, group=self.group, group_src=(self.rank - 1) % self.n)
        return [receive, send] if self.rank % 2 else [send, receive]


class Exchange(NamedTuple):
    """A send and a receive in flight. sent: its memory must not be reused before `wait`."""

    works: list[Work]
    sent: Tensor
    received: Tensor

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


# ---- Ulysses, instead of a ring: shard the heads during attention ----


class UlyssesAttention(ShapeCheck):
    """Causal attention of some heads over the full sequence, between two all-to-alls.

    Outside, every rank has all heads of its tokens; inside, all tokens of its heads.
    """

    def __init__(self, group: ProcessGroup):
        self.group = group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.check(q, k, v)
        if q.shape[1] % self.group.size():
            raise ValueError(f"{q.shape[1]} heads for {self.group.size()} ranks: must be divisible")
        qkv = torch.stack((q, k, v))  # [3, batch, heads, seq / n, head_dim]
        q, k, v = ExchangeShards.apply(qkv, -3, -2, self.group)  # [batch, heads / n, seq, head_dim]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return ExchangeShards.apply(y, -2, -3, self.group)  # [batch, heads, seq / n, head_dim]


class ExchangeShards(torch.autograd.Function):
    """Split a tensor along one dimension, exchange the shards, join the received ones along
    another. Backward is the same with the dimensions interchanged."""

    @staticmethod
    def forward(ctx, x: Tensor, split: int, join: int, group: ProcessGroup) -> Tensor:
        ctx.split, ctx.join, ctx.group = split, join, group
        to_rank = torch.stack(x.chunk(group.size(), split))
        from_rank = torch.empty_like(to_rank)
        all_to_all_single(from_rank, to_rank, group=group)
        return torch.cat(from_rank.unbind(), join)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return ExchangeShards.apply(grad, ctx.join, ctx.split, ctx.group), None, None, None


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--cp", type=positive_int, help="ranks per sequence (default: all)")
    kind = "how attention crosses the ranks of a sequence"
    parser.add_argument("--context-parallel-kind", choices=KINDS, default="ring", help=kind)
    args = parser.parse_args(argv)
    cp = args.cp = args.cp or world_size()
    if world_size() % cp:
        fail(f"--cp {cp} does not divide the {world_size()} ranks (--nproc-per-node)")
    check_arguments(args, data_parallel_size=world_size() // cp)
    kind = args.context_parallel_kind
    multiple = 2 * cp if kind == "ring" and cp > 1 else cp  # a rank of a ring has two chunks
    if rest := args.seq_len % multiple:
        needs = f"--cp {cp} ({kind}) needs --seq-len to be a multiple of {multiple}"
        longer = args.seq_len + multiple - rest
        fail(f"{needs}, not {args.seq_len}: pass --seq-len {longer}, for example")
    if kind == "ulysses" and args.n_heads % cp:
        needs = f"--context-parallel-kind ulysses needs --n-heads to be a multiple of --cp {cp}"
        fail(f"{needs}, not {args.n_heads}: pass --context-parallel-kind ring, for example")
    return args


@torch.no_grad()
def evaluate(model, tokens, args, device, world: World, chunks: Positions) -> float:
    """Mean loss in nats over every token of a split but the first, each predicted once."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, tokens
    for batch in eval_batches(tokens, args.batching, device, world.rank // args.cp, args.dp):
        inputs, targets = (local_tokens(x, chunks, args.seq_len) for x in batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
            loss = model(inputs, targets)
        count = (targets != IGNORED).sum()
        total += torch.stack([loss * count, count])
    all_reduce_control(total)
    model.train()
    return (total[0] / total[1]).item()


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the flags say; returns the lines of metrics.jsonl."""
    args = parse_args(argv)
    world = setup(args.timeout)
    device = world.device
    corpus = load_corpus(args.data)

    config = model_config(args, corpus)
    group = group_along((args.dp, args.cp), 1, "cp", args.timeout)
    model = Transformer(config)
    init_weights(model, args.seed)
    model.to(device)
    chunks = context_parallel(model, group, args.context_parallel_kind)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_settings(args.lr, args.weight_decay))

    run = Run(args, __file__, config, device, corpus)
    state = training_state(model, optimizer)
    first_step = run.checkpoints.load(args.resume, state, optimizer)
    dp_rank = world.rank // args.cp
    batches = train_batches(corpus.train, args.batching, device, first_step, dp_rank, args.dp)

    for step in run.steps(first_step):
        lr = learning_rate(step, args.steps, args.lr, args.warmup_steps, args.min_lr_ratio)
        set_learning_rate(optimizer, lr)
        micro_batches = next(batches)
        loss = torch.zeros((), device=device)
        for inputs, targets, keys in micro_batches:
            inputs, targets = (local_tokens(x, chunks, args.seq_len) for x in (inputs, targets))
            with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
                micro_loss = model(inputs, targets, keys) / len(micro_batches)
            micro_loss.backward()
            loss += micro_loss.detach()
        average_gradients(model.named_parameters())
        loss = all_reduce_control(loss) / world.size
        grad_norm = clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        run.log(step, loss, grad_norm, lr)
        optimizer.zero_grad(set_to_none=True)

        if run.evaluates(step):
            run.log_evaluation("val", evaluate(model, corpus.valid, args, device, world, chunks))
        if run.is_last(step):
            run.log_evaluation("test", evaluate(model, corpus.test, args, device, world, chunks))
        run.write()
        if run.agree_to_save_or_stop(step):
            run.checkpoints.save(step + 1, state, args.keep_checkpoints)
    dist.destroy_process_group(group)
    return run.finish(state)


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
