"""Anchors: valid positions only, chosen by a stateless hash, independent of layout."""

import torch

from dflash.train.anchors import choose, mix, scores
from dflash.train.order import mix as mix_numpy


def supervised(rows: int, ceiling: int, seed: int) -> torch.Tensor:
    return torch.rand(rows, ceiling, generator=torch.Generator().manual_seed(seed)) > 0.5


def test_the_hash_is_splitmix_as_numpy_computes_it() -> None:
    import numpy as np

    values = torch.arange(-50, 50) * 7_777_777_777_777
    ours = mix(values).numpy().view(np.uint64)
    assert (ours == mix_numpy(values.numpy().view(np.uint64))).all()


def test_anchors_are_supervised_with_a_supervised_successor_ascending_and_distinct() -> None:
    mask = supervised(3, 40, 1)
    score = scores(0, torch.tensor(5), torch.tensor([10, 11, 12]), 40)
    flat, live = choose(mask, score, 12)
    assert live.all()
    assert flat.unique(sorted=True).equal(flat)
    for index in flat.tolist():
        row, position = divmod(index, 40)
        assert position < 39
        assert mask[row, position]
        assert mask[row, position + 1]


def test_missing_anchors_are_dummies_at_the_end() -> None:
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[1, 4:7] = True
    flat, live = choose(mask, scores(0, torch.tensor(1), torch.tensor([1, 2]), 10), 6)
    assert flat.tolist() == [14, 15, 20, 20, 20, 20]
    assert live.tolist() == [True, True, False, False, False, False]


def test_choice_depends_on_step_document_and_position_only() -> None:
    mask = supervised(2, 60, 2)
    documents = torch.tensor([5, 9])
    one, _ = choose(mask, scores(3, torch.tensor(7), documents, 60), 30)
    swapped, _ = choose(mask.flip(0), scores(3, torch.tensor(7), documents.flip(0), 60), 30)
    rows = lambda flat, order: sorted((order[i // 60], i % 60) for i in flat.tolist())  # noqa: E731
    assert rows(one, [5, 9]) == rows(swapped, [9, 5])
    wider = torch.cat((mask, torch.zeros(2, 20, dtype=torch.bool)), 1)
    wide, _ = choose(wider, scores(3, torch.tensor(7), documents, 80), 30)
    assert [divmod(i, 80) for i in wide.tolist()] == [divmod(i, 60) for i in one.tolist()]
    other, _ = choose(mask, scores(3, torch.tensor(8), documents, 60), 30)
    assert not torch.equal(one, other)
    reseeded, _ = choose(mask, scores(4, torch.tensor(7), documents, 60), 30)
    assert not torch.equal(one, reseeded)


def test_all_valid_positions_are_equally_likely() -> None:
    mask = torch.ones(1, 33, dtype=torch.bool)
    hits = torch.zeros(33)
    for step in range(4000):
        flat, _ = choose(mask, scores(0, torch.tensor(step), torch.tensor([1]), 33), 4)
        hits[flat] += 1
    expected = 4000 * 4 / 32
    chi = ((hits[:32] - expected) ** 2 / expected).sum()
    assert hits[32] == 0
    assert chi < 31 + 5 * (2 * 31) ** 0.5
