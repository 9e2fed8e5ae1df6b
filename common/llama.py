"""Llama-shaped models as a list of units, with the parameter names of Hugging Face.

    embed_tokens -> layers.0 -> ... -> layers.L-1 -> norm -> lm_head (tied: embed_tokens again)

The families: Llama 2 and 3, Mistral, Qwen2 and 2.5 (with biases of q, k and v), Qwen3 (with norms
of q and k), SmolLM3 (layers without positions), and Arcee (an MLP without a gate), in which form
the other stages' models are exported. No document may be longer than a sliding window.

A micro-batch is one row of tokens, documents side by side, and the documents' lengths. The
positions of each document start at 0, and its tokens attend to that document alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.loss import linear_cross_entropy

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "arcee")  # each "...ForCausalLM"
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu2": lambda x: F.relu(x).square()}
ROPE_TYPES = ("default", "llama3", "yarn")


class LlamaConfig:
    """Shapes of the model, and what distinguishes the families. c: the fields of `config.json`.

    ValueError for a model that this file would compute wrongly.
    """

    @classmethod
    def of_folder(cls, folder: Path, activation_checkpointing: bool = False) -> LlamaConfig:
        fields = json.loads((folder / "config.json").read_text("utf-8"))
        return cls(fields, activation_checkpointing)

    def __init__(self, c: dict, activation_checkpointing: bool = False):
        family, bias = c["model_type"], bool(c.get("attention_bias"))
        # of the rotary frequencies: their base, and how slow rotations are stretched
        self.rope = rope = rope_of(c)
        unsupported = {
            f"model_type {family}": family not in FAMILIES,
            f"architectures {c['architectures']}": "ForCausalLM" not in str(c["architectures"]),
            f"positions of the type {rope['rope_type']}": rope["rope_type"] not in ROPE_TYPES,
            "partial_rotary_factor": {**c, **rope}.get("partial_rotary_factor") not in (None, 1.0),
            f"hidden_act {c['hidden_act']}": c["hidden_act"] not in ACTIVATIONS,
            "yarn with mscale": rope["rope_type"] == "yarn" and bool(rope.get("mscale")),
            "quantized weights": c.get("quantization_config") is not None,
            "dropout in attention": bool(c.get("attention_dropout")),
        }
        if found := [what for what, is_so in unsupported.items() if is_so]:
            raise ValueError(f"not supported: {', '.join(found)}")
        self.vocab_size = c["vocab_size"]
        self.d_model, self.d_hidden = c["hidden_size"], c["intermediate_size"]
        self.n_layers, self.n_heads = c["num_hidden_layers"], c["num_attention_heads"]
        self.n_kv_heads = c.get("num_key_value_heads") or self.n_heads
        self.head_dim = c.get("head_dim") or self.d_model // self.n_heads
        self.max_positions = rope.get("max_positions", c["max_position_embeddings"])
        self.eps = c["rms_norm_eps"]  # of the norms
        has_window = c.get("use_sliding_window") or family == "mistral"
        # how many tokens attention looks back: documents must not be longer
        self.window: int | None = c.get("sliding_window", 4096) if has_window else None
        # by layer, whether it has rotary positions: in SmolLM3 every fourth one has none
        interval = c.get("no_rope_layer_interval", 4)
        rotates = c.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(self.n_layers)]
        self.rotates = rotates if family == "smollm3" else [True] * self.n_layers
        self.tied = c.get("tie_word_embeddings", family == "smollm3")  # the head is the embedding
        self.qkv_bias = bias or family == "qwen2"
        self.o_bias = bias and family != "qwen2"
        self.mlp_bias = bool(c.get("mlp_bias"))
        self.qk_norm, self.gated = family == "qwen3", family != "arcee"
        self.activation = c["hidden_act"]
        self.activation_checkpointing = activation_checkpointing
        self.frozen = False  # True: the weights have no gradients

    def num_parameters(self) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in Llama(self).parameters())

    def flops_per_token(self) -> float:
        """Forward and backward, without attention's matmuls, which depend on the documents."""
        matmuls = 4.0 if self.frozen else 6.0  # frozen: none for the gradient of a weight
        return matmuls * (self.num_parameters() - (not self.tied) * self.vocab_size * self.d_model)


