"""The layout of the store on disk: constants, buckets, and one `ArraySpec` per array of a shard.

Axes: R rows of a shard, C the bucket's ceiling, H hidden size, K taps. Every number that fixes where a byte lies is
computed here and nowhere else, from store.json's fields alone; docs/store-format.md says the same in prose.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dflash.errors import DflashError
from dflash.store.crc import crc32c as crc32c  # the name that the store imports from here

FORMAT_VERSION = 1
ALIGN = 4096  # row stride of `hidden` and `last`: a page, and what O_DIRECT asks for
PADDED_TOKENS_PER_SHARD = 32_768
STORAGES = ("bf16", "lz4", "int8")
TAP_CONVENTION = "output of decoder layer t, 0-based; the last layer's before the final norm"
MAX_CEILING = 1 << 20
MAX_ROWS = 1 << 40
INT32_MAX = 2**31 - 1

Shard = tuple[str, int]  # bucket name and shard number


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def bucket_name(ceiling: int, held_out: bool) -> str:
    return f"{'v' if held_out else 'b'}{ceiling:04d}"


def shard_name(number: int) -> str:
    return f"s{number:06d}"


def shard_text(shard: Shard) -> str:
    """A shard as people and JSON name it: `b1216/s000007`."""
    return f"{shard[0]}/{shard_name(shard[1])}"


def parse_shard_folder(name: str) -> int | None:
    """The number of a shard's folder name, or None when the name is not exactly what we would write."""
    match = re.fullmatch(r"s([0-9]{6,12})\.zarr", name)
    if match is None or name != f"{shard_name(int(match[1]))}.zarr":
        return None
    return int(match[1])


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Rows of one ceiling, either trained on or held out. The last shard has what is left."""

    ceiling: int
    held_out: bool
    rows: int
    rows_per_shard: int
    rows_per_forward: int

    @property
    def name(self) -> str:
        return bucket_name(self.ceiling, self.held_out)

    @property
    def num_shards(self) -> int:
        return -(-self.rows // self.rows_per_shard)

    def rows_of(self, number: int) -> range:
        """The bucket's row numbers that shard `number` holds."""
        if not 0 <= number < self.num_shards:
            raise DflashError(
                f"Bucket {self.name} has {self.num_shards} shards, so there is no shard {number}; give a smaller one."
            )
        return range(number * self.rows_per_shard, min((number + 1) * self.rows_per_shard, self.rows))

    def shard_of(self, row: int) -> tuple[int, int]:
        """The shard that holds the bucket's row `row`, and the row's number in it."""
        if not 0 <= row < self.rows:
            raise DflashError(f"Bucket {self.name} has {self.rows} rows, so there is no row {row}; give a smaller one.")
        return divmod(row, self.rows_per_shard)


