"""Writing past the page cache: the same bytes, whatever their address and size, and nothing where it cannot be."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from dflash.store import past_cache
from dflash.store.past_cache import PAGE, PastCache


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 40 * PAGE)
    if PastCache(path).descriptor < 0:
        pytest.skip("this filesystem knows no O_DIRECT")
    return path


@pytest.mark.parametrize(("size", "shift"), [(PAGE, 0), (PAGE - 1, 0), (17 * PAGE + 5, 1), (9 * PAGE, 3)])
def test_whole_pages_are_written_in_place(size: int, shift: int, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_cache, "LEAST_BYTES", 1)
    monkeypatch.setattr(past_cache, "BUFFER_BYTES", 4 * PAGE)
    monkeypatch.setattr(past_cache, "_buffers", past_cache.threading.local())
    content = np.random.default_rng(0).integers(0, 256, size + shift, dtype=np.uint8)[shift:]
    past = PastCache(file)
    done = past.write(content, 2 * PAGE)
    past.close()
    assert done == size // PAGE * PAGE
    expected = bytes(2 * PAGE) + content[:done].tobytes()
    assert file.read_bytes() == expected.ljust(40 * PAGE, b"\0")


def test_a_filesystem_in_memory_is_written_as_usual(file: Path) -> None:
    memory = Path("/dev/shm")
    if memory.is_dir() and "tmpfs /dev/shm " in Path("/proc/mounts").read_text():
        assert past_cache.in_memory(memory.stat().st_dev)
    assert not past_cache.in_memory(file.stat().st_dev)


def test_small_content_is_left_to_the_cache(file: Path) -> None:
    assert PastCache(file).write(np.ones(past_cache.LEAST_BYTES - 1, np.uint8), 0) == 0


@pytest.mark.parametrize(("code", "raised"), [(errno.EINVAL, False), (errno.ENOSPC, True)])
def test_a_filesystem_that_refuses_is_no_error_but_a_full_one_is(
    code: int, raised: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    past = PastCache(file)
    monkeypatch.setattr(os, "pwrite", refuse)
    content = np.ones(past_cache.LEAST_BYTES, np.uint8)
    if raised:
        with pytest.raises(OSError, match="No space"):
            past.write(content, 0)
    else:
        assert past.write(content, 0) == 0
