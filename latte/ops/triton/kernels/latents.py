"""Kernel parts for the latents of one tile of tokens.

With m the largest of the tile's keys and the normaliser before it, e_s = exp(k_s − m) and S_t = exp(Z_t − m), the
causal scores are one matrix product of p_t / S_t and e_s, exact to rounding while no normaliser moves more than
MAX_LEAP nats inside the tile. Tiles where one does are computed anew by a second launch with WILD, which takes them
token by token: there no factor exceeds 1.
Axes: C tokens of the tile, L latents of one block.
"""

import triton
import triton.language as tl

from latte.ops.triton.kernels.arithmetic import INTERPRETED, MINUS_INF, dot, exp, inverse_or_zero, log

MAX_LEAP = tl.constexpr(30.0)


@triton.jit
def finite(x):
    """x with −inf replaced by 0: a safe reference to subtract."""
    return tl.where(x == MINUS_INF, 0.0, x)


@triton.jit
def safe_log(x):
    """log x, −inf at 0."""
    return tl.where(x > 0, log(tl.where(x > 0, x, 1.0)), MINUS_INF)


@triton.jit
def decay(earlier, later):
    """exp(earlier − later) ≤ 1 for normalisers that never decrease; 0 where nothing was seen earlier."""
    return tl.where(earlier == MINUS_INF, 0.0, exp(finite(earlier) - finite(later)))


@triton.jit
def log_add(a, b):
    peak = finite(tl.maximum(a, b))
    return peak + safe_log(exp(a - peak) + exp(b - peak))


@triton.jit
def token(x, s, C: tl.constexpr):
    """Row s of x [C L] as [L]."""
    return tl.sum(tl.where(tl.arange(0, C)[:, None] == s, x, 0.0), 0)


@triton.jit
def column(x, s, C: tl.constexpr):
    """Column s of x [C C] as [C]."""
    return tl.sum(tl.where(tl.arange(0, C)[None, :] == s, x, 0.0), 1)


@triton.jit
def lower(C: tl.constexpr, zero=0):
    """[C C] True where token t (row) may see token s (column)."""
    return tl.arange(0, C)[:, None] + zero >= tl.arange(0, C)[None, :]


@triton.jit
def unknown_zero(number):
    """0 of a number that is never negative, which no compiler knows: a mask made with it is not one made before.

    A mask that is used again is kept in predicates, of which a thread has seven: `ptxas` packs the others into
    registers and takes them out again, for several times the instructions of a new comparison.
    """
    return number >> 31


@triton.jit
def nothing():
    """0 that the compiler does not see through.

    A choice between a number and a constant is moved behind the rounding to 16 bits, where it takes two numbers one by
    one; and a constant factor is put between the parts of a matrix product, which then wait for each other.
    """
    if INTERPRETED:
        zero = 0.0
    else:
        zero = tl.inline_asm_elementwise("mov.b32 $0, 0;", "=f", [], dtype=tl.float32, is_pure=True, pack=1)
    return zero


@triton.jit
def causal(x, C: tl.constexpr):
    """x [C C] where token t (row) may see token s (column), else 0."""
    return tl.where(lower(C), x, nothing())


@triton.jit
def is_wild(peak, first, lowest):
    """Whether a normaliser may move more than MAX_LEAP after a tile's first token, whatever it was before.

    Where the first token is masked, the smallest key bounds that of the first real one.
    """
    rise = peak - tl.where(first == MINUS_INF, lowest, first)
    return tl.max(tl.where(peak == MINUS_INF, 0.0, rise), 0) > MAX_LEAP


@triton.jit
def running_norm(k, before, C: tl.constexpr, L: tl.constexpr):
    """Z_t [C L] token by token."""
    norm = tl.zeros([C, L], tl.float32)
    running = before
    for s in range(C):
        running = log_add(running, token(k, s, C))
        norm = tl.where(tl.arange(0, C)[:, None] == s, running[None, :], norm)
    return norm


@triton.jit
def normalisers(
    k, before, reference, C: tl.constexpr, L: tl.constexpr, WILD: tl.constexpr, MATRIX: tl.constexpr = False
):
    """e_s and 1 / S_t [C L] of a tile's tokens; of a wild tile's Z_t, twice. MATRIX sums on the matrix units."""
    if WILD:
        e = running_norm(k, before, C, L)
        inverse = e
    else:
        e = exp(k - reference[None, :])
        if MATRIX:
            total = multiply_fine(causal(1.0, C), e, True)
        else:
            total = tl.cumsum(e, 0)
        inverse = inverse_or_zero(total + exp(before - reference)[None, :])
    return e, inverse


