"""The kernels of block attention (dflash/block_attention.py says what they compute and why so).

Rows of a program are COUNT neighbouring blocks of BLOCK tokens × HEADS query heads, and with padding ROWS. The SHARE
query heads of a key head are PARTS times HEADS; where there are several parts, COUNT is 1. Numbers of a head lie
together, heads of a token behind each other; tokens have strides. `scale` is D^-0.5 · log2 e, since softmax works in
base 2, and `natural` D^-0.5.

Axes: R rows, T keys of a tile, O tokens of the rows' own blocks, D head dimension.
"""

import triton
import triton.language as tl


@triton.jit
def _scores(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, tl.trans(b), input_precision=PRECISION)


@triton.jit
def _walk(low, high, first, anchors, window, COUNT: tl.constexpr, NOWHERE: tl.constexpr, SLIDES: tl.constexpr,
          STEP: tl.constexpr):  # fmt: skip
    """[begin, whole) are keys that every anchor of a program sees, [whole, end) those that some see."""
    index = first + tl.arange(0, COUNT)
    lows = tl.load(low + index, mask=index < anchors, other=NOWHERE).to(tl.int32)
    highs = tl.load(high + index, mask=index < anchors, other=NOWHERE).to(tl.int32)
    live = highs < NOWHERE
    starts = tl.maximum(lows, highs - window + 1) if SLIDES else lows
    begin = tl.min(tl.where(live, starts, NOWHERE), axis=0)
    end = tl.max(tl.where(live, highs, 0), axis=0)
    begin = tl.minimum(begin, end)
    whole = begin
    if not SLIDES:  # near the window's edge every slot sees other keys
        latest = tl.max(tl.where(live, lows, 0), axis=0)
        common = tl.min(tl.where(live, highs, NOWHERE), axis=0)
        together = tl.where(latest == begin, tl.maximum(common - begin, 0), 0)
        whole = begin + tl.minimum(together, end - begin) // STEP * STEP
    return begin, whole, end


@triton.jit
def _sees(keys, low, high, slot, window, SLIDES: tl.constexpr):
    """Whether a row sees context keys."""
    seen = (keys >= low) & (keys < high)
    if SLIDES:
        seen = seen & (keys > high + slot - window)
    return seen


