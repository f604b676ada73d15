"""A small synthetic store for tests, made without torch: random states, documents and labels in a few buckets."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from safetensors.numpy import save_file

from dflash.store import (
    Bucket,
    DocumentsWriter,
    Plan,
    PlanRows,
    Prepared,
    ShardWriter,
    Store,
    StoreMeta,
    bucket_name,
    create_store,
)

TINY_CHAT = Path(__file__).parent / "assets" / "tiny-chat"
VOCAB = 320
ROWS_PER_SHARD = 4


def make_store(
    root: Path,
    *,
    hidden_size: int = 64,
    taps: Sequence[int] = (1, 2, 3),
    buckets: Sequence[int] = (64, 96),
    documents: int = 40,
    seed: int = 0,
    labels: str = "argmax",
    storage: str = "bf16",
    held_out: int = 6,
    fill: bool = True,
) -> Store:
    """A store with `documents` rows to train on and `held_out` more in `v` buckets; `fill` writes the shards too.

    Nothing is fsynced: a test does not outlive a power cut, and it is six times faster.
    """
    with mock.patch.multiple(os, fsync=lambda descriptor: None, fdatasync=lambda descriptor: None):
        return _make_store(Path(root), hidden_size, taps, buckets, documents, seed, labels, storage, held_out, fill)


def _make_store(
    root: Path,
    hidden_size: int,
    taps: Sequence[int],
    buckets: Sequence[int],
    documents: int,
    seed: int,
    labels: str,
    storage: str,
    held_out: int,
    fill: bool,
) -> Store:
    rng = np.random.default_rng(seed)
    scratch = root.with_name(root.name + ".scratch")
    prepared, made = _prepare(scratch, rng, buckets, documents, held_out)
    target = _target_folder(scratch / "target", rng, hidden_size)
    meta = StoreMeta(
        target={"name": "synthetic", "config": "c" * 64, "weights": "w" * 64},
        tokenizer="t" * 64, template="m" * 64, data="d" * 64, taps=tuple(taps), hidden_size=hidden_size,
        vocab_size=VOCAB, storage=storage, labels=labels, seed=seed, buckets=made, counts={"documents": documents},
    )  # fmt: skip
    store = create_store(root, meta, prepared, target)
    shutil.rmtree(scratch)
    if storage == "int8":
        save_file({"channel_rms": rng.random(len(taps) * hidden_size, dtype=np.float32)}, root / "calib.safetensors")
    if fill:
        for bucket, number in store.missing():
            fill_shard(store, bucket, number)
    return store


def fill_shard(store: Store, bucket: str, number: int, worker: int = 0, empty: Sequence[int] = ()) -> dict[str, Any]:
    """Write and commit one shard with states that depend on its rows only; rows in `empty` get length 0."""
    writer = ShardWriter(store, bucket, number, worker)
    rows = store.bucket(bucket).rows_of(number)
    lengths = store.plan.rows[bucket].length[rows.start : rows.stop].copy()
    lengths[list(empty)] = 0
    step = store.bucket(bucket).rows_per_forward
    for first in range(0, len(rows), step):
        part = range(first, min(first + step, len(rows)))
        drawn = [random_row(store, bucket, rows[i]) for i in part]
        writer.write(
            first, lengths[part.start : part.stop], {name: np.stack([d[name] for d in drawn]) for name in drawn[0]}
        )
    bad = [{"row": row, "source": f"data.jsonl:{row}", "tap": store.meta.taps[0]} for row in empty]
    return writer.commit(bad, "cpu")


def random_row(store: Store, bucket: str, row: int) -> dict[str, np.ndarray]:
    """Whole padded arrays of a row, the padding poisoned; the same at every call."""
    rng = np.random.default_rng([store.meta.seed, *bucket.encode(), row])
    ceiling = store.bucket(bucket).ceiling
    arrays = {}
    for name in store.array_names():
        shape, dtype = store.array_shape_dtype(name, ceiling)
        if dtype == np.uint16:
            values = rng.standard_normal(shape, dtype=np.float32)
            arrays[name] = (values.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16, truncated
        elif name == "labels":
            arrays[name] = _labels(store, bucket, row, rng)
        elif name in ("input_ids", "loss_mask"):
            continue
        elif name == "topk_ids":
            arrays[name] = rng.permuted(np.tile(np.arange(VOCAB, dtype=dtype), (shape[0], 1)), axis=1)[:, : shape[1]]
        elif dtype.kind == "f":
            arrays[name] = rng.standard_normal(shape).astype(dtype)
        else:
            arrays[name] = rng.integers(-100, 100, shape).astype(dtype)
    n = int(store.plan.rows[bucket].length[row])
    for array in arrays.values():
        array[n:] = np.nan if array.dtype.kind == "f" else 77
    return arrays


def _labels(store: Store, bucket: str, row: int, rng: np.random.Generator) -> np.ndarray:
    """The data's own token at nine of ten positions; -1 at position 0."""
    tokens, _ = store.documents[int(store.plan.rows[bucket].document[row])]
    labels = rng.integers(0, VOCAB, store.bucket(bucket).ceiling, dtype=np.int32)
    agree = rng.random(len(tokens)) < 0.9
    labels[: len(tokens)][agree] = tokens[agree]
    labels[0] = -1
    return labels


