"""Attention of blocks to their context as Triton kernels: every row of a tile sees the same keys.

A block sees one range of the flat context, [low, high), and itself (dflash/attention.py). So a program takes a few
neighbouring anchors and all query heads of one key head as its rows: 2 blocks of 16 tokens × 4 heads are 128 rows that
walk one range of keys together. Only the ends of the range need a mask, nothing is made of queries × keys, and one
compilation serves every bucket. Keys and values of context and blocks stay where their projections wrote them.

The backward has three kernels. Blocks sum what goes to their own keys, which no other block sees; rows walk their keys
again for the gradient of queries; keys walk the rows that see them, a contiguous range of anchors since anchors
ascend. Sums have a fixed order, without atomics: the same bits every time.

Softmax in fp32; probabilities and their gradients are rounded to the inputs' dtype before a product, as in every
attention kernel (FlashAttention 2, arXiv 2307.08691, section 3).

Axes: N = A·B block tokens, S context tokens, Q query heads, G key heads, X = Q / G, D head dimension.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from dflash.attention import NOWHERE
from dflash.drafter import Attend
from dflash.kernels.attention import forward_kernel, keys_kernel, own_kernel, rows_kernel

LOG2E = 1.4426950408889634


STEP = 32  # context tokens for which `seen_by` is made; a kernel's tile of keys is a multiple


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts its work: rows at most, keys at once, and Triton's warps and stages."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """Of the kernels that walk a context."""

    forward: Tile
    rows: Tile
    keys: Tile


OWN = Tile(64, 0, 4, 1)  # of the one that does not


#: Chosen so that nothing spills (tests/test_block_attention.py compiles them for a Hopper and for a consumer card).
ROOMY = Tiles(forward=Tile(128, 64, 8, 3), rows=Tile(128, 64, 8, 2), keys=Tile(64, 64, 8, 2))
TIGHT = Tiles(forward=Tile(64, 32, 4, 2), rows=Tile(64, 32, 4, 2), keys=Tile(64, 32, 4, 2))
WIDE = Tiles(forward=Tile(32, 32, 4, 2), rows=Tile(32, 32, 4, 1), keys=Tile(32, 32, 4, 1))
ROOM = 160_000  # bytes of shared memory a program, which ROOMY needs; data centres' cards have them


def tiles(dim: int, shared: int) -> Tiles:
    """For heads of `dim` on a card whose programs may have `shared` bytes of shared memory."""
    if dim > 128:
        return WIDE
    return ROOMY if shared >= ROOM else TIGHT


def tiles_for(q_NQD: Tensor) -> Tiles:
    if not q_NQD.is_cuda:
        return ROOMY  # to Triton's interpreter a large tile costs what a small one does
    card = torch.cuda.get_device_properties(q_NQD.device)
    return tiles(q_NQD.shape[2], getattr(card, "shared_memory_per_block_optin", card.shared_memory_per_block))


def power(value: int) -> int:
    """The next power of two, at least what a product on tensor cores takes."""
    return max(16, triton.next_power_of_2(value))


def constants(tile: Tile, block: int, share: int, dim: int, window: int, dtype: torch.dtype) -> dict[str, Any]:
    """What a kernel is compiled for: several blocks if they fit into its rows, else some heads of one at a time."""
    heads = max(each for each in range(1, share + 1) if share % each == 0 and (each == 1 or block * each <= tile.rows))
    count = 1 << max(0, (tile.rows // (block * heads)).bit_length() - 1) if heads == share else 1
    return {
        "BLOCK": block, "SHARE": share, "HEADS": heads, "PARTS": share // heads, "COUNT": count,
        "ROWS": power(count * block * heads), "KEYS": tile.keys, "DIM": dim, "WIDTH": power(dim), "SLIDES": window > 0,
        "NOWHERE": NOWHERE, "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def seen_by(low_A: Tensor, high_A: Tensor, context: int, window: int | None) -> tuple[Tensor, Tensor]:
    """For each STEP of context tokens the range of anchors [begin, end) outside of which none sees them; both ascend.

    `low_A` and `high_A` ascend, dummies at NOWHERE.
    """
    start_T = torch.arange(0, context, STEP, device=low_A.device)[:, None]
    begin = (high_A <= start_T).sum(1, dtype=torch.int32)
    near = low_A < start_T + STEP
    if window is not None:
        near = near & (high_A < start_T + STEP - 1 + window)
    return begin, (near & (high_A < NOWHERE)).sum(1, dtype=torch.int32)


@torch.library.custom_op("dflash::block_attention", mutates_args=())
def block_attention(
    q_NQD: Tensor, k_SGD: Tensor, v_SGD: Tensor, block_k: Tensor, block_v: Tensor,
    low_A: Tensor, high_A: Tensor, begin_T: Tensor, end_T: Tensor, block: int, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention's output [N, Q, D] and its log-sum-exp in base 2, fp32 [N, Q].

    Args:
        q_NQD, k_SGD, v_SGD, block_k, block_v: one dtype; heads of a token lie behind each other, tokens at any stride.
        low_A, high_A: integers, ascending; the flat context that a block sees; NOWHERE for a dummy.
        begin_T, end_T: `seen_by` of these; for the backward.
        window: 0 where the layer is full.
    """
    (tokens, heads, dim), groups = q_NQD.shape, k_SGD.shape[1]
    anchors, share = tokens // block, heads // groups
    out = torch.empty((tokens, heads, dim), dtype=q_NQD.dtype, device=q_NQD.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q_NQD.device)
    compiled = constants(tiles_for(q_NQD).forward, block, share, dim, window, q_NQD.dtype)
    forward_kernel[(triton.cdiv(anchors, compiled["COUNT"]), groups, compiled["PARTS"])](
        q_NQD, k_SGD, v_SGD, block_k, block_v, low_A, high_A, out, lse,
        anchors, heads, *strides(q_NQD, k_SGD, v_SGD, block_k, block_v), dim**-0.5 * LOG2E, window,
        OWN=power(compiled["COUNT"] * block), **compiled,
    )  # fmt: skip
    return out, lse


