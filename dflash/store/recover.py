"""Put a store in order after a crash: nothing half-made stays, nothing complete is lost.

Run by every worker at its start, under its own lock. What belongs to another worker that is alive is left alone.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.errors import DflashError
from dflash.files import fsync_path, write_atomically
from dflash.store.index import append_line, encode_line, index_files, seal
from dflash.store.layout import Shard, crc32c, parse_shard_folder, shard_text
from dflash.store.lock import live_workers
from dflash.store.manifest import entry_of, read_manifest, specs_of
from dflash.store.paths import INDEX, SHARDS, TMP, index_path, map_inside, read_inside, shard_parts, shard_path
from dflash.store.reader import OpenArray
from dflash.store.shard import tmp_worker
from dflash.store.zarr_json import array_document

if TYPE_CHECKING:
    from dflash.store.store import Store


def recover(store: "Store", worker: int = 0) -> dict[str, Any]:
    """Remove dead folders of tmp/, cut torn index lines, and adopt complete shards that lack a line, into worker
    `worker`'s index file. A folder that cannot be adopted (a retired generation, another store's) stays until the
    shard is made again; then it is replaced.
    """
    others = live_workers(store.root, but=worker)
    for name in (INDEX, TMP, SHARDS):
        (store.root / name).mkdir(exist_ok=True)
    removed = remove_dead_tmp(store.root, others)
    if worker == 0:  # only worker 0 writes beside the shards
        for path in sorted(store.root.glob(".*.partial")):
            remove(path)
            removed.append(path.name)
    sealed = [n for n in index_files(store.root) if int(n[1:].partition(".")[0]) not in others and seal(store.root, n)]
    store.reload_index()
    adopted = []
    for shard in shards_on_disk(store):
        if shard in store.index.entries:
            continue
        entry = adoptable(store, shard, worker)
        if entry is not None:
            fsync_path(shard_path(store.root, shard).parent)
            append_line(store.root, worker, entry)
            store.index.add(entry)
            adopted.append(shard_text(shard))
    return {"removed": removed, "sealed": sealed, "adopted": adopted}


def remove_dead_tmp(root: Path, others: set[int]) -> list[str]:
    removed = []
    for name in sorted(os.listdir(root / TMP)) if (root / TMP).is_dir() else []:
        if tmp_worker(name) in others:
            continue
        remove(root / TMP / name)
        removed.append(name)
    return removed


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def shards_on_disk(store: "Store") -> Iterator[Shard]:
    """Shards of store.json's buckets whose folders exist; other names are nobody's and left alone."""
    for bucket in store.buckets:
        folder = store.root / SHARDS / bucket.name
        for name in sorted(os.listdir(folder)) if folder.is_dir() and not folder.is_symlink() else []:
            number = parse_shard_folder(name)
            if number is not None and number < bucket.num_shards:
                yield bucket.name, number


def adoptable(store: "Store", shard: Shard, worker: int) -> dict[str, Any] | None:
    """The index line of a shard that is complete on disk and of no retired generation, or None.

    The rename came after every file was durable, so the manifest with its crc32c, the documents, the sizes and the
    footers say enough; the rows are verified when they are read.
    """
    try:
        manifest, content = read_manifest(store, shard)
        checksums = {"zarr.json": crc32c(content)}
        for name, spec in specs_of(store, shard, manifest).items():
            document = read_inside(store.root, (*shard_parts(shard), name, "zarr.json"), limit=1 << 20)
            if document != array_document(spec, manifest["rows"]):
                return None
            size, footer_bytes = manifest["arrays"][name]["bytes"], spec.footer_bytes(manifest["rows"])
            footer = tail(store.root, (*shard_parts(shard), name, spec.file_name), footer_bytes)
            OpenArray(store, shard, spec, manifest["lengths"], size, crc32c(footer))
            checksums |= {f"{name}/zarr.json": crc32c(document), f"{name}/{spec.file_name}": crc32c(footer)}
    except (DflashError, OSError):
        return None
    if manifest["gen"] < store.index.next_generation(shard):
        return None
    return entry_of(manifest, checksums, shard_path(store.root, shard), worker)


def tail(root: Path, parts: tuple[str, ...], size: int) -> bytes:
    """The last `size` bytes of a file."""
    return map_inside(root, parts)[-size:].tobytes()


def rebuild_index(store: "Store", worker: int = 0) -> list[str]:
    """Write an index of one file, with a line for every complete shard from its manifest, and move the files that were
    there away (kept as NAME.old).

    Retired generations that are known still hold, at every moment: the new file is there before an old one goes.
    """
    if others := live_workers(store.root, but=worker):
        raise DflashError(f"Store {store.root} is being written to by worker {min(others)}; wait for it to end.")
    folder, path = store.root / INDEX, index_path(store.root, worker)
    folder.mkdir(exist_ok=True)
    retired = [{"retire": list(shard), "gen": gen} for shard, gen in sorted(store.index.retired.items())]
    made = [entry for shard in shards_on_disk(store) if (entry := adoptable(store, shard, worker)) is not None]
    before = index_files(store.root)
    if path.name in before:
        write_atomically(folder / f"{path.name}.old", read_inside(store.root, (INDEX, path.name), limit=1 << 31))
    write_atomically(path, b"".join(encode_line(line) for line in [*retired, *made]))
    for name in before:
        if name != path.name:
            os.replace(folder / name, folder / f"{name}.old")
    fsync_path(folder)
    store.reload_index()
    return [shard_text((entry["bucket"], entry["number"])) for entry in made]
