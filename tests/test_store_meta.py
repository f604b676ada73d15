"""store.json: what comes back, what is refused, and by which name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.errors import DflashError
from dflash.store import Bucket, StoreMeta, check_same, differences
from dflash.store.meta import read_meta, with_crc

HASH = {"bytes": 4, "sha256": "0" * 64}
META = StoreMeta(
    target={"name": "some/target", "config": "c", "weights": "w", "dtype": "bfloat16"},
    tokenizer="t", template="m", template_args={"thinking": True, "x": [1.5, None]}, data="d", taps=(9, 1, 17),
    hidden_size=64, vocab_size=320, storage="bf16", labels="topk:8", seed=3,
    buckets=(Bucket(ceiling=96, held_out=True, rows=5, rows_per_shard=4, rows_per_forward=2),),
    fingerprints={"plan": "p", "plan_file": HASH, "docs": {"mask.u8": HASH}, "target": {"config.json": HASH}},
    counts={"documents": 5, "dropped": {"too_short": 2}},
)  # fmt: skip


def write(root: Path, value: Any) -> None:
    (root / "store.json").write_text(
        json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")) + "\n"
    )


def changed(path: str, value: Any) -> dict[str, Any]:
    """META as JSON with one field changed (`DROP` removes it) and a right checksum."""
    whole = META.to_json()
    del whole["crc32c"]
    inner: Any = whole
    *steps, last = path.split(".")
    for step in steps:
        inner = inner[int(step) if step.isdigit() else step]
    if value == "DROP":
        del inner[last]
    else:
        inner[last] = value
    return with_crc(whole)


def test_store_json_comes_back_whole(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_bytes(META.encode())
    assert read_meta(tmp_path) == META


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("taps", "DROP"), ("taps", []), ("taps", [1, 1]), ("taps", [True]), ("taps", "1"), ("seed", "DROP"),
        ("hidden_size", 0), ("hidden_size", 64.0), ("vocab_size", None), ("storage", "fp8"), ("storage", ["bf16"]),
        ("tokenizer", 5), ("surprise", 1), ("buckets", {}), ("buckets.0.ceiling", -1), ("buckets.0.held_out", 1),
        ("buckets.0.rows", 1e3), ("buckets.0.rows_per_shard", 0), ("buckets.0.ceiling", 1 << 40), ("counts", []),
        ("target", {}), ("target.weights", "DROP"), ("target.path", "/x"), ("fingerprints.plan", "DROP"),
        ("fingerprints.docs", 5), ("fingerprints.plan_file", {}),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(tmp_path: Path, field: str, value: Any) -> None:
    write(tmp_path, changed(field, value))
    with pytest.raises(DflashError, match=field.rpartition(".")[2]):
        read_meta(tmp_path)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a//b", ".", "a/..", "a\0b"])
def test_file_names_that_leave_the_store_are_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, changed("fingerprints.target", {name: HASH}))
    with pytest.raises(DflashError, match="file name"):
        read_meta(tmp_path)


def test_a_newer_format_says_so(tmp_path: Path) -> None:
    write(tmp_path, changed("format", 2))
    with pytest.raises(DflashError, match="newer dflash"):
        read_meta(tmp_path)


def test_a_bucket_named_twice_is_refused(tmp_path: Path) -> None:
    write(tmp_path, changed("buckets", META.to_json()["buckets"] * 2))
    with pytest.raises(DflashError, match="twice"):
        read_meta(tmp_path)


def test_every_flipped_byte_of_store_json_is_found(tmp_path: Path) -> None:
    content = META.encode()
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 0x01
        (tmp_path / "store.json").write_bytes(flipped)
        with pytest.raises(DflashError, match=r"store\.json"):
            read_meta(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(field=st.sampled_from(sorted(META.to_json())), value=JSON)
def test_any_value_in_any_field_is_an_error_of_ours_or_right(field: str, value: Any) -> None:
    whole = {**META.to_json(), field: value}
    whole.pop("crc32c")
    try:
        assert StoreMeta.from_json(with_crc(whole)).to_json()
    except DflashError:
        return
    except UnicodeEncodeError:  # with_crc itself, on a lone surrogate
        return


def test_differences_name_field_old_and_new_and_ignore_names_and_counts(tmp_path: Path) -> None:
    renamed = replace(META, target={**META.target, "name": "elsewhere"}, counts={}, fingerprints={})
    assert differences(META, renamed) == []
    check_same(META, renamed, tmp_path)
    other = replace(renamed, target={**META.target, "weights": "W2"}, taps=(1, 9, 17))
    assert differences(META, other) == [("target.weights", "w", "W2"), ("taps", [9, 1, 17], [1, 9, 17])]
    with pytest.raises(DflashError, match=r"target\.weights.*\"w\".*\"W2\""):
        check_same(META, other, tmp_path)
    assert META.fingerprint() == replace(META, counts={"x": 1}, target={**META.target, "name": "y"}).fingerprint()
    assert META.fingerprint() != replace(META, seed=4).fingerprint()


def test_no_store_says_so(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match="not a store"):
        read_meta(tmp_path)
    with pytest.raises(DflashError):
        read_meta(tmp_path / "nothing")
