"""Anchors: valid positions only, chosen by a stateless hash, independent of layout."""

import torch

from dflash.train.anchors import choose, mix, scores
from dflash.train.order import mix as mix_numpy


def pick(
    mask_RC: torch.Tensor, seed: int, step: int, documents: list[int], anchors: int, most: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchors of supervised positions whose successor is supervised too."""
    ceiling = mask_RC.shape[1]
    score = scores(seed, torch.tensor(step), torch.tensor(documents)[:, None], torch.arange(ceiling))
    valid = mask_RC & torch.nn.functional.pad(mask_RC[:, 1:], (0, 1))
    limit = None if most is None else torch.tensor(most)
    return choose(valid.flatten(), score.flatten(), anchors, limit)


def supervised(rows: int, ceiling: int, seed: int) -> torch.Tensor:
    return torch.rand(rows, ceiling, generator=torch.Generator().manual_seed(seed)) > 0.5


def test_the_hash_is_splitmix_as_numpy_computes_it() -> None:
    import numpy as np

    values = torch.arange(-50, 50) * 7_777_777_777_777
    ours = mix(values).numpy().view(np.uint64)
    assert (ours == mix_numpy(values.numpy().view(np.uint64))).all()


def test_anchors_are_supervised_with_a_supervised_successor_ascending_and_distinct() -> None:
    mask = supervised(3, 40, 1)
    flat, live = pick(mask, 0, 5, [10, 11, 12], 12)
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
    flat, live = pick(mask, 0, 1, [1, 2], 6)
    assert flat.tolist() == [14, 15, 20, 20, 20, 20]
    assert live.tolist() == [True, True, False, False, False, False]


def test_a_limit_keeps_the_anchors_that_fewer_would_have_chosen() -> None:
    """What lets one graph serve buckets that want different numbers."""
    mask = supervised(2, 50, 6)
    few, _ = pick(mask, 1, 2, [3, 4], 7)
    limited, live = pick(mask, 1, 2, [3, 4], 20, most=7)
    assert limited[:7].equal(few)
    assert live.tolist() == [True] * 7 + [False] * 13


def test_choice_depends_on_step_document_and_position_only() -> None:
    mask = supervised(2, 60, 2)
    one, _ = pick(mask, 3, 7, [5, 9], 30)
    swapped, _ = pick(mask.flip(0), 3, 7, [9, 5], 30)
    rows = lambda flat, order: sorted((order[i // 60], i % 60) for i in flat.tolist())  # noqa: E731
    assert rows(one, [5, 9]) == rows(swapped, [9, 5])
    wider = torch.cat((mask, torch.zeros(2, 20, dtype=torch.bool)), 1)
    wide, _ = pick(wider, 3, 7, [5, 9], 30)
    assert [divmod(i, 80) for i in wide.tolist()] == [divmod(i, 60) for i in one.tolist()]
    other, _ = pick(mask, 3, 8, [5, 9], 30)
    assert not torch.equal(one, other)
    reseeded, _ = pick(mask, 4, 7, [5, 9], 30)
    assert not torch.equal(one, reseeded)


def test_all_valid_positions_are_equally_likely() -> None:
    mask = torch.ones(1, 33, dtype=torch.bool)
    hits = torch.zeros(33)
    for step in range(4000):
        flat, _ = pick(mask, 0, step, [1], 4)
        hits[flat] += 1
    expected = 4000 * 4 / 32
    chi = ((hits[:32] - expected) ** 2 / expected).sum()
    assert hits[32] == 0
    assert chi < 31 + 5 * (2 * 31) ** 0.5
