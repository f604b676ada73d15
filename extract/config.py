"""Settings of extraction. Imports nothing heavy."""

import re
from dataclasses import dataclass

from dflash.config import REQUIRED, parse_size, setting
from dflash.errors import DflashError

STORAGES = ("bf16", "lz4", "int8")


@dataclass(frozen=True, kw_only=True)
class ExtractConfig:
    """How the target's states become a store: `dflash extract`."""

    target: str = setting(
        REQUIRED, "The model whose drafter is wanted: a folder in Hugging Face layout, or a hub name."
    )
    store: str = setting(REQUIRED, "The folder to write; one that exists is completed.")
    layers: tuple[int, ...] | None = setting(
        None, "Decoder layers to tap, 0-based, instead of spreading --num-taps evenly.", metavar="1,9,17,25,33"
    )
    num_taps: int = setting(5, "Number of layers to tap.", instead_of="layers")
    labels: str = setting(
        "argmax",
        "What the drafter learns from: argmax (the target's choice), tokens (the data alone), topk:K or last-hidden.",
        metavar="argmax|tokens|topk:K|last-hidden",
    )
    storage: str = setting(
        "bf16", "How states are kept: as they are, packed losslessly, or in 8 bits.", choices=STORAGES
    )
    dtype: str | None = setting(None, "Run the target in float32, bfloat16 or float16 instead of its own type.")
    budget: str | None = setting(None, "Refuse a store larger than this, such as 2TB or 500GB.", metavar="SIZE")
    dry_run: bool = setting(False, "Print the forecast and stop; nothing is written.")
    worker: str | None = setting(
        None, "This process is worker I of N on the same store; torchrun sets it.", metavar="I/N"
    )
    max_bad: str = setting("1%", "Stop when more than this share of the documents gives states that are not finite.")
    forward_tokens: int | None = setting(
        None, "Padded tokens of a forward, fixed when a store is made: 16,384 on a GPU and 2,048 on a CPU if not given."
    )
    threads: int | None = setting(
        None, "CPU threads of a worker; the physical cores (shared by its workers) if not given."
    )
    device: str | None = setting(None, "Where the target runs, such as cpu or cuda:1; a GPU where there is one.")
    trust_remote_code: bool = setting(False, "Run Python code that comes with the target.")

    def __post_init__(self) -> None:
        if self.num_taps < 1:
            raise DflashError(f"--num-taps must be at least 1, not {self.num_taps}.")
        if (
            not re.fullmatch(r"argmax|tokens|last-hidden|topk:[1-9][0-9]{0,3}", self.labels)
            or top_k(self.labels) > 1024
        ):
            raise DflashError(
                f"--labels must be argmax, tokens, last-hidden or topk:K with K from 1 to 1024, not {self.labels!r}."
            )
        if self.storage not in STORAGES:
            raise DflashError(f"--storage must be one of {', '.join(STORAGES)}, not {self.storage!r}.")
        for name in ("forward_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DflashError(f"--{name.replace('_', '-')} must be at least 1, not {value}.")
        if self.budget is not None:
            parse_size(self.budget)
        if self.worker is not None:
            parse_worker(self.worker)
        parse_share(self.max_bad)


def top_k(labels: str) -> int:
    """k of `topk:k`, else 0."""
    return int(labels.removeprefix("topk:")) if labels.startswith("topk:") else 0


def parse_share(text: str) -> float:
    """0.01 of `1%` or `0.01`."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%?)\s*", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= share <= 1:
        raise DflashError(f"--max-bad {text!r} is no share: write it like 1% or 0.01.")
    return share


def parse_worker(text: str) -> tuple[int, int]:
    """(i, n) of `i/n`."""
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise DflashError(f"--worker {text!r} must be I/N with I from 0 to N-1, such as 0/4.")
    return int(match[1]), int(match[2])
