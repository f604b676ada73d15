"""Several workers, by torchrun and by --worker: the same store to the byte, and one that dies takes nothing along."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from test_extract import content_of, run, write_tokens

from dflash.errors import DflashError, Interrupted
from dflash.extract import workers
from dflash.signals import Stop
from dflash.store import Store, acquire_lock
from dflash.store.verify import verify

#: The command line with three rows a shard; worker DIES kills itself at its fifth write, the others take their time.
SCRIPT = """
import os, signal, sys, time
import dflash.extract.forecast
from dflash.store import ShardWriter
dflash.extract.forecast.default_rows_per_shard = lambda ceiling: 3
write, count = ShardWriter.write, 0
def writing(self, *args):
    global count
    count += 1
    if os.environ.get("DIES") == str(self.worker) and count == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    if "DIES" in os.environ:
        time.sleep(0.2)
    write(self, *args)
ShardWriter.write = writing
from dflash.cli import main
sys.exit(main())
"""


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash.extract.forecast.default_rows_per_shard", lambda ceiling: 3)


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write_tokens(tmp_path / "data.jsonl", [5, 24, 9, 13, 48, 30, 25, 47, 6, 20, 21, 40, 12, 33, 44, 8])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def words(target: Path, data: str, store: Path, *more: str) -> list[str]:
    """The command that `run` of test_extract makes."""
    return [
        "extract", "--target", str(target), "--data", data, "--store", str(store), "--num-taps", "3", "--threads", "1",
        "--device", "cpu", "--forward-tokens", "96", "--buckets", "24,48", "--holdout", "0", "--json", *more,
    ]  # fmt: skip


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "DIES")}
    return subprocess.Popen(
        [sys.executable, *command], env={**kept, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def torchrun(number: int, script: Path, command: list[str], **environment: str) -> tuple[int, str, str]:
    started = start(
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number), str(script), *command],
        **environment,
    )
    out, err = started.communicate(timeout=240)
    return started.returncode, out, err


@pytest.mark.slow
def test_torchrun_makes_the_store_of_one_worker(tiny_target: Path, data: str, script: Path, tmp_path: Path) -> None:
    run(tiny_target, data, tmp_path / "one")
    code, out, err = torchrun(2, script, words(tiny_target, data, tmp_path / "two"))
    assert code == 0, err
    assert content_of(tmp_path / "one") == content_of(tmp_path / "two")
    assert content_of(tmp_path / "one", "docs") == content_of(tmp_path / "two", "docs")
    result = json.loads(out)  # one object, of the process that speaks for all
    assert result["missing"] == 0
    done = result["by_worker"]
    assert [each["worker"] for each in done] == [0, 1]
    assert sum(each["shards"] for each in done) == result["shards"] == 6
    assert sum(each["documents"] for each in done) == result["documents"] == 16
    assert sum(each["tokens"] for each in done) == result["tokens"]


@pytest.mark.slow
def test_killed_under_torchrun_and_completed_by_another_number(
    tiny_target: Path, data: str, script: Path, tmp_path: Path
) -> None:
    code, _, err = torchrun(2, script, words(tiny_target, data, tmp_path / "store"), DIES="1")
    assert code != 0
    assert "SIGKILL" in err
    kept = len(Store.open(tmp_path / "store").index.entries)
    assert 0 < kept < 6
    code, out, err = torchrun(3, script, words(tiny_target, data, tmp_path / "store"))
    assert code == 0, err
    assert json.loads(out)["shards"] == 6
    run(tiny_target, data, tmp_path / "one")
    assert content_of(tmp_path / "one") == content_of(tmp_path / "store")
    assert verify(tmp_path / "store")["ok"]


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["0", "1"])
def test_a_worker_that_dies_neither_loses_nor_blocks_the_shards_of_the_others(
    dies: str, tiny_target: Path, data: str, script: Path, tmp_path: Path
) -> None:
    command = words(tiny_target, data, tmp_path / "store")
    both = [start([str(script), *command, "--worker", f"{i}/2"], DIES=dies) for i in (0, 1)]
    results = [process.communicate(timeout=240) for process in both]
    dead, other = int(dies), 1 - int(dies)
    assert both[dead].returncode == -signal.SIGKILL
    assert both[other].returncode == 0, results[other][1]
    result = json.loads(results[other][0])
    own = sum(1 for i, _ in enumerate(Store.open(tmp_path / "store").shards()) if i % 2 == other)
    assert next(each["shards"] for each in result["by_worker"] if each["worker"] == other) == own == result["made"]
    assert Store.open(tmp_path / "store").missing()
    again = start([str(script), *command, "--worker", f"{dies}/2"])
    out, err = again.communicate(timeout=240)
    assert again.returncode == 0, err
    assert json.loads(out)["missing"] == 0
    run(tiny_target, data, tmp_path / "one")
    assert content_of(tmp_path / "one") == content_of(tmp_path / "store")


def test_a_first_worker_that_ends_without_a_store_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "POLL_SECONDS", 0.01)
    root, polls = tmp_path / "store", 0

    def sleep(seconds: float) -> None:
        nonlocal polls
        polls += 1
        if polls == 3:
            claim.__exit__(None, None, None)

    claim = acquire_lock(root, 0, 2)
    claim.__enter__()
    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(
        DflashError, match=r"Worker 0 of store .* ended before it had written the store: start it again"
    ):
        workers.wait_for(root / "store.json", "the store", root, Stop())
    assert polls == 3


def test_a_first_worker_that_has_not_come_yet_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Slurm array starts its tasks in any order; a stop ends the waiting."""
    root, stop, polls = tmp_path / "store", Stop(), 0

    def sleep(seconds: float) -> None:
        nonlocal polls
        polls += 1
        if polls == 2:
            stop.signum = signal.SIGTERM

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(Interrupted, match=r"written nothing to .*store yet; run the same"):
        workers.wait_for(root / "store.json", "the store", root, stop)
    assert polls == 2


def test_the_summary_counts_documents_and_tokens_in_and_out(tiny_target: Path, tmp_path: Path) -> None:
    lines: list[Any] = [
        {"input_ids": [7] * n, "loss_mask": [0] * (n - m) + [1] * m} for n, m in ((60, 50), (20, 9), (9, 1))
    ]
    lines += [lines[1], "", {"prompt": "unanswered"}]
    path = tmp_path / "data.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    result = run(tiny_target, str(path), tmp_path / "store")
    assert result["lines"] == 6 == result["conversations"] + sum(result["dropped"].values())
    assert result["dropped"] == {"blank_line": 1, "duplicate": 1, "no_answer": 1, "too_few_supervised": 1}
    assert result["dropped_tokens"] == {"duplicate": 20, "too_few_supervised": 9, "truncated": 12}
    assert (result["tokens_in"], result["tokens"]) == (60 + 20 + 9 + 20, 48 + 20)
    assert 0 <= result["gpu_wait"] <= 1
    assert 0 < result["disk_wait"] <= 1
    assert result["next"] == f"dflash train --store {tmp_path / 'store'} --run RUN"
    assert result["bytes"] > 0
    assert result["tokens_per_second"] > 0
    assert result["label_agreement"] is not None
