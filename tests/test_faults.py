"""What goes wrong for people, for real: a full disk, a cut file, a read-only folder. Each ends in one sentence."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from helpers_store import make_store

from dflash.cli import cli
from dflash.store import Store


def dflash(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [*map(str, words)])


def one_sentence(result: Result) -> str:
    """The error's only line; no traceback."""
    assert "Traceback" not in result.stderr
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("Error: ")
    return line


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """120 documents of ready tokens, 40 to 60 long."""
    rng = np.random.default_rng(0)
    path = tmp_path / "data.jsonl"
    with path.open("w") as file:
        for _ in range(120):
            length = int(rng.integers(40, 61))
            ids = rng.integers(3, 250, length).tolist()
            file.write(json.dumps({"input_ids": ids, "loss_mask": [0] * 10 + [1] * (length - 10)}) + "\n")
    return path


def extract(target: Path, data: Path, store: Path) -> Result:
    return dflash(
        "extract", "--target", target, "--data", data, "--store", store, "--num-taps", "3", "--buckets", "64",
        "--device", "cpu", "--json",
    )  # fmt: skip


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MiB: room for the store's beginning, not for its shards. Needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_store_that_does_not_fit_is_refused_before_anything_is_written(
    tiny_target: Path, data: Path, small_disk: Path
) -> None:
    result = extract(tiny_target, data, small_disk / "store")
    assert result.exit_code != 0
    assert "free" in one_sentence(result)
    assert not (small_disk / "store" / "store.json").exists()


