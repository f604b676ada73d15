"""What an extraction will cost, known before the target's weights are loaded; and the refusal of what does not fit."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash.config import parse_size
from dflash.errors import DflashError
from dflash.extract.identity import rows_per_forward
from dflash.progress import clock, say
from dflash.store import Bucket, Plan, PlanRows, StoreMeta, bucket_name, default_rows_per_shard, storage_bytes
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


def store_bytes(meta: StoreMeta, plan: Plan, source: Path, spec: TargetSpec, holes: bool) -> tuple[dict[str, int], int]:
    """Allocated bytes by bucket, and those of the whole store."""
    found = storage_bytes(meta, plan, holes=holes)
    buckets = {each["name"]: int(each["bytes"]) for each in found["buckets"]}
    return buckets, int(found["bytes"]) + target_folder_bytes(source, spec)


def summarise(meta: StoreMeta, plan: Plan, size: int, per_bucket: dict[str, int]) -> dict[str, Any]:
    """The JSON keys that a forecast and a finished run share."""
    ceilings: dict[int, list[int]] = {}
    tokens = supervised = rows = 0
    for name, entries in sorted(plan.rows.items(), key=lambda item: int(item[0][1:])):
        each = ceilings.setdefault(int(name[1:]), [0, 0, 0])
        each[0] += len(entries)
        each[1] += int(entries.length.sum(dtype="int64"))
        each[2] += per_bucket.get(name, 0)
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
        "buckets": [{"ceiling": c, "rows": r, "tokens": t, "bytes": b} for c, (r, t, b) in ceilings.items()],
        "conversations": conversations,
        "fan_out": rows / conversations if conversations else 0.0,
        "truncated": counts.get("truncated", 0),
        "taps": list(meta.taps),
    }


def say_forecast(result: dict[str, Any], storage: str) -> None:
    fan_out = f", {result['fan_out']:.2f} documents a conversation" if result["fan_out"] != 1 else ""
    say(
        f"Forecast: {result['documents']:,} documents{fan_out}, {result['tokens']:,} tokens "
        f"({result['supervised_tokens']:,} supervised), {result['rows']:,} rows; "
        f"{size_text(result['bytes'])} on disk, {size_text(result['free'])} free."
    )
    for name, size in result["bucket_bytes"].items():
        say(f"  bucket {name}: {size_text(size)}")
    if result["write_seconds"] is not None:
        speed = size_text(result["write_speed"])
        say(f"  writing takes {clock(result['write_seconds'])} at {speed}/s, measured there just now.")
    if storage == "lz4":
        say("  lz4: an estimate; states like those of public models shrink to about 1/1.2.")
    dropped = ", ".join(f"{cause} {n:,}" for cause, n in result["dropped"].items())
    if dropped or result["truncated"]:
        say(f"  dropped: {dropped or 'none'}; truncated: {result['truncated']:,}")


def check_room(result: dict[str, Any], still: int, budget: str | None, meta: StoreMeta, plan: Plan, root: Path) -> None:
    """Refuse a store over the budget, or one whose missing part is larger than the free space, and list the ways out:
    what each alone would save, computed from the plan like the forecast itself."""
    size, free = result["bytes"], result["free"]
    over = budget is not None and size > parse_size(budget)
    if not over and still <= free:
        return
    allowed = parse_size(budget) if over and budget is not None else free + size - still
    say("Ways out, each alone:             saves     leaves")
    for what, smaller in ways_out(meta, plan, size, result["holes"]):
        say(f"  {what:<26}{size_text(size - smaller):>12}{size_text(smaller):>11}{'  fits' * (smaller <= allowed)}")
    advice = "choose among the ways out above, or use less data"
    if over:
        raise DflashError(f"Store {root} would take {size_text(size)}, more than --budget {budget}: {advice}.")
    raise DflashError(f"Store {root} needs {size_text(still)} more, but {size_text(free)} are free there: {advice}.")


def ways_out(meta: StoreMeta, plan: Plan, size: int, holes: bool = True) -> list[tuple[str, int]]:
    """(flags, bytes of the store with them), of what would make this store smaller."""
    fixed = size - int(storage_bytes(meta, plan, holes=holes)["bytes"])  # the target's part, which no way out changes
    taps, ceilings = len(meta.taps), sorted({bucket.ceiling for bucket in meta.buckets})
    found: list[tuple[str, StoreMeta, Plan]] = []
    if taps > 1:
        fewer = 3 if taps > 3 else taps - 1
        found.append((f"--num-taps {fewer}", replace(meta, taps=meta.taps[:fewer]), plan))
    if meta.storage != "int8":
        found.append(("--storage int8", replace(meta, storage="int8"), plan))
    if meta.storage == "bf16":
        found.append(("--storage lz4 (about)", replace(meta, storage="lz4"), plan))
    if meta.labels not in ("argmax", "tokens"):
        found.append(("--labels argmax", replace(meta, labels="argmax"), plan))
    if sum(map(len, (last := last_turns(plan)).rows.values())) < sum(map(len, plan.rows.values())):
        found.append(("--turns last", *_changed(meta, last)))
    if len(ceilings) > 1:
        shown = "--buckets …," if len(ceilings) > 2 else "--buckets "
        found.append((f"{shown}{ceilings[-2]}", *_changed(meta, lower_ceiling(plan, *ceilings[-2:]))))
    sizes = [(what, int(storage_bytes(other, rows, holes=holes)["bytes"]) + fixed) for what, other, rows in found]
    return [(what, smaller) for what, smaller in sizes if smaller < size]


def _changed(meta: StoreMeta, plan: Plan) -> tuple[StoreMeta, Plan]:
    return replace(meta, buckets=make_buckets(plan, 1)), plan


def last_turns(plan: Plan) -> Plan:
    """Where a conversation became several documents, only the longest: that of its last turn, but for rare cuts."""
    conversation = np.concatenate([rows.conversation for rows in plan.rows.values()])
    length = np.concatenate([rows.length for rows in plan.rows.values()])
    order = np.lexsort((-length, conversation))
    first = np.r_[True, np.diff(conversation[order]) != 0] if len(order) else order.astype(bool)
    keep = np.zeros(len(order), bool)
    keep[order[first]] = True
    parts = np.split(keep, np.cumsum([len(rows) for rows in plan.rows.values()])[:-1])
    return _plan(
        {name: _columns(rows, part) for (name, rows), part in zip(plan.rows.items(), parts, strict=True)}, plan
    )


def lower_ceiling(plan: Plan, lower: int, largest: int) -> Plan:
    """Documents of the largest bucket cut to the next lower ceiling."""
    found = {name: _columns(rows, slice(None)) for name, rows in plan.rows.items() if int(name[1:]) != largest}
    for kind in ("b", "v"):
        rows = plan.rows.get(bucket_name(largest, kind == "v"))
        if rows is not None:
            cut = _columns(rows, slice(None))
            cut["length"] = np.minimum(cut["length"], lower)
            cut["supervised"] = np.minimum(cut["supervised"], cut["length"])
            name = bucket_name(lower, kind == "v")
            there = found.get(name)
            found[name] = cut if there is None else {f: np.concatenate([there[f], cut[f]]) for f in cut}
    return _plan(found, plan)


def _columns(rows: PlanRows, part: Any) -> dict[str, np.ndarray]:
    return {each.name: getattr(rows, each.name)[part] for each in fields(PlanRows)}


def _plan(rows: dict[str, dict[str, np.ndarray]], like: Plan) -> Plan:
    return Plan(files=like.files, rows={name: PlanRows(**columns) for name, columns in rows.items()})


def size_text(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError
