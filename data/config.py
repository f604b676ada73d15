"""Settings of the data stage: what becomes documents, and how prompts are answered. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Any

from dflash.config import REQUIRED, setting
from dflash.errors import DflashError

DEFAULT_BUCKETS = (770, 1216, 1728, 2432, 3296, 8192)
MAX_CEILING = 1 << 20


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How conversations become rows; part of `dflash extract`."""

    data: tuple[str, ...] = setting(REQUIRED, "JSONL files of conversations (or names of Hugging Face datasets).")
    buckets: tuple[int, ...] = setting(
        DEFAULT_BUCKETS, "Lengths to which rows are padded; a longer document is cut at the largest."
    )
    holdout: float = setting(
        0.01, "Share of the conversations kept for validation: at least 8, at most 1,024 and a tenth; 0 for none."
    )
    turns: str = setting("all", "Which assistant turns are supervised.", choices=("all", "last"))
    chat_template: str | None = setting(None, "A Jinja file to use instead of the tokenizer's own chat template.")
    template_args: dict[str, Any] = setting(
        {}, 'Arguments for the chat template as JSON, such as {"enable_thinking": false}.'
    )
    seed: int = setting(0, "Orders the rows.")
    skip_bad: bool = setting(False, "Count damaged lines by cause and go on, instead of stopping at the first.")
    show: int = setting(0, "Print the first N documents with the supervised part in colour.")

    def __post_init__(self) -> None:
        _check_data(self.data)
        if not self.buckets or min(self.buckets) < 2 or max(self.buckets) > MAX_CEILING:
            raise DflashError(f"--buckets must be lengths from 2 to {MAX_CEILING}, not {list(self.buckets)}.")
        if len(set(self.buckets)) != len(self.buckets):
            raise DflashError(f"--buckets {list(self.buckets)} names a length twice; name each once.")
        if not 0 <= self.holdout <= 0.1:
            raise DflashError(f"--holdout must be a share from 0 to 0.1, not {self.holdout}.")
        if self.turns not in ("all", "last"):
            raise DflashError(f"--turns must be all or last, not {self.turns!r}.")
        if self.show < 0:
            raise DflashError(f"--show must be 0 or more, not {self.show}.")
        check_seed(self.seed)


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """How the target answers prompts: `dflash regenerate`."""

    data: tuple[str, ...] = setting(REQUIRED, "JSONL files of prompts, or of conversations whose last turn is asked.")
    out: str = setting(REQUIRED, "The JSONL file to write; an unfinished one is continued.")
    target: str | None = setting(None, "The model that answers, in this process.")
    server: str | None = setting(None, "URL of an OpenAI-compatible server that answers instead.")
    model: str | None = setting(None, "The model's name at the server.")
    max_new_tokens: int = setting(512, "Longest answer in tokens.")
    temperature: float = setting(0.0, "0 answers greedily, more samples.")
    samples: int = setting(1, "Answers for each prompt; more than one needs a temperature.")
    seed: int = setting(0, "Seeds the sampling.")
    batch_size: int | None = setting(
        None, "Prompts answered at once (512 on a GPU if they fit, 16 on a CPU), or requests at once to a server (16)."
    )
    limit: int | None = setting(None, "Answer the first N prompts only.")
    chat_template: str | None = setting(None, "A Jinja file to use instead of the tokenizer's own chat template.")
    template_args: dict[str, Any] = setting({}, "Arguments for the chat template as JSON.")
    dtype: str | None = setting(None, "Run the target in float32, bfloat16 or float16 instead of its own type.")
    trust_remote_code: bool = setting(False, "Run Python code that comes with the target.")

    def __post_init__(self) -> None:
        _check_data(self.data)
        if (self.target is None) == (self.server is None):
            raise DflashError("Give either --target, to answer in this process, or --server with --model.")
        if self.server is not None and self.model is None:
            raise DflashError("--server needs --model, the name under which the server knows the target.")
        if self.server is not None and not self.server.startswith(("http://", "https://")):
            raise DflashError(f"--server must start with http:// or https://, not {self.server!r}.")
        for name, least in (("max_new_tokens", 1), ("samples", 1), ("batch_size", 1), ("limit", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise DflashError(f"--{name.replace('_', '-')} must be at least {least}, not {value}.")
        if not self.temperature >= 0 or self.temperature == float("inf"):
            raise DflashError(f"--temperature must be 0 or more, not {self.temperature}.")
        if self.samples > 1 and self.temperature == 0:
            raise DflashError("--samples above 1 needs --temperature above 0, since greedy answers are all the same.")
        check_seed(self.seed)


def _check_data(data: tuple[str, ...]) -> None:
    if not data:
        raise DflashError("--data names no file; give at least one JSONL file.")


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise DflashError(f"--seed must be from 0 to 2^63 - 1, not {seed}.")
