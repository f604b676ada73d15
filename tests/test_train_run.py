"""The training stage as a whole: it starts, stops, resumes bit for bit, and refuses what it cannot do."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_store import fill_shard, make_store
from safetensors.torch import load_file

from dflash.errors import DflashError
from dflash.store import Store
from dflash.train.config import TrainConfig
from dflash.train.folder import checkpoints
from dflash.train.run import train

TIMES = {"seconds", "tokens_per_second", "data_wait"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store") / "store"
    make_store(root)
    return root


def config(store: Path, run: Path, **changes: object) -> TrainConfig:
    fields = {
        "store": str(store), "run": str(run), "num_layers": 1, "block_size": 4, "steps": 12, "mask_token": "7",
        "token_budget": 192, "batch_tokens": 384, "eval_every": 4,
    }  # fmt: skip
    return TrainConfig(**(fields | changes))


def lines(run: Path) -> list[dict]:
    """metrics.jsonl without its times."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in found]


def same_checkpoint(one: Path, other: Path, step: int) -> bool:
    """Weights, moments and counts equal bit for bit."""
    for name in ("model", "optimizer"):
        path = Path("checkpoints") / f"step-{step:06d}" / f"{name}.safetensors"
        left, right = load_file(one / path), load_file(other / path)
        if left.keys() != right.keys() or not all(torch.equal(left[key], right[key]) for key in left):
            return False
    return True


