"""Write one shard: array files of fixed-stride rows with `os.pwrite`, then the commit that makes it exist.

Sparse arrays are sized first and get only their valid tokens, so a row's tail stays a hole that reads as zero: stale
bytes of a staging buffer never reach the disk. Small arrays are kept in memory and written whole at the commit. Packed
(lz4) rows have no fixed place, so they are written in row order; rows that come early wait in memory.
"""

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numcodecs.blosc
import numpy as np

import dflash
from dflash.errors import DflashError
from dflash.files import fsync_path
from dflash.store import zarr_json
from dflash.store.index import append_line, disk_full
from dflash.store.layout import ArraySpec, Bucket, Shard, crc32c, shard_name, shard_text
from dflash.store.manifest import entry_of, make_manifest
from dflash.store.past_cache import PastCache
from dflash.store.paths import SHARDS, TMP, has_symlink, shard_path

if TYPE_CHECKING:
    from dflash.store.store import Store

MAX_WRITE = 1 << 30


def tmp_name(shard: Shard, worker: int) -> str:
    return f"{shard[0]}-{shard_name(shard[1])}-w{worker:03d}"


def tmp_worker(name: str) -> int | None:
    """The worker that a folder in tmp/ belongs to; None for what nobody writes to any more."""
    match = re.fullmatch(r"[bv][0-9]{4,}-s[0-9]{6,}-w([0-9]{3,6})", name)
    return int(match[1]) if match else None


def pwrite_all(descriptor: int, content: Any, offset: int) -> None:
    """Write all of a buffer; `os.pwrite` alone may write a part, and never more than 2 GiB."""
    view = memoryview(content).cast("B")
    while len(view):
        written = os.pwrite(descriptor, view[:MAX_WRITE], offset)
        view, offset = view[written:], offset + written


class ShardGivenUp(DflashError):
    """Another thread's write to the shard has failed; that thread's error is the one that matters."""


class ArrayWriter:
    """One array's file in the making. `put` may be called from several threads for different rows."""

    def __init__(self, folder: Path, spec: ArraySpec, rows: int) -> None:
        self.spec, self.rows = spec, rows
        self.crcs = np.zeros(spec.checksums(rows), dtype=np.uint32)
        self.folder = folder / spec.name
        self.folder.mkdir()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.descriptor = os.open(self.folder / spec.file_name, flags, 0o644)
        self._whole: np.ndarray | None = None
        self._past: PastCache | None = None
        if spec.sparse:
            os.ftruncate(self.descriptor, spec.data_bytes(rows))
            self._past = PastCache(self.folder / spec.file_name)
        elif not spec.packed:
            self._whole = np.full(spec.shape(rows), spec.padding, dtype=spec.dtype)
        self._lock = threading.Lock()
        self._early: dict[int, bytes] = {}
        self._next_row = self._end = 0
        self._offsets, self._sizes = np.zeros((2, rows), dtype=np.uint64)

    def put(self, row: int, valid: np.ndarray) -> None:
        """Write the valid tokens `[n, *token_shape]` of a row."""
        if self.spec.sparse:
            self.crcs[row] = crc32c(valid)
            if len(valid):
                assert self._past is not None
                start = row * self.spec.stride(self.rows)
                done = self._past.write(valid, start)
                pwrite_all(self.descriptor, valid.reshape(-1).view(np.uint8)[done:], start + done)
        elif self.spec.packed:
            self._put_packed(row, valid)
        else:
            assert self._whole is not None
            self._whole[row, : len(valid)] = valid
            self.crcs[row] = crc32c(self._whole[row])

    def put_lengths(self, lengths: np.ndarray) -> None:
        assert self._whole is not None
        assert not self.spec.by_row
        self._whole[:] = lengths
        self.crcs[0] = crc32c(self._whole)

    def _put_packed(self, row: int, valid: np.ndarray) -> None:
        whole = np.zeros((self.spec.ceiling, *self.spec.token_shape), dtype=self.spec.dtype)
        whole[: len(valid)] = valid
        compressed = compress(whole)
        self.crcs[row] = crc32c(np.frombuffer(compressed, np.uint8))  # an array's sum leaves Python's lock free
        with self._lock:
            self._early[row] = compressed
            while (content := self._early.pop(self._next_row, None)) is not None:
                pwrite_all(self.descriptor, content, self._end)
                self._offsets[self._next_row], self._sizes[self._next_row] = self._end, len(content)
                self._end += len(content)
                self._next_row += 1

    def finish(self) -> tuple[dict[str, Any], dict[str, int]]:
        """Write what is left, the footer and zarr.json, durably. Return what the manifest says of the array, and the
        checksums of its two files' parts for the index line."""
        spec, rows = self.spec, self.rows
        if self._whole is not None:
            pwrite_all(self.descriptor, np.ascontiguousarray(self._whole).reshape(-1), 0)
        if spec.packed:
            assert self._next_row == rows, "rows are missing"
            footer, end = zarr_json.footer(self._offsets, self._sizes), self._end
        else:
            footer, end = zarr_json.fixed_footer(spec, rows), spec.data_bytes(rows)
        pwrite_all(self.descriptor, footer, end)
        os.fsync(self.descriptor)
        self.close()
        document = zarr_json.array_document(spec, rows)
        write_durably(self.folder / "zarr.json", document)
        fsync_path(self.folder)
        about = {"bytes": end + len(footer), "crc32c": [int(crc) for crc in self.crcs]}
        return about, {
            f"{spec.name}/zarr.json": crc32c(document),
            f"{spec.name}/{spec.file_name}": crc32c(footer),
        }

    def close(self) -> None:
        if self._past is not None:
            self._past.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def compress(row: np.ndarray) -> bytes:
    """blosc lz4 with bitshuffle. The threaded path of blosc keeps global state; one call at a time is not needed."""
    level, typesize = zarr_json.BLOSC_LEVEL, row.dtype.itemsize
    codec = numcodecs.blosc.Blosc(cname="lz4", clevel=level, shuffle=numcodecs.blosc.BITSHUFFLE, blocksize=0)
    assert typesize == 2
    return bytes(codec.encode(row))


