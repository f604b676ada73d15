"""What a run did, for --json and the screen: counts, speeds, and what was left out."""

from typing import Any

from dflash.extract import forecast
from dflash.extract.totals import Totals
from dflash.files import allocated_bytes
from dflash.progress import say
from dflash.store import Store

AGREEMENT_WARNING = 0.9
LIMITED = 0.05  # share of the time without a forward, from which something else than the target is the limit


def summarise_run(store: Store, totals: Totals) -> dict[str, Any]:
    """What was done, for --json and the screen; warns of a low label agreement."""
    per_bucket: dict[str, int] = {}
    for (bucket, _), entry in store.index.entries.items():
        per_bucket[bucket] = per_bucket.get(bucket, 0) + int(entry["bytes"])
    result = forecast.summarise(store.meta, store.plan, allocated_bytes(store.root), per_bucket)
    lost = dict(store.meta.counts.get("dropped_tokens", {}))
    bad = [(shard, each) for shard, entry in store.index.entries.items() for each in entry["bad"]]
    if bad:
        result["dropped"]["nonfinite"] = len(bad)
        result["documents"] -= len(bad)
        lost["nonfinite"] = 0
        for (bucket, number), each in bad:
            row = store.bucket(bucket).rows_of(number).start + each["row"]
            lost["nonfinite"] += int(store.plan.rows[bucket].length[row])
            result["supervised_tokens"] -= int(store.plan.rows[bucket].supervised[row])
        result["tokens"] -= lost["nonfinite"]
        say(
            f"Warning: {len(bad):,} documents gave states that are not finite and are left out, "
            f"such as {bad[0][1]['source']} (tap {bad[0][1]['tap']})."
        )
    agreement = totals.agreeing / totals.supervised if totals.supervised else None
    if agreement is not None:
        say(f"The target itself would have chosen {agreement:.1%} of the supervised tokens.")
        if agreement < AGREEMENT_WARNING:
            say(
                "Warning: below 90 % most blocks end early in training; have the target answer the prompts itself with "
                "`dflash regenerate` and extract those answers."
            )
    return (
        result
        | speeds(totals)
        | {
            "lines": store.meta.counts.get("lines"),
            "dropped_tokens": lost,
            "tokens_in": result["tokens"] + sum(lost.values()),
            "by_worker": by_worker(store),
            "shards": len(store.shards()) - len(store.missing()),
            "missing": len(store.missing()),
            "made": totals.shards,
            "label_agreement": agreement,
            "nonfinite": [{"shard": f"{b}/s{n:06d}", **each} for (b, n), each in bad],
            "store": str(store.root),
            "next": f"dflash train --store {store.root} --run RUN",
        }
    )


def by_worker(store: Store) -> list[dict[str, int]]:
    """What each worker has put into the store, in this run and before, from the index."""
    found: dict[int, dict[str, int]] = {}
    for entry in store.index.entries.values():
        one = found.setdefault(
            entry["worker"],
            {"worker": entry["worker"], "shards": 0, "documents": 0, "tokens": 0, "nonfinite": 0, "bytes": 0},
        )
        one["shards"] += 1
        one["documents"] += sum(length > 0 for length in entry["lengths"])
        one["tokens"] += sum(entry["lengths"])
        one["nonfinite"] += len(entry["bad"])
        one["bytes"] += entry["bytes"]
    return [found[worker] for worker in sorted(found)]


def speeds(totals: Totals) -> dict[str, Any]:
    seconds = max(totals.seconds, 1e-9)
    wait, filling = totals.idle / seconds, totals.filling / seconds
    lost = wait if totals.overlapping else wait + filling  # share of the time without a forward
    waits_for_disk = filling < 0.5 if totals.overlapping else wait > filling
    limited = "gpu" if lost <= LIMITED else "disk" if waits_for_disk else "data"
    return {
        "tokens_per_second": totals.tokens / seconds if totals.tokens else 0.0,
        "limited_by": limited,
        "gpu_wait": min(1.0, wait) if totals.tokens else 0.0,
        "disk_wait": min(1.0, totals.disk_idle / seconds) if totals.tokens else 0.0,
    }
