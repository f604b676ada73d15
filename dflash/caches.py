"""The target while it decodes, and the two caches of a batch. Both hold keys and values by position.

A row writes a token's keys and values at the token's own position, so what comes after a rejected draft overwrites
it: nothing is cropped, moved or computed twice, rows of one batch may stand at different positions, and the shapes of
a step never change, which lets a CUDA graph replay it. Behind the last position lies one slot for what belongs
nowhere (padding, and rows that have ended).

Axes: R rows (prompts), T tokens, B block, V vocabulary, G kv heads, D head dim, F = K·H tapped features.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dflash.drafter import Drafter, RopeTable
from dflash.errors import DflashError
from dflash.loss import Head
from dflash.target import TargetSpec, decoder_layers, head_weight, text_config

ATTENTION = {"full_attention", "sliding_attention"}


class TappedTarget:
    """A target and its frozen parts; while `tapped()`, the outputs of its tapped layers of the last forward."""

    def __init__(self, model: Any, spec: TargetSpec, taps: Sequence[int]) -> None:
        self.model = model
        self.spec = spec
        self.taps = tuple(taps)
        self.embed_VH: Tensor = model.get_input_embeddings().weight
        self.head = Head(head_weight(model), spec.logit_scale / spec.logit_divisor, spec.softcap)
        self.device = self.embed_VH.device
        self._outputs: dict[int, Tensor] = {}
        # transformers renamed the argument within version 5
        self._cache_name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
        if stateful := stateful_layers(model):
            raise DflashError(
                f"Target {spec.name} has {', '.join(stateful)} layers, whose state cannot be rolled back after a "
                "rejected draft; evaluate its drafter in a server."
            )

    @property
    def bytes_per_token(self) -> int:
        """Of its keys and values."""
        config = text_config(self.model.config)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * int(config.num_hidden_layers * heads * dim) * self.embed_VH.element_size()

    @contextmanager
    def tapped(self) -> Iterator[None]:
        """Hooks live only as long as they are needed: a model given to us is given back as it was."""
        layers = decoder_layers(self.model)
        hooks = [layers[tap].register_forward_hook(self._keep(tap)) for tap in self.taps]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _keep(self, tap: int) -> Callable[[nn.Module, object, Any], None]:
        def hook(module: nn.Module, inputs: object, output: Any) -> None:
            self._outputs[tap] = output[0] if isinstance(output, tuple) else output

        return hook

    def taps_RTF(self) -> Tensor:
        """The tapped states of the last forward."""
        return torch.cat([self._outputs[tap] for tap in self.taps], dim=-1)

    def logits(self, ids_RT: Tensor, keep: int, cache: Cache, **arguments: Any) -> Tensor:
        """The model's own logits [R, keep, V] of the last tokens."""
        arguments[self._cache_name] = cache
        # by index where that is not all: transformers' slice of several rows would copy the head for each on a CPU
        tokens = ids_RT.shape[1]
        last = keep if keep == tokens else torch.arange(tokens - keep, tokens, device=ids_RT.device)
        config = text_config(self.model.config)
        usual = config._attn_implementation
        config._attn_implementation = "dflash" if usual == "sdpa" else usual
        try:
            return self.model(input_ids=ids_RT, use_cache=True, logits_to_keep=last, **arguments).logits
        finally:
            config._attn_implementation = usual


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' sdpa attention, but the query heads of a kv head are laid behind each other as its queries, where
    transformers repeats keys and values for each: copies of the whole cache, two thirds of a small target's step.

    query [R, Q, T, D], key and value [R, G, L, D], an additive mask [R, 1, T, L].
    """
    groups, tokens = key.shape[1], query.shape[2]
    if attention_mask is None or attention_mask.shape[1] != 1 or query.shape[1] == groups:
        out: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return out
    each = query.shape[1] // groups
    packed = query.unflatten(1, (groups, each)).flatten(2, 3)  # [R, G, Q/G · T, D]
    mask = attention_mask.expand(-1, each, -1, -1).flatten(1, 2)[:, None]
    out_RGXD = nn.functional.scaled_dot_product_attention(packed, key, value, mask, scale=options.get("scaling"))
    return out_RGXD.unflatten(2, (each, tokens)).flatten(1, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register("dflash", grouped_attention)
AttentionMaskInterface.register("dflash", sdpa_mask)


def stateful_layers(model: Any) -> list[str]:
    """Kinds of layers that are not attention over a cache of keys and values."""
    return sorted(set(getattr(text_config(model.config), "layer_types", None) or ()) - ATTENTION)


@dataclass
class _Places:
    """Where the next forward's tokens go, for all layers."""

    rows_R1: Tensor
    positions_RT: Tensor
    end: int | None = None  # attend to the slots before it; None: a prompt, which attends to itself


