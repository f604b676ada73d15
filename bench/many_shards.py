"""bench/many_shards.py [--shards 20000]: time to open a store of so many shards, and to read the first batch."""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.store import drop_cache, make_store, staged
from dflash.store import ShardWriter, Store
from dflash.store.index import encode_line
from dflash.store.paths import index_path
from dflash.train.order import BucketRows, Micro
from dflash.train.reader import Layout, Reader


def many_shards(count: int, folder: Path) -> tuple[float, float]:
    """Seconds to open, as the trainer does, and to read one batch of a store of one row a shard. The index has a line
    for every shard, but only those that the batch needs have folders: no other is touched (tests/test_train_reader.py).
    """
    chosen = np.random.default_rng(2).permutation(count)[:32].tolist()
    with mock.patch.multiple(os, fsync=lambda descriptor: None, fdatasync=lambda descriptor: None):
        store = make_store(folder, hidden=64, taps=3, ceiling=64, rows=count, per_shard=1, storage="bf16")
        arrays, lengths = staged(store), store.plan.rows["b0064"].length
        for number in chosen:
            writer = ShardWriter(store, "b0064", number, 0)
            writer.write(0, lengths[number : number + 1], {name: array[:1] for name, array in arrays.items()})
            entry = writer.commit([], "bench")
    lines = [encode_line(entry | {"number": n, "lengths": [int(lengths[n])]}) for n in set(range(count)) - set(chosen)]
    with index_path(store.root, 0).open("ab") as file:
        file.write(b"".join(lines))
    drop_cache(store)
    start = time.perf_counter()
    opened = Store.open(store.root)
    assert not opened.missing()
    ready = time.perf_counter()
    reader = Reader(opened, Layout.of(opened, 32 * 64), torch.device("cpu"))
    micro = Micro(BucketRows("b0064", 64, count, 32, 1), tuple(chosen))
    next(iter(reader.batches(iter([micro]))))
    end = time.perf_counter()
    return ready - start, end - ready


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=20_000)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder here unless given")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=".bench-store-", dir=arguments.folder or Path.cwd()) as name:
        opened, first = many_shards(arguments.shards, Path(name) / "many")
    print(f"{arguments.shards:,} shards: opened in {opened:.2f} s, first batch {first:.2f} s later")


if __name__ == "__main__":
    main()
