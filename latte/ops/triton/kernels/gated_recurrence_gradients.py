"""Kernels of the gradients of the RG-LRU with its gates; see `kernels/gated_recurrence.py` for how tiles lie.

With c_t = a_t dh_t, what a token passes on to the one before, dh_t = dy_t + c_{t+1}. A program walks its tiles from the
last to the first. Of each it makes the gates and, from h before the tile, every h anew; then dh by a scan from the end,
the gates' gradients, and from these dx. Sums over tokens stay with the program and are written once, at its end.
"""

import triton
import triton.language as tl

from latte.ops.triton.kernels.gated_recurrence import (
    begin,
    compose,
    compose_seen,
    decay_and_rest,
    first_lanes,
    inverse_root,
    lanes,
    load_biases,
    load_lanes,
    load_rates,
    load_tile,
    load_weights,
    locate,
    marks_of,
    offsets,
    ones,
    places,
    scan_segments,
    sigmoid,
    sigmoids,
    store_channels,
    tile_of,
    turned,
)
from latte.ops.triton.kernels.latents import dot, exp2
from latte.ops.triton.kernels.recurrence import LOG2E, MASKED

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_ends(dfinal, marks, cols, ok, W: tl.constexpr):
    """Gradients of the states that sequences leave, [S, L], at the tokens `marks` names them at."""
    at = dfinal + offsets(tl.maximum(marks, 0).to(tl.int64), cols, W)
    return tl.load(at, mask=(marks >= 0) & ok[None, :], other=0.0)


