"""The micro-step: one batch of one bucket, from stored rows to accumulated gradients and sums.

Everything is arithmetic on tensors of shapes that follow from (R, C, A, B) alone; stale bytes behind a row's
length never count. The eager runner of this file may crop a batch to its longest row and drop dummy anchors. Rows
are flattened: where a flat position lies (`places`) may itself be a value on the device, so that one shape serves
rows of any ceiling (--graph budget).

Axes: R rows, C context positions, S = R·C, K taps, H hidden, A anchors, B block, J = B-1 scored slots.
"""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.attention import NOWHERE, attend_rows, row_spans
from dflash.drafter import Attend, Drafter, Rope, RopeTable, embed_blocks
from dflash.loss import Head, LossSums, Teacher, block_loss, slots_that_count
from dflash.stored import scaled_back
from dflash.train.anchors import choose, scores
from dflash.train.optimiser import Flat


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the device. Values behind `lengths` are stale and must not matter."""

    hidden: Tensor  # [R, C, K·H] bfloat16 (int8 with `scale`)
    input_ids: Tensor  # [R, C] int32
    labels: Tensor  # [R, C] int32; the data tokens where the store has no labels
    loss_mask: Tensor  # [R, C] uint8
    lengths: Tensor  # [R] int32, 0 where there is no row
    documents: Tensor  # [R] int64
    scale: Tensor | None = None  # [R, C, K] fp32
    last: Tensor | None = None  # [R, C, H] bfloat16
    topk_ids: Tensor | None = None  # [R, C, k] int32
    topk_logp: Tensor | None = None  # [R, C, k] float16
    ceiling: Tensor | None = None  # int64 scalar: C, where the arrays are flat, [1, S]; None: their second axis

    def cropped(self, length: int) -> "Batch":
        """Views of the first `length` positions of every row."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        cut = {name: part[:, :length] if part is not None and part.ndim > 1 else part for name, part in parts.items()}
        return Batch(**cut)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What a slot is trained on and how much it weighs."""

    loss: str  # ce | ce-tokens | kl
    decay_J: Tensor | None  # None: D-PACE
    prefix: str  # agree | any


@dataclass(frozen=True, kw_only=True)
class Model:
    """The drafter with what of the target it needs."""

    drafter: Drafter
    rope: RopeTable
    embed_VH: Tensor
    embed_factor: float
    head: Head
    tap_rms: Tensor | None = None  # [K·H] fp32, of an int8 store


@dataclass(frozen=True)
class Places:
    """Where each flat context position lies."""

    ceiling: int | Tensor
    document_S: Tensor  # int64
    position_S: Tensor  # int64, in its row
    inside_S: Tensor  # bool, it holds a token of the row's document


def places(batch: Batch) -> Places:
    rows, width = batch.input_ids.shape
    ceiling = width if batch.ceiling is None else batch.ceiling
    index_S = torch.arange(rows * width, device=batch.input_ids.device)
    row_S = index_S // ceiling
    position_S = index_S - row_S * ceiling
    last = len(batch.lengths) - 1  # a flat batch may have room behind its last row
    known_S, row_S = row_S <= last, row_S.clamp(max=last)
    inside_S = (position_S < batch.lengths[row_S]) & known_S
    return Places(ceiling, batch.documents[row_S], position_S, inside_S)


@dataclass(frozen=True)
class Blocks:
    """The blocks of a micro-batch, in the order of their anchors; dummies, which see and count nothing, come last."""

    flat_A: Tensor  # int64 anchor = row · C + position; S for a dummy
    low_A: Tensor  # int64, the context that the block sees is flat [low, high); both NOWHERE for a dummy
    high_A: Tensor
    live_A: Tensor  # bool
    slots_AB: Tensor  # int64 position of each slot in its row
    index_AB: Tensor  # int64 flat index of each slot, inside its row
    inside_AB: Tensor  # bool, the slot is a token of its document
    tokens_A: Tensor  # int64 anchor token
    targets_AJ: Tensor  # int64
    counts_AJ: Tensor  # fp32

    def taken(self, which: slice | Tensor) -> "Blocks":
        """Some of them."""
        return Blocks(**{f.name: getattr(self, f.name)[which] for f in fields(self)})

    def live(self) -> "Blocks":
        """Without dummies. Reads their number back, so it is for eager loops only."""
        return self.taken(slice(int(self.live_A.sum())))


def lay_blocks(
    batch: Batch,
    objective: Objective,
    block: int,
    anchors: int,
    padded: int,
    seed: int,
    step: Tensor,
    most: Tensor | None = None,
) -> Blocks:
    """Choose `anchors` anchors (of which `most` may be live) and read their slots; dummies fill up to `padded`.

    Static shapes throughout.
    """
    where = places(batch)
    ceiling, inside_S = where.ceiling, where.inside_S
    device, total = inside_S.device, inside_S.numel()
    supervised_S = (batch.loss_mask.flatten() > 0) & inside_S
    followed_S = F.pad(supervised_S[1:], (0, 1)) & (where.position_S + 1 < ceiling)
    score_S = scores(seed, step, where.document_S, where.position_S)
    flat_A, _ = choose(supervised_S & followed_S, score_S, anchors, most)
    flat_A = F.pad(flat_A, (0, padded - flat_A.shape[0]), value=total)
    live_A = flat_A < total
    slots = torch.arange(block, device=device)
    slots_AB = (flat_A % ceiling)[:, None] + slots
    fits_AB = (slots_AB < ceiling) & live_A[:, None]
    index_AB = torch.where(fits_AB, flat_A[:, None] + slots, flat_A[:, None].clamp(max=total - 1))
    inside_AB = inside_S[index_AB] & fits_AB
    tokens_AB = torch.where(inside_AB, batch.input_ids.flatten()[index_AB], 0).long()
    labels_AB = torch.where(inside_AB, batch.labels.flatten()[index_AB], 0).long()
    supervised_AB = supervised_S[index_AB] & inside_AB
    return Blocks(
        flat_A=flat_A,
        low_A=torch.where(live_A, flat_A // ceiling * ceiling, NOWHERE),
        high_A=torch.where(live_A, flat_A, NOWHERE),
        live_A=live_A,
        slots_AB=slots_AB,
        index_AB=index_AB,
        inside_AB=inside_AB,
        tokens_A=tokens_AB[:, 0],
        targets_AJ=(tokens_AB if objective.loss == "ce-tokens" else labels_AB)[:, 1:].clamp(min=0),
        counts_AJ=slots_that_count(supervised_AB, labels_AB == tokens_AB, objective.prefix),
    )


@dataclass(frozen=True)
class Inputs:
    """What the drafter's forward takes: context and embedded blocks, each with its rotation."""

    taps_SF: Tensor
    rope_S: Rope
    x_NH: Tensor
    rope_N: Rope


