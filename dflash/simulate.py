"""Acceptance on stored rows, walked as a server would: no target is needed.

Every supervised position is an anchor; a(p) is the number of leading drafts that equal the labels. The walk starts at
the first supervised token of a turn, counts min(a(p) + 1, tokens left) and jumps there: the bonus token is included,
and the last cycle counts only what the answer still had. On answers that the target itself gave greedily this is the
served acceptance length; on other answers it is indicative.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dflash.attention import attend_rows, row_spans
from dflash.drafter import Drafter, RopeTable, embed_blocks
from dflash.loss import CHUNK_LOGITS, Head


@dataclass
class Tally:
    """Counts over cycles: pooled and macro acceptance length, and per slot how often it was asked for and accepted."""

    slots: int
    tokens: int = 0
    cycles: int = 0
    responses: list[float] = field(default_factory=list)  # mean acceptance length of each
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.drafted = self.drafted or [0] * self.slots
        self.accepted = self.accepted or [0] * self.slots

    def add(self, lengths: list[int], drafted: list[int], accepted: list[int]) -> None:
        """One response: tokens kept of each cycle, and its slot counts."""
        if not lengths:
            return
        self.tokens += sum(lengths)
        self.cycles += len(lengths)
        self.responses.append(sum(lengths) / len(lengths))
        self.drafted = [a + b for a, b in zip(self.drafted, drafted, strict=True)]
        self.accepted = [a + b for a, b in zip(self.accepted, accepted, strict=True)]

    def acceptance_length(self) -> dict[str, float | None]:
        """pooled: tokens over cycles of all responses; macro: the mean of the responses' means."""
        if not self.cycles:
            return {"pooled": None, "macro": None}
        return {"pooled": self.tokens / self.cycles, "macro": sum(self.responses) / len(self.responses)}

    def per_slot(self) -> list[dict[str, float | int | None]]:
        """acceptance: share of cycles whose drafts up to this slot were all accepted; conditional: given those
        before."""
        rows: list[dict[str, float | int | None]] = []
        for slot, (drafted, accepted) in enumerate(zip(self.drafted, self.accepted, strict=True)):
            before = self.accepted[slot - 1] if slot else drafted
            rows.append({
                "slot": slot + 1,
                "acceptance": accepted / drafted if drafted else None,
                "conditional": min(1.0, accepted / before) if before else None,
            })  # fmt: skip
        return rows


def accepted_drafts(
    drafter: Drafter,
    rope: RopeTable,
    embed_VH: Tensor,
    embed_factor: float,
    head: Head,
    taps_LF: Tensor,
    ids_L: Tensor,
    labels_L: Tensor,
    anchors: np.ndarray,
) -> np.ndarray:
    """a(p) for each anchor of one row, ignoring where the answer ends. int64, as long as `anchors`, which ascend.

    Args:
        taps_LF: the row's tapped states, [L, K·H] in the drafter's dtype.
        labels_L: int64, the target's choice for each position; what a draft must equal.
    """
    config, length, device = drafter.config, len(ids_L), ids_L.device
    slots = torch.arange(config.block_size, device=device)
    context_kv = drafter.context_keys_values(taps_LF, rope(torch.arange(length, device=device)))
    chunk = max(1, CHUNK_LOGITS[device.type] // 4 // (config.block_size * head.weight_VH.shape[0]))
    results = []
    for first in range(0, len(anchors), chunk):
        anchors_A = torch.from_numpy(anchors[first : first + chunk]).to(device)
        x = embed_blocks(embed_VH, embed_factor, ids_L[anchors_A], config.mask_token_id, config.block_size)
        positions = anchors_A[:, None] + slots
        attend = attend_rows(row_spans(anchors_A, 1, length), anchors_A, config.block_size)
        hidden = drafter.blocks(x.flatten(0, 1).to(taps_LF.dtype), rope(positions.flatten()), context_kv, attend)
        drafts = head.logits(hidden.unflatten(0, (-1, config.block_size))[:, 1:]).argmax(-1)
        equal = drafts == labels_L[positions[:, 1:].clamp(max=length - 1)]
        results.append(equal.long().cumprod(1).sum(1))
    return torch.cat(results).cpu().numpy()


def supervised_turns(mask_L: np.ndarray) -> list[tuple[int, int]]:
    """Runs [start, end) of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask_L.astype(np.int8), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def walk(tally: Tally, start: int, end: int, accepted_at: dict[int, int]) -> None:
    """Walk one turn [start, end): `accepted_at[p]` is a(p) for every p in it."""
    lengths = []
    drafted, accepted = [0] * tally.slots, [0] * tally.slots
    position = start
    while position < end - 1:
        good, left = accepted_at[position], end - 1 - position
        kept = min(good + 1, left)
        for slot in range(tally.slots if kept == good + 1 else kept):
            drafted[slot] += 1
            accepted[slot] += slot < good
        lengths.append(kept)
        position += kept
    tally.add(lengths, drafted, accepted)
