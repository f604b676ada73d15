"""docs/store-format.md is enough to write a reader from: its own reader reads what we wrote."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from helpers_store import make_store

from dflash.files import canonical_json
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
    pack,
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


def test_the_pages_reader_needs_nothing_but_numpy_and_reads_packed_shards(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)) == {"json", "pathlib", "numpy"}
    store = make_store(tmp_path / "s", labels="last-hidden", documents=14)
    pack(store.root, tmp_path / "packed")
    for bucket in store.buckets:
        for row in range(bucket.rows):
            theirs = reader_of_the_page()(tmp_path / "packed", bucket.name, row)
            assert theirs.keys() == store.read_row(bucket.name, row).keys()
            for name, array in store.read_row(bucket.name, row).items():
                np.testing.assert_array_equal(theirs[name], array, err_msg=name)


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


def test_golden_bytes_of_a_tiny_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file, as format 1 has had them from its first day. A change here is a change of the format: stores of
    terabytes lie on people's disks."""
    monkeypatch.setattr("dflash.__version__", "1")
    monkeypatch.setattr("numpy.__version__", "2")
    store = golden_store(tmp_path / "s")
    shard, digest = store.root / "shards/b0008/s000000.zarr", hashlib.sha256()
    arrays = [
        p for p in sorted((store.root / "shards").rglob("*")) if p.is_file() and not p.parent.name.endswith(".zarr")
    ]
    assert len(arrays) == 20
    for file in [*arrays, *sorted((store.root / "docs").iterdir())]:
        digest.update(f"{file.relative_to(store.root)}\n".encode() + file.read_bytes())
    assert store.plan.fingerprint() == "6e298765004679b2f0306e2a4a6daed1df1681b8757c1158d27c213a51916a2c"
    assert digest.hexdigest() == "9f84406549a4073156620f00f4c30a4d3f2b41e79785e8cce9cba1d9fd802f76"
    # lengths of shard b0008/0 are 5 and 7, then offset 0, size 8, and the crc32c of these two
    assert (shard / "lengths/c.0").read_bytes().hex() == "050000000700000000000000000000000800000000000000309e4b00"
    # two rows of 8 bytes at 0 and 8
    assert (shard / "loss_mask/c.0.0").read_bytes().hex() == (
        "0001000001000000" "0001000001000000" "0000000000000000" "0800000000000000"
        "0800000000000000" "0800000000000000" "12a46c81"
    )  # fmt: skip
    # two rows of 128 bytes, 4096 apart; 5 and 7 tokens of 16 bytes are valid
    hidden = (shard / "hidden/c.0.0.0").read_bytes()
    assert hidden[-36:].hex() == (
        "0000000000000000" "8000000000000000" "0010000000000000" "8000000000000000" "e4beffe0"
    )  # fmt: skip
    assert len(hidden) == 2 * 4096 + 36
    assert hidden[:8].hex() == "0000010102020303"
    assert not any(hidden[80:4096])
    assert any(hidden[4096 + 96 : 4096 + 112])
    assert not any(hidden[4096 + 112 : 8192])
    assert (shard / "hidden/zarr.json").read_text() == GOLDEN_ARRAY
    assert (store.root / "docs/offsets.u64").read_bytes().hex() == (
        "0000000000000000" "0500000000000000" "0c00000000000000" "0f00000000000000"
    )  # fmt: skip


