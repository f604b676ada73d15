"""The view of a shard and of a store."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from helpers_store import fill_shard, make_store, random_row

from dflash.cli import cli
from dflash.errors import DflashError
from dflash.files import allocated_bytes
from dflash.store import ShardWriter, Store, inspect, pack, read_calib, verify

inspect_module = sys.modules["dflash.store.inspect"]  # dflash.store.inspect is the function


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


# --- figures over a whole store


def test_a_store_shows_what_its_shards_show_over_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every row in the sample, taps, labels and anchors are those of the shards taken together."""
    monkeypatch.setattr(inspect_module, "SAMPLE_ROWS", 1000)
    store = make_store(tmp_path / "s", documents=20)
    view = inspect(store.root)
    sample, rows = view["sample"], sum(bucket.rows for bucket in store.buckets)
    assert (sample["rows"], sample["shards"], sample["of_shards"]) == (rows, len(store.shards()), len(store.shards()))
    shards = [inspect(shard_of(store.root, f"{name}/s{number:06d}")) for name, number in store.shards()]
    assert view["anchors"] == sum(shard["anchors"] for shard in shards)
    labelled = sum(shard["labels"]["labelled"] for shard in shards)
    agreeing = sum(shard["labels"]["agreement"] * shard["labels"]["labelled"] for shard in shards)
    assert sample["labels"]["labelled"] == labelled
    assert sample["labels"]["agreement"] == pytest.approx(agreeing / labelled)
    for t, tap in enumerate(sample["taps"]):
        of_shards = [shard["taps"][t] for shard in shards]
        weights = [shard["padding"]["tokens"] for shard in shards]
        assert tap["rms"] ** 2 == pytest.approx(np.average([s["rms"] ** 2 for s in of_shards], weights=weights))
        assert tap["rms_min"] == min(s["rms_min"] for s in of_shards)
        assert tap["rms_max"] == max(s["rms_max"] for s in of_shards)
    assert {name: about["dtype"] for name, about in sample["arrays"].items()} == {
        name: about["dtype"] for name, about in shards[0]["arrays"].items()
    }
    assert view["sources"] == [{"file": "data.jsonl", "rows": 26, "first_line": 1, "last_line": 26}]
    assert sample["checksums"]["ok"]


def test_a_sample_stays_small_and_takes_from_every_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path / "s", documents=60)
    monkeypatch.setattr(inspect_module, "SAMPLE_ROWS", 8)
    view = inspect(store.root)["sample"]
    assert view["rows"] == 8
    monkeypatch.setattr(inspect_module, "SAMPLE_BYTES", 1)
    assert inspect(store.root)["sample"]["rows"] == 1


def test_a_sample_opens_a_shard_once_however_many_rows_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, opened = make_store(tmp_path / "s", documents=20), []
    real = inspect_module.OpenShard
    monkeypatch.setattr(inspect_module, "OpenShard", lambda *args: opened.append(args[1]) or real(*args))
    assert inspect(store.root)["sample"]["rows"] == 26
    assert sorted(opened) == sorted(store.shards())


def test_damage_in_the_sample_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10)
    with (shard_of(store.root) / "hidden/c.0.0.0").open("r+b") as file:
        file.seek(40)
        file.write(b"\xff\xff")
    sample = inspect(store.root)["sample"]
    assert [p["shard"] for p in sample["checksums"]["problems"]] == ["b0096/s000000"]
    assert sample["taps"][0]["rms"] == pytest.approx(1, abs=0.1)


def test_a_store_without_shards_has_a_view(tmp_path: Path) -> None:
    view = inspect(make_store(tmp_path / "s", documents=10, fill=False).root)
    assert (view["sample"]["rows"], view["sample"]["taps"]) == (0, [])


def test_what_int8_lost_is_that_of_the_shards_manifests(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=8, buckets=(96,), storage="int8", fill=False, held_out=0)
    for number, sums in enumerate(([1.0, 4.0, 0.0], [3.0, 5.0, 0.0])):
        writer = ShardWriter(store, "b0096", number, 0)
        rows = store.bucket("b0096").rows_of(number)
        drawn = [random_row(store, "b0096", row) for row in rows]
        writer.write(0, store.plan.rows["b0096"].length[rows.start : rows.stop], {
            name: np.stack([row[name] for row in drawn]) for name in drawn[0]
        })  # fmt: skip
        writer.commit([], "cpu", quantisation={"squared_error": sums, "squares": [100.0, 100.0, 0.0]})
    of_shard = [tap["int8_error"] for tap in inspect(shard_of(store.root))["taps"]]
    assert of_shard == pytest.approx([0.1, 0.2, 0.0])
    of_store = [tap["int8_error"] for tap in inspect(store.root)["sample"]["taps"]]
    assert of_store == pytest.approx([(4 / 200) ** 0.5, (9 / 200) ** 0.5, 0.0])
    assert verify(store.root)["ok"]


