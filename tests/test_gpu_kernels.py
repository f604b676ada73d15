"""On a CUDA GPU: the compiled kernels of block attention and of the gated MLP against torch in fp32."""

import pytest
import torch
from torch import Tensor

from dflash.attention import NOWHERE, attend_rows, row_spans
from dflash.block_attention import attend_ranges
from dflash.fp8 import narrowed, product
from dflash.gated import gated_backward
from dflash.kernels.head import gradient_in_place, narrow_gradient, row_statistics
from dflash.train.narrow import HOPPER

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SHAPES = [  # rows, ceiling, block, live anchors, heads, groups, dim, window
    (3, 770, 16, 200, 8, 2, 128, None),
    (3, 770, 32, 90, 8, 2, 128, None),
    (8, 448, 16, 300, 9, 3, 64, None),
    (8, 448, 16, 300, 9, 3, 64, 100),
    (2, 300, 8, 90, 4, 4, 80, None),
    (2, 300, 5, 90, 4, 1, 32, 33),
]


def results(attend, inputs: list[Tensor], d_out: Tensor, window: int | None) -> list[Tensor]:  # noqa: ANN001
    leaves = [each.detach().requires_grad_() for each in inputs]
    out = attend(*leaves, **({} if window is None else {"window": window}))
    return [out, *torch.autograd.grad(out, leaves, d_out.to(out.dtype))]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1.5e-2)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_block_attention_equals_attention_row_by_row(
    shape: tuple[int, int, int, int, int, int, int, int | None], dtype: torch.dtype, tolerance: float
) -> None:
    """Each result within `tolerance` of its own largest value; the same bits when it runs again."""
    rows, ceiling, block, live, heads, groups, dim, window = shape
    generator = torch.Generator("cuda").manual_seed(live)
    flat = torch.randperm(rows * ceiling, generator=generator, device="cuda")[:live].sort()[0]
    nowhere = torch.full((24,), NOWHERE, device="cuda")
    low, high = torch.cat((flat // ceiling * ceiling, nowhere)), torch.cat((flat, nowhere))
    context, tokens = rows * ceiling + 40, len(low) * block
    sizes = [(tokens, heads), (context, groups), (context, groups), (tokens, groups), (tokens, groups)]
    inputs = [torch.randn(*size, dim, generator=generator, device="cuda").to(dtype) for size in sizes]
    for each in inputs[1:3]:
        each[rows * ceiling :] = float("nan")
    d_out = torch.randn(tokens, heads, dim, generator=generator, device="cuda").to(dtype)
    d_out[live * block :] = 0
    kernels = attend_ranges(low, high, context, block, window)
    ours, again = (results(kernels, inputs, d_out, window) for _ in range(2))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(ours, again, strict=True))

    cut = [live * block, rows * ceiling, rows * ceiling, live * block, live * block]
    exact = [each[:end].double() for each, end in zip(inputs, cut, strict=True)]
    plain = attend_rows(row_spans(flat, rows, ceiling), flat % ceiling, block)
    wanted = results(plain, exact, d_out[: live * block], window)
    for mine, theirs in zip(ours, wanted, strict=True):
        mine = mine[: len(theirs)].double()
        assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_the_gated_gradient_equals_torch(dtype: torch.dtype, tolerance: float) -> None:
    gate_up, d_product = (torch.randn(700, size, device="cuda").to(dtype) for size in (2 * 3000, 3000))
    ours, wanted = gated_backward(gate_up, d_product), gated_backward(gate_up.cpu().double(), d_product.cpu().double())
    for mine, theirs in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine.cpu().double(), theirs, atol=tolerance, rtol=tolerance)


def test_products_and_the_heads_gradient_in_e4m3() -> None:
    if torch.cuda.get_device_capability() < HOPPER:
        pytest.skip("needs a Hopper GPU")
    a, b = (torch.randn(rows, 512, device="cuda").bfloat16() for rows in (300, 1008))
    for fast in (False, True):
        out, wanted = product(narrowed(a), narrowed(b), fast).float(), narrowed(a).wide() @ narrowed(b).wide().T
        assert (out - wanted).norm() <= 5e-3 * wanted.norm()
    logits, targets = (torch.randn(64, 5000, device="cuda") * 3).bfloat16(), torch.randint(5000, (64,), device="cuda")
    lse, picked, highest = row_statistics(logits, targets, 0.7, 9.0)
    weights = torch.rand(64, device="cuda")
    weights[5], logits[5] = 0.0, float("nan")
    whole, wanted = logits.float(), (targets, lse, weights, 0.7, 9.0)
    narrow = narrow_gradient(logits, picked, highest, *wanted)
    gradient_in_place(whole, *wanted)
    error = (narrow.wide() - whole).abs()
    assert (error <= torch.maximum(whole.abs() * 2**-4, narrow.scale * 2**-9) * 1.01 + 1e-12).all()
