"""Files that are whole or not there: written beside their name, fsynced, renamed. And fingerprints of content."""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def fsync_path(path: Path) -> None:
    """Make a file's content, or a folder's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def errors_at(path: Path) -> Iterator[None]:
    """What the disk refuses meanwhile is an OSError that names `path`, also where a library in Rust (safetensors) makes
    an error of its own of it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    except Exception as error:
        if (found := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a sibling name to write to; on success it is fsynced and renamed onto `path`, on failure removed."""
    sibling = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with errors_at(path):
            yield sibling
            fsync_path(sibling)
            os.replace(sibling, path)
            fsync_path(path.parent)
    finally:
        sibling.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a whole small file so that a reader, or a crash, sees the old content or the new, never a part."""
    with replacing(path) as sibling:
        sibling.write_bytes(content.encode() if isinstance(content, str) else content)


def canonical_json(value: Any) -> str:
    """JSON with one spelling for one value, for fingerprints."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def sha256_json(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def allocated_bytes(folder: Path) -> int:
    """Bytes that the files below `folder` occupy on disk; holes are not counted. What goes away meanwhile (another
    worker's unfinished shard) is not either."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                about = os.lstat(os.path.join(parent, name))
                total += about.st_blocks * 512 if stat.S_ISREG(about.st_mode) else 0
    return total
