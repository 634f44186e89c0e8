"""Kernels of the short causal convolution: tiles of tokens and channels, K shifted loads of which all but one hit.

A token's sequence begins at `starts[t]`, ends before `ends[t]` and has number `sequences[t]` when packed; otherwise a
batch row is one sequence. `past` [N, K − 1, W] holds the inputs before each sequence.
"""

import triton
import triton.language as tl

HALF_MAX = tl.constexpr(65504.0)


@triton.jit
def locate(tiles, W: tl.constexpr, BLOCK: tl.constexpr):
    """Batch row, tile and channels of a program."""
    blocks: tl.constexpr = (W + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    tile = program // blocks
    return tl.cast(tile // tiles, tl.int64), tile % tiles, (program % blocks) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def load_tokens(
    x, mask, row, t, ok, cols, tokens, row_stride, STRIDE: tl.constexpr, W: tl.constexpr, MASK: tl.constexpr
):
    """Tokens t of a batch row in float32; 0 where they are not `ok`, or masked."""
    if MASK:
        ok = ok & (tl.load(mask + row * tokens + t, mask=ok, other=0) != 0)
    at = x + row * row_stride + t.to(tl.int64)[:, None] * STRIDE + cols[None, :]
    return tl.load(at, mask=ok[:, None] & (cols < W)[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_past(past, sequence, place, ok, cols, W: tl.constexpr, K: tl.constexpr):
    """Inputs at `place` < 0, counted from the first token of each one's sequence."""
    at = past + (sequence.to(tl.int64) * (K - 1) + K - 1 + place)[:, None] * W + cols[None, :]
    return tl.load(at, mask=ok[:, None] & (cols < W)[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_tap(weight, j: tl.constexpr, cols, W: tl.constexpr, K: tl.constexpr):
    return tl.load(weight + cols * K + j, mask=cols < W, other=0.0).to(tl.float32)[None, :]


@triton.jit
def forward_kernel(
    x, weight, bias, mask, past, starts, sequences, y, tokens, tiles, x_row,
    X_TOKEN: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, PACKED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y of one tile."""
    row, tile, cols = locate(tiles, W, BLOCK)
    t = tile * TILE + tl.arange(0, TILE)
    inside = t < tokens
    start = tl.full([TILE], 0, tl.int32)
    sequence = start + tl.cast(row, tl.int32)
    if PACKED:
        start = tl.load(starts + t, mask=inside, other=0)
        sequence = tl.load(sequences + t, mask=inside, other=0)
    total = tl.full([TILE, BLOCK], 0.0, tl.float32)
    if BIAS:
        total += tl.load(bias + cols, mask=cols < W, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(K):
        s = t - (K - 1) + j
        value = load_tokens(x, mask, row, s, inside & (s >= start), cols, tokens, x_row, X_TOKEN, W, MASK)
        if j < K - 1:
            if PACKED or tile * TILE < K - 1:
                value += load_past(past, sequence, s - start, inside & (s < start), cols, W, K)
        total += value * load_tap(weight, j, cols, W, K)
    if y.dtype.element_ty == tl.float16:
        total = tl.minimum(tl.maximum(total, -HALF_MAX), HALF_MAX)
    if MASK:
        total = tl.where((tl.load(mask + row * tokens + t, mask=inside, other=0) != 0)[:, None], total, 0.0)
    at = y + (row * tokens + t.to(tl.int64))[:, None] * W + cols[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=inside[:, None] & (cols < W)[None, :])


@triton.jit
def backward_kernel(
    dy, x, weight, mask, past, starts, ends, sequences, dx, dweight, tokens, tiles, run, y_row, x_row,
    Y_TOKEN: tl.constexpr, X_TOKEN: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
    MASK: tl.constexpr, PACKED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of `run` tiles one after another, and what they add to the gradients of the taps and, last, the bias."""
    row, part, cols = locate((tiles + run - 1) // run, W, BLOCK)
    sums = ()
    for j in tl.static_range(K + 1):
        sums = sums + (tl.full([TILE, BLOCK], 0.0, tl.float32),)
    for tile in range(part * run, tl.minimum((part + 1) * run, tiles)):
        t = tile * TILE + tl.arange(0, TILE)
        inside = t < tokens
        start = tl.full([TILE], 0, tl.int32)
        end = start + tokens
        sequence = start + tl.cast(row, tl.int32)
        if PACKED:
            start = tl.load(starts + t, mask=inside, other=0)
            end = tl.load(ends + t, mask=inside, other=0)
            sequence = tl.load(sequences + t, mask=inside, other=0)
        here = load_tokens(dy, mask, row, t, inside, cols, tokens, y_row, Y_TOKEN, W, MASK)
        total = here * load_tap(weight, K - 1, cols, W, K)
        added = ()
        for j in tl.static_range(K):
            s = t - (K - 1) + j
            value = load_tokens(x, mask, row, s, inside & (s >= start), cols, tokens, x_row, X_TOKEN, W, MASK)
            if j < K - 1:
                if PACKED or tile * TILE < K - 1:
                    value += load_past(past, sequence, s - start, inside & (s < start), cols, W, K)
                later = t + (K - 1) - j
                ahead = load_tokens(dy, mask, row, later, inside & (later < end), cols, tokens, y_row, Y_TOKEN, W, MASK)
                total += ahead * load_tap(weight, j, cols, W, K)
            added = added + (sums[j] + here * value,)
        sums = added + (sums[K] + here,)
        if MASK:
            total = tl.where((tl.load(mask + row * tokens + t, mask=inside, other=0) != 0)[:, None], total, 0.0)
        at = dx + (row * tokens + t.to(tl.int64))[:, None] * W + cols[None, :]
        tl.store(at, total.to(dx.dtype.element_ty), mask=inside[:, None] & (cols < W)[None, :])
    parts = (tiles + run - 1) // run
    for j in tl.static_range(K + 1):
        at = dweight + ((row * parts + part) * (K + 1) + j) * W + cols
        tl.store(at, tl.sum(sums[j], axis=0), mask=cols < W)
