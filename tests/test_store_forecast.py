"""The forecast against what the disk says, and the ways out that a refusal lists against stores made with them."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from helpers_store import make_store

from dflash.cli import cli
from dflash.files import allocated_bytes
from dflash.store import disk, storage_bytes


@pytest.fixture(autouse=True)
def _no_fsync() -> None:
    """Here files are synced as always (tests/conftest.py does without): until then their blocks are not counted."""


@pytest.mark.parametrize(
    ("storage", "labels", "hidden_size"),
    [
        ("bf16", "argmax", 64),
        ("bf16", "last-hidden", 1024),
        ("bf16", "tokens", 40),
        ("int8", "topk:16", 200),
        ("int8", "argmax", 64),
        ("bf16", "topk:4", 96),
    ],
)
def test_it_is_within_two_percent_of_the_allocated_bytes(
    tmp_path: Path, storage: str, labels: str, hidden_size: int
) -> None:
    store = make_store(tmp_path / "s", storage=storage, labels=labels, hidden_size=hidden_size, documents=60)
    forecast = storage_bytes(store.meta, store.plan)
    assert forecast["bytes"] == pytest.approx(
        allocated_bytes(store.root) - allocated_bytes(store.root / "target"), rel=0.02
    )
    for bucket in forecast["buckets"]:
        real = allocated_bytes(store.root / "shards" / bucket["name"])
        assert bucket["bytes"] == pytest.approx(real, rel=0.02), bucket
    assert forecast["shards"] == sum(bucket["bytes"] for bucket in forecast["buckets"])


def test_lz4_is_an_estimate_from_below_bf16(tmp_path: Path) -> None:
    """Random states hardly compress, real ones do by about 1.2: the forecast takes the latter."""
    store = make_store(tmp_path / "s", storage="lz4", documents=10, hidden_size=256)
    plain = make_store(tmp_path / "p", documents=10, hidden_size=256)
    ratio = storage_bytes(plain.meta, plain.plan)["shards"] / storage_bytes(store.meta, store.plan)["shards"]
    assert 1.1 < ratio < 1.25


def test_padding_costs_nothing(tmp_path: Path) -> None:
    """The same documents under a ceiling ten times higher take (but for the small arrays) the same room."""
    near = make_store(tmp_path / "n", documents=8, held_out=0, buckets=(96,), hidden_size=512)
    assert storage_bytes(near.meta, near.plan)["shards"] < 1.35 * int(near.plan.rows["b0096"].length.sum()) * 3_072


def test_a_bucket_of_many_shards_is_sampled_and_still_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path / "s", documents=120, held_out=0, buckets=(64,))
    whole = storage_bytes(store.meta, store.plan)["bytes"]
    monkeypatch.setattr("dflash.store.forecast.SAMPLED", 3)
    assert storage_bytes(store.meta, store.plan)["bytes"] == pytest.approx(whole, rel=0.01)


def test_without_holes_the_padding_counts(tmp_path: Path) -> None:
    """A copy with every hole filled (`cp --sparse=never`) is what a filesystem without holes would hold."""
    store = make_store(tmp_path / "s", documents=30, hidden_size=512)
    for file in (store.root / "shards").rglob("hidden/c.*"):
        content = file.read_bytes()
        file.unlink()
        file.write_bytes(content)
    forecast = storage_bytes(store.meta, store.plan, holes=False)
    assert forecast["shards"] == pytest.approx(allocated_bytes(store.root / "shards"), rel=0.02)
    assert forecast["shards"] > 1.1 * storage_bytes(store.meta, store.plan)["shards"]


# --- the command


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """90 documents of ready tokens in three ceilings, those behind the same prompt at every third line."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("forecast") / "data.jsonl"
    with path.open("w") as file:
        for i in range(90):
            n = int(rng.integers(*((40, 96), (100, 256), (260, 512))[i % 3]))
            ids = rng.integers(3, 250, n).tolist()
            file.write(json.dumps({"input_ids": ids, "loss_mask": [0] * 10 + [1] * (n - 10)}) + "\n")
    return path


def extract(target: Path, data: Path, store: Path, *more: str) -> Result:
    return CliRunner().invoke(
        cli, ["extract", "--target", str(target), "--data", str(data), "--store", str(store), "--device", "cpu",
              *("--num-taps", "3") * ("--num-taps" not in more), "--json", *more,
              *("--buckets", "96,256,512") * ("--buckets" not in more)],
    )  # fmt: skip


