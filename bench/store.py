"""The store's writer and readers against plain loops over the same bytes and buffers.

    python bench/store.py                     write, read cold and from the page cache: a table of ratios
    python bench/store.py --storage int8      of another storage (lz4 has no fixed bytes to compare with)

A plain loop is one thread that calls os.pwrite, or os.preadv, for the valid bytes of each row of each array, on files
of the same size with the same holes, fsynced, without a checksum. Ours are `ShardWriter` under the writer threads of an
extraction, and the trainer's `Reader`. All memory that is read into or written from has been touched before. A round
times ours and the plain loop one after the other, in turns which is first; figures and ratios are medians over rounds.

"cold": the pages were dropped from the cache before, and nothing has them mapped; a plain loop reads cold with and
without O_DIRECT. "page cache": all is in the cache; "first" with shards opened anew, "again" with them open.
"""

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflash.store import Bucket, DocumentsWriter, Plan, PlanRows, Prepared, ShardWriter, Store, StoreMeta, create_store
from dflash.store.calib import write_calib
from dflash.store.direct import aligned
from dflash.train.order import BucketRows, Micro
from dflash.train.reader import HUGE_PAGE, Layout, Reader, threads

WRITERS = 4  # as extraction on a GPU has
ROWS_AT_ONCE = 4  # of a forward, and of a micro-batch
PAIRS = {  # ours, what it is compared with, and the ratio that is wanted
    "write": ("plain write", 0.85),
    "write, O_DIRECT": ("plain write, O_DIRECT", None),  # the same, beside a loop that goes past the cache too
    "direct, cold": ("plain O_DIRECT, cold", 0.85),
    "direct, cold, buffered": ("plain, cold", 0.85),
    "mmap, cold": ("plain, cold", None),
    "mmap, page cache, first": ("plain, page cache", 0.85),
    "mmap, page cache, again": ("plain, page cache", 0.85),
}
Took = dict[str, list[tuple[float, float]]]  # ours, plain -> wall and processor seconds of every round
readers: dict[str, Reader] = {}
sizes: dict[str, int] = {}


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
    store = create_store(folder / "store", meta, Prepared(folder / "made", documents, plan, {}, {}), folder / "target")
    if storage == "int8":
        write_calib(store.root, np.ones(taps * hidden, np.float32))
    return store


def buffers(store: Store) -> dict[str, np.ndarray]:
    """[rows, ceiling, …] of every array, touched, in memory where the disk can read and write."""
    made = {}
    for name in store.array_names():
        shape, dtype = store.array_shape_dtype(name, store.buckets[0].ceiling)
        memory = aligned(ROWS_AT_ONCE * int(np.prod(shape)) * dtype.itemsize, HUGE_PAGE)
        memory[:] = 0
        made[name] = memory.view(dtype).reshape(ROWS_AT_ONCE, *shape)
    return made


def staged(store: Store) -> dict[str, np.ndarray]:
    """What a forward leaves in its buffer: every array that a writer is given."""
    made, rng = buffers(store), np.random.default_rng(1)
    for array in made.values():
        flat = array.reshape(-1).view(np.uint8)
        flat[:] = rng.integers(0, 256, len(flat), dtype=np.uint8)
    made["labels"][:] = rng.integers(0, 1000, made["labels"].shape)
    made["labels"][:, 0] = -1
    return {name: array for name, array in made.items() if name not in ("input_ids", "loss_mask")}


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


def rows_of(store: Store, number: int) -> Iterator[tuple[int, int, int]]:
    """(row of the shard, its place in a buffer, length) of every row."""
    bucket = store.buckets[0]
    lengths = store.plan.rows[bucket.name].length
    for inner, row in enumerate(bucket.rows_of(number)):
        yield inner, inner % ROWS_AT_ONCE, int(lengths[row])


