"""What a committed shard is on disk: the same array for zarr-python, tensorstore, a memory map and us."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr
from helpers_store import fill_shard, make_store, random_row

from dflash.errors import DflashError, DiskFullError
from dflash.store import ShardWriter, Store
from dflash.store import shard as shard_module
from dflash.store.layout import crc32c
from dflash.store.verify import verify

KINDS = [("bf16", "argmax", 64), ("bf16", "last-hidden", 40), ("lz4", "last-hidden", 40), ("int8", "topk:4", 40)]
# bytes of a row of `hidden` at ceiling 96: 36,864 (nine pages), 23,040 (no multiple), -, 11,520 (no multiple)


def whole_shard(store: Store, bucket: str, number: int) -> dict[str, np.ndarray]:
    """The arrays that a shard must hold, padding included, from the test's own values."""
    ceiling, rows = store.bucket(bucket).ceiling, store.bucket(bucket).rows_of(number)
    padding = {"labels": -1}
    made = {}
    for name in store.array_names():
        shape, dtype = store.array_shape_dtype(name, ceiling)
        made[name] = np.full((len(rows), *shape), padding.get(name, 0), dtype)
    plan = store.plan.rows[bucket]
    made["lengths"] = plan.length[rows.start : rows.stop].astype(np.int32)
    for i, row in enumerate(rows):
        tokens, mask = store.documents[int(plan.document[row])]
        for name, values in {**random_row(store, bucket, row), "input_ids": tokens, "loss_mask": mask}.items():
            made[name][i, : len(tokens)] = values[: len(tokens)]
    return made


def open_with_tensorstore(path: Path) -> np.ndarray:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    return np.asarray(tensorstore.open(spec, read=True).result().read().result())


