"""Speculative decoding: the drafter proposes a block, the target verifies it in one forward (DFlash paper, section 3).

A cycle: the anchor is the newest token, known but without a state. The drafter sees the cached context strictly
before it and fills B-1 mask slots; the target runs on the block; drafts are accepted while they equal what the target
itself says, and the target's next token comes on top. So a cycle yields accepted + 1 tokens, and the text is the
target's own.

Both caches are cropped and appended to, never rebuilt. With a temperature the target's token is sampled and a draft is
accepted when it equals the sample, which keeps the target's distribution exactly.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from dflash.attention import attend_blocks
from dflash.drafter import Drafter, RopeTable, embed_blocks
from dflash.loss import Head
from dflash.target import TargetSpec, decoder_layers, head_weight


@dataclass(frozen=True)
class Response:
    """One decoded answer.

    acceptance_lengths: tokens kept of every cycle (accepted drafts + 1; the last may be cut by a stop token or the
    limit). drafted, accepted: per slot 1..B-1, in how many cycles the slot was proposed, and accepted with all slots
    before it.
    """

    output_ids: list[int]
    acceptance_lengths: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


class TappedTarget:
    """A target with a cache, and the outputs of its tapped layers of the last forward."""

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

    def forward(self, ids: Tensor, cache: DynamicCache, keep_logits: int) -> tuple[Tensor, Tensor]:
        """Logits [keep, V] of the last tokens, taps [T, K·H] of all tokens of `ids` [T]."""
        logits = self.logits(ids, cache, keep_logits)
        return logits, torch.cat([self._outputs[tap][0] for tap in self.taps], dim=-1)

    def logits(self, ids: Tensor, cache: DynamicCache | None, keep_logits: int) -> Tensor:
        """The model's own logits [keep, V] of the last tokens of `ids` [T] behind what the cache holds."""
        kept = {self._cache_name: cache} if cache is not None else {}
        return self.model(input_ids=ids[None], use_cache=cache is not None, logits_to_keep=keep_logits, **kept).logits[
            0
        ]


class DraftCache:
    """Keys and values of the context, per drafter layer, in buffers made once for the longest text."""

    def __init__(self, drafter: Drafter, positions: int, like: Tensor) -> None:
        config = drafter.config
        shape = (config.num_layers, positions, config.num_kv_heads, config.head_dim)
        self.keys, self.values = like.new_empty(shape), like.new_empty(shape)
        self.length = 0

    def append(self, drafter: Drafter, taps_TF: Tensor, rope: RopeTable) -> None:
        end = self.length + taps_TF.shape[0]
        positions = torch.arange(self.length, end, device=taps_TF.device)
        for layer, (keys, values) in enumerate(drafter.context_keys_values(taps_TF, rope(positions))):
            self.keys[layer, self.length : end] = keys
            self.values[layer, self.length : end] = values
        self.length = end

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        return [
            (keys[: self.length], values[: self.length]) for keys, values in zip(self.keys, self.values, strict=True)
        ]


def draft(drafter: Drafter, target: TappedTarget, cache: DraftCache, anchor_id: int, rope: RopeTable) -> Tensor:
    """The B-1 proposed tokens after the anchor, int64; always the drafter's argmax."""
    config = drafter.config
    start, device = cache.length, target.device
    anchor = torch.tensor([anchor_id], device=device)
    x_BH = embed_blocks(target.embed_VH, target.spec.embed_factor, anchor, config.mask_token_id, config.block_size)[0]
    everything = torch.tensor([start], device=device)

    def attend(q: Tensor, k: Tensor, v: Tensor, block_k: Tensor, block_v: Tensor) -> Tensor:
        return attend_blocks(q, k, v, block_k, block_v, everything, config.block_size)

    slots = torch.arange(start, start + config.block_size, device=device)
    hidden = drafter.blocks(x_BH, rope(slots), cache.layers(), attend)
    return target.head.logits(hidden[1:]).argmax(dim=-1)