def default_rows_per_shard(ceiling: int) -> int:
    """About 32,768 padded tokens a shard, at least one row."""
    return max(1, PADDED_TOKENS_PER_SHARD // ceiling)


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """One array of a shard of ceiling C: `[R, C, *token_shape]`, or `[R]` for `lengths` (`by_row` False).

    `sparse`: row stride rounded up to 4096, the tail behind the valid tokens is a hole, checksums over valid bytes.
    `packed`: rows lie behind one another as blosc blocks, checksums over a row's compressed bytes.
    `block`: of a sparse array in a shard that `dflash pack` wrote: tokens of an inner chunk. Only the chunks that hold
    valid tokens are in the file, row behind row, so there are no holes. 0 where rows have a fixed stride.
    """

    name: str
    dtype: np.dtype
    ceiling: int
    token_shape: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    padding: int = 0
    sparse: bool = False
    packed: bool = False
    block: int = 0
    by_row: bool = True
    view_dtype: str | None = None

    def shape(self, rows: int) -> tuple[int, ...]:
        return (rows, self.ceiling, *self.token_shape) if self.by_row else (rows,)

    def chunk_shape(self, rows: int) -> tuple[int, ...]:
        """Shape of one inner chunk: a row (or a block of its tokens), or all of `lengths`."""
        return (1, self.block or self.ceiling, *self.token_shape) if self.by_row else (rows,)

    def chunks(self, rows: int) -> int:
        return self.checksums(rows) * (self.ceiling // self.block if self.block else 1)

    def checksums(self, rows: int) -> int:
        """How many checksums the manifest has: one per row, or one of all of `lengths`."""
        return rows if self.by_row else 1

    @property
    def token_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.token_shape)

    def chunk_bytes(self, rows: int) -> int:
        """Bytes of one row (of all of `lengths`), decoded."""
        return self.ceiling * self.token_bytes if self.by_row else rows * self.dtype.itemsize

    def stride(self, rows: int) -> int:
        """Distance of two rows in the file (meaningless for packed arrays and those in blocks)."""
        size = self.chunk_bytes(rows)
        return up(size, ALIGN) if self.sparse else size

    def data_bytes(self, rows: int) -> int:
        return self.checksums(rows) * self.stride(rows)

    def block_bytes(self, lengths: np.ndarray) -> np.ndarray:
        """Bytes of each row of an array in blocks: its valid tokens in whole blocks."""
        return -(-lengths.astype(np.int64) // self.block) * self.block * self.token_bytes

    def footer_bytes(self, rows: int) -> int:
        """Per inner chunk u64 offset and u64 size, then a crc32c of them."""
        return 16 * self.chunks(rows) + 4

    def file_bytes(self, rows: int) -> int:
        return self.data_bytes(rows) + self.footer_bytes(rows)

    @property
    def file_name(self) -> str:
        """Zarr's key of the only chunk, with the separator `.`: `c.0.0.0`."""
        return "c" + ".0" * len(self.shape(1))


def array_specs(*, ceiling: int, hidden_size: int, taps: int, storage: str, labels: str) -> dict[str, ArraySpec]:
    """Every array of a shard, by name, in the order in which they are written."""
    position = ("row", "position")
    packed = storage == "lz4"

    def states(name: str, width: int, dtype: str) -> ArraySpec:
        return ArraySpec(
            name=name, dtype=np.dtype(dtype), ceiling=ceiling, token_shape=(width,), axes=(*position, "channel"),
            sparse=not packed, packed=packed, view_dtype="bfloat16" if dtype == "<u2" else None,
        )  # fmt: skip

    def small(name: str, dtype: str, width: int = 0, axis: str = "", padding: int = 0) -> ArraySpec:
        shape = (width,) if width else ()
        axes = (*position, axis) if width else position
        return ArraySpec(
            name=name, dtype=np.dtype(dtype), ceiling=ceiling, token_shape=shape, axes=axes, padding=padding
        )

    specs = [states("hidden", taps * hidden_size, "|i1" if storage == "int8" else "<u2")]
    if storage == "int8":
        specs.append(small("scale", "<f4", taps, "tap"))
    if labels == "last-hidden":
        specs.append(states("last", hidden_size, "<u2"))
    if labels.startswith("topk:"):
        specs += [small("topk_ids", "<i4", top_k(labels), "rank"), small("topk_logp", "<f2", top_k(labels), "rank")]
    specs.append(small("input_ids", "<i4"))
    if labels != "tokens":
        specs.append(small("labels", "<i4", padding=-1))
    specs.append(small("loss_mask", "|u1"))
    specs.append(ArraySpec(name="lengths", dtype=np.dtype("<i4"), ceiling=ceiling, axes=("row",), by_row=False))
    return {spec.name: spec for spec in specs}


def top_k(labels: str) -> int:
    """k of `topk:k`; 0 for the other kinds of labels."""
    return int(labels.removeprefix("topk:")) if labels.startswith("topk:") else 0


def check_labels(labels: str, where: str = "store.json") -> str:
    """`argmax`, `tokens`, `last-hidden` or `topk:K` with 1 <= K <= 1024."""
    if labels in ("argmax", "tokens", "last-hidden"):
        return labels
    if re.fullmatch(r"topk:[1-9][0-9]{0,3}", labels) and top_k(labels) <= 1024:
        return labels
    raise DflashError(
        f"{where}: labels is {labels[:40]!r}; it must be argmax, tokens, last-hidden or topk:K with K from 1 to 1024."
    )


def extraction_order(buckets: tuple[Bucket, ...]) -> Iterator[Shard]:
    """Largest ceiling first; the training and the held-out shards of a ceiling together."""
    for bucket in sorted(buckets, key=lambda b: (-b.ceiling, b.held_out)):
        for number in range(bucket.num_shards):
            yield bucket.name, number
