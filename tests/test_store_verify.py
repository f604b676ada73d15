"""Every damage is found and named; repair retires exactly what is damaged."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers_store import fill_shard, make_store

from dflash.errors import DflashError
from dflash.store import Store, acquire_lock, recover, verify
from dflash.store import verify as verify_function
from dflash.store.index import append_line
from dflash.store.verify import retire

KINDS = [("bf16", "last-hidden", 40), ("lz4", "argmax", 40), ("int8", "topk:4", 40)]
SHARD = "b0096/s000001"


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind[0])
def template(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store per storage, copied by the tests; its shard b0096/1 has a row that is empty."""
    storage, labels, hidden_size = request.param
    root = tmp_path_factory.mktemp(storage) / "s"
    store = make_store(root, storage=storage, labels=labels, hidden_size=hidden_size, documents=14, fill=False)
    for bucket, number in store.missing():
        fill_shard(store, bucket, number, empty=[1] if (bucket, number) == ("b0096", 1) else [])
    return root


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template, tmp_path / "s")
    return tmp_path / "s"


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x04]))


def faults(result: dict[str, Any]) -> set[tuple[Any, ...]]:
    return {(p["shard"], p["array"], p["row"]) for p in result["problems"]}


def test_a_sound_store_is_ok_and_is_not_written_to(root: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    result = verify(root)
    assert result["ok"], result["problems"]
    assert result["shards"] == 6
    assert result["missing"] == result["redo"] == []
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize("array", ["hidden", "input_ids"])
def test_damage_is_named_by_shard_array_and_row(root: Path, array: str, row: int) -> None:
    store = Store.open(root)
    opened = store._cache.get(store, ("b0096", 1)).array(array)
    flip(next((root / "shards" / f"{SHARD}.zarr" / array).glob("c.*")), int(opened.offsets[row]) + 24)
    problems = faults(verify(root))
    assert (SHARD, array, row) in problems
    assert {shard for shard, _, _ in problems} == {SHARD}


def test_repair_retires_exactly_the_damaged_shards_and_extraction_makes_them_again(root: Path) -> None:
    flip(next((root / "shards" / f"{SHARD}.zarr/hidden").glob("c.*")), 5)
    result = verify(root, repair=True)
    assert not result["ok"]
    assert result["retired"] == result["redo"] == [SHARD]
    store = Store.open(root)
    assert store.missing() == [("b0096", 1)]
    assert os.listdir(root / "tmp") == []
    assert not (root / "shards" / f"{SHARD}.zarr").exists()
    after = verify(root)
    assert after["ok"]
    assert after["missing"] == [SHARD]
    recover(store)
    assert fill_shard(store, "b0096", 1)["gen"] == 1
    whole = verify(root)
    assert whole["ok"]
    assert whole["missing"] == []


def test_stale_bytes_in_padding_are_found(root: Path) -> None:
    store = Store.open(root)
    if store.meta.storage == "lz4":
        pytest.skip("padding is inside the compressed row")
    spec = store.specs(96)["hidden"]
    n = store.index.entries["b0096", 1]["lengths"][0]
    for at in (n * spec.token_bytes + 1, spec.chunk_bytes(4) + 3):  # behind the last token; in the gap behind the row
        if at < spec.stride(4):
            flip(root / "shards" / f"{SHARD}.zarr/hidden/c.0.0.0", at)
            assert faults(verify(root)) == {(SHARD, "hidden", 0)}
            flip(root / "shards" / f"{SHARD}.zarr/hidden/c.0.0.0", at)


def test_tokens_that_are_not_the_documents_are_found(tmp_path: Path) -> None:
    """A shard that is right by all its checksums, but holds another document's tokens."""
    store = make_store(tmp_path / "s", documents=14)
    document = int(store.plan.rows["b0096"].document[5])
    tokens = store.documents.tokens.copy()
    start = int(store.documents.offsets[document])
    tokens[start] += 1
    object.__setattr__(store.documents, "tokens", tokens)
    retire(store, [("b0096", 1)])
    fill_shard(store, "b0096", 1)
    assert faults(verify(store.root)) == {(SHARD, "input_ids", 1)}


@pytest.mark.parametrize("what", ["gone", "swapped", "foreign", "stray", "link"])
def test_index_and_disk_are_compared(root: Path, tmp_path: Path, what: str) -> None:
    one, two = root / "shards/b0096/s000000.zarr", root / "shards/b0096/s000001.zarr"
    if what == "gone":
        shutil.rmtree(two)
    elif what == "swapped":
        one.rename(root / "x")
        two.rename(one)
        (root / "x").rename(two)
    elif what == "foreign":
        one.rename(root / "shards/b0096/s000099.zarr")
    elif what == "stray":
        (two / "notes.txt").write_text("x")
    else:
        two.rename(tmp_path / "outside")
        two.symlink_to(tmp_path / "outside")
    shards = {shard for shard, _, _ in faults(verify(root))}
    expected = {"gone": {SHARD}, "stray": {SHARD}, "link": {SHARD}, "foreign": {"b0096/s000000", None}}
    assert shards == expected.get(what, {SHARD, "b0096/s000000"})
    verify(root, repair=True)
    assert (tmp_path / "outside").exists() == (what == "link")
    assert two.exists() == (what == "foreign")


def test_a_shard_without_a_line_is_reported(root: Path) -> None:
    path = root / "index/w000.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    assert faults(verify(root)) == {("b0096/s000000", None, None)}


def test_an_index_line_newer_than_the_data_is_reported(root: Path) -> None:
    store = Store.open(root)
    append_line(root, 0, {**store.index.entries["b0096", 1], "gen": 3})
    assert {shard for shard, _, _ in faults(verify(root))} == {SHARD}


def test_damaged_index_lines_are_reported_by_number(root: Path) -> None:
    flip(root / "index/w000.jsonl", 30)
    result = verify(root)
    assert any("line 1 " in p["problem"] and p["array"] == "index/w000.jsonl" for p in result["problems"])


def test_damage_beside_the_shards_is_named_and_the_shards_are_still_checked(root: Path) -> None:
    flip(root / "target/embed.safetensors", -5)
    (root / "target/extra.py").write_text("print('never run')")
    flip(next((root / "shards" / f"{SHARD}.zarr/hidden").glob("c.*")), 5)
    problems = faults(verify(root))
    assert {(None, "target/embed.safetensors", None), (None, "target/extra.py", None)} < problems
    assert (SHARD, "hidden", 0) in problems


@pytest.mark.parametrize("name", ["store.json", "plan.npz", "docs/offsets.u64"])
def test_damage_that_leaves_nothing_to_compare_with_is_named(root: Path, name: str) -> None:
    flip(root / name, 40)
    result = verify(root)
    assert not result["ok"]
    assert {array for _, array, _ in faults(result)} >= {name}


def test_repair_waits_for_writers(root: Path) -> None:
    flip(next((root / "shards" / f"{SHARD}.zarr/hidden").glob("c.*")), 5)
    with acquire_lock(root, 1, 2), pytest.raises(DflashError, match="being written to"):
        verify(root, repair=True)
    assert (root / "shards" / f"{SHARD}.zarr").exists()


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    assert verify_function is verify
    with pytest.raises(DflashError, match=r"no store\.json"):
        verify(tmp_path)