def _prepare(
    folder: Path, rng: np.random.Generator, ceilings: Sequence[int], documents: int, held_out: int
) -> tuple[Prepared, tuple[Bucket, ...]]:
    writer = DocumentsWriter(folder / "docs")
    rows: dict[str, list[tuple[int, ...]]] = {}
    for i in range(documents + held_out):
        which = i % len(ceilings)
        shortest = ceilings[which - 1] + 1 if which else 8
        n = int(rng.integers(shortest, ceilings[which] + 1))
        mask = np.zeros(n, dtype=np.uint8)
        start = int(rng.integers(2, n - 4))
        mask[start : start + int(rng.integers(3, n - start + 1))] = 1
        document = writer.add(rng.integers(3, VOCAB, n, dtype=np.int32), mask)
        bucket = bucket_name(ceilings[which], i >= documents)
        rows.setdefault(bucket, []).append((document, i, 0, i + 1, n, int(mask.sum())))
    made = writer.close()
    dtypes = ("i8", "i8", "i4", "i8", "i4", "i4")
    columns = {
        b: [np.array(c, dtype=d) for c, d in zip(zip(*r, strict=True), dtypes, strict=True)] for b, r in rows.items()
    }
    plan = Plan(files=("data.jsonl",), rows={b: PlanRows(*c) for b, c in columns.items()})
    plan.save(folder / "plan.npz")
    buckets = tuple(
        Bucket(ceiling=int(b[1:]), held_out=b[0] == "v", rows=len(r), rows_per_shard=ROWS_PER_SHARD, rows_per_forward=2)
        for b, r in sorted(rows.items())
    )
    fingerprints = {"data": "d" * 64, "tokenizer": "t" * 64, "template": "m" * 64}
    return Prepared(folder, made, plan, {"documents": documents}, fingerprints), buckets


def _target_folder(folder: Path, rng: np.random.Generator, hidden_size: int) -> Path:
    """What training needs of a target: tiny-chat's tokenizer and config at another width, random weights, tied head."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(TINY_CHAT / name, folder / name)
    config = json.loads((TINY_CHAT / "config.json").read_text())
    config |= {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "head_dim": max(hidden_size // 4, 8)}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {"weight": rng.standard_normal((VOCAB, hidden_size), dtype=np.float32) * 0.05}, folder / "embed.safetensors"
    )
    save_file({"weight": 1 + 0.1 * rng.standard_normal(hidden_size, dtype=np.float32)}, folder / "norm.safetensors")
    return folder
