"""The store's writer and readers against plain loops over the same bytes and buffers; opening a store of many shards.

    python bench/store.py                     write, read cold and from the page cache: a table of ratios
    python bench/store.py --shards 20000      time to open such a store and to read the first batch
    python bench/store.py --storage int8      of another storage (lz4 has no fixed bytes to compare with)

A plain loop is one thread that calls os.pwrite, or os.preadv, for the valid bytes of each row of each array, on files
of the same size with the same holes, fsynced, without a checksum. Ours are `ShardWriter` under the writer threads of an
extraction, and the trainer's `Reader`. Rounds alternate, the best of each counts. "Cold" means that the pages were
dropped from the cache before (posix_fadvise); a plain loop reads cold with and without O_DIRECT.
"""

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflash.store import Bucket, DocumentsWriter, Plan, PlanRows, Prepared, ShardWriter, Store, StoreMeta, create_store
from dflash.store.calib import write_calib
from dflash.store.direct import aligned
from dflash.store.index import encode_line
from dflash.store.paths import index_path
from dflash.train.order import BucketRows, Micro
from dflash.train.reader import THREADS, Layout, Reader

WRITERS = 4  # as extraction on a GPU has
ROWS_AT_ONCE = 4  # of a forward, and of a micro-batch
Best = dict[str, tuple[float, float]]  # what was timed -> wall and processor seconds of its best round


