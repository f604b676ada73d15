"""The training stage as a whole: it starts, stops, resumes bit for bit, and refuses what it cannot do."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_store import fill_shard, make_store
from safetensors.torch import load_file

from dflash.errors import DflashError, Interrupted
from dflash.simulate import Tally
from dflash.store import Store
from dflash.train.config import ExportConfig, TrainConfig
from dflash.train.export import export
from dflash.train.folder import checkpoints
from dflash.train.order import Micro
from dflash.train.ranks import Ranks
from dflash.train.run import train
from dflash.train.runner import Eager
from dflash.train.setup import set_up
from dflash.train.step import Batch

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
    """Weights, moments, counts and averages equal bit for bit."""
    folder = Path("checkpoints") / f"step-{step:06d}"
    files = [sorted(path.name for path in (run / folder).glob("*.safetensors")) for run in (one, other)]
    assert files[0] == files[1]
    for name in files[0]:
        left, right = load_file(one / folder / name), load_file(other / folder / name)
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
    train(config(store, tmp_path / "whole", steps=120, eval_every=30))
    settings = config(store, tmp_path / "broken", steps=120, eval_every=30)
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from dflash.train.config import TrainConfig\nfrom dflash.train.run import train\n"
        "from dflash.errors import DflashError\nimport sys\n"
        f"try:\n    train(TrainConfig(**{settings.__dict__!r}))\n"
        "except DflashError as error:\n    print(error, file=sys.stderr); sys.exit(error.exit_code)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "broken" / "metrics.jsonl"
    while not list((tmp_path / "broken" / "checkpoints").glob("step-000030")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "the same command resumes" in errors
    stopped = checkpoints(tmp_path / "broken")[-1].step
    assert 30 <= stopped < 120
    with metrics.open("a") as file:  # what a kill leaves: a step behind the checkpoint, and half a line
        file.write(json.dumps({"step": stopped + 1, "loss": 0.0}) + '\n{"step": 99')
    result = train(settings)
    assert result["steps"] == 120
    assert same_checkpoint(tmp_path / "whole", tmp_path / "broken", 120)
    assert lines(tmp_path / "whole") == lines(tmp_path / "broken")


@pytest.mark.parametrize(
    "changes",
    [{}, {"optimizer": "muon", "ema": 0.9}, {"deterministic": True, "sliding_window": 8, "num_layers": 2, "ema": 0.99}],
    ids=["plain", "muon and average", "deterministic and sliding"],
)
def test_killed_in_mid_run_resumes_from_the_last_checkpoint(store: Path, tmp_path: Path, changes: dict) -> None:
    train(config(store, tmp_path / "whole", **changes))
    train(config(store, tmp_path / "broken", **changes))
    newest = tmp_path / "broken" / "checkpoints" / "step-000012"
    newest.rename(newest.with_name(".step-000012.partial"))  # killed while it was being written
    train(config(store, tmp_path / "broken", **changes))
    assert not torch.are_deterministic_algorithms_enabled()
    assert same_checkpoint(tmp_path / "whole", tmp_path / "broken", 12)
    assert lines(tmp_path / "whole") == lines(tmp_path / "broken")


def in_step(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[Eager], None]) -> None:
    """Have `action` done once, in the step that makes `number` of them."""
    micro, left = Eager.micro, [action]

    def hooked(self: Eager, micro_: Micro, batch: Batch, step: int) -> None:
        micro(self, micro_, batch, step)
        if step == number - 1 and left:
            left.pop()(self)

    monkeypatch.setattr(Eager, "micro", hooked)


@pytest.mark.parametrize("step", [4, 12], ids=["in the middle", "the last"])
def test_a_stop_in_a_step_that_is_validated_leaves_the_validation_to_the_resumption(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    train(config(store, tmp_path / "whole"))
    in_step(monkeypatch, step, lambda runner: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match=f"step {step} of 12 is kept"):
        train(config(store, tmp_path / "broken"))
    train(config(store, tmp_path / "broken"))
    assert lines(tmp_path / "whole") == lines(tmp_path / "broken")
    whole, broken = (checkpoints(tmp_path / name)[-1].state for name in ("whole", "broken"))
    assert (whole["best"], whole["validation"]) == (broken["best"], broken["validation"])


def test_the_best_is_kept_also_where_no_checkpoint_is_due(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = iter([1, 3, 2, 2])

    def validated(*_: object) -> Tally:
        tally = Tally(3)
        tally.add([next(lengths)], [1, 1, 1], [0, 0, 0])
        return tally

    monkeypatch.setattr("dflash.train.run.validate", validated)
    result = train(config(store, tmp_path / "run", save_every=12, keep=1))
    assert result["best"]["step"] == 4
    assert [checkpoint.step for checkpoint in checkpoints(tmp_path / "run")] == [4, 12]
    assert export(ExportConfig(source=str(tmp_path / "run"), out=str(tmp_path / "out")))["step"] == 4


def test_an_update_that_is_not_finite_is_skipped_counted_and_told_of(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_step(monkeypatch, 2, lambda runner: runner.parts.optimiser.flat.grad[:1].fill_(float("nan")))
    result = train(config(store, tmp_path / "run", steps=5))
    assert result["skipped"] == 1
    assert "Warning: the gradient of step 2 is not finite" in capsys.readouterr().err
    skipped = [line["step"] for line in lines(tmp_path / "run") if line.get("skipped")]
    assert skipped == [2]
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "NaN" not in text  # which JSON does not have
    assert "Infinity" not in text
    assert train(config(store, tmp_path / "run", steps=5))["skipped"] == 1


def test_a_resumed_run_does_not_need_the_drafter_that_it_started_from(store: Path, tmp_path: Path) -> None:
    train(config(store, tmp_path / "first", steps=1))
    drafter = tmp_path / "drafter"
    export(ExportConfig(source=str(tmp_path / "first"), out=str(drafter), dtype="float32"))
    settings = {"init_from": str(drafter), "steps": 4, "save_every": 2}
    train(config(store, tmp_path / "whole", **settings))
    train(config(store, tmp_path / "broken", **settings))
    (tmp_path / "broken" / "checkpoints" / "step-000004").rename(tmp_path / "away")
    drafter.rename(tmp_path / "cleaned-up")
    train(config(store, tmp_path / "broken", **settings))
    assert same_checkpoint(tmp_path / "whole", tmp_path / "broken", 4)


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


def test_rows_of_another_try_are_not_taken_and_lost_ones_are_missed(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", documents=12, held_out=0)
    run = tmp_path / "run"
    run.mkdir()
    np.savez(run / "rows.npz", b0064=np.arange(1), b0096=np.arange(1))  # killed before its first checkpoint
    train(config(store.root, run, partial=True, steps=1))
    with np.load(run / "rows.npz", allow_pickle=False) as frozen:
        assert sum(len(frozen[name]) for name in frozen.files) == 12
    (run / "rows.npz").unlink()
    with pytest.raises(DflashError, match=r"rows\.npz is missing"):
        train(config(store.root, run, partial=True, steps=1))


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
        ("argmax", "bf16", {"precision": "bf16", "optimizer": "muon", "ema": 0.9, "sliding_window": 4}),
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


def test_an_average_is_what_validation_judges_and_an_export_takes(store: Path, tmp_path: Path) -> None:
    result = train(config(store, tmp_path / "run", ema=0.999, lr=0.01))
    checkpoint = checkpoints(tmp_path / "run")[-1]
    served, trained = checkpoint.served(), checkpoint.tensors("model")
    assert served.keys() == trained.keys()
    assert not torch.equal(served["fc.weight"], trained["fc.weight"])
    export(ExportConfig(source=str(checkpoint.folder), out=str(tmp_path / "out"), dtype="float32"))
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["fc.weight"], served["fc.weight"])
    assert result["acceptance_length"]["pooled"] >= 1


def test_the_first_layers_slide_and_an_export_says_so(store: Path, tmp_path: Path) -> None:
    train(config(store, tmp_path / "run", sliding_window=8, num_layers=3, full_layers=1, steps=1))
    drafter = checkpoints(tmp_path / "run")[-1].state["drafter"]
    assert drafter["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    assert drafter["sliding_window"] == 8
    export(ExportConfig(source=str(tmp_path / "run"), out=str(tmp_path / "out")))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["layer_types"] == drafter["layer_types"]
    assert written["sliding_window"] == 8
    with pytest.raises(DflashError, match="--sliding-window must be at least 4"):
        config(store, tmp_path / "run", sliding_window=3)


def test_another_drafter_starts_a_run_or_every_difference_is_told(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config(store, tmp_path / "first", steps=2))
    export(ExportConfig(source=str(tmp_path / "first"), out=str(tmp_path / "drafter"), dtype="float32"))
    train(config(store, tmp_path / "second", steps=0, init_from=str(tmp_path / "drafter")))
    theirs = load_file(tmp_path / "drafter" / "model.safetensors")
    ours = checkpoints(tmp_path / "second")[-1].tensors("model")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    capsys.readouterr()
    other = {"init_from": str(tmp_path / "drafter"), "block_size": 6, "mask_token": "9", "num_layers": 2}
    with pytest.raises(DflashError, match=r"--init-from .* num_layers 1 and mask_token_id 7, but .* has 2 and 9;"):
        train(config(store, tmp_path / "third", **other))
    shown = capsys.readouterr().err
    for difference in ("num_layers is 1 there and 2 here", "mask_token_id is 7", "block_size is 4"):
        assert f"--init-from: {difference}" in shown
    train(config(store, tmp_path / "fourth", steps=0, init_from=str(tmp_path / "drafter"), block_size=6))


def test_the_forecast_is_told_and_a_run_that_memory_cannot_hold_is_refused(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(config(store, tmp_path / "run", steps=0))
    assert "Memory: 0." in capsys.readouterr().err
    assert result["memory"]["device"] > 16 * result["parameters"]
    with pytest.raises(DflashError, match=r"needs .* 0\.7 GB may be used"):
        train(config(store, tmp_path / "other", memory="0.7GB"))
    assert not (tmp_path / "other").exists()


def test_a_bucket_without_rows_is_left_out(tmp_path: Path) -> None:
    """Neither compiled nor captured: the plan, from which the graphs are made, does not have it."""
    store = make_store(tmp_path / "store", documents=12, held_out=0, fill=False)
    for bucket, number in store.missing():
        if bucket == "b0064":
            fill_shard(store, bucket, number)
    settings = config(store.root, tmp_path / "run", partial=True)
    setup = set_up(settings, Ranks(0, 1), torch.device("cpu"))
    assert [bucket.name for bucket in setup.plan.order.buckets] == ["b0064"]
    assert setup.plan.largest == 192
