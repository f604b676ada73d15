"""The walk over held-out rows, spelled out."""

import numpy as np
import pytest

from dflash.simulate import Tally, supervised_turns, walk


def test_turns_are_runs_of_supervised_tokens() -> None:
    assert supervised_turns(np.array([0, 1, 1, 0, 1, 0, 0, 1], np.uint8)) == [(1, 3), (4, 5), (7, 8)]
    assert supervised_turns(np.array([1, 1], np.uint8)) == [(0, 2)]
    assert supervised_turns(np.zeros(4, np.uint8)) == []


def test_the_walk_jumps_as_a_server_would() -> None:
    tally = Tally(slots=3)
    # turn 10..19: anchor 10 is known; 2 accepted + bonus -> 13; 0 + bonus -> 14; 3 + bonus -> 18; one token left
    walk(tally, 10, 20, {10: 2, 13: 0, 14: 3, 18: 3} | {p: 9 for p in (11, 12, 15, 16, 17)})
    assert (tally.tokens, tally.cycles) == (3 + 1 + 4 + 1, 4)
    assert tally.acceptance_length() == {"pooled": 9 / 4, "macro": 9 / 4}
    assert tally.drafted == [4, 3, 3]
    assert tally.accepted == [3, 2, 1]


def test_pooled_and_macro_differ_when_answers_do() -> None:
    tally = Tally(slots=3)
    walk(tally, 0, 5, {0: 3})
    walk(tally, 0, 3, {0: 0, 1: 0})
    assert tally.acceptance_length() == {"pooled": 6 / 3, "macro": pytest.approx((4 + 1) / 2)}


def test_a_turn_of_one_token_has_no_cycle() -> None:
    tally = Tally(slots=3)
    walk(tally, 4, 5, {})
    assert tally.acceptance_length() == {"pooled": None, "macro": None}


def test_conditional_acceptance_is_given_the_slots_before() -> None:
    tally = Tally(slots=2)
    tally.add([3, 1, 1, 2], drafted=[4, 4], accepted=[2, 1])
    assert [slot["acceptance"] for slot in tally.per_slot()] == [0.5, 0.25]
    assert [slot["conditional"] for slot in tally.per_slot()] == [0.5, 0.5]
