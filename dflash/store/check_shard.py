"""Everything that can be wrong with one committed shard, found without stopping at the first fault."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash.errors import DflashError
from dflash.store import zarr_json
from dflash.store.layout import Shard, crc32c, shard_text
from dflash.store.paths import CALIB, open_inside, read_inside, shard_parts, shard_path
from dflash.store.reader import LOWEST_ID, OpenArray, OpenShard

if TYPE_CHECKING:
    from dflash.store.store import Store

Problem = dict[str, Any]


def problem(shard: Shard | None, array: str | None, row: int | None, text: str) -> Problem:
    return {"shard": None if shard is None else shard_text(shard), "array": array, "row": row, "problem": text}


def check_shard(store: "Store", shard: Shard) -> list[Problem]:
    """Manifest, files, footers, every row's checksum, padding and gaps, and the rows' tokens against the documents."""
    try:
        opened = OpenShard(store, shard)
    except DflashError as error:
        return [problem(shard, None, None, str(error))]
    found = [problem(shard, None, None, text) for text in _against_index(opened)]
    found += [problem(shard, name, None, "a file that is no part of a shard") for name in _strays(opened)]
    if opened.manifest["calib"] != store.calib_fingerprint():
        found.append(problem(shard, CALIB, None, "the shard was made with another channel RMS"))
    for name, spec in opened.specs.items():
        try:
            document = read_inside(store.root, (*shard_parts(shard), name, "zarr.json"), limit=1 << 20)
        except (OSError, DflashError):
            document = b""
        right = document == zarr_json.array_document(spec, opened.rows)
        if not right or crc32c(document) != opened.entry["checksums"].get(f"{name}/zarr.json"):
            found.append(problem(shard, name, None, "zarr.json is missing or damaged"))
        try:
            array = opened.array(name)
        except DflashError as error:
            found.append(problem(shard, name, None, str(error)))
            continue
        found += [problem(shard, name, row, text) for row, text in _rows(opened, array)]
    return found


def _against_index(opened: OpenShard) -> Iterator[str]:
    entry, manifest = opened.entry, opened.manifest
    for name in ("gen", "rows", "lengths", "bad", "software", "device"):
        if entry[name] != manifest[name]:
            yield f"the index line and the manifest differ in {name!r}"
    empty = [row for row, n in enumerate(opened.lengths) if n == 0]
    if sorted({item["row"] for item in manifest["bad"]}) != empty:
        yield "the empty rows are not those that 'bad' names"


def _strays(opened: OpenShard) -> Iterator[str]:
    """Files and links that do not belong there."""
    folder = shard_path(opened.store.root, opened.shard)
    wanted = {Path("zarr.json")} | {
        Path(name, file) for name, spec in opened.specs.items() for file in ("zarr.json", spec.file_name)
    }
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder)
        ours = inner in wanted or (path.is_dir() and inner.as_posix() in opened.specs)
        if not ours or path.is_symlink():
            yield inner.as_posix()


def _rows(opened: OpenShard, array: OpenArray) -> Iterator[tuple[int | None, str]]:
    spec, rows = array.spec, opened.rows
    crcs = opened.manifest["arrays"][spec.name]["crc32c"]
    if not spec.by_row:
        yield from _lengths(opened, array, crcs[0])
    elif spec.packed:
        if array.offsets.tolist() != (np.cumsum(array.sizes) - array.sizes).tolist():
            yield None, "rows do not lie behind one another"
        if array.sizes.sum() + spec.footer_bytes(rows) != len(array.map):
            yield None, "there are bytes that belong to no row"
        for row, n in enumerate(opened.lengths):
            yield from _packed_row(array, row, n, crcs[row])
    elif spec.block:
        for row, n in enumerate(opened.lengths):
            yield from _block_row(array, row, n, crcs[row])
    else:
        strides = np.arange(rows) * spec.stride(rows)
        if (array.offsets != strides).any() or (array.sizes != spec.chunk_bytes(rows)).any():
            yield None, "the footer does not describe rows of a fixed stride"
        with _Holes(opened, array) as holes:
            for row, n in enumerate(opened.lengths):
                yield from _fixed_row(opened, array, row, n, crcs[row], holes)


def _lengths(opened: OpenShard, array: OpenArray, crc: int) -> Iterator[tuple[int | None, str]]:
    content = array.map[: array.spec.data_bytes(opened.rows)]
    if crc32c(content) != crc:
        yield None, "does not fit its checksum"
    for row, (found, n) in enumerate(zip(content.view("<i4").tolist(), opened.lengths, strict=True)):
        if found != n:
            yield row, f"has length {found} where the manifest has {n}"


def _packed_row(array: OpenArray, row: int, n: int, crc: int) -> Iterator[tuple[int, str]]:
    try:
        whole = array.unpack(row, crc)
    except DflashError:
        yield row, "does not fit its checksum"
        return
    if whole[n:].any():
        yield row, "padding is not zero"


def _block_row(array: OpenArray, row: int, n: int, crc: int) -> Iterator[tuple[int, str]]:
    start, used = int(array.starts[row]), n * array.spec.token_bytes
    end = start + int(array.spec.block_bytes(np.array([n]))[0])
    if crc32c(array.map[start : start + used]) != crc:
        yield row, "does not fit its checksum"
    if array.map[start + used : end].any():
        yield row, "padding is not zero"


def _fixed_row(
    opened: OpenShard, array: OpenArray, row: int, n: int, crc: int, holes: "_Holes"
) -> Iterator[tuple[int, str]]:
    spec, rows = array.spec, opened.rows
    start, used, size = row * spec.stride(rows), n * spec.token_bytes, spec.chunk_bytes(rows)
    covered = used if spec.sparse else size
    if crc32c(array.map[start : start + covered]) != crc:
        yield row, "does not fit its checksum"
    if spec.sparse:
        if not holes.reads_zero(start + used, start + spec.stride(rows)):
            yield row, "padding or the gap behind the row does not read as zero"
        return
    values = array.map[start : start + size].view(spec.dtype).reshape(spec.shape(1)[1:])
    if (values[n:] != spec.padding).any():
        yield row, f"padding is not {spec.padding}"
    yield from ((row, text) for text in _content(opened, spec.name, row, values[:n]))


def _content(opened: OpenShard, name: str, row: int, values: np.ndarray) -> Iterator[str]:
    """The tokens and masks are those of the row's document."""
    tokens, mask = opened.store.documents[opened.manifest["documents"][row]]
    n, sound = len(values), opened.store.documents_sound
    if sound and name == "input_ids" and (values != tokens[:n]).any():
        yield "is not the document that the plan names"
    if sound and name == "loss_mask" and (values != mask[:n]).any():
        yield "is not the mask of the document that the plan names"
    if name in LOWEST_ID and not opened.are_ids(name, values):
        yield "holds a token id outside the vocabulary"
    if name == "labels" and n and values[0] != -1:
        yield "has a label at position 0, where no state precedes"


class _Holes:
    """Tells whether a stretch of an array's file reads as zero, skipping holes without reading them."""

    def __init__(self, opened: OpenShard, array: OpenArray) -> None:
        parts = (*shard_parts(opened.shard), array.spec.name, array.spec.file_name)
        self.map, self.descriptor = array.map, open_inside(opened.store.root, parts)

    def __enter__(self) -> "_Holes":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def reads_zero(self, start: int, end: int) -> bool:
        while start < end:
            try:
                data = os.lseek(self.descriptor, start, os.SEEK_DATA)
            except OSError:  # a hole up to the end of the file, or a filesystem without SEEK_DATA: look at the bytes
                return not self.map[start:end].any()
            if data >= end:
                return True
            hole = min(os.lseek(self.descriptor, data, os.SEEK_HOLE), end)
            if self.map[data:hole].any():
                return False
            start = hole
        return True
