"""Which layers are tapped. Tap t is the OUTPUT of decoder layer t, 0-based (the last layer's before the final norm)."""

from collections.abc import Sequence
from itertools import pairwise

from dflash.errors import DflashError


def default_taps(num_layers: int, k: int) -> tuple[int, ...]:
    """The published rule: k layers spread evenly from the second to the fourth last."""
    if k < 1:
        raise DflashError(f"--num-taps {k} is too few: at least one layer must be tapped.")
    taps = _rule(num_layers, k)
    if not _valid(taps, num_layers):
        raise DflashError(
            f"--num-taps {k} gives the layers {_text(taps)}, which collide or do not exist in a target of {num_layers} "
            f"layers: {_proposal(num_layers, k)}."
        )
    return taps


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    """Refuse taps that repeat, are unsorted or do not exist, with a proposal that works."""
    if _valid(taps, num_layers):
        return
    outside = [t for t in taps if not 0 <= t < num_layers]
    if not taps:
        problem = "names no layer"
    elif outside:
        problem = f"names {_text(outside)}, but the target has layers 0 to {num_layers - 1}"
    elif len(set(taps)) < len(taps):
        problem = "names a layer twice"
    else:
        problem = "is not in ascending order"
        raise DflashError(f"--layers {_text(taps)} {problem}: use --layers {_text(sorted(taps))}.")
    raise DflashError(f"--layers {_text(taps)} {problem}: {_proposal(num_layers, max(1, len(taps)))}.")


def _rule(num_layers: int, k: int) -> tuple[int, ...]:
    if k == 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (k - 1)) for i in range(k))


def _valid(taps: Sequence[int], num_layers: int) -> bool:
    return bool(taps) and all(0 <= t < num_layers for t in taps) and all(a < b for a, b in pairwise(taps))


def _proposal(num_layers: int, k: int) -> str:
    best = next(n for n in range(min(k, num_layers), 0, -1) if _valid(_rule(num_layers, n), num_layers))
    free = f", or --layers with up to {num_layers} different ids from 0 to {num_layers - 1}" if best < k else ""
    return f"use --num-taps {best}, that is --layers {_text(_rule(num_layers, best))}{free}"


def _text(taps: Sequence[int]) -> str:
    return ",".join(map(str, taps))
