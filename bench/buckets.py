"""bench/buckets.py [buckets] [budget] [replays] [card]: many graphs in one pool, and an 8B target's drafter in 24 GB.

buckets  the shape of the pipeline this project descends from: hidden 5120, 5 taps, vocabulary 248,320, 5 layers, heads
         32/8, block 32, 1,024 anchors, six buckets of 770 to 8,192, 49,152 tokens a micro-step in at most 64 documents.
         All six captured: seconds, peak and reserved memory (also behind the first, the largest, alone), ms a bucket,
         then 24 replays in random order with the allocator's counters before and after.
budget   the same as one graph (--graph budget).
replays  1,000 steps of a small drafter's six buckets in random order: counters unchanged, nothing synchronises.
card     the allocator held to 24 GB: an 8B target's drafter with what train/memory.py gives up for it, against its
         forecast, and its gradients against the plain step's at a small size (tests/test_gpu.py).

Needs a CUDA GPU; each part prints a line of JSON. About 250 s for all on an H200 with a cold compile cache, of which
`buckets` takes half.
"""

import gc
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflash.drafter import Drafter, DrafterConfig, RopeTable, initialise
from dflash.loss import Head, decay_weights, default_gamma
from dflash.train.memory import CONTEXT, PLAIN, Economy, Need, choose, forecast
from dflash.train.optimiser import Optimiser, flatten
from dflash.train.order import BucketRows, Micro
from dflash.train.reader import Layout
from dflash.train.runner import Captured, Parts
from dflash.train.setup import from_host
from dflash.train.step import Batch, Model, Objective

CEILINGS, BUDGET, MAX_ROWS = (770, 1216, 1728, 2432, 3296, 8192), 49_152, 64
#: hidden, mlp, vocabulary, heads, kv heads, head dim, block, anchors, token budget
SHAPES = {
    "27B": (5120, 17408, 248320, 32, 8, 128, 32, 1024, BUDGET),
    "135M": (576, 1536, 49152, 9, 3, 64, 16, 128, 8192),
    "8B": (4096, 12288, 151936, 32, 8, 128, 16, 2048, 8192),
}
LAYERS = TAPS = 5
COUNTERS = ("allocated_bytes.all.current", "reserved_bytes.all.current", "num_alloc_retries", "num_device_alloc")


def shape_of(name: str) -> DrafterConfig:
    hidden, inner, vocabulary, heads, groups, dim, block, _, _ = SHAPES[name]
    return DrafterConfig(
        hidden_size=hidden, intermediate_size=inner, num_layers=LAYERS, num_heads=heads, num_kv_heads=groups,
        head_dim=dim, rms_norm_eps=1e-6, rope_theta=1e6, rope_scaling=None, max_position_embeddings=40960,
        vocab_size=vocabulary, block_size=block, taps=tuple(range(TAPS)), num_target_layers=36, mask_token_id=5,
    )  # fmt: skip


