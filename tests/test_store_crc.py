"""crc32c: the published value, and the same by every route."""

import google_crc32c
import numpy as np
import pytest

from dflash.store import crc


def test_the_published_check_value() -> None:
    assert crc.crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("library", [True, False])
def test_large_arrays_by_either_route_and_continued(library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not library:
        monkeypatch.setattr(crc, "EXTEND", None)
    elif crc.EXTEND is None:
        pytest.skip("this google_crc32c carries no library")
    array = np.random.default_rng(0).integers(0, 1 << 16, (3, 700_001), dtype=np.uint16)
    expected = google_crc32c.extend(7, array.tobytes())
    assert crc.crc32c(array, 7) == expected
    assert crc.crc32c(array[1:], crc.crc32c(array[:1], 7)) == expected
