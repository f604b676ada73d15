"""Choosing anchors on the device with fixed shapes: no generator, no nonzero, no read-back.

A position is a valid anchor when it and the next are supervised tokens of the document. Every position gets a score
from a stateless hash of (seed, step, document, position); the highest A valid ones are taken and sorted. So anchors
do not depend on ranks, batch layout, ceiling or device, and a resumed run chooses the same.

Axes: S flat context positions of all rows, A anchors.
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


def scores(seed: int, step: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
    """A non-negative int64 score for every (document, position), of the shape that the two broadcast to.

    `step` is a scalar int64 tensor.
    """
    key = mix(mix(torch.full_like(step, seed) + GOLDEN) + step)
    return _shift(mix(mix(documents + key) + positions), 1)


def choose(valid_S: Tensor, score_S: Tensor, anchors: int, most: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Flat anchors int64 [A], ascending, and which of them are live, bool [A].

    Where fewer positions are valid, or than A are wanted (`most`, a scalar tensor), the rest are dummies behind the
    live ones with flat index S.
    """
    total = valid_S.numel()
    best = torch.topk(torch.where(valid_S, score_S, -1), min(anchors, total))  # highest first
    live = best.values >= 0
    if most is not None:
        live = live & (torch.arange(best.values.numel(), device=valid_S.device) < most)
    flat = torch.where(live, best.indices, total).sort().values
    return flat, flat < total
