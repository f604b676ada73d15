"""Reading rows into the caller's buffers: right bytes, nothing else touched, and every damage stops it."""

import threading
from pathlib import Path

import numpy as np
import pytest
from helpers_store import make_store, random_row

from dflash.errors import DflashError
from dflash.store import Store
from dflash.store import reader as reader_module

KINDS = [("bf16", "argmax", 64), ("bf16", "last-hidden", 40), ("lz4", "last-hidden", 40), ("int8", "topk:4", 40)]


def poisoned(store: Store, ceiling: int) -> dict[str, np.ndarray]:
    buffers = {}
    for name in store.array_names():
        shape, dtype = store.array_shape_dtype(name, ceiling)
        buffers[name] = (
            np.frombuffer(b"\xa5" * (int(np.prod(shape)) * dtype.itemsize), dtype=dtype).reshape(shape).copy()
        )
    return buffers


@pytest.mark.parametrize(("storage", "labels", "hidden_size"), KINDS)
def test_the_valid_part_is_copied_and_the_rest_left_alone(
    tmp_path: Path, storage: str, labels: str, hidden_size: int
) -> None:
    make_store(tmp_path / "s", storage=storage, labels=labels, hidden_size=hidden_size, documents=14)
    store = Store.open(tmp_path / "s")
    for bucket in store.buckets:
        for row in range(bucket.rows):
            out, untouched = poisoned(store, bucket.ceiling), poisoned(store, bucket.ceiling)
            n = store.read_into(bucket.name, row, out)
            tokens, mask = store.documents[int(store.plan.rows[bucket.name].document[row])]
            assert n == len(tokens) == store.length(bucket.name, row)
            expected = {**random_row(store, bucket.name, row), "input_ids": tokens, "loss_mask": mask}
            for name, buffer in out.items():
                np.testing.assert_array_equal(buffer[:n], expected[name][:n], err_msg=name)
                assert buffer[n:].tobytes() == untouched[name][n:].tobytes()


def test_only_the_named_arrays_are_read(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=8)
    (store.root / "shards/b0096/s000000.zarr/labels/c.0.0").unlink()
    out = {"hidden": poisoned(store, 96)["hidden"]}
    n = store.read_into("b0096", 1, out)
    np.testing.assert_array_equal(out["hidden"][:n], random_row(store, "b0096", 1)["hidden"][:n])
    with pytest.raises(DflashError, match="labels of shard b0096/s000000"):
        store.read_row("b0096", 1)


def test_rows_larger_than_a_piece_are_copied_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "PIECE", 1000)  # no multiple of anything
    store = make_store(tmp_path / "s", documents=8)
    row = store.read_row("b0096", 2)
    np.testing.assert_array_equal(row["hidden"], random_row(store, "b0096", 2)["hidden"][: len(row["hidden"])])


def test_threads_read_the_same_store_while_maps_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "OPEN_SHARDS", 1)
    store, wrong = make_store(tmp_path / "s", documents=24), []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(40):
            bucket = store.buckets[rng.integers(2)]
            row = int(rng.integers(bucket.rows))
            values = store.read_row(bucket.name, row)
            n = len(values["hidden"])
            if not np.array_equal(values["hidden"], random_row(store, bucket.name, row)["hidden"][:n]):
                wrong.append((bucket.name, row))

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize(("storage", "labels", "hidden_size"), KINDS)
@pytest.mark.parametrize("name", ["hidden", "input_ids", "labels"])
def test_a_flipped_bit_in_a_row_names_shard_array_and_row(
    tmp_path: Path, storage: str, labels: str, hidden_size: int, name: str
) -> None:
    store = make_store(tmp_path / "s", storage=storage, labels=labels, hidden_size=hidden_size, documents=8)
    file = next((store.root / "shards/b0096/s000000.zarr" / name).glob("c.*"))
    flip(file, 20)  # in row 0
    with pytest.raises(DflashError, match=rf"Row 0 of array {name} of shard b0096/s000000"):
        Store.open(store.root).read_row("b0096", 0)
    assert len(store.read_row("b0096", 1)["hidden"])


def test_a_flipped_bit_in_the_padding_of_a_small_array_is_found(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=8)
    n = int(store.plan.rows["b0096"].length[1])
    assert n < 96
    flip(store.root / "shards/b0096/s000000.zarr/labels/c.0.0", (96 + n) * 4)
    with pytest.raises(DflashError, match="Row 1 of array labels"):
        store.read_row("b0096", 1)


