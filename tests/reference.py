"""Slow, plain versions of the numerics, written for reading: one block, one slot, one token at a time."""

import math

import torch
from torch import Tensor

from dflash.drafter import Drafter, RopeTable, embed_blocks


def dense_blocks(
    drafter: Drafter, taps_CF: Tensor, ids_C: Tensor, anchors: list[int], embed_VH: Tensor, factor: float = 1.0
) -> Tensor:
    """Outputs [A, B, H] of one row's blocks by attention under a dense mask over [context | all blocks]."""
    config = drafter.config
    context, block = taps_CF.shape[0], config.block_size
    rope = RopeTable(config, context + block, taps_CF.dtype, "cpu")
    anchors_A = torch.tensor(anchors)
    x = embed_blocks(embed_VH, factor, ids_C[anchors_A], config.mask_token_id, block).flatten(0, 1)
    slots = (anchors_A[:, None] + torch.arange(block)).flatten()
    owner = torch.arange(len(anchors)).repeat_interleave(block)
    sees_context = torch.arange(context) < anchors_A[owner][:, None]
    full = torch.cat((sees_context, owner[:, None] == owner), dim=1)
    key_positions = torch.cat((torch.arange(context), slots))

    def attend(q: Tensor, k: Tensor, v: Tensor, block_k: Tensor, block_v: Tensor, window: int | None = None) -> Tensor:
        mask = full
        if window is not None:
            back = slots[:, None] - key_positions
            mask = full & (back >= 0) & (back < window)
        keys, values = torch.cat((k, block_k)), torch.cat((v, block_v))
        repeat = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
        scores = torch.einsum("nqd,lqd->qnl", q, keys) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return torch.einsum("qnl,lqd->nqd", weights, values)

    out = drafter(taps_CF, rope(torch.arange(context)), x, rope(slots), attend)
    return out.unflatten(0, (len(anchors), block))


def plain_counts(supervised: list[bool], agrees: list[bool], prefix: str) -> list[float]:
    """Slots 1..B-1 of one block, spelled out."""
    counts = []
    open_ = supervised[0]
    for slot in range(1, len(supervised)):
        open_ = open_ and supervised[slot]
        if prefix == "agree" and slot > 1:
            open_ = open_ and agrees[slot - 1]
        counts.append(float(open_))
    return counts


def plain_dpace(ce: list[float], counts: list[float], alpha: float) -> list[float]:
    weights = []
    for j in range(len(ce)):
        total = 0.0
        for m in range(j, len(ce)):
            if counts[m]:
                product = 1.0
                for i in range(m + 1):
                    if counts[i]:
                        product *= (1 - alpha) * math.exp(-ce[i]) + alpha
                total += product
        weights.append(total if counts[j] else 0.0)
    return weights


def plain_logits(hidden: Tensor, weight_VH: Tensor, scale: float, softcap: float | None) -> Tensor:
    logits = scale * hidden @ weight_VH.T
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def plain_loss(
    logits_AJV: Tensor, targets_AJ: Tensor, weights_AJ: Tensor, teacher_logp_AJV: Tensor | None = None
) -> Tensor:
    """Σ weight · term by autograd's own softmax; the teacher gives log-probabilities over the whole vocabulary."""
    logp = torch.log_softmax(logits_AJV, -1)
    if teacher_logp_AJV is None:
        term = -logp.gather(-1, targets_AJ[..., None]).squeeze(-1)
    else:
        teacher_p = teacher_logp_AJV.exp()
        term = torch.where(teacher_p > 0, teacher_p * (teacher_logp_AJV - logp), 0.0).sum(-1)
    return (term * weights_AJ).sum()
