"""The GPU's attention: one call of torch's flex attention under a block mask computed from the anchors.

Keys are [context | all blocks]. A block's visible context is a range [low, high) of the flat context: from its row's
first token to its anchor. Since anchors ascend, a tile of 128 queries belongs to a few neighbouring anchors, and which
128×128 tiles are empty, partial or full follows from their ranges by a handful of tiny operations with static shapes:
no mask of queries × keys is ever made, and nothing is read back, so it can be captured.

Axes: N = A·B block tokens (queries), S context tokens, both multiples of 128; T = N / 128 query tiles, and
U = (S + N) / 128 key tiles.
"""

import math

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash.drafter import Attend

TILE = 128
#: The kernels' own tiles for heads of up to 128: the fastest of 8 and 10 tried at three shapes on an H200 (docs/log.md)
TILES = {
    "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3,
    "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64,
    "bwd_num_warps": 4, "bwd_num_stages": 2,
}  # fmt: skip


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def anchors_per_tile(block_size: int) -> int:
    """Anchors are padded to a multiple of this, so that block tokens fill whole tiles."""
    return TILE // math.gcd(TILE, block_size)


def block_mask(low_A: Tensor, high_A: Tensor, context: int, block_size: int, window: int | None = None) -> BlockMask:
    """The block mask of `context` + A·B keys.

    Args:
        low_A, high_A: int64 [A], the visible range of the flat context; equal where a block sees none.
        context: S, a multiple of 128.
        window: of a sliding layer (dflash/attention.py); at least the block size.
    """
    anchors = low_A.shape[0]
    queries = anchors * block_size
    assert context % TILE == 0, "the context is padded to whole tiles"
    assert queries % TILE == 0, "anchors are padded to whole tiles"
    visible, full = tile_kinds(low_A, high_A, context, block_size, window)

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        anchor = query // block_size
        before = (key >= low_A[anchor]) & (key < high_A[anchor])
        own = (key - context).div(block_size, rounding_mode="floor").eq(anchor)
        if window is None:
            return before | own
        near = key > high_A[anchor] + query % block_size - window
        return (before & near) | (own & (key - context <= query))

    partial_count, partial_order = _listed(visible & ~full)
    full_count, full_order = _listed(full)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_order,
        full_count,
        full_order,
        BLOCK_SIZE=TILE,
        mask_mod=mask,
        seq_lengths=(queries, context + queries),
    )


def _listed(kind_TU: Tensor) -> tuple[Tensor, Tensor]:
    """How many key tiles each query tile has, and which, first; int32 [1, 1, T] and [1, 1, T, U]."""
    order = torch.argsort(kind_TU.to(torch.int8), dim=-1, descending=True, stable=True)
    return kind_TU.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def tile_kinds(
    low_A: Tensor, high_A: Tensor, context: int, block_size: int, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Bool [T, U] each: tiles with anything visible, and tiles that are visible throughout."""
    device, anchors = low_A.device, low_A.shape[0]
    tiles = anchors * block_size // TILE
    first = torch.arange(tiles, device=device) * TILE // block_size
    last = (torch.arange(tiles, device=device) * TILE + TILE - 1) // block_size
    width = (TILE - 1) // block_size + 2  # anchors that one tile can touch
    members = torch.minimum(first[:, None] + torch.arange(width, device=device), last[:, None])
    low, high = low_A[members][..., None], high_A[members][..., None]  # [T, width, 1]
    widest, narrowest = low, low  # from where the tile's first and last slot of each block see
    own_start = torch.arange(tiles, device=device) * TILE
    if window is not None:
        begin = members * block_size
        slots = [
            (own_start[:, None] - begin).clamp(min=0),
            (own_start[:, None] + TILE - 1 - begin).clamp(max=block_size - 1),
        ]
        widest, narrowest = (torch.maximum(low, high + slot[..., None] - window + 1) for slot in slots)
    start = torch.arange(context // TILE, device=device) * TILE
    seen = ((widest < start + TILE) & (high > start) & (widest < high)).any(1)
    whole = ((narrowest <= start) & (high >= start + TILE)).all(1)
    own = (own_start < (last[:, None] + 1) * block_size) & (own_start + TILE > first[:, None] * block_size)
    if window is not None:  # causal in the block: no tile behind the queries' own
        own = own & (own_start <= own_start[:, None])
    return torch.cat((seen, own), 1), torch.cat((whole, torch.zeros_like(own)), 1)


def attend_flex(mask: BlockMask, sliding: BlockMask | None = None) -> Attend:
    """Attention under `mask`, of a sliding layer under `sliding`; meant to run compiled, else torch materialises the
    scores."""

    def attend(
        q_NQD: Tensor, k_SGD: Tensor, v_SGD: Tensor, block_k: Tensor, block_v: Tensor, window: int | None = None
    ) -> Tensor:
        # heads first in memory: the kernels read rows of a tile, and the copy is fused into what makes q, k and v
        q = q_NQD.transpose(0, 1).contiguous()[None]
        k = torch.cat((k_SGD, block_k)).transpose(0, 1).contiguous()[None]
        v = torch.cat((v_SGD, block_v)).transpose(0, 1).contiguous()[None]
        out = flex_attention(
            q,
            k,
            v,
            block_mask=mask if window is None else sliding,
            enable_gqa=q.shape[1] != k.shape[1],
            kernel_options=TILES if q.is_cuda and q.shape[-1] <= 128 else None,  # type: ignore[arg-type]
        )
        assert isinstance(out, Tensor)
        return out[0].transpose(0, 1)

    return attend


def attend_ranges(low_A: Tensor, high_A: Tensor, context: int, block: int, window: int | None = None) -> Attend:
    """Attention of blocks that see [low, high) of `context` tokens; `window` is that of the sliding layers."""
    ranges = (low_A, high_A, context, block)
    return attend_flex(block_mask(*ranges), None if window is None else block_mask(*ranges, window))
