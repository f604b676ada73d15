"""Target and drafters, loaded after their small files have shown that they belong together."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash.caches import TappedTarget
from dflash.checkpoint import check_shape, differences, load_drafter, read_config
from dflash.decode import check_ids
from dflash.drafter import Drafter
from dflash.errors import DflashError
from dflash.evaluate.config import EvalConfig
from dflash.files import canonical_json
from dflash.progress import say
from dflash.target import (
    TargetSpec,
    as_dtype,
    load_target,
    load_tokenizer,
    resolve_target,
    stop_token_ids,
    template_fingerprint,
    tokenizer_fingerprint,
    weights_fingerprint,
)
from dflash.threads import set_threads

RenderPrompt = Callable[..., list[int]]
ADVICE = "use what it was trained for, or pass --allow-mismatch to evaluate it all the same"
# What a template may treat differently: an earlier answer with its reasoning, and the start of the next.
PROBE: tuple[dict[str, str], ...] = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "reasoning_content": "c"},
    {"role": "user", "content": "d"},
)


@dataclass(frozen=True)
class Side:
    """A drafter with the target as it taps it."""

    target: TappedTarget
    drafter: Drafter


@dataclass(frozen=True)
class Pair:
    """Ready to decode; `other` is the drafter to compare with, on the same model."""

    ours: Side
    other: Side | None
    stop_ids: tuple[int, ...]
    tokenizer: Any  # None where every prompt comes as ids

    @property
    def sides(self) -> list[Side]:
        return [self.ours, *([self.other] if self.other is not None else [])]


def open_pair(config: EvalConfig, prompts: Sequence[Any], render_prompt: RenderPrompt) -> Pair:
    """Load all, after the checks; the model comes last, since it takes longest."""
    assert config.target is not None, "the config has seen to it"
    folder = resolve_target(config.target)
    spec = TargetSpec.read(folder, name=config.target, trust_remote_code=config.trust_remote_code)
    tokenizer = None
    if any(prompt.input_ids is None for prompt in prompts):
        tokenizer = load_tokenizer(folder, config.chat_template, config.trust_remote_code)
    for prompt in prompts:
        if prompt.input_ids is not None:
            check_ids(prompt.input_ids, spec, f"{prompt.file}, line {prompt.line}")
    folders = [Path(each) for each in (config.drafter, config.compare) if each is not None]
    arguments = template_args_of(config, prompts)
    for each in folders:
        _check(config, each, folder, spec, tokenizer, render_prompt, arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    set_threads()
    dtype = as_dtype(config.dtype) or spec.torch_dtype
    model = load_target(folder, dtype, device, config.trust_remote_code)
    drafters = [load_drafter(each, dtype, device) for each in folders]
    ours, *others = [Side(TappedTarget(model, spec, each.config.taps), each) for each in drafters]
    return Pair(ours, others[0] if others else None, stop_token_ids(folder), tokenizer)


def template_args_of(config: EvalConfig, prompts: Sequence[Any]) -> dict[str, Any]:
    """Under which template arguments most prompts are rendered: --template-args and, above them, a line's own."""
    found = Counter(canonical_json(config.template_args | prompt.template_args) for prompt in prompts)
    return dict(json.loads(found.most_common(1)[0][0]))


def _check(
    config: EvalConfig, drafter: Path, target: Path, spec: TargetSpec, tokenizer: Any, render_prompt: RenderPrompt,
    arguments: dict[str, Any],
) -> None:  # fmt: skip
    shape, origin = read_config(drafter)
    check_shape(shape, origin, spec, str(drafter))
    if origin is None:
        return
    known: dict[str, Any] = {"weights": weights_fingerprint(target)} if origin.weights else {}
    if tokenizer is not None:
        known |= {"tokenizer": tokenizer_fingerprint(tokenizer), "template": template_fingerprint(tokenizer)}
        if not _same_rendering(origin.template_args, arguments, tokenizer, render_prompt):
            known["template_args"] = arguments
    report_differences(list(differences(origin, str(drafter), spec.name, **known)), config.allow_mismatch)


def report_differences(found: Sequence[str], allowed: bool) -> None:
    """Refuse the first, or with --allow-mismatch tell of all."""
    for sentence in found:
        if not allowed:
            raise DflashError(f"{sentence}; {ADVICE}.")
        say(f"Warning: {sentence}.")


def _same_rendering(data: dict[str, Any], here: dict[str, Any], tokenizer: Any, render_prompt: RenderPrompt) -> bool:
    """Whether the template arguments of the data and of here come to the same, whatever their names."""
    if data == here:
        return True
    try:
        one, other = (
            render_prompt([dict(message) for message in PROBE], tokenizer, arguments, None)
            for arguments in (data, here)
        )
    except DflashError:  # a template may refuse the probe; then the names decide
        return False
    return list(one) == list(other)
