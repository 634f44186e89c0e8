"""Kernel parts for the latents of one tile of tokens.

With m the largest of the tile's keys and the normaliser before it, e_s = exp(k_s − m) and S_t = exp(Z_t − m), the
causal scores are one matrix product of p_t / S_t and e_s, exact to rounding while no normaliser moves more than
MAX_LEAP nats inside the tile. Tiles where one does are computed anew by a second launch with WILD, which takes them
token by token: there no factor exceeds 1.
Axes: C tokens of the tile, L latents of one block.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
MAX_LEAP = tl.constexpr(30.0)
MINUS_INF = tl.constexpr(float("-inf"))


@triton.jit
def exp2(x):
    """2 ** x, denormals to 0: one instruction where tl.exp2 takes four."""
    if INTERPRETED:
        power = tl.exp2(x)
    else:
        power = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return power


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b in float32 (the interpreter takes bfloat16 factors for integers)."""
    if INTERPRETED:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        product = tl.dot(a, b, input_precision=PRECISION)
    return product


@triton.jit
def inverse_or_zero(x):
    """1 / x, 0 at 0, for x ≥ 0 that is normal or 0."""
    if INTERPRETED:
        inverse = 1.0 / tl.where(x > 0, x, 1.0)
    else:
        inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.where(x > 0, inverse, 0.0)


@triton.jit
def log(x):
    """For x that is normal; two instructions where tl.log takes some twenty."""
    if INTERPRETED:
        power = tl.log(x)
    else:
        power = LN_2 * tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )
    return power


@triton.jit
def exp(x):
    return exp2(x * LOG2_E)


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
def lower(C: tl.constexpr):
    """[C C] True where token t (row) may see token s (column)."""
    return tl.arange(0, C)[:, None] >= tl.arange(0, C)[None, :]


@triton.jit
def is_wild(peak, first, lowest):
    """Whether a normaliser may move more than MAX_LEAP after a tile's first token, whatever it was before.

    Where the first token is masked, the smallest key bounds that of the first real one.
    """
    rise = peak - tl.where(first == MINUS_INF, lowest, first)
    return tl.max(tl.where(peak == MINUS_INF, 0.0, rise), 0) > MAX_LEAP


@triton.jit
def factors(k, before, reference, C: tl.constexpr, HALF: tl.constexpr):
    """e_s and 1 / S_t [C L] for a tile that is not wild; HALF sums on the matrix units."""
    e = exp(k - reference[None, :])
    if HALF:
        total = multiply_fine(tl.where(lower(C), 1.0, 0.0), e, HALF)
    else:
        total = tl.cumsum(e, 0)
    total += exp(before - reference)[None, :]
    return e, inverse_or_zero(total)


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
def latent_factors(p, k, before, reference, C: tl.constexpr, L: tl.constexpr, HALF: tl.constexpr, WILD: tl.constexpr):
    """Two factors of the scores among the tile's tokens, for `latent_scores`, and p(l|t) exp(Z_before − Z_t) [C L]."""
    if WILD:
        left, right = p, running_norm(k, before, C, L)
        through = p * decay(tl.broadcast_to(before[None, :], [C, L]), right)
    else:
        right, inverse = factors(k, before, reference, C, HALF)
        left = p * inverse
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
def log_norms(k, before, reference, C: tl.constexpr, L: tl.constexpr, HALF: tl.constexpr, WILD: tl.constexpr):
    """Z_t [C L]."""
    if WILD:
        norm = running_norm(k, before, C, L)
    else:
        _, inverse = factors(k, before, reference, C, HALF)
        norm = tl.where(inverse > 0, reference[None, :] - log(tl.where(inverse > 0, inverse, 1.0)), MINUS_INF)
    return norm


@triton.jit
def latent_means(
    products, past_h, k, before, reference, C: tl.constexpr, L: tl.constexpr, HALF: tl.constexpr, WILD: tl.constexpr
):
    """h_t = Σ_{s≤t in tile} p(s|l,t) g_ts + exp(Z_before − Z_t) past_h_t [C L], for causal products g [C C]."""
    if WILD:
        norm = running_norm(k, before, C, L)
        means = past_h * decay(tl.broadcast_to(before[None, :], [C, L]), norm)
        for s in range(C):
            means += shares(k, norm, s, C) * column(products, s, C)[:, None]
    else:
        e, inverse = factors(k, before, reference, C, HALF)
        means = inverse * (multiply_fine(products, e, HALF) + past_h * exp(before - reference)[None, :])
    return means


@triton.jit
def latent_key_grads(
    products, p, h, k, before, reference, C: tl.constexpr, L: tl.constexpr, HALF: tl.constexpr, WILD: tl.constexpr
):
    """Σ_{t≥s in tile} p(l|t) p(s|l,t) (g_ts − h_t,l) [C L], and p(l|t) exp(Z_before − Z_t) [C L]."""
    if WILD:
        norm = running_norm(k, before, C, L)
        grads = tl.zeros([C, L], tl.float32)
        for s in range(C):
            grad = tl.sum(p * shares(k, norm, s, C) * (column(products, s, C)[:, None] - h), 0)
            grads = tl.where(tl.arange(0, C)[:, None] == s, grad[None, :], grads)
        through = p * decay(tl.broadcast_to(before[None, :], [C, L]), norm)
    else:
        e, inverse = factors(k, before, reference, C, HALF)
        u = p * inverse
        later = tl.where(lower(C), 1.0, 0.0)
        grads = multiply_fine(tl.trans(products), u, HALF) - multiply_fine(tl.trans(later), u * h, HALF)
        grads = e * grads
        through = u * exp(before - reference)[None, :]
    return grads, through
