"""What a drafter is trained on: which slots count, how much, and the loss through the target's frozen head.

The head is the target's: no gradient for it, and the full logits [slots, vocabulary] never exist. A chunk of blocks
at a time makes its logits, the loss of each slot and, in the same pass, the gradient of the hidden states, so that
backward only has to scale. Everything returned is a SUM (numerator) with the sum of its weights (denominator): the
division comes once, over a whole optimiser step of all micro-steps and ranks.

Axes: A anchors (blocks), J = B-1 scored slots (slot 0 carries the anchor and no loss), H hidden, V vocabulary, k
teacher tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash.fp8 import Narrow, narrowed, product

CHUNK_LOGITS = {"cpu": 1 << 26, "cuda": 1 << 30}  # most logits of one chunk: 256 MiB in fp32, 2 GiB in bf16
CHUNK_ROWS = 4096  # more rows a chunk are no faster on an H200 (captured-step.md, section 10)
EVEN = 128  # blocks of a chunk, so that its rows fill the tiles of a product


@dataclass(frozen=True)
class NarrowHead:
    """The head in e4m3, once with a scale for each token's row and once transposed."""

    rows: Narrow  # [V, H]
    columns: Narrow  # [H, V]

    @staticmethod
    def of(weight_VH: Tensor) -> "NarrowHead":
        return NarrowHead(narrowed(weight_VH), narrowed(weight_VH.T))


