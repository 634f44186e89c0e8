"""Kernel parts for the window: which keys a token sees, and scores in base 2."""

import triton
import triton.language as tl

from latte.ops.triton.kernels.arithmetic import LOG2_E, MINUS_INF, exp, exp2
from latte.ops.triton.kernels.latents import finite
from latte.ops.triton.kernels.rows import load_rows, products


@triton.jit
def sequence_span(sequence, bounds, tokens, slots, PACKED: tl.constexpr):
    """First token, end and key row offset of a sequence; `slots` rows of its past lie before its first token."""
    if PACKED:
        safe = tl.maximum(sequence, 0)
        first = tl.load(bounds + safe).to(tl.int32)
        stop = tl.load(bounds + safe + 1).to(tl.int32)
        offset = (safe + 1) * slots
    else:
        first = sequence * 0
        stop = first + tokens
        offset = first + slots
    return first, stop, offset


@triton.jit
def real_rows(t, first, stop, offset, mask, MASKED: tl.constexpr):
    """Which of the tokens t exist and are not masked; t may be in the past (before `first`)."""
    real = (t >= first) & (t < stop)
    if MASKED:
        real = real & (tl.load(mask + t + offset, mask=real, other=0) != 0)
    return real


@triton.jit
def in_window(t, s, WINDOW: tl.constexpr, CAUSAL: tl.constexpr):
    """True where key s lies in the window of token t; the two broadcast against each other."""
    distance = t - s
    if CAUSAL:
        near = distance.to(tl.uint32, bitcast=True) < WINDOW  # negative distances wrap around
    else:
        near = (distance + (WINDOW - 1)).to(tl.uint32, bitcast=True) < 2 * WINDOW - 1
    return near


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (exp(2.0 * x) + 1.0)


@triton.jit
def capped(raw, scale, softcap, CAPPED: tl.constexpr):
    """Scores of raw products q·k before the factor `unit`, and the slope of the cap (raw again where there is none)."""
    if CAPPED:
        bend = tanh(raw * (scale / softcap))
        slope = 1.0 - bend * bend
        raw = bend
    else:
        slope = raw
    return raw, slope


@triton.jit
def unit(scale, softcap, CAPPED: tl.constexpr):
    """What turns the scores of `capped` into powers of two; positive."""
    if CAPPED:
        factor = softcap * LOG2_E
    else:
        factor = scale * LOG2_E
    return factor


@triton.jit
def window_scores(
    queries, keys, t, s, real_t, real_s, scale, softcap, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores (in `unit`s) of queries t (rows) and keys s (columns), −inf outside the window, and the cap's slope."""
    scores, slope = capped(products(queries, keys, PRECISION), scale, softcap, CAPPED)
    visible = in_window(t[:, None], s[None, :], WINDOW, CAUSAL)
    if not FULL:
        visible = visible & real_s[None, :] & real_t[:, None]
    return tl.where(visible, scores, MINUS_INF), slope


@triton.jit
def window_steps(start, first, slots, C: tl.constexpr, BN: tl.constexpr, NEAR: tl.constexpr, CAUSAL: tl.constexpr):
    """Which steps, of BN keys each counted from `start`, a tile's tokens see: none before the sequence and its past."""
    low = tl.maximum(-NEAR, -tl.cdiv(start - first + slots, BN))
    high = C // BN if CAUSAL else C // BN + NEAR
    return low, high


@triton.jit
def window_step(
    j, queries, wk, v, mask, t, real, start, first, stop, offset, slots, wk_token, v_token, scale, softcap,
    WIDTH: tl.constexpr, KEY_WIDTH: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    WINDOW: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, FULL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys and values of one of a tile's `window_steps`, and `window_scores` of them."""
    s = start + j * BN + tl.arange(0, BN)
    begin = start + j * BN + offset
    real_s = real_rows(s, first - slots, stop, offset, mask, MASKED)
    keys = load_rows(wk, begin, wk_token, real_s, BN, KEY_WIDTH, BE, FULL and CAUSAL)
    values = load_rows(v, begin, v_token, real_s, BN, WIDTH, BD, FULL and CAUSAL)
    scores, slope = window_scores(
        queries, keys, t, s, real, real_s, scale, softcap, WINDOW, CAUSAL, CAPPED, FULL and CAUSAL, PRECISION
    )
    return keys, values, scores, slope


@triton.jit
def softmax_step(scores, total, peak, factor):
    """Weights of scores (in `unit`s, [C N]), what the sums so far shrink by, new total and peak (a power of two)."""
    higher = tl.maximum(peak, tl.max(scores, 1) * factor)
    shrink = exp2(peak - finite(higher))
    weights = exp2(scores * factor - finite(higher)[:, None])
    return weights, shrink, total * shrink + tl.sum(weights, 1), higher
