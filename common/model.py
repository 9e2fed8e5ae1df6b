"""The transformer that every stage trains: a list of units of three kinds.

    embed -> layers.0 -> ... -> layers.L-1 -> output

`embed` maps tokens to hidden states, each of `layers` is a pre-norm block of causal attention and
MLP, `output` is the final norm, the head and the loss. FSDP unshards one unit after another, a
pipeline stage is a contiguous range of units, and tensor parallelism replaces modules of a unit.

Vaswani et al., "Attention is all you need", 2017; pre-norm with RMSNorm (Zhang and Sennrich,
2019), rotary positions (Su et al., 2021), no biases, an untied head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.counter_rng import CounterDropout, Positions, generator_of, position_ids
from common.loss import in_autocast_dtype, linear_cross_entropy


@dataclass(frozen=True)
class TransformerConfig:
    """Shapes of the model. `vocab_size` is that of the corpus."""

    vocab_size: int
    d_model: int = 128
    n_layers: int = 2
    n_heads: int = 4
    seq_len: int = 64
    dropout: float = 0.0
    activation_checkpointing: bool = False

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding and the head. A multiple of 128 suits tensor cores and is divisible
        by any usual tensor-parallel degree. The extra words never occur as targets."""
        return math.ceil(self.vocab_size / 128) * 128

    @property
    def n_units(self) -> int:
        return self.n_layers + 2

    @property
    def d_hidden(self) -> int:
        """Hidden width of an MLP."""
        return 4 * self.d_model

    def num_parameters(self) -> int:
        d = self.d_model
        layer = 4 * d * d + 2 * d + 2 * self.d_hidden * d  # wqkv 3, wo 1; two norms; w1 and w2
        return 2 * self.padded_vocab * d + self.n_layers * layer + d  # embedding and head; a norm

    def num_active_parameters(self) -> int:
        """The parameters that one token uses: in this model all of them."""
        return self.num_parameters()

    def flops_per_token(self) -> float:
        """Forward and backward: 6 per parameter of a matmul, plus attention's two matmuls.

        Chowdhery et al., "PaLM", 2022, appendix B. The embedding is a lookup and counts as zero;
        the half that the causal mask saves is not subtracted.
        """
        matrices = self.num_active_parameters() - self.padded_vocab * self.d_model
        return 6.0 * matrices + 12.0 * self.n_layers * self.d_model * self.seq_len


class MixedPrecisionLinear(torch.autograd.Function):
    """y = x W^T in the dtype of x. Saves the float32 weight and casts it again in backward.

    Autocast would save its cast copy of W for backward. Where several micro-batches are in
    flight, as in a pipeline, that is one copy of all weights per micro-batch.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        return grad @ weight.to(grad.dtype), grad_weight.to(weight.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T, without a cast copy of W kept for backward. x: [..., in], weight: [out, in]."""
    if not torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight)
    return MixedPrecisionLinear.apply(in_autocast_dtype(x), weight)


class Linear(nn.Module):
    """y = x W^T, without bias. weight: [out_features, in_features]."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


@lru_cache(maxsize=8)
def rotary_table(positions: Positions, head_dim: int, device: torch.device) -> Tensor:
    """cos and sin of position times frequency, float32 [seq, 1, 3, head_dim / 2, 2]."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    is_rotated = (torch.arange(3, device=device) < 2)[:, None]  # q and k, but not v
    position = position_ids(positions, device)[:, None, None, None]
    angle = position * is_rotated * 10000.0**-exponent  # 0 for v
    return torch.stack((angle.cos(), angle.sin()), dim=-1)


def rotate(x: Tensor, positions: Positions | None = None) -> Tensor:
    """Rotary position embedding of q and k in x: [batch, seq, heads, q/k/v, head_dim]
    in its dtype.

    Two neighbouring features are a complex number, which is multiplied by its position's rotation.
    v is multiplied by one: that is cheaper than to split it off and to put its gradient back.
    """
    wanted = positions or (range(x.shape[1]),), x.shape[-1], x.device
    pairs = x.float().unflatten(-1, (-1, 2))
    # two paths: 2.13 compiles neither complex numbers nor the cache, and real numbers without the
    # compiler make a step of the tiny model 9 % longer on a CPU
    if torch.compiler.is_compiling():
        (a, b), (cos, sin) = pairs.unbind(-1), rotary_table.__wrapped__(*wanted).unbind(-1)
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
    else:
        with torch.inference_mode(False):  # training can use the table, too
            table = torch.view_as_complex(rotary_table(*wanted))
        turned = torch.view_as_real(torch.view_as_complex(pairs) * table)
    return turned.flatten(-2).to(x.dtype)


