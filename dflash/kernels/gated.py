"""The gradient of silu(gate) · up in one pass; gate and up lie side by side in a row, as their joint product has them.

One program takes COLUMNS numbers of a row. Arithmetic is fp32 whatever the dtype.
"""

import triton
import triton.language as tl


@triton.jit
def backward_kernel(
    gate_up,  # [N, 2I]
    d_product,  # [N, I]
    product,  # [N, I], out: silu(gate) · up once more
    d_gate_up,  # [N, 2I], out
    inner,  # I
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < inner
    gate = tl.load(gate_up + row * 2 * inner + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + column, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(d_product + row * inner + column, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * share
    d_gate = d * up * (share + silu * (1.0 - share))
    kind = product.dtype.element_ty
    tl.store(product + row * inner + column, (silu * up).to(kind), mask=inside)
    tl.store(d_gate_up + row * 2 * inner + column, d_gate.to(kind), mask=inside)
    tl.store(d_gate_up + row * 2 * inner + inner + column, (d * silu).to(kind), mask=inside)
