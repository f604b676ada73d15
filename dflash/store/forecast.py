"""What a store will occupy on disk, from the plan alone and before any GPU work.

Counts what `du` counts: blocks of 4 KiB of every file, with the row tails of `hidden` and `last` as holes. For `lz4`
the share that is left of a row is an estimate (`LZ4_RATIO`), and so is the forecast; else it is within 2 %.
"""

from typing import Any

import numpy as np

from dflash.store.index import encode_line
from dflash.store.layout import Bucket, up
from dflash.store.meta import StoreMeta, with_crc
from dflash.store.plan import Plan, PlanRows
from dflash.store.zarr_json import array_document, group_document

BLOCK = 4096
LZ4_RATIO = 1.2
INLINE_EXTENTS = 4  # ext4 keeps so many in the inode; a file with more holes takes a block for its extent tree
SAMPLED = 64  # manifests written out per bucket
ANY_CRC = 2_147_483_648  # of the usual number of digits
HASH = "0" * 64


def storage_bytes(meta: StoreMeta, plan: Plan, holes: bool = True) -> dict[str, Any]:
    """Allocated bytes of all files of the store but those of target/: {bytes, shards, docs, buckets [{name, ceiling,
    held_out, rows, tokens, bytes}]}. Without `holes` (a filesystem that has none) padding takes room as well."""
    buckets: list[dict[str, Any]] = []
    index = 0
    for bucket in meta.buckets:
        size, lines = bucket_bytes(meta, bucket, plan.rows[bucket.name], holes)
        index += lines
        tokens = int(plan.rows[bucket.name].length.sum(dtype=np.int64))
        buckets.append({
            "name": bucket.name, "ceiling": bucket.ceiling, "held_out": bucket.held_out, "rows": bucket.rows,
            "tokens": tokens, "bytes": size,
        })  # fmt: skip
    shards = sum(entry["bytes"] for entry in buckets)
    tokens, rows = sum(entry["tokens"] for entry in buckets), sum(bucket.rows for bucket in meta.buckets)
    docs = up(4 * tokens, BLOCK) + up(tokens, BLOCK) + up(8 * (rows + 1), BLOCK)
    row_bytes = 8 + 8 + 4 + 8 + 4 + 4 + 1
    files = up(row_bytes * rows + 1000 * len(buckets), BLOCK) + up(4000, BLOCK) + up(index, BLOCK)
    if meta.storage == "int8":
        files += up(4 * len(meta.taps) * meta.hidden_size + 100, BLOCK)
    return {"bytes": shards + docs + files, "shards": shards, "docs": docs, "buckets": buckets}


def bucket_bytes(meta: StoreMeta, bucket: Bucket, rows: PlanRows, holes: bool = True) -> tuple[int, int]:
    """Allocated bytes of a bucket's shards, and bytes of their index lines."""
    shards, n = bucket.num_shards, bucket.rows_per_shard
    if not shards:
        return 0, 0
    lengths_SR = np.zeros((shards, n), np.int64)  # rows that the last shard lacks count nothing
    lengths_SR.reshape(-1)[: bucket.rows] = rows.length
    last = len(bucket.rows_of(shards - 1))
    size = 0
    for spec in meta.specs(bucket.ceiling).values():
        for rows_each, count in ((n, shards - 1), (last, 1)):
            size += count * up(len(array_document(spec, rows_each)), BLOCK)
            if spec.sparse and holes:
                size += count * up(spec.footer_bytes(rows_each), BLOCK)
            elif not spec.packed:
                size += count * up(spec.file_bytes(rows_each), BLOCK)
        if spec.sparse and holes:
            stored = up_all(lengths_SR * spec.token_bytes)
            gaps = (stored < spec.stride(n)).sum(axis=1)
            gaps[-1] -= n - last
            size += int(stored.sum()) + BLOCK * int((gaps >= INLINE_EXTENTS).sum())
        elif spec.packed:
            size += int(up_all(lengths_SR.sum(axis=1) * spec.token_bytes / LZ4_RATIO + spec.footer_bytes(n)).sum())
    manifests, lines = _documents_of_all(meta, bucket, rows)
    return size + manifests, lines


def up_all(values: np.ndarray) -> np.ndarray:
    """Each value in whole blocks."""
    return (-(-values // BLOCK) * BLOCK).astype(np.int64)


def _documents_of_all(meta: StoreMeta, bucket: Bucket, rows: PlanRows) -> tuple[int, int]:
    """Allocated bytes of the manifests of a bucket, and bytes of its index lines: of all shards, or (they hardly
    differ) of `SAMPLED` spread over the bucket."""
    sampled = np.unique(np.linspace(0, bucket.num_shards - 1, SAMPLED).astype(int)).tolist()
    found = [_documents(meta, bucket, number, rows) for number in sampled]
    share = bucket.num_shards / len(found)
    return int(sum(up(manifest, BLOCK) for manifest, _ in found) * share), int(sum(line for _, line in found) * share)


def _documents(meta: StoreMeta, bucket: Bucket, number: int, rows: PlanRows) -> tuple[int, int]:
    """Sizes of a shard's manifest and of its index line, written with stand-ins for what is not known yet."""
    part = bucket.rows_of(number)
    specs = meta.specs(bucket.ceiling)
    same = {
        "bucket": bucket.name, "number": number, "gen": 0, "rows": len(part), "bad": [], "device": "NVIDIA H200",
        "lengths": rows.length[part.start : part.stop].tolist(),
        "software": dict.fromkeys(("dflash", "numpy", "torch", "transformers"), "0.10.0"),
    }  # fmt: skip
    arrays = {
        name: {"bytes": spec.file_bytes(len(part)), "crc32c": [ANY_CRC] * spec.checksums(len(part))}
        for name, spec in specs.items()
    }
    documents = rows.document[part.start : part.stop].tolist()
    calib = HASH if meta.storage == "int8" else ""
    sums = [1.2345678901234567] * len(meta.taps)
    lost = {"quantisation": {"squared_error": sums, "squares": sums}} if meta.storage == "int8" else {}
    manifest = with_crc({
        **same, **lost, "format": 1, "store": HASH, "plan": HASH, "calib": calib, "first_row": part.start,
        "documents": documents, "arrays": arrays,
    })  # fmt: skip
    checksums = {"zarr.json": ANY_CRC}
    for name, spec in specs.items():
        checksums |= {f"{name}/zarr.json": ANY_CRC, f"{name}/{spec.file_name}": ANY_CRC}
    line = encode_line({**same, "bytes": 1 << 31, "checksums": checksums, "worker": 0})
    return len(group_document(manifest)), len(line)
