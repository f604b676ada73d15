"""bench/costs.py: what a drafter costs by size of target, the tables of docs/costs.md. Runs anywhere, in a second.

Disk is the product's own forecast (dflash/store/forecast.py) of a plan whose lengths repeat one distribution; memory is
that of `dflash train --dry-run` (train/memory.py). Hours are arithmetic at rates measured on an H200: training at the
step's own rate in docs/benchmarks.md, extraction at what a plain forward of an 8B model reaches there.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflash.drafter import DrafterConfig
from dflash.store import Bucket, Plan, PlanRows, StoreMeta, bucket_name, default_rows_per_shard, storage_bytes
from dflash.train.memory import Need, forecast, ladder

CONVERSATIONS = 1_000_000
SAMPLE = 4_000  # conversations whose store is forecast, then multiplied
MEAN_TOKENS, SUPERVISED = 1_000, 0.6  # of a conversation
CEILINGS = (770, 1216, 1728, 2432, 3296, 8192)
TAPS, LAYERS, BLOCK, EPOCHS, DENSITY = 5, 5, 16, 6, 1 / 6
CONTEXT, ANCHORS = 12_288, 2_048  # of a micro-step
EXTRACT_FLOPS, TRAIN_FLOPS = 400e12, 0.75 * 772e12  # a second


@dataclass(frozen=True)
class Target:
    """A public size of model; `active` are the parameters that a token passes."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    groups: int
    vocabulary: int
    active: float
    tied: bool = False


TARGETS = (
    Target("0.6B", 1024, 3072, 28, 16, 8, 151_936, 0.6e9, tied=True),
    Target("1.7B", 2048, 6144, 28, 16, 8, 151_936, 1.7e9, tied=True),
    Target("4B", 2560, 9728, 36, 32, 8, 151_936, 4.0e9, tied=True),
    Target("8B", 4096, 12288, 36, 32, 8, 151_936, 8.2e9),
    Target("14B", 5120, 17408, 40, 40, 8, 151_936, 14.8e9),
    Target("27B hybrid", 5120, 17408, 64, 40, 10, 248_320, 27e9),
    Target("30B, 3B active", 2048, 6144, 48, 32, 4, 151_936, 3.3e9),
    Target("32B", 5120, 25600, 64, 64, 8, 151_936, 32.8e9),
    Target("70B", 8192, 28672, 80, 64, 8, 128_256, 70.6e9),
)


def lengths() -> np.ndarray:
    """Lengths of the sample: many short conversations, few long ones (log-normal), none beyond the largest ceiling."""
    drawn = np.random.default_rng(0).lognormal(0.0, 0.7, SAMPLE)
    return np.clip(np.round(drawn / drawn.mean() * MEAN_TOKENS), 16, CEILINGS[-1]).astype(np.int32)


def plan() -> tuple[Plan, tuple[Bucket, ...]]:
    all_lengths, rows, buckets, first = lengths(), {}, [], 0
    place = np.searchsorted(CEILINGS, all_lengths)
    for number, ceiling in enumerate(CEILINGS):
        own = all_lengths[place == number]
        ids = np.arange(first, first + len(own), dtype=np.int64)
        first += len(own)
        supervised = (SUPERVISED * own).astype(np.int32)
        rows[bucket_name(ceiling, False)] = PlanRows(ids, ids, np.zeros(len(own), np.int32), ids + 1, own, supervised)
        per_shard = default_rows_per_shard(ceiling)
        buckets.append(
            Bucket(ceiling=ceiling, held_out=False, rows=len(own), rows_per_shard=per_shard, rows_per_forward=1)
        )
    return Plan(files=("chats.jsonl",), rows=rows), tuple(buckets)


