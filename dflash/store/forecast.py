"""What a store will occupy on disk, from the plan alone and before any GPU work.

Counts what `du` counts: blocks of 4 KiB of every file, with the row tails of `hidden` and `last` as holes. For `lz4`
the share that is left of a row is an estimate (`LZ4_RATIO`), and so is the forecast; else it is within 2 %.
"""

from pathlib import Path
from typing import Any

import numpy as np

from dflash.files import allocated_bytes
from dflash.store.index import encode_line
from dflash.store.layout import Bucket, up
from dflash.store.meta import StoreMeta, with_crc
from dflash.store.plan import Plan, PlanRows
from dflash.store.zarr_json import array_document, group_document

BLOCK = 4096
LZ4_RATIO = 1.2
INLINE_EXTENTS = 4  # ext4 keeps so many in the inode; a file with more holes takes a block for its extent tree
ANY_CRC = 2_147_483_648  # of the usual number of digits
HASH = "0" * 64


def storage_bytes(meta: StoreMeta, plan: Plan, target_folder: Path | None = None) -> dict[str, Any]:
    """Allocated bytes of all files of the store: {bytes, shards, docs, target, buckets [{name, ceiling, held_out, rows,
    tokens, bytes}]}. `target_folder` is what will become STORE/target, as far as it exists already."""
    buckets: list[dict[str, Any]] = []
    index = 0
    for bucket in meta.buckets:
        size, lines = bucket_bytes(meta, bucket, plan.rows[bucket.name])
        index += lines
        tokens = int(plan.rows[bucket.name].length.sum(dtype=np.int64))
        buckets.append({
            "name": bucket.name, "ceiling": bucket.ceiling, "held_out": bucket.held_out, "rows": bucket.rows,
            "tokens": tokens, "bytes": size,
        })  # fmt: skip
    shards = sum(entry["bytes"] for entry in buckets)
    tokens, rows = sum(entry["tokens"] for entry in buckets), sum(bucket.rows for bucket in meta.buckets)
    docs = up(4 * tokens, BLOCK) + up(tokens, BLOCK) + up(8 * (rows + 1), BLOCK)
    target = allocated_bytes(target_folder) if target_folder is not None else 0
    row_bytes = 8 + 8 + 4 + 8 + 4 + 4 + 1
    files = up(row_bytes * rows + 1000 * len(buckets), BLOCK) + up(4000, BLOCK) + up(index, BLOCK)
    if meta.storage == "int8":
        files += up(4 * len(meta.taps) * meta.hidden_size + 100, BLOCK)
    whole = shards + docs + target + files
    return {"bytes": whole, "shards": shards, "docs": docs, "target": target, "buckets": buckets}


def bucket_bytes(meta: StoreMeta, bucket: Bucket, rows: PlanRows) -> tuple[int, int]:
    """Allocated bytes of a bucket's shards, and bytes of their index lines."""
    size = lines = 0
    specs = meta.specs(bucket.ceiling)
    documents: dict[tuple[str, int], int] = {}
    for number in range(bucket.num_shards):
        part = bucket.rows_of(number)
        n = len(part)
        lengths = rows.length[part.start : part.stop].astype(np.int64)
        for name, spec in specs.items():
            if (name, n) not in documents:
                documents[name, n] = up(len(array_document(spec, n)), BLOCK)
            size += documents[name, n] + up(spec.footer_bytes(n), BLOCK) if spec.sparse else documents[name, n]
            if spec.sparse:
                stored = -(-(lengths * spec.token_bytes) // BLOCK) * BLOCK
                gaps = int((stored < spec.stride(n)).sum())
                size += int(stored.sum()) + (BLOCK if gaps >= INLINE_EXTENTS else 0)
            elif spec.packed:
                size += up(int(lengths.sum() * spec.token_bytes / LZ4_RATIO) + spec.footer_bytes(n), BLOCK)
            else:
                size += up(spec.file_bytes(n), BLOCK)
        manifest, line = _documents(meta, bucket, number, rows)
        size += up(manifest, BLOCK)
        lines += line
    return size, lines


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
        name: {"bytes": spec.file_bytes(len(part)), "crc32c": [ANY_CRC] * spec.chunks(len(part))}
        for name, spec in specs.items()
    }
    documents = rows.document[part.start : part.stop].tolist()
    calib = HASH if meta.storage == "int8" else ""
    manifest = with_crc({
        **same, "format": 1, "store": HASH, "plan": HASH, "calib": calib, "first_row": part.start,
        "documents": documents, "arrays": arrays,
    })  # fmt: skip
    checksums = {"zarr.json": ANY_CRC}
    for name, spec in specs.items():
        checksums |= {f"{name}/zarr.json": ANY_CRC, f"{name}/{spec.file_name}": ANY_CRC}
    line = encode_line({**same, "bytes": 1 << 31, "checksums": checksums, "worker": 0})
    return len(group_document(manifest)), len(line)