def buckets_of(name: str) -> list[BucketRows]:
    anchors, budget = SHAPES[name][-2:]
    rows = [max(1, min(MAX_ROWS, budget // ceiling)) for ceiling in CEILINGS]
    return [
        BucketRows(f"b{ceiling:04d}", ceiling, each, each, anchors)
        for ceiling, each in zip(CEILINGS, rows, strict=True)
    ]


def layout_of(name: str, buckets: list[BucketRows]) -> Layout:
    tails: dict[str, tuple[int, ...]] = {
        "hidden": (TAPS * SHAPES[name][0],),
        "input_ids": (),
        "labels": (),
        "loss_mask": (),
    }
    dtypes = {"hidden": torch.bfloat16, "input_ids": torch.int32, "labels": torch.int32, "loss_mask": torch.uint8}
    return Layout(tails, dtypes, max(bucket.rows_per_micro * bucket.ceiling for bucket in buckets))


def make_parts(name: str, economy: Economy = PLAIN) -> Parts:
    device, config = torch.device("cuda"), shape_of(name)
    drafter = Drafter(config)
    initialise(drafter, seed=0)
    flat = flatten(drafter, torch.bfloat16, device)
    vocabulary, hidden = config.vocab_size, config.hidden_size
    head = torch.randn(vocabulary, hidden, device=device, dtype=torch.bfloat16).mul_(0.02)
    if economy.host_embedding:
        embed = from_host(torch.randn(vocabulary, hidden).mul_(0.02).bfloat16(), device)
    else:
        embed = torch.randn(vocabulary, hidden, device=device, dtype=torch.bfloat16).mul_(0.02)
    rope = RopeTable(config, CEILINGS[-1] + config.block_size, torch.bfloat16, device)
    model = Model(drafter=drafter, rope=rope, embed_VH=embed, embed_factor=1.0, head=Head(head))
    decay = decay_weights(config.block_size, default_gamma(config.block_size), device)
    objective = Objective(loss="ce", decay_J=decay, prefix="agree")
    return Parts(model, objective, Optimiser(flat, weight_decay=0.0, clip=1.0), 0, device)


def random_batch(layout: Layout, bucket: BucketRows, vocabulary: int) -> Batch:
    """On the device, in memory that all batches share, fully valid; as a stage of the reader."""
    batch = layout.batch(layout.buffers(torch.device("cuda"), pin=False), bucket)
    batch.hidden.normal_()
    batch.input_ids.random_(0, vocabulary)
    batch.labels.copy_(batch.input_ids)
    batch.loss_mask.fill_(1)
    batch.lengths.fill_(bucket.ceiling)
    batch.documents.copy_(torch.arange(bucket.rows_per_micro))
    return batch


def cut(batch: Batch, layout: Layout, bucket: BucketRows) -> Batch:
    """The same numbers as rows of another bucket."""
    views: dict[str, Any] = {}
    for name, tail in layout.tails.items():
        flat = getattr(batch, name).reshape(-1, *tail)
        shape = (bucket.rows_per_micro, bucket.ceiling)
        views[name] = flat[: shape[0] * shape[1]].unflatten(0, shape)
    lengths = torch.full((bucket.rows_per_micro,), bucket.ceiling, dtype=torch.int32, device="cuda")
    return Batch(**views, lengths=lengths, documents=torch.arange(bucket.rows_per_micro, device="cuda"))


def gigabytes(count: int) -> float:
    return round(count / 1e9, 2)


def milliseconds(runner: Captured, work: Any, repeats: int = 3) -> float:
    """Median of the device's time in graphs."""
    times = []
    for _ in range(repeats):
        before = runner.graph_seconds
        work()
        times.append(1000 * (runner.graph_seconds - before))
    return round(statistics.median(times), 2)


def start() -> None:
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def graphs(name: str, budget: bool, replays: int, update: bool) -> dict[str, Any]:
    """Capture all, time each, then replay in random order."""
    start()
    buckets = buckets_of(name)
    layout, parts = layout_of(name, buckets), make_parts(name)
    widest = max(buckets, key=lambda bucket: bucket.rows_per_micro * bucket.ceiling)
    data = random_batch(layout, widest, shape_of(name).vocab_size)
    begun = time.perf_counter()
    runner = Captured(parts, layout, buckets, capture=True, budget=budget)
    seconds = time.perf_counter() - begun
    batches = {bucket.name: cut(data, layout, bucket) for bucket in buckets}
    times = {b.name: milliseconds(runner, lambda b=b: runner.micro(Micro(b, ()), batches[b.name], 1)) for b in buckets}
    update_ms = milliseconds(runner, lambda: runner.update(1e-4))
    need = Need(
        shape_of(name), tuple((b.rows_per_micro * b.ceiling, b.anchors) for b in buckets), bytes_a_token(layout)
    )
    static = (layout.largest * bytes_a_token(layout)) // 1  # this bench has one stage, not two
    generator = random.Random(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    begun_replays = time.perf_counter()
    try:
        for step in range(replays):
            bucket = generator.choice(buckets)
            runner.micro(Micro(bucket, ()), batches[bucket.name], step)
            if update:
                runner.update(1e-5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    loop = time.perf_counter() - begun_replays
    after = torch.cuda.memory_stats()
    reserved = list(runner.graphs.reserved.values())
    result = {
        "shape": name,
        "graph": "budget" if budget else "bucket",
        "graphs": len(runner.graphs.graphs),
        "ready_s": round(seconds, 1),
        "capture_s": {key: round(value, 1) for key, value in runner.graphs.seconds.items()},
        "rows": {bucket.name: bucket.rows_per_micro for bucket in buckets},
        "ms": times,
        "update_ms": update_ms,
        "peak_GB": gigabytes(torch.cuda.max_memory_allocated()),
        "forecast_GB": gigabytes(forecast(need).device - static),
        "reserved_GB": gigabytes(reserved[-1]),
        "reserved_over_largest_alone": round(reserved[-1] / reserved[0], 3),
        "max_reserved_GB": gigabytes(torch.cuda.max_memory_reserved()),
        "replays": replays,
        "ms_a_replay": round(1000 * loop / max(1, replays), 2),
        "counters_unchanged": all(before.get(key) == after.get(key) for key in COUNTERS),
        "loss": round(float(runner.outcome[2] / runner.outcome[3]), 3),
    }
    runner.close()
    return result


def bytes_a_token(layout: Layout) -> int:
    return layout.tails["hidden"][0] * 2 + 4 + 4 + 1


def card(limit: int = int(24e9)) -> dict[str, Any]:
    """Three steps of an 8B target's drafter, 2,048 anchors each, in an allocator of `limit` less the context."""
    start()
    name = "8B"
    bucket = BucketRows("b8192", 8192, 1, 1, 2048)
    layout = layout_of(name, [bucket])
    need = Need(shape_of(name), ((8192, 2048),), bytes_a_token(layout))
    economy = choose(need, limit)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((limit - CONTEXT) / total)
    try:
        parts = make_parts(name, economy)
        stages = [random_batch(layout, bucket, 151_936), layout.buffers(torch.device("cuda"), pin=False)]
        begun = time.perf_counter()
        runner = Captured(parts, layout, [bucket], capture=True, economy=economy)
        ready = time.perf_counter() - begun
        losses, times = [], []
        for step in range(3):
            times.append(milliseconds(runner, lambda s=step: runner.micro(Micro(bucket, ()), stages[0], s), repeats=1))
            outcome = runner.update(1e-4)
            losses.append(round(float(outcome[2] / outcome[3]), 3))
        result = {
            "shape": name, "limit_GB": gigabytes(limit), "economy": str(economy), "ready_s": round(ready, 1),
            "replays": runner.geometries[bucket.name].replays, "ms_a_batch": times, "losses": losses,
            "peak_GB": gigabytes(torch.cuda.max_memory_allocated()),
            "forecast_GB": gigabytes(forecast(need, economy).device),
            "max_reserved_GB": gigabytes(torch.cuda.max_memory_reserved()),
        }  # fmt: skip
        runner.close()
        return result
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


PARTS = {
    "buckets": lambda: graphs("27B", budget=False, replays=24, update=False),
    "budget": lambda: graphs("27B", budget=True, replays=6, update=False),
    "replays": lambda: graphs("135M", budget=False, replays=1000, update=True),
    "card": card,
}


def main() -> None:
    if not torch.cuda.is_available():
        print("bench/buckets.py needs a CUDA GPU; this machine has none.")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    for name in sys.argv[1:] or PARTS:
        print(json.dumps({"part": name, **PARTS[name]()}), flush=True)


if __name__ == "__main__":
    main()
