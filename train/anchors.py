"""Choosing anchors on the device with fixed shapes: no generator, no nonzero, no read-back.

A position is a valid anchor when it and the next are supervised tokens of the document. Every position gets a score
from a stateless hash of (seed, step, document, position); the highest A valid ones are taken and sorted. So anchors
do not depend on ranks, batch layout, ceiling or device, and a resumed run chooses the same.

Axes: R rows, C context positions of a row (the ceiling, or less in the eager loop), S = R·C, A anchors.
"""

import torch
from torch import Tensor

# splitmix64's constants as signed 64-bit numbers; products wrap, which is what the hash wants
MULTIPLY_1, MULTIPLY_2 = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64, wrapping."""
    x = (x ^ _shift(x, 30)) * MULTIPLY_1
    x = (x ^ _shift(x, 27)) * MULTIPLY_2
    return x ^ _shift(x, 31)


def scores(seed: int, step: Tensor, documents_R: Tensor, ceiling: int) -> Tensor:
    """A non-negative int64 score for every (document, position), [R, C]. `step` is a scalar int64 tensor."""
    key = mix(mix(torch.full_like(step, seed) + GOLDEN) + step)
    rows = mix(documents_R + key)
    positions = torch.arange(ceiling, device=documents_R.device)
    return _shift(mix(rows[:, None] + positions), 1)


def choose(supervised_RC: Tensor, score_RC: Tensor, anchors: int) -> tuple[Tensor, Tensor]:
    """Flat anchors row · C + position, int64 [A], ascending, and which of them are live, bool [A].

    Where fewer positions are valid, the rest are dummies behind the live ones with flat index S.
    """
    valid = supervised_RC.clone()
    valid[:, :-1] &= supervised_RC[:, 1:]
    valid[:, -1] = False
    score_S = torch.where(valid, score_RC, -1).flatten()
    best = torch.topk(score_S, min(anchors, score_S.numel()))
    flat = torch.where(best.values >= 0, best.indices, score_S.numel()).sort().values
    return flat, flat < score_S.numel()
