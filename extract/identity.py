"""What a command would put into a store, as fingerprints and settings; and whether that is what a store holds."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from dflash.errors import DflashError
from dflash.extract.config import ExtractConfig, top_k
from dflash.files import canonical_json
from dflash.store import StoreMeta, check_same
from dflash.target import (
    TargetSpec,
    as_dtype,
    check_taps,
    config_fingerprint,
    default_taps,
    template_fingerprint,
    tokenizer_fingerprint,
    weights_fingerprint,
)

Prepare = Callable[..., Any]  # dflash.data.prepare.prepare; stages do not import one another
DataFingerprint = Callable[[tuple[str, ...]], str]


class DataSettings(Protocol):
    """The settings of the data stage that decide what a store holds (`dflash.data.config.DataConfig`)."""

    @property
    def data(self) -> tuple[str, ...]: ...
    @property
    def buckets(self) -> tuple[int, ...]: ...
    @property
    def holdout(self) -> float: ...
    @property
    def turns(self) -> str: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def template_args(self) -> dict[str, Any]: ...
    @property
    def seed(self) -> int: ...
    @property
    def show(self) -> int: ...


def chosen_taps(config: ExtractConfig, spec: TargetSpec) -> tuple[int, ...]:
    if config.layers is None:
        return default_taps(spec.num_layers, config.num_taps)
    check_taps(config.layers, spec.num_layers)
    return config.layers


def check_labels(config: ExtractConfig, spec: TargetSpec) -> None:
    if top_k(config.labels) > spec.vocab_size:
        raise DflashError(
            f"--labels {config.labels} asks for more than the vocabulary of {spec.vocab_size:,}: use a smaller K."
        )


def wanted_meta(
    config: ExtractConfig, data: DataSettings, source: Path, spec: TargetSpec, tokenizer: Any, data_fingerprint: str
) -> StoreMeta:
    """store.json as this command would write it, but for buckets and counts, which come from the documents."""
    dtype = as_dtype(config.dtype)
    return StoreMeta(
        target={
            "name": spec.name,
            "config": config_fingerprint(source),
            "weights": weights_fingerprint(source),
            "dtype": spec.dtype if dtype is None else str(dtype).removeprefix("torch."),
        },
        tokenizer="" if tokenizer is None else tokenizer_fingerprint(tokenizer),
        template="" if tokenizer is None else template_fingerprint(tokenizer),
        template_args=dict(data.template_args),
        data=data_fingerprint,
        taps=chosen_taps(config, spec),
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        storage=config.storage,
        labels=config.labels,
        seed=data.seed,
        buckets=(),
        counts={"settings": settings_of(data)},
    )


def settings_of(data: DataSettings) -> dict[str, Any]:
    """What shaped the rows and is not in store.json otherwise."""
    return {"buckets": sorted(data.buckets), "holdout": data.holdout, "turns": data.turns}


def check_resume(old: StoreMeta, new: StoreMeta, root: Path, forward_tokens: int | None) -> None:
    """Refuse to fill a store with what differs from what it holds, naming field, old and new value."""
    check_same(old, replace(new, buckets=old.buckets, fingerprints=old.fingerprints), root)
    before, after = old.counts.get("settings", {}), new.counts["settings"]
    for name in after:
        if name in before and before[name] != after[name]:
            raise DflashError(
                f"Store {root} was made with another {name}: it has {canonical_json(before[name])}, this command has "
                f"{canonical_json(after[name])}; give the store's own value, or another --store."
            )
    for bucket in old.buckets:
        if forward_tokens is not None and bucket.rows_per_forward != rows_per_forward(
            bucket.ceiling, bucket.rows_per_shard, forward_tokens
        ):
            raise DflashError(
                f"Store {root} was made with {bucket.rows_per_forward} rows a forward in bucket {bucket.name}, which "
                f"--forward-tokens {forward_tokens} would change; leave the flag out, or give another --store."
            )


def rows_per_forward(ceiling: int, rows_per_shard: int, forward_tokens: int) -> int:
    """A forward never crosses a shard, and has at least one row."""
    return min(rows_per_shard, max(1, forward_tokens // ceiling))