@pytest.mark.parametrize("cut", [1, 4096, 10**9])
def test_a_cut_file_raises_and_never_reads_as_zeros(tmp_path: Path, cut: int) -> None:
    store = make_store(tmp_path / "s", documents=8)
    file = store.root / "shards/b0096/s000000.zarr/hidden/c.0.0.0"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(DflashError, match="hidden of shard b0096/s000000"):
        store.read_row("b0096", 3)


def test_a_longer_file_is_refused_too(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=8)
    with (store.root / "shards/b0096/s000000.zarr/hidden/c.0.0.0").open("ab") as file:
        file.write(bytes(4096))
    with pytest.raises(DflashError, match="hidden of shard b0096/s000000"):
        store.read_row("b0096", 3)


@pytest.mark.parametrize("file", ["zarr.json", "hidden/c.0.0.0"])
def test_a_flipped_bit_in_manifest_or_footer_is_found(tmp_path: Path, file: str) -> None:
    store = make_store(tmp_path / "s", documents=8)
    flip(store.root / "shards/b0096/s000000.zarr" / file, -30)
    with pytest.raises(DflashError, match="b0096/s000000"):
        store.read_row("b0096", 0)


def test_swapped_shards_are_found(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=16)
    folder = store.root / "shards/b0096"
    (folder / "s000000.zarr").rename(folder / "x")
    (folder / "s000001.zarr").rename(folder / "s000000.zarr")
    (folder / "x").rename(folder / "s000001.zarr")
    with pytest.raises(DflashError, match="swapped"):
        store.read_row("b0096", 0)


def test_a_shard_of_another_store_is_found(tmp_path: Path) -> None:
    """Same data and plan, other taps: only the store's fingerprint tells them apart."""
    store, other = make_store(tmp_path / "s", documents=8), make_store(tmp_path / "o", documents=8, taps=(0, 2, 3))
    assert store.meta.fingerprints["plan"] == other.meta.fingerprints["plan"]
    (store.root / "shards/b0096/s000000.zarr").rename(tmp_path / "away")
    (other.root / "shards/b0096/s000000.zarr").rename(store.root / "shards/b0096/s000000.zarr")
    with pytest.raises(DflashError, match="another store"):
        store.read_row("b0096", 0)


@pytest.mark.parametrize("what", ["shard", "array", "file"])
def test_a_symlink_inside_a_shard_is_refused(tmp_path: Path, what: str) -> None:
    store = make_store(tmp_path / "s", documents=8)
    parts = {"shard": "", "array": "hidden", "file": "hidden/c.0.0.0"}[what]
    path = store.root / "shards/b0096/s000000.zarr" / parts
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(DflashError, match="b0096/s000000"):
        store.read_row("b0096", 0)


def test_a_shard_that_is_gone_says_what_to_do(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=8)
    (store.root / "shards/b0096/s000000.zarr").rename(tmp_path / "away")
    with pytest.raises(DflashError, match="verify --repair"):
        store.read_row("b0096", 0)


def test_a_shard_that_was_never_made_leads_to_extract(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=8, fill=False)
    assert store.length("b0096", 0) is None
    with pytest.raises(DflashError, match="dflash extract"):
        store.read_row("b0096", 0)


def test_rows_and_buckets_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=8)
    for bucket, row in (("b0096", 4), ("b0096", -1), ("b9999", 0), ("../x", 0)):
        with pytest.raises(DflashError, match=r"row|bucket"):
            store.read_row(bucket, row)


def test_a_buffer_of_the_wrong_kind_is_our_own_mistake(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=8)
    for wrong in (np.empty((96, 192), np.int16), np.empty((96, 191), np.uint16), np.empty((3, 192), np.uint16)):
        with pytest.raises(AssertionError):
            store.read_into("b0096", 0, {"hidden": wrong})
    with pytest.raises(AssertionError):
        store.read_into("b0096", 0, {"hidden": np.empty((96, 384), np.uint16)[:, ::2]})


def test_a_lying_lz4_block_header_never_reaches_the_decoder(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=8, storage="lz4")
    opened = store._cache.get(store, ("b0096", 0))
    array = opened.array("hidden")
    block = bytearray(array.map[: int(array.sizes[0])].tobytes())
    block[4:8] = (1 << 30).to_bytes(4, "little")
    array.map = np.concatenate([np.frombuffer(block, np.uint8), array.map[len(block) :]])
    from dflash.store.layout import crc32c

    with pytest.raises(DflashError, match="Row 0"):
        array.unpack(0, crc32c(bytes(block)))
