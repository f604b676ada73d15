"""The store opened: what the states are, which shards are there, and rows read into the caller's buffers.

Opening compares what is cheap: store.json's checksum, the plan's fingerprint, the sizes of all files of docs/ and
target/, and the sha256 of those up to 1 MiB. Larger ones are hashed by `verify` only; every row is verified when read.
"""

import contextlib
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from dflash.errors import DflashError
from dflash.files import fsync_path, sha256_file, write_atomically
from dflash.store import paths
from dflash.store.index import disk_full, load_index
from dflash.store.layout import ArraySpec, Bucket, Shard, extraction_order
from dflash.store.meta import StoreMeta, read_meta
from dflash.store.plan import DOCS_FILES, Documents, Plan, Prepared
from dflash.store.reader import OpenShard, ShardCache

HASHED_AT_OPEN = 1 << 20
MAX_CALIB = 1 << 28


class Store:
    """A store on disk. Reading is thread-safe; writing goes through `ShardWriter` under `acquire_lock`.

    `io`: how rows are read: "mmap" (out of the page cache) or "direct" (past it).
    """

    def __init__(self, root: Path, meta: StoreMeta, plan: Plan, documents: Documents, io: str = "mmap") -> None:
        self.io = io
        self.root, self.meta, self.plan, self.documents = root, meta, plan, documents
        self.fingerprint = meta.fingerprint()
        self.buckets: tuple[Bucket, ...] = meta.buckets
        self._by_name = {bucket.name: bucket for bucket in meta.buckets}
        self._specs: dict[int, dict[str, ArraySpec]] = {}
        self._cache = ShardCache()
        self._calib = ""
        self.documents_sound = True  # False in `verify`, when docs/ is damaged and no shard may be blamed for it
        self.reload_index()

    @staticmethod
    def open(root: str | Path, io: str = "mmap") -> "Store":
        root = Path(root)
        meta = read_meta(root)
        paths.check_layout(root, (bucket.name for bucket in meta.buckets))
        documents = Documents.open(root / paths.DOCS)
        for parts, about in meta.known_files():
            check_file(root, parts, about)
        refuse_links(root)
        plan = Plan.load(root / paths.PLAN)
        plan.check(meta.buckets, documents)
        if plan.fingerprint() != meta.fingerprints["plan"]:
            raise DflashError(
                f"{paths.PLAN} of store {root} is not the one of store.json (other fingerprint); restore both."
            )
        return Store(root, meta, plan, documents, io)

    @property
    def target_folder(self) -> Path:
        return self.root / paths.TARGET

    def reload_index(self) -> None:
        """Read the index files again, for lines that other writers have appended."""
        self.index = load_index(self.root, self.meta.buckets)

    def bucket(self, name: str) -> Bucket:
        if name not in self._by_name:
            raise DflashError(
                f"Store {self.root} has no bucket {name[:20]!r}; use one of {', '.join(sorted(self._by_name))}."
            )
        return self._by_name[name]

    def specs(self, ceiling: int) -> dict[str, ArraySpec]:
        if ceiling not in self._specs:
            self._specs[ceiling] = self.meta.specs(ceiling)
        return self._specs[ceiling]

    def array_names(self) -> tuple[str, ...]:
        """The arrays that have rows, in order (`lengths` is not among them)."""
        return tuple(name for name, spec in self.specs(self.buckets[0].ceiling).items() if spec.by_row)

    def array_shape_dtype(self, name: str, ceiling: int) -> tuple[tuple[int, ...], np.dtype]:
        """Shape of one row at `ceiling`, and the dtype: what a buffer for `read_into` needs."""
        spec = self.specs(ceiling)[name]
        return spec.shape(1)[1:], spec.dtype

    def shards(self) -> list[Shard]:
        """All shards of the plan in extraction order."""
        return list(extraction_order(self.buckets))

    def missing(self) -> list[Shard]:
        """Shards that are not there yet, in extraction order."""
        return [shard for shard in self.shards() if shard not in self.index.entries]

    def length(self, bucket: str, row: int) -> int | None:
        """Valid tokens of a row: 0 when its states were not finite, None while its shard is missing."""
        number, inner = self.bucket(bucket).shard_of(row)
        entry = self.index.entries.get((bucket, number))
        return None if entry is None else int(entry["lengths"][inner])

    def read_into(self, bucket: str, row: int, out: dict[str, np.ndarray]) -> int:
        """Copy the valid part of row `row` of a bucket into `out[name][:n]` for each named array; return n.

        Buffers are C-contiguous, `[at least n, ...]`, of the array's dtype; what lies behind n is left alone. Checksums
        are verified over the copied bytes.
        """
        number, inner = self.bucket(bucket).shard_of(row)
        return self._cache.get(self, (bucket, number)).read_into(inner, out)

    def read_row(self, bucket: str, row: int) -> dict[str, np.ndarray]:
        """The valid part of every array of a row, in memory of its own."""
        number, inner = self.bucket(bucket).shard_of(row)
        shard = self._cache.get(self, (bucket, number))
        specs = self.specs(self.bucket(bucket).ceiling)
        n = shard.lengths[inner]
        out = {name: np.empty((n, *specs[name].token_shape), specs[name].dtype) for name in self.array_names()}
        shard.read_into(inner, out)
        return out

    def calib_fingerprint(self) -> str:
        """sha256 of calib.safetensors for int8 stores, else empty; every shard's manifest carries it."""
        if self.meta.storage == "int8" and not self._calib:
            with contextlib.suppress(FileNotFoundError):
                content = paths.read_inside(self.root, (paths.CALIB,), limit=MAX_CALIB)
                self._calib = hashlib.sha256(content).hexdigest()
        return self._calib

    def check_calib(self) -> None:
        """The channel RMS is the one that the shards were made with."""
        for shard in list(self.index.entries)[:1]:
            OpenShard(self, shard).check_calib()


