"""Reads past the page cache (O_DIRECT): from the disk into aligned memory, without a copy by the kernel.

What the disk needs is that offset, size and address are multiples of 4096. Where the caller's memory and the row's
place in the file are (the rule for `hidden` and `last` in buffers of huge pages), whole pages go straight there; the
rest, and every row of a packed shard, comes through a buffer that each thread keeps. A row is one read, then summed:
smaller reads cost more than a sum of hot bytes gains. A filesystem that refuses O_DIRECT is read through the page cache
instead, and says so once.
"""

import errno
import mmap
import os
import threading
from pathlib import Path

import numpy as np

from dflash.errors import DflashError
from dflash.progress import say
from dflash.store.layout import ALIGN, crc32c, up
from dflash.store.paths import open_inside

PIECE = 4 << 20
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
_local = threading.local()
_said: set[int] = set()  # devices of filesystems that refuse


def aligned(size: int, align: int = ALIGN) -> np.ndarray:
    """Anonymous memory as uint8, at a multiple of `align`, in huge pages where the kernel has them: private, since it
    has none for shared memory."""
    memory = mmap.mmap(-1, size + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= PIECE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    content = np.frombuffer(memory, dtype=np.uint8)
    start = -address(content) % align
    return content[start : start + size]


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


class DirectFile:
    """A file of a store, read by `read` from any thread; `direct` until the filesystem refuses."""

    def __init__(self, root: Path, parts: tuple[str, ...]) -> None:
        self.root, self.parts, self.direct = root, parts, True
        self.descriptor = -1
        try:
            self.descriptor = open_inside(root, parts, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            self._through_the_cache()

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def _through_the_cache(self) -> None:
        """Read this file without O_DIRECT from now on; one line for people per filesystem."""
        plain = open_inside(self.root, self.parts)
        if self.descriptor >= 0:
            os.dup2(plain, self.descriptor, inheritable=False)  # another thread may be about to read from it
            os.close(plain)
        else:
            self.descriptor = plain
        self.direct = False
        device = os.fstat(self.descriptor).st_dev
        if device not in _said:
            _said.add(device)
            say(f"The filesystem of {self.root} refuses O_DIRECT; --io direct reads through the page cache there.")

    def read(self, start: int, target: np.ndarray) -> int:
        """Fill `target` (uint8) with the file's bytes from `start`; returns their crc32c."""
        at, crc, size = 0, 0, len(target)
        if start % ALIGN == 0 and address(target) % ALIGN == 0:
            at = size - size % ALIGN
            self._fill(target[:at], start, at)
            crc = crc32c(target[:at])
        while at < size:
            skipped = (start + at) % ALIGN
            n = min(size - at, PIECE - ALIGN)
            buffer = _buffer()[: up(skipped + n, ALIGN)]
            self._fill(buffer, start + at - skipped, skipped + n)
            np.copyto(target[at : at + n], buffer[skipped : skipped + n])
            crc, at = crc32c(target[at : at + n], crc), at + n
        return crc

    def _fill(self, buffer: np.ndarray, start: int, needed: int) -> None:
        """Read into the buffer from `start`, at least `needed` bytes of it."""
        done = 0
        while done < needed:
            past = self.direct  # as it was then: another thread may see the refusal first
            try:
                n = os.preadv(self.descriptor, [buffer[done:].data], start + done)
            except OSError as error:
                if not past or error.errno not in REFUSALS:
                    where = f"{'/'.join(self.parts)} in store {self.root}"
                    raise DflashError(
                        f"{where} cannot be read at byte {start + done} ({os.strerror(error.errno or 0)}): look at the "
                        "disk, then `dflash verify --repair` retires the shard and `dflash extract` makes it again."
                    ) from None
                self._through_the_cache()
                continue
            if n == 0:
                raise DflashError(
                    f"{'/'.join(self.parts)} in store {self.root} ends before byte {start + needed};"
                    " `dflash verify --repair` retires the shard, `dflash extract` makes it again."
                )
            done += n


def _buffer() -> np.ndarray:
    """This thread's memory for what cannot go straight to its place."""
    if not hasattr(_local, "buffer"):
        _local.buffer = aligned(PIECE)
    found: np.ndarray = _local.buffer
    return found
