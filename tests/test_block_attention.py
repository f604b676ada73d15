"""The kernels of block attention, in Triton's interpreter, equal attention row by row; and so do their gradients."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dflash.attention import NOWHERE, attend_rows, row_spans
from dflash.block_attention import STEP, attend_ranges, block_attention, seen_by

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/test_gpu.py runs the compiled kernels")

STALE = 9  # context tokens behind the rows


def ranges(rows: int, ceiling: int, live: int, dummies: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random anchors (the first of all is always among them: its block sees nothing else); flat, low, high."""
    flat = torch.cat((torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(rows * ceiling - 1)[: live - 1])).sort()[0]
    nowhere = torch.full((dummies,), NOWHERE)
    return flat, torch.cat((flat // ceiling * ceiling, nowhere)), torch.cat((flat, nowhere))


def states(tokens: int, context: int, heads: int, groups: int, dim: int) -> Iterator[Tensor]:
    """q, k, v and the block's own k and v as projections lay them: v is a part of something wider. NaN is behind."""
    wide_S, wide_N = torch.randn(context, 2 * groups * dim), torch.randn(tokens, (heads + 2 * groups) * dim)
    k, v = torch.randn(context, groups, dim), wide_S[:, groups * dim :].unflatten(1, (groups, dim))
    k[-STALE:], wide_S[-STALE:] = float("nan"), float("nan")
    yield from (torch.randn(tokens, heads, dim), k, v, torch.randn(tokens, groups, dim))
    yield wide_N[:, -groups * dim :].unflatten(1, (groups, dim))


@pytest.mark.parametrize(
    ("rows", "ceiling", "block", "live", "heads", "groups", "dim", "window"),
    [
        (3, 100, 8, 19, 6, 2, 16, None),
        (3, 100, 8, 19, 6, 2, 16, 21),
        (1, 300, 16, 20, 4, 1, 32, None),  # a range of several tiles, all but its end without a mask
        (5, 40, 5, 30, 3, 3, 20, None),  # nothing is a power of two
        (4, 40, 16, 12, 9, 3, 64, None),  # the heads of a 135M target
        (2, 90, 32, 7, 4, 1, 16, 40),
        (2, 90, 4, 33, 4, 4, 16, 8),
        (2, 90, 16, 9, 16, 2, 16, None),  # more heads to a key head than fit into a program's rows
        (2, 90, 32, 5, 6, 1, 16, 50),
    ],
)
def test_the_kernels_equal_attention_row_by_row(
    rows: int, ceiling: int, block: int, live: int, heads: int, groups: int, dim: int, window: int | None
) -> None:
    torch.manual_seed(live)
    flat, low, high = ranges(rows, ceiling, live, dummies=5)
    context, real = rows * ceiling + STALE, live * block
    inputs = [each.requires_grad_() for each in states(len(low) * block, context, heads, groups, dim)]
    sliding = {} if window is None else {"window": window}
    out = attend_ranges(low, high, context, block, window)(*inputs, **sliding)
    assert out.isfinite().all()  # dummies too
    d_out = torch.randn(out.shape)
    d_out[real:] = 0.0
    gradients = torch.autograd.grad(out, inputs, d_out)

    q, k, v, own_k, own_v = (each.detach().double().requires_grad_() for each in inputs)
    blocks = q[:real], k[:-STALE], v[:-STALE], own_k[:real], own_v[:real]
    wanted = attend_rows(row_spans(flat, rows, ceiling), flat % ceiling, block)(*blocks, **sliding)
    torch.testing.assert_close(out[:real].double(), wanted, atol=2e-5, rtol=0)
    references = torch.autograd.grad(wanted, (q, k, v, own_k, own_v), d_out[:real].double())
    for name, gradient, reference in zip(("q", "k", "v", "own k", "own v"), gradients, references, strict=True):
        torch.testing.assert_close(gradient.double(), reference, atol=2e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_half_precision_is_rounded_where_attention_kernels_round() -> None:
    """In fp16, since the interpreter multiplies no bf16."""
    torch.manual_seed(0)
    _, low, high = ranges(2, 60, 9, dummies=0)
    inputs = [each.nan_to_num() for each in states(9 * 16, 120 + STALE, 6, 2, 32)]
    narrow = [each.half() for each in inputs]
    attend = attend_ranges(low, high, 120 + STALE, 16)
    torch.testing.assert_close(attend(*narrow).float(), attend(*(each.float() for each in narrow)), atol=2e-3, rtol=0)


@pytest.mark.parametrize("window", [None, 24])
def test_no_anchor_outside_of_its_range_sees_a_tile(window: int | None) -> None:
    torch.manual_seed(1)
    flat, low, high = ranges(3, 200, 40, dummies=8)
    begin, end = seen_by(low, high, 600, window)
    slots = torch.arange(8)
    for tile, (first, last) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        keys = torch.arange(tile * STEP, min(600, (tile + 1) * STEP))
        seen = (keys >= low[:, None]) & (keys < high[:, None])
        if window is not None:
            seen = seen & (keys[None, None] > high[:, None, None] + slots[:, None] - window).any(1)
        anchors = seen.any(1).nonzero().flatten().tolist()
        assert not anchors or (first <= anchors[0] and anchors[-1] < last)
        assert last <= len(flat), "a dummy is never visited"


def test_the_operator_is_registered_as_torch_wants_it() -> None:
    torch.manual_seed(2)
    _, low, high = ranges(2, 40, 6, dummies=2)
    inputs = [each.nan_to_num().requires_grad_() for each in states(8 * 4, 80 + STALE, 2, 1, 16)]
    torch.library.opcheck(block_attention, (*inputs, low, high, *seen_by(low, high, 80 + STALE, None), 4, 0))
