"""After a crash: nothing half-made stays, nothing complete is lost, nothing retired comes back."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_store import fill_shard, make_store

from dflash.errors import DflashError
from dflash.store import ShardWriter, Store, acquire_lock, recover, verify
from dflash.store import shard as shard_module
from dflash.store.index import append_line
from dflash.store.recover import rebuild_index
from dflash.store.verify import retire


def lose_line(store: Store, keep: int = 0) -> None:
    path = store.root / "index/w000.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:keep]))
    store.reload_index()


def test_nothing_to_do_on_a_store_in_order(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10)
    before = (store.root / "index/w000.jsonl").read_bytes()
    assert recover(store) == {"removed": [], "sealed": [], "adopted": []}
    assert (store.root / "index/w000.jsonl").read_bytes() == before


@pytest.mark.parametrize("storage", ["bf16", "lz4", "int8"])
def test_a_complete_shard_without_a_line_is_adopted(tmp_path: Path, storage: str) -> None:
    store = make_store(tmp_path / "s", documents=10, storage=storage)
    entries = dict(store.index.entries)
    lose_line(store, keep=2)
    assert len(store.missing()) == len(entries) - 2
    assert len(recover(store, worker=5)["adopted"]) == len(entries) - 2
    again = Store.open(store.root)
    assert again.missing() == []
    for shard, entry in entries.items():
        assert again.index.entries[shard] == {**entry, "worker": again.index.entries[shard]["worker"]}
    assert verify(store.root)["ok"]


@pytest.mark.parametrize("fault", ["cut", "manifest", "document", "footer", "gone"])
def test_a_shard_that_is_not_whole_is_not_adopted_and_made_again(tmp_path: Path, fault: str) -> None:
    store = make_store(tmp_path / "s", documents=10)
    folder = store.root / "shards/b0096/s000000.zarr"
    file = folder / {"manifest": "zarr.json", "document": "labels/zarr.json"}.get(fault, "hidden/c.0.0.0")
    content = bytearray(file.read_bytes())
    if fault == "cut":
        content = content[:-4096]
    content[-10] ^= 1
    file.write_bytes(content)
    if fault == "gone":
        file.unlink()
    lose_line(store)
    assert "b0096/s000000" not in recover(store)["adopted"]
    assert store.missing() == [("b0096", 0)]
    fill_shard(store, "b0096", 0)
    assert verify(store.root)["ok"]
    assert os.listdir(store.root / "tmp") == []


def test_a_shard_of_another_store_is_not_adopted(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10)
    other = make_store(tmp_path / "o", documents=10, taps=(0, 1, 2))
    shutil.rmtree(store.root / "shards/b0096/s000000.zarr")
    shutil.copytree(other.root / "shards/b0096/s000000.zarr", store.root / "shards/b0096/s000000.zarr")
    lose_line(store)
    recover(store)
    assert store.missing() == [("b0096", 0)]


def test_a_retired_generation_is_never_adopted(tmp_path: Path) -> None:
    """A crash between the retire line and the moving away of the folder."""
    store = make_store(tmp_path / "s", documents=10)
    append_line(store.root, 0, {"retire": ["b0096", 0], "gen": 0})
    assert recover(store)["adopted"] == []
    assert store.missing() == [("b0096", 0)]
    assert fill_shard(store, "b0096", 0)["gen"] == 1
    assert verify(store.root)["ok"]
    retire(store, [("b0096", 0)])
    assert fill_shard(store, "b0096", 0)["gen"] == 2
    lose_line(store)
    recover(store)  # the lines are lost, generation 2 is on disk
    assert Store.open(store.root).index.entries["b0096", 0]["gen"] == 2


def test_dead_folders_go_and_those_of_live_workers_stay(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10, fill=False)
    ShardWriter(store, "b0096", 0, 0)
    ShardWriter(store, "b0096", 1, 7)
    (store.root / "tmp/retired-b0096-s000000-1-ab").mkdir()
    (store.root / "tmp/stray").write_text("x")
    (tmp_path / "outside").mkdir()
    (store.root / "tmp/link").symlink_to(tmp_path / "outside")
    with acquire_lock(store.root, 0, 8), acquire_lock(store.root, 7, 8):
        recover(store, worker=0)
    assert os.listdir(store.root / "tmp") == ["b0096-s000001-w007"]
    assert (tmp_path / "outside").exists()


def test_a_folder_that_a_starting_worker_clears_away_first_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is moved into tmp/ to be deleted belongs to nobody, so any worker that starts just then deletes it too."""
    store = make_store(tmp_path / "s", documents=10)
    retire(store, [("b0096", 0)])
    shutil.copytree(store.root / "shards/b0096/s000001.zarr", store.root / "shards/b0096/s000000.zarr")
    real = shutil.rmtree

    def both(path: Path, **options: Any) -> None:
        if path.name.startswith("retired-"):
            real(path)
        real(path, **options)

    monkeypatch.setattr(shard_module.shutil, "rmtree", both)
    fill_shard(store, "b0096", 0)
    monkeypatch.undo()
    assert verify(store.root)["ok"]
    assert os.listdir(store.root / "tmp") == []


