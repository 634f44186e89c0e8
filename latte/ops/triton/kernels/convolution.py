"""Kernels of the short causal convolution: tiles of tokens and channels, K shifted loads of which all but one hit.

A program takes several tiles one after the other, so that the taps are read once for many tokens. A token's sequence
begins at `starts[t]`, ends before `ends[t]` and has number `sequences[t]` when packed; otherwise a batch row is one
sequence. `past` [N, K − 1, W] holds the inputs before each sequence. Only the first tiles of a row reach it,
or any if packed: those have a loop of their own, and the other one loads without branches.
"""

import triton
import triton.language as tl

HALF_MAX = tl.constexpr(65504.0)


@triton.jit
def locate(tiles, run, W: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Batch row, channels and number of a program, and bounds of its tiles: up to the second they reach a past."""
    reaching: tl.constexpr = (K + TILE - 2) // TILE  # of a row
    blocks: tl.constexpr = (W + BLOCK - 1) // BLOCK
    parts = (tiles + run - 1) // run
    program = tl.program_id(0)
    part = program // blocks
    first = part % parts * run
    last = tl.minimum(first + run, tiles)
    middle = last
    if not PACKED:
        middle = tl.minimum(tl.maximum(first, reaching), last)
    return tl.cast(part // parts, tl.int64), (program % blocks) * BLOCK + tl.arange(0, BLOCK), part, first, middle, last


@triton.jit
def sequence_at(starts, sequences, row, t, inside, TILE: tl.constexpr, PACKED: tl.constexpr):
    """Where the sequences of tokens t begin, and their numbers."""
    start = tl.full([TILE], 0, tl.int32)
    sequence = start + tl.cast(row, tl.int32)
    if PACKED:
        start = tl.load(starts + t, mask=inside, other=0)
        sequence = tl.load(sequences + t, mask=inside, other=0)
    return start, sequence


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
def load_taps(weight, cols, W: tl.constexpr, K: tl.constexpr):
    """The K taps of some channels, each [1 BLOCK] in float32."""
    taps = ()
    for j in tl.static_range(K):
        taps = taps + (tl.load(weight + cols * K + j, mask=cols < W, other=0.0).to(tl.float32)[None, :],)
    return taps


@triton.jit
def real_only(total, mask, row, t, inside, tokens, MASK: tl.constexpr):
    """0 at masked tokens."""
    if MASK:
        total = tl.where((tl.load(mask + row * tokens + t, mask=inside, other=0) != 0)[:, None], total, 0.0)
    return total


@triton.jit
def shifted(
    x, mask, past, row, t, inside, start, sequence, cols, tokens, row_stride, j: tl.constexpr,
    STRIDE: tl.constexpr, W: tl.constexpr, K: tl.constexpr, MASK: tl.constexpr, PAST: tl.constexpr,
):  # fmt: skip
    """What tap j meets at tokens t."""
    s = t - (K - 1) + j
    value = load_tokens(x, mask, row, s, inside & (s >= start), cols, tokens, row_stride, STRIDE, W, MASK)
    if PAST and j < K - 1:
        value += load_past(past, sequence, s - start, inside & (s < start), cols, W, K)
    return value


@triton.jit
def forward_tile(
    tile, x, taps, offset, mask, past, starts, sequences, y, tokens, x_row, row, cols,
    X_TOKEN: tl.constexpr, W: tl.constexpr, K: tl.constexpr, MASK: tl.constexpr, PACKED: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, PAST: tl.constexpr,
):  # fmt: skip
    """y of one tile."""
    t = tile * TILE + tl.arange(0, TILE)
    inside = t < tokens
    start, sequence = sequence_at(starts, sequences, row, t, inside, TILE, PACKED)
    total = tl.full([TILE, BLOCK], 0.0, tl.float32) + offset
    for j in tl.static_range(K):
        total += taps[j] * shifted(
            x, mask, past, row, t, inside, start, sequence, cols, tokens, x_row, j, X_TOKEN, W, K, MASK, PAST
        )
    if y.dtype.element_ty == tl.float16:
        total = tl.minimum(tl.maximum(total, -HALF_MAX), HALF_MAX)
    total = real_only(total, mask, row, t, inside, tokens, MASK)
    at = y + (row * tokens + t.to(tl.int64))[:, None] * W + cols[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=inside[:, None] & (cols < W)[None, :])


@triton.jit
def forward_kernel(
    x, weight, bias, mask, past, starts, sequences, y, tokens, tiles, run, x_row,
    X_TOKEN: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, PACKED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y of `run` tiles one after another."""
    row, cols, _, first, middle, last = locate(tiles, run, W, K, PACKED, TILE, BLOCK)
    taps = load_taps(weight, cols, W, K)
    offset = tl.full([1, BLOCK], 0.0, tl.float32)
    if BIAS:
        offset += tl.load(bias + cols, mask=cols < W, other=0.0).to(tl.float32)[None, :]
    for tile in range(first, middle):
        forward_tile(
            tile, x, taps, offset, mask, past, starts, sequences, y, tokens, x_row, row, cols,
            X_TOKEN, W, K, MASK, PACKED, TILE, BLOCK, True,
        )  # fmt: skip
    for tile in range(middle, last):
        forward_tile(
            tile, x, taps, offset, mask, past, starts, sequences, y, tokens, x_row, row, cols,
            X_TOKEN, W, K, MASK, PACKED, TILE, BLOCK, False,
        )  # fmt: skip


@triton.jit
def backward_tile(
    tile, sums, dy, x, taps, mask, past, starts, ends, sequences, dx, tokens, y_row, x_row, row, cols,
    Y_TOKEN: tl.constexpr, X_TOKEN: tl.constexpr, W: tl.constexpr, K: tl.constexpr, MASK: tl.constexpr,
    PACKED: tl.constexpr, TILE: tl.constexpr, PAST: tl.constexpr,
):  # fmt: skip
    """dx of one tile, and `sums` of what tokens add to the gradients of the taps and, last, the bias."""
    t = tile * TILE + tl.arange(0, TILE)
    inside = t < tokens
    start, sequence = sequence_at(starts, sequences, row, t, inside, TILE, PACKED)
    end = tl.full([TILE], 0, tl.int32) + tokens
    if PACKED:
        end = tl.load(ends + t, mask=inside, other=0)
    here = load_tokens(dy, mask, row, t, inside, cols, tokens, y_row, Y_TOKEN, W, MASK)
    total = here * taps[K - 1]
    added = ()
    for j in tl.static_range(K):
        value = shifted(
            x, mask, past, row, t, inside, start, sequence, cols, tokens, x_row, j, X_TOKEN, W, K, MASK, PAST
        )
        if j < K - 1:
            later = t + (K - 1) - j
            ahead = load_tokens(dy, mask, row, later, inside & (later < end), cols, tokens, y_row, Y_TOKEN, W, MASK)
            total += ahead * taps[j]
        added = added + (sums[j] + here * value,)
    total = real_only(total, mask, row, t, inside, tokens, MASK)
    at = dx + (row * tokens + t.to(tl.int64))[:, None] * W + cols[None, :]
    tl.store(at, total.to(dx.dtype.element_ty), mask=inside[:, None] & (cols < W)[None, :])
    return added + (sums[K] + here,)


@triton.jit
def backward_kernel(
    dy, x, weight, mask, past, starts, ends, sequences, dx, dweight, tokens, tiles, run, y_row, x_row,
    Y_TOKEN: tl.constexpr, X_TOKEN: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
    MASK: tl.constexpr, PACKED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of `run` tiles one after another, and what they add to the gradients of the taps and the bias."""
    row, cols, part, first, middle, last = locate(tiles, run, W, K, PACKED, TILE, BLOCK)
    taps = load_taps(weight, cols, W, K)
    sums = ()
    for j in tl.static_range(K + 1):
        sums = sums + (tl.full([TILE, BLOCK], 0.0, tl.float32),)
    for tile in range(first, middle):
        sums = backward_tile(
            tile, sums, dy, x, taps, mask, past, starts, ends, sequences, dx, tokens, y_row, x_row, row, cols,
            Y_TOKEN, X_TOKEN, W, K, MASK, PACKED, TILE, True,
        )  # fmt: skip
    for tile in range(middle, last):
        sums = backward_tile(
            tile, sums, dy, x, taps, mask, past, starts, ends, sequences, dx, tokens, y_row, x_row, row, cols,
            Y_TOKEN, X_TOKEN, W, K, MASK, PACKED, TILE, False,
        )  # fmt: skip
    at = dweight + part.to(tl.int64) * ((K + 1) * W)
    for j in tl.static_range(K):
        tl.store(at + cols * K + j, tl.sum(sums[j], axis=0), mask=cols < W)
    tl.store(at + K * W + cols, tl.sum(sums[K], axis=0), mask=cols < W)
