"""Speculative decoding: the drafter proposes a block, the target verifies it in one forward (DFlash paper, section 3).

A cycle: the anchor is the newest token, known but without a state. The drafter sees the cached context strictly before
it and fills B-1 mask slots; the target runs on the block; drafts are accepted while they equal what the target itself
says, and the target's next token comes on top. So a cycle yields accepted + 1 tokens, and the text is the target's own.

With a temperature the target's token is drawn by inverting its distribution at one uniform number a place of the
answer, and a draft is accepted when it equals the draw: the target's distribution is kept exactly, and the same
numbers give the same answer with and without a drafter.

Prompts share a batch of rows: a row that is done takes the next prompt. A cycle is arithmetic on tensors of fixed
shape, so on a GPU it is captured and replayed (dflash/graphs.py); a CPU drops the rows that no prompt waits for.

Axes: R rows, T tokens, B block, V vocabulary.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.caches import DraftCache, TappedTarget, TargetCache
from dflash.drafter import Drafter, RopeTable, embed_blocks
from dflash.errors import DflashError
from dflash.graphs import Graphs, waits_for_the_host
from dflash.response import Response, count_slots, kept_tokens
from dflash.sampling import GREEDY, RIVALS, Sampling
from dflash.target import TargetSpec

END_STEP = 128  # on a GPU attention ends at a multiple of it: one graph for each
PREFILL_TOKENS = 65_536  # most padded prompt tokens of one forward


def decode_plain(
    target: TappedTarget,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    stop_ids: Sequence[int] = (),
    sampling: Sampling = GREEDY,
    rows: int | None = None,
) -> list[Response]:
    """The target alone, one token a forward: the baseline.

    Args:
        limits: most new tokens of each prompt.
        rows: prompts decoded at once; all unless given.
    """
    return _Decoder(target, None, prompts, limits, stop_ids, sampling, rows).run()


def decode_speculative(
    target: TappedTarget,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    stop_ids: Sequence[int] = (),
    sampling: Sampling = GREEDY,
    rows: int | None = None,
) -> list[Response]:
    """Target and drafter together; see the module docstring. The first token, from the prefill, is no cycle."""
    return _Decoder(target, drafter, prompts, limits, stop_ids, sampling, rows).run()


class _Decoder:
    """The rows of a batch. Tensors of rows keep their addresses from cycle to cycle."""

    def __init__(
        self,
        target: TappedTarget,
        drafter: Drafter | None,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        stop_ids: Sequence[int],
        sampling: Sampling,
        rows: int | None,
    ) -> None:
        self.target, self.drafter, self.sampling = target, drafter, sampling
        self.prompts, self.limits, self.stop_ids = prompts, list(limits), tuple(stop_ids)
        device = target.device
        self.block = drafter.config.block_size if drafter is not None else 1
        self.waiting = deque(range(len(prompts)))
        self.responses = [Response(drafted=[0] * (self.block - 1), accepted=[0] * (self.block - 1)) for _ in prompts]
        longest = max((len(p) + limit for p, limit in zip(prompts, limits, strict=True)), default=1)
        self.nowhere = longest + 2 * self.block
        count = min(rows or len(prompts), len(prompts), rows_that_fit(target, self.nowhere))
        self.prompt_of: list[int | None] = [None] * count
        self.cache = TargetCache(target, count, self.nowhere)
        if drafter is not None:
            self.drafts = DraftCache(drafter, count, self.nowhere, target.embed_VH)
            self.rope = RopeTable(drafter.config, self.nowhere + 1, target.embed_VH.dtype, device)
        self.anchors, self.lengths, self.answered, self.number = torch.zeros(4, count, dtype=torch.int64, device=device)
        self.uniforms = sampling.uniforms(len(prompts), max([1, *limits]), device)
        self.outcome = torch.zeros(count, (1 + RIVALS) * self.block + 1, dtype=torch.int64, device=device)
        self.graphs = Graphs(device) if device.type == "cuda" else None

    @torch.inference_mode()
    def run(self) -> list[Response]:
        tapped = self.target.tapped() if self.drafter is not None else nullcontext()
        with tapped:
            while True:
                self._admit()
                active = [row for row, prompt in enumerate(self.prompt_of) if prompt is not None]
                if not active:
                    break
                if self.graphs is None and len(active) < len(self.prompt_of) and not self.waiting:
                    self._keep_rows(active)
                self._cycle()
                self._collect(self.outcome.tolist())
        if self.graphs is not None:
            self.graphs.close()
        return self.responses

    def _admit(self) -> None:
        """Prompts into free rows. A GPU waits until an eighth of the rows is free: a prefill costs like a cycle."""
        free = [row for row, prompt in enumerate(self.prompt_of) if prompt is None]
        few = self.graphs is not None and 8 * len(free) < len(self.prompt_of)
        if few and len(self.waiting) >= len(free):
            return
        while free and self.waiting:
            rows: list[int] = []
            width = 0
            while free and self.waiting:
                width = max(width, len(self.prompts[self.waiting[0]]))
                if rows and width * (len(rows) + 1) > PREFILL_TOKENS:
                    break
                self.prompt_of[free[0]] = self.waiting.popleft()
                rows.append(free.pop(0))
            self._prefill(rows)
            free += [row for row in rows if self.prompt_of[row] is None]

    def _prefill(self, rows: list[int]) -> None:
        numbers = [number for row in rows if (number := self.prompt_of[row]) is not None]
        prompts = [self.prompts[number] for number in numbers]
        index = torch.tensor(rows, device=self.target.device)
        of = torch.tensor(numbers, device=self.target.device)
        logits, places = self.cache.prefill(index, prompts)
        if self.drafter is not None:
            self.drafts.append(self.drafter, index, self.target.taps_RTF(), places, self.rope)
        tokens, rivals = self.sampling.choose(logits[:, None], self.uniforms[of, :1])
        self.anchors[index], self.number[index], self.answered[index] = tokens[:, 0], of, 1
        self.lengths[index] = torch.tensor([len(prompt) for prompt in prompts], device=index.device)
        for row, token, rival in zip(rows, tokens[:, 0].tolist(), rivals[:, 0].tolist(), strict=True):
            self._add(row, [token], rival)

    def _keep_rows(self, rows: list[int]) -> None:
        index = torch.tensor(rows, device=self.target.device)
        for name in ("anchors", "lengths", "answered", "number", "outcome"):
            setattr(self, name, getattr(self, name)[index])
        self.cache.select(index)
        if self.drafter is not None:
            self.drafts.select(index)
        self.prompt_of = [self.prompt_of[row] for row in rows]

    def _cycle(self) -> None:
        """One cycle of all rows; on a GPU by a graph of its own for every end, unless the target waits for the host."""
        end = min(self.nowhere, self._longest() + self.block)
        if self.graphs is None:
            self._step(end)
            return
        end = min(self.nowhere, -(-end // END_STEP) * END_STEP)
        name = str(end)
        if name not in self.graphs.graphs and name not in self.graphs.plain:
            state = [part.clone() for part in (self.anchors, self.lengths, self.answered)]
            capture = not waits_for_the_host(lambda: self._step(end))
            self.graphs.prepare(name, lambda: self._step(end), capture, warm_up=1 if capture else 0)
            # what ran so far wrote its keys where the real cycle writes the same again
            for part, before in zip((self.anchors, self.lengths, self.answered), state, strict=True):
                part.copy_(before)
        self.graphs.run(name)

    def _longest(self) -> int:
        """Tokens with a state of the longest row."""
        pairs = [(self.prompts[number], self.responses[number]) for number in self.prompt_of if number is not None]
        return max(len(prompt) + len(response.output_ids) for prompt, response in pairs) - 1

    def _step(self, end: int) -> None:
        """Draft, verify, choose; `outcome` gets the target's own tokens, their rivals and how many drafts it took."""
        slots = torch.arange(self.block, device=self.anchors.device)
        positions = (self.lengths[:, None] + slots).clamp(max=self.nowhere)
        tokens = self.anchors[:, None]
        if self.drafter is not None:
            proposal = self._draft(self.drafter, positions, end)
            tokens = torch.cat((tokens, proposal), 1)
        logits = self.cache.step(tokens, positions, end)
        places = (self.answered[:, None] + slots).clamp(max=self.uniforms.shape[1] - 1)
        own, rivals = self.sampling.choose(logits, self.uniforms[self.number[:, None], places])
        taken = torch.zeros_like(self.anchors)
        if self.drafter is not None:
            taken = (tokens[:, 1:] == own[:, :-1]).long().cumprod(1).sum(1)
            # all B tokens get context; what was rejected lies behind the context's end, where the next block writes
            rows = torch.arange(len(tokens), device=tokens.device)
            self.drafts.append(self.drafter, rows, self.target.taps_RTF(), positions, self.rope)
        self.outcome.copy_(torch.cat((own, rivals.flatten(1), taken[:, None]), 1))
        self.anchors.copy_(own.gather(1, taken[:, None])[:, 0])
        self.lengths.add_(taken + 1)
        self.answered.add_(taken + 1)

    def _draft(self, drafter: Drafter, positions_RB: Tensor, end: int) -> Tensor:
        """The proposed tokens [R, B-1] behind the anchors; always the drafter's argmax."""
        config, cache, rope = drafter.config, self.drafts, self.rope(positions_RB)
        rows = torch.arange(len(positions_RB), device=positions_RB.device)
        embed, factor = self.target.embed_VH, self.target.spec.embed_factor
        hidden = embed_blocks(embed, factor, self.anchors, config.mask_token_id, config.block_size)
        seen, own = torch.arange(end, device=rows.device), positions_RB[..., None]
        masks: dict[int | None, Tensor] = {None: (seen < self.lengths[:, None] + config.block_size)[:, None, None]}
        if (width := config.sliding_window) is not None:  # causal and near, as in training (dflash/attention.py)
            masks[width] = ((seen <= own) & (seen > own - width))[:, None]
        for number, (layer, window) in enumerate(zip(drafter.all_layers(), config.windows, strict=True)):

            def attend(
                q: Tensor, _k: Tensor, _v: Tensor, keys: Tensor, values: Tensor,
                number: int = number, mask: Tensor = masks[window],
            ) -> Tensor:  # fmt: skip
                cache.write(number, rows, positions_RB, keys, values)
                k, v = (part[number][:, :end].transpose(1, 2) for part in (cache.keys, cache.values))
                return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask, enable_gqa=True).transpose(1, 2)

            hidden = layer(hidden, rope, (cache.keys, cache.values), attend)
        return self.target.head.logits(drafter.norm(hidden)[:, 1:]).argmax(dim=-1)

    def _collect(self, outcome: list[list[int]]) -> None:
        """The cycle's tokens into the answers."""
        for row, values in enumerate(outcome):
            if self.prompt_of[row] is not None:
                new = values[-1] + 1
                self._add(row, values[:new], values[self.block : -1], cycle=self.drafter is not None)

    def _add(self, row: int, tokens: list[int], rivals: list[int], cycle: bool = False) -> None:
        """Tokens of a row, and RIVALS numbers for each."""
        number = self.prompt_of[row]
        assert number is not None
        response = self.responses[number]
        kept, ended = kept_tokens(tokens, self.limits[number] - len(response.output_ids), self.stop_ids)
        response.output_ids.extend(kept)
        for place in range(len(kept)):
            response.rivals.append(tuple(rival for rival in rivals[RIVALS * place :][:RIVALS] if rival >= 0))
        if cycle:
            response.acceptance_lengths.append(len(kept))
            count_slots(response, good=len(tokens) - 1, kept=len(kept))
        if ended:
            self.prompt_of[row] = None


def check_ids(ids: Sequence[int], spec: TargetSpec, place: str) -> None:
    """Refuse a prompt of ready ids, some of which have no row in the target's embedding; a GPU would just die of it."""
    if max(ids) >= spec.vocab_size:
        raise DflashError(
            f"{place}: the token id {max(ids)} is none of target {spec.name}, whose embedding has {spec.vocab_size} "
            "rows; use prompts that its own tokenizer made."
        )


def rows_that_fit(target: TappedTarget, positions: int) -> int:
    """Rows whose keys and values take half of a GPU's free memory; the forwards need the rest. No limit on a CPU."""
    if target.device.type != "cuda":
        return 1 << 30
    free, _ = torch.cuda.mem_get_info(target.device)
    return max(1, free // 2 // (positions * target.bytes_per_token))
