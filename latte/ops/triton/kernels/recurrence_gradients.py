"""Kernels of the RG-LRU's gradients: dh runs backwards over the pieces as h ran forwards; see `recurrence_kernels`.

With c_t = a_t dh_t, what a token passes on to the one before, dh_t = dy_t + c_{t+1}. A piece knows h before every
ROWS tokens from the forward pass; it recomputes those few rows forwards, then walks them backwards.
"""

import triton
import triton.language as tl

from latte.ops.triton.kernels.arithmetic import MINUS_INF
from latte.ops.triton.kernels.recurrence import (
    MASKED,
    begin_row,
    decay,
    decay_and_rest,
    decay_rate,
    enter_sequence,
    inverse_root,
    load_codes,
    load_rows,
    locate,
    sigmoids,
)


@triton.jit
def load_final(dfinal, n, cols, W: tl.constexpr):
    """The gradient of the state that sequence n leaves; 0 if n < 0."""
    at = dfinal + tl.cast(tl.maximum(n, 0), tl.int64) * W + cols
    return tl.load(at, mask=cols < tl.where(n >= 0, W, 0), other=0.0)


@triton.jit
def piece_starts_kernel(
    dy, a_gate, a_param, dfinal, codes, lasts, decays, starts,
    tokens, pieces, piece_length, y_row, a_row,
    Y_TOKEN: tl.constexpr, A_TOKEN: tl.constexpr, W: tl.constexpr,
    STATE: tl.constexpr, CODES: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What each piece but the first does to c: c ← decays · c + starts."""
    row, piece, cols = locate(pieces - 1, W, BLOCK)
    at = (row * (pieces - 1) + piece) * W + cols
    piece += 1
    rate, _ = decay_rate(a_param, cols, W)
    start = piece * piece_length
    stop = tl.minimum(start + piece_length, tokens)
    c = tl.full([BLOCK], 0.0, tl.float32)
    if not CODES:
        c = load_final(dfinal, tl.where(piece == pieces - 1, row, -1), cols, W)
    product = tl.full([BLOCK], 1.0, tl.float32)
    groups = (stop - start + ROWS - 1) // ROWS
    for n in range(groups):
        t = start + (groups - 1 - n) * ROWS
        marks = ()
        if CODES:
            marks = load_codes(codes + row * tokens, t, stop, MASKED, ROWS)
            ended = load_codes(lasts + row * tokens, t, stop, -1, ROWS)
        dys = load_rows(dy + row * y_row, cols, t, stop, marks, 0.0, Y_TOKEN, W, EVEN, CODES, ROWS)
        a_gates = load_rows(a_gate + row * a_row, cols, t, stop, marks, MINUS_INF, A_TOKEN, W, EVEN, CODES, ROWS)
        for k in tl.static_range(ROWS):
            a = decay(a_gates[ROWS - 1 - k].to(tl.float32), rate)
            dh = dys[ROWS - 1 - k].to(tl.float32) + c
            if CODES:
                dh += load_final(dfinal, ended[ROWS - 1 - k], cols, W)
                a = tl.where(marks[ROWS - 1 - k] >= 0, 0.0, a)
            c = a * dh
            product = product * a
    tl.store(decays + at, product, mask=cols < W)
    tl.store(starts + at, c, mask=cols < W)


@triton.jit
def recompute_rows(
    xs, a_gates, x_gates, marks, rate, h, unseen, t, state, cols, W: tl.constexpr,
    STATE: tl.constexpr, CODES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """For each row r, a, and the factors of dh that give d log a, dx, and, from dx, dx_gate."""
    rs = ()
    decays = ()
    to_decay = ()
    to_x = ()
    to_gate = ()
    for k in tl.static_range(ROWS):
        x = xs[k].to(tl.float32)
        r, i = sigmoids(a_gates[k].to(tl.float32), x_gates[k].to(tl.float32))
        a, u = decay_and_rest(r, rate)
        if CODES:
            h, a, u = enter_sequence(marks[k], state, cols, h, a, u, W, STATE)
        elif k == 0:
            first = tl.where(t == 0, unseen, 0)
            a, u = tl.where(first == 1, 0.0, a), tl.where(first == 1, 1.0, u)
        root = inverse_root(u)
        multiplier = u * root
        gated = i * x
        kept = a * h
        # the derivative of sqrt(u) is clipped to 1000, so that of sqrt(1 − a²) by log a is −a² min(root, 2000)
        to_decay = to_decay + (kept - a * a * gated * tl.minimum(root, 2000.0),)
        h = kept + multiplier * gated
        rs = rs + (r,)
        decays = decays + (a,)
        to_x = to_x + (multiplier * i,)
        to_gate = to_gate + (x - gated,)
    return rs, decays, to_decay, to_x, to_gate


@triton.jit
def store_row(x, value, row_ok, cols, W: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        tl.store(x + cols, value.to(x.dtype.element_ty))
    else:
        tl.store(x + cols, value.to(x.dtype.element_ty), mask=cols < tl.where(row_ok, W, 0))


@triton.jit
def gradient_kernel(
    dy, x, a_gate, x_gate, a_param, dfinal, state, codes, lasts, starts, checkpoints,
    dx, da_gate, dx_gate, dparam, dstate,
    tokens, pieces, piece_length, y_row, x_row, a_row, g_row,
    Y_TOKEN: tl.constexpr, X_TOKEN: tl.constexpr, A_TOKEN: tl.constexpr, G_TOKEN: tl.constexpr, W: tl.constexpr,
    STATE: tl.constexpr, CODES: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All gradients of a piece; that of a_param as one partial sum per piece."""
    row, piece, cols = locate(pieces, W, BLOCK)
    rate, slope = decay_rate(a_param, cols, W)
    start = piece * piece_length
    stop = tl.minimum(start + piece_length, tokens)
    c = tl.full([BLOCK], 0.0, tl.float32)
    if piece < pieces - 1:
        c = tl.load(starts + (row * (pieces - 1) + piece) * W + cols, mask=cols < W, other=0.0)
    elif not CODES:
        c = load_final(dfinal, row, cols, W)
    _, unseen = begin_row(state, row, cols, W, BLOCK, STATE and not CODES)
    checkpoints += row * ((tokens + ROWS - 1) // ROWS) * W + cols
    drate = tl.full([BLOCK], 0.0, tl.float32)
    groups = (stop - start + ROWS - 1) // ROWS
    for n in range(groups):
        t = start + (groups - 1 - n) * ROWS
        marks = ()
        if CODES:
            marks = load_codes(codes + row * tokens, t, stop, MASKED, ROWS)
            ended = load_codes(lasts + row * tokens, t, stop, -1, ROWS)
        h = tl.load(checkpoints + tl.cast(t // ROWS, tl.int64) * W, mask=cols < W, other=0.0)
        xs = load_rows(x + row * x_row, cols, t, stop, marks, 0.0, X_TOKEN, W, EVEN, CODES, ROWS)
        a_gates = load_rows(a_gate + row * a_row, cols, t, stop, marks, MINUS_INF, A_TOKEN, W, EVEN, CODES, ROWS)
        x_gates = load_rows(x_gate + row * g_row, cols, t, stop, marks, 0.0, G_TOKEN, W, EVEN, CODES, ROWS)
        dys = load_rows(dy + row * y_row, cols, t, stop, marks, 0.0, Y_TOKEN, W, EVEN, CODES, ROWS)
        rs, decays, to_decay, to_x, to_gate = recompute_rows(
            xs, a_gates, x_gates, marks, rate, h, unseen, t, state, cols, W, STATE, CODES, ROWS
        )
        at = (row * tokens + t) * W
        for k in tl.static_range(ROWS):
            dh = dys[ROWS - 1 - k].to(tl.float32) + c
            if CODES:
                dh += load_final(dfinal, ended[ROWS - 1 - k], cols, W)
            c = decays[ROWS - 1 - k] * dh
            if CODES:
                mark = marks[ROWS - 1 - k]
                to = dstate + tl.cast(tl.maximum(mark, 0), tl.int64) * W + cols
                tl.store(to, c, mask=cols < tl.where(mark >= 0, W, 0))
                c = tl.where(mark >= 0, 0.0, c)
            value = dh * to_x[ROWS - 1 - k]
            ok = t + ROWS - 1 - k < stop
            to = at + (ROWS - 1 - k) * W
            store_row(dx + to, value, ok, cols, W, EVEN)
            store_row(dx_gate + to, value * to_gate[ROWS - 1 - k], ok, cols, W, EVEN)
            r = rs[ROWS - 1 - k]
            drate_row = dh * to_decay[ROWS - 1 - k] * r
            drate += drate_row
            store_row(da_gate + to, -rate * drate_row * (1.0 - r), ok, cols, W, EVEN)
    tl.store(dparam + (row * pieces + piece) * W + cols, -8.0 * slope * drate, mask=cols < W)
    if not CODES:
        if piece == 0:
            tl.store(dstate + row * W + cols, c, mask=cols < W)
