"""Does a drafter belong to a target, a tokenizer, a template? Each difference is one sentence that names both sides."""

import json
from collections.abc import Iterator
from typing import Any

from dflash.checkpoint.origin import Origin
from dflash.drafter import DrafterConfig
from dflash.errors import DflashError
from dflash.target import TargetSpec

SHOWN = 12  # characters of a fingerprint


def check_shape(config: DrafterConfig, origin: Origin | None, spec: TargetSpec, drafter: str) -> None:
    """Refuse a target into which the drafter's tensors and token ids do not fit."""
    pairs = {
        "hidden size": (config.hidden_size, spec.hidden_size),
        "number of layers": (config.num_target_layers or spec.num_layers, spec.num_layers),
        "vocabulary": (config.vocab_size, spec.vocab_size),
        "deepest tapped layer": (max(config.taps), min(max(config.taps), spec.num_layers - 1)),
    }
    own = origin.target if origin else "a target"
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise DflashError(
                f"Drafter {drafter} was trained for {own} with {name} {ours}, but target {spec.name} has {theirs}; use "
                "it with its own target."
            )


def differences(
    origin: Origin,
    drafter: str,
    target: str,
    *,
    weights: str = "",
    tokenizer: str = "",
    template: str = "",
    template_args: dict[str, Any] | None = None,
) -> Iterator[str]:
    """A sentence, without its full stop, for each thing in which `target` is not what the drafter was trained for.

    What either side does not know is not compared.
    """
    pairs = {
        "tokenizer": (origin.tokenizer, tokenizer),
        "chat template": (origin.template, template),
        "weights": (origin.weights, weights),
    }
    for name, (ours, theirs) in pairs.items():
        if ours and theirs and ours != theirs:
            yield (
                f"Drafter {drafter} was trained for {origin.target} with the {name} {ours[:SHOWN]}, but {target} has "
                f"the {name} {theirs[:SHOWN]}"
            )
    if template_args is not None and template_args != origin.template_args:
        yield (
            f"Drafter {drafter} was trained on text of template arguments {json.dumps(origin.template_args)}, but here "
            f"they are {json.dumps(template_args)}"
        )


def check_origin(found: Iterator[str], advice: str) -> None:
    """Refuse the first difference."""
    for sentence in found:
        raise DflashError(f"{sentence}; {advice}.")
