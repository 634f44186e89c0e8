"""Kernels of the gradients of the RG-LRU with its gates; see `kernels/gated_recurrence.py` for how tiles lie.

With c_t = a_t dh_t, what a token passes on to the one before, dh_t = dy_t + c_{t+1}. A program walks its tiles from the
last to the first. Of each it makes the gates and, from h before the tile, every h anew; then dh by a scan from the end,
and the gradients of the gates and of all vectors; from the gates', `block_linear`'s kernel makes those of the weights
and completes dx.
"""

import triton
import triton.language as tl

from latte.ops.triton.kernels.arithmetic import LOG2_E, dot, exp2, inverse_root
from latte.ops.triton.kernels.gated_recurrence import (
    begin,
    compose,
    compose_seen,
    decay_and_rest,
    first_lanes,
    gates_of,
    lanes,
    load_bias,
    load_lanes,
    load_rate,
    load_tile,
    load_weights,
    locate,
    marks_of,
    narrowed,
    offsets,
    places,
    scan_segments,
    sigmoid,
    store_channels,
    store_lanes,
    tile_marks,
    turned,
)

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_ends(dfinal, marks, cols, ok, W: tl.constexpr):
    """Gradients of the states that sequences leave, [S, L], at the tokens `marks` names them at."""
    at = dfinal + offsets(tl.maximum(marks, 0).to(tl.int64), cols, W)
    return tl.load(at, mask=(marks >= 0) & ok[None, :], other=0.0)


@triton.jit
def leave_piece(
    starts, dfinal, row, piece, pieces, cols, ok, W: tl.constexpr, L: tl.constexpr, CODES: tl.constexpr,
    STARTS: tl.constexpr,
):  # fmt: skip
    """c after a piece [1, L]; if STARTS, 0 unless it is the last one."""
    c = tl.full([L], 0.0, tl.float32)
    if not STARTS:
        at = starts + (row * (pieces - 1) + piece) * W + cols
        c += tl.load(at, mask=ok & (cols < tl.where(piece < pieces - 1, W, 0)), other=0.0)
    if not CODES:
        ends_here = ok & (cols < tl.where(piece == pieces - 1, W, 0))
        c += tl.load(dfinal + row * W + cols, mask=ends_here, other=0.0)
    return c[None, :]


