"""Kernels of the RG-LRU: one warp walks a piece of the sequence for a block of channels, row by row in registers.

The gates cost more than the scan: per element five operations of the special function units (two exponentials, one
reciprocal for both sigmoids, exp(log a), one rsqrt for the multiplier and its slope), which is about what those units
can do in the time the memory needs. So rows are asked for ROWS at a time, and a step computes no more than it needs.

`codes` [B, T] marks rows when there is a mask or a packing: −1 an ordinary token, −2 a masked one, n ≥ 0 the first
real token of sequence n. `lasts` [B, T] holds n ≥ 0 at the last position of sequence n, else −1. Without them the one
sequence of a batch row begins at token 0. A masked row has a gate of −inf and x = 0: a = 1 and nothing added.
"""

import triton
import triton.language as tl

from latte.ops.triton.kernels.arithmetic import LOG2_E, MINUS_INF

MASKED = tl.constexpr(-2)
LARGEST = tl.constexpr(9.223372036854775808e18)  # 2**63: the product of two is finite
VANISHED = tl.constexpr(-88.0)  # σ of less is 0 in float32
HALF_MAX = tl.constexpr(65504.0)


@triton.jit
def decay_rate(a_param, cols, W: tl.constexpr):
    """8 softplus(Λ), kept finite so that rate · 0 = 0, and σ(Λ)."""
    p = tl.load(a_param + cols, mask=cols < W, other=0.0).to(tl.float32)
    e = tl.exp(-tl.abs(p))
    series = e * (1.0 - e * (0.5 - e * (0.3333333333 - e * (0.25 - e * 0.2))))  # of log(1 + e)
    softplus = tl.maximum(p, 0.0) + tl.where(e < 0.03125, series, tl.log(1.0 + e))
    return tl.minimum(8.0 * softplus, 1e30), tl.where(p < 0.0, e, 1.0) / (1.0 + e)


@triton.jit
def load_codes(codes, t, stop, other: tl.constexpr, ROWS: tl.constexpr):
    """The codes of ROWS rows from token t on; `other` after the end."""
    rows = ()
    for u in tl.static_range(ROWS):
        rows = rows + (tl.load(codes + t + u, mask=t + u < stop, other=other),)
    return rows


