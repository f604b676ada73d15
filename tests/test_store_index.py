"""Index lines: whole or not there."""

import os
from pathlib import Path
from typing import Any

import pytest
from helpers_store import fill_shard, make_store
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.errors import DiskFullError
from dflash.store import Store
from dflash.store.index import Index, append_line, decode_line, encode_line, load_index, seal


def entry(generation: int = 0, number: int = 0) -> dict[str, Any]:
    return {"bucket": "b0096", "number": number, "gen": generation, "checksums": {"zarr.json": generation}}


def test_a_line_is_json_a_tab_and_its_crc32c() -> None:
    line = encode_line({"b": 1, "a": "ü"})
    assert line == '{"a":"ü","b":1}\t'.encode() + b"298cca1a\n"
    assert decode_line(line[:-1]) == {"a": "ü", "b": 1}


@given(at=st.integers(0, 40), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_line_is_found(at: int, bit: int) -> None:
    line = bytearray(encode_line({"retire": ["b0096", 12], "gen": 3}))
    line[at % len(line)] ^= 1 << bit
    assert decode_line(bytes(line[:-1])) is None or line[-1:] != b"\n"


@given(content=st.binary(max_size=60))
def test_anything_else_is_no_line(content: bytes) -> None:
    assert decode_line(content) is None


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]])
def test_the_highest_generation_holds_in_whatever_order_lines_come(order: list[int]) -> None:
    shard = ("b0096", 0)
    steps = [
        lambda index: index.add(entry(0)),
        lambda index: index.retire(shard, 0),
        lambda index: index.add(entry(1)),
        lambda index: index.add(entry(0)),
    ]
    index = Index()
    for i in order:
        steps[i](index)
    assert index.entries[shard]["gen"] == 1
    index.retire(shard, 1)
    assert shard not in index.entries
    assert index.next_generation(shard) == 2


def test_two_different_lines_of_one_generation_are_a_conflict() -> None:
    index = Index()
    index.add(entry())
    index.add(entry())
    assert index.conflicts == []
    index.add({**entry(), "checksums": {"zarr.json": 99}})
    assert index.conflicts == [("b0096", 0)]


def test_a_torn_tail_is_not_counted_and_cut_before_the_next_line(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10, fill=False)
    fill_shard(store, "b0096", 0)
    path = store.root / "index/w000.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + encode_line({"retire": ["b0096", 0], "gen": 0})[:-9])
    torn = Store.open(store.root)
    assert list(torn.index.entries) == [("b0096", 0)]
    assert torn.index.damaged == [("w000.jsonl", 2)]
    fill_shard(torn, "b0096", 1)
    assert path.read_bytes().startswith(whole)
    assert Store.open(store.root).index.damaged == []
    assert len(Store.open(store.root).index.entries) == 2


def test_sealing_cuts_only_the_torn_tail(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=10)
    path = store.root / "index/w000.jsonl"
    whole = path.read_bytes()
    assert not seal(store.root, "w000.jsonl")
    path.write_bytes(whole + b"x" * 200_000)
    assert seal(store.root, "w000.jsonl")
    assert path.read_bytes() == whole
    path.write_bytes(b"only a torn line")
    assert seal(store.root, "w000.jsonl")
    assert path.read_bytes() == b""


@pytest.mark.parametrize("kind", ["error", "short"])
def test_on_a_full_disk_the_index_is_cut_back_to_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    store = make_store(tmp_path / "s", documents=10, fill=False)
    fill_shard(store, "b0096", 0)
    before = (store.root / "index/w000.jsonl").read_bytes()
    write = os.write

    def full(descriptor: int, content: bytes) -> int:
        written = write(descriptor, content[:7])
        if kind == "error":
            raise OSError(28, "No space left on device")
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(DiskFullError):
            fill_shard(store, "b0096", 1)
    assert (store.root / "index/w000.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        {"bucket": "b9999"}, {"bucket": "../../etc"}, {"number": 99}, {"number": -1}, {"gen": -1}, {"rows": 3},
        {"lengths": [1]}, {"lengths": [1, 2, 3, 97]}, {"checksums": {"a": -1}}, {"bad": [{"row": 1}]}, {"extra": 1},
    ],
)  # fmt: skip
def test_whole_lines_that_do_not_fit_store_json_are_kept_aside(tmp_path: Path, change: dict[str, Any]) -> None:
    store = make_store(tmp_path / "s", documents=10, fill=False)
    made = fill_shard(store, "b0096", 0)
    (store.root / "index/w000.jsonl").unlink()
    append_line(store.root, 0, {**made, **change})
    index = load_index(store.root, store.buckets)
    assert index.entries == {}
    assert len(index.strange) == 1
    assert index.strange[0].startswith("w000.jsonl line 1")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["b0096", "x", ""]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["row", "tap", "a"]), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=100, deadline=None)
@given(field=st.sampled_from(["bucket", "number", "gen", "rows", "lengths", "checksums", "bad", "retire"]), value=JSON)
def test_any_value_in_a_line_is_kept_aside_or_right(
    field: str, value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.getbasetemp() / "index-fuzz"
    store = Store.open(root) if root.exists() else make_store(root, documents=10)
    lines = (root / "index/w000.jsonl").read_bytes().splitlines()
    line = decode_line(lines[0])
    assert line is not None
    (root / "index/w001.jsonl").write_bytes(encode_line({**line, field: value}))
    index = load_index(root, store.buckets)
    assert index.damaged == []
    assert set(index.entries) <= set(store.shards())


def test_a_line_of_many_shards_is_small(tmp_path: Path) -> None:
    """Opening 20,000 shards reads 20,000 lines; row checksums stay in the manifests."""
    store = make_store(tmp_path / "s", documents=10)
    assert (store.root / "index/w000.jsonl").stat().st_size < 1_200 * len(store.shards())