class _Slots(DynamicLayer):
    """One layer's keys and values [R, positions + 1, G, D], as transformers' layers ask for them."""

    def __init__(self, places: _Places, rows: int, positions: int) -> None:
        super().__init__()
        self.places, self.rows, self.positions = places, rows, positions

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def slots(like: Tensor) -> Tensor:
            return like.new_zeros(self.rows, self.positions + 1, like.shape[1], like.shape[3])

        self.keys, self.values = slots(key_states), slots(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None, "made by the line above"
        assert self.values is not None, "made by the line above"
        where, end = (self.places.rows_R1, self.places.positions_RT), self.places.end
        self.keys[where] = key_states.transpose(1, 2)
        self.values[where] = value_states.transpose(1, 2)
        if end is None:
            return key_states, value_states
        return self.keys[:, :end].transpose(1, 2), self.values[:, :end].transpose(1, 2)

    def get_seq_length(self) -> int:
        return 0  # positions and masks are always given

    def select(self, rows: Tensor) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]


class TargetCache:
    """The target's cache of a batch of rows."""

    def __init__(self, target: TappedTarget, rows: int, positions: int) -> None:
        config = text_config(target.model.config)
        self.target, self.nowhere = target, positions
        self.places = _Places(torch.empty(0), torch.empty(0))
        self.layers = [_Slots(self.places, rows, positions) for _ in range(config.num_hidden_layers)]
        self.cache = Cache(layers=list(self.layers))
        self.window = getattr(config, "sliding_window", None)
        self.kinds = set(getattr(config, "layer_types", None) or ())

    def prefill(self, rows_R: Tensor, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Logits [R, V] after the prompts of these rows, and the position of each token [R, T], `nowhere` for the
        padding, which is on the left, so that every prompt ends in the last column."""
        device, width = self.target.device, max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
        padding = torch.tensor([[width - len(p)] for p in prompts], device=device)
        positions = torch.arange(width, device=device) - padding
        places = torch.where(positions < 0, self.nowhere, positions)
        self.places.rows_R1, self.places.positions_RT, self.places.end = rows_R[:, None], places, None
        arguments: dict[str, Tensor] = {"position_ids": positions.clamp(min=0)}
        if len(set(map(len, prompts))) > 1:
            arguments["attention_mask"] = (positions >= 0).long()
        return self.target.logits(ids, 1, self.cache, **arguments)[:, 0], places

    def step(self, ids_RT: Tensor, positions_RT: Tensor, end: int) -> Tensor:
        """Logits [R, T, V] of all rows' next tokens, at positions before `end` or nowhere."""
        self.places.rows_R1 = torch.arange(len(ids_RT), device=ids_RT.device)[:, None]
        self.places.positions_RT, self.places.end = positions_RT, end
        mask = self._masks(positions_RT, end)
        return self.target.logits(ids_RT, ids_RT.shape[1], self.cache, position_ids=positions_RT, attention_mask=mask)

    def _masks(self, positions_RT: Tensor, end: int) -> Tensor | dict[str, Tensor]:
        """Additive [R, 1, T, end], which every attention of transformers takes; one a kind of layer if they differ."""
        slots, here = torch.arange(end, device=positions_RT.device), positions_RT[:, None, :, None]
        full = slots <= here
        if self.window is None:
            return self._additive(full)
        sliding = self._additive(full & (slots > here - self.window))
        if len(self.kinds) < 2:
            return self._additive(full) if self.kinds == {"full_attention"} else sliding
        return {"full_attention": self._additive(full), "sliding_attention": sliding}

    def _additive(self, visible: Tensor) -> Tensor:
        dtype = self.target.embed_VH.dtype
        return torch.where(visible, 0.0, torch.finfo(dtype).min).to(dtype)

    def select(self, rows: Tensor) -> None:
        for layer in self.layers:
            layer.select(rows)


class DraftCache:
    """Keys and values of the drafter's context, per drafter layer. A block's own lie behind the context's end."""

    def __init__(self, drafter: Drafter, rows: int, positions: int, like: Tensor) -> None:
        config = drafter.config
        shape = (config.num_layers, rows, positions + 1, config.num_kv_heads, config.head_dim)
        self.keys, self.values, self.nowhere = like.new_zeros(shape), like.new_zeros(shape), positions

    def write(self, layer: int, rows_R: Tensor, positions_RT: Tensor, keys: Tensor, values: Tensor) -> None:
        self.keys[layer][rows_R[:, None], positions_RT] = keys
        self.values[layer][rows_R[:, None], positions_RT] = values

    def append(self, drafter: Drafter, rows_R: Tensor, taps_RTF: Tensor, places_RT: Tensor, rope: RopeTable) -> None:
        """Context of new tokens at their positions, or nowhere."""
        for layer, (keys, values) in enumerate(drafter.context_keys_values(taps_RTF, rope(places_RT))):
            self.write(layer, rows_R, places_RT, keys, values)

    def select(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
