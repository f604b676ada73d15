"""What a block may see, and how it is computed.

The rule (DFlash paper, section 4; SpecForge #455 for what happens without it): a block token sees the context of its
own row at positions STRICTLY before its block's anchor, and every token of its own block; nothing else. The anchor's
own state does not exist yet when a server drafts, so a drafter that saw it in training would be worthless.

A sliding layer with window W hides more, as servers run such layers (SGLang and vLLM treat `sliding_attention` as
causal decoder attention): the query at position p sees position k only while p - W < k <= p, in the context and in its
own block.

`attend_rows` loops over rows and sees only a row's context and its own blocks (the CPU's way, also without capture).
A dense mask over everything exists in the tests only.

Axes: S = R·C context tokens of R rows, N = A·B block tokens, Q query heads, G key/value heads, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.drafter import Attend

#: where the range of context of a dummy block begins and ends: behind every context, it sees itself alone
NOWHERE = 1 << 30
SCORES_AT_ONCE = 1 << 25  # fp32 scores of one chunk of anchors: 128 MiB


@dataclass(frozen=True)
class RowSpan:
    """The anchors of one row: context tokens [start, start + length) and anchors [first, last) of the batch."""

    start: int
    length: int
    first: int
    last: int


def row_spans(anchors_A: Tensor, rows: int, ceiling: int) -> list[RowSpan]:
    """Spans of flat, sorted anchors. Context is cut at a row's last anchor: nothing later is visible to any block.

    Args:
        anchors_A: int64 [A] = row · ceiling + position, ascending.
    """
    flat = anchors_A.tolist()
    spans = []
    first = 0
    for row in range(rows):
        last = first
        while last < len(flat) and flat[last] < (row + 1) * ceiling:
            last += 1
        if last > first:
            spans.append(RowSpan(row * ceiling, flat[last - 1] - row * ceiling, first, last))
        first = last
    return spans


def attend_rows(spans: Sequence[RowSpan], positions_A: Tensor, block_size: int) -> Attend:
    """Attention row by row; `positions_A` are the anchors' positions inside their rows."""

    def attend(
        q_NQD: Tensor, k_SGD: Tensor, v_SGD: Tensor, block_k: Tensor, block_v: Tensor, window: int | None = None
    ) -> Tensor:
        pieces = []
        for span in spans:
            context = slice(span.start, span.start + span.length)
            k_LGD, v_LGD = k_SGD[context], v_SGD[context]
            per_anchor = max(1, q_NQD.shape[1] * block_size * max(span.length, 1))
            step = max(1, SCORES_AT_ONCE // per_anchor)
            for first in range(span.first, span.last, step):
                last = min(first + step, span.last)
                block = slice(first * block_size, last * block_size)
                pieces.append(
                    attend_blocks(
                        q_NQD[block],
                        k_LGD,
                        v_LGD,
                        block_k[block],
                        block_v[block],
                        positions_A[first:last],
                        block_size,
                        window,
                    )
                )
        return torch.cat(pieces)

    return attend


def attend_blocks(
    q_NQD: Tensor,  # queries of `a` blocks of one row, N = a·B
    k_LGD: Tensor,  # the row's context keys, L tokens from position 0
    v_LGD: Tensor,
    block_k: Tensor,  # [N, G, D] the blocks' own keys
    block_v: Tensor,
    positions_A: Tensor,  # [a] anchor positions in the row
    block_size: int,
    window: int | None = None,
) -> Tensor:
    """Softmax over [context before the anchor | own block], as two products; returns [N, Q, D]."""
    tokens, heads, dim = q_NQD.shape
    groups, length, anchors = k_LGD.shape[1], k_LGD.shape[0], tokens // block_size
    q_GxABD = q_NQD.view(anchors, block_size, groups, heads // groups, dim).permute(2, 3, 0, 1, 4) * dim**-0.5
    own_shape = (anchors, block_size, groups, 1, dim)
    k_own = block_k.reshape(own_shape).permute(2, 3, 0, 1, 4)
    v_own = block_v.reshape(own_shape).permute(2, 3, 0, 1, 4)
    wide = torch.promote_types(q_NQD.dtype, torch.float32)  # softmax in at least fp32, then back
    s_own = (q_GxABD @ k_own.transpose(-1, -2)).to(wide)  # [G, x, a, B, B]
    q_GMD = q_GxABD.reshape(groups, -1, dim)  # one product a key head: M = x·a·B
    s_context = (q_GMD @ k_LGD.permute(1, 2, 0)).to(wide).view(*s_own.shape[:-1], length)  # [G, x, a, B, L]
    visible = torch.arange(length, device=q_NQD.device) < positions_A[:, None, None]  # [a, 1, L]
    if window is not None:
        slots = torch.arange(block_size, device=q_NQD.device)
        oldest = positions_A[:, None] + slots - window  # [a, B], just out of sight
        visible = visible & (torch.arange(length, device=q_NQD.device) > oldest[..., None])
        s_own = s_own.masked_fill(slots > slots[:, None], float("-inf"))
    s_context = s_context.masked_fill(~visible, float("-inf"))
    weights = torch.cat((s_context, s_own), dim=-1).softmax(dim=-1).to(q_NQD.dtype)
    w_context, w_own = weights.split((length, block_size), dim=-1)
    out = w_own @ v_own
    out = out + (w_context.reshape(groups, -1, length) @ v_LGD.transpose(0, 1)).view(out.shape)
    return out.permute(2, 3, 0, 1, 4).reshape(tokens, heads, dim)
