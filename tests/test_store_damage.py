"""Every damage of every file: `verify` names it, and the trainer's own reads are right or stop with one sentence.

Each file of one shard and every file beside the shards is damaged in several ways and places, one after the other, in
a store of each kind. What a byte belongs to is computed here, from the specification's arithmetic alone.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_store import fill_shard, make_store
from torch import Tensor

from dflash.errors import DflashError
from dflash.store import Store, verify
from dflash.store.index import append_line
from dflash.train.order import BucketRows, Micro
from dflash.train.reader import Layout, Reader

KINDS = [("bf16", "last-hidden", 40), ("lz4", "argmax", 40), ("int8", "topk:4", 40)]
SHARD = ("b0096", 1)
NAME = "b0096/s000001"
FOLDER = Path("shards/b0096/s000001.zarr")


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind[0])
def template(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store per storage, copied by the tests; its shard b0096/1 has a row that is empty."""
    storage, labels, hidden_size = request.param
    root = tmp_path_factory.mktemp(storage) / "s"
    store = make_store(root, storage=storage, labels=labels, hidden_size=hidden_size, documents=14, fill=False)
    for shard in store.missing():
        fill_shard(store, *shard, empty=[1] if shard == SHARD else [])
    return root


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template, tmp_path / "s")
    return tmp_path / "s"


def train_reads(root: Path) -> list[dict[str, Tensor]]:
    """Every row as the training loop gets it: through the trainer's reader and its buffers, the stale part cut off."""
    store = Store.open(root)
    reader = Reader(store, Layout.of(store, 96), torch.device("cpu"))
    buckets = [BucketRows(b.name, b.ceiling, b.rows, 1, 1) for b in store.buckets]
    found = []
    for slot in reader.slots:
        for buffer in slot.values():
            buffer.fill_(1)  # what is not written shows, and is no zero
    for micro, batch in reader.batches(iter([Micro(b, (row,)) for b in buckets for row in range(b.rows)])):
        n = int(batch.lengths[0])
        arrays = {name: getattr(batch, name)[0, :n].clone() for name in reader.layout.tails}
        found.append({"row": torch.tensor(micro.rows), "n": torch.tensor(n), **arrays})
    return found


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)  # NaN equals NaN


def same(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(as_bytes(a[k]), as_bytes(b[k])) for k in a)
        for a, b in zip(one, other, strict=True)
    )


