"""docs/store-format.md is enough to write a reader from: its own reader reads what we wrote."""

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_store import make_store

from dflash.store import (
    Bucket,
    DocumentsWriter,
    Plan,
    PlanRows,
    Prepared,
    ShardWriter,
    Store,
    StoreMeta,
    create_store,
)

PAGE = Path(__file__).parent.parent / "docs" / "store-format.md"


def reader_of_the_page() -> Any:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["read_row"]


@pytest.mark.parametrize(
    ("storage", "labels", "hidden_size"),
    [("bf16", "argmax", 64), ("bf16", "last-hidden", 40), ("int8", "topk:4", 40), ("lz4", "tokens", 64)],
)
def test_the_pages_reader_reads_every_row(tmp_path: Path, storage: str, labels: str, hidden_size: int) -> None:
    store = make_store(tmp_path / "s", storage=storage, labels=labels, hidden_size=hidden_size, documents=14)
    read_row = reader_of_the_page()
    for bucket in store.buckets:
        for row in range(bucket.rows):
            ours, theirs = store.read_row(bucket.name, row), read_row(store.root, bucket.name, row)
            assert set(ours) - set(theirs) == ({"hidden"} if storage == "lz4" else set())
            for name, array in theirs.items():
                np.testing.assert_array_equal(array, ours[name], err_msg=name)
                assert array.dtype == ours[name].dtype


def test_the_pages_reader_finds_a_flipped_byte(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", documents=14)
    with (store.root / "shards/b0096/s000000.zarr/hidden/c.0.0.0").open("r+b") as file:
        file.write(b"\x01\x02\x03")
    with pytest.raises(AssertionError, match="row 0 of hidden"):
        reader_of_the_page()(store.root, "b0096", 0)


def golden_store(root: Path) -> Store:
    """Two rows of two buckets, made of plain arithmetic: no random stream, no library's version in it."""
    scratch = root.with_name("scratch")
    writer = DocumentsWriter(scratch / "docs")
    for n in (5, 7, 3):
        writer.add(np.arange(n) * 3 + n, np.arange(n) % 3 == 1)
    documents = writer.close()

    def rows(document: list[int], length: list[int]) -> PlanRows:
        line = np.array(document, "i8") + 1
        return PlanRows(
            np.array(document), line, np.zeros(len(line), "i4"), line, np.array(length, "i4"), np.ones(len(line), "i4")
        )

    plan = Plan(("a.jsonl",), {"b0008": rows([0, 1], [5, 7]), "v0008": rows([2], [3])})
    plan.save(scratch / "plan.npz")
    (scratch / "target").mkdir()
    buckets = tuple(
        Bucket(ceiling=8, held_out=held_out, rows=len(plan.rows[name]), rows_per_shard=4, rows_per_forward=2)
        for name, held_out in (("b0008", False), ("v0008", True))
    )
    meta = StoreMeta(
        target={"name": "t", "config": "c", "weights": "w"}, tokenizer="t", template="m", data="d", taps=(1, 2),
        hidden_size=4, vocab_size=64, buckets=buckets,
    )  # fmt: skip
    store = create_store(root, meta, Prepared(scratch, documents, plan, {}, {}), scratch / "target")
    for bucket, number in store.missing():
        shard = ShardWriter(store, bucket, number, 0)
        n = shard.rows
        hidden = (np.arange(n * 8 * 8) * 257 % 65_521).astype("<u2").reshape(n, 8, 8)
        labels = np.full((n, 8), 9, "<i4")
        labels[:, 0] = -1
        shard.write(0, plan.rows[bucket].length, {"hidden": hidden, "labels": labels})
        shard.commit([], "cpu")
    return store


def test_golden_bytes_of_a_tiny_store(tmp_path: Path) -> None:
    """Every file of the arrays and of docs/, as format 1 has had them from its first day. A change here is a change of
    the format: stores of terabytes lie on people's disks."""
    store = golden_store(tmp_path / "s")
    digest = hashlib.sha256()
    arrays = [
        p for p in sorted((store.root / "shards").rglob("*")) if p.is_file() and not p.parent.name.endswith(".zarr")
    ]
    assert len(arrays) == 20
    for file in [*arrays, *sorted((store.root / "docs").iterdir())]:
        digest.update(f"{file.relative_to(store.root)}\n".encode() + file.read_bytes())
    assert store.plan.fingerprint() == "6e298765004679b2f0306e2a4a6daed1df1681b8757c1158d27c213a51916a2c"
    assert digest.hexdigest() == "9f84406549a4073156620f00f4c30a4d3f2b41e79785e8cce9cba1d9fd802f76"
    # one file spelled out: lengths of shard b0008/0 are 5 and 7, then offset 0, size 8, and the crc32c of these two
    lengths = (store.root / "shards/b0008/s000000.zarr/lengths/c.0").read_bytes()
    assert lengths.hex() == "050000000700000000000000000000000800000000000000309e4b00"