@triton.jit
def leave_piece(
    starts, dfinal, row, piece, pieces, block, W: tl.constexpr, I: tl.constexpr, L: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, CODES: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """For every chunk c after a piece [1, L]; if STARTS, 0 unless it is the last one."""
    cs = ()
    for n in tl.static_range(CHUNKS):
        o = n * CHUNK + tl.arange(0, L) % CHUNK
        c = tl.full([L], 0.0, tl.float32)
        if not STARTS:
            at = starts + (row * (pieces - 1) + piece) * W + block * I + o
            c += tl.load(at, mask=o < tl.where(piece < pieces - 1, I, 0), other=0.0)
        if not CODES:
            at = dfinal + row * W + block * I + o
            c += tl.load(at, mask=o < tl.where(piece == pieces - 1, I, 0), other=0.0)
        cs = cs + (c[None, :],)
    return cs


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
    row, which, block = locate(pieces - 1, N)
    piece = which + 1
    a_weights = load_weights(a_weight, block, I, K, CHUNK, CHUNKS, DTYPE)
    a_biases = load_biases(a_bias, block, I, S, G, CHUNK, CHUNKS)
    rates, _slopes = load_rates(a_param, block, W, I, S, G, CHUNK, CHUNKS)
    token, channel = places(S, G, CHUNK)
    start = piece * piece_length
    stop = tl.minimum(start + piece_length, tokens)
    x += row * x_row + block * I
    dy += row * y_row + block * I
    if CODES:
        codes += row * tokens
        lasts += row * tokens
    cs = leave_piece(starts, dfinal, row, piece, pieces, block, W, I, L, CHUNK, CHUNKS, CODES, True)
    products = ones(L, CHUNKS)
    tiles = tl.cdiv(stop - start, C)
    for k in range(tiles):
        t = start + (tiles - 1 - k) * C
        real_tile = t + tl.arange(0, C) < stop
        real = t + token < stop
        if CODES:
            real_tile = marks_of(codes, t, tl.arange(0, C), stop, MASKED) != MASKED
            marks = marks_of(codes, t, token, stop, MASKED)
            real = marks != MASKED
            ended = marks_of(lasts, t, token, stop, -1)
        tile = load_tile(x, t, real_tile, X_TOKEN, I, K, C, EVEN, DTYPE)
        before = ()
        through = ()
        for n in tl.static_range(CHUNKS):
            ok = n * CHUNK + channel < I
            pull = load_lanes(dy + n * CHUNK, t, real, ok, Y_TOKEN, S, G, CHUNK, EVEN, WHOLE)
            r = sigmoid(lanes(dot(a_weights[n], tile, PRECISION), S, G, CHUNK) * -LOG2E + a_biases[n])
            if not EVEN:
                r = tl.where(real, r, 0.0)
            a = exp2(r * rates[n])
            if CODES:
                pull += load_ends(dfinal, ended, block * I + n * CHUNK + channel, ok, W)
                a = tl.where(marks >= 0, 0.0, a)
            a, pull = turned(a, S), turned(pull, S)
            a, b = tl.associative_scan((a, a * pull), 0, compose)
            _later, c, product = scan_segments(a, b, cs[n], S, G, CHUNK, True)
            before = before + (c,)
            through = through + (products[n] * product,)
        cs = before
        products = through
    for n in tl.static_range(CHUNKS):
        to = (row * (pieces - 1) + which) * W + block * I
        store_channels(decays + to, products[n], I, n * CHUNK, CHUNK, L, True)
        store_channels(starts + to, cs[n], I, n * CHUNK, CHUNK, L, True)


@triton.jit
def zeros(HEIGHT: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + (tl.zeros([HEIGHT, WIDTH], tl.float32),)
    return found


@triton.jit
def load_rows(x, t, real, stride, I: tl.constexpr, K: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
              DTYPE: tl.constexpr):  # fmt: skip
    """`load_tile`'s tokens as [C, K]: to turn a tile around costs more than to load it twice."""
    i = tl.arange(0, K)
    at = x + tl.cast(t, tl.int64) * stride + tl.arange(0, C)[:, None] * stride + i[None, :]
    if EVEN:
        rows = tl.load(at, mask=(i < I)[None, :], other=0.0)
    else:
        rows = tl.load(at, mask=real[:, None] & (i < I)[None, :], other=0.0)
    return rows.to(DTYPE)


@triton.jit
def load_starts(checkpoints, t, channel, I: tl.constexpr, W: tl.constexpr, EVERY: tl.constexpr, CHUNK: tl.constexpr,
                CHUNKS: tl.constexpr):  # fmt: skip
    """h before a tile, one [1, L] for every chunk."""
    hs = ()
    for n in tl.static_range(CHUNKS):
        o = n * CHUNK + channel
        h = tl.load(checkpoints + tl.cast(t // EVERY, tl.int64) * W + o, mask=o < I, other=0.0)
        hs = hs + (h[None, :],)
    return hs


@triton.jit
def store_sums(
    sums, dweights, dbiases, block, which, N: tl.constexpr, I: tl.constexpr, K: tl.constexpr, G: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Sums of one gate (0 or 1) over a program's tokens: of its weights' gradient and of its bias'."""
    i = tl.arange(0, K)[None, :]
    for n in tl.static_range(CHUNKS):
        o = n * CHUNK + tl.arange(0, CHUNK)[:, None]
        to = sums + which * N * I * I + block * I * I + i * I + o
        tl.store(to, dweights[n], mask=(i < I) & (o < I))
        store_vector(sums + (2 * N * I + which * N + block) * I, dbiases[n], n * CHUNK, I, G, CHUNK)


@triton.jit
def store_vector(to, x, first, I: tl.constexpr, G: tl.constexpr, CHUNK: tl.constexpr):
    """The sum over a tile's segments of x [1, L]."""
    o = first + tl.arange(0, CHUNK)
    tl.store(to + o, tl.sum(tl.reshape(x, [G, CHUNK]), 0), mask=o < I)


@triton.jit
def gradient_kernel(
    dy, x, a_weight, a_bias, x_weight, x_bias, a_param, dfinal, state, codes, lasts, starts, checkpoints,
    dx, sums, dstate,
    rows, rows_each, tokens, pieces, piece_length, y_row, x_row,
    Y_TOKEN: tl.constexpr, X_TOKEN: tl.constexpr, N: tl.constexpr, I: tl.constexpr, STATE: tl.constexpr,
    CODES: tl.constexpr, EVEN: tl.constexpr, EVERY: tl.constexpr, K: tl.constexpr, S: tl.constexpr, G: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of a piece of `rows_each` batch rows; those of weights, biases and a_param as partial sums."""
    W: tl.constexpr = N * I
    C: tl.constexpr = G * S
    L: tl.constexpr = G * CHUNK
    WHOLE: tl.constexpr = CHUNKS * CHUNK == I
    group, piece, block = locate(pieces, N)
    a_weights = load_weights(a_weight, block, I, K, CHUNK, CHUNKS, DTYPE)
    x_weights = load_weights(x_weight, block, I, K, CHUNK, CHUNKS, DTYPE)
    a_biases = load_biases(a_bias, block, I, S, G, CHUNK, CHUNKS)
    x_biases = load_biases(x_bias, block, I, S, G, CHUNK, CHUNKS)
    rates, _slopes = load_rates(a_param, block, W, I, S, G, CHUNK, CHUNKS)
    token, channel = places(S, G, CHUNK)
    i = tl.arange(0, K)
    start = piece * piece_length
    stop = tl.minimum(start + piece_length, tokens)
    tiles = tl.cdiv(stop - start, C)
    da_weights, dx_weights = zeros(CHUNK, K, CHUNKS), zeros(CHUNK, K, CHUNKS)
    da_biases, dx_biases, drates = zeros(1, L, CHUNKS), zeros(1, L, CHUNKS), zeros(1, L, CHUNKS)
    for row in range(group * rows_each, tl.minimum((group + 1) * rows_each, rows)):
        x_here, dy_here = x + row * x_row + block * I, dy + row * y_row + block * I
        dx_here = dx + row * tokens * W + block * I
        kept = checkpoints + row * tl.cdiv(tokens, EVERY) * W + block * I
        cs = leave_piece(starts, dfinal, row, piece, pieces, block, W, I, L, CHUNK, CHUNKS, CODES, False)
        for k in range(tiles):
            t = start + (tiles - 1 - k) * C
            real_tile = t + tl.arange(0, C) < stop
            real = t + token < stop
            marks = token
            if CODES:
                real_tile = marks_of(codes + row * tokens, t, tl.arange(0, C), stop, MASKED) != MASKED
                marks = marks_of(codes + row * tokens, t, token, stop, MASKED)
                real = marks != MASKED
                ended = marks_of(lasts + row * tokens, t, token, stop, -1)
            tile = load_tile(x_here, t, real_tile, X_TOKEN, I, K, C, EVEN, DTYPE)
            rows_of_tile = load_rows(x_here, t, real_tile, X_TOKEN, I, K, C, EVEN, DTYPE)
            hs = load_starts(kept, t, channel, I, W, EVERY, CHUNK, CHUNKS)
            pull_x = tl.zeros([K, C], tl.float32)
            before = ()
            sums_a, sums_x, bias_a, bias_x, sums_rate = (), (), (), (), ()
            for n in tl.static_range(CHUNKS):
                ok = n * CHUNK + channel < I
                cols = block * I + n * CHUNK + channel
                inputs = load_lanes(x_here + n * CHUNK, t, real, ok, X_TOKEN, S, G, CHUNK, EVEN, WHOLE)
                a_gate = lanes(dot(a_weights[n], tile, PRECISION), S, G, CHUNK) * -LOG2E + a_biases[n]
                x_gate = lanes(dot(x_weights[n], tile, PRECISION), S, G, CHUNK) * -LOG2E + x_biases[n]
                r, gate = sigmoids(a_gate, x_gate)
                if not EVEN:
                    r = tl.where(real, r, 0.0)
                a, u = decay_and_rest(r, rates[n])
                unseen = first_lanes(state, row, cols, W, L, CHUNK, STATE and not CODES)
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
                h, _end, _product = scan_segments(a_all, b_all, hs[n], S, G, CHUNK, False)
                h = p * h + q
                if CODES:
                    h = tl.where(enters, past, h)
                # the derivative of sqrt(u) is clipped to 1000, so that of sqrt(1 − a²) by log a is −a² min(root, 2000)
                to_rate = a * (h - a * gated * tl.minimum(root, 2000.0)) * r
                to_x = u * root * gate
                to_gate = inputs - gated
                pull = load_lanes(dy_here + n * CHUNK, t, real, ok, Y_TOKEN, S, G, CHUNK, EVEN, WHOLE)
                if CODES:
                    pull += load_ends(dfinal, ended, cols, ok, W)
                passed, pull = turned(passed, S), turned(pull, S)
                a_all, b_all, p, q = tl.associative_scan((passed, passed * pull, one, pull), 0, compose_seen)
                later, c, _product = scan_segments(a_all, b_all, cs[n], S, G, CHUNK, True)
                dh = turned(p * later + q, S)
                if CODES:
                    to = dstate + offsets(tl.maximum(marks, 0).to(tl.int64), cols, W)
                    tl.store(to, a * dh, mask=enters & ok[None, :])
                direct = dh * to_x
                drate = dh * to_rate
                pull_gate = direct * to_gate
                pull_decay = (rates[n] * LN2) * drate * (1.0 - r)
                before = before + (c,)
                bias_a = bias_a + (da_biases[n] + tl.sum(pull_decay, 0)[None, :],)
                bias_x = bias_x + (dx_biases[n] + tl.sum(pull_gate, 0)[None, :],)
                sums_rate = sums_rate + (drates[n] + tl.sum(drate, 0)[None, :],)
                pull_a = tile_of(pull_decay, S, G, CHUNK, DTYPE)
                pull_g = tile_of(pull_gate, S, G, CHUNK, DTYPE)
                sums_a = sums_a + (da_weights[n] + dot(pull_a, rows_of_tile, PRECISION),)
                sums_x = sums_x + (dx_weights[n] + dot(pull_g, rows_of_tile, PRECISION),)
                pull_x += dot(tl.trans(a_weights[n]), pull_a, PRECISION)
                pull_x += dot(tl.trans(x_weights[n]), pull_g, PRECISION)
                own = (i[:, None] == n * CHUNK + tl.arange(0, CHUNK)[None, :]).to(tl.float32).to(DTYPE)
                pull_x += dot(own, tile_of(direct, S, G, CHUNK, DTYPE), PRECISION)
            cs = before
            da_weights, dx_weights = sums_a, sums_x
            da_biases, dx_biases, drates = bias_a, bias_x, sums_rate
            to = dx_here + tl.cast(t, tl.int64) * W + tl.arange(0, C)[None, :] * W + i[:, None]
            tl.store(to, pull_x.to(dx.dtype.element_ty), mask=(i < I)[:, None] & (t + tl.arange(0, C) < stop)[None, :])
        if not CODES:
            for n in tl.static_range(CHUNKS):
                store_channels(dstate + row * W + block * I, cs[n], I, n * CHUNK, CHUNK, L, piece == 0)
    sums += (group * pieces + piece) * (2 * N * I * I + 3 * W)
    store_sums(sums, da_weights, da_biases, block, 0, N, I, K, G, CHUNK, CHUNKS)
    store_sums(sums, dx_weights, dx_biases, block, 1, N, I, K, G, CHUNK, CHUNKS)
    _rates, slopes = load_rates(a_param, block, W, I, S, G, CHUNK, CHUNKS)
    for n in tl.static_range(CHUNKS):
        to = sums + 2 * N * I * I + 2 * W + block * I
        store_vector(to, -8.0 * slopes[n] * drates[n], n * CHUNK, I, G, CHUNK)
