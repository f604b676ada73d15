"""Who may write: live holders are named, dead ones are no obstacle."""

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash.errors import DflashError
from dflash.store import acquire_lock
from dflash.store import lock as lock_module
from dflash.store.lock import live_workers, process_start


def content(root: Path, worker: int = 0) -> dict[str, Any]:
    return json.loads((root / f"lock/w{worker:03d}.json").read_text())


def forge(root: Path, **changes: Any) -> None:
    """The lock file of a live holder (this process) with some fields changed."""
    with acquire_lock(root, 0, 1):
        value = content(root) | changes
    (root / "lock/w000.json").write_text(json.dumps(value))


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_claim_names_its_holder_and_goes_when_released(tmp_path: Path) -> None:
    with acquire_lock(tmp_path, 3, 8) as lock:
        value = content(tmp_path, 3)
        assert (value["worker"], value["workers"], value["pid"]) == (3, 8, os.getpid())
        assert set(value) >= {"host", "boot_id", "run_id", "heartbeat"}
        assert live_workers(tmp_path) == {3}
        assert live_workers(tmp_path, but=3) == set()
        lock.check()
    assert os.listdir(tmp_path / "lock") == []


def test_a_claim_goes_when_the_work_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), acquire_lock(tmp_path, 0, 1):
        raise RuntimeError
    with acquire_lock(tmp_path, 0, 1):
        pass


def test_workers_of_one_run_share_a_store(tmp_path: Path) -> None:
    with acquire_lock(tmp_path, 0, 2), acquire_lock(tmp_path, 1, 2):
        assert live_workers(tmp_path) == {0, 1}


@pytest.mark.parametrize(("worker", "workers"), [(0, 2), (1, 3), (1, 1)])
def test_a_live_holder_is_named_in_the_refusal(tmp_path: Path, worker: int, workers: int) -> None:
    with acquire_lock(tmp_path, 0, 2):
        before = content(tmp_path)
        with (
            pytest.raises(DflashError, match=rf"process {os.getpid()} on .*since"),
            acquire_lock(tmp_path, worker, workers),
        ):
            pass
        assert content(tmp_path) == before


def test_another_process_refuses_too(tmp_path: Path) -> None:
    code = "import sys\nfrom dflash.store import acquire_lock\nwith acquire_lock(sys.argv[1], 0, 1): pass"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    with acquire_lock(tmp_path, 0, 1):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=environment, check=False
        )
    assert f"process {os.getpid()}" in done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": "dead"},
        {"process_start": 1},  # the pid was given to another process
        {"boot_id": "an earlier boot"},
        {"host": "elsewhere", "heartbeat": time.time() - 121},
        {"pid_namespace": "another container", "heartbeat": time.time() - 121},
    ],
)
@pytest.mark.parametrize("workers", [1, 4])
def test_a_dead_holder_is_no_obstacle(tmp_path: Path, changes: dict[str, Any], workers: int) -> None:
    forge(tmp_path, **{k: dead_process() if v == "dead" else v for k, v in changes.items()})
    with acquire_lock(tmp_path, workers - 1, workers):
        assert live_workers(tmp_path) == {workers - 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"host": "elsewhere", "pid": 1},
        {"host": "elsewhere", "heartbeat": "young"},
        {"pid_namespace": "another container", "heartbeat": "young"},
        {"heartbeat": 0.0},  # this machine: the process is there, however late its heartbeat
    ],
)
def test_a_holder_that_may_be_alive_refuses(tmp_path: Path, changes: dict[str, Any]) -> None:
    forge(tmp_path, **{k: time.time() - 100 if v == "young" else v for k, v in changes.items()})
    with pytest.raises(DflashError, match="being written to"), acquire_lock(tmp_path, 0, 1):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}'])
def test_an_unreadable_claim_holds_while_it_is_young(tmp_path: Path, text: str) -> None:
    (tmp_path / "lock").mkdir()
    path = tmp_path / "lock/w000.json"
    path.write_text(text)
    with pytest.raises(DflashError, match="unreadable"), acquire_lock(tmp_path, 0, 1):
        pass
    os.utime(path, (time.time() - 121, time.time() - 121))
    with acquire_lock(tmp_path, 0, 1):
        assert content(tmp_path)["pid"] == os.getpid()


def test_the_heartbeat_is_refreshed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.02)
    with acquire_lock(tmp_path, 0, 1):
        first, deadline = content(tmp_path)["heartbeat"], time.monotonic() + 10
        while content(tmp_path)["heartbeat"] == first:
            assert time.monotonic() < deadline, "no heartbeat"
            time.sleep(0.01)
    time.sleep(0.05)
    assert os.listdir(tmp_path / "lock") == []


def test_nobody_takes_a_claim_over_while_its_heartbeat_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look whose claim it is and the write; else the beat of a holder that slept would take it back."""
    with acquire_lock(tmp_path, 0, 1) as lock:
        monkeypatch.setattr(lock_module.Lock, "is_ours", lambda self: bool(free.append(is_free())) or True)
        free: list[bool] = []

        def is_free() -> bool:
            descriptor = os.open(tmp_path / "lock", os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            finally:
                os.close(descriptor)
            return True

        assert is_free()
        lock.beat()
        assert free == [False]
        monkeypatch.undo()


def test_who_claims_between_the_look_and_the_claim_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the filesystem knows no flock, O_EXCL decides."""
    look = lock_module._refuse_or_clear

    def overtaken(root: Path, mine: lock_module.Holder) -> None:
        look(root, mine)
        lock_module._claim(root, replace(mine, run_id="another"))

    monkeypatch.setattr(lock_module, "_refuse_or_clear", overtaken)
    with pytest.raises(DflashError, match=r"has just claimed worker 0 of store .*; wait"), acquire_lock(tmp_path, 0, 1):
        pass
    assert content(tmp_path)["run_id"] == "another"


def test_a_claim_that_was_taken_over_is_noticed_and_not_removed(tmp_path: Path) -> None:
    with acquire_lock(tmp_path, 0, 1) as lock:
        (tmp_path / "lock/w000.json").write_text(json.dumps(content(tmp_path) | {"run_id": "another"}))
        with pytest.raises(DflashError, match="lost"):
            lock.check()
        lock.beat()
    assert content(tmp_path)["run_id"] == "another"


def test_of_many_who_find_a_dead_holder_one_takes_its_place(tmp_path: Path) -> None:
    forge(tmp_path, pid=dead_process())
    barrier, leave, won, refused = threading.Barrier(8), threading.Event(), [], []

    def attempt() -> None:
        barrier.wait()
        try:
            with acquire_lock(tmp_path, 0, 1) as lock:
                won.append(lock)
                leave.wait(10)
        except DflashError as error:
            refused.append(error)
        if len(refused) == 7:
            leave.set()

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(refused)) == (1, 7)


def test_a_zombie_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 10
    while process_start(process.pid) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.wait()


def test_a_place_that_cannot_be_written_to_says_so(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("a file in the way")
    with pytest.raises(DflashError, match="cannot be written to"), acquire_lock(tmp_path, 0, 1):
        pass
