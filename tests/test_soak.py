"""The short form of `make soak`: a few kills of real extractions, and nothing is lost, doubled or left behind."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from soak import CASES, Case, Figures, Soak, check_whole, soak

from dflash.cli import cli


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


def test_a_second_extraction_names_the_holder_and_a_dead_holder_does_not_block(
    tiny_target: Path, tmp_path: Path
) -> None:
    one = Soak(tmp_path, tiny_target, Case("16,24,48", "bf16", "argmax", 150, 96), random.Random(0), Figures())
    writer = one.start(one.store, 0, 1)
    while not one.unfinished(0):
        assert writer.is_alive(), one.log(0)
        time.sleep(0.002)
    os.kill(writer.pid or 0, signal.SIGSTOP)  # alive, in the middle of a shard
    for worker, workers in ((0, 1), (0, 2), (1, 2)):
        refused = CliRunner().invoke(cli, one.words(one.store, worker, workers))
        assert refused.exit_code == 1
        (line,) = [line for line in refused.stderr.splitlines() if line.startswith("Error: ")]
        assert f"process {writer.pid} on {os.uname().nodename}, worker 0 of 1" in line
    one.kill(writer, 0)
    assert list((one.store / "lock").iterdir()), "its claim is still there"
    one.complete(one.store)
    one.complete(tmp_path / "unbroken")
    check_whole(one.store, tmp_path / "unbroken")