def parsed(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize(
    "flags", [(), ("--storage", "int8"), ("--labels", "last-hidden"), ("--labels", "topk:8"), ("--labels", "tokens")]
)
def test_a_dry_run_says_what_lands_on_disk_before_the_target_is_loaded(
    tmp_path: Path, tiny_target: Path, data: Path, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("dflash.extract.run.load_target", lambda *_: pytest.fail("the target was loaded"))
        forecast = parsed(extract(tiny_target, data, tmp_path / "s", "--dry-run", *flags))
    assert not (tmp_path / "s").exists()
    assert os.listdir(tmp_path) == []
    made = parsed(extract(tiny_target, data, tmp_path / "s", *flags))
    real = allocated_bytes(tmp_path / "s")
    assert made["bytes"] == pytest.approx(real, abs=4096)  # the claim in lock/ has gone since
    assert forecast["bytes"] == pytest.approx(real, rel=0.02)
    assert {b["ceiling"] for b in forecast["buckets"]} == {96, 256, 512}
    for name, size in forecast["bucket_bytes"].items():
        assert size == pytest.approx(allocated_bytes(tmp_path / "s/shards" / name), rel=0.02), name
    assert sum(b["bytes"] for b in forecast["buckets"]) == sum(forecast["bucket_bytes"].values())
    assert forecast["write_seconds"] == pytest.approx(forecast["bytes"] / forecast["write_speed"])


def test_lz4_is_said_to_be_an_estimate(tmp_path: Path, tiny_target: Path, data: Path) -> None:
    result = extract(tiny_target, data, tmp_path / "s", "--dry-run", "--storage", "lz4")
    assert "lz4: an estimate" in result.stderr


WAYS = {
    "--num-taps 2": ("--num-taps", "2"),
    "--storage int8": ("--storage", "int8"),
    "--labels argmax": ("--labels", "argmax"),
    "--buckets …,256": ("--buckets", "96,256"),
}


def test_over_budget_it_refuses_and_lists_what_each_way_out_would_leave(
    tmp_path: Path, tiny_target: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every figure of the list within 2 % of a store that is made that way."""
    wide = ("--labels", "last-hidden")
    monkeypatch.setattr("dflash.extract.run.load_target", lambda *_: pytest.fail("the target was loaded"))
    refused = extract(tiny_target, data, tmp_path / "s", *wide, "--budget", "8MB", "--dry-run")
    assert refused.exit_code == 1
    *lines, error = refused.stderr.strip().splitlines()
    assert re.fullmatch(r"Error: Store \S+ would take [\d.]+ MB, more than --budget 8MB: .*\.", error)
    assert all(len(line) <= 80 for line in lines[lines.index("Ways out, each alone:             saves     leaves") :])
    listed = {m[1].strip(): m for line in lines if (m := re.match(r"  (--.{24})\s+([\d.]+) MB +([\d.]+) MB(.*)", line))}
    assert listed.keys() == {*WAYS, "--storage lz4 (about)"}
    monkeypatch.undo()
    whole = parsed(extract(tiny_target, data, tmp_path / "whole", *wide))["bytes"]
    for i, (what, flags) in enumerate(WAYS.items()):
        real = parsed(extract(tiny_target, data, tmp_path / str(i), *wide, *flags))["bytes"]
        _, saves, leaves, fits = listed[what].groups()
        assert float(leaves) * 1e6 == pytest.approx(real, rel=0.02, abs=5e4), what
        assert float(saves) * 1e6 == pytest.approx(whole - real, rel=0.02, abs=2e5), what
        assert ("fits" in fits) == (real < 8e6), what


def test_the_last_turns_alone_are_a_way_out_where_conversations_fanned_out(tmp_path: Path) -> None:
    from dataclasses import replace

    from dflash.extract.forecast import last_turns, ways_out

    store = make_store(tmp_path / "s", documents=30, held_out=6, fill=False)
    assert "--turns last" not in dict(ways_out(store.meta, store.plan, 1 << 40))
    rows = store.plan.rows["b0096"]
    fanned = {**store.plan.rows, "b0096": replace(rows, conversation=rows.conversation // 6)}
    plan = replace(store.plan, rows=fanned)
    kept = last_turns(plan)
    for name, each in fanned.items():
        best = {int(c): max(each.length[each.conversation == c]) for c in set(each.conversation.tolist())}
        if name == "b0096":  # no conversation of the other buckets has the number of one of these
            assert len(kept.rows[name]) < len(each)
            assert set(kept.rows[name].length.tolist()) <= set(best.values())
    before = storage_bytes(store.meta, plan)["bytes"]
    assert dict(ways_out(store.meta, plan, before))["--turns last"] < before


@pytest.mark.parametrize("holes", [True, False])
def test_a_way_out_saves_what_the_forecasts_differ_by(tmp_path: Path, holes: bool) -> None:
    """Also on a filesystem that keeps no holes, where padding takes room."""
    from dataclasses import replace

    from dflash.extract.forecast import ways_out

    store = make_store(tmp_path / "s", documents=30, fill=False)
    size, int8 = (
        storage_bytes(meta, store.plan, holes=holes)["bytes"]
        for meta in (store.meta, replace(store.meta, storage="int8"))
    )
    target = 12_345  # the target's part, which stays
    assert dict(ways_out(store.meta, store.plan, size + target, holes))["--storage int8"] == int8 + target


def test_no_room_is_refused_with_the_ways_out_too(
    tmp_path: Path, tiny_target: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda path: 1000)
    refused = extract(tiny_target, data, tmp_path / "s")
    assert refused.exit_code == 1
    assert "Ways out" in refused.stderr
    assert "are free there" in refused.stderr.splitlines()[-1]


def test_a_filesystem_without_holes_is_named_and_forecast_as_such(
    tmp_path: Path, tiny_target: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = parsed(extract(tiny_target, data, tmp_path / "s", "--dry-run"))
    real = os.fstat

    def without(descriptor: int) -> Any:
        found = real(descriptor)
        return type("Stat", (), {"st_blocks": -(-found.st_size // 512), "st_size": found.st_size})

    monkeypatch.setattr(disk.os, "fstat", without)
    assert not disk.keeps_holes(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(disk, "keeps_holes", lambda path: False)
    result = extract(tiny_target, data, tmp_path / "s", "--dry-run")
    assert "keeps no holes" in result.stderr
    assert parsed(result)["bytes"] > plain["bytes"]


def test_the_disk_is_tried_where_the_store_will_be_and_nothing_stays(tmp_path: Path) -> None:
    place = tmp_path / "not" / "there" / "yet"
    speed = disk.write_speed(place)
    assert speed is not None
    assert speed > 1e6
    assert os.listdir(tmp_path) == []
    assert isinstance(disk.keeps_holes(place), bool)
