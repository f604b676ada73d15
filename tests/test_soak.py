"""The short form of `make soak`: a few kills of real extractions, and nothing is lost, doubled or left behind."""

from pathlib import Path

import pytest
from soak import CASES, Case, soak


@pytest.mark.parametrize("case", [Case("16,24,48", "bf16", "argmax", 48, 96)], ids=lambda case: case.storage)
def test_killed_at_random_instants_a_store_is_what_an_unbroken_run_makes(
    case: Case, tiny_target: Path, tmp_path: Path
) -> None:
    figures = soak(6, 3, tiny_target, tmp_path, (case,))
    assert figures.kills >= 6
    assert figures.in_shard >= 1, "no kill hit a write"


def test_the_long_form_has_several_bucket_shapes_and_storages() -> None:
    assert len({case.buckets for case in CASES}) >= 3
    assert {case.storage for case in CASES} == {"bf16", "lz4", "int8"}
