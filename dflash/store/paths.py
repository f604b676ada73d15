"""Paths inside a store: made from integers and our own constants, opened without following a symlink.

A store may come from anybody. Nothing in it may make a reader look outside it: each step from the store's root to a
file is opened with O_NOFOLLOW. The root itself may be a symlink, it is the user's own word.
"""

import errno
import mmap
import os
import stat
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from dflash.errors import DflashError
from dflash.store.layout import Shard, shard_name

STORE_JSON = "store.json"
PLAN = "plan.npz"
DOCS = "docs"
TARGET = "target"
INDEX = "index"
LOCK = "lock"
TMP = "tmp"
SHARDS = "shards"
CALIB = "calib.safetensors"
FOLDERS = (DOCS, TARGET, INDEX, LOCK, TMP, SHARDS)
LAYOUT = (STORE_JSON, PLAN, CALIB, *FOLDERS)


def shard_parts(shard: Shard) -> tuple[str, ...]:
    """The steps from the root to a shard's folder. The bucket's name comes from `bucket_name`, never from a file."""
    return SHARDS, shard[0], f"{shard_name(shard[1])}.zarr"


def shard_path(root: Path, shard: Shard) -> Path:
    return root.joinpath(*shard_parts(shard))


def index_path(root: Path, worker: int) -> Path:
    return root / INDEX / f"w{worker:03d}.jsonl"


def open_inside(root: Path, parts: tuple[str, ...], flags: int = os.O_RDONLY) -> int:
    """A descriptor of the file or folder at `root/parts`, refusing a symlink at any step."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = inner
        # O_NONBLOCK: a named pipe in place of a file must not hang us
        return os.open(parts[-1], flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o644, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise DflashError(
                f"{'/'.join(parts)} in store {root} is or lies behind {_no_folder(root, parts)}; put the real one in."
            ) from None
        raise
    finally:
        os.close(folder)


def _no_folder(root: Path, parts: tuple[str, ...]) -> str:
    return "a symlink; a store holds real files" if has_symlink(root, parts) else "a file where a folder should be"


def check_layout(root: Path, buckets: Iterable[str] = ()) -> None:
    """Every part of a store that we list, write or delete in is a real file or folder. What lies behind a symlink is
    somebody else's: a `tmp` that points to a home folder must not be tidied up."""
    for parts in [*((name,) for name in LAYOUT), *((SHARDS, bucket) for bucket in buckets)]:
        mode = mode_of(root.joinpath(*parts))
        folder = parts[0] in FOLDERS
        if mode and not (stat.S_ISDIR(mode) if folder else stat.S_ISREG(mode)):
            what = "a symlink" if stat.S_ISLNK(mode) else f"no {'folder' if folder else 'regular file'}"
            raise DflashError(f"{'/'.join(parts)} in store {root} is {what}; put the real file or folder there.")


def mode_of(path: Path) -> int:
    """The mode of a file, of a symlink itself; 0 where there is nothing."""
    try:
        return path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def has_symlink(root: Path, parts: tuple[str, ...]) -> bool:
    path = root
    for part in parts:
        path = path / part
        if path.is_symlink():
            return True
    return False


def read_inside(root: Path, parts: tuple[str, ...], limit: int = 1 << 30) -> bytes:
    """The content of a regular file inside a store, at most `limit` bytes."""
    descriptor = open_inside(root, parts)
    with os.fdopen(descriptor, "rb") as file:
        check_regular(descriptor, root, parts)
        if os.fstat(descriptor).st_size > limit:
            raise DflashError(
                f"{'/'.join(parts)} in store {root} has more than {limit} bytes, so it is not ours; restore it "
                "from a copy."
            )
        return file.read()


def map_inside(root: Path, parts: tuple[str, ...], expected: int | None = None) -> np.ndarray:
    """A read-only memory map of a whole file as uint8; `expected` bytes are compared before mapping, since a map of a
    shorter file would read as zeros or kill the process."""
    descriptor = open_inside(root, parts)
    try:
        check_regular(descriptor, root, parts)
        size = os.fstat(descriptor).st_size
        if expected is not None and size != expected:
            raise DflashError(
                f"{'/'.join(parts)} in store {root} has {size} bytes instead of {expected}; restore it from a copy."
            )
        if size == 0:
            return np.empty(0, dtype=np.uint8)
        content = np.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), dtype=np.uint8)
        content.flags.writeable = False
        return content
    finally:
        os.close(descriptor)


def check_regular(descriptor: int, root: Path, parts: tuple[str, ...]) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise DflashError(f"{'/'.join(parts)} in store {root} is not a regular file; restore it from a copy.")