def rope_of(c: dict) -> dict:
    """What a `config.json` says of rotary positions, with the defaults filled in."""
    # transformers 5 writes `rope_parameters`, older versions and users the other two
    scaling, parameters = c.get("rope_scaling") or {}, c.get("rope_parameters") or {}
    if scaling and parameters and scaling != parameters:
        raise ValueError("rope_scaling and rope_parameters differ: remove one")
    base = c.get("rope_theta", 2e6 if c["model_type"] == "smollm3" else 1e4)
    rope = {"rope_theta": base, **parameters, **scaling}
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope["rope_type"] == "yarn":
        rope.setdefault("original_max_position_embeddings", c["max_position_embeddings"])
        stretched = rope["factor"] * rope["original_max_position_embeddings"]
        rope["max_positions"] = max(c["max_position_embeddings"], int(stretched))
    return rope


def frequencies(rope: dict, size: int, device: torch.device) -> tuple[Tensor, float]:
    """The rotary frequencies of `size` features, [size / 2], and what scales their cos and sin.

    Slow rotations, whose waves are longer than the texts of the first training, are stretched by
    `factor`; fast ones stay.
    """
    exponent = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    frequency = 1.0 / rope["rope_theta"] ** exponent
    if rope["rope_type"] == "default":
        return frequency, 1.0
    factor, length = rope["factor"], rope["original_max_position_embeddings"]
    if rope["rope_type"] == "llama3":  # a ramp over the number of rotations
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        stays, scale = ((length * frequency / (2 * math.pi) - low) / (high - low)).clamp(0, 1), 1.0
    else:  # yarn: over the features (Peng et al., 2023), from `beta_fast` to `beta_slow` rotations
        rotations = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1
        waves = (math.log(length / (n * 2 * math.pi)) for n in rotations)
        low, high = (size * wave / (2 * math.log(rope["rope_theta"])) for wave in waves)
        if rope.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        ramp = torch.arange(size // 2, dtype=torch.float32, device=device) - low
        stays = 1 - (ramp / max(high - low, 0.001)).clamp(0, 1)
        scale = rope.get("attention_factor") or 0.1 * math.log(max(factor, 1)) + 1
    return frequency * (stays + (1 - stays) / factor), scale


def rotation_table(c: LlamaConfig, lengths: Sequence[int], device: torch.device) -> Tensor:
    """cos and sin of the angle of each token and feature: float32 [2, tokens, 1, head_dim]."""
    frequency, scale = frequencies(c.rope, c.head_dim, device)
    position = torch.cat([torch.arange(n, device=device) for n in lengths])
    angle = (position[:, None, None] * frequency).repeat(1, 1, 2)
    return torch.stack((angle.cos(), angle.sin())) * scale


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotary positions of x: [tokens, heads, head_dim]. Features i and i + head_dim / 2 are a pair,
    where `common/model.py` pairs neighbours."""
    (cos, sin), (a, b) = rotations, x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Causal attention of each document to itself. [tokens, heads, head_dim] each, and the result.

    One call per document: the time grows with the sum of the squared lengths. A mask over all
    tokens would take the square of the sum.
    """
    parts = (x.transpose(0, 1)[None].split(lengths, dim=2) for x in (q, k, v))
    outputs = [
        F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
        for qkv in zip(*parts, strict=True)  # [1, heads, length, head_dim] each
    ]
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


class Attention(nn.Module):
    """Causal self-attention; several heads of q may share one of k and v."""

    def __init__(self, c: LlamaConfig, rotates: bool):
        super().__init__()
        self.head_dim, self.rotates = c.head_dim, rotates
        self.q_proj = nn.Linear(c.d_model, c.n_heads * c.head_dim, c.qkv_bias)
        self.k_proj = nn.Linear(c.d_model, c.n_kv_heads * c.head_dim, c.qkv_bias)
        self.v_proj = nn.Linear(c.d_model, c.n_kv_heads * c.head_dim, c.qkv_bias)
        self.o_proj = nn.Linear(c.n_heads * c.head_dim, c.d_model, c.o_bias)
        self.q_norm = nn.RMSNorm(c.head_dim, c.eps) if c.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(c.head_dim, c.eps) if c.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotations: Tensor, lengths: Sequence[int]) -> Tensor:
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in projections)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotates:
            q, k = rotate(q, rotations), rotate(k, rotations)
        return self.o_proj(attend(q, k, v, lengths).flatten(-2))


