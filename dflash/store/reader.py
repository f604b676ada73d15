"""Read rows out of shards: maps of whole files, sizes compared before mapping, checksums over the bytes handed out.

`OpenShard` is one shard's manifest and maps; `ShardCache` keeps the last few open. A row's checksum is taken over the
copy in the caller's buffer, so what was verified is what is used. With `Store.io` "direct" the states are read past the
page cache (store/direct.py) instead of out of the maps.
"""

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numcodecs.blosc
import numpy as np

from dflash.errors import DflashError
from dflash.store.direct import DirectFile
from dflash.store.layout import ArraySpec, Shard, crc32c, shard_text
from dflash.store.manifest import read_manifest, specs_of
from dflash.store.paths import CALIB, map_inside, shard_parts
from dflash.store.zarr_json import block_footer, parse_footer

if TYPE_CHECKING:
    from dflash.store.store import Store

OPEN_SHARDS = 64
LOWEST_ID = {"input_ids": 0, "labels": -1, "topk_ids": 0}  # arrays of token ids
PIECE = 2 << 20  # copied, then summed while it is in a cache; smaller ones have threads fight for Python's lock
ADVICE = "`dflash verify --repair` retires the shard, `dflash extract` makes it again"


class OpenArray:
    """One array's file, mapped. `starts`: where each row begins in it."""

    def __init__(
        self, store: "Store", shard: Shard, spec: ArraySpec, lengths: list[int], size: int, footer_crc: int
    ) -> None:
        self.spec, self.rows = spec, len(lengths)
        self.where = f"{spec.name} of shard {shard_text(shard)} in store {store.root}"
        parts = (*shard_parts(shard), spec.name, spec.file_name)
        try:
            self.map = map_inside(store.root, parts, expected=size)
        except OSError:
            raise DflashError(f"Array {self.where} is missing or cannot be read; {ADVICE}.") from None
        except DflashError as error:
            raise DflashError(f"Array {self.where} is damaged ({str(error).removesuffix('.')}); {ADVICE}.") from None
        end = size - spec.footer_bytes(self.rows)
        footer = self.map[end:].tobytes()
        if crc32c(footer) != footer_crc or not self._understand(footer, end, np.array(lengths, np.int64)):
            raise DflashError(f"The footer of array {self.where} is damaged; {ADVICE}.")
        states = spec.sparse or spec.packed
        self.direct = DirectFile(store.root, parts) if store.io == "direct" and states else None

    def _understand(self, footer: bytes, end: int, lengths: np.ndarray) -> bool:
        """Take from the footer, or from the lengths that it must agree with, where rows begin."""
        spec = self.spec
        if spec.block:
            sizes = spec.block_bytes(lengths)
            self.starts = np.cumsum(sizes) - sizes
            return footer == block_footer(spec, lengths)
        index = parse_footer(footer, end)
        if index is None or len(index[0]) != spec.chunks(self.rows):
            return False
        self.offsets, self.sizes = index
        self.starts = self.offsets if spec.packed else np.arange(spec.checksums(self.rows)) * spec.stride(self.rows)
        return True

    def copy_row(self, row: int, n: int, crc: int, out: np.ndarray) -> None:
        """Copy the `n` valid tokens of a row into `out[:n]` and verify the copy."""
        spec, valid = self.spec, out[:n]
        assert valid.shape == (n, *spec.token_shape), f"{spec.name}: a buffer of {out.shape} for {n} tokens"
        assert valid.dtype == spec.dtype, f"{spec.name}: a buffer of {out.dtype}"
        if spec.packed:
            self._unpack(row, crc, valid)
            return
        start, size, used = int(self.starts[row]), spec.chunk_bytes(self.rows), n * spec.token_bytes
        assert valid.flags.c_contiguous, f"{spec.name}: a buffer that is not C-contiguous"
        found = self._copy(start, valid.reshape(-1).view(np.uint8))
        if not spec.sparse:  # the checksum of a small array's row covers its padding too
            found = crc32c(self.map[start + used : start + size], found)
        if found != crc:
            raise self.damaged(row)

    def _copy(self, start: int, target: np.ndarray) -> int:
        """Fill `target` with the file's bytes from `start`; returns their crc32c."""
        if self.direct is not None:
            return self.direct.read(start, target)
        found = 0
        for at in range(0, len(target), PIECE):
            piece = target[at : at + PIECE]
            np.copyto(piece, self.map[start + at : start + at + len(piece)])
            found = crc32c(piece, found)
        return found

    def _unpack(self, row: int, crc: int, valid: np.ndarray) -> None:
        np.copyto(valid, self.unpack(row, crc)[: len(valid)])

    def unpack(self, row: int, crc: int) -> np.ndarray:
        """A packed row, whole. The compressed bytes are copied and verified, and the block's own header must promise
        exactly a row, before blosc sees them."""
        start, size = int(self.offsets[row]), int(self.sizes[row])
        block, whole = np.empty(size, np.uint8), self.spec.chunk_bytes(self.rows)
        found, content = self._copy(start, block), block.data
        promised = int.from_bytes(content[4:8], "little"), int.from_bytes(content[12:16], "little")
        if found != crc or promised != (whole, size):
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
        self.specs = specs_of(store, shard, self.manifest)
        self._arrays: dict[str, OpenArray] = {}
        self._lock = threading.Lock()

    def array(self, name: str) -> OpenArray:
        with self._lock:
            if name not in self._arrays:
                spec, about = self.specs[name], self.manifest["arrays"][name]
                footer_crc = self.entry["checksums"].get(f"{name}/{spec.file_name}", -1)
                self._arrays[name] = OpenArray(self.store, self.shard, spec, self.lengths, about["bytes"], footer_crc)
            return self._arrays[name]

    def check_calib(self) -> None:
        """int8 states mean something only together with the channel RMS that they were divided by."""
        if self.manifest["calib"] != self.store.calib_fingerprint():
            raise DflashError(
                f"{CALIB} of store {self.store.root} is missing or not the one that shard {shard_text(self.shard)} was "
                "made with: restore that file, or remove it and run `dflash extract`, which measures it again."
            )

    def are_ids(self, name: str, values: np.ndarray) -> bool:
        """Whether an array's values are token ids that the embedding has."""
        low, high = LOWEST_ID[name], self.store.meta.vocab_size
        return not len(values) or bool(low <= values.min() and values.max() < high)

    def read_into(self, row: int, out: dict[str, np.ndarray]) -> int:
        n = self.lengths[row]
        for name, buffer in out.items():
            self.array(name).copy_row(row, n, self.manifest["arrays"][name]["crc32c"][row], buffer)
            if name in LOWEST_ID and not self.are_ids(name, buffer[:n]):
                raise DflashError(
                    f"Row {row} of array {self.array(name).where} holds a token id outside the vocabulary; {ADVICE}."
                )
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
        opened.check_calib()
        with self._lock:
            self._open[shard] = opened
            while len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        return opened