@triton.jit
def _own(token, real, keys, BLOCK: tl.constexpr, SLIDES: tl.constexpr):
    """Whether rows [R] see block tokens [T]: those of their block; rows beyond the last see them all, and finite."""
    seen = (token // BLOCK)[:, None] == (keys // BLOCK)[None, :]
    if SLIDES:  # such a layer is causal
        seen = seen & (keys[None, :] <= token[:, None])
    return seen | ~real[:, None]


@triton.jit
def _fold(total, peak, sum_, scores, values, scale, PRECISION: tl.constexpr):
    """Take scores [R, T] and values [T, D] into a running softmax."""
    higher = tl.maximum(peak, tl.max(scores, axis=1) * scale)
    p = tl.exp2(scores * scale - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = total * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision=PRECISION)
    return total, higher, sum_ * shrink + tl.sum(p, axis=1)


@triton.jit
def _rows(
    first, group, part, anchors,
    BLOCK: tl.constexpr, SHARE: tl.constexpr, HEADS: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each row's block token and query head, and whether it is one: not padding, and of an anchor that exists."""
    row = tl.arange(0, ROWS)
    token, head = first * BLOCK + row // HEADS, group * SHARE + part * HEADS + row % HEADS
    return token, head, (row < COUNT * BLOCK * HEADS) & (token < anchors * BLOCK)


@triton.jit
def _tile(pointer, token, stride, wanted, dims, DIM: tl.constexpr):
    """Rows [T, D] of one head."""
    inside = wanted[:, None] & (dims < DIM)[None, :]
    return tl.load(pointer + token.to(tl.int64)[:, None] * stride + dims[None, :], mask=inside, other=0.0)


@triton.jit
def forward_kernel(
    q, k, v, own_k, own_v, low, high, out, lse,
    anchors, heads, q_stride, k_stride, v_stride, own_k_stride, own_v_stride, scale, window,
    BLOCK: tl.constexpr, SHARE: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, COUNT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, OWN: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    SLIDES: tl.constexpr, NOWHERE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first, group, part = tl.program_id(0) * COUNT, tl.program_id(1), tl.program_id(2)
    dims = tl.arange(0, WIDTH)
    token, head, real = _rows(first, group, part, anchors, BLOCK, SHARE, HEADS, COUNT, ROWS)
    inside = real[:, None] & (dims < DIM)[None, :]
    q_RD = tl.load(q + token.to(tl.int64)[:, None] * q_stride + (head * DIM)[:, None] + dims, mask=inside, other=0.0)
    row_low = tl.load(low + token // BLOCK, mask=real, other=0).to(tl.int32)
    row_high = tl.load(high + token // BLOCK, mask=real, other=0).to(tl.int32)

    # its own block first: every row sees something of it, so no row is ever without a finite score
    own = first * BLOCK + tl.arange(0, OWN)
    there = (tl.arange(0, OWN) < COUNT * BLOCK) & (own < anchors * BLOCK)
    k_OD = _tile(own_k + group * DIM, own, own_k_stride, there, dims, DIM)
    v_OD = _tile(own_v + group * DIM, own, own_v_stride, there, dims, DIM)
    seen_RO = _own(token, real, own, BLOCK, SLIDES) & (tl.arange(0, OWN) < COUNT * BLOCK)[None, :]
    scores_RO = tl.where(seen_RO, _scores(q_RD, k_OD, PRECISION), float("-inf"))
    total, peak = tl.zeros((ROWS, WIDTH), tl.float32), tl.full((ROWS,), float("-inf"), tl.float32)
    total, peak, sum_ = _fold(total, peak, tl.zeros((ROWS,), tl.float32), scores_RO, v_OD, scale, PRECISION)

    begin, whole, end = _walk(low, high, first, anchors, window, COUNT, NOWHERE, SLIDES, KEYS)
    for start in range(begin, whole, KEYS):
        keys = start + tl.arange(0, KEYS)
        k_TD = _tile(k + group * DIM, keys, k_stride, keys < whole, dims, DIM)
        v_TD = _tile(v + group * DIM, keys, v_stride, keys < whole, dims, DIM)
        total, peak, sum_ = _fold(total, peak, sum_, _scores(q_RD, k_TD, PRECISION), v_TD, scale, PRECISION)
    for start in range(whole, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        k_TD = _tile(k + group * DIM, keys, k_stride, keys < end, dims, DIM)
        v_TD = _tile(v + group * DIM, keys, v_stride, keys < end, dims, DIM)
        slot = (token % BLOCK)[:, None]
        seen = _sees(keys[None, :], row_low[:, None], row_high[:, None], slot, window, SLIDES)
        scores = tl.where(seen, _scores(q_RD, k_TD, PRECISION), float("-inf"))
        total, peak, sum_ = _fold(total, peak, sum_, scores, v_TD, scale, PRECISION)

    place = token.to(tl.int64) * heads + head
    tl.store(out + place[:, None] * DIM + dims, (total / sum_[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(lse + place, peak + tl.log2(sum_), mask=real)


@triton.jit
def own_kernel(
    q, own_k, own_v, out, lse, d_out, delta, d_own_k, d_own_v,
    anchors, heads, q_stride, own_k_stride, own_v_stride, scale, natural,
    BLOCK: tl.constexpr, SHARE: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, COUNT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, OWN: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    SLIDES: tl.constexpr, NOWHERE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first, group = tl.program_id(0) * COUNT, tl.program_id(1)
    dims = tl.arange(0, WIDTH)
    token, first_head, real = _rows(first, group, 0, anchors, BLOCK, SHARE, HEADS, COUNT, ROWS)
    inside = real[:, None] & (dims < DIM)[None, :]
    own = first * BLOCK + tl.arange(0, OWN)
    there = (tl.arange(0, OWN) < COUNT * BLOCK) & (own < anchors * BLOCK)
    k_OD = _tile(own_k + group * DIM, own, own_k_stride, there, dims, DIM)
    v_OD = _tile(own_v + group * DIM, own, own_v_stride, there, dims, DIM)
    seen = _own(token, real, own, BLOCK, SLIDES) & there[None, :] & real[:, None]
    dk_OD, dv_OD = tl.zeros((OWN, WIDTH), tl.float32), tl.zeros((OWN, WIDTH), tl.float32)
    for part in range(PARTS):
        head = first_head + part * HEADS
        place = token.to(tl.int64) * heads + head
        q_place = token.to(tl.int64)[:, None] * q_stride + (head * DIM)[:, None] + dims
        q_RD = tl.load(q + q_place, mask=inside, other=0.0)
        d_RD = tl.load(d_out + place[:, None] * DIM + dims, mask=inside, other=0.0)
        out_RD = tl.load(out + place[:, None] * DIM + dims, mask=inside, other=0.0)
        along = tl.sum(d_RD.to(tl.float32) * out_RD.to(tl.float32), axis=1)
        tl.store(delta + place, along, mask=real)
        norm = tl.load(lse + place, mask=real, other=0.0)
        p = tl.where(seen, tl.exp2(_scores(q_RD, k_OD, PRECISION) * scale - norm[:, None]), 0.0)
        ds = (p * (_scores(d_RD, v_OD, PRECISION) - along[:, None])).to(k_OD.dtype)
        dk_OD += tl.dot(tl.trans(ds), q_RD, input_precision=PRECISION)
        dv_OD += tl.dot(tl.trans(p.to(d_RD.dtype)), d_RD, input_precision=PRECISION)
    own_place = (own.to(tl.int64) * (heads // SHARE) + group)[:, None] * DIM + dims
    own_inside = there[:, None] & (dims < DIM)[None, :]
    tl.store(d_own_k + own_place, (dk_OD * natural).to(d_own_k.dtype.element_ty), mask=own_inside)
    tl.store(d_own_v + own_place, dv_OD.to(d_own_v.dtype.element_ty), mask=own_inside)


@triton.jit
def rows_kernel(
    q, k, v, own_k, own_v, low, high, lse, d_out, delta, dq,
    anchors, heads, q_stride, k_stride, v_stride, own_k_stride, own_v_stride, scale, natural, window,
    BLOCK: tl.constexpr, SHARE: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, COUNT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, OWN: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    SLIDES: tl.constexpr, NOWHERE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first, group, part = tl.program_id(0) * COUNT, tl.program_id(1), tl.program_id(2)
    dims = tl.arange(0, WIDTH)
    token, head, real = _rows(first, group, part, anchors, BLOCK, SHARE, HEADS, COUNT, ROWS)
    inside = real[:, None] & (dims < DIM)[None, :]
    place = token.to(tl.int64) * heads + head
    q_RD = tl.load(q + token.to(tl.int64)[:, None] * q_stride + (head * DIM)[:, None] + dims, mask=inside, other=0.0)
    d_RD = tl.load(d_out + place[:, None] * DIM + dims, mask=inside, other=0.0)
    norm = tl.load(lse + place, mask=real, other=0.0)
    along = tl.load(delta + place, mask=real, other=0.0)
    row_low = tl.load(low + token // BLOCK, mask=real, other=0).to(tl.int32)
    row_high = tl.load(high + token // BLOCK, mask=real, other=0).to(tl.int32)

    own = first * BLOCK + tl.arange(0, OWN)
    there = (tl.arange(0, OWN) < COUNT * BLOCK) & (own < anchors * BLOCK)
    k_OD = _tile(own_k + group * DIM, own, own_k_stride, there, dims, DIM)
    v_OD = _tile(own_v + group * DIM, own, own_v_stride, there, dims, DIM)
    seen_RO = _own(token, real, own, BLOCK, SLIDES) & there[None, :] & real[:, None]
    p_RO = tl.where(seen_RO, tl.exp2(_scores(q_RD, k_OD, PRECISION) * scale - norm[:, None]), 0.0)
    ds_RO = (p_RO * (_scores(d_RD, v_OD, PRECISION) - along[:, None])).to(k_OD.dtype)
    total = tl.dot(ds_RO, k_OD, input_precision=PRECISION)

    begin, whole, end = _walk(low, high, first, anchors, window, COUNT, NOWHERE, SLIDES, KEYS)
    for start in range(begin, whole, KEYS):
        keys = start + tl.arange(0, KEYS)
        k_TD = _tile(k + group * DIM, keys, k_stride, keys < whole, dims, DIM)
        v_TD = _tile(v + group * DIM, keys, v_stride, keys < whole, dims, DIM)
        p = tl.exp2(_scores(q_RD, k_TD, PRECISION) * scale - norm[:, None])
        ds = (p * (_scores(d_RD, v_TD, PRECISION) - along[:, None])).to(k_TD.dtype)
        total += tl.dot(ds, k_TD, input_precision=PRECISION)
    for start in range(whole, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        k_TD = _tile(k + group * DIM, keys, k_stride, keys < end, dims, DIM)
        v_TD = _tile(v + group * DIM, keys, v_stride, keys < end, dims, DIM)
        slot = (token % BLOCK)[:, None]
        seen = _sees(keys[None, :], row_low[:, None], row_high[:, None], slot, window, SLIDES)
        p = tl.where(seen, tl.exp2(_scores(q_RD, k_TD, PRECISION) * scale - norm[:, None]), 0.0)
        ds = (p * (_scores(d_RD, v_TD, PRECISION) - along[:, None])).to(k_TD.dtype)
        total += tl.dot(ds, k_TD, input_precision=PRECISION)
    tl.store(dq + place[:, None] * DIM + dims, (total * natural).to(dq.dtype.element_ty), mask=inside)


@triton.jit
def keys_kernel(
    q, k, v, low, high, begins, ends, lse, d_out, delta, dk, dv,
    anchors, context, heads, q_stride, k_stride, v_stride, scale, natural, window,
    BLOCK: tl.constexpr, SHARE: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, COUNT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STEP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    SLIDES: tl.constexpr, NOWHERE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, group = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, WIDTH)
    keys = tile * KEYS + tl.arange(0, KEYS)
    there = keys < context
    k_TD = _tile(k + group * DIM, keys, k_stride, there, dims, DIM)
    v_TD = _tile(v + group * DIM, keys, v_stride, there, dims, DIM)
    dk_TD, dv_TD = tl.zeros((KEYS, WIDTH), tl.float32), tl.zeros((KEYS, WIDTH), tl.float32)
    steps = tl.cdiv(context, STEP)
    begin = tl.load(begins + tile * (KEYS // STEP)).to(tl.int32)
    end = tl.load(ends + tl.minimum((tile + 1) * (KEYS // STEP), steps) - 1).to(tl.int32)
    for turn in range(begin // COUNT * PARTS, tl.cdiv(end, COUNT) * PARTS):
        first, part = turn // PARTS * COUNT, turn % PARTS
        token, head, real = _rows(first, group, part, anchors, BLOCK, SHARE, HEADS, COUNT, ROWS)
        inside = real[:, None] & (dims < DIM)[None, :]
        place = token.to(tl.int64) * heads + head
        q_RD = tl.load(
            q + token.to(tl.int64)[:, None] * q_stride + (head * DIM)[:, None] + dims, mask=inside, other=0.0
        )
        d_RD = tl.load(d_out + place[:, None] * DIM + dims, mask=inside, other=0.0)
        norm = tl.load(lse + place, mask=real, other=0.0)
        along = tl.load(delta + place, mask=real, other=0.0)
        row_low = tl.load(low + token // BLOCK, mask=real, other=NOWHERE).to(tl.int32)
        row_high = tl.load(high + token // BLOCK, mask=real, other=NOWHERE).to(tl.int32)
        slot = (token % BLOCK)[None, :]
        seen = _sees(keys[:, None], row_low[None, :], row_high[None, :], slot, window, SLIDES)
        p = tl.where(seen, tl.exp2(_scores(k_TD, q_RD, PRECISION) * scale - norm[None, :]), 0.0)
        dv_TD += tl.dot(p.to(d_RD.dtype), d_RD, input_precision=PRECISION)
        ds = tl.where(seen, p * (_scores(v_TD, d_RD, PRECISION) - along[None, :]), 0.0)
        dk_TD += tl.dot(ds.to(q_RD.dtype), q_RD, input_precision=PRECISION)
    place = (keys.to(tl.int64) * (heads // SHARE) + group)[:, None] * DIM + dims
    inside = there[:, None] & (dims < DIM)[None, :]
    tl.store(dk + place, (dk_TD * natural).to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + place, dv_TD.to(dv.dtype.element_ty), mask=inside)
