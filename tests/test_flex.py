"""The analytic block mask equals a dense one, and flex attention under it equals attention row by row."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from dflash.attention import attend_rows, row_spans
from dflash.flex import TILE, anchors_per_tile, attend_flex, block_mask, round_up, tile_kinds


def ranges(rows: int, ceiling: int, block_size: int, live: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Sorted random anchors of several rows, padded with dummies that see nothing; (flat, low, high, context)."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randperm(rows * ceiling, generator=generator)[:live].sort().values
    anchors = round_up(live, anchors_per_tile(block_size))
    low, high = torch.zeros(anchors, dtype=torch.int64), torch.zeros(anchors, dtype=torch.int64)
    low[:live], high[:live] = flat // ceiling * ceiling, flat
    return flat, low, high, round_up(rows * ceiling, TILE)


def dense(
    low: torch.Tensor, high: torch.Tensor, context: int, block_size: int, window: int | None = None
) -> torch.Tensor:
    queries = len(low) * block_size
    anchor, slot = torch.arange(queries) // block_size, torch.arange(queries) % block_size
    keys = torch.arange(context + queries)
    before = (keys >= low[anchor][:, None]) & (keys < high[anchor][:, None])
    own = (keys >= context) & ((keys - context) // block_size == anchor[:, None])
    if window is None:
        return before | own
    position = high[anchor] + slot  # flat, as the keys' are
    key_position = torch.cat((torch.arange(context), position))
    back = position[:, None] - key_position
    return (before | own) & (back >= 0) & (back < window)


@pytest.mark.parametrize("window", [None, 32, 150])
@pytest.mark.parametrize("block_size", [4, 5, 8, 10, 16, 32])
@pytest.mark.parametrize(("rows", "ceiling"), [(1, 700), (4, 200), (9, 33)])
def test_tiles_equal_a_dense_mask(block_size: int, rows: int, ceiling: int, window: int | None) -> None:
    _, low, high, context = ranges(rows, ceiling, block_size, 41, seed=block_size + rows)
    mask = dense(low, high, context, block_size, window)
    tiles = mask.view(mask.shape[0] // TILE, TILE, -1, TILE).permute(0, 2, 1, 3).flatten(2)
    visible, full = tile_kinds(low, high, context, block_size, window)
    assert torch.equal(visible, tiles.any(-1))
    # own tiles are always treated as partial: with blocks of 128 they could be full, which only costs a comparison
    assert torch.equal(full[:, : context // TILE], tiles.all(-1)[:, : context // TILE])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("block_size", [8, 10])
def test_the_block_mask_is_the_one_torch_would_build(block_size: int, window: int | None) -> None:
    _, low, high, context = ranges(3, 250, block_size, 50, seed=1)
    ours = block_mask(low, high, context, block_size, window)
    wanted = dense(low, high, context, block_size, window)
    elementwise = create_mask(ours.mask_mod, None, None, *wanted.shape, device="cpu")[0, 0]
    assert torch.equal(elementwise, wanted)
    theirs = create_block_mask(
        lambda b, h, q, k: wanted[q, k], None, None, *wanted.shape, device="cpu", BLOCK_SIZE=TILE
    )
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.kv_num_blocks, theirs.kv_num_blocks)
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)
    assert torch.equal(ours.q_num_blocks, theirs.q_num_blocks)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("window", [None, 21])
def test_flex_under_the_mask_equals_attention_row_by_row(window: int | None) -> None:
    torch.manual_seed(0)
    rows, ceiling, block_size, live, heads, groups, dim = 3, 100, 8, 19, 6, 2, 16
    flat, low, high, context = ranges(rows, ceiling, block_size, live, seed=3)
    tokens = len(low) * block_size
    q, block_k, block_v = (
        torch.randn(tokens, heads, dim),
        torch.randn(tokens, groups, dim),
        torch.randn(tokens, groups, dim),
    )
    k, v = torch.randn(context, groups, dim), torch.randn(context, groups, dim)
    with torch.no_grad():
        masks = block_mask(low, high, context, block_size), block_mask(low, high, context, block_size, window)
        ours = attend_flex(*masks)(q, k, v, block_k, block_v, window=window)
    part = slice(0, live * block_size)
    plain = attend_rows(row_spans(flat, rows, ceiling), flat % ceiling, block_size)(
        q[part], k, v, block_k[part], block_v[part], window=window
    )
    assert torch.allclose(ours[part], plain, atol=1e-5)
    assert torch.isfinite(ours).all()
