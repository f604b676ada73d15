"""Muon: momentum whose every matrix is made orthogonal before it is applied (Jordan et al. 2024; Liu et al. 2025).

torch.optim.Muon reads its learning rate on the host, so a captured update would repeat the first step's for ever, and
it cannot skip a step; here both are device scalars. The step is scaled by 0.2 · √(longer side), which gives it the
size of AdamW's, so one learning rate serves both. Five Newton-Schulz iterations a matrix cost about 0.1 s on an H200
for an 8B target's drafter.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MOMENTUM = 0.95
ITERATIONS = 5
CUBIC = (3.4445, -4.7750, 2.0315)  # of the odd quintic a·x + b·x³ + c·x⁵ that drives singular values towards 1


@dataclass(frozen=True)
class Matrix:
    """One parameter's views, fp32 [rows, columns]."""

    master: Tensor
    grad: Tensor
    momentum: Tensor


def orthogonal(update: Tensor) -> Tensor:
    """About U·Vᵀ of update = U·Σ·Vᵀ, by products alone, in bf16."""
    a, b, c = CUBIC
    tall = update.shape[0] > update.shape[1]
    x = (update.mT if tall else update).bfloat16()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def muon_step(matrices: list[Matrix], lr: Tensor, divisor: Tensor, skipped: Tensor, weight_decay: float) -> None:
    """Apply accumulated gradients divided by `divisor`; where `skipped` is 1 nothing changes, NaN gradients or not."""
    kept = 1 - skipped
    for matrix in matrices:
        gradient = torch.where(skipped > 0, 0.0, matrix.grad / divisor)
        matrix.momentum.lerp_(gradient, (1 - MOMENTUM) * kept)
        direction = orthogonal(gradient.lerp_(matrix.momentum, MOMENTUM))
        size = 0.2 * math.sqrt(max(direction.shape))
        matrix.master.mul_(1 - lr * weight_decay * kept)
        matrix.master.sub_(direction * (lr * size * kept))
