"""Stage 08: context parallelism: shard every sequence across the ranks of a group (ring attention).

Each rank has the full model and a part of every sequence. Norms, MLPs and the loss compute every
token on its own; only attention mixes positions. There the keys and values of all ranks travel
around a ring: a rank attends to one block while the next arrives. An online softmax merges them.

New since stage 01: `context_parallel` replaces the attention of every layer, each rank gets its
chunks of the inputs and targets, and a mesh (dp, cp) has several such groups. At the end of a step
the gradients are averaged over all ranks. `--context-parallel-kind ulysses` exchanges sequence
shards for heads instead.

    P parameters, N = cp ranks; A = micro-batch x seq x d_model elements

    memory per rank             16 P bytes as in 02, and 1 / N of the activations
    communication per step      an all-reduce of P elements, over all ranks, as in 02
    and per layer and micro-    ring: forward 2 (N-1)/N A (keys, values), backward 4 (N-1)/N A (the
    batch, elements sent        same, and their gradients in float32); Ulysses: 4 (N-1)/N^2 A each
    --activation-checkpointing  repeats that of the forward

Liu et al., "Ring Attention with Blockwise Transformers", 2023. Jacobs et al., "DeepSpeed Ulysses",
2023. The online softmax: Milakov and Gimelshein, 2018; Dao et al., "FlashAttention", 2022.

Run it:

    torchrun --nproc-per-node 2 08_context_parallel/train.py --data sample --steps 100
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
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
from common.arguments import base_parser, check_arguments, model_config, positive_int, seconds
from common.checkpoint import training_state
from common.counter_rng import CounterDropout
from common.data import eval_batches, load_corpus, train_batches
from common.distributed import World, cleanup, fail, group_along, setup, world_size
from common.loss import IGNORED
from common.model import Attention, Transformer, init_weights
from common.optimization import adamw_settings, clip_grad_norm_, learning_rate, set_learning_rate
from common.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: keys and values travel around a ring, and an online softmax merges the results
# ------------------------------------------------------------------------------------------------


def context_parallel(model: Transformer, group: ProcessGroup, kind: str = "ring") -> Positions:
    """Replace the model's attention, in place, by attention across the ranks of `group`.

    Returns the positions of this rank's chunks; the model then takes `local_tokens` of sequences.
    """
    n, rank, seq_len = group.size(), group.rank(), model.config.seq_len
    if kind == "ring":
        shards = [zigzag(r, n, seq_len) for r in range(n)]
        ring = Ring(group, shards, next(model.parameters()).device)
        chunks, attend = shards[rank], partial(RingAttention.apply, ring)
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

    The causal mask leaves chunk i with i + 1 chunks of keys: 2n + 1 for the two, on every rank.
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
    Sums over the turns are in float32: in bfloat16 each turn would cost accuracy.
    """

    @staticmethod
    def forward(ctx, ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # q, k, v and the result: [batch, heads, seq / n, head_dim]; kv: [2, batch, ...]
        ring.check(q, k, v)
        if q.shape[2] != ring.length:
            raise ValueError(f"{q.shape[2]} tokens on a rank, in a ring for {ring.length}")
        q, kv = q.contiguous(), torch.stack((k, v))
        softmax = OnlineSoftmax(q)
        with torch.autocast(q.device.type, enabled=False):
            for source, (keys, values) in ring.circulate(kv):
                for rows, columns, ahead in visible_tiles(ring.positions, ring.shards[source]):
                    scores = scores_of(q[:, :, rows], keys[:, :, columns], ahead)
                    softmax.add(rows, scores, values[:, :, columns])
        out, logsumexp = softmax.result()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, logsumexp)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        if torch.is_grad_enabled():  # once_differentiable accepts a constant grad_out
            raise RuntimeError("create_graph=True: RingAttention has no second derivative")
        (q, kv, out, logsumexp), ring = ctx.saved_tensors, ctx.ring
        grad_out, grad_q = grad_out.contiguous(), torch.zeros_like(q, dtype=torch.float32)
        # per query, the sum over its keys of each weight times the weight's gradient
        delta = (grad_out.float() * out.float()).sum(-1, keepdim=True)
        exchange = None  # of the gradients of the previous block
        for source, block in ring.circulate(kv):
            grad_block = torch.zeros_like(block, dtype=torch.float32)
            # some callers run backward inside of their autocast block
            with torch.autocast(q.device.type, enabled=False):
                for rows, columns, ahead in visible_tiles(ring.positions, ring.shards[source]):
                    queries, grads = q[:, :, rows], grad_out[:, :, rows]
                    keys, values = block[..., columns, :]
                    weights = scores_of(queries, keys, ahead).sub_(logsumexp[:, :, rows]).exp_()
                    grad_scores = matmul(grads, values.mT).sub_(delta[:, :, rows]).mul_(weights)
                    grad_q[:, :, rows] += matmul(grad_scores, keys)
                    grad_block[0, :, :, columns] += matmul(grad_scores.mT, queries)
                    grad_block[1, :, :, columns] += matmul(weights.mT, grads)
            if source == ring.rank:
                grad_home = grad_block  # a rank's own part does not travel
                continue
            if exchange is not None:
                grad_block += exchange.wait()
            exchange = ring.start_exchange(grad_block)
        if exchange is not None:
            grad_home += exchange.wait()
        for grad in (grad_q, grad_home[0]):
            grad *= q.shape[-1] ** -0.5  # the scale of the scores
        return None, grad_q.to(q.dtype), *grad_home.to(kv.dtype)  # of ring, q, k and v


