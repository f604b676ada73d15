"""Two Triton kernels for the frozen head's rows on a GPU: statistics of a row of logits, and its gradient in place.

A row of logits is read once for its log-sum-exp and once for the gradient, which overwrites it; in plain torch the same
takes six passes over a matrix of slots × vocabulary. Arithmetic is fp32 whatever the logits' dtype. One program a row,
no atomics, so results do not depend on scheduling.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash.fp8 import E4M3, LARGEST, TINY, Narrow

COLUMNS = 4096  # of a row at once


@triton.jit
def _squash(x, scale, cap, HAS_CAP: tl.constexpr):
    """cap · tanh(scale · x / cap), or scale · x."""
    x = x * scale
    if HAS_CAP:
        # tanh by exp of a non-positive number, which cannot overflow
        z = tl.exp(-2.0 * tl.abs(x) / cap)
        t = (1.0 - z) / (1.0 + z)
        x = cap * tl.where(x < 0, -t, t)
    return x


@triton.jit
def _rows_kernel(
    logits,  # [n, V]
    targets,  # int64 [n]
    lse,  # fp32 [n], out
    picked,  # fp32 [n], out: the target's logit
    highest,  # fp32 [n], out: the largest logit
    columns,  # V
    scale,
    cap,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * columns
    offsets = tl.arange(0, BLOCK)
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        inside = first + offsets < columns
        x = tl.load(start + first + offsets, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(inside, _squash(x, scale, cap, HAS_CAP), float("-inf"))
        higher = tl.maximum(peak, x)
        # a lane that has seen nothing yet keeps a total of zero
        old = tl.where(peak == float("-inf"), 0.0, total * tl.exp(peak - higher))
        total = old + tl.where(x == float("-inf"), 0.0, tl.exp(x - higher))
        peak = higher
    top = tl.max(peak, axis=0)
    summed = tl.sum(tl.where(peak == float("-inf"), 0.0, total * tl.exp(peak - top)), axis=0)
    target = tl.load(targets + row)
    chosen = _squash(tl.load(start + target).to(tl.float32), scale, cap, HAS_CAP)
    tl.store(lse + row, top + tl.log(summed))
    tl.store(picked + row, chosen)
    tl.store(highest + row, top)


@triton.jit
def _gradient_kernel(
    logits,  # [n, V]
    out,  # [n, V], the gradient times `grow`; may be the logits' memory
    grow,  # fp32 [n], where NARROW
    targets,  # int64 [n]
    lse,  # fp32 [n]
    weights,  # fp32 [n]
    columns,
    scale,
    cap,
    HAS_CAP: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * columns
    target = tl.load(targets + row)
    grown = tl.load(grow + row) if NARROW else 1.0
    normaliser = tl.load(lse + row)
    weight = tl.load(weights + row)
    offsets = tl.arange(0, BLOCK)
    for first in range(0, columns, BLOCK):
        column = first + offsets
        inside = column < columns
        x = _squash(tl.load(start + column, mask=inside, other=0.0).to(tl.float32), scale, cap, HAS_CAP)
        d = tl.exp(x - normaliser) - tl.where(column == target, 1.0, 0.0)
        if HAS_CAP:
            d = d * (1.0 - (x / cap) * (x / cap))
        # where(), not a product alone: a row that does not count may hold anything, and 0 · inf is NaN
        d = tl.where(weight == 0.0, 0.0, d * weight * scale)
        if NARROW:
            d = tl.minimum(tl.maximum(d * grown, -448.0), 448.0)
        tl.store(out + row * columns + column, d.to(out.dtype.element_ty), mask=inside)


def row_statistics(
    logits: Tensor, targets: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exp, the target's logit and the highest logit, fp32 [n] each, of raw products [n, V] (contiguous)."""
    out = torch.empty((3, logits.shape[0]), dtype=torch.float32, device=logits.device)
    _rows_kernel[(logits.shape[0],)](
        logits, targets, out[0], out[1], out[2], logits.shape[1], scale, softcap or 1.0,
        HAS_CAP=softcap is not None, BLOCK=COLUMNS, num_warps=8,
    )  # fmt: skip
    return out[0], out[1], out[2]


def gradient_in_place(
    logits: Tensor, targets: Tensor, lse: Tensor, weights: Tensor, scale: float, softcap: float | None
) -> None:
    """Overwrite raw products [n, V] by the gradient of Σ weight · cross entropy with respect to them."""
    _gradient_kernel[(logits.shape[0],)](
        logits, logits, lse, targets, lse, weights, logits.shape[1], scale, softcap or 1.0,
        HAS_CAP=softcap is not None, NARROW=False, BLOCK=COLUMNS, num_warps=8,
    )  # fmt: skip


def narrow_gradient(
    logits: Tensor, picked: Tensor, highest: Tensor, targets: Tensor, lse: Tensor, weights: Tensor, scale: float,
    softcap: float | None,
) -> Narrow:  # fmt: skip
    """The same gradient in e4m3, without a pass that looks for each row's largest magnitude.

    That is |weight · scale| times the larger of 1 - p(target) and, where another token has the highest logit, its p; a
    softcap's derivative only shrinks it.
    """
    others = torch.where(picked < highest, torch.exp(highest - lse), 0.0)
    largest = (weights * scale).abs() * torch.maximum(others, -torch.expm1(picked - lse))
    largest = torch.where(weights == 0.0, 0.0, largest)  # such a row may hold anything
    unit = (largest / LARGEST).clamp(min=TINY)
    values = torch.empty(logits.shape, dtype=E4M3, device=logits.device)
    _gradient_kernel[(logits.shape[0],)](
        logits, values, 1 / unit, targets, lse, weights, logits.shape[1], scale, softcap or 1.0,
        HAS_CAP=softcap is not None, NARROW=True, BLOCK=COLUMNS, num_warps=8,
    )  # fmt: skip
    return Narrow(values, unit[:, None])
