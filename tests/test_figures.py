"""The figures of an evaluation against plain loops; intervals against what they promise."""

import numpy as np
import pytest

from dflash.evaluate.figures import (
    Answer,
    by_context,
    figures,
    histogram,
    intervals,
    paired_difference,
    repeated_ngrams,
)


def answers(rng: np.random.Generator, units: int, mean: float = 3.0, category: str = "c") -> list[Answer]:
    """Cycles of 1 to 8 tokens; prompts differ, some have two answers, one has none of a cycle."""
    made = []
    for unit in range(units):
        own = mean + rng.normal(0, 0.5)
        for _ in range(1 + unit % 2):
            lengths = np.clip(rng.poisson(max(own - 1, 0.1), int(rng.integers(5, 40))) + 1, 1, 8).tolist()
            made.append(Answer(unit, category, int(rng.integers(3, 300)), lengths, [len(lengths)] * 7, [1] * 7))
    made.append(Answer(units, category, 5, [], [0] * 7, [0] * 7))
    return made


def test_means_histogram_and_context_equal_plain_loops() -> None:
    made = answers(np.random.default_rng(0), 20)
    found = figures(made, slots=7, seed=0)
    everything = [length for answer in made for length in answer.lengths]
    means = [sum(answer.lengths) / len(answer.lengths) for answer in made if answer.lengths]
    assert found["acceptance_length"]["pooled"] == pytest.approx(sum(everything) / len(everything))
    assert found["acceptance_length"]["macro"] == pytest.approx(sum(means) / len(means))
    assert [each["cycles"] for each in found["histogram"]] == [everything.count(n) for n in range(1, 9)]
    assert sum(each["share"] for each in found["histogram"]) == pytest.approx(1)
    places: dict[int, list[int]] = {}
    for answer in made:
        before = answer.start
        for length in answer.lengths:
            places.setdefault(0 if before < 128 else 2 ** (before.bit_length() - 1), []).append(length)
            before += length
    shown = {each["from"]: (each["to"], each["cycles"], each["pooled"]) for each in found["by_context"]}
    assert {low: cycles for low, (_, cycles, _) in shown.items()} == {low: len(x) for low, x in places.items()}
    for low, (high, _, pooled) in shown.items():
        assert high == max(128, 2 * low)
        assert pooled == pytest.approx(sum(places[low]) / len(places[low]))


def test_categories_are_kept_apart() -> None:
    rng = np.random.default_rng(1)
    easy, hard = answers(rng, 9, 5.0, "math"), answers(rng, 9, 2.0, "poems")
    hard = [Answer(a.unit + 100, *list(vars(a).values())[1:]) for a in hard]
    by = {each["category"]: each for each in figures([*easy, *hard], 7, 0)["by_category"]}
    assert list(by) == ["math", "poems"]
    assert by["math"]["pooled"] > 4 > 3 > by["poems"]["pooled"]
    assert (by["math"]["answers"], by["math"]["pooled_ci"]) == (len(easy), intervals(easy, 0)["pooled"])


def test_nothing_at_all_has_no_figures() -> None:
    found = figures([Answer(0, "c", 4, [], [0], [0])], slots=1, seed=0)
    assert found["acceptance_length"] == {"pooled": None, "macro": None}
    assert found["acceptance_length_ci"]["pooled"] is None
    assert by_context([]) == []
    assert [each["cycles"] for each in histogram([], 2)] == [0, 0]


def test_an_interval_holds_the_truth_nineteen_times_of_twenty() -> None:
    """The true macro mean is known; prompts, not cycles, are what varies."""
    rng, held = np.random.default_rng(2), 0
    for repeat in range(200):
        made = [
            Answer(unit, "c", 9, [4] * count + [2] * (20 - count), [20], [20])
            for unit, count in enumerate(rng.binomial(20, 0.5, 30).tolist())
        ]
        low, high = intervals(made, seed=repeat)["macro"]
        held += low <= 3.0 <= high
    assert 0.88 <= held / 200 <= 0.99


def test_intervals_follow_the_seed_and_draw_prompts_not_cycles() -> None:
    made = answers(np.random.default_rng(3), 30)
    assert intervals(made, 5) == intervals(made, 5) != intervals(made, 6)
    (low, high), (low9, high9) = (intervals(each, 0)["pooled"] for each in (made, made * 9))
    assert high9 - low9 == pytest.approx(high - low)  # nine times the cycles of the same prompts tell nothing new


def test_pairing_takes_out_what_prompts_have_in_common() -> None:
    rng = np.random.default_rng(4)
    other = answers(rng, 40)
    ours = [Answer(a.unit, a.category, a.start, [n + (i % 5 == 0) for i, n in enumerate(a.lengths)], a.drafted,
                   a.accepted) for a in other]  # fmt: skip
    found = paired_difference(ours, other, 0)
    pooled = [sum(map(sum, (a.lengths for a in each))) / sum(len(a.lengths) for a in each) for each in (ours, other)]
    assert found["pooled"] == pytest.approx(pooled[0] - pooled[1])
    low, high = found["pooled_ci"]
    assert 0 < low < found["pooled"] < high
    single = intervals(ours, 0)["pooled"]
    assert high - low < (single[1] - single[0]) / 5
    assert (found["better"], found["equal"], found["worse"]) == (40, 0, 0)
    same = paired_difference(other, other, 0)
    assert (same["pooled"], same["macro_ci"], same["equal"]) == (0.0, [0.0, 0.0], 40)
    assert paired_difference(other, ours, 0)["pooled"] == pytest.approx(-found["pooled"])


def test_repeated_ngrams_count_what_an_answer_had_before() -> None:
    loop, plain = [1, 2, 3] * 5, list(range(12))
    assert repeated_ngrams([plain], n=8) == {"n": 8, "share": 0.0, "looping_answers": 0}
    assert repeated_ngrams([loop], n=8) == {"n": 8, "share": 5 / 8, "looping_answers": 1}  # 8 grams, 3 different
    assert repeated_ngrams([loop, plain], n=8)["share"] == pytest.approx(5 / 13)
    assert repeated_ngrams([[1, 2, 3]], n=8) == {"n": 8, "share": None, "looping_answers": 0}
    assert repeated_ngrams([plain, plain], n=8)["share"] == 0.0  # the same answer to two prompts is no loop
