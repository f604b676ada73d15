"""The Triton kernels compile for cards that are not here, fit into their shared memory and spill next to nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.block_attention import ROOM, ROOMY, TIGHT, WIDE, tiles

SCRIPT = Path(__file__).parent / "compile_kernels.py"
SHARED = {80: 166_912, 86: 101_376, 90: 232_448}  # bytes a program may have: A100, consumer Ampere and Ada, Hopper


@pytest.mark.parametrize(("capability", "name", "dim"), [(90, "ROOMY", 128), (86, "TIGHT", 128), (86, "WIDE", 256)])
def test_every_kernel_compiles_and_fits(capability: int, name: str, dim: int, tmp_path: Path) -> None:
    without = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    words = [sys.executable, str(SCRIPT), str(capability), name, str(dim)]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=without | {"TRITON_CACHE_DIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == (8 if capability >= 90 else 7)
    for kernel, taken in found.items():
        assert taken["shared"] <= SHARED[capability], (kernel, taken)
        assert taken["stack"] <= 64, (kernel, taken)


def test_tiles_follow_the_heads_and_the_card() -> None:
    assert tiles(128, SHARED[90]) is tiles(64, SHARED[80]) is ROOMY
    assert tiles(128, SHARED[86]) is TIGHT
    assert tiles(256, SHARED[90]) is tiles(192, SHARED[86]) is WIDE
    assert SHARED[86] < ROOM < SHARED[80]