@pytest.mark.parametrize(("storage", "labels", "hidden_size"), KINDS)
def test_every_array_is_plain_zarr_and_equals_what_was_written(
    tmp_path: Path, storage: str, labels: str, hidden_size: int
) -> None:
    store = make_store(tmp_path / "s", storage=storage, labels=labels, hidden_size=hidden_size, documents=14)
    for bucket, number in store.shards():
        folder = tmp_path / "s" / "shards" / bucket / f"s{number:06d}.zarr"
        expected = whole_shard(store, bucket, number)
        group = zarr.open_group(str(folder), mode="r")
        assert set(group.array_keys()) == set(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(np.asarray(group[name][:]), array, err_msg=name)
            np.testing.assert_array_equal(open_with_tensorstore(folder / name), array, err_msg=name)
        assert group["hidden"].attrs.asdict() == ({} if storage == "int8" else {"view_dtype": "bfloat16"})


@pytest.mark.parametrize("hidden_size", [64, 40])
def test_a_memory_map_at_the_stride_is_the_array(tmp_path: Path, hidden_size: int) -> None:
    store = make_store(tmp_path / "s", hidden_size=hidden_size, buckets=(96,), documents=8)
    width = 3 * hidden_size
    stride = -(-96 * width * 2 // 4096) * 4096
    raw = np.memmap(tmp_path / "s/shards/b0096/s000001.zarr/hidden/c.0.0.0", dtype=np.uint8, mode="r")
    view = np.lib.stride_tricks.as_strided(raw.view("<u2"), (4, 96, width), (stride, width * 2, 2))
    np.testing.assert_array_equal(view, whole_shard(store, "b0096", 1)["hidden"])


def test_an_all_zero_row_keeps_its_place(tmp_path: Path) -> None:
    """zarr-python would drop a chunk that equals the fill value and shift the rows behind it."""
    store = make_store(tmp_path / "s", buckets=(96,), documents=4, fill=False)
    lengths = store.plan.rows["b0096"].length
    arrays = [random_row(store, "b0096", row) for row in range(4)]
    arrays[1]["hidden"][:] = 0
    writer = ShardWriter(store, "b0096", 0, 0)
    writer.write(0, lengths, {name: np.stack([a[name] for a in arrays]) for name in arrays[0]})
    writer.commit([], "cpu")
    assert not store.read_row("b0096", 1)["hidden"].any()
    for row in (0, 2, 3):
        np.testing.assert_array_equal(store.read_row("b0096", row)["hidden"], arrays[row]["hidden"][: lengths[row]])
    seen = zarr.open_array(str(tmp_path / "s/shards/b0096/s000000.zarr/hidden"), mode="r")[:]
    np.testing.assert_array_equal(np.asarray(seen)[2, : lengths[2]], arrays[2]["hidden"][: lengths[2]])


def test_row_tails_are_holes_and_stale_bytes_never_reach_the_disk(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", hidden_size=1024, buckets=(96,), documents=8)  # 6,144 bytes a token
    for number in range(2):
        file = tmp_path / f"s/shards/b0096/s{number:06d}.zarr/hidden/c.0.0.0"
        lengths = store.plan.rows["b0096"].length[4 * number : 4 * number + 4].astype(int)
        pages = int((-(-lengths * 6_144 // 4096)).sum()) * 4096
        assert pages <= file.stat().st_blocks * 512 <= pages + 3 * 4096
        assert file.stat().st_size == 4 * 96 * 6_144 + 4 * 16 + 4
        raw = np.fromfile(file, dtype=np.uint8)[: 4 * 96 * 6_144].reshape(4, -1)
        for row, n in enumerate(lengths):
            assert not raw[row, n * 6_144 :].any()


def test_rows_of_documents_that_are_not_finite_are_empty_and_named(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", buckets=(96,), documents=8, fill=False)
    entry = fill_shard(store, "b0096", 0, empty=[2])
    fill_shard(store, "b0096", 1)
    fill_shard(store, "v0096", 0)
    fill_shard(store, "v0096", 1)
    assert entry["lengths"][2] == 0
    assert entry["bad"] == [{"row": 2, "source": "data.jsonl:2", "tap": 1}]
    row = store.read_row("b0096", 2)
    assert {len(array) for array in row.values()} == {0}
    assert store.length("b0096", 2) == 0
    mask = zarr.open_array(str(tmp_path / "s/shards/b0096/s000000.zarr/loss_mask"), mode="r")[:]
    assert not np.asarray(mask)[2].any()
    assert verify(store.root)["ok"]


def test_manifest_and_index_line_carry_the_checksums(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=8)
    shard = ("b0096", 0)
    folder = tmp_path / "s/shards/b0096/s000000.zarr"
    entry, manifest = store.index.entries[shard], zarr.open_group(str(folder), mode="r").attrs.asdict()
    assert entry["checksums"]["zarr.json"] == crc32c((folder / "zarr.json").read_bytes())
    assert entry["checksums"]["hidden/zarr.json"] == crc32c((folder / "hidden/zarr.json").read_bytes())
    assert entry["checksums"]["hidden/c.0.0.0"] == crc32c((folder / "hidden/c.0.0.0").read_bytes()[-68:])
    n = entry["lengths"][1]
    assert manifest["arrays"]["hidden"]["crc32c"][1] == crc32c(whole_shard(store, *shard)["hidden"][1, :n])
    assert manifest["arrays"]["labels"]["crc32c"][1] == crc32c(whole_shard(store, *shard)["labels"][1])
    assert manifest["documents"] == store.plan.rows["b0096"].document[:4].tolist()
    assert (manifest["gen"], manifest["plan"]) == (0, store.meta.fingerprints["plan"])


@pytest.mark.parametrize("storage", ["bf16", "lz4", "int8"])
def test_shards_are_the_same_bytes_whoever_writes_them_in_whatever_order(tmp_path: Path, storage: str) -> None:
    one = make_store(tmp_path / "one", storage=storage, documents=8)
    two = make_store(tmp_path / "two", storage=storage, documents=8, fill=False)
    for bucket, number in reversed(two.missing()):
        write_backwards_in_threads(two, bucket, number, worker=number)
    for bucket, number in one.shards():
        inner = Path("shards", bucket, f"s{number:06d}.zarr")
        files = sorted(p.relative_to(one.root) for p in (one.root / inner).rglob("*") if p.is_file())
        assert len(files) > 8
        for file in files:
            assert (one.root / file).read_bytes() == (two.root / file).read_bytes(), file


def write_backwards_in_threads(store: Store, bucket: str, number: int, worker: int) -> None:
    writer = ShardWriter(store, bucket, number, worker)
    rows = store.bucket(bucket).rows_of(number)

    def one(i: int) -> None:
        drawn = random_row(store, bucket, rows[i])
        length = store.plan.rows[bucket].length[rows[i] : rows[i] + 1]
        writer.write(i, length, {name: array[None] for name, array in drawn.items()})

    threads = [threading.Thread(target=one, args=(i,)) for i in reversed(range(len(rows)))]
    for thread in threads:
        thread.start()
        if number == 0:  # one after the other, so that row 0 certainly comes last
            thread.join()
    for thread in threads:
        thread.join()
    writer.commit([], "cpu")


def test_a_full_disk_leaves_a_valid_store_and_its_own_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "s", documents=8, fill=False)
    (first, *_, last) = store.missing()
    fill_shard(store, *first)
    writes = 0

    def no_room(descriptor: int, content: Any, offset: int) -> None:
        nonlocal writes
        writes += 1
        if writes > 3:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shard_module, "pwrite_all", no_room)
        with pytest.raises(DiskFullError, match="full") as raised:
            fill_shard(store, *last)
    assert raised.value.exit_code == 28
    assert os.listdir(store.root / "tmp") == []
    again = Store.open(store.root)
    assert list(again.index.entries) == [first]
    assert not again.index.damaged
    fill_shard(again, *last)
    assert last in Store.open(store.root).index.entries


def test_a_writer_that_failed_in_one_thread_refuses_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path / "s", documents=8, fill=False)
    writer = ShardWriter(store, "b0096", 0, 0)
    drawn = {name: array[None] for name, array in random_row(store, "b0096", 0).items()}
    length = store.plan.rows["b0096"].length[:1]

    def broken(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shard_module, "pwrite_all", broken)
    with pytest.raises(OSError, match="Input/output"):
        writer.write(0, length, drawn)
    with pytest.raises(DflashError, match="given up"):
        writer.write(0, length, drawn)
    assert os.listdir(store.root / "tmp") == []


def test_abandoning_leaves_nothing(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=8, fill=False)
    writer = ShardWriter(store, "b0096", 0, 3)
    assert os.listdir(store.root / "tmp") == ["b0096-s000000-w003"]
    writer.abandon()
    writer.abandon()
    assert os.listdir(store.root / "tmp") == []
    assert len(store.missing()) == len(store.shards())


@pytest.mark.parametrize("fault", ["shape", "dtype", "name", "length"])
def test_arrays_that_are_not_the_shards_are_our_own_mistake(tmp_path: Path, fault: str) -> None:
    store = make_store(tmp_path / "s", documents=8, fill=False)
    writer = ShardWriter(store, "b0096", 0, 0)
    drawn = {name: array[None] for name, array in random_row(store, "b0096", 0).items()}
    length = store.plan.rows["b0096"].length[:1].copy()
    if fault == "shape":
        drawn["hidden"] = drawn["hidden"][:, :-1]
    elif fault == "dtype":
        drawn["hidden"] = drawn["hidden"].view(np.int16)
    elif fault == "name":
        del drawn["labels"]
    else:
        length -= 1
    with pytest.raises(AssertionError):
        writer.write(0, length, drawn)
    writer.abandon()


def test_a_symlink_in_place_of_a_folder_is_not_written_through(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=8, fill=False)
    outside = tmp_path / "outside"
    outside.mkdir()
    (store.root / "shards/b0096").rmdir()
    (store.root / "shards/b0096").symlink_to(outside)
    with pytest.raises(DflashError, match="symlink"):
        fill_shard(store, "b0096", 0)
    assert os.listdir(outside) == []


def test_zarr_documents_are_the_specifications_own(tmp_path: Path) -> None:
    make_store(tmp_path / "s", buckets=(96,), documents=8)
    document = json.loads((tmp_path / "s/shards/b0096/s000000.zarr/hidden/zarr.json").read_text())
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    assert document["codecs"] == [{
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [1, 96, 192], "codecs": [little], "index_codecs": [little, {"name": "crc32c"}],
            "index_location": "end",
        },
    }]  # fmt: skip
    assert document["chunk_grid"]["configuration"]["chunk_shape"] == document["shape"] == [4, 96, 192]
    assert document["chunk_key_encoding"] == {"name": "default", "configuration": {"separator": "."}}
    assert (document["data_type"], document["attributes"]) == ("uint16", {"view_dtype": "bfloat16"})