@dataclass(frozen=True)
class Head:
    """The target's frozen head: logits = softcap · tanh(scale · x Wᵀ / softcap), as its family has them."""

    weight_VH: Tensor
    scale: float = 1.0
    softcap: float | None = None
    narrow: NarrowHead | None = None  # for training in e4m3; nothing that is measured goes through it

    def project(self, rows_TH: Tensor) -> Tensor:
        """x Wᵀ [T, V] as training computes it."""
        if self.narrow is None:
            return rows_TH @ self.weight_VH.T
        return product(narrowed(rows_TH), self.narrow.rows, fast=True)

    def project_back(self, d_TV: Tensor | Narrow) -> Tensor:
        """d W [T, H]."""
        if self.narrow is None:
            assert isinstance(d_TV, Tensor), "the head is whole"
            return d_TV @ self.weight_VH
        return product(narrowed(d_TV) if isinstance(d_TV, Tensor) else d_TV, self.narrow.columns)

    def logits(self, hidden: Tensor, training: bool = False) -> Tensor:
        """Logits [..., V] in at least fp32. The product runs in the weight's dtype, as the target's own does."""
        # rows, else a CPU takes the slow batched product
        rows = hidden.to(self.weight_VH.dtype).reshape(-1, hidden.shape[-1])
        logits = (self.project(rows) if training else rows @ self.weight_VH.T).view(*hidden.shape[:-1], -1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def input_gradient(self, dlogits: Tensor, logits: Tensor) -> Tensor:
        """Gradient of `hidden` for a gradient of `logits` (both fp32, [..., V])."""
        if self.softcap is not None:
            dlogits = dlogits * (1 - (logits / self.softcap) ** 2)
        if self.scale != 1.0:
            dlogits = dlogits * self.scale
        rows = dlogits.to(self.weight_VH.dtype).reshape(-1, dlogits.shape[-1])
        return self.project_back(rows).view(*dlogits.shape[:-1], -1)


@dataclass(frozen=True)
class Teacher:
    """A soft teacher for the `kl` loss: its top-k tokens, or its last hidden state from which all logits follow."""

    ids_AJk: Tensor | None = None
    logp_AJk: Tensor | None = None
    last_AJH: Tensor | None = None


def slots_that_count(supervised_AB: Tensor, agrees_AB: Tensor, prefix: str) -> Tensor:
    """Float [A, B-1]: 1 where slot j = 1..B-1 is scored.

    A slot counts while it and every slot before it is supervised and inside the document and, with prefix "agree",
    every scored slot before it has label = data token: past the first disagreement the data is no longer what the
    target would have seen. The disagreeing slot itself counts.

    Args:
        supervised_AB: bool [A, B], token anchor+j is supervised and of the anchor's document; column 0 is the anchor.
        agrees_AB: bool [A, B], the label of anchor+j equals the data token.
    """
    inside = supervised_AB.long().cumprod(dim=1)[:, 1:]
    if prefix == "any":
        return inside.float()
    before = torch.ones_like(inside)
    before[:, 1:] = agrees_AB[:, 1:-1].long().cumprod(dim=1)
    return (inside * before).float()


def default_gamma(block_size: int) -> float:
    """The paper's decay (A.1): 4, 5, 7 for blocks 8, 10, 16, linear between; B/2 below 8 and 7B/16 above 16."""
    if block_size <= 8:
        return block_size / 2
    if block_size <= 10:
        return 4 + (block_size - 8) / 2
    if block_size <= 16:
        return 5 + (block_size - 10) / 3
    return 7 * block_size / 16


def decay_weights(block_size: int, gamma: float, device: torch.device | str) -> Tensor:
    """exp(-(j-1)/γ) for j = 1..B-1, fp32 [J] (DFlash paper, section 4)."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32, device=device) / gamma)


def dpace_weights(ce_AJ: Tensor, counts_AJ: Tensor, alpha: float = 0.5) -> Tensor:
    """D-PACE (arXiv 2605.18810): w_j = Σ_{m≥j} Π_{i≤m} q̃_i with q̃ = (1-α) exp(-ce) + α; unscored slots are no-ops."""
    confidence = (1 - alpha) * torch.exp(-ce_AJ) + alpha
    reach = torch.where(counts_AJ > 0, confidence, 1.0).cumprod(dim=1) * counts_AJ
    # a product, since a GPU's cumsum has no version that repeats bit for bit
    onward = torch.ones(reach.shape[1], reach.shape[1], dtype=reach.dtype, device=reach.device).tril()
    return reach @ onward * counts_AJ


@dataclass(frozen=True)
class LossSums:
    """Sums over the slots of a micro-step; all fp32. `correct`, `scored`, `prefix` are per slot [J]."""

    numerator: Tensor
    denominator: Tensor
    scored: Tensor  # slots that count
    correct: Tensor  # of these, where the drafter's argmax is the label
    prefix: Tensor  # of these, where it is and was in all slots before: what a server would accept


def block_loss(
    hidden_AJH: Tensor,
    head: Head,
    targets_AJ: Tensor,
    counts_AJ: Tensor,
    *,
    decay_J: Tensor | None,
    teacher: Teacher | None = None,
    chunk_logits: int | None = None,
) -> LossSums:
    """Weighted sum of each slot's loss through the frozen head, differentiable in `hidden_AJH` only.

    Args:
        hidden_AJH: the drafter's outputs of slots 1..B-1.
        targets_AJ: int64, the token each slot should propose; any value in [0, V) where the slot does not count.
        counts_AJ: float, see `slots_that_count`.
        decay_J: fixed weights of the slots; None for D-PACE.
        teacher: None for cross entropy on `targets_AJ`; else KL(teacher ‖ drafter).
    """
    chunk = chunk_logits or CHUNK_LOGITS[hidden_AJH.device.type] // (4 if teacher is not None else 1)
    return LossSums(*_BlockLoss.apply(hidden_AJH, head, targets_AJ, counts_AJ, decay_J, teacher, chunk))


def chunk_blocks(anchors: int, slots: int, vocabulary: int, chunk_logits: int) -> int:
    """Blocks of a chunk: at most `chunk_logits` logits and about CHUNK_ROWS rows; a multiple of EVEN if that fits."""
    most = max(1, min(chunk_logits // vocabulary, CHUNK_ROWS) // slots)
    return most // EVEN * EVEN or -(-anchors // -(-anchors // most))  # else of nearly equal size


class _BlockLoss(torch.autograd.Function):
    """Forward makes the gradient of `hidden_AJH` chunk by chunk; backward scales it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_AJH: Tensor,
        head: Head,
        targets_AJ: Tensor,
        counts_AJ: Tensor,
        decay_J: Tensor | None,
        teacher: Teacher | None,
        chunk_logits: int,
    ) -> tuple[Tensor, ...]:
        anchors, slots, _ = hidden_AJH.shape
        step = chunk_blocks(anchors, slots, head.weight_VH.shape[0], chunk_logits)
        gradient = torch.empty_like(hidden_AJH)
        wide = torch.promote_types(hidden_AJH.dtype, torch.float32)
        zero = hidden_AJH.new_zeros((), dtype=wide)
        per_slot = hidden_AJH.new_zeros(slots, dtype=wide)
        sums: tuple[Tensor, ...] = (zero, zero.clone(), per_slot, per_slot.clone(), per_slot.clone())
        for first in range(0, anchors, step):
            part = slice(first, first + step)
            chunk_teacher = _cut(teacher, part)
            gradient[part], chunk_sums = _chunk(
                hidden_AJH[part], head, targets_AJ[part], counts_AJ[part], decay_J, chunk_teacher
            )
            sums = tuple(a + b for a, b in zip(sums, chunk_sums, strict=True))
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(*sums[1:])
        return sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grads[0].to(gradient.dtype), None, None, None, None, None, None)


def _cut(teacher: Teacher | None, part: slice) -> Teacher | None:
    if teacher is None:
        return None
    fields = (teacher.ids_AJk, teacher.logp_AJk, teacher.last_AJH)
    return Teacher(*(None if field is None else field[part] for field in fields))


