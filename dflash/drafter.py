"""The drafter: a small decoder that proposes a whole block of tokens in one pass (DFlash paper, arXiv 2602.06036, A.3).

It has no embedding and no head of its own; both are the target's and stay frozen. Context enters every layer as keys
and values: the target's tapped hidden states go through `fc` and `hidden_norm` once and then through each layer's
`k_proj` and `v_proj`. Only the block itself has queries, an attention output and an MLP, so a context token costs a
few percent of a block token.

Axes in names: S context tokens (flattened), N block tokens (anchors × block size), F = K·H tapped features, H hidden,
Q query heads, G key/value heads, D head dimension. Tensor names of the module are the public checkpoint's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash.fp8 import project, project_back
from dflash.gated import GatedMLP

Rope = tuple[Tensor, Tensor]  # cos, sin: [tokens, 1, D]
#: attend(q_NQD, context keys and values [S, G, D], block keys and values [N, G, D]) -> [N, Q, D]; where a layer slides
#: it is called with `window=W` besides
Attend = Callable[..., Tensor]
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shape of a drafter and what it needs to know of its target. One drafter, one config, in every layout."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    vocab_size: int
    block_size: int
    taps: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()  # of each layer; empty: all full

    def __post_init__(self) -> None:
        # JSON has lists; a drafter without windows has one spelling, or two equal ones would differ
        sliding = self.sliding_window is not None and SLIDING in self.layer_types
        object.__setattr__(self, "taps", tuple(self.taps))
        object.__setattr__(self, "layer_types", tuple(self.layer_types) if sliding else ())
        object.__setattr__(self, "sliding_window", self.sliding_window if sliding else None)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's window (dflash/attention.py says what it hides); None where attention is full."""
        kinds = self.layer_types or (FULL,) * self.num_layers
        return tuple(self.sliding_window if kind == SLIDING else None for kind in kinds)


class _SideBySide(torch.autograd.Function):
    """x Wᵀ of up to three weights that lie behind each other in memory; their gradients are parts of one product."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, joined: Tensor, first: Tensor, second: Tensor | None, third: Tensor | None, fp8: bool
    ) -> Tensor:
        ctx.save_for_backward(x, joined)
        ctx.sizes = [len(weight) for weight in (first, second, third) if weight is not None]
        ctx.fp8 = fp8
        return project(x, joined, fp8)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, joined = ctx.saved_tensors
        parts = (*(grads[0].T @ x).split(ctx.sizes), None, None)
        return project_back(grads[0], joined, ctx.fp8), None, *parts[:3], None


def side_by_side(x_TH: Tensor, joined: Tensor | None, *linears: nn.Linear, fp8: bool = False) -> tuple[Tensor, ...]:
    """Up to three products of one input, in training as one: then the input's gradient is one product too."""
    if joined is None:
        return tuple(linear(x_TH) for linear in linears)
    weights = [linear.weight for linear in linears]
    first, second, third = (*weights, None, None)[:3]
    out = _SideBySide.apply(x_TH, joined, first, second, third, fp8)
    return out.split([len(weight) for weight in weights], dim=-1)


class Products(nn.Module):
    """What multiplies by weights; `fp8` says that it does so in e4m3 while it trains (dflash/fp8.py)."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = False

    @property
    def narrow(self) -> bool:
        return self.fp8 and self.training

    def product(self, linear: nn.Linear, x_TH: Tensor) -> Tensor:
        return side_by_side(x_TH, linear.weight.detach() if self.narrow else None, linear, fp8=self.narrow)[0]


def use_fp8(drafter: nn.Module) -> None:
    """From now on training multiplies in e4m3; the drafter's weights must be laid out by `flatten`."""
    for module in drafter.modules():
        if isinstance(module, Products):
            module.fp8 = True