@triton.jit
def piece_starts_kernel(
    dy, x, a_weight, a_bias, a_param, dfinal, codes, lasts, decays, starts,
    tokens, pieces, piece_length, y_row, x_row,
    Y_TOKEN: tl.constexpr, X_TOKEN: tl.constexpr, N: tl.constexpr, I: tl.constexpr, CODES: tl.constexpr,
    EVEN: tl.constexpr, K: tl.constexpr, S: tl.constexpr, G: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each piece but the first does to c: c ← decays · c + starts."""
    W: tl.constexpr = N * I
    C: tl.constexpr = G * S
    L: tl.constexpr = G * CHUNK
    WHOLE: tl.constexpr = CHUNKS * CHUNK == I
    row, which, block, first = locate(pieces - 1, N, CHUNK, CHUNKS)
    piece = which + 1
    token, channel = places(S, G, CHUNK)
    ok = first + channel < I
    cols = block * I + first + channel
    a_factor = load_weights(a_weight, block, first, I, K, CHUNK, DTYPE)
    a_shift = load_bias(a_bias, block, first + channel, I)
    rate, _slope = load_rate(a_param, cols, W)
    start = piece * piece_length
    stop = tl.minimum(start + piece_length, tokens)
    x += row * x_row + block * I
    dy += row * y_row + block * I + first
    if CODES:
        codes += row * tokens
        lasts += row * tokens
    c = leave_piece(starts, dfinal, row, piece, pieces, cols, ok, W, L, CODES, True)
    through = tl.full([1, L], 1.0, tl.float32)
    tiles = tl.cdiv(stop - start, C)
    for k in range(tiles):
        t = start + (tiles - 1 - k) * C
        real_tile, real, marks = tile_marks(codes, t, token, stop, C, CODES)
        if CODES:
            ended = marks_of(lasts, t, token, stop, -1)
        tile = load_tile(x, t, real_tile, X_TOKEN, I, K, C, EVEN, DTYPE)
        pull = load_lanes(dy, t, real, ok, Y_TOKEN, S, G, CHUNK, EVEN, WHOLE)
        r = sigmoid(lanes(dot(a_factor, tile, PRECISION), S, G, CHUNK) * -LOG2_E + a_shift)
        if not EVEN:
            r = tl.where(real, r, 0.0)
        a = exp2(r * rate)
        if CODES:
            pull += load_ends(dfinal, ended, cols, ok, W)
            a = tl.where(marks >= 0, 0.0, a)
        a, pull = turned(a, S), turned(pull, S)
        a, b = tl.associative_scan((a, a * pull), 0, compose)
        _later, c, product = scan_segments(a, b, c, S, G, CHUNK, True)
        through *= product
    to = (row * (pieces - 1) + which) * W
    store_channels(decays + to, through, cols, ok, CHUNK, L, True)
    store_channels(starts + to, c, cols, ok, CHUNK, L, True)


@triton.jit
def gate_grad_kernel(
    dy, x, a_weight, a_bias, x_weight, x_bias, a_param, dfinal, state, codes, lasts, starts, checkpoints,
    da_gate, dx_gate, dx, sums, dstate,
    tokens, pieces, piece_length, y_row, x_row,
    Y_TOKEN: tl.constexpr, X_TOKEN: tl.constexpr, N: tl.constexpr, I: tl.constexpr, STATE: tl.constexpr,
    CODES: tl.constexpr, EVEN: tl.constexpr, EVERY: tl.constexpr, K: tl.constexpr, S: tl.constexpr, G: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a piece, gradients of what the gates' σ take, of x but through the gates, and sums for biases and a_param."""
    W: tl.constexpr = N * I
    C: tl.constexpr = G * S
    L: tl.constexpr = G * CHUNK
    WHOLE: tl.constexpr = CHUNKS * CHUNK == I
    row, piece, block, first = locate(pieces, N, CHUNK, CHUNKS)
    token, channel = places(S, G, CHUNK)
    ok = first + channel < I
    cols = block * I + first + channel
    a_factor = load_weights(a_weight, block, first, I, K, CHUNK, DTYPE)
    x_factor = load_weights(x_weight, block, first, I, K, CHUNK, DTYPE)
    a_shift, x_shift = load_bias(a_bias, block, first + channel, I), load_bias(x_bias, block, first + channel, I)
    rate, slope = load_rate(a_param, cols, W)
    unseen = first_lanes(state, row, cols, W, L, CHUNK, STATE and not CODES)
    start = piece * piece_length
    stop = tl.minimum(start + piece_length, tokens)
    x += row * x_row + block * I
    dy += row * y_row + block * I + first
    here = row * tokens * W + block * I + first
    checkpoints += row * tl.cdiv(tokens, EVERY) * W
    if CODES:
        codes += row * tokens
        lasts += row * tokens
    c = leave_piece(starts, dfinal, row, piece, pieces, cols, ok, W, L, CODES, False)
    a_bias_sum, x_bias_sum = tl.zeros([1, L], tl.float32), tl.zeros([1, L], tl.float32)
    rate_sum = tl.zeros([1, L], tl.float32)
    tiles = tl.cdiv(stop - start, C)
    for k in range(tiles):
        t = start + (tiles - 1 - k) * C
        inside = t + token < stop
        real_tile, real, marks = tile_marks(codes, t, token, stop, C, CODES)
        if CODES:
            ended = marks_of(lasts, t, token, stop, -1)
        tile = load_tile(x, t, real_tile, X_TOKEN, I, K, C, EVEN, DTYPE)
        before = tl.load(checkpoints + tl.cast(t // EVERY, tl.int64) * W + cols, mask=ok, other=0.0)[None, :]
        inputs = load_lanes(x + first, t, real, ok, X_TOKEN, S, G, CHUNK, EVEN, WHOLE)
        pull = load_lanes(dy, t, real, ok, Y_TOKEN, S, G, CHUNK, EVEN, WHOLE)
        r, gate = gates_of(tile, a_factor, x_factor, a_shift, x_shift, real, S, G, CHUNK, EVEN, PRECISION)
        a, u = decay_and_rest(r, rate)
        a, u, enters, past = begin(a, u, marks, state, cols, ok, unseen, t, W, S, STATE, CODES)
        root = inverse_root(u)
        gated = gate * inputs
        b = u * root * gated
        passed = a
        if CODES:
            b += a * past
            passed = tl.where(enters, 0.0, a)
        one, none = tl.full([S, L], 1.0, tl.float32), tl.full([S, L], -0.0, tl.float32)
        a_all, b_all, p, q = tl.associative_scan((passed, b, one, none), 0, compose_seen)
        h, _end, _product = scan_segments(a_all, b_all, before, S, G, CHUNK, False)
        h = p * h + q
        if CODES:
            h = tl.where(enters, past, h)
        # the derivative of sqrt(u) is clipped to 1000, so that of sqrt(1 − a²) by log a is −a² min(root, 2000)
        to_rate = a * (h - a * gated * tl.minimum(root, 2000.0)) * r
        to_x = u * root * gate
        if CODES:
            pull += load_ends(dfinal, ended, cols, ok, W)
        passed, pull = turned(passed, S), turned(pull, S)
        a_all, b_all, p, q = tl.associative_scan((passed, passed * pull, one, pull), 0, compose_seen)
        later, c, _product = scan_segments(a_all, b_all, c, S, G, CHUNK, True)
        dh = turned(p * later + q, S)
        if CODES:
            to = dstate + offsets(tl.maximum(marks, 0).to(tl.int64), cols, W)
            tl.store(to, a * dh, mask=enters & ok[None, :])
        direct = dh * to_x
        drate = dh * to_rate
        to_a_gate = (rate * LN2) * drate * (1.0 - r)
        to_x_gate = direct * (inputs - gated)
        a_bias_sum += tl.sum(to_a_gate, 0)[None, :]
        x_bias_sum += tl.sum(to_x_gate, 0)[None, :]
        rate_sum += tl.sum(drate, 0)[None, :]
        store_lanes(da_gate + here, t, narrowed(to_a_gate, DTYPE), inside, ok, W, S, G, CHUNK, EVEN, WHOLE)
        store_lanes(dx_gate + here, t, narrowed(to_x_gate, DTYPE), inside, ok, W, S, G, CHUNK, EVEN, WHOLE)
        store_lanes(dx + here, t, narrowed(direct, dx.dtype.element_ty), inside, ok, W, S, G, CHUNK, EVEN, WHOLE)
    if not CODES:
        store_channels(dstate + row * W, c, cols, ok, CHUNK, L, piece == 0)
    sums += (row * pieces + piece) * (3 * W) + block * I + first
    store_sum(sums, a_bias_sum, I - first, G, CHUNK)
    store_sum(sums + W, x_bias_sum, I - first, G, CHUNK)
    store_sum(sums + 2 * W, -8.0 * slope * rate_sum, I - first, G, CHUNK)


@triton.jit
def store_sum(to, x, channels, G: tl.constexpr, CHUNK: tl.constexpr):
    """The sum over a tile's segments of x [1, L]."""
    o = tl.arange(0, CHUNK)
    tl.store(to + o, tl.sum(tl.reshape(x, [G, CHUNK]), 0), mask=o < channels)