def make_store(folder: Path, *, hidden: int, taps: int, ceiling: int, rows: int, per_shard: int, storage: str) -> Store:
    """A store without shards whose documents fill between half and all of the ceiling."""
    rng = np.random.default_rng(0)
    length = rng.integers(ceiling // 2, ceiling + 1, rows).astype(np.int32)
    shutil.rmtree(folder, ignore_errors=True)
    writer = DocumentsWriter(folder / "made" / "docs")
    for n in length:
        writer.add(rng.integers(0, 1000, n, dtype=np.int32), np.ones(n, np.uint8))
    documents, numbers = writer.close(), np.arange(rows)
    columns = PlanRows(numbers, numbers, np.zeros(rows, np.int32), numbers + 1, length, length)
    plan = Plan(files=("bench.jsonl",), rows={f"b{ceiling:04d}": columns})
    plan.save(folder / "made" / "plan.npz")
    (folder / "target").mkdir()
    bucket = Bucket(ceiling=ceiling, held_out=False, rows=rows, rows_per_shard=per_shard, rows_per_forward=ROWS_AT_ONCE)
    meta = StoreMeta(
        target={"name": "bench", "config": "c", "weights": "w"}, tokenizer="t", template="m", data="d",
        taps=tuple(range(taps)), hidden_size=hidden, vocab_size=1000, storage=storage, buckets=(bucket,),
    )  # fmt: skip
    return create_store(folder / "store", meta, Prepared(folder / "made", documents, plan, {}, {}), folder / "target")


def staged(store: Store) -> dict[str, np.ndarray]:
    """What a forward leaves in its buffer: [rows, ceiling, …] of every array that a writer is given."""
    ceiling, made, rng = store.buckets[0].ceiling, {}, np.random.default_rng(1)
    for name in store.array_names():
        shape, dtype = store.array_shape_dtype(name, ceiling)
        if name not in ("input_ids", "loss_mask"):
            size = ROWS_AT_ONCE * int(np.prod(shape)) * dtype.itemsize
            memory = aligned(size)
            memory[:] = rng.integers(0, 256, size, dtype=np.uint8)
            made[name] = memory.view(dtype).reshape(ROWS_AT_ONCE, *shape)
    made["labels"][:] = rng.integers(0, 1000, made["labels"].shape)
    made["labels"][:, 0] = -1
    return made


def write_ours(store: Store, arrays: dict[str, np.ndarray]) -> None:
    """All shards, as an extraction writes them; several are in hand at once."""
    bucket = store.buckets[0]
    lengths = store.plan.rows[bucket.name].length

    def batch(writer: ShardWriter, first: int) -> None:
        n = min(ROWS_AT_ONCE, writer.rows - first)
        part = lengths[writer.first_row + first : writer.first_row + first + n]
        writer.write(first, part, {name: array[:n] for name, array in arrays.items()})

    with ThreadPoolExecutor(WRITERS) as pool:
        commits = []
        for _, number in store.shards():
            writer = ShardWriter(store, bucket.name, number, 0)
            list(pool.map(lambda first, w=writer: batch(w, first), range(0, writer.rows, ROWS_AT_ONCE)))
            commits.append(pool.submit(writer.commit, [], "bench"))
        for commit in commits:
            commit.result()


def rows_of(store: Store) -> Iterator[tuple[int, int, int, int]]:
    """(shard, row of the shard, its place in a buffer, length) of every row."""
    bucket = store.buckets[0]
    for _, number in store.shards():
        rows = bucket.rows_of(number)
        for row in rows:
            inner = row - rows.start
            yield number, inner, inner % ROWS_AT_ONCE, int(store.plan.rows[bucket.name].length[row])


def write_plainly(store: Store, arrays: dict[str, np.ndarray], folder: Path) -> int:
    """The same arrays by one loop of os.pwrite; returns the bytes."""
    specs, bucket, written = store.specs(store.buckets[0].ceiling), store.buckets[0], 0
    folder.mkdir()
    for _, number in store.shards():
        rows = len(bucket.rows_of(number))
        for name in arrays:
            spec = specs[name]
            descriptor = os.open(folder / f"{number}-{name}", os.O_WRONLY | os.O_CREAT, 0o644)
            os.ftruncate(descriptor, rows * spec.stride(rows))
            for shard, inner, place, n in rows_of(store):
                if shard == number:
                    content = arrays[name][place, :n].reshape(-1).view(np.uint8)
                    written += os.pwrite(descriptor, content.data, inner * spec.stride(rows))
            os.fsync(descriptor)
            os.close(descriptor)
    return written


def read_plainly(store: Store, slots: dict[str, np.ndarray], flags: int = 0) -> int:
    """Every row of every array by one loop of os.preadv into a slot; `flags` for the states only. Returns the bytes."""
    specs, read = store.specs(store.buckets[0].ceiling), 0
    per_shard = store.buckets[0].rows_per_shard
    for _, number in store.shards():
        folder = store.root / "shards" / store.buckets[0].name / f"s{number:06d}.zarr"
        files = {
            name: os.open(folder / name / specs[name].file_name, os.O_RDONLY | flags * specs[name].sparse)
            for name in slots
        }
        for shard, inner, place, n in rows_of(store):
            for name, array in slots.items() if shard == number else ():
                spec = specs[name]
                size = n * spec.token_bytes
                asked = -(-size // 4096) * 4096 if flags and spec.sparse else size
                target = array[place].reshape(-1).view(np.uint8)[:asked]
                os.preadv(files[name], [target.data], inner * spec.stride(per_shard))
                read += size
        for descriptor in files.values():
            os.close(descriptor)
    return read


def read_ours(store: Store, io: str) -> None:
    """Every row by the trainer's reader."""
    bucket = store.buckets[0]
    shape = BucketRows(bucket.name, bucket.ceiling, bucket.rows, ROWS_AT_ONCE, 1)
    firsts = range(0, bucket.rows, ROWS_AT_ONCE)
    micros = (Micro(shape, tuple(range(first, min(first + ROWS_AT_ONCE, bucket.rows)))) for first in firsts)
    for _ in readers[io].batches(micros):
        pass


readers: dict[str, Reader] = {}


def drop_cache(store: Store) -> None:
    """Forget the readers' maps (mapped pages stay), then drop the pages of all array files."""
    for io, reader in readers.items():
        reader.filler.store = Store.open(store.root, io=io)
    gc.collect()
    for path in (store.root / "shards").rglob("c.*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """(wall, processor) seconds."""
    start, before = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - before


def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Gigabytes per second of every way, and ours against the plain loop's."""
    ceiling, hidden, taps = arguments.ceiling, arguments.hidden, arguments.taps
    token = hidden * taps * (1 if arguments.storage == "int8" else 2)
    per_shard = max(1, 32_768 // ceiling)
    rows = max(per_shard, int(arguments.gigabytes * 1e9 / (0.75 * ceiling * token)) // per_shard * per_shard)
    best: Best = {}
    for _ in range(arguments.rounds):
        store = make_store(
            folder / "ours", hidden=hidden, taps=taps, ceiling=ceiling, rows=rows, per_shard=per_shard,
            storage=arguments.storage,
        )  # fmt: skip
        round_of_writing(store, folder / "plain", best)
    round_of_reading(store, arguments.rounds, best)
    return report(best)


def note(best: Best, what: str, took: tuple[float, float]) -> None:
    best[what] = min(best.get(what, took), took)


def round_of_writing(store: Store, folder: Path, best: Best) -> None:
    arrays = staged(store)
    if store.meta.storage == "int8":
        write_calib(store.root, np.ones(arrays["hidden"].shape[-1], np.float32))
    note(best, "write", seconds(lambda: write_ours(store, arrays)))
    note(best, "plain write", seconds(lambda: note_bytes("write", write_plainly(store, arrays, folder))))
    shutil.rmtree(folder)


def round_of_reading(store: Store, rounds: int, best: Best) -> None:
    ceiling, slots = store.buckets[0].ceiling, {}
    for io in ("mmap", "direct"):
        readers[io] = Reader(
            Store.open(store.root, io=io), Layout.of(store, ROWS_AT_ONCE * ceiling), torch.device("cpu")
        )
    for reader in readers.values():
        for slot in reader.slots:
            for tensor in slot.values():
                tensor.zero_()  # as in a run that is warm
    for name in store.array_names():
        shape, dtype = store.array_shape_dtype(name, ceiling)
        memory = aligned(ROWS_AT_ONCE * int(np.prod(shape)) * dtype.itemsize, 2 << 20)
        memory[:] = 0
        slots[name] = memory.view(dtype).reshape(ROWS_AT_ONCE, *shape)
    ways: dict[str, Callable[[], Any]] = {
        "plain O_DIRECT, cold": lambda: read_plainly(store, slots, os.O_DIRECT),
        "direct, cold": lambda: read_ours(store, "direct"),
        "plain, cold": lambda: read_plainly(store, slots),
        "mmap, cold": lambda: read_ours(store, "mmap"),
    }
    for _ in range(rounds):
        for what, work in ways.items():
            drop_cache(store)
            note(best, what, seconds(work))
        read_plainly(store, slots)  # now all is in the page cache
        note(best, "plain, cached", seconds(lambda: note_bytes("read", read_plainly(store, slots))))
        note(best, "mmap, cached", seconds(lambda: read_ours(store, "mmap")))


sizes: dict[str, int] = {}


def note_bytes(what: str, count: int) -> None:
    sizes[what] = count


PAIRS = (
    ("write", "plain write", 0.85), ("direct, cold", "plain O_DIRECT, cold", 0.85),
    ("direct, cold", "plain, cold", 0.85), ("mmap, cold", "plain, cold", None), ("mmap, cached", "plain, cached", 0.85),
)  # fmt: skip


def report(best: Best) -> dict[str, Any]:
    found = []
    for ours, plain, wanted in PAIRS:
        size = sizes["write" if ours == "write" else "read"]
        found.append({
            "ours": ours, "plain": plain, "ours_gb_s": size / best[ours][0] / 1e9,
            "plain_gb_s": size / best[plain][0] / 1e9, "ratio": best[plain][0] / best[ours][0], "wanted": wanted,
            "ours_cpu_ms_gb": best[ours][1] / size * 1e12, "plain_cpu_ms_gb": best[plain][1] / size * 1e12,
        })  # fmt: skip
    return {"bytes": sizes, "threads": {"write": WRITERS, "read": THREADS}, "ratios": found}


def many_shards(count: int, folder: Path) -> dict[str, Any]:
    """A store of one row a shard, opened as the trainer does, and one batch read. The index has a line for every shard;
    folders are made for those that the batch needs, since no other is touched (tests/test_train_reader.py)."""
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
    return {"shards": count, "open": ready - start, "first_batch": end - ready, "all": end - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder here unless given")
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ceiling", type=int, default=1216)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--taps", type=int, default=5)
    parser.add_argument("--storage", choices=("bf16", "int8"), default="bf16")
    parser.add_argument("--shards", type=int, help="only time the opening of a store of so many shards")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=".bench-store-", dir=arguments.folder or Path.cwd()) as name:
        folder = Path(name)
        found = many_shards(arguments.shards, folder / "many") if arguments.shards else compare(arguments, folder)
    if arguments.json:
        print(json.dumps(found))
    elif arguments.shards:
        opened, first = found["open"], found["first_batch"]
        print(f"{found['shards']:,} shards: opened in {opened:.2f} s, first batch {first:.2f} s later")
    else:
        size = found["bytes"]["read"] / 1e9
        print(f"{size:.1f} GB, {WRITERS} writer and {THREADS} reader threads, {os.cpu_count()} cores")
        print(f"{'ours':<14}{'GB/s':>6}{'cpu ms/GB':>11}   {'plain loop':<22}{'GB/s':>6}{'cpu ms/GB':>11}{'ratio':>7}")
        for each in found["ratios"]:
            print(
                f"{each['ours']:<14}{each['ours_gb_s']:>6.2f}{each['ours_cpu_ms_gb']:>11.0f}   {each['plain']:<22}"
                f"{each['plain_gb_s']:>6.2f}{each['plain_cpu_ms_gb']:>11.0f}{each['ratio']:>7.2f}"
            )


if __name__ == "__main__":
    main()
