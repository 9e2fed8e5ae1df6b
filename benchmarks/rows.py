"""The contenders of `make bench`: for each row our way of a technique and PyTorch's own.

A contender is a function `build(shape) -> step`; `step(tokens, targets)` trains on one batch,
optimizer and `zero_grad` included, and returns its loss. Both contenders of a row start from the
same weights and see the same batches. To add a row: two such functions and a line in `ROWS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import load_stage
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from common.model import Transformer, TransformerConfig, init_weights, linear_cross_entropy

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}

Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """A model, and the samples that each rank gets a step."""

    vocab_size: int
    d_model: int = 128
    n_layers: int = 2
    n_heads: int = 4
    seq_len: int = 64
    batch: int = 8

    @property
    def config(self) -> TransformerConfig:
        return TransformerConfig(
            self.vocab_size, self.d_model, self.n_layers, self.n_heads, self.seq_len
        )


SHAPES = {
    "small": Shape(vocab_size=2048, n_layers=4),
    "large-vocabulary": Shape(vocab_size=33_280),
}
GPU_SHAPES = {
    "small": Shape(2048, d_model=512, n_layers=8, n_heads=8, seq_len=512),
    "large-vocabulary": Shape(33_280, d_model=512, n_layers=4, n_heads=8, seq_len=512),
}


def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def transformer(shape: Shape) -> Transformer:
    model = Transformer(shape.config)
    init_weights(model, seed=1)
    return model.to(device())


def plain_step(model: nn.Module, optimizer, finish: Callable[[], None] | None = None) -> Step:
    """Forward, backward, `finish` if there is one, optimizer step, no gradients left."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        if finish is not None:
            finish()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


# ---- 01: the model against a plain one ----


class PlainBlock(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        d, self.n_heads = shape.d_model, shape.n_heads
        self.norm1, self.norm2 = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq, d_model] -> the same
        batch, seq, d = x.shape
        qkv = self.qkv(self.norm1(x)).split(d, dim=2)
        q, k, v = (t.view(batch, seq, self.n_heads, -1).transpose(1, 2) for t in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainTransformer(nn.Module):
    """The decoder as it is usually written, nanoGPT's recipe in its plainest form: LayerNorm
    without bias, learned positions, whole logits and `F.cross_entropy`. The head is untied, so
    that it has the matrix products of ours."""

    def __init__(self, shape: Shape):
        super().__init__()
        rows = shape.config.padded_vocab
        self.tokens = nn.Embedding(rows, shape.d_model)
        self.positions = nn.Embedding(shape.seq_len, shape.d_model)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.n_layers))
        self.norm = nn.LayerNorm(shape.d_model, bias=False)
        self.head = nn.Linear(shape.d_model, rows, bias=False)
        for weight in (w for w in self.parameters() if w.dim() == 2):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def our_model(shape: Shape) -> Step:
    model = transformer(shape)
    return plain_step(model, torch.optim.AdamW(model.parameters(), **ADAMW))


def plain_model(shape: Shape) -> Step:
    model = PlainTransformer(shape).to(device())
    return plain_step(model, torch.optim.AdamW(model.parameters(), **ADAMW))


def loss_step(shape: Shape, loss_of: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Step:
    """The output layer alone, forward and backward."""
    rows, d = shape.config.padded_vocab, shape.d_model
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape.batch * shape.seq_len, d, generator=generator).to(device())
    weight = (0.02 * torch.randn(rows, d, generator=generator)).to(device())
    x.requires_grad_(), weight.requires_grad_()

    def step(_: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(x, weight, targets.flatten())
        loss.backward()
        x.grad = weight.grad = None
        return loss.detach()

    return step


def loss_in_pieces(shape: Shape) -> Step:
    return loss_step(shape, linear_cross_entropy)


def loss_of_full_logits(shape: Shape) -> Step:
    return loss_step(shape, lambda x, weight, targets: F.cross_entropy(x @ weight.t(), targets))


# ---- 02: DistributedDataParallel ----


def our_ddp(shape: Shape) -> Step:
    model = load_stage("02").DistributedDataParallel(transformer(shape))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return plain_step(model, optimizer, model.finish_gradient_synchronization)


def torch_ddp(shape: Shape) -> Step:
    model = DistributedDataParallel(transformer(shape), gradient_as_bucket_view=True)
    return plain_step(model, torch.optim.AdamW(model.parameters(), **ADAMW))


# ---- 03: ZeroRedundancyOptimizer ----


def our_zero(zero_stage: int) -> Callable[[Shape], Step]:
    def build(shape: Shape) -> Step:
        model = transformer(shape)
        optimizer = load_stage("03").ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, zero_stage=zero_stage, **ADAMW
        )
        return plain_step(model, optimizer, optimizer.finish_gradient_synchronization)

    return build


def torch_zero(shape: Shape) -> Step:
    model = DistributedDataParallel(transformer(shape), gradient_as_bucket_view=True)
    return plain_step(
        model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    )


# ---- 04: fully_shard ----


def our_fsdp(reshard_after_forward: bool) -> Callable[[Shape], Step]:
    def build(shape: Shape) -> Step:
        module = transformer(shape)
        model = load_stage("04").FullyShardedDataParallel(
            module, module.units(), reshard_after_forward=reshard_after_forward
        )
        optimizer = torch.optim.AdamW(model.shards(), **ADAMW)
        return plain_step(model, optimizer, model.finish_gradient_synchronization)

    return build


def torch_fsdp(reshard_after_forward: bool) -> Callable[[Shape], Step]:
    def build(shape: Shape) -> Step:
        model = transformer(shape)
        mesh = init_device_mesh(device().type, (dist.get_world_size(),))
        for unit in model.units():
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
        return plain_step(model, torch.optim.AdamW(model.parameters(), **ADAMW))

    return build


# ---- the table ----


@dataclass(frozen=True)
class Row:
    """Two contenders, the ranks they run on, and what PyTorch's side is, as the table says it."""

    ours: Callable[[Shape], Step]
    theirs: Callable[[Shape], Step]
    against: str
    ranks: tuple[int, ...] = (2, 4)
    same_loss: bool = True  # both contenders compute the same function
    shapes: tuple[str, ...] = tuple(SHAPES)


ROWS = {
    "01-model": Row(
        our_model, plain_model, "plain GPT, full logits, AdamW fused", (1,), same_loss=False
    ),
    "01-loss": Row(
        loss_in_pieces,
        loss_of_full_logits,
        "x @ W.t(), F.cross_entropy",
        (1,),
        shapes=("large-vocabulary",),
    ),
    "02-ddp": Row(our_ddp, torch_ddp, "DistributedDataParallel(gradient_as_bucket_view=True)"),
    "03-zero-1": Row(our_zero(1), torch_zero, "ZeroRedundancyOptimizer under DDP"),
    "03-zero-2": Row(our_zero(2), torch_zero, "ZeroRedundancyOptimizer under DDP"),
    "04-fsdp": Row(our_fsdp(True), torch_fsdp(True), "fully_shard each unit and the root"),
    "04-fsdp-no-reshard": Row(
        our_fsdp(False), torch_fsdp(False), "fully_shard(reshard_after_forward=False)"
    ),
}