def inputs_of(model: Model, batch: Batch, blocks: Blocks, context: int) -> Inputs:
    """Taps are zero behind a row's length, so stale NaN cannot reach a product, and padded to `context` tokens."""
    where, config = places(batch), model.drafter.config
    padding = context - where.inside_S.numel()
    states_SF = scaled_back(batch.hidden, batch.scale, model.tap_rms, model.embed_VH.dtype).flatten(0, 1)
    taps_SF = F.pad(torch.where(where.inside_S[:, None], states_SF, 0.0), (0, 0, 0, padding))
    x_ABH = embed_blocks(model.embed_VH, model.embed_factor, blocks.tokens_A, config.mask_token_id, config.block_size)
    return Inputs(
        taps_SF=taps_SF,
        rope_S=model.rope(F.pad(where.position_S, (0, padding))),
        x_NH=x_ABH.flatten(0, 1),
        rope_N=model.rope(blocks.slots_AB.flatten()),
    )


def scored_states(hidden_NH: Tensor, block: int) -> Tensor:
    """The outputs of slots 1..B-1, [A, J, H]; slot 0 carries the anchor."""
    return hidden_NH.unflatten(0, (-1, block))[:, 1:]


def drafted_states(model: Model, batch: Batch, blocks: Blocks, attend: Attend, context: int) -> Tensor:
    """The drafter's outputs of slots 1..B-1, [A, J, H]."""
    inputs = inputs_of(model, batch, blocks, context)
    hidden_NH = model.drafter(inputs.taps_SF, inputs.rope_S, inputs.x_NH, inputs.rope_N, attend)
    return scored_states(hidden_NH, model.drafter.config.block_size)


