"""Products of e4m3 numbers with a scale for each row of both operands (train --precision fp8; Hopper and newer).

A row is divided by its largest magnitude / 448 and rounded to e4m3, which has three bits of mantissa; the product adds
up in fp32 and is scaled back. Rows are what a product sums along: an operand that is summed along its other side is
narrowed a second time, transposed. Everything is quantised on the fly, so that no state has to be kept, except the
frozen head.

Forward and gradients of inputs run in e4m3. Gradients of weights stay in bf16: they sum over tokens, where one row's
scale would have to serve many tokens. Masters, norms, attention, softmax and loss are as ever.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
TINY = 1e-30  # a row of zeros stays one
EVEN = 16  # the products take sizes that are multiples of this


@dataclass(frozen=True)
class Narrow:
    """[R, K] as e4m3 `values` times `scale`, fp32 [R, 1]."""

    values: Tensor
    scale: Tensor

    def wide(self) -> Tensor:
        """fp32 [R, K]."""
        return self.values.float() * self.scale


def narrowed(x_RK: Tensor) -> Narrow:
    """Each row by its own scale. A row with NaN or infinity gives NaN."""
    scale = (x_RK.abs().amax(-1, keepdim=True).float() / LARGEST).clamp(min=TINY)
    values = (x_RK.float() / scale).clamp(-LARGEST, LARGEST)
    return Narrow(values.to(E4M3).contiguous(), scale.contiguous())


def product(a_RK: Narrow, b_TK: Narrow, fast: bool = False) -> Tensor:
    """a bᵀ, bf16 [R, T]. `fast` adds up with fewer bits, which forward products bear."""
    b_KT, scale = b_TK.values.t(), b_TK.scale.t()
    return torch._scaled_mm(
        a_RK.values, b_KT, scale_a=a_RK.scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def project(x: Tensor, weight: Tensor, fp8: bool) -> Tensor:
    """x Wᵀ."""
    return product(narrowed(x), narrowed(weight), fast=True) if fp8 else x @ weight.T


def project_back(d: Tensor, weight: Tensor, fp8: bool) -> Tensor:
    """The gradient of x from that of x Wᵀ."""
    return product(narrowed(d), narrowed(weight.T)) if fp8 else d @ weight