def test_a_disk_that_fills_half_way_leaves_a_store_that_the_same_command_completes(
    tiny_target: Path, data: Path, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash.store.disk.free_bytes", lambda path: 1 << 40)  # somebody else fills it meanwhile
    monkeypatch.setattr("dflash.store.disk.write_speed", lambda path: None)
    monkeypatch.setattr("dflash.store.layout.PADDED_TOKENS_PER_SHARD", 1024)
    result = extract(tiny_target, data, small_disk / "store")
    assert result.exit_code == 28, result.stderr
    one_sentence(result)
    verified = json.loads(dflash("verify", small_disk / "store", "--json").stdout)
    assert verified["ok"], verified["problems"]
    assert verified["shards"] > 1
    assert len(verified["missing"]) > 1
    assert os.listdir(small_disk / "store" / "tmp") == []
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    again = extract(tiny_target, data, small_disk / "store")
    assert again.exit_code == 0, again.stderr
    assert Store.open(small_disk / "store").missing() == []
    assert os.listdir(small_disk / "store" / "tmp") == []
    whole = extract(tiny_target, data, tmp_path / "whole")
    assert whole.exit_code == 0
    for file in sorted((tmp_path / "whole" / "shards").rglob("c.*")):
        assert (small_disk / "store" / file.relative_to(tmp_path / "whole")).read_bytes() == file.read_bytes()


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


def test_a_disk_that_fills_at_a_checkpoint_leaves_a_run_that_the_same_command_completes(
    small_disk: Path, tmp_path: Path
) -> None:
    make_store(tmp_path / "store", documents=12, held_out=3)
    run = small_disk / "run"
    words = ["train", "--store", tmp_path / "store", "--run", run, "--num-layers", "1", "--block-size", "4"]
    words += ["--steps", "9", "--mask-token", "7", "--token-budget", "192", "--eval-every", "1"]
    result = dflash(*words, "--keep", "99")
    assert result.exit_code == 28, result.stderr
    assert f"No space left on the disk at {run}" in one_sentence(result)
    assert not list((run / "checkpoints").glob(".*"))  # what was half written takes no room
    result = dflash("export", run, "--out", small_disk / "drafter", "--dtype", "float32", "--layout", "speculators")
    assert result.exit_code == 28, result.stderr
    assert [path.name for path in small_disk.iterdir()] == ["run"]
    kept = sorted((run / "checkpoints").iterdir())
    assert len(kept) > 1
    for folder in kept[:-1]:
        shutil.rmtree(folder)
    assert dflash(*words, "--keep", "1").exit_code == 0
    assert (run / "checkpoints" / "step-000009").is_dir()


def test_a_read_only_store_is_read_and_not_written(tiny_target: Path, data: Path, small_disk: Path) -> None:
    """Nothing is lost, nobody gets a traceback, and what only reads works: verify, inspect-shard, train."""
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    store = small_disk / "store"
    assert extract(tiny_target, data, store).exit_code == 0
    before = content_of(store)
    with read_only(small_disk):
        again = extract(tiny_target, data, store)
        assert again.exit_code == 1
        assert str(store) in one_sentence(again)
        elsewhere = extract(tiny_target, data, small_disk / "new")
        assert elsewhere.exit_code == 1
        assert str(small_disk / "new") in one_sentence(elsewhere)
        assert dflash("verify", store, "--json").exit_code == 0
        assert dflash("inspect-shard", store, "--json").exit_code == 0
        for flag in ("--repair", "--rebuild-index"):
            assert dflash("verify", store, flag, "--json").exit_code in (0, 1)
        words = ("train", "--store", store, "--steps", "1", "--num-layers", "1", "--block-size", "4")
        trained = dflash(*words, "--run", small_disk.parent / "run")
        assert trained.exit_code == 0, trained.stderr
        damaged = store / "shards/b0064/s000000.zarr/hidden/c.0.0.0"
    assert content_of(store) == before
    os.truncate(damaged, 5000)
    with read_only(small_disk):
        repair = dflash("verify", store, "--repair", "--json")
        assert repair.exit_code == 1
        assert "cannot be written" in one_sentence(repair)


def content_of(store: Path) -> dict[str, bytes]:
    return {str(p.relative_to(store)): p.read_bytes() for p in sorted(store.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("fault", ["torn line", "no line", "no index", "no tmp, shards, index", "index and --rebuild"])
def test_what_a_crash_leaves_is_put_in_order_by_the_next_extraction(
    tiny_target: Path, data: Path, tmp_path: Path, fault: str
) -> None:
    """A torn last index line; a shard renamed but not indexed; the index lost."""
    store = tmp_path / "store"
    assert extract(tiny_target, data, store).exit_code == 0
    before, index = content_of(store), store / "index/w000.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    if fault == "torn line":
        index.write_bytes(b"".join(lines)[:-20])
    elif fault == "no line":
        index.write_bytes(b"".join(lines[:-1]))
    else:
        shutil.rmtree(index.parent)
    if fault == "no tmp, shards, index":
        shutil.rmtree(store / "tmp")
        shutil.rmtree(store / "shards")
    assert dflash("verify", store, "--json").exit_code == (fault != "no tmp, shards, index"), "missing is no damage"
    inodes = {p: p.stat().st_ino for p in store.glob("shards/*/*")}
    if fault == "index and --rebuild":
        rebuilt = json.loads(dflash("verify", store, "--rebuild-index", "--json").stdout)
        assert rebuilt["ok"]
        assert len(rebuilt["rebuilt"]) == len(lines)
    result = extract(tiny_target, data, store)
    assert result.exit_code == 0, result.stderr
    after = content_of(store)
    assert sorted(after.pop("index/w000.jsonl").splitlines()) == sorted(before.pop("index/w000.jsonl").splitlines())
    assert after == before
    if inodes:
        assert {p: p.stat().st_ino for p in store.glob("shards/*/*")} == inodes, "adopted, not made again"
    assert dflash("verify", store, "--json").exit_code == 0


def test_a_cut_shard_stops_training_is_found_and_is_made_again(tiny_target: Path, data: Path, tmp_path: Path) -> None:
    store, run = tmp_path / "store", tmp_path / "run"
    assert extract(tiny_target, data, store).exit_code == 0
    victim = next((store / "shards" / "b0064").rglob("hidden/c.*"))
    whole = victim.read_bytes()
    os.truncate(victim, len(whole) - 1024)
    training = ("train", "--store", store, "--run", run, "--steps", "2", "--num-layers", "1", "--block-size", "4")
    refused = dflash(*training)
    assert refused.exit_code == 1
    assert "b0064/s000000" in one_sentence(refused)
    found = dflash("verify", store, "--json")
    assert found.exit_code == 1
    problems = json.loads(found.stdout)["problems"]
    assert {problem["shard"] for problem in problems} == {"b0064/s000000"}
    assert any(problem["array"] == "hidden" for problem in problems)
    dflash("verify", store, "--repair", "--json")
    assert extract(tiny_target, data, store).exit_code == 0
    assert next((store / "shards" / "b0064").rglob("hidden/c.*")).read_bytes() == whole
    assert dflash("verify", store, "--json").exit_code == 0
    assert dflash(*training).exit_code == 0


def test_an_output_that_cannot_be_written_is_one_sentence(tiny_target: Path, data: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    result = extract(tiny_target, data, blocked / "store")
    assert result.exit_code == 1
    one_sentence(result)
