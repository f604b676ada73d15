"""The index: one append-only file per writer, a line per committed or retired shard.

A line is JSON, a tab, and the crc32c of the JSON's bytes as eight hex digits. A shard is there when its highest
committed generation is above its highest retired one. The index is a cache: it can be made again from the manifests.
A torn last line (a crash in mid-append) is not counted, and cut off before the next append.
"""

import errno
import os
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.errors import DflashError, DiskFullError
from dflash.files import canonical_json, fsync_path
from dflash.store import checks
from dflash.store.layout import Bucket, Shard, crc32c
from dflash.store.paths import INDEX, index_path, open_inside, read_inside

MAX_GENERATION = 1 << 31
REBUILD = "rebuild the index with `dflash verify --rebuild-index`"
CRC = checks.integer(0, (1 << 32) - 1)
BAD_FIELDS: dict[str, checks.Check] = {
    "row": checks.integer(0, 1 << 20),
    "source": lambda v: type(v) in (str, int),
    "tap": lambda v: v is None or (type(v) is int and -1 <= v < 100_000),
}

ENTRY_FIELDS: dict[str, checks.Check] = {
    "bucket": checks.text,
    "number": checks.integer(0, 1 << 40),
    "gen": checks.integer(0, MAX_GENERATION),
    "rows": checks.integer(1, 1 << 20),
    "lengths": checks.list_of(checks.integer(0, 1 << 20)),
    "bytes": checks.integer(0, 1 << 50),
    "checksums": checks.mapping,
    "bad": checks.list_of(checks.mapping),
    "worker": checks.integer(0, 1 << 20),
    "software": checks.mapping,
    "device": checks.text,
}
RETIRE_FIELDS: dict[str, checks.Check] = {
    "retire": lambda v: type(v) is list and len(v) == 2 and type(v[0]) is str and type(v[1]) is int,
    "gen": checks.integer(0, MAX_GENERATION),
}


def encode_line(value: dict[str, Any]) -> bytes:
    content = canonical_json(value).encode()
    return content + b"\t%08x\n" % crc32c(content)