def choose(logits_TV: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """The target's tokens, int64 [T]: its argmax (ties: smallest id), or a sample at `temperature`."""
    if temperature == 0.0:
        return logits_TV.argmax(dim=-1)
    probabilities = torch.softmax(logits_TV.float() / temperature, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def kept_tokens(tokens: list[int], room: int, stop_ids: Sequence[int]) -> tuple[list[int], bool]:
    """The tokens that stay: at most `room`, up to and with the first stop token; and whether the text ends here."""
    tokens = tokens[:room]
    for index, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: index + 1], True
    return tokens, len(tokens) == room


@torch.inference_mode()
def decode_plain(
    target: TappedTarget,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Response:
    """The target alone, one token a forward: the baseline."""
    cache = DynamicCache()
    output: list[int] = []
    ids = torch.tensor(prompt_ids, device=target.device)
    while True:
        logits = target.logits(ids, cache, keep_logits=1)
        ids = choose(logits, temperature, generator)
        kept, ended = kept_tokens(ids.tolist(), max_new_tokens - len(output), stop_ids)
        output += kept
        if ended:
            return Response(output)


@torch.inference_mode()
def decode_speculative(
    target: TappedTarget,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Response:
    """Target and drafter together; see the module docstring. The first token, from the prefill, is no cycle."""
    block = drafter.config.block_size
    positions = len(prompt_ids) + max_new_tokens + 2 * block
    rope = RopeTable(drafter.config, positions, target.embed_VH.dtype, target.device)
    cache, drafts_cache = DynamicCache(), DraftCache(drafter, positions, target.embed_VH)
    lengths: list[int] = []
    drafted, accepted = [0] * (block - 1), [0] * (block - 1)
    with target.tapped():
        logits, taps = target.forward(torch.tensor(prompt_ids, device=target.device), cache, keep_logits=1)
        drafts_cache.append(drafter, taps, rope)
        output, ended = kept_tokens(choose(logits, temperature, generator).tolist(), max_new_tokens, stop_ids)
        while not ended:
            proposal = draft(drafter, target, drafts_cache, output[-1], rope)
            tokens = torch.cat((proposal.new_tensor(output[-1:]), proposal))
            logits, taps = target.forward(tokens, cache, keep_logits=block)
            own = choose(logits, temperature, generator)
            good = int((proposal == own[:-1]).long().cumprod(0).sum())
            cycle = [*proposal[:good].tolist(), int(own[good])]
            kept, ended = kept_tokens(cycle, max_new_tokens - len(output), stop_ids)
            _count(drafted, accepted, good, len(kept))
            output += kept
            lengths.append(len(kept))
            drafts_cache.append(drafter, taps[: good + 1], rope)
            if good + 1 < block:
                cache.crop(good + 1 - block)  # negative: so many tokens less, which every transformers 5 understands
    return Response(output, lengths, drafted, accepted)


def _count(drafted: list[int], accepted: list[int], good: int, kept: int) -> None:
    """Slot statistics of a cycle; slots past the end of the text were never asked for."""
    whole = kept == good + 1  # else the text ended inside the block
    for slot in range(len(drafted) if whole else kept):
        drafted[slot] += 1
        accepted[slot] += slot < good


@torch.inference_mode()
def first_difference(
    target: TappedTarget, prompt_ids: Sequence[int], output: Sequence[int], baseline: Sequence[int], ulps: float = 2.0
) -> str:
    """How a greedy output compares with the target's own: `identical`, `ties` or `wrong`.

    A tie: at the first difference the target's logits of the two tokens lie within `ulps` units in the last place of
    their dtype, so rounding in another batch shape decides. Lengths that differ without a tie before are wrong.
    """
    if list(output) == list(baseline):
        return "identical"
    pairs = zip(output, baseline, strict=False)
    where = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if where is None:
        return "wrong"
    ids = torch.tensor([*prompt_ids, *baseline[:where]], device=target.device)
    logits = target.logits(ids, None, keep_logits=1)[-1]
    ours, own = logits[output[where]].float(), logits[baseline[where]].float()
    ulp = torch.finfo(logits.dtype).eps * 2 ** torch.floor(torch.log2(torch.maximum(ours.abs(), own.abs())))
    return "ties" if (own - ours).abs() <= ulps * ulp else "wrong"