def damages(content: bytes, dice: np.random.Generator) -> Iterator[tuple[int, bytes]]:
    """(place, damaged content): bits flipped at the ends and anywhere, bytes zeroed, cuts, bytes too many."""
    for at in {0, len(content) - 1, *dice.integers(0, len(content), 4).tolist()}:
        yield at, content[:at] + bytes([content[at] ^ (1 << int(dice.integers(8)))]) + content[at + 1 :]
    at = int(np.flatnonzero(np.frombuffer(content, np.uint8))[0])
    yield at, content[:at] + bytes(min(16, len(content) - at)) + content[at + 16 :]
    for size in {0, len(content) // 2, max(len(content) - 4096, 0), len(content) - 1}:
        yield -1, content[:size]
    yield -1, content + b"\0"


def row_of(store: Store, array: str, at: int) -> int | None:
    """The row that a byte of an array's file belongs to; None for the footer and for a file of another size."""
    spec, entry = store.specs(96)[array], store.index.entries[SHARD]
    if at < 0:
        return None
    if spec.packed:
        opened = store._cache.get(store, SHARD).array(array)
        row = int(np.searchsorted(opened.offsets, at, side="right")) - 1
        return row if at < opened.offsets[row] + opened.sizes[row] else None
    if not spec.by_row:
        return at // 4 if at < 4 * entry["rows"] else None
    stride = -(-96 * spec.token_bytes // 4096) * 4096 if spec.sparse else 96 * spec.token_bytes
    return at // stride if at < stride * entry["rows"] else None


def one_sentence(error: DflashError, name: str) -> None:
    assert name in str(error)
    assert "\n" not in str(error)


def faults(root: Path) -> set[tuple[Any, ...]]:
    result = verify(root)
    assert result["ok"] == (not result["problems"])
    return {(p["shard"], p["array"], p["row"]) for p in result["problems"]}


def test_any_damage_of_a_shard_is_named_and_never_read(root: Path) -> None:
    store, right, dice = Store.open(root), train_reads(root), np.random.default_rng(1)
    files = sorted(path.relative_to(root / FOLDER) for path in (root / FOLDER).rglob("*") if path.is_file())
    assert len(files) == 2 * len(store.specs(96)) + 1
    for file in files:
        path = root / FOLDER / file
        content = path.read_bytes()
        array = file.parts[0] if len(file.parts) == 2 else None
        for at, damaged in damages(content, dice):
            path.write_bytes(damaged)
            row = row_of(store, array, at) if array and file.name != "zarr.json" else None
            found = faults(root)
            assert (NAME, array, row) in found, f"{file} at {at}: {found}"
            assert {shard for shard, _, _ in found} == {NAME}
            try:
                assert same(train_reads(root), right), f"{file} at {at}: other values without an error"
            except DflashError as error:
                one_sentence(error, NAME)
            else:  # a file that training does not look at, or bytes that it does not use
                assert file.name == "zarr.json" or array == "lengths" or row is not None
        path.unlink()
        assert (NAME, array, None) in faults(root)
        path.write_bytes(content)
    assert verify(root)["ok"]


def test_any_damage_beside_the_shards_is_named_and_never_read(root: Path) -> None:
    """store.json, plan.npz, docs/*, target/*, calib.safetensors and the index. Here no shard may be blamed, except for
    the loss of its own index line."""
    right, dice = train_reads(root), np.random.default_rng(2)
    files = [p.relative_to(root) for p in sorted(root.rglob("*")) if p.is_file() and p.parts[-4] != "shards"]
    files = [file for file in files if file.parts[0] not in ("shards", "lock", "tmp")]
    assert len(files) >= 12
    for file in files:
        path = root / file
        content = path.read_bytes()
        index = file.parts[0] == "index"
        for at, damaged in damages(content, dice):
            path.write_bytes(damaged)
            cut_between_lines = index and (not damaged or damaged.endswith(b"\n"))
            found = faults(root)
            assert found, f"{file} at {at}"
            assert cut_between_lines or (None, str(file), None) in found, f"{file} at {at}: {found}"
            assert index or {shard for shard, _, _ in found} == {None}, f"{file} at {at}"
            try:
                assert same(train_reads(root), right), f"{file} at {at}: other values without an error"
            except DflashError as error:
                one_sentence(error, str(root))
        if file.name != "store.json":  # without it there is no store
            path.unlink()
            assert faults(root)
        path.write_bytes(content)
    assert verify(root)["ok"]


@pytest.mark.parametrize("what", ["folder gone", "swapped", "other store", "index newer", "byte", "cut"])
def test_repair_retires_exactly_what_is_damaged_and_the_store_comes_back_equal(
    root: Path, tmp_path: Path, what: str
) -> None:
    right, whole, store = train_reads(root), content_of(root), Store.open(root)
    zero, one = root / "shards/b0096/s000000.zarr", root / FOLDER
    damaged = {NAME}
    if what == "folder gone":
        shutil.rmtree(one)
    elif what == "swapped":
        zero.rename(tmp_path / "x")
        one.rename(zero)
        (tmp_path / "x").rename(one)
        damaged.add("b0096/s000000")
    elif what == "other store":
        meta = store.meta
        other = make_store(
            tmp_path / "o", storage=meta.storage, labels=meta.labels, hidden_size=40, documents=14, taps=(0, 1, 2)
        )
        shutil.rmtree(one)
        shutil.copytree(other.root / FOLDER, one)
    elif what == "index newer":
        append_line(root, 0, {**store.index.entries[SHARD], "gen": 3})
    else:
        file = next(one.glob("hidden/c.*"))
        if what == "cut":
            os.truncate(file, file.stat().st_size - 1024)
        else:
            file.write_bytes(b"\xff" + file.read_bytes()[1:])
    assert {shard for shard, _, _ in faults(root)} == damaged
    with pytest.raises(DflashError, match="|".join(damaged)):
        train_reads(root)
    assert set(verify(root, repair=True)["retired"]) == damaged
    store = Store.open(root)
    assert {f"{b}/s{n:06d}" for b, n in store.missing()} == damaged
    for shard in store.missing():
        fill_shard(store, *shard, empty=[1] if shard == SHARD else [])
    assert verify(root)["ok"]
    assert same(train_reads(root), right)
    assert content_of(root) == whole


def content_of(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted((root / "shards").rglob("c.*"))}


def test_a_damaged_channel_rms_is_blamed_itself_and_not_all_the_shards(tmp_path: Path) -> None:
    root = make_store(tmp_path / "s", storage="int8", documents=14).root
    content = (root / "calib.safetensors").read_bytes()
    (root / "calib.safetensors").write_bytes(content[:-2] + bytes([content[-2] ^ 1, content[-1]]))
    with pytest.raises(DflashError, match=r"calib\.safetensors"):
        train_reads(root)
    assert faults(root) == {(None, "calib.safetensors", None)}
    result = verify(root, repair=True)
    assert result["retired"] == []
    assert not (root / "calib.safetensors").exists()
    (root / "calib.safetensors").write_bytes(content)
    assert verify(root)["ok"]


def test_a_shard_made_with_another_channel_rms_than_the_rest_is_blamed(tmp_path: Path) -> None:
    root = make_store(tmp_path / "s", storage="int8", documents=14).root
    content = (root / "calib.safetensors").read_bytes()
    store = Store.open(root)
    append_line(root, 0, {"retire": list(SHARD), "gen": 0})
    store.reload_index()
    (root / "calib.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    fill_shard(store, *SHARD)
    (root / "calib.safetensors").write_bytes(content)
    assert faults(root) == {(NAME, "calib.safetensors", None)}
    assert verify(root, repair=True)["retired"] == [NAME]
