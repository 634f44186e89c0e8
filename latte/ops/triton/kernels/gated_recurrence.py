"""Kernels of the RG-LRU with its gates: what the gates are is never written to memory.

A program walks the tiles of a piece of one batch row for CHUNK channels of one block of the gates' weights, which it
keeps. The products of a tile are taken on the matrix units, and the rest is done with S tokens of one channel in each
thread: a tile [CHUNK, C] becomes [S, L], whose lanes are the channels of G segments of S tokens each,
L = G · CHUNK = 32 · warps and C = G · S. So the scan over the S tokens of a segment needs no exchange between threads;
what the segments do to h is scanned once per tile.

Two things make Triton lay out values so: `settle` scans over nothing, which Triton does in its
own layout and not in that of whatever came before, and
loads and stores promise no alignment (`offsets`), so that none of them takes several channels to a thread.

`codes` and `lasts` are as in `kernels/recurrence.py`; a masked token, or one after the end, has r = 0 and x = 0: a = 1
and nothing added.
"""

import triton
import triton.language as tl

from latte.ops.triton.kernels.arithmetic import INTERPRETED, LOG2_E, MINUS_INF, dot, exp2, inverse, root_of
from latte.ops.triton.kernels.recurrence import HALF_MAX, LARGEST, MASKED, VANISHED, begin_row, decay_rate


@triton.jit
def sigmoids(a_gate, x_gate):
    """σ of both gates, given times −log2 e, from one inverse; below 1e-19 it counts as 1e-19 to where it vanishes."""
    a_side = 1.0 + tl.minimum(exp2(a_gate), LARGEST)
    x_side = 1.0 + tl.minimum(exp2(x_gate), LARGEST)
    both = inverse(a_side * x_side)
    return tl.where(a_gate > VANISHED * -LOG2_E, 0.0, both * x_side), both * a_side


@triton.jit
def sigmoid(gate):
    """σ of a gate that is given times −log2 e."""
    return inverse(1.0 + exp2(gate))


@triton.jit
def decay_and_rest(r, rate):
    """a = 2^(rate r) for a rate < 0, and 1 − a²; the latter from its series where a is near 1."""
    z = r * rate
    a = exp2(z)
    series = z * (-1.3862943611 - z * (0.9609060278 + z * (0.4440328653 + z * 0.1538912459)))
    return a, tl.where(z > -0.045, series, 1.0 - a * a)


@triton.jit
def compose(a, b, then_a, then_b):
    """h ← a h + b, then h ← then_a h + then_b."""
    return then_a * a, then_a * b + then_b


@triton.jit
def compose_seen(a, b, p, q, then_a, then_b, then_p, then_q):
    """The same, with p h + q: what the last of the tokens sees."""
    return then_a * a, then_a * b + then_b, then_p * a, then_p * b + then_q


@triton.jit
def settle(x, S: tl.constexpr, L: tl.constexpr):
    """x as [S, L], each lane in a thread."""
    return tl.reshape(tl.cumsum(tl.reshape(x, [1, S, L]), 0), [S, L])


@triton.jit
def lanes(x, S: tl.constexpr, G: tl.constexpr, CHUNK: tl.constexpr):
    """[CHUNK, C] as [S, L]."""
    return settle(tl.permute(tl.reshape(x, [CHUNK, G, S]), [2, 1, 0]), S, G * CHUNK)


@triton.jit
def narrowed(x, DTYPE: tl.constexpr):
    """x as DTYPE; what float16 cannot hold is as large as it can."""
    if tl.float16 == DTYPE:
        x = tl.minimum(tl.maximum(x, -HALF_MAX), HALF_MAX)
    return x.to(DTYPE)