def check_file(root: Path, parts: tuple[str, ...], about: dict[str, Any], whole: bool = False) -> None:
    """A file has the size that store.json has for it, and (up to 1 MiB, or any with `whole`) the content."""
    where = f"{'/'.join(parts)} in store {root}"
    advice = "restore that file from where the store came from, or make the store again"
    if paths.has_symlink(root, parts):
        raise DflashError(f"{where} is or lies behind a symlink; put the real file there.")
    path = root.joinpath(*parts)
    if not path.is_file():
        raise DflashError(f"{where} is missing; {advice}.")
    size = path.stat().st_size
    if size != about["bytes"]:
        raise DflashError(f"{where} has {size} bytes instead of {about['bytes']}; {advice}.")
    if (whole or size <= HASHED_AT_OPEN) and sha256_file(path) != about["sha256"]:
        raise DflashError(f"{where} is not the file that store.json knows (other sha256); {advice}.")


def refuse_links(root: Path) -> None:
    """No symlink in docs/ and target/, not even one that store.json does not name: libraries look for files there."""
    for path in (path for top in (paths.DOCS, paths.TARGET) for path in (root / top).rglob("*")):
        if path.is_symlink():
            raise DflashError(f"{path.relative_to(root)} in store {root} is a symlink; put the real file there.")


def file_fingerprints(folder: Path) -> dict[str, dict[str, Any]]:
    """{relative name: {bytes, sha256}} of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): file_fingerprint(path) for path in files}


def file_fingerprint(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def create_store(root: str | Path, meta: StoreMeta, prepared: Prepared, target_folder: Path) -> Store:
    """Make a store: move documents, plan and target folder in, take their fingerprints, write store.json last.

    What an interrupted attempt left behind is replaced; a folder that holds anything else is refused.
    """
    root = Path(root)
    _check_room(root)
    paths.check_layout(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        for name in (paths.DOCS, paths.TARGET, paths.SHARDS, paths.INDEX, paths.TMP):
            shutil.rmtree(root / name, ignore_errors=True)
        for name in (paths.INDEX, paths.LOCK, paths.TMP, paths.SHARDS):
            (root / name).mkdir(exist_ok=True)
        _move(prepared.folder / paths.DOCS, root / paths.DOCS)
        _move(prepared.folder / paths.PLAN, root / paths.PLAN)
        _move(Path(target_folder), root / paths.TARGET)
        fingerprints = {
            "plan": prepared.plan.fingerprint(),
            "plan_file": file_fingerprint(root / paths.PLAN),
            "docs": {name: entry for name, entry in file_fingerprints(root / paths.DOCS).items() if name in DOCS_FILES},
            "target": file_fingerprints(root / paths.TARGET),
        }
        whole = StoreMeta(**{**vars(meta), "fingerprints": fingerprints})
        for bucket in whole.buckets:
            (root / paths.SHARDS / bucket.name).mkdir()
        sync_tree(root)
        write_atomically(root / paths.STORE_JSON, whole.encode())
        fsync_path(root.parent)
    except OSError as error:
        raise disk_full(error, root) from error
    return Store.open(root)


def _check_room(root: Path) -> None:
    if (root / paths.STORE_JSON).exists():
        raise DflashError(f"{root} already holds a store; give another folder.")
    if root.exists() and not root.is_dir():
        raise DflashError(f"{root} is not a folder; give --store a new or an empty one.")
    strange = sorted(set(os.listdir(root)) - set(paths.LAYOUT)) if root.exists() else []
    strange = [name for name in strange if not (name.startswith(".") and name.endswith(".partial"))]
    if strange:
        raise DflashError(
            f"{root} holds {strange[0]!r}, which is no part of a store; give --store a new or an empty folder."
        )


def _move(source: Path, target: Path) -> None:
    """Rename, or copy across filesystems."""
    if target.is_file():
        target.unlink()
    shutil.move(source, target)


def sync_tree(folder: Path) -> None:
    """Make everything below a folder durable."""
    for path in folder.rglob("*"):
        fsync_path(path)
    fsync_path(folder)
