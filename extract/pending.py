"""What is under way between the target and the disk: shards in the making, and batches that writer threads share."""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash.extract.batches import Batch
from dflash.extract.states import Stage
from dflash.store import ShardWriter, Store


class OpenShard:
    """A shard in the making: its writer, and how many of its rows are still to come."""

    def __init__(self, store: Store, shard: tuple[str, int], worker: int) -> None:
        self.writer = ShardWriter(store, shard[0], shard[1], worker)
        self.left = len(store.bucket(shard[0]).rows_of(shard[1]))
        self.bad: list[dict[str, Any]] = []
        self.lost = np.zeros((self.left, len(store.meta.taps), 2))  # per row and tap, of int8: see `lost_to_int8`
        self.committed = False
        self.lock = threading.Lock()

    def done(self, rows: int, bad: list[dict[str, Any]]) -> bool:
        """Note written rows; true for the caller that wrote the last ones."""
        with self.lock:
            self.left -= rows
            self.bad += bad
            return self.left == 0

    def quantisation(self) -> dict[str, list[float]] | None:
        """What int8 lost per tap; summed in the order of rows, so that a shard made again says the same."""
        if self.writer.store.meta.storage != "int8":
            return None
        error, squares = self.lost.sum(axis=0).T.tolist()
        return {"squared_error": error, "squares": squares}


@dataclass
class Written:
    """What travels to the writer threads with its buffer."""

    batch: Batch
    shard: OpenShard
    buffer: Stage
    ready: Any = None  # CUDA event: the copy into the buffer is done
    started: Any = None
    previous_end: Any = None
    parts: int = 1  # that are still to be written