def valid(array: np.ndarray, n: int, token_bytes: int, pages: bool) -> memoryview:
    """The memory of a row's valid tokens; with `pages` up to the next page, as O_DIRECT wants."""
    size = n * token_bytes
    return array.reshape(-1).view(np.uint8)[: -(-size // 4096) * 4096 if pages else size].data


def write_plainly(store: Store, arrays: dict[str, np.ndarray], folder: Path, flags: int) -> None:
    """The same arrays by one loop of os.pwrite; `flags` for the states only."""
    specs, bucket = store.specs(store.buckets[0].ceiling), store.buckets[0]
    sizes["write"] = 0
    folder.mkdir()
    for _, number in store.shards():
        rows = len(bucket.rows_of(number))
        for name in arrays:
            spec = specs[name]
            own = flags * spec.sparse
            descriptor = os.open(folder / f"{number}-{name}", os.O_WRONLY | os.O_CREAT | own, 0o644)
            os.ftruncate(descriptor, rows * spec.stride(rows))
            for inner, place, n in rows_of(store, number):
                os.pwrite(
                    descriptor, valid(arrays[name][place], n, spec.token_bytes, own > 0), inner * spec.stride(rows)
                )
                sizes["write"] += n * spec.token_bytes
            os.fsync(descriptor)
            os.close(descriptor)


def read_plainly(store: Store, slots: dict[str, np.ndarray], flags: int = 0) -> None:
    """Every row of every array by one loop of os.preadv into a slot; `flags` for the states only."""
    specs, bucket = store.specs(store.buckets[0].ceiling), store.buckets[0]
    sizes["read"] = 0
    for _, number in store.shards():
        folder = store.root / "shards" / bucket.name / f"s{number:06d}.zarr"
        own = {name: flags * specs[name].sparse for name in slots}
        files = {name: os.open(folder / name / specs[name].file_name, os.O_RDONLY | own[name]) for name in slots}
        for inner, place, n in rows_of(store, number):
            for name, array in slots.items():
                spec = specs[name]
                target = valid(array[place], n, spec.token_bytes, own[name] > 0)
                os.preadv(files[name], [target], inner * spec.stride(bucket.rows_per_shard))
                sizes["read"] += n * spec.token_bytes
        for descriptor in files.values():
            os.close(descriptor)


def read_ours(store: Store, io: str) -> None:
    """Every row by the trainer's reader."""
    bucket = store.buckets[0]
    shape = BucketRows(bucket.name, bucket.ceiling, bucket.rows, ROWS_AT_ONCE, 1)
    firsts = range(0, bucket.rows, ROWS_AT_ONCE)
    micros = (Micro(shape, tuple(range(first, min(first + ROWS_AT_ONCE, bucket.rows)))) for first in firsts)
    for _ in readers[io].batches(micros):
        pass


def forget_maps(store: Store) -> None:
    for io, reader in readers.items():
        reader.filler.store = Store.open(store.root, io=io)
    gc.collect()


def drop_cache(store: Store) -> None:
    """Drop the pages of all array files; those that are mapped would stay."""
    forget_maps(store)
    for path in (store.root / "shards").rglob("c.*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """(wall, processor) seconds."""
    start, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - processor


def race(
    took: Took, turn: int, ours: Callable[[], Any], plain: Callable[[], Any], before: Callable[[], Any] = os.sync
) -> None:
    """Time both, in turns which is first."""
    for who, work in [("ours", ours), ("plain", plain)][:: -1 if turn % 2 else 1]:
        before()
        took[who].append(seconds(work))


def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Gigabytes per second of every way, and ours against the plain loop's."""
    ceiling, hidden, taps = arguments.ceiling, arguments.hidden, arguments.taps
    token = hidden * taps * (1 if arguments.storage == "int8" else 2)
    per_shard = max(1, 32_768 // ceiling)
    rows = max(per_shard, int(arguments.gigabytes * 1e9 / (0.75 * ceiling * token)) // per_shard * per_shard)
    shape = {"hidden": hidden, "taps": taps, "ceiling": ceiling, "rows": rows, "per_shard": per_shard}
    found: dict[str, Took] = {name: defaultdict(list) for name in PAIRS}
    arrays: dict[str, np.ndarray] = {}
    for turn in range(arguments.rounds):
        for name, flags in (("write", 0), ("write, O_DIRECT", os.O_DIRECT)):
            store = make_store(folder / "ours", **shape, storage=arguments.storage)
            arrays = arrays or staged(store)
            plainly = partial(write_plainly, store, arrays, folder / "plain", flags)
            race(found[name], turn, partial(write_ours, store, arrays), plainly)
            shutil.rmtree(folder / "plain")
    for io in ("mmap", "direct"):
        layout = Layout.of(store, ROWS_AT_ONCE * ceiling)
        readers[io] = Reader(Store.open(store.root, io=io), layout, torch.device("cpu"))
        for tensor in (tensor for slot in readers[io].slots for tensor in slot.values()):
            tensor.zero_()
    slots = buffers(store)
    for turn in range(arguments.rounds):
        round_of_reading(store, slots, found, turn)
    return report(found)


def round_of_reading(store: Store, slots: dict[str, np.ndarray], found: dict[str, Took], turn: int) -> None:
    direct, mmap = (partial(read_ours, store, io) for io in ("direct", "mmap"))
    plain, cold = partial(read_plainly, store, slots), partial(drop_cache, store)
    race(found["direct, cold"], turn, direct, partial(plain, os.O_DIRECT), cold)
    race(found["direct, cold, buffered"], turn, direct, plain, cold)
    race(found["mmap, cold"], turn, mmap, plain, cold)
    plain()  # now all is in the cache
    race(found["mmap, page cache, first"], turn, mmap, plain, partial(forget_maps, store))
    mmap()
    race(found["mmap, page cache, again"], turn, mmap, plain, gc.collect)


def report(found: dict[str, Took]) -> dict[str, Any]:
    rows = []
    for name, took in found.items():
        size = sizes[name.partition(",")[0] if name.startswith("write") else "read"]
        row: dict[str, Any] = {"ours": name, "plain": PAIRS[name][0], "wanted": PAIRS[name][1]}
        for who, times in took.items():
            row[f"{who}_gb_s"] = size / median(wall for wall, _ in times) / 1e9
            row[f"{who}_cpu_ms_gb"] = median(cpu for _, cpu in times) / size * 1e12
        row["ratios"] = [plain / ours for (ours, _), (plain, _) in zip(took["ours"], took["plain"], strict=True)]
        rows.append(row | {"ratio": median(row["ratios"])})
    return {"bytes": sizes, "threads": {"write": WRITERS, **{io: threads(io) for io in readers}}, "ratios": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder here unless given")
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ceiling", type=int, default=1216)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--taps", type=int, default=5)
    parser.add_argument("--storage", choices=("bf16", "int8"), default="bf16")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=".bench-store-", dir=arguments.folder or Path.cwd()) as name:
        found = compare(arguments, Path(name))
    if arguments.json:
        print(json.dumps(found))
    else:
        show(found)


def show(found: dict[str, Any]) -> None:
    print(f"{found['bytes']['read'] / 1e9:.1f} GB, {os.cpu_count()} cores, threads {found['threads']}")
    titles = f"{'GB/s':>6}{'cpu ms/GB':>11}"
    print(f"{'ours':<24}{titles}   {'plain loop':<22}{titles}{'ratio':>7}  rounds")
    for each in found["ratios"]:
        ours, plain = (f"{each[f'{who}_gb_s']:>6.2f}{each[f'{who}_cpu_ms_gb']:>11.0f}" for who in ("ours", "plain"))
        rounds = " ".join(f"{ratio:.2f}" for ratio in each["ratios"])
        print(f"{each['ours']:<24}{ours}   {each['plain']:<22}{plain}{each['ratio']:>7.2f}  {rounds}")


if __name__ == "__main__":
    main()
