"""Read rows out of shards: maps of whole files, sizes compared before mapping, checksums over the bytes handed out.

`OpenShard` is one shard's manifest and maps; `ShardCache` keeps the last few open. A row's checksum is taken over the
copy in the caller's buffer, so what was verified is what is used.
"""

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numcodecs.blosc
import numpy as np

from dflash.errors import DflashError
from dflash.store.layout import ArraySpec, Shard, crc32c, shard_text
from dflash.store.manifest import read_manifest
from dflash.store.paths import map_inside, shard_parts
from dflash.store.zarr_json import parse_footer

if TYPE_CHECKING:
    from dflash.store.store import Store

OPEN_SHARDS = 64
PIECE = 1 << 20  # copied and then summed while it is still in the core's cache: 9 GB/s instead of 7 in one pass each
ADVICE = "`dflash verify --repair` retires the shard, `dflash extract` makes it again"


class OpenArray:
    """One array's file, mapped."""

    def __init__(self, store: "Store", shard: Shard, spec: ArraySpec, rows: int, size: int, footer_crc: int) -> None:
        self.spec, self.rows = spec, rows
        self.where = f"{spec.name} of shard {shard_text(shard)} in store {store.root}"
        parts = (*shard_parts(shard), spec.name, spec.file_name)
        try:
            self.map = map_inside(store.root, parts, expected=size)
        except OSError:
            raise DflashError(f"Array {self.where} is missing or cannot be read; {ADVICE}.") from None
        except DflashError as error:
            raise DflashError(f"Array {self.where} is damaged: {error} {ADVICE}.") from None
        end = size - spec.footer_bytes(rows)
        footer = self.map[end:].tobytes()
        index = parse_footer(footer, end) if crc32c(footer) == footer_crc else None
        if index is None or len(index[0]) != spec.chunks(rows):
            raise DflashError(f"The footer of array {self.where} is damaged; {ADVICE}.")
        self.offsets, self.sizes = index

    def copy_row(self, row: int, n: int, crc: int, out: np.ndarray) -> None:
        """Copy the `n` valid tokens of a row into `out[:n]` and verify the copy."""
        spec, valid = self.spec, out[:n]
        assert valid.shape == (n, *spec.token_shape), f"{spec.name}: a buffer of {out.shape} for {n} tokens"
        assert valid.dtype == spec.dtype, f"{spec.name}: a buffer of {out.dtype}"
        if spec.packed:
            self._unpack(row, crc, valid)
            return
        start, size, used = row * spec.stride(self.rows), spec.chunk_bytes(self.rows), n * spec.token_bytes
        assert valid.flags.c_contiguous, f"{spec.name}: a buffer that is not C-contiguous"
        target, found = valid.reshape(-1).view(np.uint8), 0
        for at in range(0, used, PIECE):
            piece = target[at : min(at + PIECE, used)]
            np.copyto(piece, self.map[start + at : start + at + len(piece)])
            found = crc32c(piece, found)
        if not spec.sparse:  # the checksum of a small array's row covers its padding too
            found = crc32c(self.map[start + used : start + size], found)
        if found != crc:
            raise self.damaged(row)

    def _unpack(self, row: int, crc: int, valid: np.ndarray) -> None:
        np.copyto(valid, self.unpack(row, crc)[: len(valid)])

    def unpack(self, row: int, crc: int) -> np.ndarray:
        """A packed row, whole. The compressed bytes are copied and verified, and the block's own header must promise
        exactly a row, before blosc sees them."""
        start, size = int(self.offsets[row]), int(self.sizes[row])
        content, whole = self.map[start : start + size].tobytes(), self.spec.chunk_bytes(self.rows)
        promised = int.from_bytes(content[4:8], "little"), int.from_bytes(content[12:16], "little")
        if crc32c(content) != crc or promised != (whole, size):
            raise self.damaged(row)
        decoded = np.empty((self.spec.ceiling, *self.spec.token_shape), dtype=self.spec.dtype)
        try:
            numcodecs.blosc.Blosc().decode(content, decoded)
        except (RuntimeError, ValueError):
            raise self.damaged(row) from None
        return decoded

    def damaged(self, row: int) -> DflashError:
        return DflashError(f"Row {row} of array {self.where} does not fit its checksum; {ADVICE}.")


class OpenShard:
    """A committed shard: its checked manifest, and its arrays, mapped when first asked for."""

    def __init__(self, store: "Store", shard: Shard) -> None:
        self.store, self.shard = store, shard
        entry = store.index.entries.get(shard)
        if entry is None:
            raise DflashError(
                f"Shard {shard_text(shard)} of store {store.root} is not there;"
                " run `dflash extract` to complete the store."
            )
        self.entry = entry
        self.manifest, content = read_manifest(store, shard)
        if crc32c(content) != entry["checksums"].get("zarr.json") or self.manifest["gen"] != entry["gen"]:
            raise DflashError(
                f"The manifest of shard {shard_text(shard)} in store {store.root} is not the index's; {ADVICE}."
            )
        self.rows = int(self.manifest["rows"])
        self.lengths: list[int] = self.manifest["lengths"]
        self.specs = store.specs(store.bucket(shard[0]).ceiling)
        self._arrays: dict[str, OpenArray] = {}
        self._lock = threading.Lock()

    def array(self, name: str) -> OpenArray:
        with self._lock:
            if name not in self._arrays:
                spec, about = self.specs[name], self.manifest["arrays"][name]
                footer_crc = self.entry["checksums"].get(f"{name}/{spec.file_name}", -1)
                self._arrays[name] = OpenArray(self.store, self.shard, spec, self.rows, about["bytes"], footer_crc)
            return self._arrays[name]

    def read_into(self, row: int, out: dict[str, np.ndarray]) -> int:
        n = self.lengths[row]
        for name, buffer in out.items():
            self.array(name).copy_row(row, n, self.manifest["arrays"][name]["crc32c"][row], buffer)
        return n


class ShardCache:
    """The last `OPEN_SHARDS` shards that were read. What is dropped lives on while a reader still uses it."""

    def __init__(self) -> None:
        self._open: OrderedDict[Shard, OpenShard] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, store: "Store", shard: Shard) -> OpenShard:
        with self._lock:
            found = self._open.get(shard)
            if found is not None and found.entry is store.index.entries.get(shard):
                self._open.move_to_end(shard)
                return found
        opened = OpenShard(store, shard)  # outside the lock: other readers need not wait for the disk
        with self._lock:
            self._open[shard] = opened
            while len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        return opened
