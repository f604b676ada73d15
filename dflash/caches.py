"""The target while it decodes, and the two caches of a batch: nothing in them is ever computed twice.

The target's cache grows slot by slot. What every row rejected is cropped; what only some rows rejected is masked, and
once the masked slots outweigh the rest, the valid ones move to the front. The drafter's cache is written by position,
so the next block overwrites what was rejected.

Axes: R rows (prompts), T tokens, B block, V vocabulary, F = K·H tapped features.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from dflash.drafter import Drafter, RopeTable
from dflash.errors import DflashError
from dflash.loss import Head
from dflash.target import TargetSpec, decoder_layers, head_weight, text_config

HOLES_ALLOWED = 64  # masked slots before the target's cache is worth compacting


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
        config = text_config(model.config)
        kinds = set(getattr(config, "layer_types", None) or ())
        if kinds - {"full_attention", "sliding_attention"}:
            raise DflashError(
                f"Target {spec.name} has {', '.join(sorted(kinds - {'full_attention', 'sliding_attention'}))} layers, "
                "whose state cannot be rolled back after a rejected draft; dflash decodes attention-only targets."
            )
        # a sliding window is counted in cache slots, which holes would shift
        self.batchable = "sliding_attention" not in kinds and not getattr(config, "sliding_window", None)

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

    def logits(self, ids_RT: Tensor, keep: int, cache: DynamicCache | None = None, **arguments: Any) -> Tensor:
        """The model's own logits [R, keep, V] of the last tokens behind what the cache holds."""
        if cache is not None:
            arguments[self._cache_name] = cache
        return self.model(input_ids=ids_RT, use_cache=cache is not None, logits_to_keep=keep, **arguments).logits


class TargetCache:
    """The target's cache of a batch: slots in the order of computation, some masked (left padding, rejected tokens)."""

    def __init__(self, target: TappedTarget, prompts: Sequence[Sequence[int]]) -> None:
        self.target = target
        self.masked = len(prompts) > 1  # one prompt alone never has a hole
        self.cache = DynamicCache()  # without a config: plain layers, also where the model's window slides
        width = max(map(len, prompts))
        rows = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        self.prompt_ids = torch.tensor(rows, device=target.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=target.device)
        self.valid = torch.arange(width, device=target.device) >= width - lengths[:, None]  # [R, slots]
        self.lengths = torch.zeros_like(lengths)  # tokens with a state

    def prefill(self) -> tuple[Tensor, Tensor]:
        """Logits [R, V] after the prompts, and the position of each prompt token [R, T], -1 for padding."""
        positions = self.valid.long().cumsum(1) - 1
        logits = self._forward(self.prompt_ids, positions.clamp(min=0), keep=1)[:, 0]
        self.lengths = self.valid.sum(1)
        return logits, torch.where(self.valid, positions, -1)

    def step(self, ids_RT: Tensor) -> Tensor:
        """Logits [R, T, V] of new tokens at the end of every row; `keep` then says how many of them stay."""
        tokens = ids_RT.shape[1]
        self.valid = torch.cat((self.valid, self.valid.new_ones(ids_RT.shape)), 1)
        positions = self.lengths[:, None] + torch.arange(tokens, device=ids_RT.device)
        return self._forward(ids_RT, positions, keep=tokens)

    def _forward(self, ids: Tensor, positions: Tensor, keep: int) -> Tensor:
        masks = {"attention_mask": self.valid.long()} if self.masked else {}
        return self.target.logits(ids, keep, self.cache, position_ids=positions, **masks)

    def keep(self, kept_R: Tensor, tokens: int) -> None:
        """Of the last `tokens` slots, the first kept_R[r] stay in row r."""
        slots = torch.arange(tokens, device=kept_R.device)
        self.valid[:, -tokens:] = slots < kept_R[:, None]
        self.lengths = self.lengths + kept_R
        surplus = tokens - int(kept_R.max())
        if surplus:
            self.cache.crop(-surplus)  # negative: so many tokens less, which every transformers 5 understands
            self.valid = self.valid[:, :-surplus]
        if self.valid.shape[1] > 1.5 * int(self.lengths.max()) + HOLES_ALLOWED:
            self._compact()

    def _compact(self) -> None:
        """Move every row's valid slots to the front."""
        width = int(self.lengths.max())
        order = torch.argsort((~self.valid).to(torch.int8), dim=1, stable=True)[:, :width]
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                old = getattr(layer, name)
                index = order[:, None, :, None].expand(-1, old.shape[1], -1, old.shape[3])
                setattr(layer, name, old.gather(2, index))
        self.valid = torch.arange(width, device=order.device) < self.lengths[:, None]

    def select(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.valid, self.lengths = self.valid[rows], self.lengths[rows]


class DraftCache:
    """Keys and values of the context by position, per drafter layer. A block's own lie behind the context's end and
    are overwritten by what comes next, so nothing is ever cropped. The last slot takes what belongs nowhere."""

    def __init__(self, drafter: Drafter, rows: int, positions: int, like: Tensor) -> None:
        config = drafter.config
        shape = (config.num_layers, rows, positions + 1, config.num_kv_heads, config.head_dim)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)

    def write(self, layer: int, positions_RT: Tensor, keys: Tensor, values: Tensor) -> None:
        rows = torch.arange(len(positions_RT), device=positions_RT.device)[:, None]
        self.keys[layer][rows, positions_RT] = keys
        self.values[layer][rows, positions_RT] = values

    def append(self, drafter: Drafter, taps_RTF: Tensor, positions_RT: Tensor, rope: RopeTable) -> None:
        """Context of new tokens; position -1 is nowhere."""
        rotation = rope(positions_RT.clamp(min=0))
        for layer, (keys, values) in enumerate(drafter.context_keys_values(taps_RTF, rotation)):
            self.write(layer, positions_RT, keys, values)

    def select(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
