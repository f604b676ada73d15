"""The forecast against what the disk says."""

from pathlib import Path

import pytest
from helpers_store import make_store

from dflash.files import allocated_bytes
from dflash.store import storage_bytes


@pytest.mark.parametrize(
    ("storage", "labels", "hidden_size"),
    [("bf16", "argmax", 64), ("bf16", "last-hidden", 1024), ("bf16", "tokens", 40), ("int8", "topk:16", 200)],
)
def test_it_is_within_two_percent_of_the_allocated_bytes(
    tmp_path: Path, storage: str, labels: str, hidden_size: int
) -> None:
    store = make_store(tmp_path / "s", storage=storage, labels=labels, hidden_size=hidden_size, documents=60)
    forecast = storage_bytes(store.meta, store.plan, store.root / "target")
    assert forecast["bytes"] == pytest.approx(allocated_bytes(store.root), rel=0.02)
    for bucket in forecast["buckets"]:
        real = allocated_bytes(store.root / "shards" / bucket["name"])
        assert bucket["bytes"] == pytest.approx(real, rel=0.02), bucket
    assert forecast["shards"] == sum(bucket["bytes"] for bucket in forecast["buckets"])


def test_lz4_is_an_estimate_from_below_bf16(tmp_path: Path) -> None:
    """Random states hardly compress, real ones do by about 1.2: the forecast takes the latter."""
    store = make_store(tmp_path / "s", storage="lz4", documents=10, hidden_size=256)
    plain = make_store(tmp_path / "p", documents=10, hidden_size=256)
    ratio = storage_bytes(plain.meta, plain.plan)["shards"] / storage_bytes(store.meta, store.plan)["shards"]
    assert 1.1 < ratio < 1.25


def test_padding_costs_nothing(tmp_path: Path) -> None:
    """The same documents under a ceiling ten times higher take (but for the small arrays) the same room."""
    near = make_store(tmp_path / "n", documents=8, held_out=0, buckets=(96,), hidden_size=512)
    assert storage_bytes(near.meta, near.plan)["shards"] < 1.35 * int(near.plan.rows["b0096"].length.sum()) * 3_072
