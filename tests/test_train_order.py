"""The order of rows: stateless, complete, the same for any number of ranks."""

from collections import Counter

import pytest

from dflash.train.order import BucketRows, Order, anchors_of, permutation

BUCKETS = [
    BucketRows("b0064", 64, rows=23, rows_per_micro=4, anchors=8),
    BucketRows("b0096", 96, rows=7, rows_per_micro=2, anchors=8),
    BucketRows("b0128", 128, rows=0, rows_per_micro=1, anchors=1),
]


def test_every_row_comes_once_an_epoch_in_another_order_each_time() -> None:
    order = Order(BUCKETS, seed=3)
    assert order.micros_per_epoch == 6 + 4
    epochs = []
    for epoch in range(3):
        micros = [order.micro(epoch * 10 + i) for i in range(10)]
        seen = Counter((m.bucket.name, row) for m in micros for row in m.rows)
        assert seen == Counter({(b.name, row): 1 for b in BUCKETS for row in range(b.rows)})
        assert all(len(m.rows) <= m.bucket.rows_per_micro for m in micros)
        epochs.append([(m.bucket.name, m.rows) for m in micros])
    assert epochs[0] != epochs[1] != epochs[2]


def test_any_micro_step_can_be_computed_from_its_number_alone() -> None:
    straight = [Order(BUCKETS, seed=5).micro(i) for i in range(40)]
    order = Order(BUCKETS, seed=5)
    assert [order.micro(i) for i in reversed(range(40))] == straight[::-1]
    assert [Order(BUCKETS, seed=6).micro(i) for i in range(40)] != straight


def test_buckets_interleave_in_proportion() -> None:
    buckets = [BucketRows("b0064", 64, 3000, 1, 1), BucketRows("b0096", 96, 1000, 1, 1)]
    order = Order(buckets, seed=0)
    for start in range(0, 4000, 500):
        small = sum(order.micro(i).bucket.ceiling == 96 for i in range(start, start + 500))
        assert 80 < small < 170


@pytest.mark.parametrize("n", [1, 2, 100])
def test_permutation_is_one_and_depends_on_its_key(n: int) -> None:
    assert sorted(permutation(n, 1, 2)) == list(range(n))
    if n == 100:
        assert list(permutation(n, 1, 2)) != list(permutation(n, 2, 1)) != list(permutation(n, 1))


def test_anchors_follow_density_within_bounds() -> None:
    assert anchors_of(supervised=6000, micros=10, density=1 / 6, most=512) == 100
    assert anchors_of(supervised=6000, micros=10, density=1.0, most=512) == 512
    assert anchors_of(supervised=3, micros=10, density=1 / 6, most=512) == 1