def strides(*tensors: Tensor) -> list[int]:
    """Of tokens. The kernels take a head's numbers to lie together, and heads behind each other."""
    for each in tensors:
        assert each.stride()[1:] == (each.shape[2], 1), "heads of a token are contiguous"
    return [each.stride(0) for each in tensors]


@block_attention.register_fake
def _(
    q_NQD: Tensor, k_SGD: Tensor, v_SGD: Tensor, block_k: Tensor, block_v: Tensor,
    low_A: Tensor, high_A: Tensor, begin_T: Tensor, end_T: Tensor, block: int, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return q_NQD.new_empty(q_NQD.shape), q_NQD.new_empty(q_NQD.shape[:2], dtype=torch.float32)


@torch.library.custom_op("dflash::block_attention_backward", mutates_args=())
def block_attention_backward(
    d_out: Tensor, q_NQD: Tensor, k_SGD: Tensor, v_SGD: Tensor, block_k: Tensor, block_v: Tensor,
    low_A: Tensor, high_A: Tensor, begin_T: Tensor, end_T: Tensor, out: Tensor, lse: Tensor, block: int, window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and the block's own k and v, each contiguous in its input's dtype."""
    (tokens, heads, dim), (context, groups, _) = q_NQD.shape, k_SGD.shape
    anchors, share = tokens // block, heads // groups
    d_out, delta = d_out.contiguous(), torch.empty_like(lse)
    dq, dk, dv, d_own_k, d_own_v = (
        torch.empty(each.shape, dtype=each.dtype, device=each.device)
        for each in (q_NQD, k_SGD, v_SGD, block_k, block_v)
    )
    scales, chosen = (dim**-0.5 * LOG2E, dim**-0.5), tiles_for(q_NQD)
    compiled = constants(OWN, block, share, dim, window, q_NQD.dtype)
    own_kernel[(triton.cdiv(anchors, compiled["COUNT"]), groups)](
        q_NQD, block_k, block_v, out, lse, d_out, delta, d_own_k, d_own_v,
        anchors, heads, *strides(q_NQD, block_k, block_v), *scales,
        OWN=power(compiled["COUNT"] * block), **compiled,
    )  # fmt: skip
    compiled = constants(chosen.rows, block, share, dim, window, q_NQD.dtype)
    rows_kernel[(triton.cdiv(anchors, compiled["COUNT"]), groups, compiled["PARTS"])](
        q_NQD, k_SGD, v_SGD, block_k, block_v, low_A, high_A, lse, d_out, delta, dq,
        anchors, heads, *strides(q_NQD, k_SGD, v_SGD, block_k, block_v), *scales, window,
        OWN=power(compiled["COUNT"] * block), **compiled,
    )  # fmt: skip
    compiled = constants(chosen.keys, block, share, dim, window, q_NQD.dtype)
    keys_kernel[(triton.cdiv(context, chosen.keys.keys), groups)](
        q_NQD, k_SGD, v_SGD, low_A, high_A, begin_T, end_T, lse, d_out, delta, dk, dv,
        anchors, context, heads, *strides(q_NQD, k_SGD, v_SGD), *scales, window, STEP=STEP, **compiled,
    )  # fmt: skip
    return dq, dk, dv, d_own_k, d_own_v


@block_attention_backward.register_fake
def _(
    d_out: Tensor, q_NQD: Tensor, k_SGD: Tensor, v_SGD: Tensor, block_k: Tensor, block_v: Tensor,
    low_A: Tensor, high_A: Tensor, begin_T: Tensor, end_T: Tensor, out: Tensor, lse: Tensor, block: int, window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, own_k, own_v = (each.new_empty(each.shape) for each in (q_NQD, k_SGD, v_SGD, block_k, block_v))
    return q, k, v, own_k, own_v


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.block, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
    gradients = block_attention_backward(d_out, *ctx.saved_tensors, ctx.block, ctx.window)
    return *gradients, None, None, None, None, None, None


block_attention.register_autograd(_backward, setup_context=_keep)


def attend_ranges(low_A: Tensor, high_A: Tensor, context: int, block: int, window: int | None = None) -> Attend:
    """Attention of blocks that see [low, high) of `context` tokens; `window` is that of the sliding layers."""
    wide = seen_by(low_A, high_A, context, None)
    narrow = wide if window is None else seen_by(low_A, high_A, context, window)

    def attend(
        q_NQD: Tensor, k_SGD: Tensor, v_SGD: Tensor, block_k: Tensor, block_v: Tensor, window: int | None = None
    ) -> Tensor:
        seen = wide if window is None else narrow
        return block_attention(q_NQD, k_SGD, v_SGD, block_k, block_v, low_A, high_A, *seen, block, window or 0)[0]

    return attend