@triton.jit
def load_rows(
    x, cols, t, stop, codes, other: tl.constexpr, stride: tl.constexpr, W: tl.constexpr,
    EVEN: tl.constexpr, CODES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of x from token t on, all asked for before any is used; `other` where they do not count."""
    x += tl.cast(t, tl.int64) * stride + cols
    rows = ()
    for u in tl.static_range(ROWS):
        if EVEN:
            rows = rows + (tl.load(x + u * stride),)
        elif CODES:
            rows = rows + (tl.load(x + u * stride, mask=cols < tl.where(codes[u] == MASKED, 0, W), other=other),)
        else:
            rows = rows + (tl.load(x + u * stride, mask=cols < tl.where(t + u < stop, W, 0), other=other),)
    return rows


@triton.jit
def sigmoids(a_gate, x_gate):
    """σ of both gates, from one reciprocal; what is below 1e-19 counts as 1e-19 down to where it vanishes."""
    a_side = 1.0 + tl.minimum(tl.exp2(a_gate * -LOG2_E), LARGEST)
    x_side = 1.0 + tl.minimum(tl.exp2(x_gate * -LOG2_E), LARGEST)
    root = tl.rsqrt(a_side * x_side)
    both = root * root
    return tl.where(a_gate < VANISHED, 0.0, both * x_side), both * a_side


@triton.jit
def decay(a_gate, rate):
    """a = exp(−rate σ(a_gate)) alone."""
    root = tl.rsqrt(1.0 + tl.minimum(tl.exp2(a_gate * -LOG2_E), LARGEST))
    return tl.exp2(tl.where(a_gate < VANISHED, 0.0, root * root) * rate * -LOG2_E)


@triton.jit
def decay_and_rest(r, rate):
    """a and 1 − a²; the latter from its series where a is near 1."""
    z = rate * r
    a = tl.exp2(z * -LOG2_E)
    y = z + z
    series = y * (1.0 - y * (0.5 - y * (0.1666666667 - y * 0.0416666667)))
    return a, tl.where(y < 0.0625, series, 1.0 - a * a)


@triton.jit
def inverse_root(u):
    """1 / sqrt(u); u · inverse_root(u) is sqrt(u), at 0 too."""
    return tl.rsqrt(tl.maximum(u, 1e-30))


@triton.jit
def enter_sequence(code, state, cols, h, a, u, W: tl.constexpr, STATE: tl.constexpr):
    """At the first token of sequence `code`: the h before it, and where there is none, a = 0 and 1 − a² = 1."""
    if STATE:
        at = state + tl.cast(tl.maximum(code, 0), tl.int64) * W + cols
        given = tl.load(at, mask=cols < tl.where(code >= 0, W, 0), other=0.0)
        h = tl.where(code >= 0, tl.where(given == MINUS_INF, 0.0, given), h)
        a = tl.where(given == MINUS_INF, 0.0, a)
        u = tl.where(given == MINUS_INF, 1.0, u)
    else:
        h = tl.where(code >= 0, 0.0, h)
        a = tl.where(code >= 0, 0.0, a)
        u = tl.where(code >= 0, 1.0, u)
    return h, a, u


@triton.jit
def begin_row(state, row, cols, W: tl.constexpr, BLOCK: tl.constexpr, STATE: tl.constexpr):
    """h before token 0 of a batch row, and 1 where there is none."""
    h = tl.full([BLOCK], 0.0, tl.float32)
    unseen = tl.full([BLOCK], 1, tl.int32)
    if STATE:
        given = tl.load(state + row * W + cols, mask=cols < W, other=MINUS_INF)
        h = tl.where(given == MINUS_INF, 0.0, given)
        unseen = tl.where(given == MINUS_INF, 1, 0)
    return h, unseen


@triton.jit
def locate(pieces, W: tl.constexpr, BLOCK: tl.constexpr):
    """Batch row, piece and channels of a program; neighbours share rows, so that the memory is read in order."""
    blocks: tl.constexpr = (W + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    piece = program // blocks
    return tl.cast(piece // pieces, tl.int64), piece % pieces, (program % blocks) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def piece_ends_kernel(
    x, a_gate, x_gate, a_param, state, codes, decays, ends,
    tokens, pieces, piece_length, x_row, a_row, g_row,
    X_TOKEN: tl.constexpr, A_TOKEN: tl.constexpr, G_TOKEN: tl.constexpr, W: tl.constexpr,
    STATE: tl.constexpr, CODES: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What each piece but the last does to h: h ← decays · h + ends."""
    row, piece, cols = locate(pieces - 1, W, BLOCK)
    rate, _ = decay_rate(a_param, cols, W)
    start = piece * piece_length
    stop = start + piece_length
    h = tl.full([BLOCK], 0.0, tl.float32)
    unseen = tl.full([BLOCK], 1, tl.int32)
    if not CODES:
        if piece == 0:
            h, unseen = begin_row(state, row, cols, W, BLOCK, STATE)
    product = tl.full([BLOCK], 1.0, tl.float32)
    for t in range(start, stop, ROWS):
        marks = ()
        if CODES:
            marks = load_codes(codes + row * tokens, t, stop, MASKED, ROWS)
        xs = load_rows(x + row * x_row, cols, t, stop, marks, 0.0, X_TOKEN, W, EVEN, CODES, ROWS)
        a_gates = load_rows(a_gate + row * a_row, cols, t, stop, marks, MINUS_INF, A_TOKEN, W, EVEN, CODES, ROWS)
        x_gates = load_rows(x_gate + row * g_row, cols, t, stop, marks, 0.0, G_TOKEN, W, EVEN, CODES, ROWS)
        for k in tl.static_range(ROWS):
            r, i = sigmoids(a_gates[k].to(tl.float32), x_gates[k].to(tl.float32))
            a, u = decay_and_rest(r, rate)
            if CODES:
                h, a, u = enter_sequence(marks[k], state, cols, h, a, u, W, STATE)
                product = tl.where(marks[k] >= 0, 0.0, product)
            elif k == 0:
                first = tl.where(t == 0, unseen, 0)
                a, u = tl.where(first == 1, 0.0, a), tl.where(first == 1, 1.0, u)
            h = a * h + u * inverse_root(u) * (i * xs[k].to(tl.float32))
            product = product * a
    at = (row * (pieces - 1) + piece) * W + cols
    tl.store(decays + at, product, mask=cols < W)
    tl.store(ends + at, h, mask=cols < W)


@triton.jit
def one_after_the_other(decay, end, later_decay, later_end):
    """What two pieces do to h, in that order."""
    return decay * later_decay, later_decay * end + later_end


@triton.jit
def scan_pieces_kernel(
    decays, ends, count, W: tl.constexpr, REVERSE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """ends[n] ← decays[n] · ends[n − 1] + ends[n] along a batch row, ROWS pieces at once; from the last if REVERSE."""
    row, _, cols = locate(1, W, BLOCK)
    n = tl.arange(0, ROWS)
    h = tl.full([BLOCK], 0.0, tl.float32)
    for begin in range(0, count, ROWS):
        place = count - 1 - (begin + n) if REVERSE else begin + n
        at = (row * count + place)[:, None] * W + cols[None, :]
        ok = (begin + n < count)[:, None] & (cols < W)[None, :]
        decay = tl.load(decays + at, mask=ok, other=1.0)
        end = tl.load(ends + at, mask=ok, other=0.0)
        decay, end = tl.associative_scan((decay, end), 0, one_after_the_other)
        after = decay * h[None, :] + end
        tl.store(ends + at, after, mask=ok)
        h = tl.sum(tl.where((n == ROWS - 1)[:, None], after, 0.0), 0)


@triton.jit
def output_kernel(
    x, a_gate, x_gate, a_param, state, codes, lasts, ends, y, final, checkpoints,
    tokens, pieces, piece_length, x_row, a_row, g_row,
    X_TOKEN: tl.constexpr, A_TOKEN: tl.constexpr, G_TOKEN: tl.constexpr, W: tl.constexpr,
    STATE: tl.constexpr, CODES: tl.constexpr, SAVE: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y of a piece, the states of sequences that end in it, and, if SAVE, h before every ROWS tokens."""
    row, piece, cols = locate(pieces, W, BLOCK)
    rate, _ = decay_rate(a_param, cols, W)
    start = piece * piece_length
    stop = tl.minimum(start + piece_length, tokens)
    h = tl.full([BLOCK], 0.0, tl.float32)
    unseen = tl.full([BLOCK], 1, tl.int32)
    if piece > 0:
        h = tl.load(ends + (row * (pieces - 1) + piece - 1) * W + cols, mask=cols < W, other=0.0)
    elif not CODES:
        h, unseen = begin_row(state, row, cols, W, BLOCK, STATE)
    y += row * tokens * W + cols
    checkpoints += row * ((tokens + ROWS - 1) // ROWS) * W + cols
    for t in range(start, stop, ROWS):
        marks = ()
        if CODES:
            marks = load_codes(codes + row * tokens, t, stop, MASKED, ROWS)
            ended = load_codes(lasts + row * tokens, t, stop, -1, ROWS)
        xs = load_rows(x + row * x_row, cols, t, stop, marks, 0.0, X_TOKEN, W, EVEN, CODES, ROWS)
        a_gates = load_rows(a_gate + row * a_row, cols, t, stop, marks, MINUS_INF, A_TOKEN, W, EVEN, CODES, ROWS)
        x_gates = load_rows(x_gate + row * g_row, cols, t, stop, marks, 0.0, G_TOKEN, W, EVEN, CODES, ROWS)
        if SAVE:
            tl.store(checkpoints + tl.cast(t // ROWS, tl.int64) * W, h, mask=cols < W)
        at = y + tl.cast(t, tl.int64) * W
        for k in tl.static_range(ROWS):
            r, i = sigmoids(a_gates[k].to(tl.float32), x_gates[k].to(tl.float32))
            a, u = decay_and_rest(r, rate)
            if CODES:
                h, a, u = enter_sequence(marks[k], state, cols, h, a, u, W, STATE)
            elif k == 0:
                first = tl.where(t == 0, unseen, 0)
                a, u = tl.where(first == 1, 0.0, a), tl.where(first == 1, 1.0, u)
            h = a * h + u * inverse_root(u) * (i * xs[k].to(tl.float32))
            out = h
            if y.dtype.element_ty == tl.float16:
                out = tl.minimum(tl.maximum(out, -HALF_MAX), HALF_MAX)
            if CODES:
                out = tl.where(marks[k] == MASKED, 0.0, out)
                to = final + tl.cast(tl.maximum(ended[k], 0), tl.int64) * W + cols
                tl.store(to, h, mask=cols < tl.where(ended[k] >= 0, W, 0))
            if EVEN:
                tl.store(at + k * W, out.to(y.dtype.element_ty))
            else:
                tl.store(at + k * W, out.to(y.dtype.element_ty), mask=cols < tl.where(t + k < stop, W, 0))
    if not CODES:
        if piece == pieces - 1:
            tl.store(final + row * W + cols, h, mask=cols < W)
