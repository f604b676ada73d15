"""Acceptance on stored rows, walked as a server would: no target is needed.

Every supervised position is an anchor; a(p) is the number of leading drafts that equal the labels. The walk starts at
the first supervised token of a turn, counts min(a(p) + 1, tokens left) and jumps there: the bonus token is included,
and the last cycle counts only what the answer still had. On answers that the target itself gave greedily this is the
served acceptance length; on other answers it is indicative.

Several rows share a forward (their tokens stand one behind the other, attention goes row by row), the next rows are
read meanwhile, and the counts are read back once, at the end.

Axes: S context tokens of all rows of a forward, L of one row, F = K·H, A anchors, J drafted slots.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dflash.attention import RowSpan, attend_rows
from dflash.drafter import Drafter, RopeTable, embed_blocks
from dflash.loss import CHUNK_LOGITS, Head
from dflash.store import Store
from dflash.stored import row_states

STATE_BYTES = 1 << 27  # tapped states of one forward, at least one row
MOST_TOKENS = 32_768  # context tokens of one forward
READ_AHEAD = 1  # forwards

Turns = list[tuple[int, int]]  # [start, end) of each


class Drafting(Protocol):
    """A drafter with what of the target it needs; training's model is one."""

    @property
    def drafter(self) -> Drafter: ...
    @property
    def rope(self) -> RopeTable: ...
    @property
    def embed_VH(self) -> Tensor: ...
    @property
    def embed_factor(self) -> float: ...
    @property
    def head(self) -> Head: ...
    @property
    def tap_rms(self) -> Tensor | None: ...


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

    def add(self, lengths: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]) -> None:
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
        """acceptance: share of cycles whose drafts up to this slot were all accepted; conditional: given those before.

        A slot behind the end of an answer was never asked for. The cycles that ended right before a slot (with all
        drafts accepted) are those by which it was asked for less often than its neighbour.
        """
        rows: list[dict[str, float | int | None]] = []
        for slot, (drafted, accepted) in enumerate(zip(self.drafted, self.accepted, strict=True)):
            before = self.accepted[slot - 1] - (self.drafted[slot - 1] - drafted) if slot else drafted
            rows.append({
                "slot": slot + 1,
                "acceptance": accepted / drafted if drafted else None,
                "conditional": accepted / before if before else None,
            })  # fmt: skip
        return rows


@dataclass(frozen=True)
class Walk:
    """One turn walked: where it starts, the tokens of each cycle, and per slot how often asked for and accepted."""

    start: int
    lengths: list[int]
    drafted: list[int]
    accepted: list[int]


def walk(start: int, end: int, accepted_at: dict[int, int], slots: int) -> Walk:
    """Walk one turn [start, end): `accepted_at[p]` is a(p) for every p in it but the last."""
    lengths = []
    drafted, accepted = [0] * slots, [0] * slots
    position = start
    while position < end - 1:
        good, left = accepted_at[position], end - 1 - position
        kept = min(good + 1, left)
        for slot in range(slots if kept == good + 1 else kept):
            drafted[slot] += 1
            accepted[slot] += slot < good
        lengths.append(kept)
        position += kept
    return Walk(start, lengths, drafted, accepted)


def supervised_turns(mask_L: np.ndarray) -> Turns:
    """Runs [start, end) of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask_L.astype(np.int8), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


@dataclass(frozen=True)
class Row:
    """A stored row on the device. `labels_L`: the target's choice for each position, what a draft must equal."""

    taps_LF: Tensor
    ids_L: Tensor  # int64
    labels_L: Tensor  # int64
    turns: Turns  # of two tokens at least


def anchors_of(turns: Turns) -> np.ndarray:
    """Positions at which a block may start, ascending."""
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(start, end - 1) for start, end in turns)])


def read_row(store: Store, bucket: str, row: int, model: Drafting) -> Row:
    arrays, device = store.read_row(bucket, row), model.embed_VH.device
    ids = torch.from_numpy(arrays["input_ids"]).to(device, torch.int64)
    labels = torch.from_numpy(arrays["labels"]).to(device, torch.int64) if "labels" in arrays else ids
    turns = [(start, end) for start, end in supervised_turns(arrays["loss_mask"]) if end - start > 1]
    return Row(row_states(arrays, model.embed_VH.dtype, device, model.tap_rms), ids, labels, turns)


