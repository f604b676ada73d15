"""Figures of an evaluation, each with its name, from what every answer's cycles yielded.

    pooled        tokens over cycles of all answers        macro         mean of the answers' means
    acceptance    share of cycles whose drafts up to a slot were all accepted, conditional: given those before
    intervals     95 %, percentiles of a bootstrap that draws prompts (with all their answers) with replacement

A cycle yields its accepted drafts + 1 token; a last cycle cut by a stop token or the limit counts what is kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.simulate import Tally

DRAWS = 2_000
LEVEL = 0.95
NGRAM = 8
FIRST_EDGE = 128  # of the context lengths, which double from there

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Answer:
    """One answer's cycles. `unit` is what the bootstrap draws: its prompt, or the conversation that is stored."""

    unit: int
    category: str
    start: int  # tokens before its first cycle's anchor
    lengths: list[int]
    drafted: list[int]
    accepted: list[int]


def figures(answers: Sequence[Answer], slots: int, seed: int) -> dict[str, Any]:
    """All figures of one drafter; the keys of design section 8 and more."""
    tally = tally_of(answers, slots)
    categories = {answer.category: None for answer in answers}
    return {
        "acceptance_length": tally.acceptance_length(),
        "acceptance_length_ci": intervals(answers, seed),
        "per_slot": tally.per_slot(),
        "cycles": tally.cycles,
        "histogram": histogram(answers, slots + 1),
        "by_category": [
            {"category": name, **_part([a for a in answers if a.category == name], slots, seed)} for name in categories
        ],
        "by_context": by_context(answers),
    }


def tally_of(answers: Sequence[Answer], slots: int) -> Tally:
    tally = Tally(slots)
    for answer in answers:
        tally.add(answer.lengths, answer.drafted, answer.accepted)
    return tally


def _part(answers: Sequence[Answer], slots: int, seed: int) -> dict[str, Any]:
    tally = tally_of(answers, slots)
    return {
        "answers": len(answers),
        "cycles": tally.cycles,
        **tally.acceptance_length(),
        "pooled_ci": intervals(answers, seed)["pooled"],
    }


def histogram(answers: Sequence[Answer], longest: int) -> list[dict[str, Any]]:
    """How many cycles yielded 1, 2, … tokens."""
    lengths = np.array([length for answer in answers for length in answer.lengths], np.int64)
    counts = np.bincount(lengths, minlength=longest + 1)
    total = max(1, int(counts.sum()))
    return [
        {"length": length, "cycles": int(counts[length]), "share": float(counts[length] / total)}
        for length in range(1, longest + 1)
    ]


def by_context(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Pooled acceptance length by how many tokens stood before the cycle's anchor."""
    rows = np.array(
        [
            (answer.start + sum(answer.lengths[:number]), length)
            for answer in answers
            for number, length in enumerate(answer.lengths)
        ],
        np.int64,
    ).reshape(-1, 2)
    found: list[dict[str, Any]] = []
    low, high = 0, FIRST_EDGE
    while len(rows) and low <= rows[:, 0].max():
        lengths = rows[(rows[:, 0] >= low) & (rows[:, 0] < high), 1]
        if len(lengths):
            found.append({"from": low, "to": high, "cycles": len(lengths), "pooled": float(lengths.mean())})
        low, high = high, 2 * high
    return found


# --- intervals


def _units(answers: Sequence[Answer], units: Sequence[int]) -> Floats:
    """[units, 4]: tokens, cycles, sum of the answers' means, answers with a cycle."""
    place = {unit: number for number, unit in enumerate(units)}
    sums = np.zeros((len(units), 4))
    for answer in answers:
        if answer.lengths:
            tokens, cycles = sum(answer.lengths), len(answer.lengths)
            sums[place[answer.unit]] += (tokens, cycles, tokens / cycles, 1)
    return sums


def _pooled(sums: Floats) -> Floats:
    return sums[..., 0] / np.maximum(sums[..., 1], 1)


def _macro(sums: Floats) -> Floats:
    return sums[..., 2] / np.maximum(sums[..., 3], 1)


MEANS: dict[str, Callable[[Floats], Floats]] = {"pooled": _pooled, "macro": _macro}


def _draws(sums: Floats, seed: int) -> Floats:
    """Sums [draws, …] over units drawn with replacement, the same draws for every array of as many units."""
    rng, units = np.random.default_rng(seed), len(sums)
    flat = sums.reshape(units, -1)
    parts = [
        rng.multinomial(units, np.full(units, 1 / units), size=DRAWS // 20) @ flat  # in parts, for memory
        for _ in range(20)
    ]
    return np.concatenate(parts).reshape(DRAWS, *sums.shape[1:])


def _interval(drawn: Floats) -> list[float]:
    return np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()


def intervals(answers: Sequence[Answer], seed: int) -> dict[str, Any]:
    """95 % intervals of pooled and macro; null where fewer than two prompts have a cycle."""
    units = sorted({answer.unit for answer in answers if answer.lengths})
    if len(units) < 2:
        return {"level": LEVEL, "pooled": None, "macro": None}
    drawn = _draws(_units(answers, units), seed)
    return {"level": LEVEL, **{name: _interval(mean(drawn)) for name, mean in MEANS.items()}}


def paired_difference(ours: Sequence[Answer], other: Sequence[Answer], seed: int) -> dict[str, Any]:
    """Ours less the other's on the same prompts, with intervals from the same draws; and on how many each is better."""
    units = sorted({answer.unit for answer in [*ours, *other] if answer.lengths})
    sums = np.stack([_units(each, units) for each in (ours, other)], axis=1)  # [units, 2, 4]
    by_unit = _pooled(sums)
    ahead = np.sign(np.round(by_unit[:, 0] - by_unit[:, 1], 9))
    found: dict[str, Any] = {
        "better": int((ahead > 0).sum()), "equal": int((ahead == 0).sum()), "worse": int((ahead < 0).sum()),
        "level": LEVEL,
    }  # fmt: skip
    drawn = _draws(sums, seed) if len(units) > 1 else None
    for name, mean in MEANS.items():
        whole = mean(sums.sum(0))
        found[name] = float(whole[0] - whole[1])
        found[f"{name}_ci"] = None if drawn is None else _interval(mean(drawn[:, 0]) - mean(drawn[:, 1]))
    return found


# --- text


def repeated_ngrams(outputs: Sequence[Sequence[int]], n: int = NGRAM) -> dict[str, Any]:
    """Share of n-grams that their answer had before: loops are easy to draft and flatter the acceptance."""
    total = repeated = looping = 0
    for tokens in outputs:
        grams = [tuple(tokens[place : place + n]) for place in range(len(tokens) - n + 1)]
        again = len(grams) - len(set(grams))
        total, repeated, looping = total + len(grams), repeated + again, looping + (2 * again > len(grams))
    return {"n": n, "share": repeated / total if total else None, "looping_answers": looping}