def test_a_run_leaves_what_its_summary_says(store: Path, tmp_path: Path) -> None:
    result = train(config(store, tmp_path / "run"))
    assert result["steps"] == 12
    assert result["acceptance_length"]["pooled"] >= 1
    assert Path(result["checkpoint"]).is_dir()
    steps = [line["step"] for line in lines(tmp_path / "run") if "loss" in line]
    assert steps == list(range(1, 13))
    validations = [line["step"] for line in lines(tmp_path / "run") if "validation" in line]
    assert validations == [0, 4, 8, 12]
    kept = [checkpoint.step for checkpoint in checkpoints(tmp_path / "run")]
    assert kept[-2:] == [8, 12]
    assert (tmp_path / "run" / "config.toml").read_text().startswith("[train]")
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_the_same_seed_gives_the_same_run_and_another_does_not(store: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(config(store, tmp_path / name, seed=seed))
    assert same_checkpoint(tmp_path / "a", tmp_path / "b", 12)
    assert lines(tmp_path / "a") == lines(tmp_path / "b")
    assert not same_checkpoint(tmp_path / "a", tmp_path / "c", 12)


def test_stopped_and_resumed_equals_unbroken_bit_for_bit(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM in a real process, in the middle of a step; then the same command again."""
    train(config(store, tmp_path / "whole", steps=200, eval_every=50))
    settings = config(store, tmp_path / "broken", steps=200, eval_every=50)
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from dflash.train.config import TrainConfig\nfrom dflash.train.run import train\n"
        "from dflash.errors import DflashError\nimport sys\n"
        f"try:\n    train(TrainConfig(**{settings.__dict__!r}))\n"
        "except DflashError as error:\n    print(error, file=sys.stderr); sys.exit(error.exit_code)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "broken" / "metrics.jsonl"
    while not list((tmp_path / "broken" / "checkpoints").glob("step-000050")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "the same command resumes" in errors
    stopped = checkpoints(tmp_path / "broken")[-1].step
    assert 50 <= stopped < 200
    with metrics.open("a") as file:  # what a kill leaves: a step behind the checkpoint, and half a line
        file.write(json.dumps({"step": stopped + 1, "loss": 0.0}) + '\n{"step": 99')
    result = train(settings)
    assert result["steps"] == 200
    assert same_checkpoint(tmp_path / "whole", tmp_path / "broken", 200)
    assert lines(tmp_path / "whole") == lines(tmp_path / "broken")


def test_killed_in_mid_run_resumes_from_the_last_checkpoint(store: Path, tmp_path: Path) -> None:
    train(config(store, tmp_path / "whole"))
    train(config(store, tmp_path / "broken"))
    newest = tmp_path / "broken" / "checkpoints" / "step-000012"
    newest.rename(newest.with_name(".step-000012.partial"))  # killed while it was being written
    train(config(store, tmp_path / "broken"))
    assert same_checkpoint(tmp_path / "whole", tmp_path / "broken", 12)
    assert lines(tmp_path / "whole") == lines(tmp_path / "broken")


def test_a_complete_run_says_so_and_does_nothing(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config(store, tmp_path / "run"))
    before = lines(tmp_path / "run")
    capsys.readouterr()
    result = train(config(store, tmp_path / "run"))
    assert "is complete" in capsys.readouterr().err
    assert result["steps"] == 12
    assert lines(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("changes", "name"), [({"lr": 1e-3}, "settings.lr"), ({"steps": 13}, "steps"), ({"seed": 4}, "settings.seed")]
)
def test_resuming_with_other_settings_names_the_difference(
    store: Path, tmp_path: Path, changes: dict, name: str
) -> None:
    train(config(store, tmp_path / "run", steps=1))
    with pytest.raises(DflashError, match=name):
        train(config(store, tmp_path / "run", **({"steps": 1} | changes)))


def test_resuming_on_another_store_is_refused(store: Path, tmp_path: Path) -> None:
    train(config(store, tmp_path / "run", steps=1))
    make_store(tmp_path / "other", seed=5)
    with pytest.raises(DflashError, match=r"store\.(plan|fingerprint)"):
        train(config(tmp_path / "other", tmp_path / "run", steps=1))


def test_an_incomplete_store_is_refused_with_the_count(tmp_path: Path) -> None:
    make_store(tmp_path / "store", fill=False)
    with pytest.raises(DflashError, match=r"lacks \d+ of its \d+ shards"):
        train(config(tmp_path / "store", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_partial_run_keeps_to_the_rows_it_began_with(tmp_path: Path) -> None:
    """Half of the shards; later the store is completed, and the resumed run still equals one that was never stopped."""
    store = make_store(tmp_path / "store", fill=False)
    half = store.missing()[::2]
    for bucket, number in half:
        fill_shard(store, bucket, number)
    rows = {(bucket, row) for bucket, number in half for row in store.bucket(bucket).rows_of(number)}
    whole = train(config(store.root, tmp_path / "whole", partial=True, steps=8))
    assert whole["steps"] == 8
    train(config(store.root, tmp_path / "broken", partial=True, steps=8))
    newest = tmp_path / "broken" / "checkpoints" / "step-000008"
    newest.rename(newest.with_name(".step-000008.partial"))
    with np.load(tmp_path / "broken" / "rows.npz", allow_pickle=False) as frozen:
        assert {(name, int(row)) for name in frozen.files for row in frozen[name]} <= rows
    for bucket, number in Store.open(store.root).missing():
        fill_shard(store, bucket, number)
    train(config(store.root, tmp_path / "broken", partial=True, steps=8))
    assert same_checkpoint(tmp_path / "whole", tmp_path / "broken", 8)
    assert lines(tmp_path / "whole") == lines(tmp_path / "broken")


@pytest.mark.parametrize(
    ("labels", "loss", "message"), [("argmax", "kl", "topk:K or last-hidden"), ("tokens", "ce", "ce-tokens")]
)
def test_an_objective_that_the_store_cannot_serve_is_refused(
    tmp_path: Path, labels: str, loss: str, message: str
) -> None:
    make_store(tmp_path / "store", labels=labels, documents=12, held_out=0)
    with pytest.raises(DflashError, match=message):
        train(config(tmp_path / "store", tmp_path / "run", loss=loss))


@pytest.mark.parametrize(
    ("labels", "storage", "changes"),
    [
        ("topk:4", "bf16", {"loss": "kl"}),
        ("last-hidden", "bf16", {"loss": "kl"}),
        ("tokens", "bf16", {"loss": "ce-tokens"}),
        ("argmax", "lz4", {"weights": "dpace"}),
        ("argmax", "bf16", {"precision": "bf16"}),
    ],
)
def test_every_kind_of_store_and_objective_trains(tmp_path: Path, labels: str, storage: str, changes: dict) -> None:
    make_store(tmp_path / "store", labels=labels, storage=storage, documents=12, held_out=3)
    result = train(config(tmp_path / "store", tmp_path / "run", steps=3, **changes))
    assert result["loss"] > 0
    assert (tmp_path / "run" / "checkpoints" / "step-000003").is_dir()


def test_a_damaged_row_stops_the_run_with_its_name(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", documents=12, held_out=0)
    hidden = next((tmp_path / "store" / "shards").rglob("s000000.zarr/hidden/c.*"))
    with hidden.open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 0x10]))
    with pytest.raises(DflashError, match=r"array hidden of shard b00\d\d/s000000"):
        train(config(store.root, tmp_path / "run", steps=30))


def test_the_untrained_drafter_is_a_checkpoint_too(store: Path, tmp_path: Path) -> None:
    result = train(config(store, tmp_path / "run", steps=0))
    assert result["steps"] == 0
    assert result["loss"] is None
    assert result["checkpoint"].endswith("step-000000")
    assert os.path.isdir(result["checkpoint"])


def torchrun(processes: int, store: Path, run: Path, **flags: object) -> subprocess.CompletedProcess[str]:
    settings = config(store, run, **flags)
    words = [
        f"--{name.replace('_', '-')}={getattr(settings, name)}"
        for name in (
            "store",
            "run",
            "num_layers",
            "block_size",
            "steps",
            "mask_token",
            "token_budget",
            "batch_tokens",
            "eval_every",
        )
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        "-m",
        "--",
        "dflash",
    ]
    return subprocess.run(
        [*command, "train", *words, "--json"], capture_output=True, text=True, timeout=120, check=False
    )


def test_two_ranks_follow_the_trajectory_of_one(store: Path, tmp_path: Path) -> None:
    """The same global batch: order, anchors and losses do not depend on the ranks, but for fp32 sums."""
    train(config(store, tmp_path / "one"))
    result = torchrun(2, store, tmp_path / "two")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["steps"] == 12
    for one, two in zip(lines(tmp_path / "one"), lines(tmp_path / "two"), strict=True):
        if "loss" in one:
            assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
            assert two["anchors"] == one["anchors"]
            assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
