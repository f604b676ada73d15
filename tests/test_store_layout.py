"""Where the bytes lie."""

import numpy as np
import pytest

from dflash.errors import DflashError
from dflash.store.layout import (
    Bucket,
    array_specs,
    bucket_name,
    check_labels,
    crc32c,
    default_rows_per_shard,
    extraction_order,
    parse_shard_folder,
    shard_text,
)


def bucket(ceiling: int = 96, held_out: bool = False, rows: int = 10, per_shard: int = 4) -> Bucket:
    return Bucket(ceiling=ceiling, held_out=held_out, rows=rows, rows_per_shard=per_shard, rows_per_forward=2)


def test_names_are_those_of_the_design() -> None:
    assert bucket_name(770, False) == "b0770"
    assert bucket_name(8192, True) == "v8192"
    assert shard_text(("b1216", 7)) == "b1216/s000007"


def test_rows_fall_into_shards_and_the_last_has_what_is_left() -> None:
    some = bucket(rows=10, per_shard=4)
    assert some.num_shards == 3
    assert [list(some.rows_of(i)) for i in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert some.shard_of(9) == (2, 1)
    for wrong in (lambda: some.rows_of(3), lambda: some.shard_of(10), lambda: some.shard_of(-1)):
        with pytest.raises(DflashError, match="b0096"):
            wrong()


def test_default_shards_have_about_32768_padded_tokens() -> None:
    assert [default_rows_per_shard(c) for c in (770, 1216, 1728, 2432, 3296, 8192)] == [42, 26, 18, 13, 9, 4]
    assert default_rows_per_shard(100_000) == 1


def test_extraction_takes_the_largest_ceiling_first_and_held_out_beside_it() -> None:
    buckets = (bucket(64, rows=5), bucket(96, held_out=True, rows=1), bucket(96, rows=5))
    order = [("b0096", 0), ("b0096", 1), ("v0096", 0), ("b0064", 0), ("b0064", 1)]
    assert list(extraction_order(buckets)) == order


@pytest.mark.parametrize(
    ("labels", "storage", "names"),
    [
        ("argmax", "bf16", "hidden input_ids labels loss_mask lengths"),
        ("tokens", "bf16", "hidden input_ids loss_mask lengths"),
        ("last-hidden", "lz4", "hidden last input_ids labels loss_mask lengths"),
        ("topk:4", "int8", "hidden scale topk_ids topk_logp input_ids labels loss_mask lengths"),
    ],
)
def test_labels_and_storage_choose_the_arrays(labels: str, storage: str, names: str) -> None:
    specs = array_specs(ceiling=96, hidden_size=40, taps=3, storage=storage, labels=labels)
    assert list(specs) == names.split()


def test_only_states_have_a_stride_of_whole_pages() -> None:
    specs = array_specs(ceiling=96, hidden_size=40, taps=3, storage="bf16", labels="last-hidden")
    hidden, last, ids = specs["hidden"], specs["last"], specs["input_ids"]
    assert hidden.shape(4) == (4, 96, 120)
    assert hidden.chunk_bytes(4) == 96 * 240 == 23_040
    assert hidden.stride(4) == 24_576
    assert hidden.file_bytes(4) == 4 * 24_576 + 4 * 16 + 4
    assert last.stride(4) == 8_192
    assert ids.stride(4) == 96 * 4
    assert specs["lengths"].file_bytes(4) == 16 + 16 + 4
    assert (hidden.file_name, ids.file_name, specs["lengths"].file_name) == ("c.0.0.0", "c.0.0", "c.0")


@pytest.mark.parametrize("labels", ["", "topk", "topk:", "topk:0", "topk:-1", "topk:2000", "topk:1e3", "Argmax"])
def test_unknown_labels_are_refused(labels: str) -> None:
    with pytest.raises(DflashError, match="topk:K"):
        check_labels(labels)


@pytest.mark.parametrize(
    "name", ["s7.zarr", "s000007", "s0000007.zarr", "s-00001.zarr", "../s000001.zarr", "s000001.zarr\n"]
)
def test_only_our_own_spelling_is_a_shards_folder(name: str) -> None:
    assert parse_shard_folder(name) is None


def test_a_shards_folder_gives_its_number() -> None:
    assert parse_shard_folder("s000007.zarr") == 7
    assert parse_shard_folder("s1234567.zarr") == 1_234_567


def test_crc32c_is_castagnoli_and_continues() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(np.frombuffer(b"56789", dtype=np.uint8), crc32c(b"1234")) == 0xE3069283