class Attention(Products):
    """Queries from the block; keys and values from context and block through the same weights; normed per head."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden, query = config.hidden_size, config.num_heads * config.head_dim
        key = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(hidden, query, bias=False)
        self.k_proj = nn.Linear(hidden, key, bias=False)
        self.v_proj = nn.Linear(hidden, key, bias=False)
        self.o_proj = nn.Linear(query, hidden, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.joined: Tensor | None = None  # q_proj, k_proj and v_proj as one, where training lays them so

    def keys_values(self, x_TH: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values, each [T, G, D], of context or block tokens."""
        joined = None if self.joined is None else self.joined[self.q_proj.out_features :]
        k, v = side_by_side(x_TH, joined, self.k_proj, self.v_proj, fp8=self.narrow)
        return self._keys_values(k, v, rope)

    def _keys_values(self, k: Tensor, v: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        return rotate(self.k_norm(k.unflatten(-1, (-1, self.head_dim))), rope), v.unflatten(-1, (-1, self.head_dim))

    def forward(self, x_NH: Tensor, rope: Rope, context_kv: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = side_by_side(x_NH, self.joined, self.q_proj, self.k_proj, self.v_proj, fp8=self.narrow)
        q_NQD = rotate(self.q_norm(q.unflatten(-1, (-1, self.head_dim))), rope)
        block_k, block_v = self._keys_values(k, v, rope)
        return self.product(self.o_proj, attend(q_NQD, *context_kv, block_k, block_v).flatten(-2))


class MLP(Products):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.joined: Tensor | None = None  # gate_proj and up_proj as one, where training lays them so

    def forward(self, x_NH: Tensor) -> Tensor:
        if self.joined is None:
            return self.down_proj(F.silu(self.gate_proj(x_NH)) * self.up_proj(x_NH))
        weights = [linear.weight for linear in (self.gate_proj, self.up_proj, self.down_proj)]
        out = GatedMLP.apply(x_NH, self.joined, *weights, self.narrow)
        assert isinstance(out, Tensor)
        return out


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_NH: Tensor, rope: Rope, context_kv: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x_NH = x_NH + self.self_attn(self.input_layernorm(x_NH), rope, context_kv, attend)
        return x_NH + self.mlp(self.post_attention_layernorm(x_NH))


class Drafter(Products):
    """Maps tapped context states and embedded blocks to hidden states for the target's head."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def all_layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def context(self, taps_SF: Tensor) -> Tensor:
        """The context as every layer sees it, [S, H]. It does not pass a layer's own input norm."""
        return self.hidden_norm(self.product(self.fc, taps_SF))

    def context_keys_values(self, taps_SF: Tensor, rope: Rope) -> list[tuple[Tensor, Tensor]]:
        """Per layer the keys and values [S, G, D] of context tokens: what a decoder caches."""
        context_SH = self.context(taps_SF)
        return [layer.self_attn.keys_values(context_SH, rope) for layer in self.all_layers()]

    def blocks(self, x_NH: Tensor, rope: Rope, context_kv: list[tuple[Tensor, Tensor]], attend: Attend) -> Tensor:
        """Run embedded block tokens [N, H] through the layers; returns normed hidden states [N, H]."""
        for layer, layer_kv, window in zip(self.all_layers(), context_kv, self.config.windows, strict=True):
            x_NH = layer(x_NH, rope, layer_kv, attend if window is None else partial(attend, window=window))
        return self.norm(x_NH)

    def forward(self, taps_SF: Tensor, rope_S: Rope, x_NH: Tensor, rope_N: Rope, attend: Attend) -> Tensor:
        return self.blocks(x_NH, rope_N, self.context_keys_values(taps_SF, rope_S), attend)


def initialise(drafter: Drafter, seed: int) -> None:
    """Linears N(0, 0.02), norms 1, the same on every device for a seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


def embed_blocks(embed_VH: Tensor, factor: float, anchor_ids_A: Tensor, mask_token_id: int, block_size: int) -> Tensor:
    """Embedded blocks [A, B, H]: slot 0 the anchor's row, slots 1..B-1 the mask token's; Gemma's factor on both."""
    anchors_AH = embed_VH[anchor_ids_A] * factor
    mask_H = embed_VH[mask_token_id] * factor
    masks = mask_H.expand(anchors_AH.shape[0], block_size - 1, -1)
    return torch.cat((anchors_AH[:, None], masks), dim=1)


class RopeTable(nn.Module):
    """Rotary angles for every position up to `positions`, made once in fp32; scaling kinds are transformers' own."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DrafterConfig, positions: int, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        inv_freq, factor = rope_frequencies(config)
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", (angles.cos() * factor).to(device, dtype)[:, None], persistent=False)
        self.register_buffer("sin", (angles.sin() * factor).to(device, dtype)[:, None], persistent=False)

    def forward(self, positions: Tensor) -> Rope:
        """cos and sin, each [len(positions), 1, D]."""
        return self.cos[positions], self.sin[positions]


def rope_frequencies(config: DrafterConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [D/2] and the factor on cos and sin, as transformers computes them for Qwen3."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    parameters: dict[str, Any] = {
        "rope_type": "default",
        **(config.rope_scaling or {}),
        "rope_theta": config.rope_theta,
    }
    qwen = Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=parameters,
    )
    rotary = Qwen3RotaryEmbedding(qwen)
    return rotary.inv_freq.float(), float(rotary.attention_scaling)


def rotate(x_TXD: Tensor, rope: Rope) -> Tensor:
    """Rotate pairs (d, d + D/2) by the token's angle."""
    cos, sin = rope
    first, second = x_TXD.chunk(2, dim=-1)
    return x_TXD * cos + torch.cat((-second, first), dim=-1) * sin
