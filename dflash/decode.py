"""Speculative decoding: the drafter proposes a block, the target verifies it in one forward (DFlash paper, section 3).

A cycle: the anchor is the newest token, known but without a state. The drafter sees the cached context strictly before
it and fills B-1 mask slots; the target runs on the block; drafts are accepted while they equal what the target itself
says, and the target's next token comes on top. So a cycle yields accepted + 1 tokens, and the text is the target's own.
With a temperature the target's token is sampled and a draft is accepted when it equals the sample, which keeps the
target's distribution exactly.

Prompts are decoded in batches; each row has its own acceptance (dflash/caches.py keeps the books).

Axes: R rows (prompts), T tokens, B block, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.caches import DraftCache, TappedTarget, TargetCache
from dflash.drafter import Drafter, RopeTable, embed_blocks


@dataclass(frozen=True)
class Response:
    """One decoded answer.

    acceptance_lengths: tokens kept of every cycle (accepted drafts + 1; the last may be cut by a stop token or the
    limit). drafted, accepted: per slot 1..B-1, in how many cycles the slot was proposed, and accepted with all before.
    """

    output_ids: list[int] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the target chooses tokens: its argmax at temperature 0 (ties: smallest id), else a sample."""

    temperature: float = 0.0
    generator: torch.Generator | None = None

    def choose(self, logits: Tensor) -> Tensor:
        """int64 [...] of logits [..., V]."""
        if self.temperature == 0.0:
            return logits.argmax(dim=-1)
        probabilities = torch.softmax(logits.float() / self.temperature, dim=-1)
        drawn = torch.multinomial(probabilities.flatten(0, -2), 1, generator=self.generator)
        return drawn.view(logits.shape[:-1])


GREEDY = Sampling()


def draft(
    drafter: Drafter, target: TappedTarget, cache: DraftCache, anchors_R: Tensor, lengths_R: Tensor, rope: RopeTable
) -> Tensor:
    """The proposed tokens [R, B-1] behind the anchors; always the drafter's argmax."""
    config = drafter.config
    factor = target.spec.embed_factor
    x_RBH = embed_blocks(target.embed_VH, factor, anchors_R, config.mask_token_id, config.block_size)
    positions = lengths_R[:, None] + torch.arange(config.block_size, device=lengths_R.device)
    end = int(lengths_R.max()) + config.block_size
    visible = torch.arange(end, device=lengths_R.device) < lengths_R[:, None] + config.block_size
    hidden, rotation = x_RBH, rope(positions)
    for number, layer in enumerate(drafter.all_layers()):

        def attend(q: Tensor, _k: Tensor, _v: Tensor, block_k: Tensor, block_v: Tensor, number: int = number) -> Tensor:
            cache.write(number, positions, block_k, block_v)
            keys, values = (part[number][:, :end].transpose(1, 2) for part in (cache.keys, cache.values))
            mask = visible[:, None, None]
            out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask, enable_gqa=True)
            return out.transpose(1, 2)

        hidden = layer(hidden, rotation, (cache.keys, cache.values), attend)
    return target.head.logits(drafter.norm(hidden)[:, 1:]).argmax(dim=-1)


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
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    stop_ids: Sequence[int] = (),
    sampling: Sampling = GREEDY,
) -> list[Response]:
    """The target alone, one token a forward: the baseline. `limits`: most new tokens of each prompt."""
    cache = TargetCache(target, prompts)
    batch = _Batch(prompts, limits, stop_ids, slots=0)
    tokens = sampling.choose(cache.prefill()[0])
    while rows := batch.add([[token] for token in tokens.tolist()]):
        if len(rows) < len(tokens):
            index = torch.tensor(rows, device=target.device)
            cache.select(index)
            tokens = tokens[index]
        logits = cache.step(tokens[:, None])
        cache.keep(torch.ones_like(tokens), 1)
        tokens = sampling.choose(logits[:, 0])
    return batch.responses


@torch.inference_mode()
def decode_speculative(
    target: TappedTarget,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    stop_ids: Sequence[int] = (),
    sampling: Sampling = GREEDY,
) -> list[Response]:
    """Target and drafter together; see the module docstring. The first token, from the prefill, is no cycle."""
    block, device = drafter.config.block_size, target.device
    positions = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)) + 2 * block
    rope = RopeTable(drafter.config, positions, target.embed_VH.dtype, device)
    cache, drafts = TargetCache(target, prompts), DraftCache(drafter, len(prompts), positions, target.embed_VH)
    batch = _Batch(prompts, limits, stop_ids, slots=block - 1)
    with target.tapped():
        logits, places = cache.prefill()
        drafts.append(drafter, target.taps_RTF(), places, rope)
        anchors = sampling.choose(logits)
        rows = batch.add([[token] for token in anchors.tolist()])
        while rows:
            if len(rows) < len(anchors):
                index = torch.tensor(rows, device=device)
                cache.select(index)
                drafts.select(index)
                anchors = anchors[index]
            before = cache.lengths
            proposal = draft(drafter, target, drafts, anchors, before, rope)
            own = sampling.choose(cache.step(torch.cat((anchors[:, None], proposal), 1)))
            good = (proposal == own[:, :-1]).long().cumprod(1).sum(1)
            # rejected rows are written too: they lie behind the context's end, where the next block overwrites them
            places = before[:, None] + torch.arange(block, device=device)
            drafts.append(drafter, target.taps_RTF(), places, rope)
            cache.keep(good + 1, block)
            anchors = own.gather(1, good[:, None])[:, 0]
            cycles = zip(proposal.tolist(), good.tolist(), anchors.tolist(), strict=True)
            rows = batch.add([[*tokens[:n], bonus] for tokens, n, bonus in cycles], cycle=True)
    return batch.responses


class _Batch:
    """The answers of a batch while they grow, and which rows are still going."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], stop_ids: Sequence[int], slots: int
    ) -> None:
        self.limits, self.stop_ids = list(limits), tuple(stop_ids)
        self.responses = [Response(drafted=[0] * slots, accepted=[0] * slots) for _ in prompts]
        self.active = list(range(len(prompts)))

    def add(self, tokens: list[list[int]], cycle: bool = False) -> list[int]:
        """Add each active row's new tokens; returns which of the rows (by place among the active) go on."""
        going = []
        for place, (number, new) in enumerate(zip(self.active, tokens, strict=True)):
            response = self.responses[number]
            kept, ended = kept_tokens(new, self.limits[number] - len(response.output_ids), self.stop_ids)
            response.output_ids.extend(kept)
            if cycle:
                response.acceptance_lengths.append(len(kept))
                _count(response, good=len(new) - 1, kept=len(kept))
            if not ended:
                going.append(place)
        self.active = [self.active[place] for place in going]
        return going


def _count(response: Response, good: int, kept: int) -> None:
    """Slot statistics of a cycle; slots past the end of the text were never asked for."""
    whole = kept == good + 1  # else the text ended inside the block
    for slot in range(len(response.drafted) if whole else kept):
        response.drafted[slot] += 1
        response.accepted[slot] += slot < good


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
    ids = torch.tensor([[*prompt_ids, *baseline[:where]]], device=target.device)
    logits = target.logits(ids, keep=1)[0, -1]
    ours, own = logits[output[where]].float(), logits[baseline[where]].float()
    ulp = torch.finfo(logits.dtype).eps * 2 ** torch.floor(torch.log2(torch.maximum(ours.abs(), own.abs())))
    return "ties" if (own - ours).abs() <= ulps * ulp else "wrong"
