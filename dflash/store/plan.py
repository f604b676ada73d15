"""Documents (token ids and supervised mask, memory-mapped) and the row plan (which document is which row).

Both are written once, before any GPU work, and never change: the content of every shard follows from them. Tokens are
int32, masks uint8 (1 = supervised), `offsets` uint64 [n + 1]; document i is tokens[offsets[i]:offsets[i + 1]].
"""

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any

import numpy as np

from dflash.errors import DflashError, cause
from dflash.files import fsync_path, replacing, sha256_json
from dflash.store.layout import Bucket
from dflash.store.paths import DOCS, PLAN, map_inside, open_inside

TOKENS, MASK, OFFSETS = "tokens.i32", "mask.u8", "offsets.u64"
DOCS_FILES = (TOKENS, MASK, OFFSETS)
RESTORE = "restore it from a copy"


@dataclass(frozen=True)
class Documents:
    """All documents of a store; `documents[i]` gives two views, nothing is copied."""

    tokens: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= document < len(self):
            raise IndexError(f"no document {document} among {len(self)}")
        start, end = int(self.offsets[document]), int(self.offsets[document + 1])
        return self.tokens[start:end], self.mask[start:end]

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return (self[i] for i in range(len(self)))

    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets.astype(np.int64))

    @staticmethod
    def open(folder: Path) -> "Documents":
        """Map the three files of a docs folder; their sizes must agree with one another."""
        root, parts = folder.parent, (folder.name,)
        try:
            maps = [map_inside(root, (*parts, name)) for name in DOCS_FILES]
        except FileNotFoundError as error:
            raise DflashError(f"{folder} lacks {Path(str(error.filename)).name}; restore it from a copy.") from None
        if len(maps[0]) % 4 or len(maps[2]) % 8 or len(maps[2]) < 8:
            raise DflashError(f"{folder} holds files of impossible sizes; restore it from a copy.")
        documents = Documents(maps[0].view("<i4"), maps[1], maps[2].view("<u8"))
        offsets, tokens = documents.offsets, len(documents.tokens)
        increasing = bool((offsets[1:] >= offsets[:-1]).all())
        if offsets[0] != 0 or int(offsets[-1]) != tokens or len(documents.mask) != tokens or not increasing:
            raise DflashError(
                f"{folder}/{OFFSETS} does not fit the tokens and masks beside it; restore the folder from a copy."
            )
        return documents


class DocumentsWriter:
    """Streams documents to the three files; memory does not grow with the data (8 bytes a document excepted)."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._tokens: IO[bytes] = (folder / TOKENS).open("wb")
        self._mask: IO[bytes] = (folder / MASK).open("wb")
        self._offsets: IO[bytes] = (folder / OFFSETS).open("wb")
        self._offsets.write((0).to_bytes(8, "little"))
        self._end = 0
        self._count = 0

    def add(self, tokens: Any, mask: Any) -> int:
        """Append a document, return its number."""
        token_ids, supervised = np.asarray(tokens, dtype="<i4"), np.asarray(mask, dtype=np.uint8)
        assert token_ids.shape == supervised.shape == (len(token_ids),), "one mask value a token"
        assert len(token_ids), "a document has tokens"
        assert int(supervised.max()) <= 1, "a mask is 0 or 1"
        self._tokens.write(token_ids.tobytes())
        self._mask.write(supervised.tobytes())
        self._end += len(token_ids)
        self._offsets.write(self._end.to_bytes(8, "little"))
        self._count += 1
        return self._count - 1

    def close(self) -> Documents:
        for file in (self._tokens, self._mask, self._offsets):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        fsync_path(self.folder)
        return Documents.open(self.folder)


@dataclass(frozen=True)
class PlanRows:
    """The rows of one bucket in row order; one entry per row in each array."""

    document: np.ndarray  # int64
    conversation: np.ndarray  # int64
    file: np.ndarray  # int32, into Plan.files
    line: np.ndarray  # int64, from 1
    length: np.ndarray  # int32
    supervised: np.ndarray  # int32

    def __len__(self) -> int:
        return len(self.document)


DTYPES = {"document": "<i8", "conversation": "<i8", "file": "<i4", "line": "<i8", "length": "<i4", "supervised": "<i4"}
assert tuple(DTYPES) == tuple(f.name for f in fields(PlanRows))


@dataclass(frozen=True)
class Plan:
    """Which document is which row of which bucket, and where it came from."""

    files: tuple[str, ...]
    rows: dict[str, PlanRows]

    def save(self, path: Path) -> None:
        """An uncompressed npz: `files` (UTF-8 JSON as uint8) and per bucket `b0770.document` … and `b0770.split`."""
        members: dict[str, np.ndarray] = {"files": np.frombuffer(json.dumps(list(self.files)).encode(), dtype=np.uint8)}
        for bucket, rows in sorted(self.rows.items()):
            for name, dtype in DTYPES.items():
                members[f"{bucket}.{name}"] = np.ascontiguousarray(getattr(rows, name), dtype=dtype)
            members[f"{bucket}.split"] = np.full(len(rows), bucket[0] == "v", dtype=np.uint8)
        with replacing(path) as sibling, sibling.open("wb") as file:
            np.savez(file, allow_pickle=False, **members)

    @staticmethod
    def load(path: Path) -> "Plan":
        return _load_plan(path)

    def fingerprint(self) -> str:
        """sha256 over the content, independent of how npz stores it."""
        digest = hashlib.sha256(sha256_json(list(self.files)).encode())
        for bucket, rows in sorted(self.rows.items()):
            digest.update(f"{bucket} {len(rows)}\n".encode())
            for name, dtype in DTYPES.items():
                digest.update(np.ascontiguousarray(getattr(rows, name), dtype=dtype).data)
        return digest.hexdigest()

    def check(self, buckets: tuple[Bucket, ...], documents: Documents) -> None:
        """The plan fits store.json's buckets and the documents: every row a document of its length, none twice."""
        if {b.name: b.rows for b in buckets} != {name: len(rows) for name, rows in self.rows.items()}:
            raise DflashError(
                f"{PLAN} and store.json name different buckets or numbers of rows; restore both from a copy."
            )
        lengths, seen = documents.lengths(), np.zeros(len(documents), dtype=bool)
        for bucket in buckets:
            rows = self.rows[bucket.name]
            if ((rows.document < 0) | (rows.document >= len(documents))).any():
                raise DflashError(
                    f"{PLAN}: bucket {bucket.name} names a document that {DOCS}/ does not have; {RESTORE}."
                )
            repeated = seen[rows.document].any() or len(np.unique(rows.document)) != len(rows)
            seen[rows.document] = True
            if repeated:
                raise DflashError(
                    f"{PLAN}: bucket {bucket.name} has a document that is already in another row; {RESTORE}."
                )
            if (rows.length != lengths[rows.document]).any() or (rows.length > bucket.ceiling).any():
                raise DflashError(
                    f"{PLAN}: a length of bucket {bucket.name} is not its document's, or over the ceiling; {RESTORE}."
                )
            if ((rows.file < 0) | (rows.file >= len(self.files))).any():
                raise DflashError(
                    f"{PLAN}: bucket {bucket.name} names a source file that is not in its list; {RESTORE}."
                )
            if ((rows.supervised < 0) | (rows.supervised > rows.length) | (rows.length < 1)).any():
                raise DflashError(
                    f"{PLAN}: bucket {bucket.name} has more supervised tokens than tokens, or an empty row; {RESTORE}."
                )