def loss_of(
    model: Model, batch: Batch, blocks: Blocks, objective: Objective, hidden_AJH: Tensor, chunk: int | None = None
) -> LossSums:
    """The loss sums through the frozen head, `chunk` logits at a time."""
    teacher = None
    if objective.loss == "kl":
        teacher = soft_teacher(batch, blocks.index_AB[:, 1:], blocks.inside_AB[:, 1:])
    return block_loss(
        hidden_AJH,
        model.head,
        blocks.targets_AJ,
        blocks.counts_AJ,
        decay_J=objective.decay_J,
        teacher=teacher,
        chunk_logits=chunk,
    )


def micro_loss(
    model: Model, batch: Batch, objective: Objective, anchors: int, seed: int, step: Tensor
) -> tuple[LossSums, Tensor] | None:
    """Eagerly, attention row by row: loss sums and number of live anchors; None when no position can be an anchor."""
    rows, ceiling = batch.input_ids.shape
    block = model.drafter.config.block_size
    blocks = lay_blocks(batch, objective, block, anchors, anchors, seed, step).live()
    if not len(blocks.flat_A):
        return None
    attend = attend_rows(row_spans(blocks.flat_A, rows, ceiling), blocks.flat_A % ceiling, block)
    hidden_AJH = drafted_states(model, batch, blocks, attend, context=rows * ceiling)
    return loss_of(model, batch, blocks, objective, hidden_AJH), blocks.live_A.sum()


def soft_teacher(batch: Batch, index_AJ: Tensor, inside_AJ: Tensor) -> Teacher:
    """The stored teacher of slots 1..B-1. Top-k belongs to its position; a last state predicts the NEXT position."""
    inside = inside_AJ[..., None]
    if batch.last is not None:
        return Teacher(last_AJH=torch.where(inside, batch.last.flatten(0, 1)[(index_AJ - 1).clamp(min=0)], 0.0))
    assert batch.topk_ids is not None, "checked when the run began"
    assert batch.topk_logp is not None, "stored beside its ids"
    ranks = torch.arange(batch.topk_ids.shape[-1], device=index_AJ.device, dtype=batch.topk_ids.dtype)
    ids = torch.where(inside, batch.topk_ids.flatten(0, 1)[index_AJ], ranks)  # distinct ids also where nothing counts
    logp = torch.where(inside, batch.topk_logp.flatten(0, 1)[index_AJ], 0.0)
    return Teacher(ids_AJk=ids.long(), logp_AJk=logp)


class Sums:
    """Accumulated over the micro-steps of a step in one vector: numerator, denominator, anchors, then per slot."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots = slots
        self.vector = torch.zeros(3 + 3 * slots, dtype=torch.float32, device=device)

    def add(self, sums: LossSums, anchors: Tensor) -> None:
        parts = (sums.numerator.detach(), sums.denominator, anchors)
        heads = torch.stack([part.to(self.vector.dtype) for part in parts])
        per_slot = torch.cat((sums.scored, sums.correct, sums.prefix)).to(self.vector.dtype)
        self.vector += torch.cat((heads, per_slot))

    @property
    def denominator(self) -> Tensor:
        return self.vector[1]


def micro_step(
    model: Model, batch: Batch, objective: Objective, anchors: int, seed: int, step: Tensor, sums: Sums, flat: Flat
) -> None:
    """Forward and backward of one micro-batch; gradients and sums accumulate, unnormalised."""
    result = micro_loss(model, batch, objective, anchors, seed, step)
    if result is not None:
        loss_sums, live = result
        flat.accumulate(loss_sums.numerator)
        sums.add(loss_sums, live)