def test_sums_of_the_wrong_number_of_taps_are_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=8, buckets=(96,), storage="int8", fill=False)
    writer = ShardWriter(store, "b0096", 0, 0)
    drawn = [random_row(store, "b0096", row) for row in range(4)]
    writer.write(0, store.plan.rows["b0096"].length[:4], {n: np.stack([row[n] for row in drawn]) for n in drawn[0]})
    writer.commit([], "cpu", quantisation={"squared_error": [1.0], "squares": [1.0]})
    with pytest.raises(DflashError, match="one sum per tap"):
        inspect(shard_of(store.root))


# --- the screen


def screen_of(path: Path, *flags: str) -> str:
    result = CliRunner().invoke(cli, ["inspect-shard", str(path), *flags], color=True)
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(("storage", "labels"), [("bf16", "argmax"), ("int8", "topk:16"), ("lz4", "last-hidden")])
def test_screens_fit_80_columns_whatever_the_names_and_sizes(tmp_path: Path, storage: str, labels: str) -> None:
    store = make_store(tmp_path / "s", storage=storage, labels=labels, documents=60, buckets=(64, 96, 5000))
    store.plan.__dict__["files"] = ("/very/long/" + "path/" * 20 + "conversations.jsonl",)
    for path in (store.root, shard_of(store.root), shard_of(store.root, "b5000/s000002")):
        text = click.unstyle(screen_of(path))
        lines = [line for line in text.splitlines() if str(store.root) not in line]
        assert max(map(len, lines)) <= 80, text


def test_the_screen_of_a_store_has_a_histogram_for_every_bucket(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=60)
    text = screen_of(store.root)
    for bucket in inspect(store.root)["buckets"]:
        top = max(bucket["lengths"], key=lambda bar: bar["rows"])
        (line,) = re.findall(rf"  {bucket['name']}  ([ ▁-█]{{10}})  at most {top['rows']} rows", text)
        assert [c == " " for c in line] == [bar["rows"] == 0 for bar in bucket["lengths"]]
        assert line[bucket["lengths"].index(top)] == "█"


def test_faulty_taps_are_red_and_sound_ones_are_not(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=8, buckets=(96,), taps=(1, 2, 3, 4, 5), fill=False)
    drawn = [random_row(store, "b0096", row) for row in range(4)]
    for row in drawn:
        row["hidden"][:, 64:128] = 0  # tap 2
        row["hidden"][:, 128:192] = row["hidden"][:, :64]  # tap 3 is tap 1
    drawn[1]["hidden"][2, 192] = 0x7F80  # tap 4: inf
    writer = ShardWriter(store, "b0096", 0, 0)
    writer.write(0, store.plan.rows["b0096"].length[:4], {n: np.stack([row[n] for row in drawn]) for n in drawn[0]})
    writer.commit([], "cpu")
    lines = screen_of(shard_of(store.root)).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("  tap")) + 1
    red = [line.startswith("\x1b[31m") for line in lines[first : first + 5]]
    assert red == [False, True, True, True, False]
    for line, words in zip(lines[first + 1 :], ("all zero", "repeats 1", "non-finite"), strict=False):
        assert words in line


def test_the_text_of_a_row_is_shown_with_its_supervised_part_in_colour(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10)
    text = screen_of(shard_of(store.root), "--row", "2", "--text")
    runs = inspect(shard_of(store.root), row=2, text=True)["documents"][0]["text"]
    assert len(runs) >= 2
    assert text.count("\x1b[32m«") == sum(run["supervised"] for run in runs)


@pytest.mark.parametrize("flags", [[], ["--json"], ["--row", "1", "--text"], ["--verify"]])
def test_the_command_works_where_torch_and_the_target_are_not(tmp_path: Path, flags: list[str]) -> None:
    """torch and transformers cannot be imported, and the target was never on this machine."""
    store = make_store(tmp_path / "s", documents=10)
    shown = [shard_of(store.root)] if "--row" in flags else [shard_of(store.root), store.root]
    code = (
        "import sys\nsys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from dflash.cli import cli\ncli(['inspect-shard', *sys.argv[1:]])"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    for path in shown:
        done = subprocess.run(
            [sys.executable, "-c", code, str(path), *flags],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) if "--json" in flags else "tap" in done.stdout


def test_a_packed_shard_is_shown_like_its_source(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10)
    pack(store.root, tmp_path / "p")
    one, other = inspect(shard_of(store.root), verify=True), inspect(shard_of(tmp_path / "p"), verify=True)
    for name in ("documents", "taps", "padding", "labels", "anchors"):
        assert one[name] == other[name]
    assert other["checksums"]["ok"]
