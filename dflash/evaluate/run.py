"""`dflash eval`: decode every prompt with the target alone and with the drafter, and compare.

Greedy outputs must be the target's own: `identical`, or `ties` where rounding in another batch shape decides between
two logits, or `wrong`. With a temperature outputs differ by chance and are not compared.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash.caches import TappedTarget
from dflash.checkpoint import load_drafter, read_config, read_drafter
from dflash.decode import Response, Sampling, decode_plain, decode_speculative, first_difference
from dflash.drafter import Drafter, DrafterConfig
from dflash.errors import DflashError
from dflash.evaluate.config import EvalConfig
from dflash.progress import progress, say
from dflash.signals import catch_stop
from dflash.simulate import Tally
from dflash.target import (
    TargetSpec,
    as_dtype,
    load_target,
    load_tokenizer,
    resolve_target,
    stop_token_ids,
    weights_fingerprint,
)
from dflash.threads import set_threads

ReadPrompts = Callable[[Sequence[str], int | None], list[Any]]
RenderPrompt = Callable[..., list[int]]
BATCH_SIZE = {"cuda": 256, "cpu": 8}


@dataclass(frozen=True)
class Pair:
    """The target and its drafter, ready to decode."""

    target: TappedTarget
    drafter: Drafter
    stop_ids: tuple[int, ...]
    tokenizer: Any  # None where every prompt comes as ids


@dataclass(frozen=True)
class Turn:
    """One answered prompt: what went in, and what came out each way. `verdict` is None when sampled."""

    prompt: int
    prompt_ids: list[int]
    ours: Response
    own: Response
    verdict: str | None


@dataclass
class Clock:
    """Seconds of decoding with the drafter and without."""

    ours: float = 0.0
    own: float = 0.0


def evaluate(config: EvalConfig, read_prompts: ReadPrompts, render_prompt: RenderPrompt) -> dict[str, Any]:
    """Decode, compare, count; the JSON keys are those of design section 8."""
    prompts = read_prompts(config.prompts, config.limit)
    pair = open_pair(config, any(prompt.input_ids is None for prompt in prompts))
    turns: list[Turn] = []
    clock = Clock()
    total = sum(max(1, len(prompt.turns)) for prompt in prompts)
    with catch_stop() as stop, progress("Evaluating", total, "answers") as advance:
        for batch in batches(prompts, pair, config, render_prompt, turns):
            stop.check("nothing of an evaluation is kept; run it again.")
            turns += answer(batch, pair, config, clock)
            advance(len(batch))
    turns.sort(key=lambda turn: turn.prompt)  # stable: a prompt's turns stay in order
    return summarise(turns, len(prompts), clock, pair, config)


def open_pair(config: EvalConfig, needs_tokenizer: bool) -> Pair:
    """Load both, after checking from their small files that they belong together."""
    folder = resolve_target(config.target)
    spec = TargetSpec.read(folder, name=config.target, trust_remote_code=config.trust_remote_code)
    shape, _ = read_drafter(Path(config.drafter))
    check_pair(shape, spec, config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    set_threads()
    dtype = as_dtype(config.dtype) or spec.torch_dtype
    model = load_target(folder, dtype, device, config.trust_remote_code)
    tokenizer = None
    if needs_tokenizer:
        tokenizer = load_tokenizer(folder, config.chat_template, config.trust_remote_code)
    drafter = load_drafter(Path(config.drafter), dtype, device)
    compare_fingerprints(Path(config.drafter), folder)
    return Pair(TappedTarget(model, spec, shape.taps), drafter, stop_token_ids(folder), tokenizer)


def check_pair(shape: DrafterConfig, spec: TargetSpec, config: EvalConfig) -> None:
    """A drafter fits its own target only."""
    pairs = {
        "hidden size": (shape.hidden_size, spec.hidden_size),
        "number of target layers": (shape.num_target_layers, spec.num_layers),
        "vocabulary": (shape.vocab_size, spec.vocab_size),
    }
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise DflashError(
                f"Drafter {config.drafter} was trained for a target with {name} {ours}, but target {config.target} has "
                f"{theirs}; evaluate it with its own target."
            )


def compare_fingerprints(drafter: Path, target: Path) -> None:
    """A warning, not an error: the same target in another dtype has another fingerprint."""
    _, origin = read_config(drafter)
    trained_for = origin.weights if origin else ""
    if trained_for and trained_for != (found := weights_fingerprint(target)):
        say(
            f"Warning: drafter {drafter} was trained for target weights {trained_for[:12]}, {target} has {found[:12]}; "
            "acceptance may be lower."
        )


def batches(
    prompts: Sequence[Any], pair: Pair, config: EvalConfig, render_prompt: RenderPrompt, turns: list[Turn]
) -> Iterator[list[tuple[int, list[int]]]]:
    """(prompt number, ids) in batches of similar length; first all first turns, then all second ones, ….

    Between two turns stand the target's own answers, which the caller adds to `turns`.
    """
    size = config.batch_size or BATCH_SIZE[pair.target.device.type]
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


def answer(batch: list[tuple[int, list[int]]], pair: Pair, config: EvalConfig, clock: Clock) -> list[Turn]:
    """Both ways of decoding a batch, timed. Decoding reads tokens back, so the host's clock is the device's too."""
    context = pair.target.spec.max_position_embeddings
    prompts = [ids for _, ids in batch]
    longest = max(map(len, prompts))
    if longest >= context:
        raise DflashError(f"A prompt has {longest} tokens, but target {config.target} holds {context}; shorten it.")
    limits = [min(config.max_new_tokens, context - len(ids)) for ids in prompts]

    def sampling() -> Sampling:
        seed = config.seed * 1_000_003 + batch[0][0]
        return Sampling(temperature=config.temperature, generator=torch.Generator(pair.target.device).manual_seed(seed))

    start = time.perf_counter()
    own = decode_plain(pair.target, prompts, limits, pair.stop_ids, sampling())
    middle = time.perf_counter()
    ours = decode_speculative(pair.target, pair.drafter, prompts, limits, pair.stop_ids, sampling())
    clock.own += middle - start
    clock.ours += time.perf_counter() - middle
    turns = []
    for (number, ids), mine, theirs in zip(batch, ours, own, strict=True):
        verdict = None
        if config.temperature == 0:
            verdict = first_difference(mine, theirs)
        turns.append(Turn(number, ids, mine, theirs, verdict))
    return turns


def summarise(turns: list[Turn], prompts: int, clock: Clock, pair: Pair, config: EvalConfig) -> dict[str, Any]:
    tally = Tally(pair.drafter.config.block_size - 1)
    for turn in turns:
        tally.add(turn.ours.acceptance_lengths, turn.ours.drafted, turn.ours.accepted)
    verdicts = [turn.verdict for turn in turns]
    greedy = config.temperature == 0
    tokens, own_tokens = (sum(len(getattr(t, name).output_ids) for t in turns) for name in ("ours", "own"))
    rate, baseline = tokens / clock.ours, own_tokens / clock.own
    result = {
        "acceptance_length": tally.acceptance_length(),
        "per_slot": tally.per_slot(),
        **{name: verdicts.count(name) if greedy else None for name in ("identical", "ties", "wrong")},
        "lossless": "wrong" not in verdicts if greedy else None,
        "tokens_per_second": rate,
        "baseline_tokens_per_second": baseline,
        "speedup": rate / baseline,
        "prompts": prompts,
        "answers": len(turns),
        "tokens": tokens,
        "seconds": clock.ours + clock.own,
        "temperature": config.temperature,
        "dtype": str(pair.target.embed_VH.dtype).removeprefix("torch."),
        "device": pair.target.device.type,
    }
    if config.details:
        result["responses"] = [
            {
                "prompt_ids": turn.prompt_ids,
                "output_ids": turn.ours.output_ids,
                "acceptance_lengths": turn.ours.acceptance_lengths,
                "verdict": turn.verdict,
            }
            for turn in turns
        ]
    return result
