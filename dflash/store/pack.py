"""The same store without holes, for tar and object stores, which write holes out as zeros.

A packed store has the store.json, documents and target of its source, byte for byte, and the same shards; only the
files of `hidden` and `last` differ: their inner chunks are blocks of g tokens of a row, and those without a valid token
are absent, as Zarr allows. What is left lies row behind row. Rows keep their checksums, so reader, trainer and `verify`
take both forms; which one a shard has stands in its manifest (`block`).

Shards are committed one by one as everywhere and store.json is written last; the same command goes on where it stopped.
"""

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash.errors import DflashError
from dflash.files import allocated_bytes, fsync_path, replacing, write_atomically
from dflash.progress import progress, say
from dflash.signals import catch_stop
from dflash.store import paths, zarr_json
from dflash.store.index import append_line, disk_full
from dflash.store.layout import ArraySpec, Shard, crc32c, shard_text
from dflash.store.lock import acquire_lock
from dflash.store.manifest import entry_of, read_manifest
from dflash.store.meta import with_crc
from dflash.store.reader import OpenArray, OpenShard
from dflash.store.recover import recover
from dflash.store.shard import put_in_place, pwrite_all, tmp_name, write_durably
from dflash.store.store import Store, check_file, refuse_links

BLOCK_TOKENS = 64
THREADS = 2


def block_of(ceiling: int) -> int:
    """Tokens of a block: the divisor of the ceiling that is nearest to 64 (of two, the smaller)."""
    divisors = [n for n in range(1, ceiling + 1) if ceiling % n == 0]
    return min(divisors, key=lambda n: (abs(n - BLOCK_TOKENS), n))


def pack(root: str | Path, out: str | Path) -> dict[str, Any]:
    """Write the store `root` to the folder `out` in packed form; returns sizes and counts."""
    started = time.monotonic()
    store, out = Store.open(root), Path(out)
    _check_place(store, out)
    existed = out.exists()
    with _disk_errors(out), catch_stop() as stop, acquire_lock(out, 0, 1):
        for folder in (paths.INDEX, paths.TMP, *(f"{paths.SHARDS}/{bucket.name}" for bucket in store.buckets)):
            (out / folder).mkdir(parents=True, exist_ok=True)
        fsync_path(out / paths.SHARDS)
        _copy_files(store, out)
        packed = Store(out, store.meta, store.plan, store.documents)
        if existed:
            recover(packed)
        todo = [shard for shard in sorted(store.index.entries) if not _is_there(store, packed, shard)]
        _check_space(store, out, todo)
        with progress("pack", len(todo), "shards") as advance, ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(lambda shard: None if stop else pack_shard(store, packed, shard), todo):
                advance(1)
        there = len(packed.index.entries)
        stop.check(
            f"{there} of {len(store.index.entries)} shards are in {out}; run the same command again for the others."
        )
        write_atomically(out / paths.STORE_JSON, store.meta.encode())
    if not todo:
        say(f"{out} holds all shards of {root}; nothing to do.")
    return {
        "store": str(root), "out": str(out), "shards": there, "packed": len(todo),
        "missing": [shard_text(shard) for shard in store.missing()],
        "bytes": allocated_bytes(out), "file_bytes": _file_bytes(out),
        "source_bytes": allocated_bytes(store.root), "source_file_bytes": _file_bytes(store.root),
        "seconds": time.monotonic() - started,
    }  # fmt: skip


def pack_shard(store: Store, packed: Store, shard: Shard) -> None:
    """Write one shard into tmp/ of the packed store, every row verified on its way, and commit it."""
    opened = OpenShard(store, shard)
    folder = packed.root / paths.TMP / tmp_name(shard, 0)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    arrays: dict[str, Any] = {}
    checksums: dict[str, int] = {}
    for name in opened.specs:
        arrays[name], more = _write_array(opened, opened.array(name), folder / name)
        checksums |= more
    # what is there, or was retired there by `verify --repair`, is only followed by a later generation
    before = packed.index.entries.get(shard, {"gen": -1})["gen"]
    gen = max(opened.manifest["gen"], packed.index.next_generation(shard), before + 1)
    manifest = {**opened.manifest, "arrays": arrays, "gen": gen}
    document = zarr_json.group_document(with_crc(manifest))
    write_durably(folder / "zarr.json", document)
    fsync_path(folder)
    entry = entry_of(manifest, {"zarr.json": crc32c(document), **checksums}, folder, 0)
    put_in_place(folder, packed.root, shard)
    append_line(packed.root, 0, entry)
    packed.index.add(entry)


