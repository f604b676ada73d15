"""What an extraction will cost, known before the target's weights are loaded; and the refusal of what does not fit."""

import shutil
from pathlib import Path
from typing import Any

from dflash.config import parse_size
from dflash.errors import DflashError
from dflash.extract.identity import rows_per_forward
from dflash.progress import say
from dflash.store import Bucket, Plan, StoreMeta, default_rows_per_shard, storage_bytes
from dflash.target import TargetSpec, target_folder_bytes

FORWARD_TOKENS = {"cpu": 2_048, "cuda": 16_384}


def make_buckets(plan: Plan, forward_tokens: int) -> tuple[Bucket, ...]:
    """The buckets that have rows, in ascending order, each ceiling's held-out rows behind the others."""
    buckets = []
    for name in sorted(plan.rows, key=lambda name: (int(name[1:]), name[0])):
        ceiling = int(name[1:])
        per_shard = default_rows_per_shard(ceiling)
        buckets.append(
            Bucket(
                ceiling=ceiling,
                held_out=name[0] == "v",
                rows=len(plan.rows[name]),
                rows_per_shard=per_shard,
                rows_per_forward=rows_per_forward(ceiling, per_shard, forward_tokens),
            )
        )
    return tuple(buckets)


def store_bytes(meta: StoreMeta, plan: Plan, source: Path, spec: TargetSpec) -> tuple[dict[str, int], int]:
    """Allocated bytes by bucket, and those of the whole store."""
    found = storage_bytes(meta, plan)
    buckets = {each["name"]: int(each["bytes"]) for each in found["buckets"]}
    return buckets, int(found["bytes"]) + target_folder_bytes(source, spec)


def summarise(meta: StoreMeta, plan: Plan, size: int) -> dict[str, Any]:
    """The JSON keys that a forecast and a finished run share."""
    ceilings: dict[int, list[int]] = {}
    tokens = supervised = rows = 0
    for name, entries in sorted(plan.rows.items(), key=lambda item: int(item[0][1:])):
        each = ceilings.setdefault(int(name[1:]), [0, 0])
        each[0] += len(entries)
        each[1] += int(entries.length.sum(dtype="int64"))
        rows += len(entries)
        tokens += int(entries.length.sum(dtype="int64"))
        supervised += int(entries.supervised.sum(dtype="int64"))
    counts = meta.counts
    conversations = counts.get("conversations", rows)
    return {
        "documents": rows,
        "tokens": tokens,
        "supervised_tokens": supervised,
        "rows": rows,
        "bytes": size,
        "dropped": dict(counts.get("dropped", {})),
        "buckets": [{"ceiling": c, "rows": r, "tokens": t} for c, (r, t) in ceilings.items()],
        "conversations": conversations,
        "fan_out": rows / conversations if conversations else 0.0,
        "truncated": counts.get("truncated", 0),
        "taps": list(meta.taps),
    }


def free_bytes(path: Path) -> int:
    """Free space where `path` is or will be."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def say_forecast(result: dict[str, Any], per_bucket: dict[str, int], free: int) -> None:
    fan_out = f", {result['fan_out']:.2f} documents a conversation" if result["fan_out"] != 1 else ""
    say(
        f"Forecast: {result['documents']:,} documents{fan_out}, {result['tokens']:,} tokens "
        f"({result['supervised_tokens']:,} supervised), {result['rows']:,} rows; "
        f"{size_text(result['bytes'])} on disk, {size_text(free)} free."
    )
    for name, size in per_bucket.items():
        say(f"  bucket {name}: {size_text(size)}")
    dropped = ", ".join(f"{cause} {n:,}" for cause, n in result["dropped"].items())
    if dropped or result["truncated"]:
        say(f"  dropped: {dropped or 'none'}; truncated: {result['truncated']:,}")


def check_room(size: int, still: int, free: int, budget: str | None, root: Path) -> None:
    """Refuse a store over the budget, or one whose missing part is larger than the free space."""
    advice = "use fewer --num-taps, --storage int8 (half the size), or less data"
    if budget is not None and size > parse_size(budget):
        raise DflashError(f"Store {root} would take {size_text(size)}, more than --budget {budget}: {advice}.")
    if still > free:
        raise DflashError(
            f"Store {root} needs {size_text(still)} more, but {size_text(free)} are free there: {advice}."
        )


def size_text(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError
