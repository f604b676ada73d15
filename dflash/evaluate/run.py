"""`dflash eval`: decode every prompt with the target alone and with the drafter, compare and count; or simulate.

Greedy outputs must be the target's own: `identical`, or `ties` where rounding in another batch shape decides between
two logits, or `wrong`. With a temperature outputs differ by chance and are not compared.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash.evaluate.config import EvalConfig
from dflash.evaluate.figures import Answer, figures, paired_difference, repeated_ngrams
from dflash.evaluate.pair import Pair, RenderPrompt, open_pair
from dflash.evaluate.play import Clock, Turn, answer, batches
from dflash.progress import progress
from dflash.signals import catch_stop

ReadPrompts = Callable[[Sequence[str], int | None], list[Any]]
VERDICTS = ("identical", "ties", "wrong")


def evaluate(config: EvalConfig, read_prompts: ReadPrompts, render_prompt: RenderPrompt) -> dict[str, Any]:
    """Decode, compare, count; the JSON keys are those of design section 8 and more."""
    if config.store is not None:
        from dflash.evaluate.stored import evaluate_store

        return evaluate_store(config)
    began = time.perf_counter()
    prompts = read_prompts(config.prompts, config.limit)
    pair = open_pair(config, prompts, render_prompt)
    turns: list[Turn] = []
    clock = Clock()
    total = sum(max(1, len(prompt.turns)) for prompt in prompts)
    with catch_stop() as stop, progress("Evaluating", total, "answers") as advance:
        for batch in batches(prompts, pair, config, render_prompt, turns):
            stop.check("nothing of an evaluation is kept; run `dflash eval` again.")
            turns += answer(batch, prompts, pair, config, clock)
            advance(len(batch))
    turns.sort(key=lambda turn: turn.prompt)  # stable: a prompt's turns stay in order
    result = summarise(turns, prompts, clock, pair, config)
    return result | {"wall_seconds": time.perf_counter() - began}


def summarise(
    turns: list[Turn], prompts: Sequence[Any], clock: Clock, pair: Pair, config: EvalConfig
) -> dict[str, Any]:
    own_tokens = sum(len(turn.own.output_ids) for turn in turns)
    baseline = own_tokens / clock.own
    ours = of_drafter(0, turns, prompts, clock, pair, config, baseline)
    result = {
        **ours,
        "repeated_ngrams": repeated_ngrams([turn.own.output_ids for turn in turns]),
        "prompts": len(prompts),
        "answers": len(turns),
        "tokens": sum(len(turn.drafted[0].output_ids) for turn in turns),
        "seconds": clock.own + sum(clock.drafted),
        "temperature": config.temperature,
        "dtype": str(pair.ours.target.embed_VH.dtype).removeprefix("torch."),
        "device": pair.ours.target.device.type,
    }
    if pair.other is not None:
        other = of_drafter(1, turns, prompts, clock, pair, config, baseline)
        one, two = (answers_of(turns, prompts, number) for number in (0, 1))
        difference = paired_difference(one, two, config.seed) | {
            "speed_ratio": ours["tokens_per_second"] / other["tokens_per_second"]
        }
        result["compare"] = {"drafter": config.compare, **other, "difference": difference}
    if config.details:
        result["responses"] = [details(turn) for turn in turns]
    return result


def of_drafter(
    number: int, turns: list[Turn], prompts: Sequence[Any], clock: Clock, pair: Pair, config: EvalConfig,
    baseline: float,
) -> dict[str, Any]:  # fmt: skip
    """Figures, verdicts and speed of drafter `number`."""
    verdicts = [turn.verdicts[number] for turn in turns]
    greedy = config.temperature == 0
    slots = pair.sides[number].drafter.config.block_size - 1
    rate = sum(len(turn.drafted[number].output_ids) for turn in turns) / clock.drafted[number]
    return {
        **figures(answers_of(turns, prompts, number), slots, config.seed),
        **{name: verdicts.count(name) if greedy else None for name in VERDICTS},
        "lossless": "wrong" not in verdicts if greedy else None,
        "tokens_per_second": rate,
        "baseline_tokens_per_second": baseline,
        "speedup": rate / baseline,
        "block_size": slots + 1,
    }


def answers_of(turns: Sequence[Turn], prompts: Sequence[Any], number: int) -> list[Answer]:
    """The answers of drafter `number` as the figures take them."""
    return [
        Answer(
            turn.prompt, category(prompts[turn.prompt]), len(turn.prompt_ids), response.acceptance_lengths,
            response.drafted, response.accepted,
        )
        for turn in turns
        for response in [turn.drafted[number]]
    ]  # fmt: skip


def category(prompt: Any) -> str:
    """What the prompt's line says under `category`, else the name of its file."""
    return str(prompt.extra.get("category") or Path(prompt.file).stem)


def details(turn: Turn) -> dict[str, Any]:
    return {
        "prompt": turn.prompt,
        "prompt_ids": turn.prompt_ids,
        "output_ids": turn.drafted[0].output_ids,
        "acceptance_lengths": turn.drafted[0].acceptance_lengths,
        "verdict": turn.verdicts[0],
    }