def decode_line(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line without its newline, or None when it is torn or damaged."""
    content, tab, crc = line.rpartition(b"\t")
    if not tab or crc != b"%08x" % crc32c(content):
        return None
    try:
        value = checks.parse_shallow(content)
    except ValueError:
        return None
    return value if type(value) is dict else None


@dataclass
class Index:
    """The merged index. `entries` has the shards that are there, `retired` the highest retired generation of a shard,
    `damaged` the lines that are none (file, line number), `strange` the whole lines that do not fit store.json."""

    entries: dict[Shard, dict[str, Any]] = field(default_factory=dict)
    retired: dict[Shard, int] = field(default_factory=dict)
    damaged: list[tuple[str, int]] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)
    conflicts: list[Shard] = field(default_factory=list)

    def add(self, entry: dict[str, Any]) -> None:
        shard = (entry["bucket"], entry["number"])
        known = self.entries.get(shard)
        if known is not None and known["gen"] == entry["gen"] and known["checksums"] != entry["checksums"]:
            self.conflicts.append(shard)
        if entry["gen"] > self.retired.get(shard, -1) and (known is None or known["gen"] <= entry["gen"]):
            self.entries[shard] = entry

    def retire(self, shard: Shard, generation: int) -> None:
        self.retired[shard] = max(generation, self.retired.get(shard, -1))
        if shard in self.entries and self.entries[shard]["gen"] <= self.retired[shard]:
            del self.entries[shard]

    def next_generation(self, shard: Shard) -> int:
        return self.retired.get(shard, -1) + 1


def index_files(root: Path) -> list[str]:
    try:
        names = os.listdir(root / INDEX)
    except FileNotFoundError:
        return []
    return sorted(name for name in names if re.fullmatch(r"w[0-9]{3,6}\.jsonl", name))


def load_index(root: Path, buckets: tuple[Bucket, ...]) -> Index:
    """Merge all writers' files. Whole lines only; what does not fit store.json is kept aside for `verify`."""
    index, by_name = Index(), {bucket.name: bucket for bucket in buckets}
    for name in index_files(root):
        content = read_inside(root, (INDEX, name), limit=1 << 31)
        lines = content.split(b"\n")
        torn = lines.pop()  # empty when the last line is whole
        for number, line in enumerate(lines, start=1):
            value = decode_line(line)
            if value is None:
                index.damaged.append((name, number))
            else:
                _add_line(index, value, by_name, f"{name} line {number}")
        if torn:
            index.damaged.append((name, len(lines) + 1))
    return index


def _add_line(index: Index, value: dict[str, Any], buckets: dict[str, Bucket], where: str) -> None:
    try:
        if "retire" in value:
            checks.check_fields(value, RETIRE_FIELDS, where)
            bucket, number = value["retire"]
            _bucket(buckets, bucket, where).rows_of(number)
            index.retire((bucket, number), value["gen"])
        else:
            index.add(check_entry(value, buckets, where))
    except DflashError as error:
        text = str(error)
        index.strange.append(text if text.startswith(where) else f"{where}: {text}")


def check_entry(value: dict[str, Any], buckets: dict[str, Bucket], where: str) -> dict[str, Any]:
    """An index line of a shard that fits store.json."""
    checks.check_fields(value, ENTRY_FIELDS, where)
    bucket = _bucket(buckets, value["bucket"], where)
    rows = len(bucket.rows_of(value["number"]))
    if value["rows"] != rows or len(value["lengths"]) != rows or max(value["lengths"]) > bucket.ceiling:
        raise DflashError(f"{where}: rows or lengths do not fit bucket {bucket.name} of store.json; {REBUILD}.")
    if not all(CRC(crc) for crc in value["checksums"].values()):
        raise DflashError(f"{where}: the field 'checksums' holds something that is no crc32c; {REBUILD}.")
    for item in value["bad"]:
        checks.check_fields(item, BAD_FIELDS, f"{where}: bad")
    return value


def _bucket(buckets: dict[str, Bucket], name: str, where: str) -> Bucket:
    if name not in buckets:
        raise DflashError(f"{where}: store.json has no bucket {name[:20]!r}; {REBUILD}.")
    return buckets[name]


_APPEND = threading.Lock()


def append_line(root: Path, worker: int, value: dict[str, Any]) -> None:
    """Append a line durably. Only the holder of worker `worker`'s lock may call this.

    When the disk is full, the file is cut back to its last whole line before the error is raised.
    """
    path, line = index_path(root, worker), encode_line(value)
    with _APPEND:
        new = not path.exists()
        descriptor = open_inside(root, (INDEX, path.name), os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            end = _cut_torn_tail(descriptor)
            try:
                written = os.write(descriptor, line)
                if written != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fdatasync(descriptor)
            except OSError as error:
                os.ftruncate(descriptor, end)
                raise disk_full(error, root) from error
        finally:
            os.close(descriptor)
        if new:
            fsync_path(path.parent)


def seal(root: Path, name: str) -> bool:
    """Cut a torn last line off an index file; say whether there was one."""
    descriptor = open_inside(root, (INDEX, name), os.O_RDWR)
    try:
        size = os.fstat(descriptor).st_size
        end = _cut_torn_tail(descriptor)
        if end != size:
            os.fdatasync(descriptor)
        return end != size
    finally:
        os.close(descriptor)


def _cut_torn_tail(descriptor: int) -> int:
    """Truncate behind the last newline; return the size that is left."""
    size = end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - 65_536)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end != size:
        os.ftruncate(descriptor, end)
    return end


def disk_full(error: OSError, root: Path) -> Exception:
    """The error to raise for `error`: DiskFullError when no space is left, else itself."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(
            f"The disk of store {root} is full; what is written is valid: make room, then run the same command again."
        )
    return error