def _write_array(opened: OpenShard, array: OpenArray, folder: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """One array's folder; returns what manifest and index line say of it."""
    about = dict(opened.manifest["arrays"][array.spec.name])
    spec = array.spec
    if spec.sparse:
        spec = replace(spec, block=block_of(spec.ceiling))
        about["block"] = spec.block
    folder.mkdir()
    descriptor = os.open(folder / spec.file_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        if spec.sparse:
            about["bytes"], footer = _write_blocks(descriptor, opened, array, spec)
        else:
            _check_rows(array, about["crc32c"])
            pwrite_all(descriptor, array.map, 0)
            footer = array.map[-spec.footer_bytes(opened.rows) :].tobytes()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    document = zarr_json.array_document(spec, opened.rows)
    write_durably(folder / "zarr.json", document)
    fsync_path(folder)
    return about, {f"{spec.name}/zarr.json": crc32c(document), f"{spec.name}/{spec.file_name}": crc32c(footer)}


def _write_blocks(descriptor: int, opened: OpenShard, array: OpenArray, spec: ArraySpec) -> tuple[int, bytes]:
    """The valid blocks of all rows and the footer; returns the file's size and the footer."""
    crcs, lengths = opened.manifest["arrays"][spec.name]["crc32c"], np.array(opened.lengths, dtype=np.int64)
    row_TW = np.empty((spec.ceiling, *spec.token_shape), spec.dtype)
    end = 0
    for row, (n, size) in enumerate(zip(opened.lengths, spec.block_bytes(lengths).tolist(), strict=True)):
        array.copy_row(row, n, crcs[row], row_TW)
        content = row_TW.reshape(-1).view(np.uint8)[:size]
        content[n * spec.token_bytes :] = 0
        pwrite_all(descriptor, content, end)
        end += size
    footer = zarr_json.block_footer(spec, lengths)
    pwrite_all(descriptor, footer, end)
    return end + len(footer), footer


def _check_rows(array: OpenArray, crcs: list[int]) -> None:
    """The rows of an array that is copied as it is fit their checksums."""
    for row, crc in enumerate(crcs):
        start = int(array.starts[row])
        size = int(array.sizes[row]) if array.spec.packed else array.spec.chunk_bytes(array.rows)
        if crc32c(array.map[start : start + size]) != crc:
            raise array.damaged(row)


def _check_place(store: Store, out: Path) -> None:
    """`out` is new, empty, an unfinished pack, or a pack of this very store."""
    if out.exists() and not out.is_dir():
        raise DflashError(f"{out} is not a folder; name a new one for the packed store.")
    if out.resolve().is_relative_to(store.root.resolve()):
        raise DflashError(f"{out} lies in the store itself; name a folder outside of {store.root}.")
    paths.check_layout(out, (bucket.name for bucket in store.buckets))  # what is tidied up there is ours alone
    refuse_links(out)
    strange = sorted(set(os.listdir(out)) - set(paths.LAYOUT)) if out.exists() else []
    if any(not (name.startswith(".") and name.endswith(".partial")) for name in strange):
        raise DflashError(f"{out} holds {strange[0]!r}, which is no part of a store; name a new or an empty folder.")
    known = out / paths.STORE_JSON
    if known.exists() and known.read_bytes() != store.meta.encode():
        raise DflashError(f"{out} already holds another store than {store.root}; name a new folder.")


def _copy_files(store: Store, out: Path) -> None:
    """docs/, target/, plan.npz and calib.safetensors: copied where they are not there yet, compared by sha256."""
    for parts, about in store.meta.known_files():
        try:
            check_file(out, parts, about, whole=True)
        except DflashError:
            _copy(store.root.joinpath(*parts), out.joinpath(*parts))
            check_file(out, parts, about, whole=True)
    if (store.root / paths.CALIB).exists():
        _copy(store.root / paths.CALIB, out / paths.CALIB)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as sibling:
        shutil.copyfile(source, sibling, follow_symlinks=False)


def _is_there(store: Store, packed: Store, shard: Shard) -> bool:
    """The shard is packed already, with the rows that the source has now: generations count for each store alone."""
    entry = packed.index.entries.get(shard)
    if entry is None:
        return False
    try:
        source, there = read_manifest(store, shard)[0], read_manifest(packed, shard)[0]
    except DflashError:
        return False
    same = all(there["arrays"][name]["crc32c"] == about["crc32c"] for name, about in source["arrays"].items())
    return same and there["gen"] == entry["gen"]


def _check_space(store: Store, out: Path, todo: list[Shard]) -> None:
    """Refuse at once what certainly does not fit."""
    needed = sum(int(store.index.entries[shard]["bytes"]) for shard in todo)
    free = shutil.disk_usage(out).free
    if needed > free:
        raise DflashError(
            f"{out} needs about {needed / 1e9:,.1f} GB for {len(todo):,} shards, but {free / 1e9:,.1f} GB are free"
            " there; make room or name another folder."
        )


def _file_bytes(folder: Path) -> int:
    """Sizes of all files, holes counted: what plain tar and object stores take."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise disk_full(error, out) from error