def stored(target: Target, storage: str) -> tuple[float, float]:
    """Bytes a token, and of a million conversations."""
    rows, buckets = plan()
    meta = StoreMeta(
        target={"name": target.name, "config": "0" * 64, "weights": "0" * 64}, tokenizer="0" * 64, template="0" * 64,
        data="0" * 64, taps=tuple(range(1, TAPS + 1)), hidden_size=target.hidden, vocab_size=target.vocabulary,
        storage=storage, labels="argmax", seed=0, buckets=buckets, counts={},
    )  # fmt: skip
    size = storage_bytes(meta, rows)["bytes"]
    return size / int(lengths().sum()), size * CONVERSATIONS / SAMPLE


def need(target: Target) -> Need:
    shape = DrafterConfig(
        hidden_size=target.hidden, intermediate_size=target.inner, num_layers=LAYERS, num_heads=target.heads,
        num_kv_heads=target.groups, head_dim=128, rms_norm_eps=1e-6, rope_theta=1e6, rope_scaling=None,
        max_position_embeddings=40_960, vocab_size=target.vocabulary, block_size=BLOCK,
        taps=tuple(range(1, TAPS + 1)), num_target_layers=target.layers, mask_token_id=5,
    )  # fmt: skip
    return Need(shape, ((CONTEXT, ANCHORS),), token_bytes=2 * TAPS * target.hidden + 9, tied=target.tied)


def extraction_hours(target: Target) -> float:
    """A forward over the padded rows."""
    padded = np.asarray(CEILINGS)[np.searchsorted(CEILINGS, lengths())].sum() * CONVERSATIONS / SAMPLE
    return 2 * target.active * float(padded) / EXTRACT_FLOPS / 3600


def training_hours(target: Target) -> float:
    """Forward and backward of all epochs: projections of the context, the blocks' layers and attention, the head."""
    scale = EPOCHS * CONVERSATIONS / SAMPLE
    padded = float(np.asarray(CEILINGS)[np.searchsorted(CEILINGS, lengths())].sum()) * scale
    blocks = DENSITY * SUPERVISED * float(lengths().sum()) * scale
    hidden, query, key = target.hidden, target.heads * 128, target.groups * 128
    layer = 2 * hidden * query + 2 * hidden * key + 3 * hidden * target.inner
    context = padded * (4 * TAPS * hidden**2 + LAYERS * 12 * hidden * key)
    body = blocks * BLOCK * LAYERS * (6 * layer + 14 * query * (MEAN_TOKENS / 2 + BLOCK))
    head = blocks * 4 * (BLOCK - 1) * hidden * target.vocabulary
    return (context + body + head) / TRAIN_FLOPS / 3600


def figure(value: float) -> str:
    """Three digits at most, so that nothing looks more exact than it is."""
    digits = 0 if value >= 100 else 1 if value >= 1 else 2
    return f"{float(f'{value:.3g}'):,.{digits}f}"


def tables() -> str:
    lines = [
        "| target | bytes a token, bf16 | int8 | TB a million, bf16 | lz4 | int8 | H200 hours, extract | train |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for target in TARGETS:
        (token, whole), (_, packed), (small, eight) = (stored(target, kind) for kind in ("bf16", "lz4", "int8"))
        cells = [
            f"{round(token, -2):,.0f}",
            f"{round(small, -2):,.0f}",
            *(figure(s / 1e12) for s in (whole, packed, eight)),
        ]
        cells += [figure(extraction_hours(target)), figure(training_hours(target))]
        lines.append(f"| {target.name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| target | drafter, millions of parameters | exported, GB | training, GB | least, GB |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for target in TARGETS:
        wanted = need(target)
        parameters = forecast(wanted).parameters / 6  # fp32 masters and bf16 copies
        least = min(forecast(wanted, economy).card for economy in ladder(wanted))
        cells = [f"{parameters / 1e6:,.0f}", figure(2 * parameters / 1e9), figure(forecast(wanted).card / 1e9)]
        lines.append(f"| {target.name} | " + " | ".join([*cells, figure(least / 1e9)]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())
