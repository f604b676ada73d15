"""What the disk under a store can do: free space, holes, write speed. Tried out with files that have no name."""

import os
import shutil
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np

from dflash.store.past_cache import PastCache
from dflash.store.shard import pwrite_all

PIECE = 16 << 20
PIECES = 16
SECONDS = 0.5
SPARE = 64  # the measurement never takes more than this part of the free space


def existing(path: Path) -> Path:
    """The folder that is there already, of all above `path`."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def free_bytes(path: Path) -> int:
    """Free space where `path` is or will be."""
    return shutil.disk_usage(existing(path)).free


def keeps_holes(path: Path) -> bool:
    """Whether files there occupy only what was written; a place that cannot be tried is taken to."""
    try:
        with tempfile.TemporaryFile(dir=existing(path)) as file:
            os.ftruncate(file.fileno(), PIECE)
            os.pwrite(file.fileno(), b"x", PIECE - 1)
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_blocks * 512 < PIECE // 2
    except OSError:
        return True


def write_speed(path: Path) -> float | None:
    """Bytes per second of a short write there, made durable, as shards are written; None where that cannot be tried."""
    if free_bytes(path) < SPARE * PIECE:
        return None
    content = np.frombuffer(os.urandom(1 << 20) * (PIECE >> 20), np.uint8)
    try:
        with (
            tempfile.TemporaryFile(dir=existing(path)) as file,
            closing(
                PastCache(Path(f"/proc/self/fd/{file.fileno()}"))
            ) as past,  # on a full disk too: it holds the space
        ):
            start, written = time.monotonic(), 0
            most = min(PIECES, free_bytes(path) // (SPARE * PIECE))
            while written < most * PIECE and time.monotonic() - start < SECONDS:
                done = past.write(content, written)
                pwrite_all(file.fileno(), content[done:], written + done)
                written += PIECE
            os.fsync(file.fileno())
            return written / (time.monotonic() - start)
    except OSError:
        return None