class OnlineSoftmax:
    """softmax(scores) times values, from scores that come tile by tile, in any order.

    For each query, of the scores so far: highest, their maximum; total, the sum of
    exp(score - highest); weighted, the sum of exp(score - highest) times the key's value. A higher
    maximum scales both sums down. All of them are float32.
    """

    def __init__(self, q: Tensor):
        self.weighted = torch.zeros_like(q, dtype=torch.float32)
        self.total = self.weighted.new_zeros(*q.shape[:-1], 1)
        self.highest = torch.full_like(self.total, -torch.inf)

    def add(self, rows: slice, scores: Tensor, values: Tensor) -> None:
        """Add scores [batch, heads, rows, keys] (overwritten), with the values of their keys."""
        sums = self.highest, self.total, self.weighted
        highest, total, weighted = (x[:, :, rows] for x in sums)  # views
        new_highest = torch.maximum(highest, scores.amax(-1, keepdim=True))
        scale = (highest - new_highest).exp_()  # the first time exp(-inf) = 0
        exp = scores.sub_(new_highest).exp_()
        total.mul_(scale).add_(exp.sum(-1, keepdim=True))
        weighted.mul_(scale).add_(matmul(exp, values))
        highest.copy_(new_highest)

    def result(self) -> tuple[Tensor, Tensor]:
        """Attention's output, and log(sum(exp(score))), with which backward recomputes weights."""
        return self.weighted / self.total, self.highest + self.total.log()


# ---- the ring ----


class SameShape:
    """Compares the ranks' shapes and dtypes: each receives into a tensor like the one it sends."""

    checked: tuple | None = None  # the last ones

    def check(self, *tensors: Tensor) -> None:
        """Raise ValueError unless q, k and v are alike, and the same on every rank of the group."""
        kinds = {(*x.shape, x.dtype) for x in tensors}
        if len(kinds) > 1:
            raise ValueError(f"q, k and v must have one shape and dtype: {kinds}")
        if kinds != self.checked:  # if only some ranks have new ones, they wait until the timeout
            check_same("shapes or dtypes of q", kinds, tensors[0].device, self.group)
            self.checked = kinds


class Ring(SameShape):
    """The ranks of a group in a circle. shards: the positions of every rank's tokens."""

    def __init__(self, group: ProcessGroup, shards: list[Positions], device: torch.device):
        self.group, self.n, self.rank = group, group.size(), group.rank()
        self.shards, self.positions = shards, shards[group.rank()]
        self.length = sum(map(len, self.positions))
        if len(shards) != self.n or any(sum(map(len, shard)) != self.length for shard in shards):
            raise ValueError(f"shards of different lengths: {shards}; ranks must divide seq_len")
        positions = sorted(p for shard in shards for chunk in shard for p in chunk)
        if positions != list(range(len(positions))) or any(c.step > 1 for s in shards for c in s):
            raise ValueError(f"shards {shards}: not all positions once, in ranges of step 1")
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
        """The two calls of an exchange, in the order to issue them in. NCCL runs those of a pair of
        ranks in order, and those of a hardware queue too: if every rank sent first, none would ever
        receive. So even ranks send first, and odd ranks receive first."""
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


# ---- tiles: scores in memory do not grow with the sequence ----

TILE = 256  # tokens


def visible_tiles(queries: Positions, keys: Positions) -> Iterator[tuple[slice, slice, int]]:
    """Yield the tiles of two shards that the causal mask does not hide. Others are never computed.

    A tile: its rows in the shard of queries, its columns in that of keys, and how many positions
    its first query is ahead of its first key. Its queries and keys have the same positions or none
    in common, so each of the queries sees a key of it. `OnlineSoftmax.add` relies on this.
    """
    for query_tile, key_tile in product(split_into_tiles(queries), split_into_tiles(keys)):
        (rows, at), (columns, key_at) = query_tile, key_tile
        if visible(at, key_at):
            yield rows, columns, at.start - key_at.start


def visible(queries: range, keys: range) -> bool:
    """Whether any of these queries may attend to any of these keys: not to a later position."""
    return keys[0] <= queries[-1]


def split_into_tiles(positions: Positions) -> list[tuple[slice, range]]:
    """Ranges of at most TILE positions, each with its place in the shard."""
    tiles, start = [], 0
    for chunk in positions:
        for i in range(0, len(chunk), TILE):
            tile = chunk[i : i + TILE]
            tiles.append((slice(start, start + len(tile)), tile))
            start += len(tile)
    return tiles


def scores_of(queries: Tensor, keys: Tensor, ahead: int) -> Tensor:
    """float32 [batch, heads, queries, keys]; minus infinity where the key's position is later."""
    scores = matmul(queries, keys.mT).mul_(queries.shape[-1] ** -0.5)
    if ahead < keys.shape[-2] - 1:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores.masked_fill_(later.triu_(ahead + 1), -torch.inf)
    return scores


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32. On a GPU, a is rounded to b's dtype, bfloat16, so that tensor cores
    multiply them, with float32 sums. CPUs have no such operator."""
    if b.is_cpu or b.dtype == torch.float32:
        return a.float() @ b.float()
    result = torch.bmm(a.to(b.dtype).flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
    return result.unflatten(0, a.shape[:2])


# ---- Ulysses, instead of a ring: shard the heads during attention ----


class UlyssesAttention(SameShape):
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


KINDS = ("ring", "ulysses")


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--cp", type=positive_int, help="ranks per sequence (default: all)")
    kind = "how attention crosses the ranks of a sequence"
    parser.add_argument("--context-parallel-kind", choices=KINDS, default="ring", help=kind)
    parser.add_argument("--timeout", type=seconds, default=600, help="collective timeout, seconds")
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
    first_step = run.checkpoints.load(run.resume, state, optimizer)
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
        if run.agree_to_save(step):
            run.checkpoints.save(step + 1, state, args.keep_checkpoints)
    dist.destroy_process_group(group)
    return run.finish()


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