class RMSNorm(nn.Module):
    """y = x / rms(x) * (1 + offset), computed in float32, or in float64 for a float64 offset.

    The parameter is the factor's offset from 1, because near zero bfloat16 is fine-grained. The
    factor itself, cast to bfloat16, would move in steps of 1/128. Weight decay pulls it towards 1.
    """

    def __init__(self, d_model: int):
        super().__init__()
        self.offset = nn.Parameter(torch.empty(d_model))

    def forward(self, x: Tensor) -> Tensor:  # [..., d_model] -> the same, in its dtype
        dtype = torch.promote_types(self.offset.dtype, torch.float32)
        factor = 1 + self.offset.to(dtype)
        return F.rms_norm(x.to(dtype), factor.shape, factor, eps=1e-6).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention. positions: those of the tokens in x; None: all from 0 on."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.head_dim = config.d_model // config.n_heads
        # one matmul computes q, k and v; the rows are in the order (head, q/k/v, head_dim), so that
        # a contiguous shard of rows is a set of heads
        self.wqkv = Linear(config.d_model, 3 * config.d_model)
        self.wo = Linear(config.d_model, config.d_model)
        self.positions: Positions | None = None

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq, d_model] -> the same
        qkv = self.wqkv(x).unflatten(-1, (-1, 3, self.head_dim))  # [batch, seq, heads, 3, head_dim]
        q, k, v = rotate(qkv, self.positions).transpose(1, 2).unbind(-2)
        return self.wo(self.attend(q, k, v).transpose(1, 2).flatten(-2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The step that mixes positions. [batch, heads, seq, head_dim] each, and the result."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class MLP(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.w1 = Linear(config.d_model, config.d_hidden)
        self.w2 = Linear(config.d_hidden, config.d_model)

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq, d_model] -> the same
        return self.w2(F.gelu(self.w1(x)))


class Embed(nn.Module):
    """The first unit: tokens to hidden states."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.tokens = nn.Embedding(config.padded_vocab, config.d_model)
        self.dropout = CounterDropout(config.dropout, site=0)

    def forward(self, tokens: Tensor, keys: Tensor | None = None) -> Tensor:
        return self.dropout(self.tokens(tokens), keys)  # [batch, seq] -> [batch, seq, d_model]


class Layer(nn.Module):
    """A middle unit: attention, then MLP, each with a norm before it and a residual around it."""

    def __init__(self, config: TransformerConfig, index: int):
        super().__init__()
        self.attn_norm = RMSNorm(config.d_model)
        self.attn = Attention(config)
        self.attn_dropout = CounterDropout(config.dropout, site=2 * index + 1)
        self.mlp_norm = RMSNorm(config.d_model)
        self.mlp = MLP(config)
        self.mlp_dropout = CounterDropout(config.dropout, site=2 * index + 2)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:  # [batch, seq, d_model]
        x = x + self.attn_dropout(self.attn(self.attn_norm(x)), keys)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), keys)


class Output(nn.Module):
    """The last unit: norm, head and loss."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.norm = RMSNorm(config.d_model)
        self.head = Linear(config.d_model, config.padded_vocab)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [batch, seq, padded_vocab], or with targets [batch, seq] their mean loss."""
        x = self.norm(x)
        if targets is None:
            return self.head(x)
        return linear_cross_entropy(x.flatten(0, -2), self.head.weight, targets.flatten())


class Transformer(nn.Module):
    """The model, or a part of it.

    indices: of the units to build; 0 is embed, 1 ... n_layers the layers, n_layers + 1 output.
    Parameters have the same names in a part as in the full model, and so the same initial values.
    """

    def __init__(self, config: TransformerConfig, indices: Sequence[int] | None = None):
        super().__init__()
        self.config = config
        indices = range(config.n_units) if indices is None else indices
        self.embed = Embed(config) if 0 in indices else None
        layers = {str(i): Layer(config, i) for i in range(config.n_layers) if i + 1 in indices}
        self.layers = nn.ModuleDict(layers)
        self.output = Output(config) if config.n_layers + 1 in indices else None

    def units(self) -> list[nn.Module]:
        """The units in the order of forward."""
        units = [self.embed, *self.layers.values(), self.output]
        return [unit for unit in units if unit is not None]

    def forward(
        self, x: Tensor, targets: Tensor | None = None, keys: Tensor | None = None
    ) -> Tensor:
        """Logits, or with targets the mean loss; without the output unit the hidden states.

        x: tokens [batch, seq]; without `embed` hidden states [batch, seq, d_model].
        targets: [batch, seq]. keys: int32 [batch] for dropout; None: no dropout.
        """
        if self.embed is not None:
            x = self.embed(x, keys)
        for layer in self.layers.values():
            if self.config.activation_checkpointing and torch.is_grad_enabled():
                # dropout is a hash, so there is no random state to preserve
                x = checkpoint(layer, x, keys, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, keys)
        return x if self.output is None else self.output(x, targets)


def initial_value(full_name: str, full_shape: Sequence[int], seed: int) -> Tensor:
    """The initial value of a parameter, from its name and the seed: float32, on the CPU.

    The offsets of norms are zeros. Matrices are normal with standard deviation 0.02 for the
    embedding and the head (GPT-2), so that the first loss is that of a uniform guess;
    1/sqrt(inputs) for a linear layer, and a third of that where it adds to the residual stream,
    which grows with every layer. Raises ValueError for any other parameter.
    """
    kind = full_name.rpartition(".")[2], len(full_shape)
    if kind == ("offset", 1):
        return torch.zeros(full_shape)
    if kind != ("weight", 2):
        raise ValueError(f"{full_name} {list(full_shape)}: no initial value; add a rule here")
    std = 0.02
    if full_name.startswith("layers."):
        std = full_shape[1] ** -0.5
        if full_name.endswith(("wo.weight", "w2.weight")):
            std /= 3.0
    return torch.randn(full_shape, generator=generator_of("init", seed, full_name)) * std


def initial_shard(seed: int, _: str, shapes: dict[str, Sequence[int]], owned: slice) -> Tensor:
    """The elements `owned` of the initial values of a unit's parameters, flattened side by side.

    shapes: of these parameters, in their order, by full name. _: the unit's name, not needed here.
    """
    return torch.cat([initial_value(*each, seed).flatten() for each in shapes.items()])[owned]


@torch.no_grad()
def init_weights(module: nn.Module, seed: int, prefix: str = "") -> None:
    """Give every parameter of `module` its initial value; `prefix` is the module's full name.

    Each value has a random stream of its own, so neither the order nor other modules matter.
    """
    for name, parameter in module.named_parameters(prefix=prefix.removesuffix(".")):
        parameter.copy_(initial_value(name, parameter.shape, seed))
