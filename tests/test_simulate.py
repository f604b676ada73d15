"""The walk over held-out rows, spelled out, and the drafts of many rows at once against one block at a time."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_store import make_store
from reference import dense_blocks
from test_drafter import small_config

import dflash.simulate
from dflash.drafter import SLIDING, Drafter, DrafterConfig, RopeTable, initialise
from dflash.loss import Head
from dflash.simulate import (
    Row,
    Tally,
    Walk,
    accepted_drafts,
    anchors_of,
    held_out_rows,
    read_row,
    simulate,
    supervised_turns,
    walk,
)
from dflash.store import Store
from dflash.stored import tap_rms


def test_turns_are_runs_of_supervised_tokens() -> None:
    assert supervised_turns(np.array([0, 1, 1, 0, 1, 0, 0, 1], np.uint8)) == [(1, 3), (4, 5), (7, 8)]
    assert supervised_turns(np.array([1, 1], np.uint8)) == [(0, 2)]
    assert supervised_turns(np.zeros(4, np.uint8)) == []


def test_the_walk_jumps_as_a_server_would() -> None:
    # turn 10..19: anchor 10 is known; 2 accepted + bonus -> 13; 0 + bonus -> 14; 3 + bonus -> 18; one token left
    found = walk(10, 20, {10: 2, 13: 0, 14: 3, 18: 3} | {p: 9 for p in (11, 12, 15, 16, 17)}, slots=3)
    assert found == Walk(10, lengths=[3, 1, 4, 1], drafted=[4, 3, 3], accepted=[3, 2, 1])


def test_pooled_and_macro_differ_when_answers_do() -> None:
    tally = Tally(slots=3)
    for each in (walk(0, 5, {0: 3}, 3), walk(0, 3, {0: 0, 1: 0}, 3)):
        tally.add(each.lengths, each.drafted, each.accepted)
    assert tally.acceptance_length() == {"pooled": 6 / 3, "macro": pytest.approx((4 + 1) / 2)}


def test_a_turn_of_one_token_has_no_cycle() -> None:
    tally = Tally(slots=3)
    found = walk(4, 5, {}, 3)
    tally.add(found.lengths, found.drafted, found.accepted)
    assert tally.acceptance_length() == {"pooled": None, "macro": None}


def test_conditional_acceptance_is_given_the_slots_before() -> None:
    tally = Tally(slots=2)
    tally.add([3, 1, 1, 2], drafted=[4, 4], accepted=[2, 1])
    assert [slot["acceptance"] for slot in tally.per_slot()] == [0.5, 0.25]
    assert [slot["conditional"] for slot in tally.per_slot()] == [0.5, 0.5]


def test_an_answer_that_ends_within_a_block_is_no_rejection() -> None:
    """A drafter that is never wrong has all conditional shares at 1, wherever the answers end."""
    tally = Tally(slots=7)
    for end in (5, 9, 14, 40):
        found = walk(0, end, dict.fromkeys(range(end), 7), slots=7)
        tally.add(found.lengths, found.drafted, found.accepted)
    assert {slot["conditional"] for slot in tally.per_slot()} == {1.0}
    assert {slot["acceptance"] for slot in tally.per_slot()} == {1.0}


@dataclass(frozen=True)
class Parts:
    drafter: Drafter
    rope: RopeTable
    embed_VH: torch.Tensor
    embed_factor: float
    head: Head
    tap_rms: torch.Tensor | None


def parts_for(store: Store, config: DrafterConfig) -> Parts:
    """An untrained drafter in fp64, with a head of so few different rows that drafts are often right."""
    drafter = Drafter(config).double()
    initialise(drafter, seed=1)
    generator = torch.Generator().manual_seed(2)
    embed = torch.randn(320, 64, dtype=torch.float64, generator=generator)
    rms = tap_rms(store)
    return Parts(drafter, RopeTable(config, 200, torch.float64, "cpu"), embed, 2.0, Head(embed), rms)


def plain_drafts(parts: Parts, row: Row, anchor: int) -> list[int]:
    """One block alone, under a dense mask."""
    hidden = dense_blocks(parts.drafter, row.taps_LF, row.ids_L, [anchor], parts.embed_VH, parts.embed_factor)
    return parts.head.logits(hidden[0, 1:]).argmax(-1).tolist()


def plain_count(drafts: list[int], labels: list[int]) -> int:
    """Leading drafts that equal the labels; a slot behind the row is compared with the row's last label."""
    good = 0
    while good < len(drafts) and drafts[good] == labels[min(good, len(labels) - 1)]:
        good += 1
    return good


@torch.no_grad()
@pytest.mark.parametrize("storage", ["bf16", "int8"])
@pytest.mark.parametrize("window", [None, 12])
def test_many_rows_at_once_equal_one_block_at_a_time(
    tmp_path: Path, storage: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "store", storage=storage, documents=8, held_out=8)
    config = small_config(
        hidden_size=64, vocab_size=320, taps=(1, 2, 3), block_size=4, sliding_window=window, layer_types=(SLIDING,) * 2
    )
    parts = parts_for(store, config)
    rows = [read_row(store, bucket, row, parts) for bucket, row in held_out_rows(store)]
    assert len(rows) == 8
    wanted = []
    for row in rows:
        drafts = {anchor: plain_drafts(parts, row, anchor) for anchor in anchors_of(row.turns).tolist()}
        row.labels_L.fill_(-1)
        for number, (anchor, tokens) in enumerate(drafts.items()):
            if number % 4 == 0:  # labels follow every fourth block for 0 to 3 slots
                good = min(number // 4 % 4, len(row.ids_L) - 1 - anchor)
                row.labels_L[anchor + 1 : anchor + 1 + good] = torch.tensor(tokens[:good])
        wanted += [plain_count(tokens, row.labels_L[anchor + 1 :].tolist()) for anchor, tokens in drafts.items()]
    assert set(wanted) == {0, 1, 2, 3}
    assert accepted_drafts(parts, rows).tolist() == wanted
    monkeypatch.setitem(dflash.simulate.CHUNK_LOGITS, "cpu", 4 * 7 * config.block_size * 320)
    assert accepted_drafts(parts, rows).tolist() == wanted  # seven anchors at a time


def test_how_many_rows_share_a_forward_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path / "store", documents=8, held_out=8)
    parts = parts_for(store, small_config(hidden_size=64, vocab_size=320, taps=(1, 2, 3), block_size=4))
    rows, seen = held_out_rows(store), []
    together = simulate(store, parts, rows, seen.append)
    monkeypatch.setattr(dflash.simulate, "MOST_TOKENS", 1)
    assert simulate(store, parts, rows, seen.append) == together
    assert seen == [8] + [1] * 8
    turns = [supervised_turns(store.read_row(*row)["loss_mask"]) for row in rows]
    for walks, ends in zip(together, turns, strict=True):
        assert [(each.start, sum(each.lengths)) for each in walks] == [(start, end - 1 - start) for start, end in ends]