@triton.jit
def places(S: tl.constexpr, G: tl.constexpr, CHUNK: tl.constexpr):
    """Of [S, L], the tokens in their tile, and the channels in their chunk [L]."""
    lane = tl.arange(0, G * CHUNK)
    return (lane // CHUNK)[None, :] * S + tl.arange(0, S)[:, None], lane % CHUNK


@triton.jit
def offsets(token, channel, stride):
    """Where channels [L] of tokens [S, L] lie."""
    return tl.multiple_of(token * stride + channel[None, :], [1, 1])


@triton.jit
def token_at(x, s, S: tl.constexpr):
    """Token s of x [S, L] as [1, L], where s is a number or [1, L]."""
    return tl.sum(tl.where(tl.arange(0, S)[:, None] == s, x, 0.0), 0, keep_dims=True)


@triton.jit
def turned(x, S: tl.constexpr):
    """x [S, L] from the last token to the first: free within a thread, unlike a scan from the end in Triton 3.6."""
    if INTERPRETED:  # which takes a flip element by element
        s = tl.arange(0, S)
        x = tl.sum(tl.where((s[:, None] + s[None, :] == S - 1)[:, :, None], x[None, :, :], 0.0), 1)
    else:
        x = tl.flip(x, 0)
    return x


@triton.jit
def all_segments(x, G: tl.constexpr, CHUNK: tl.constexpr):
    """For every lane, x [1, L] of all segments of its channel, [G, L].

    Channels come before segments for a while, which no layout of Triton's own can hold: so it does not stay as it is.
    """
    rows = tl.broadcast_to(tl.reshape(tl.trans(tl.reshape(x, [G, CHUNK])), [1, CHUNK * G]), [G, CHUNK * G])
    return settle(tl.permute(tl.reshape(rows, [G, CHUNK, G]), [2, 0, 1]), G, G * CHUNK)


@triton.jit
def scan_segments(a, b, h, S: tl.constexpr, G: tl.constexpr, CHUNK: tl.constexpr, REVERSE: tl.constexpr):
    """h before each segment, h after all, and the product of all a, given scans [S, L] and h before all, each [1, L].

    If REVERSE, segments come from the last to the first, and so do the scans' tokens.
    """
    a, b = all_segments(token_at(a, S - 1, S), G, CHUNK), all_segments(token_at(b, S - 1, S), G, CHUNK)
    order = (tl.arange(0, G * CHUNK) // CHUNK)[None, :]
    if REVERSE:
        a, b, order = turned(a, G), turned(b, G), G - 1 - order
    a, b = tl.associative_scan((a, b), 0, compose)  # by every thread for itself
    after = a * h + b
    before = tl.where(order == 0, h, token_at(after, order - 1, G))
    return before, token_at(after, G - 1, G), token_at(a, G - 1, G)


@triton.jit
def locate(pieces, N: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Batch row, piece, block and first channel in it of a program; neighbours share rows: memory is read in order."""
    program = tl.program_id(0)
    piece, which = program // (N * CHUNKS), program % (N * CHUNKS)
    return tl.cast(piece // pieces, tl.int64), piece % pieces, which // CHUNKS, which % CHUNKS * CHUNK


@triton.jit
def load_weights(weight, block, first, I: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, DTYPE: tl.constexpr):
    """Weights [out, in] of a chunk of a block's outputs, a factor [CHUNK, K]."""
    i = tl.arange(0, K)[None, :]
    o = first + tl.arange(0, CHUNK)[:, None]
    return tl.load(weight + block * I * I + i * I + o, mask=(i < I) & (o < I), other=0.0).to(DTYPE)


@triton.jit
def load_bias(x, block, o, I: tl.constexpr):
    """A bias times −log2 e at channels o [L] of a block, [1, L]."""
    return tl.load(x + block * I + o, mask=o < I, other=0.0).to(tl.float32)[None, :] * -LOG2_E


@triton.jit
def load_rate(a_param, cols, W: tl.constexpr):
    """−8 softplus(Λ) log2 e and σ(Λ) of channels [L], each [1, L]."""
    rate, slope = decay_rate(a_param, cols, W)
    return rate[None, :] * -LOG2_E, slope[None, :]


@triton.jit
def load_tile(x, t, real, stride, I: tl.constexpr, K: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
              DTYPE: tl.constexpr):  # fmt: skip
    """C tokens of a block's inputs from token t on, [K, C]; 0 where a token is not `real` [C]."""
    i = tl.arange(0, K)
    at = x + tl.cast(t, tl.int64) * stride + tl.arange(0, C)[None, :] * stride + i[:, None]
    if EVEN:
        if K == I:
            tile = tl.load(at)
        else:
            tile = tl.load(at, mask=(i < I)[:, None], other=0.0)
    else:
        tile = tl.load(at, mask=(i < I)[:, None] & real[None, :], other=0.0)
    return tile.to(DTYPE)


@triton.jit
def lane_pointers(x, t, stride: tl.constexpr, S: tl.constexpr, G: tl.constexpr, CHUNK: tl.constexpr):
    """Pointers [S, L] to a chunk of the tile that begins at token t: one for each thread, and known steps from it."""
    lane = tl.arange(0, G * CHUNK)
    first = tl.multiple_of(lane // CHUNK * (S * stride) + lane % CHUNK, [1])
    return (x + tl.cast(t, tl.int64) * stride + first)[None, :] + (tl.arange(0, S) * stride)[:, None]


@triton.jit
def load_lanes(x, t, real, ok, stride: tl.constexpr, S: tl.constexpr, G: tl.constexpr, CHUNK: tl.constexpr,
               EVEN: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """A chunk of some tile, [S, L] in float32; 0 where a token is not `real` and a channel not `ok`."""
    at = lane_pointers(x, t, stride, S, G, CHUNK)
    if not EVEN:
        found = tl.load(at, mask=real & ok[None, :], other=0.0)
    elif WHOLE:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=tl.broadcast_to(ok[None, :], [S, G * CHUNK]), other=0.0)
    return found.to(tl.float32)


@triton.jit
def store_lanes(x, t, value, real, ok, stride: tl.constexpr, S: tl.constexpr, G: tl.constexpr, CHUNK: tl.constexpr,
                EVEN: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    at = lane_pointers(x, t, stride, S, G, CHUNK)
    if not EVEN:
        tl.store(at, value, mask=real & ok[None, :])
    elif WHOLE:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=tl.broadcast_to(ok[None, :], [S, G * CHUNK]))


@triton.jit
def marks_of(codes, t, token, stop, other: tl.constexpr):
    """The codes of tokens from t on, in the shape of `token`; `other` after the end."""
    return tl.load(codes + t + token, mask=t + token < stop, other=other)


@triton.jit
def tile_marks(codes, t, token, stop, C: tl.constexpr, CODES: tl.constexpr):
    """Which tokens of the tile at t are real, along it [C] and where `token` [S, L] says, and the marks there."""
    if CODES:
        real_tile = marks_of(codes, t, tl.arange(0, C), stop, MASKED) != MASKED
        marks = marks_of(codes, t, token, stop, MASKED)
        real = marks != MASKED
    else:
        real_tile = t + tl.arange(0, C) < stop
        marks = token
        real = t + token < stop
    return real_tile, real, marks


@triton.jit
def gates_of(
    tile, a_factor, x_factor, a_shift, x_shift, real, S: tl.constexpr, G: tl.constexpr, CHUNK: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Both gates of a tile, [S, L]; that of the recurrence is 0 where a token is not real."""
    a_gate = lanes(dot(a_factor, tile, PRECISION), S, G, CHUNK) * -LOG2_E + a_shift
    x_gate = lanes(dot(x_factor, tile, PRECISION), S, G, CHUNK) * -LOG2_E + x_shift
    r, gate = sigmoids(a_gate, x_gate)
    if not EVEN:
        r = tl.where(real, r, 0.0)
    return r, gate


@triton.jit
def begin(
    a, u, marks, state, cols, ok, unseen, t, W: tl.constexpr, S: tl.constexpr, STATE: tl.constexpr, CODES: tl.constexpr
):
    """At the first token of a sequence: a and 1 − a² where nothing came before, whether it is one, and the h before.

    Without codes h before the row is carried into its first tile, and only what was `unseen` [L] is left to do.
    """
    past = 0.0
    enters = False
    if CODES:
        enters = marks >= 0
        if STATE:
            at = state + offsets(tl.maximum(marks, 0).to(tl.int64), cols, W)
            past = tl.load(at, mask=enters & ok[None, :], other=0.0)
            fresh = past == MINUS_INF
            past = tl.where(fresh, 0.0, past)
        else:
            fresh = enters
    else:
        fresh = (tl.arange(0, S)[:, None] == 0) & (tl.where(t == 0, unseen, 0) == 1)[None, :]
    return tl.where(fresh, 0.0, a), tl.where(fresh, 1.0, u), enters, past


@triton.jit
def first_lanes(state, row, cols, W: tl.constexpr, L: tl.constexpr, CHUNK: tl.constexpr, STATE: tl.constexpr):
    """1 for lanes [L] of a tile's first segment whose row begins with nothing seen."""
    _, unseen = begin_row(state, row, cols, W, L, STATE)
    return tl.where(tl.arange(0, L) < CHUNK, unseen, 0)


@triton.jit
def enter_piece(
    ends, state, row, piece, pieces, cols, ok, W: tl.constexpr, L: tl.constexpr, CHUNK: tl.constexpr,
    STATE: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """h before a piece [1, L], 0 if ENDS and not the first, and `first_lanes` [L]."""
    h, unseen = begin_row(state, row, cols, W, L, STATE)
    h = tl.where(piece == 0, h, 0.0)
    if not ENDS:
        at = ends + (row * (pieces - 1) + piece - 1) * W + cols
        h += tl.load(at, mask=ok & (cols < tl.where(piece > 0, W, 0)), other=0.0)
    return h[None, :], tl.where(tl.arange(0, L) < CHUNK, unseen, 0)


@triton.jit
def save_starts(
    checkpoints, before, t, stop, token, channel, ok, W: tl.constexpr, S: tl.constexpr, EVERY: tl.constexpr
):
    """Keep h before those of a tile's segments [1, L] that begin at a multiple of EVERY tokens."""
    at = tl.where(tl.arange(0, S)[:, None] == 0, t + token, stop)
    to = checkpoints + offsets((at // EVERY).to(tl.int64), channel, W)
    tl.store(to, tl.broadcast_to(before, token.shape), mask=(at < stop) & (at % EVERY == 0) & ok[None, :])


@triton.jit
def store_channels(to, value, cols, ok, CHUNK: tl.constexpr, L: tl.constexpr, condition):
    """Where the scalar condition holds, a chunk's channels from value [1, L], alike in all segments."""
    keep = (tl.arange(0, L) < tl.where(condition, CHUNK, 0)) & ok
    tl.store((to + cols)[None, :], value, mask=keep[None, :])


@triton.jit
def forward_kernel(
    x, a_weight, a_bias, x_weight, x_bias, a_param, state, codes, lasts, decays, ends, y, final, checkpoints,
    tokens, pieces, piece_length, x_row,
    X_TOKEN: tl.constexpr, N: tl.constexpr, I: tl.constexpr, STATE: tl.constexpr, CODES: tl.constexpr,
    EVEN: tl.constexpr, SAVE: tl.constexpr, ENDS: tl.constexpr, K: tl.constexpr, S: tl.constexpr, G: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y of a piece, the states of sequences that end in it, and, if SAVE, h before every SAVE tokens.

    If ENDS, of each piece but the last only what it does to h: h ← decays · h + ends.
    """
    W: tl.constexpr = N * I
    C: tl.constexpr = G * S
    L: tl.constexpr = G * CHUNK
    WHOLE: tl.constexpr = CHUNKS * CHUNK == I
    row, piece, block, first = locate(pieces - 1 if ENDS else pieces, N, CHUNK, CHUNKS)
    token, channel = places(S, G, CHUNK)
    ok = first + channel < I
    cols = block * I + first + channel
    a_factor = load_weights(a_weight, block, first, I, K, CHUNK, DTYPE)
    x_factor = load_weights(x_weight, block, first, I, K, CHUNK, DTYPE)
    a_shift, x_shift = load_bias(a_bias, block, first + channel, I), load_bias(x_bias, block, first + channel, I)
    rate, _slope = load_rate(a_param, cols, W)
    start = piece * piece_length
    stop = tl.minimum(start + piece_length, tokens)
    x += row * x_row + block * I
    y += row * tokens * W + block * I + first
    if SAVE:
        checkpoints += row * tl.cdiv(tokens, SAVE) * W + block * I + first
    if CODES:
        codes += row * tokens
        lasts += row * tokens
    h, unseen = enter_piece(ends, state, row, piece, pieces, cols, ok, W, L, CHUNK, STATE and not CODES, ENDS)
    through = tl.full([1, L], 1.0, tl.float32)
    for t in range(start, stop, C):
        real_tile, real, marks = tile_marks(codes, t, token, stop, C, CODES)
        if CODES:
            ended = marks_of(lasts, t, token, stop, -1)
        tile = load_tile(x, t, real_tile, X_TOKEN, I, K, C, EVEN, DTYPE)
        inputs = load_lanes(x + first, t, real, ok, X_TOKEN, S, G, CHUNK, EVEN, WHOLE)
        r, i = gates_of(tile, a_factor, x_factor, a_shift, x_shift, real, S, G, CHUNK, EVEN, PRECISION)
        a, u = decay_and_rest(r, rate)
        a, u, enters, past = begin(a, u, marks, state, cols, ok, unseen, t, W, S, STATE, CODES)
        b = root_of(u) * (i * inputs)
        if CODES:
            b += a * past
            a = tl.where(enters, 0.0, a)
        a, b = tl.associative_scan((a, b), 0, compose)
        before, h, product = scan_segments(a, b, h, S, G, CHUNK, False)
        through *= product
        if SAVE:
            save_starts(checkpoints, before, t, stop, token, channel, ok, W, S, SAVE)
        if not ENDS:
            out = a * before + b
            if CODES:
                to = final + offsets(tl.maximum(ended, 0).to(tl.int64), cols, W)
                tl.store(to, out, mask=(ended >= 0) & ok[None, :])
                out = tl.where(real, out, 0.0)
            store_lanes(y, t, narrowed(out, y.dtype.element_ty), t + token < stop, ok, W, S, G, CHUNK, EVEN, WHOLE)
    if ENDS:
        to = (row * (pieces - 1) + piece) * W
        store_channels(decays + to, through, cols, ok, CHUNK, L, True)
        store_channels(ends + to, h, cols, ok, CHUNK, L, True)
    elif not CODES:
        store_channels(final + row * W, h, cols, ok, CHUNK, L, piece == pieces - 1)
