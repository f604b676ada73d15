"""Which rows make up a forward: fixed slices of a shard, the same whoever makes them and however often."""

from collections.abc import Iterator
from dataclasses import dataclass

from dflash.store import Store


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows `first` to `first + len(documents)` of a shard: one forward."""

    shard: tuple[str, int]
    ceiling: int
    first: int
    documents: tuple[int, ...]


def batches_of(store: Store, shard: tuple[str, int]) -> Iterator[Batch]:
    """The forwards of a shard: fixed slices, the same whoever makes them."""
    bucket = store.bucket(shard[0])
    rows = bucket.rows_of(shard[1])
    for first in range(rows.start, rows.stop, bucket.rows_per_forward):
        stop = min(first + bucket.rows_per_forward, rows.stop)
        documents = store.plan.rows[bucket.name].document[first:stop]
        yield Batch(
            shard=shard, ceiling=bucket.ceiling, first=first - rows.start, documents=tuple(int(d) for d in documents)
        )


def largest_batch(store: Store) -> tuple[int, int]:
    """(most rows, most padded tokens) of a forward of this store."""
    sizes = [(min(b.rows, b.rows_per_forward), b.ceiling) for b in store.buckets]
    return max(rows for rows, _ in sizes), max(rows * ceiling for rows, ceiling in sizes)


def source_of(store: Store, shard: tuple[str, int], row: int) -> str:
    """`file:line` of a shard's row."""
    rows, bucket = store.plan.rows[shard[0]], store.bucket(shard[0])
    place = bucket.rows_of(shard[1]).start + row
    return f"{store.plan.files[int(rows.file[place])]}:{int(rows.line[place])}"
