"""The gated MLP in training: down(silu(gate(x)) · up(x)), and what its backward keeps.

Only x and the joint product of gate and up are kept. The backward makes silu(gate) · up again where it makes its
gradient, in one pass over memory; kept, it would be the largest tensor of a step (4 GB in five layers of an 8B
target's drafter). The pass is an operator of its own, so that torch.compile keeps nothing in its stead.

Axes: N tokens, H hidden, I inner.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.fp8 import project, project_back

COLUMNS = 2048


@torch.library.custom_op("dflash::gated_backward", mutates_args=())
def gated_backward(gate_up: Tensor, d_product: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) · up [N, I] again, and the gradient of [gate | up] [N, 2I] from that of the product."""
    if gate_up.is_cuda:
        import triton

        from dflash.kernels.gated import backward_kernel

        rows, inner = d_product.shape
        product, d_gate_up = torch.empty_like(d_product), torch.empty_like(gate_up)
        grid = (rows, triton.cdiv(inner, COLUMNS))
        backward_kernel[grid](gate_up, d_product, product, d_gate_up, inner, COLUMNS=COLUMNS, num_warps=8)
        return product, d_gate_up
    gate, up = gate_up.chunk(2, dim=-1)
    silu = F.silu(gate)
    d_gate = torch.ops.aten.silu_backward(d_product * up, gate)
    return silu * up, torch.cat((d_gate, d_product * silu), dim=-1)


@gated_backward.register_fake
def _(gate_up: Tensor, d_product: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(d_product), torch.empty_like(gate_up)


class GatedMLP(torch.autograd.Function):
    """`joined` is [gate | up], [2I, H], of whose halves `gate` and `up` are the parameters."""

    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, joined: Tensor, gate: Tensor, up: Tensor, down: Tensor, fp8: bool) -> Tensor:
        gate_up = project(x_NH, joined, fp8)
        ctx.save_for_backward(x_NH, joined, gate_up, down)
        ctx.fp8 = fp8
        left, right = gate_up.chunk(2, dim=-1)
        return project(F.silu(left) * right, down, fp8)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x_NH, joined, gate_up, down = ctx.saved_tensors
        product, d_gate_up = gated_backward(gate_up, project_back(d_out, down, ctx.fp8))
        d_gate, d_up = (d_gate_up.T @ x_NH).chunk(2)
        return project_back(d_gate_up, joined, ctx.fp8), None, d_gate, d_up, d_out.T @ product, None
