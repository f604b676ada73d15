"""The zarr.json documents of a shard, written by hand: a Zarr v3 group, and per array one `sharding_indexed` chunk.

Nothing here reads: a reader compares the bytes on disk with what these functions make, so that no number of a file is
trusted before it was computed from store.json.
"""

import json
from typing import Any

import numpy as np

from dflash.store.layout import ArraySpec, crc32c

LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
BLOSC_LEVEL = 5
NO_BLOCK_SIZE = 0  # blosc chooses
ABSENT = np.uint64(2**64 - 1)  # offset and size of an inner chunk that is not in the file: it reads as the fill value


def array_document(spec: ArraySpec, rows: int) -> bytes:
    """zarr.json of one array: the chunk is the whole array, its inner chunks are the rows, its index is at the end."""
    inner: list[dict[str, Any]] = [LITTLE]
    if spec.packed:
        inner.append(blosc_codec(spec.dtype.itemsize))
    sharding = {
        "chunk_shape": list(spec.chunk_shape(rows)),
        "codecs": inner,
        "index_codecs": [LITTLE, {"name": "crc32c"}],
        "index_location": "end",
    }
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(spec.shape(rows)),
        "data_type": spec.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(spec.shape(rows))}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": float(spec.padding) if spec.dtype.kind == "f" else spec.padding,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "dimension_names": list(spec.axes),
        "attributes": {"view_dtype": spec.view_dtype} if spec.view_dtype else {},
    }
    return _encode(document)


def group_document(manifest: dict[str, Any]) -> bytes:
    """zarr.json of a shard: a group whose attributes are the manifest."""
    return _encode({"zarr_format": 3, "node_type": "group", "attributes": manifest})


def blosc_codec(typesize: int) -> dict[str, Any]:
    configuration = {
        "typesize": typesize, "cname": "lz4", "clevel": BLOSC_LEVEL, "shuffle": "bitshuffle", "blocksize": NO_BLOCK_SIZE
    }  # fmt: skip
    return {"name": "blosc", "configuration": configuration}


def footer(offsets: np.ndarray, sizes: np.ndarray) -> bytes:
    """The chunk's index: per inner chunk u64 offset and u64 size, little-endian, then the crc32c of them."""
    index = np.stack([offsets, sizes], axis=1).astype("<u8").tobytes()
    return index + crc32c(index).to_bytes(4, "little")


def fixed_footer(spec: ArraySpec, rows: int) -> bytes:
    """The footer of an array whose rows have a fixed stride."""
    chunks = spec.chunks(rows)
    offsets = np.arange(chunks, dtype=np.uint64) * np.uint64(spec.stride(rows))
    return footer(offsets, np.full(chunks, spec.chunk_bytes(rows), dtype=np.uint64))


def block_footer(spec: ArraySpec, lengths: np.ndarray) -> bytes:
    """The footer of an array in blocks: those with valid tokens row behind row, the others absent (2^64 - 1)."""
    blocks, size = spec.ceiling // spec.block, spec.block * spec.token_bytes
    there = np.arange(blocks) < (-(-lengths.astype(np.int64) // spec.block))[:, None]
    offsets = (np.cumsum(there.reshape(-1)) - 1).astype(np.uint64) * np.uint64(size)
    return footer(np.where(there.reshape(-1), offsets, ABSENT), np.where(there.reshape(-1), np.uint64(size), ABSENT))


def parse_footer(content: bytes, data_bytes: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Offsets and sizes of a footer, or None when its crc32c or any range is wrong."""
    index, crc = content[:-4], content[-4:]
    if len(content) < 20 or len(index) % 16 or crc32c(index) != int.from_bytes(crc, "little"):
        return None
    offsets, sizes = np.frombuffer(index, dtype="<u8").reshape(-1, 2).astype(np.int64).T
    ends = offsets + sizes
    if (offsets < 0).any() or (sizes < 0).any() or (ends > data_bytes).any() or (ends < 0).any():
        return None
    return offsets, sizes


def _encode(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, ensure_ascii=True) + "\n").encode()
