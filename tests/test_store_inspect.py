"""The view of a shard and of a store."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from helpers_store import fill_shard, make_store, random_row

from dflash.errors import DflashError
from dflash.files import allocated_bytes
from dflash.store import ShardWriter, Store, inspect, read_calib


def shard_of(root: Path, name: str = "b0096/s000000") -> Path:
    return root / "shards" / f"{name}.zarr"


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize(("storage", "labels"), [("bf16", "argmax"), ("lz4", "last-hidden"), ("int8", "topk:4")])
def test_the_view_of_a_shard_agrees_with_its_arrays(tmp_path: Path, storage: str, labels: str) -> None:
    store = make_store(tmp_path / "s", storage=storage, labels=labels, documents=10)
    view = inspect(shard_of(store.root))
    group = zarr.open_group(str(shard_of(store.root)), mode="r")
    assert (view["shard"], view["bucket"], view["rows"], view["held_out"]) == ("b0096/s000000", "b0096", 4, False)
    assert {name: tuple(a["shape"]) for name, a in view["arrays"].items()} == {n: a.shape for n, a in group.arrays()}
    assert {name: a["dtype"] for name, a in view["arrays"].items()} == {n: a.dtype.name for n, a in group.arrays()}
    assert view["arrays"]["hidden"]["bytes"] == allocated_bytes(shard_of(store.root) / "hidden")
    plan = store.plan.rows["b0096"]
    assert [d["length"] for d in view["documents"]] == plan.length[:4].tolist()
    assert [d["source"] for d in view["documents"]] == [f"data.jsonl:{line}" for line in plan.line[:4]]
    assert view["padding"]["tokens"] == plan.length[:4].sum()
    assert view["padding"]["share"] == pytest.approx(1 - plan.length[:4].sum() / (4 * 96))
    assert view["checksums"]["ok"]
    json.dumps(view)


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_rms_is_that_of_the_valid_values_per_tap(tmp_path: Path, storage: str) -> None:
    store = make_store(tmp_path / "s", documents=10, storage=storage, hidden_size=40)
    taps, spread = [], []
    for row in range(4):
        values = store.read_row("b0096", row)
        if storage == "int8":
            rms = read_calib(store.root, 120).reshape(3, 40)
            taps.append(values["hidden"].reshape(-1, 3, 40) * rms * values["scale"][:, :, None])
        else:
            taps.append(bf16(values["hidden"]).reshape(-1, 3, 40))
        spread.append(np.sqrt((taps[-1].astype(np.float64) ** 2).mean(axis=(0, 2))))
    expected = np.sqrt((np.concatenate(taps).astype(np.float64) ** 2).mean(axis=(0, 2)))
    view = inspect(shard_of(store.root))
    assert [tap["layer"] for tap in view["taps"]] == [1, 2, 3]
    np.testing.assert_allclose([tap["rms"] for tap in view["taps"]], expected, rtol=1e-5)
    np.testing.assert_allclose([tap["rms_max"] for tap in view["taps"]], np.max(spread, axis=0), rtol=1e-5)
    assert {tap["nonfinite"] for tap in view["taps"]} == {0}
    assert {tap["repeats"] for tap in view["taps"]} == {None}


def test_zero_repeated_and_non_finite_taps_stand_out(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=8, buckets=(96,), fill=False)
    drawn = [random_row(store, "b0096", row) for row in range(4)]
    for row in drawn:
        row["hidden"][:, 128:] = row["hidden"][:, :64]  # the third tap repeats the first
    drawn[1]["hidden"][:, 64:128] = 0
    drawn[2]["hidden"][3, 64:67] = [0x7F80, 0xFF80, 0x7FC1]  # inf, -inf, nan
    writer = ShardWriter(store, "b0096", 0, 0)
    arrays = {name: np.stack([row[name] for row in drawn]) for name in drawn[0]}
    writer.write(0, store.plan.rows["b0096"].length[:4], arrays)
    writer.commit([], "cpu")
    taps = inspect(shard_of(store.root))["taps"]
    assert [tap["zero_rows"] for tap in taps] == [0, 1, 0]
    assert [tap["nonfinite"] for tap in taps] == [0, 3, 0]
    assert [tap["repeats"] for tap in taps] == [None, None, 1]
    assert all(np.isfinite(tap["rms"]) for tap in taps)


def test_label_agreement_and_anchors_are_counted_over_supervised_positions(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10)
    view = inspect(shard_of(store.root))
    anchors = agree = labelled = 0
    for row in range(4):
        values = store.read_row("b0096", row)
        mask = values["loss_mask"].astype(bool)
        anchors += sum(bool(mask[p] and mask[p + 1]) for p in range(len(mask) - 1))
        labelled += int(mask.sum())
        agree += int((values["labels"] == values["input_ids"])[mask].sum())
    assert view["anchors"] == anchors > 0
    assert view["labels"] == {"kind": "argmax", "labelled": labelled, "agreement": agree / labelled}
    assert 0.6 < view["labels"]["agreement"] < 1


def test_without_labels_there_is_no_agreement(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10, labels="tokens")
    assert inspect(shard_of(store.root))["labels"]["agreement"] is None


def test_one_row_with_its_text(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10)
    view = inspect(shard_of(store.root), row=2, text=True)
    (document,) = view["documents"]
    tokens, mask = store.documents[int(store.plan.rows["b0096"].document[2])]
    assert (document["row"], view["row"], view["rows"]) == (2, 2, 4)
    runs = document["text"]
    assert [run["supervised"] for run in runs] in ([False, True, False], [False, True])
    assert runs[0]["from"] == 0
    assert runs[-1]["to"] == len(tokens)
    for run in runs:
        assert set(mask[run["from"] : run["to"]].tolist()) == {int(run["supervised"])}
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(store.root / "target/tokenizer.json"))
    assert runs[1]["text"] == tokenizer.decode(
        tokens[runs[1]["from"] : runs[1]["to"]].tolist(), skip_special_tokens=False
    )


def test_a_damaged_row_is_named_and_the_others_are_still_shown(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10)
    with (shard_of(store.root) / "hidden/c.0.0.0").open("r+b") as file:
        file.seek(40)
        file.write(b"\xff\xff")
    view = inspect(shard_of(store.root))
    assert not view["checksums"]["ok"]
    assert [p["row"] for p in view["checksums"]["problems"]] == [0]
    assert len(view["documents"]) == 4
    assert "anchors" in view["documents"][1]
    assert view["taps"][0]["rms"] == pytest.approx(1, abs=0.1)
    deep = inspect(shard_of(store.root), verify=True)
    assert [(p["array"], p["row"]) for p in deep["checksums"]["problems"]] == [("hidden", 0)]


def test_an_empty_row_is_shown_with_its_cause(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=8, buckets=(96,), fill=False)
    fill_shard(store, "b0096", 0, empty=[1])
    view = inspect(shard_of(store.root), text=True, verify=True)
    assert view["checksums"]["ok"], view["checksums"]["problems"]
    assert view["bad"] == [{"row": 1, "source": "data.jsonl:1", "tap": 1}]
    assert (view["documents"][1]["length"], view["documents"][1]["text"]) == (0, [])
    assert view["documents"][1]["planned_length"] > 0


def test_the_summary_of_a_store(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10, fill=False)
    for shard in store.missing()[1:]:
        fill_shard(store, *shard)
    view = inspect(store.root)
    assert view["missing"] == ["b0096/s000000"]
    assert view["tokens"] == int(store.documents.lengths().sum())
    assert view["supervised_tokens"] == int(store.documents.mask.sum())
    assert view["bytes"] == allocated_bytes(store.root)
    by_name = {bucket["name"]: bucket for bucket in view["buckets"]}
    assert set(by_name) == {"b0064", "b0096", "v0064", "v0096"}
    assert (by_name["b0096"]["shards"], by_name["b0096"]["of_shards"]) == (1, 2)
    for name, bucket in by_name.items():
        lengths = store.plan.rows[name].length
        assert sum(bar["rows"] for bar in bucket["lengths"]) == bucket["rows"] == len(lengths)
        for bar in bucket["lengths"]:
            assert bar["rows"] == ((lengths >= bar["from"]) & (lengths <= bar["to"])).sum(), (name, bar)
    json.dumps(view)


def test_a_store_is_verified_whole_when_asked(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10)
    assert inspect(store.root, verify=True)["checksums"]["ok"]
    os.truncate(shard_of(store.root) / "labels/c.0.0", 100)
    assert not inspect(store.root, verify=True)["checksums"]["ok"]


@pytest.mark.parametrize("inner", ["shards", "shards/b0096", "shards/b0096/s000000.zarr/hidden", "nothing", "docs"])
def test_what_is_neither_store_nor_shard_is_refused(tmp_path: Path, inner: str) -> None:
    store = make_store(tmp_path / "s", documents=10)
    with pytest.raises(DflashError, match="STORE/shards"):
        inspect(store.root / inner)


def test_rows_that_do_not_exist_and_rows_of_a_store_are_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10)
    with pytest.raises(DflashError, match="no row 4"):
        inspect(shard_of(store.root), row=4)
    with pytest.raises(DflashError, match="whole store"):
        inspect(store.root, row=0)


def test_it_works_without_torch_from_inside_the_folder(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10)
    code = (
        "import sys\nfrom dflash.store import inspect\nview = inspect('.', row=1, text=True)\n"
        "assert view['documents'][0]['text']\nassert 'torch' not in sys.modules, 'torch was imported'"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=shard_of(store.root),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Store.open(store.root).missing() == []
