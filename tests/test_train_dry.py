"""`train --dry-run`: every bucket three times, against the forecast, and nothing on disk."""

import json
from pathlib import Path

from click.testing import CliRunner
from helpers_store import make_store

from dflash.cli import cli


def test_a_dry_run_times_every_bucket_and_writes_nothing(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    line = [
        "train", f"--store={tmp_path / 'store'}", f"--run={tmp_path / 'run'}", "--dry-run", "--num-layers=1",
        "--block-size=4", "--mask-token=7",
    ]  # fmt: skip
    result = CliRunner().invoke(cli, [*line, "--json"], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert [bucket["bucket"] for bucket in found["buckets"]] == ["b0064", "b0096"]
    for bucket in found["buckets"]:
        assert bucket["ms"] > 0
        assert bucket["peak"] > bucket["forecast"] > 0  # on a CPU the whole process is measured
        assert bucket["rows"] * bucket["ceiling"] <= 2048
    assert found["update_ms"] > 0
    assert found["forecast"]["device"] >= max(bucket["forecast"] for bucket in found["buckets"])
    assert not (tmp_path / "run").exists()
    shown = CliRunner().invoke(cli, line, catch_exceptions=False).stdout
    for word in ("b0064", "b0096", "ms", "forecast"):
        assert word in shown