def accepted_drafts(model: Drafting, rows: Sequence[Row], chunk_logits: int | None = None) -> Tensor:
    """a(p) for the anchors of all rows, one behind the other, ignoring where answers end. int64, on the device."""
    config, device = model.drafter.config, model.embed_VH.device
    starts = np.cumsum([0, *(len(row.ids_L) for row in rows)])
    anchors = [anchors_of(row.turns) for row in rows]
    counts, positions = [len(each) for each in anchors], np.concatenate(anchors)
    offsets = np.repeat(starts[:-1], counts)  # of each anchor's row
    ends = np.repeat(starts[1:], counts) - 1  # flat index of its last token
    taps_SF = torch.cat([row.taps_LF for row in rows])
    ids_S, labels_S = torch.cat([row.ids_L for row in rows]), torch.cat([row.labels_L for row in rows])
    positions_S = torch.cat([torch.arange(len(row.ids_L), device=device) for row in rows])
    context_kv = model.drafter.context_keys_values(taps_SF, model.rope(positions_S))
    slots = torch.arange(config.block_size, device=device)
    chunk = max(
        1, (chunk_logits or CHUNK_LOGITS[device.type]) // 4 // (config.block_size * model.head.weight_VH.shape[0])
    )
    results = [torch.zeros(0, dtype=torch.int64, device=device)]
    for first in range(0, len(positions), chunk):
        part = slice(first, first + chunk)
        about = np.stack((positions[part], offsets[part], ends[part]))
        positions_A, offsets_A, ends_A = torch.from_numpy(about).to(device)
        anchor_ids = ids_S[offsets_A + positions_A]
        x = embed_blocks(model.embed_VH, model.embed_factor, anchor_ids, config.mask_token_id, config.block_size)
        slots_AB = positions_A[:, None] + slots
        attend = attend_rows(spans_of(positions[part], offsets[part]), positions_A, config.block_size)
        rope = model.rope(slots_AB.flatten())
        hidden = model.drafter.blocks(x.flatten(0, 1).to(taps_SF.dtype), rope, context_kv, attend)
        drafts = model.head.logits(hidden.unflatten(0, (-1, config.block_size))[:, 1:]).argmax(-1)
        targets = labels_S[torch.minimum((offsets_A[:, None] + slots_AB)[:, 1:], ends_A[:, None])]
        results.append((drafts == targets).long().cumprod(1).sum(1))
    return torch.cat(results)


def spans_of(positions: np.ndarray, offsets: np.ndarray) -> list[RowSpan]:
    """Where each row's context and anchors lie, for anchors in row order; context ends at a row's last anchor."""
    firsts = np.flatnonzero(np.diff(offsets, prepend=-1)).tolist()
    pairs = zip(firsts, [*firsts[1:], len(positions)], strict=True)
    return [RowSpan(int(offsets[first]), int(positions[last - 1]), first, last) for first, last in pairs]


def held_out_rows(store: Store, rows: dict[str, np.ndarray] | None = None) -> list[tuple[str, int]]:
    """(bucket, row) of every held-out row whose shard is there, of `rows` where a run keeps to some."""
    return [
        (bucket.name, row)
        for bucket in store.buckets
        if bucket.held_out
        for row in (range(bucket.rows) if rows is None else rows[bucket.name].tolist())
        if store.length(bucket.name, row)
    ]


@torch.no_grad()
def simulate(
    store: Store,
    model: Drafting,
    rows: Sequence[tuple[str, int]],
    advance: Callable[[int], None] = lambda n: None,
    chunk_logits: int | None = None,
) -> list[list[Walk]]:
    """For each of `rows` the walks of its supervised turns; `chunk_logits`: fewer at once, where memory is short."""
    found: list[tuple[list[Turns], Tensor]] = []
    width = len(model.drafter.config.taps) * model.embed_VH.shape[1] * model.embed_VH.element_size()
    for part in _read_ahead(store, model, _forwards(store, rows, min(MOST_TOKENS, STATE_BYTES // width))):
        found.append(([row.turns for row in part], accepted_drafts(model, part, chunk_logits)))
        advance(len(part))
    slots = model.drafter.config.block_size - 1
    return [walks for turns, accepted in found for walks in _walks(turns, accepted.tolist(), slots)]


def _walks(turns_of_rows: list[Turns], accepted: list[int], slots: int) -> Iterator[list[Walk]]:
    first = 0
    for turns in turns_of_rows:
        anchors = anchors_of(turns).tolist()
        accepted_at = dict(zip(anchors, accepted[first : first + len(anchors)], strict=True))
        first += len(anchors)
        yield [walk(start, end, accepted_at, slots) for start, end in turns]


def _forwards(store: Store, rows: Sequence[tuple[str, int]], most: int) -> Iterator[list[tuple[str, int]]]:
    """Neighbouring rows with at most `most` tokens together, at least one row."""
    part: list[tuple[str, int]] = []
    tokens = 0
    for bucket, row in rows:
        length = store.length(bucket, row) or 0
        if part and tokens + length > most:
            yield part
            part, tokens = [], 0
        part.append((bucket, row))
        tokens += length
    if part:
        yield part


def _read_ahead(store: Store, model: Drafting, forwards: Iterator[list[tuple[str, int]]]) -> Iterator[list[Row]]:
    """Rows of each forward, read by threads while the one before is computed."""
    with ThreadPoolExecutor(READ_AHEAD) as pool:
        waiting = []
        for forward in forwards:
            waiting.append([pool.submit(read_row, store, bucket, row, model) for bucket, row in forward])
            if len(waiting) > READ_AHEAD:
                yield [each.result() for each in waiting.pop(0)]
        for futures in waiting:
            yield [each.result() for each in futures]
