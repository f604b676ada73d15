"""`train --dry-run`: capture every bucket, run three steps of each, report time and memory against the forecast, stop.

Nothing is written. On a GPU a bucket's peak is the allocator's while it was warmed up and captured, on a CPU the
process's resident memory, which never falls: there only the largest tells something.
"""

import resource
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from dflash.train.memory import step_bytes
from dflash.train.order import BucketRows, Micro
from dflash.train.reader import Reader
from dflash.train.runner import Captured, Runner
from dflash.train.setup import Setup

STEPS = 3


def dry_run(setup: Setup, runner: Runner, ready: float) -> dict[str, Any]:
    """`ready`: seconds that compiling and capturing took."""
    found, buckets = setup.forecast, setup.plan.order.buckets
    times: dict[str, list[float]] = {}
    reader = Reader(setup.store, setup.layout, setup.device)
    for micro, batch in reader.batches(_micros(buckets)):
        times.setdefault(micro.bucket.name, []).append(_seconds(runner, lambda m=micro, b=batch: runner.micro(m, b, 0)))
    update = statistics.median(_seconds(runner, lambda: runner.update(setup.config.lr)) for _ in range(STEPS))
    peaks = runner.peaks if isinstance(runner, Captured) else {bucket.name: resident() for bucket in buckets}
    if setup.device.type == "cuda":
        peaks = peaks | {"all": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    rest = found.device - found.step
    return {
        "dry_run": True,
        "steps": STEPS,
        "buckets": [
            {
                "bucket": bucket.name,
                "ceiling": bucket.ceiling,
                "rows": bucket.rows_per_micro,
                "anchors": bucket.anchors,
                "ms": 1000 * statistics.median(times[bucket.name]),
                "peak": peaks.get(bucket.name),
                "forecast": rest + step_bytes(setup.need, *size, setup.economy),
            }
            for bucket, size in zip(buckets, setup.plan.sizes, strict=True)
        ],
        "update_ms": 1000 * update,
        "peak": max(peak for name, peak in peaks.items() if name != "reserved"),
        "reserved": peaks.get("reserved"),
        "forecast": found.to_json(),
        "economy": str(setup.economy),
        "ready_seconds": ready,
        "run": setup.config.run,
        "store": setup.config.store,
        "device": setup.device.type,
    }


def _micros(buckets: list[BucketRows]) -> Iterator[Micro]:
    """Three micro-batches of each bucket; the same rows again where it has no more."""
    for bucket in buckets:
        rows = list(range(bucket.rows)) if bucket.available is None else bucket.available.tolist()
        for step in range(STEPS):
            first = step * bucket.rows_per_micro % bucket.rows
            yield Micro(bucket, tuple(rows[first : first + bucket.rows_per_micro]))


def _seconds(runner: Runner, work: Any) -> float:
    """On a GPU the device's time in graphs."""
    start, before = time.perf_counter(), runner.graph_seconds
    work()
    after = runner.graph_seconds
    return time.perf_counter() - start if after is None or before is None else after - before


def resident() -> int:
    """The most memory that this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