@triton.jit
def shares(k, norm, s, C: tl.constexpr):
    """p(s|l,t) = exp(k_s − Z_t) of one token s of the tile, [C L], 0 for tokens t before it."""
    seen = (tl.arange(0, C)[:, None] >= s) & (norm > MINUS_INF)
    return tl.where(seen, exp(token(k, s, C)[None, :] - finite(norm)), 0.0)


@triton.jit
def multiply_fine(a, b, HALF: tl.constexpr):
    """a @ b of float32 factors where differences of the result matter, or b is [C L].

    Triton 3.6 reads beyond shared memory for bfloat16 factors [C 16] on the right (seen on an H200), so those are tf32.
    """
    if HALF:
        result = dot(a, b, "tf32")
    else:
        result = dot(a, b, "tf32x3")
    return result


@triton.jit
def latent_factors(p, e, inverse, before, reference, HALF: tl.constexpr, WILD: tl.constexpr):
    """Two factors of the scores among the tile's tokens, for `latent_scores`, and p(l|t) exp(Z_before − Z_t) [C L].

    e and inverse are the tile's `normalisers`, here and below.
    """
    if WILD:
        left, right = p, e
        through = p * decay(tl.broadcast_to(before[None, :], p.shape), e)
    else:
        left, right = p * inverse, e
        through = left * exp(before - reference)[None, :]
        if HALF:
            left, right = left.to(tl.bfloat16), right.to(tl.bfloat16)
    return left, right, through


@triton.jit
def latent_scores(left, right, k, C: tl.constexpr, WILD: tl.constexpr):
    """Σ_l p(l|t) p(s|l,t) among the tile's tokens [t s].

    Above the diagonal they mean nothing: callers add up blocks of latents, then mask once.
    """
    if WILD:
        scores = tl.zeros([C, C], tl.float32)
        for s in range(C):
            score = tl.sum(left * shares(k, right, s, C), 1)
            scores = tl.where(tl.arange(0, C)[None, :] == s, score[:, None], scores)
    else:
        scores = dot(left, tl.trans(right), "tf32x3")
    return scores


@triton.jit
def log_norms(e, inverse, reference, WILD: tl.constexpr):
    """Z_t [C L]."""
    if WILD:
        norm = e
    else:
        norm = tl.where(inverse > 0, reference[None, :] - log(tl.where(inverse > 0, inverse, 1.0)), MINUS_INF)
    return norm


@triton.jit
def latent_means(
    products, past_h, k, e, inverse, before, reference, C: tl.constexpr, HALF: tl.constexpr, WILD: tl.constexpr
):
    """h_t = Σ_{s≤t in tile} p(s|l,t) g_ts + exp(Z_before − Z_t) past_h_t [C L], for causal products g [C C]."""
    if WILD:
        means = past_h * decay(tl.broadcast_to(before[None, :], past_h.shape), e)
        for s in range(C):
            means += shares(k, e, s, C) * column(products, s, C)[:, None]
    else:
        means = inverse * (multiply_fine(products, e, HALF) + past_h * exp(before - reference)[None, :])
    return means


@triton.jit
def latent_key_grads(
    products, p, h, k, e, inverse, before, reference, C: tl.constexpr, L: tl.constexpr, HALF: tl.constexpr,
    WILD: tl.constexpr,
):  # fmt: skip
    """Σ_{t≥s in tile} p(l|t) p(s|l,t) (g_ts − h_t,l) [C L], and p(l|t) exp(Z_before − Z_t) [C L]."""
    if WILD:
        grads = tl.zeros([C, L], tl.float32)
        for s in range(C):
            grad = tl.sum(p * shares(k, e, s, C) * (column(products, s, C)[:, None] - h), 0)
            grads = tl.where(tl.arange(0, C)[:, None] == s, grad[None, :], grads)
        through = p * decay(tl.broadcast_to(before[None, :], [C, L]), e)
    else:
        u = p * inverse
        grads = multiply_fine(tl.trans(products), u, HALF) - multiply_fine(tl.trans(causal(1.0, C)), u * h, HALF)
        grads = e * grads
        through = u * exp(before - reference)[None, :]
    return grads, through
