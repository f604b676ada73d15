"""`dflash eval`: decode every prompt with the target alone and with the drafter, and compare.

Greedy outputs must be the target's own: `identical`, or `ties` where rounding in another batch shape decides between
two logits, or `wrong`. With a temperature outputs differ by chance and are not compared.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from dflash.checkpoint import load_drafter, read_drafter
from dflash.decode import Response, TappedTarget, decode_plain, decode_speculative, first_difference
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

ReadPrompts = Callable[[Sequence[str], int | None], list[Any]]
RenderPrompt = Callable[..., list[int]]


@dataclass(frozen=True)
class Pair:
    """The target and its drafter, ready to decode."""

    target: TappedTarget
    drafter: Drafter
    stop_ids: tuple[int, ...]
    tokenizer: Any  # None where every prompt comes as ids


@dataclass(frozen=True)
class Turn:
    """One answered prompt: what went in, what came out each way, and how long each took."""

    prompt_ids: list[int]
    ours: Response
    own: Response
    seconds: float
    baseline_seconds: float
    verdict: str | None  # None when sampled


def evaluate(config: EvalConfig, read_prompts: ReadPrompts, render_prompt: RenderPrompt) -> dict[str, Any]:
    """Decode, compare, count; the JSON keys are those of design section 8."""
    prompts = read_prompts(config.prompts, config.limit)
    pair = open_pair(config, any(prompt.input_ids is None for prompt in prompts))
    turns: list[Turn] = []
    with catch_stop() as stop, progress("Evaluating", len(prompts), "prompts") as advance:
        for prompt in prompts:
            stop.check("nothing of an evaluation is kept; run it again.")
            turns += play(prompt, pair, config, render_prompt)
            advance(1)
    return summarise(turns, len(prompts), pair, config)


def open_pair(config: EvalConfig, needs_tokenizer: bool) -> Pair:
    """Load both, after checking from their small files that they belong together."""
    folder = resolve_target(config.target)
    spec = TargetSpec.read(folder, name=config.target, trust_remote_code=config.trust_remote_code)
    shape, _ = read_drafter(Path(config.drafter))
    check_pair(shape, spec, config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
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
    with safe_open(drafter / "model.safetensors", "pt") as file:
        trained_for = (file.metadata() or {}).get("target_weights")
    if trained_for is not None and trained_for != (found := weights_fingerprint(target)):
        say(
            f"Warning: drafter {drafter} was trained for target weights {trained_for[:12]}, {target} has {found[:12]}; "
            "acceptance may be lower."
        )


def play(prompt: Any, pair: Pair, config: EvalConfig, render_prompt: RenderPrompt) -> list[Turn]:
    """All turns of a prompt, the target's own answers between them."""
    if prompt.input_ids is not None:
        return [answer(list(prompt.input_ids), pair, config, seed=config.seed)]
    messages: list[Any] = []
    turns = []
    for number, added in enumerate(prompt.turns):
        messages.extend(added)
        ids = render_prompt(messages, pair.tokenizer, config.template_args | prompt.template_args, prompt.tools)
        turns.append(answer(ids, pair, config, seed=config.seed + number))
        kept = [token for token in turns[-1].own.output_ids if token not in pair.stop_ids]
        messages.append({"role": "assistant", "content": pair.tokenizer.decode(kept, skip_special_tokens=True)})
    return turns


def answer(prompt_ids: list[int], pair: Pair, config: EvalConfig, seed: int) -> Turn:
    """Both ways of decoding one prompt, timed."""
    room = pair.target.spec.max_position_embeddings - len(prompt_ids)
    if room < 1:
        raise DflashError(
            f"A prompt has {len(prompt_ids)} tokens, but target {config.target} holds "
            f"{pair.target.spec.max_position_embeddings}; shorten it."
        )
    limit = min(config.max_new_tokens, room)
    device = pair.target.device

    def generator() -> torch.Generator:
        return torch.Generator(device).manual_seed(seed)

    own, baseline_seconds = timed(
        lambda: decode_plain(pair.target, prompt_ids, limit, pair.stop_ids, config.temperature, generator())
    )
    ours, seconds = timed(
        lambda: decode_speculative(
            pair.target, pair.drafter, prompt_ids, limit, pair.stop_ids, config.temperature, generator()
        )
    )
    verdict = None
    if config.temperature == 0:
        verdict = first_difference(pair.target, prompt_ids, ours.output_ids, own.output_ids)
    return Turn(prompt_ids, ours, own, seconds, baseline_seconds, verdict)


def timed(run: Callable[[], Response]) -> tuple[Response, float]:
    """Decoding reads every token back, so the host's clock is the device's too."""
    start = time.perf_counter()
    response = run()
    return response, time.perf_counter() - start


def summarise(turns: list[Turn], prompts: int, pair: Pair, config: EvalConfig) -> dict[str, Any]:
    tally = Tally(pair.drafter.config.block_size - 1)
    for turn in turns:
        tally.add(turn.ours.acceptance_lengths, turn.ours.drafted, turn.ours.accepted)
    verdicts = [turn.verdict for turn in turns]
    greedy = config.temperature == 0
    tokens, own_tokens = (sum(len(getattr(t, name).output_ids) for t in turns) for name in ("ours", "own"))
    rate = tokens / sum(turn.seconds for turn in turns)
    baseline = own_tokens / sum(turn.baseline_seconds for turn in turns)
    result = {
        "acceptance_length": tally.acceptance_length(),
        "per_slot": tally.per_slot(),
        **{name: verdicts.count(name) if greedy else None for name in ("identical", "ties", "wrong")},
        "lossless": "wrong" not in verdicts if greedy else None,
        "tokens_per_second": rate,
        "baseline_tokens_per_second": baseline,
        "speedup": rate / baseline,
        "prompts": prompts,
        "responses_count": len(turns),
        "tokens": tokens,
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