class MLP(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        if c.gated:
            self.gate_proj = nn.Linear(c.d_model, c.d_hidden, c.mlp_bias)
        self.up_proj = nn.Linear(c.d_model, c.d_hidden, c.mlp_bias)
        self.down_proj = nn.Linear(c.d_hidden, c.d_model, c.mlp_bias)
        self.gated, self.activation = c.gated, ACTIVATIONS[c.activation]

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        hidden = self.activation(self.gate_proj(x)) * up if self.gated else self.activation(up)
        return self.down_proj(hidden)


class Layer(nn.Module):
    """A unit: attention, then MLP, each with a norm before it and a residual around it."""

    def __init__(self, c: LlamaConfig, rotates: bool):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.d_model, c.eps)
        self.self_attn = Attention(c, rotates)
        self.post_attention_layernorm = nn.RMSNorm(c.d_model, c.eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, rotations: Tensor, lengths: Sequence[int]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotations, lengths)
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Linear):
    """A unit: logits, or with targets their loss (`linear_cross_entropy`)."""

    def forward(self, x: Tensor, targets: Tensor | None = None, count: Tensor | None = None):
        if targets is None:
            return F.linear(x, self.weight.to(x.dtype))
        return linear_cross_entropy(x, self.weight, targets, count=count)


class Embedding(nn.Embedding):
    """A unit: looks up the rows of tokens. Tied, it is also the `Head`, for hidden states."""

    def forward(self, x: Tensor, *head_args) -> Tensor:
        return Head.forward(self, x, *head_args) if x.is_floating_point() else super().forward(x)


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config, self.model = config, nn.Module()
        self.model.embed_tokens = Embedding(config.vocab_size, config.d_model)
        self.model.layers = nn.ModuleList(Layer(config, each) for each in config.rotates)
        self.model.norm = nn.RMSNorm(config.d_model, config.eps)
        if not config.tied:
            self.lm_head = Head(config.d_model, config.vocab_size, bias=False)

    def units(self) -> list[nn.Module]:
        """In prefetch order. The head's all-gather overlaps with the last layer, not the norm."""
        heads = [] if self.config.tied else [self.lm_head]
        return [self.model.embed_tokens, *self.model.layers, *heads, self.model.norm]

    def forward(
        self, tokens: Tensor, lengths: Sequence[int], targets=None, count: Tensor | None = None
    ) -> Tensor:
        """Logits [tokens, vocab]. With targets [tokens] their mean loss; with `count`, a number,
        the sum of their losses divided by it (`linear_cross_entropy`)."""
        x = self.model.embed_tokens(tokens)
        rotations = rotation_table(self.config, lengths, x.device).to(x.dtype)
        for layer in self.model.layers:
            if self.config.activation_checkpointing and torch.is_grad_enabled():
                kwargs = dict(use_reentrant=False, preserve_rng_state=False)  # nothing is random
                x = checkpoint(layer, x, rotations, lengths, **kwargs)
            else:
                x = layer(x, rotations, lengths)
        head = self.model.embed_tokens if self.config.tied else self.lm_head
        return head(self.model.norm(x), targets, count)