def _load_plan(path: Path) -> Plan:
    try:
        descriptor = open_inside(path.parent, (path.name,))
        with os.fdopen(descriptor, "rb") as raw, zipfile.ZipFile(raw) as archive:
            _check_sizes(archive.infolist(), os.fstat(descriptor).st_size)
            members = {info.filename.removesuffix(".npy"): _read_member(archive, info) for info in archive.infolist()}
    except FileNotFoundError:
        raise DflashError(
            f"{path} is missing, which says which document is which row; restore it from a copy."
        ) from None
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise DflashError(f"{path} is damaged ({cause(error)[:200]}); restore it from a copy.") from None
    return Plan(_files(members.pop("files", None), path), _rows(members, path))


def _check_sizes(members: list[zipfile.ZipInfo], size: int) -> None:
    """What the members promise fits into the file, all together: nothing is allocated on the archive's word, and a
    byte is not read twice."""
    if sum(info.file_size for info in members) > size or any(i.file_size != i.compress_size for i in members):
        raise ValueError("its members promise more bytes than it has")
    if len({info.filename for info in members}) != len(members):
        raise ValueError("a member is there twice")


NPY_HEADER = re.compile(rb"\{'descr': '([<|][iu][1248])', 'fortran_order': False, 'shape': \(([0-9]{1,15}),\), \} *\n")


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """One .npy vector of integers. Its header is matched, not evaluated, and may not promise more than the archive
    holds, so that nothing is run or allocated on a file's word."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"member {info.filename!r} is compressed")
    content = archive.read(info)
    start = 10 + int.from_bytes(content[8:10], "little")
    header = NPY_HEADER.fullmatch(content[10:start])
    if content[:8] != b"\x93NUMPY\x01\x00" or header is None:
        raise ValueError(f"member {info.filename!r} is not a plain vector of integers")
    dtype, length = np.dtype(header[1].decode()), int(header[2])
    if length * dtype.itemsize != len(content) - start:
        raise ValueError(f"member {info.filename!r} does not hold the {length} values that it promises")
    return np.frombuffer(content, dtype=dtype, offset=start)


def _files(member: np.ndarray | None, path: Path) -> tuple[str, ...]:
    try:
        names = json.loads(member.tobytes()) if member is not None and member.dtype == np.uint8 else None
    except (ValueError, RecursionError):
        names = None
    if type(names) is not list or not all(type(name) is str for name in names):
        raise DflashError(f"{path} lacks a valid list of source files; restore it from a copy.")
    return tuple(names)


def _rows(members: dict[str, np.ndarray], path: Path) -> dict[str, PlanRows]:
    wanted = {**DTYPES, "split": "|u1"}
    rows: dict[str, PlanRows] = {}
    for bucket in sorted({name.partition(".")[0] for name in members}):
        columns = {}
        for name, dtype in wanted.items():
            column = members.pop(f"{bucket}.{name}", None)
            if column is None or column.dtype != np.dtype(dtype):
                raise DflashError(
                    f"{path}: {bucket}.{name} is missing or not of type {np.dtype(dtype).name}; {RESTORE}."
                )
            columns[name] = column
        if len({len(column) for column in columns.values()}) != 1:
            raise DflashError(f"{path}: the arrays of bucket {bucket} differ in length; {RESTORE}.")
        if (columns.pop("split") != (bucket[:1] == "v")).any():
            raise DflashError(f"{path}: {bucket}.split is not what the bucket's name says; {RESTORE}.")
        rows[bucket] = PlanRows(**columns)
    if members:
        raise DflashError(f"{path} has the unknown member {min(members)!r}; restore it from a copy.")
    return rows


@dataclass(frozen=True)
class Prepared:
    """What stage 0 hands to `create_store`: `folder` holds docs/ and plan.npz, `fingerprints` are of their sources."""

    folder: Path
    documents: Documents
    plan: Plan
    counts: dict[str, Any]
    fingerprints: dict[str, str]  # data, tokenizer, template
    template_args: dict[str, Any] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