def test_golden_json_of_a_tiny_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """store.json, a manifest and an index line, with their checksums. The files of the plan and the bytes on disk are
    numpy's and the filesystem's business."""
    monkeypatch.setattr("dflash.__version__", "1")
    monkeypatch.setattr("numpy.__version__", "2")
    monkeypatch.setattr("dflash.store.manifest.allocated_bytes", lambda folder: 1000)
    store = golden_store(tmp_path / "s")
    whole = json.loads((store.root / "store.json").read_text())
    plan_file = whole["fingerprints"].pop("plan_file")
    assert plan_file.keys() == {"bytes", "sha256"}
    del whole["crc32c"]
    assert canonical_json(whole) == GOLDEN_STORE
    manifest = json.loads((store.root / "shards/b0008/s000000.zarr/zarr.json").read_text())
    assert (manifest.pop("zarr_format"), manifest.pop("node_type")) == (3, "group")
    attributes = manifest.pop("attributes")
    assert manifest == {}
    assert attributes.pop("store") == store.fingerprint
    del attributes["crc32c"]
    assert canonical_json(attributes) == GOLDEN_MANIFEST
    line = (store.root / "index/w000.jsonl").read_bytes().splitlines()[0]
    text, _, crc = line.partition(b"\t")
    entry = json.loads(text)
    assert crc == b"%08x" % google_crc32c.value(text)
    assert entry.pop("checksums").pop("hidden/c.0.0.0") == 1214729159
    assert canonical_json(entry) == GOLDEN_LINE


GOLDEN_ARRAY = json.dumps({
    "zarr_format": 3, "node_type": "array", "shape": [2, 8, 8], "data_type": "uint16",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 8, 8]}},
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}}, "fill_value": 0,
    "codecs": [{"name": "sharding_indexed", "configuration": {
        "chunk_shape": [1, 8, 8], "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "index_location": "end"}}],
    "dimension_names": ["row", "position", "channel"], "attributes": {"view_dtype": "bfloat16"},
}, indent=1) + "\n"  # fmt: skip
GOLDEN_STORE = (
    '{"buckets":[{"ceiling":8,"held_out":false,"rows":2,"rows_per_forward":2,"rows_per_shard":4},{"ceiling":8,"held_out"'
    ':true,"rows":1,"rows_per_forward":2,"rows_per_shard":4}],"counts":{},"data":"d","fingerprints":{"docs":{"mask.u8":{'
    '"bytes":15,"sha256":"65f3efc9059f54b3202cdf36f1b440f2b064c5c1666c05f670dc8fc538de818a"},"offsets.u64":{"bytes":32,"'
    'sha256":"80ff530a693765d0b52ca32094a7ce6b5a62f023c0900bc0f5906806fabf5dda"},"tokens.i32":{"bytes":60,"sha256":"dfba'
    'e35a283e16e9a486d71ce2626de0a4ec16cd8ee44e6aaccc17158bcc5a04"}},"plan":"6e298765004679b2f0306e2a4a6daed1df1681b8757'
    'c1158d27c213a51916a2c","target":{}},"format":1,"hidden_size":4,"labels":"argmax","seed":0,"storage":"bf16","tap_con'
    'vention":"output of decoder layer t, 0-based; the last layer\'s before the final norm","taps":[1,2],"target":{"c'
    'onfig":"c","name":"t","weights":"w"},"template":"m","template_args":{},"tokenizer":"t","vocab_size":64}'
)
GOLDEN_MANIFEST = (
    '{"arrays":{"hidden":{"bytes":8228,"crc32c":[415133485,3095940284]},"input_ids":{"bytes":100,"crc32c":[2685601320,29'
    '52131763]},"labels":{"bytes":100,"crc32c":[3338556935,3584174956]},"lengths":{"bytes":28,"crc32c":[4245288202]},"lo'
    'ss_mask":{"bytes":52,"crc32c":[963523834,963523834]}},"bad":[],"bucket":"b0008","calib":"","device":"cpu","document'
    's":[0,1],"first_row":0,"format":1,"gen":0,"lengths":[5,7],"number":0,"plan":"6e298765004679b2f0306e2a4a6daed1df1681'
    'b8757c1158d27c213a51916a2c","rows":2,"software":{"dflash":"1","numpy":"2"}}'
)
GOLDEN_LINE = (
    '{"bad":[],"bucket":"b0008","bytes":1000,"device":"cpu","gen":0,"lengths":[5,7],"number":0,"rows":2,"software":{"dfl'
    'ash":"1","numpy":"2"},"worker":0}'
)
