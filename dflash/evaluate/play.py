"""Prompts played turn by turn: batches of similar length, each decoded with the target alone and with the drafter."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dflash.decode import decode_plain, decode_speculative
from dflash.errors import DflashError
from dflash.evaluate.config import EvalConfig
from dflash.evaluate.pair import Pair, RenderPrompt
from dflash.response import Response, first_difference
from dflash.sampling import Sampling

BATCH_SIZE = {"cuda": 256, "cpu": 8}


@dataclass(frozen=True)
class Turn:
    """One answered prompt: what went in, the target's own answer, and that of each drafter with its verdict.

    `verdicts` hold identical, ties or wrong; None when sampled.
    """

    prompt: int
    prompt_ids: list[int]
    own: Response
    drafted: list[Response]
    verdicts: list[str | None]


@dataclass
class Clock:
    """Seconds of decoding without a drafter and with each."""

    own: float = 0.0
    drafted: list[float] = field(default_factory=lambda: [0.0, 0.0])


def batches(
    prompts: Sequence[Any], pair: Pair, config: EvalConfig, render_prompt: RenderPrompt, turns: list[Turn]
) -> Iterator[list[tuple[int, list[int]]]]:
    """(prompt number, ids) in batches of similar length; first all first turns, then all second ones, ….

    Between two turns stand the target's own answers, which the caller adds to `turns`.
    """
    size = config.batch_size or BATCH_SIZE[pair.ours.target.device.type]
    histories: list[list[Any]] = [[] for _ in prompts]
    for number in range(max(max(1, len(prompt.turns)) for prompt in prompts)):
        latest = {turn.prompt: turn for turn in turns}
        for turn in latest.values() if number else ():
            history = histories[turn.prompt]
            if history and history[-1]["role"] != "assistant":
                kept = [token for token in turn.own.output_ids if token not in pair.stop_ids]
                text = pair.tokenizer.decode(kept, skip_special_tokens=True)
                history.append({"role": "assistant", "content": text})
        asked = []
        for place, prompt in enumerate(prompts):
            if prompt.input_ids is not None and number == 0:
                asked.append((place, list(prompt.input_ids)))
            elif number < len(prompt.turns):
                histories[place].extend(prompt.turns[number])
                arguments = config.template_args | prompt.template_args
                asked.append((place, render_prompt(histories[place], pair.tokenizer, arguments, prompt.tools)))
        asked.sort(key=lambda item: len(item[1]))
        yield from (asked[first : first + size] for first in range(0, len(asked), size))


def answer(
    batch: list[tuple[int, list[int]]], asked: Sequence[Any], pair: Pair, config: EvalConfig, clock: Clock
) -> list[Turn]:
    """All ways of decoding a batch, timed. Decoding reads tokens back, so the host's clock is the device's too."""
    target = pair.ours.target
    context = target.spec.max_position_embeddings
    prompts = [ids for _, ids in batch]
    for number, ids in batch:
        if len(ids) >= context:
            place = f"{asked[number].file}, line {asked[number].line}"
            raise DflashError(
                f"{place}: with the answers before it the prompt has {len(ids)} tokens, but target {config.target} "
                f"holds {context}; shorten it."
            )
    limits = [min(config.max_new_tokens, context - len(ids)) for ids in prompts]

    def sampling() -> Sampling:
        seed = config.seed * 1_000_003 + batch[0][0]
        return Sampling(temperature=config.temperature, generator=torch.Generator(target.device).manual_seed(seed))

    start = time.perf_counter()
    own = decode_plain(target, prompts, limits, pair.stop_ids, sampling())
    clock.own += time.perf_counter() - start
    drafted = []
    for number, side in enumerate(pair.sides):
        start = time.perf_counter()
        drafted.append(decode_speculative(side.target, side.drafter, prompts, limits, pair.stop_ids, sampling()))
        clock.drafted[number] += time.perf_counter() - start
    turns = []
    for (number, ids), theirs, *ours in zip(batch, own, *drafted, strict=True):
        greedy = config.temperature == 0
        verdicts = [first_difference(each, theirs) if greedy else None for each in ours]
        turns.append(Turn(number, ids, theirs, ours, verdicts))
    return turns
