"""Which rows a micro-step trains on: a pure function of (seed, micro-step number), so any step can be computed
anywhere.

An epoch permutes the rows of every bucket, cuts them into micro-batches of one bucket each, and permutes the list of
all micro-batches, which interleaves the buckets in proportion. Micro-step m is entry m mod T of epoch m div T. No
generator state exists, and ranks agree without a word: rank r of w takes every w-th micro-step.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

MASK_64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_of(*parts: int) -> int:
    """One 64-bit key of several numbers."""
    key = 0
    for part in parts:
        key = int(mix(np.array([(key + GOLDEN + part) & MASK_64], dtype=np.uint64))[0])
    return key


def permutation(n: int, *key: int) -> np.ndarray:
    """A permutation of range(n) that depends on (n, key) alone."""
    return np.argsort(mix(np.arange(n, dtype=np.uint64) ^ np.uint64(key_of(*key))), kind="stable")


@dataclass(frozen=True)
class BucketRows:
    """A bucket as the trainer sees it: rows to train on, rows of a micro-batch, anchors of a micro-batch."""

    name: str
    ceiling: int
    rows: int
    rows_per_micro: int
    anchors: int
    available: np.ndarray | None = None  # int64 row numbers to train on; None: all of the bucket's

    @property
    def micros(self) -> int:
        return -(-self.rows // self.rows_per_micro)


@dataclass(frozen=True)
class Micro:
    """One micro-step: its bucket and its rows in the bucket; fewer than a whole micro-batch at a bucket's end."""

    bucket: BucketRows
    rows: tuple[int, ...]


class Order:
    """The order of micro-steps over all epochs."""

    def __init__(self, buckets: list[BucketRows], seed: int) -> None:
        self.buckets = [bucket for bucket in buckets if bucket.rows]
        self.seed = seed
        self.micros_per_epoch = sum(bucket.micros for bucket in self.buckets)
        starts = np.cumsum([0, *(bucket.micros for bucket in self.buckets)])
        self._starts = starts[:-1]
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, list[np.ndarray]]:
        rows = [permutation(b.rows, self.seed, epoch, b.ceiling) for b in self.buckets]
        return permutation(self.micros_per_epoch, self.seed, epoch, 0), rows

    def micro(self, number: int) -> Micro:
        """Micro-step `number`, from 0 over all epochs."""
        epoch, index = divmod(number, self.micros_per_epoch)
        order, rows = self._epoch(epoch)
        which = int(order[index])
        place = int(np.searchsorted(self._starts, which, side="right")) - 1
        bucket = self.buckets[place]
        first = (which - int(self._starts[place])) * bucket.rows_per_micro
        chosen = rows[place][first : first + bucket.rows_per_micro]
        return Micro(bucket, tuple((chosen if bucket.available is None else bucket.available[chosen]).tolist()))


def anchors_of(supervised: int, micros: int, density: float, most: int) -> int:
    """Anchors of every micro-batch of a bucket: density × mean supervised tokens, at least 1, at most `most`."""
    return max(1, min(most, round(density * supervised / max(1, micros))))
