"""Settings of `dflash eval`. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Any

from dflash.config import REQUIRED, setting
from dflash.errors import DflashError


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Which drafter and target, on which prompts, decoded how."""

    drafter: str = setting(REQUIRED, "Folder of the exported drafter.")
    target: str = setting(REQUIRED, "The target, as for `dflash extract`.")
    prompts: tuple[str, ...] = setting(REQUIRED, "JSONL files of prompts.")
    max_new_tokens: int = setting(256, "Longest answer in tokens.")
    temperature: float = setting(0.0, "0 decodes greedily, more samples.")
    limit: int | None = setting(None, "Use only the first N prompts.")
    seed: int = setting(0, "Seeds the sampling.")
    batch_size: int | None = setting(None, "Prompts decoded at once, memory permitting: 256 on a GPU, 8 on a CPU.")
    details: bool = setting(False, "Add every response with its cycles to the result.")
    dtype: str | None = setting(
        None, "Of target and drafter; the checkpoint's own unless given.", choices=("float32", "bfloat16", "float16")
    )
    chat_template: str | None = setting(None, "A Jinja file to use instead of the tokenizer's own chat template.")
    template_args: dict[str, Any] = setting({}, "Arguments for the chat template as JSON.")
    trust_remote_code: bool = setting(False, "Run code that comes with the target.")

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise DflashError(f"--max-new-tokens must be at least 1, not {self.max_new_tokens}.")
        for name in ("limit", "batch_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise DflashError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}.")
        if not 0 <= self.temperature < float("inf"):
            raise DflashError(f"--temperature must be 0 or more, not {self.temperature}.")
