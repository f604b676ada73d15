"""Settings of `dflash eval`. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Any

from dflash.config import REQUIRED, setting
from dflash.errors import DflashError


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Which drafter and target, on which prompts, decoded how; or, without a target, on which store."""

    drafter: str = setting(REQUIRED, "Folder of the exported drafter.")
    target: str | None = setting(None, "The target, as for `dflash extract`; not with --store.")
    prompts: tuple[str, ...] = setting((), "JSONL files of prompts; not with --store.")
    store: str | None = setting(None, "A store: simulate on its held-out rows instead, without a target.")
    compare: str | None = setting(None, "Another drafter's folder, to be compared on the same prompts or rows.")
    max_new_tokens: int = setting(256, "Longest answer in tokens.")
    temperature: float = setting(0.0, "0 decodes greedily, more samples.")
    limit: int | None = setting(None, "Use only the first N prompts, or rows of a store.")
    seed: int = setting(0, "Seeds the sampling and the confidence intervals.")
    batch_size: int | None = setting(None, "Prompts decoded at once, memory permitting: 256 on a GPU, 8 on a CPU.")
    details: bool = setting(False, "Add every response with its cycles to the result.")
    dtype: str | None = setting(
        None, "Of target and drafter; the checkpoint's own unless given.", choices=("float32", "bfloat16", "float16")
    )
    chat_template: str | None = setting(None, "A Jinja file to use instead of the tokenizer's own chat template.")
    template_args: dict[str, Any] = setting({}, "Arguments for the chat template as JSON.")
    allow_mismatch: bool = setting(
        False, "Only warn where target, tokenizer or template are not those that the drafter was trained for."
    )
    trust_remote_code: bool = setting(False, "Run code that comes with the target.")

    def __post_init__(self) -> None:
        if self.store is None and self.target is None:
            raise DflashError(
                "Missing option --target: the model that answers; or give --store to simulate without it."
            )
        if self.store is None and not self.prompts:
            raise DflashError("Missing option --prompts: give JSONL files of prompts, or --store.")
        if self.store is not None and (self.target is not None or self.prompts):
            raise DflashError(
                "--store simulates on stored rows; leave out --target and --prompts, or leave out --store."
            )
        if self.store is not None and self.temperature:
            raise DflashError("--store holds the target's greedy choices only; leave out --temperature.")
        if self.max_new_tokens < 1:
            raise DflashError(f"--max-new-tokens must be at least 1, not {self.max_new_tokens}.")
        for name in ("limit", "batch_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise DflashError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}.")
        if not 0 <= self.temperature < float("inf"):
            raise DflashError(f"--temperature must be 0 or more, not {self.temperature}.")