def _chunk(
    hidden_AJH: Tensor,
    head: Head,
    targets_AJ: Tensor,
    counts_AJ: Tensor,
    decay_J: Tensor | None,
    teacher: Teacher | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Gradient [a, J, H] and the five sums of one chunk of blocks."""
    if hidden_AJH.is_cuda and teacher is None:
        return _chunk_cuda(hidden_AJH, head, targets_AJ, counts_AJ, decay_J)
    logits = head.logits(hidden_AJH, training=True)
    lse = torch.logsumexp(logits, dim=-1)
    picked = logits.gather(-1, targets_AJ[..., None]).squeeze(-1)
    ce_AJ = lse - picked
    correct = (logits.argmax(dim=-1) == targets_AJ).float() * counts_AJ
    weights = dpace_weights(ce_AJ, counts_AJ) if decay_J is None else decay_J * counts_AJ
    # softmax in place of the logits, unless a softcap's derivative needs them later
    softmax = (logits - lse[..., None]).exp_() if head.softcap is not None else logits.sub_(lse[..., None]).exp_()
    if teacher is None:
        term, dlogits = ce_AJ, softmax.scatter_(-1, targets_AJ[..., None], torch.exp(-ce_AJ)[..., None] - 1)
    else:
        term, dlogits = _kl(softmax, teacher, head)
    gradient = head.input_gradient(dlogits.mul_(weights[..., None]), logits).to(hidden_AJH.dtype)
    return gradient, _sums(term, weights, correct, counts_AJ, decay_J)


def _chunk_cuda(
    hidden_AJH: Tensor, head: Head, targets_AJ: Tensor, counts_AJ: Tensor, decay_J: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The same for cross entropy by two fused kernels; a slot is correct where its label has the highest logit."""
    from dflash.kernels.head import gradient_in_place, narrow_gradient, row_statistics

    logits = head.project(hidden_AJH.reshape(-1, hidden_AJH.shape[-1]))
    targets = targets_AJ.flatten()
    lse, picked, highest = row_statistics(logits, targets, head.scale, head.softcap)
    ce_AJ = (lse - picked).view(targets_AJ.shape)
    correct = (picked >= highest).view(targets_AJ.shape).float() * counts_AJ
    weights = dpace_weights(ce_AJ, counts_AJ) if decay_J is None else decay_J * counts_AJ
    wanted = targets, lse, weights.flatten(), head.scale, head.softcap
    if head.narrow is None:
        gradient_in_place(logits, *wanted)
        gradient = head.project_back(logits)
    else:
        gradient = head.project_back(narrow_gradient(logits, picked, highest, *wanted))
    gradient = gradient.view(hidden_AJH.shape)
    return gradient, _sums(ce_AJ, weights, correct, counts_AJ, decay_J)


def _sums(
    term: Tensor, weights: Tensor, correct: Tensor, counts_AJ: Tensor, decay_J: Tensor | None
) -> tuple[Tensor, ...]:
    # D-PACE's denominator is the number of scored slots, decay's the sum of its weights (design, section 5)
    denominator = counts_AJ.sum() if decay_J is None else weights.sum()
    # where(), not a product alone: an unscored slot may hold anything, and 0 · inf is NaN
    numerator = torch.where(weights > 0, term * weights, 0.0).sum()
    scored, prefix = counts_AJ.sum(0), (correct.cumprod(dim=1) * counts_AJ).sum(0)
    return numerator, denominator, scored, correct.sum(0), prefix


def _kl(softmax: Tensor, teacher: Teacher, head: Head) -> tuple[Tensor, Tensor]:
    """KL(teacher ‖ drafter) of each slot and its gradient by the logits; top-k is renormalised over its k tokens."""
    tiny = torch.finfo(softmax.dtype).tiny  # a probability that underflowed still has a finite logarithm
    if teacher.last_AJH is not None:
        teacher_logp = torch.log_softmax(head.logits(teacher.last_AJH), dim=-1)
        teacher_p = teacher_logp.exp()
        return (teacher_p * (teacher_logp - softmax.clamp(min=tiny).log())).sum(-1), softmax.sub_(teacher_p)
    assert teacher.ids_AJk is not None, "a teacher has a last state or a top-k"
    assert teacher.logp_AJk is not None, "log-probabilities come with their ids"
    teacher_logp = torch.log_softmax(teacher.logp_AJk.to(softmax.dtype), dim=-1)
    teacher_p = teacher_logp.exp()
    picked = softmax.gather(-1, teacher.ids_AJk)
    term = (teacher_p * (teacher_logp - picked.clamp(min=tiny).log())).sum(-1)
    return term, softmax.scatter_(-1, teacher.ids_AJk, picked - teacher_p)  # the k tokens of a slot are distinct