def test_torn_tails_of_dead_workers_are_sealed_and_those_of_live_ones_left(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10)
    (store.root / "index/w001.jsonl").write_bytes(b"torn")
    (store.root / "index/w002.jsonl").write_bytes(b"just being written")
    with acquire_lock(store.root, 0, 3), acquire_lock(store.root, 2, 3):
        assert recover(store, worker=0)["sealed"] == ["w001.jsonl"]
    assert (store.root / "index/w001.jsonl").read_bytes() == b""
    assert (store.root / "index/w002.jsonl").read_bytes() == b"just being written"


def test_the_index_comes_back_from_the_manifests_alone(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10)
    entries = dict(store.index.entries)
    shutil.rmtree(store.root / "index")
    (store.root / "index").mkdir()
    assert not verify(store.root)["ok"]
    result = verify(store.root, rebuild_index=True)
    assert result["ok"]
    assert len(result["rebuilt"]) == len(entries)
    assert Store.open(store.root).index.entries == entries


def test_rebuilding_drops_damaged_lines_and_keeps_what_is_retired(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10)
    retired = store.shards()[0]
    append_line(store.root, 0, {"retire": list(retired), "gen": 0})
    path = store.root / "index/w000.jsonl"
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)
    result = verify(store.root, rebuild_index=True)
    assert result["missing"] == ["b0096/s000000"]
    again = Store.open(store.root)
    assert again.index.damaged == []
    assert again.missing() == [retired]
    assert (store.root / "index/w000.jsonl.old").exists()


@pytest.mark.parametrize("renames", range(4))
def test_what_is_retired_stays_so_when_rebuilding_breaks_off(
    tmp_path: Path, renames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder may still be there (a crash before it was moved away), and must not be adopted by whoever is next."""
    store = make_store(tmp_path / "s", documents=10)
    append_line(store.root, 3, {"retire": ["b0096", 0], "gen": 0})
    real, left = os.replace, [renames]

    def replace(*names: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, "Input/output error")
        real(*names)

    monkeypatch.setattr(os, "replace", replace)
    if renames < 3:  # the copy of w000's, its successor, and w003's
        with pytest.raises(OSError, match="Input"):
            rebuild_index(Store.open(store.root))
    else:
        rebuild_index(Store.open(store.root))
    monkeypatch.undo()
    again = Store.open(store.root)
    recover(again)
    assert again.missing() == [("b0096", 0)]
    assert again.index.damaged == []


def test_rebuilding_waits_for_live_writers(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10)
    with acquire_lock(store.root, 1, 2), pytest.raises(DflashError, match="being written to"):
        verify(store.root, rebuild_index=True)


WRITER = """
import sys
sys.path[:0] = sys.argv[3:]
from dflash.store import Store, acquire_lock, recover
from helpers_store import fill_shard
root, worker = sys.argv[1], int(sys.argv[2])
with acquire_lock(root, worker, 2):
    store = Store.open(root)
    recover(store, worker)
    for bucket, number in store.shards():
        if (bucket, number) in store.missing() and number % 2 == worker:
            fill_shard(store, bucket, number, worker)
"""


def start(root: Path, worker: int) -> subprocess.Popen[str]:
    here = Path(__file__).parent
    command = [sys.executable, "-c", WRITER, str(root), str(worker), str(here.parent), str(here)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_killed_at_random_instants_two_writers_still_make_the_same_store(tmp_path: Path) -> None:
    """A short form of the soak: SIGKILL in mid-write, again and again, until the store is whole."""
    rng = np.random.default_rng(5)
    store = make_store(tmp_path / "s", documents=160, fill=False)
    unbroken = make_store(tmp_path / "u", documents=160)
    kills = 0
    for _ in range(5):
        writers = [start(store.root, worker) for worker in range(2)]
        wait_for_locks(writers, store.root)
        time.sleep(rng.uniform(0.0, 0.1))
        for writer in writers:
            if writer.poll() is None:
                writer.send_signal(signal.SIGKILL)
                kills += 1
            writer.communicate()
        index = Store.open(store.root).index
        assert not index.strange
        assert not index.conflicts
    assert kills >= 2
    for writer in [start(store.root, worker) for worker in range(2)]:
        _, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors
    assert os.listdir(store.root / "tmp") == []
    result = verify(store.root)
    assert result["ok"], result["problems"]
    assert result["missing"] == []
    for bucket, number in store.shards():
        for file in sorted((store.root / "shards" / bucket / f"s{number:06d}.zarr").rglob("c.*")):
            assert file.read_bytes() == (unbroken.root / file.relative_to(store.root)).read_bytes()


def wait_for_locks(writers: list[subprocess.Popen[str]], root: Path) -> None:
    """Until both writers hold their claims, or have ended."""
    deadline = time.monotonic() + 30
    pids = {writer.pid for writer in writers}
    while any(writer.poll() is None for writer in writers) and time.monotonic() < deadline:
        held = set()
        for file in (root / "lock").glob("w*.json"):
            try:
                held.add(json.loads(file.read_text())["pid"])
            except (OSError, ValueError):
                continue
        if pids <= held:
            return
        time.sleep(0.005)