def write_durably(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


class ShardWriter:
    """Fills one shard in tmp/ and commits it. `write` is thread-safe for disjoint rows."""

    def __init__(self, store: "Store", bucket: str, number: int, worker: int) -> None:
        self.store, self.worker = store, worker
        self.bucket: Bucket = store.bucket(bucket)
        self.shard: Shard = (bucket, number)
        self.rows = len(self.bucket.rows_of(number))
        self.first_row = self.bucket.rows_of(number).start
        self.folder = store.root / TMP / tmp_name(self.shard, worker)
        self.lengths = np.full(self.rows, -1, dtype=np.int32)
        self._arrays: dict[str, ArrayWriter] = {}
        self._lock, self._writes, self._abandoned = threading.Lock(), 0, False
        for parts in ((TMP,), (SHARDS, bucket)):
            if has_symlink(store.root, parts):
                raise DflashError(f"{'/'.join(parts)} in store {store.root} is a symlink; put the real folder there.")
        with self._working():
            if self.folder.exists():
                shutil.rmtree(self.folder)
            self.folder.mkdir(parents=True)
            for name, spec in store.meta.specs(self.bucket.ceiling).items():
                self._arrays[name] = ArrayWriter(self.folder, spec, self.rows)

    def write(self, first_row: int, lengths: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        """Write rows `first_row` … of the SHARD (from 0). `arrays[name]` is [n, ceiling, ...] of the array's dtype, of
        which `lengths` tokens are valid; what lies behind them is never looked at. A length is the document's, or 0
        for a document whose states are not finite. `input_ids` and `loss_mask` come from the documents when left out.
        """
        lengths = np.asarray(lengths, dtype=np.int32)
        rows = range(first_row, first_row + len(lengths))
        self._check(rows, lengths, arrays)
        with self._working():
            for i, row in enumerate(rows):
                n = int(lengths[i])
                for name, writer in self._arrays.items():
                    if name in arrays:
                        writer.put(row, np.ascontiguousarray(arrays[name][i, :n]))
                    elif writer.spec.by_row:
                        writer.put(row, self._from_documents(name, row)[:n])
                self.lengths[row] = n

    def commit(
        self,
        bad: list[dict[str, Any]],
        device: str,
        software: dict[str, str] | None = None,
        quantisation: dict[str, list[float]] | None = None,
    ) -> dict[str, Any]:
        """Make the shard durable, put it in place, append its index line; return the line. `bad` names the documents
        that were left out: [{row (of the shard), source, tap}]; `quantisation` is what int8 lost, per tap."""
        assert (self.lengths >= 0).all(), "every row is written before the commit"
        versions = {"dflash": dflash.__version__, "numpy": np.__version__, **(software or {})}
        with self._working():
            self._arrays["lengths"].put_lengths(self.lengths)
            arrays, checksums = {}, {}
            for name, writer in self._arrays.items():
                arrays[name], more = writer.finish()
                checksums.update(more)
            manifest = make_manifest(self.store, self.shard, self.lengths, arrays, bad, device, versions, quantisation)
            document = zarr_json.group_document(manifest)
            write_durably(self.folder / "zarr.json", document)
            fsync_path(self.folder)
            entry = entry_of(manifest, {"zarr.json": crc32c(document), **checksums}, self.folder, self.worker)
            put_in_place(self.folder, self.store.root, self.shard)
            append_line(self.store.root, self.worker, entry)
        self.store.index.add(entry)
        return entry

    def abandon(self) -> None:
        """Drop the shard; nothing of it stays. Writes in other threads end first: a descriptor that is closed under
        them could already be another file's."""
        with self._lock:
            self._abandoned = True
            if self._writes == 0:
                self._remove()

    def _remove(self) -> None:
        for writer in self._arrays.values():
            writer.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _check(self, rows: range, lengths: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        assert 0 <= rows.start <= rows.stop <= self.rows, f"rows {rows} of a shard of {self.rows}"
        planned = self.store.plan.rows[self.bucket.name].length[
            self.first_row + rows.start : self.first_row + rows.stop
        ]
        assert ((lengths == planned) | (lengths == 0)).all(), "a row has its document's length, or 0"
        needed = {n for n, w in self._arrays.items() if w.spec.by_row} - {"input_ids", "loss_mask"}
        assert needed <= arrays.keys(), f"arrays {sorted(needed - arrays.keys())} are missing"
        for name, array in arrays.items():
            spec = self._arrays[name].spec
            shape = (len(rows), *spec.shape(1)[1:])
            assert array.shape == shape, f"{name} is {array.shape}, not {shape}"
            assert array.dtype == spec.dtype, f"{name} is {array.dtype}, not {spec.dtype}"

    def _from_documents(self, name: str, row: int) -> np.ndarray:
        document = int(self.store.plan.rows[self.bucket.name].document[self.first_row + row])
        tokens, mask = self.store.documents[document]
        return tokens if name == "input_ids" else mask

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Around all that touches the files: an error abandons the shard, once the last thread has left."""
        with self._lock:
            if self._abandoned:
                raise ShardGivenUp(
                    f"Shard {shard_text(self.shard)} of store {self.store.root} was given up; start again."
                )
            self._writes += 1
        try:
            yield
        except BaseException as error:
            with self._lock:
                self._abandoned = True
            if isinstance(error, OSError):
                raise disk_full(error, self.store.root) from error
            raise
        finally:
            with self._lock:
                self._writes -= 1
                if self._abandoned and self._writes == 0:
                    self._remove()


def put_in_place(folder: Path, root: Path, shard: Shard) -> None:
    """Rename a complete shard's folder onto its final name, durably. A folder that is there already is of a retired
    generation, or was left without an index line: ours is newer or equal, so it is moved away."""
    final = shard_path(root, shard)
    if not final.parent.exists():
        final.parent.mkdir(exist_ok=True)
        fsync_path(final.parent.parent)
    if final.is_symlink() or final.exists():
        move_away(root, shard)
    os.rename(folder, final)
    fsync_path(final.parent)


def move_away(root: Path, shard: Shard) -> None:
    """Move a shard's folder out of the way, into tmp/, and delete it there."""
    target = root / TMP / f"retired-{shard[0]}-{shard_name(shard[1])}-{os.getpid()}-{os.urandom(4).hex()}"
    final = shard_path(root, shard)
    os.rename(final, target)
    fsync_path(final.parent)
    if target.is_symlink():
        target.unlink(missing_ok=True)
    else:
        shutil.rmtree(target, ignore_errors=True)  # another worker that starts just now clears tmp/ too
