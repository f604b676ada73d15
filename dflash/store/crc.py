"""crc32c without Python's lock.

`google_crc32c.extend` holds the lock for as long as it runs (45 ms for 256 MiB, seen), and threads that checksum rows
would keep the thread that launches GPU kernels from doing so. Its wheels carry the C library that it wraps; called
through ctypes, the lock is free meanwhile. Where that library is not found, the wrapper takes pieces instead.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

LARGE = 1 << 16  # below, the wrapper is quicker than ctypes, and its holding the lock does not matter
PIECE = 1 << 20


def _find_extend() -> Callable[[int, int, int], int] | None:
    """`crc32c_extend(crc, data, count)` of the wheel's library."""
    folder = Path(google_crc32c.__file__).resolve().parent.parent / "google_crc32c.libs"
    for path in sorted(folder.glob("libcrc32c*")):
        try:
            extend = ctypes.CDLL(str(path)).crc32c_extend
        except (OSError, AttributeError):
            continue
        extend.restype, extend.argtypes = ctypes.c_uint32, (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
        return extend
    return None


EXTEND = _find_extend()


def crc32c(content: Any, before: int = 0) -> int:
    """crc32c of bytes or of a C-contiguous array, continuing `before`; an array is read in place, without a copy."""
    if not isinstance(content, np.ndarray) or content.nbytes < LARGE:
        return int(google_crc32c.extend(before, content))
    assert content.flags.c_contiguous
    if EXTEND is not None:
        return EXTEND(before, content.ctypes.data, content.nbytes)
    pieces = content.reshape(-1).view(np.uint8)
    for start in range(0, len(pieces), PIECE):
        before = int(google_crc32c.extend(before, pieces[start : start + PIECE]))
    return before
