"""The outputs of one tile in the common case: whole tiles without a mask, one block of latents, a window of two tiles.

Everything is asked for before it is needed. The latents' factors come first, while the window's keys are on their way;
then the window; then what the latents add.
"""

import triton
import triton.language as tl

from latte.ops.triton.kernels.arithmetic import MINUS_INF, exp, exp2, inverse_or_zero, log2
from latte.ops.triton.kernels.latents import causal, finite, latent_factors, latent_scores, lower, normalisers
from latte.ops.triton.kernels.order import wait_for_last
from latte.ops.triton.kernels.rows import (
    add_weighted,
    hold,
    load_means,
    load_rows,
    narrow,
    products,
    scaled,
    store_rows,
    zero_rows,
)
from latte.ops.triton.kernels.window import capped, softmax_step, unit


@triton.jit
def folded_tile(
    program, q, k, v, wq, wk, norms, means, peaks, y, lse,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, wq_row, wq_token, wq_head,
    wk_row, wk_token, wk_head, tokens, per_row, scale, softcap,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, KEY_WIDTH: tl.constexpr,
    C: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y of one tile of one head.

    A token sees all of the tile before its own. Of its own tile's keys and of those two tiles back it sees one at each
    place: its own tile's up to itself, the other's after that. So two weights for each place are enough, not three.
    """
    head = program % HEADS
    index = program // HEADS
    row, start = (index // per_row).to(tl.int64), index % per_row * C
    c, l = tl.arange(0, C), tl.arange(0, BL)
    t = start + c
    inside, every = l < NUM, c >= 0
    q += row * q_row + head * q_head + start.to(tl.int64) * q_token
    k += row * k_row + head * k_head + start.to(tl.int64) * k_token
    wk += row * wk_row + (head // GROUPS) * wk_head
    v += row * v_row + (head // GROUPS) * v_head
    far, middle = tl.maximum(start - 2 * C, 0), tl.maximum(start - C, 0)
    keys_at, logits_at = k + (c[:, None] * k_token + l[None, :]), q + (c[:, None] * q_token + (l + 1)[None, :])
    if NUM == BL:
        logits, latent_keys = tl.load(logits_at), tl.load(keys_at)
    else:
        logits = tl.load(logits_at, mask=inside[None, :], other=MINUS_INF)
        latent_keys = tl.load(keys_at, mask=inside[None, :], other=MINUS_INF)
    window_logit = tl.load(q + c * q_token).to(tl.float32)
    wait_for_last(EARLY)
    state_at = (index.to(tl.int64) * HEADS + head) * NUM + l
    largest = tl.load(peaks + state_at, mask=inside, other=MINUS_INF)
    before = tl.load(norms + state_at, mask=inside, other=MINUS_INF)
    mean = load_means(means, state_at, inside, WIDTH, BD)
    queries = load_rows(wq + row * wq_row + head * wq_head, start, wq_token, every, C, KEY_WIDTH, BE, True)
    keys = load_rows(wk, start, wk_token, every, C, KEY_WIDTH, BE, True)
    far_keys = load_rows(wk, far, wk_token, every, C, KEY_WIDTH, BE, True)

    logits, latent_keys = logits.to(tl.float32), latent_keys.to(tl.float32)
    highest = finite(tl.maximum(tl.max(logits, 1), window_logit))
    window_share = exp(window_logit - highest)
    p = exp(logits - highest[:, None])
    inverse = inverse_or_zero(tl.sum(p, 1) + window_share)
    reference = finite(tl.maximum(before, largest))
    e, inverse_norm = normalisers(latent_keys, before, reference, C, BL, False)
    left, right, through = latent_factors(p * inverse[:, None], e, inverse_norm, before, reference, True, False)
    through = through.to(v.dtype.element_ty)
    window_share *= inverse

    values = load_rows(v, start, v_token, every, C, WIDTH, BD, True)
    far_values = load_rows(v, far, v_token, every, C, WIDTH, BD, True)
    queries, keys, far_keys = hold(queries), hold(keys), hold(far_keys)
    factor = unit(scale, softcap, CAPPED)
    scores = tl.where(lower(C), products(queries, keys, PRECISION), products(queries, far_keys, PRECISION))
    scores, _ = capped(scores, scale, softcap, CAPPED)
    if start < 2 * C:
        scores = tl.where(lower(C), scores, MINUS_INF)
    middle_keys = load_rows(wk, middle, wk_token, every, C, KEY_WIDTH, BE, True)
    peak = tl.max(scores, 1) * factor
    weights = exp2(scores * factor - peak[:, None])
    total = tl.sum(weights, 1)
    own = causal(weights, C)
    acc = add_weighted(zero_rows(C, WIDTH, BD), own, values, PRECISION)
    acc = add_weighted(acc, weights - own, far_values, PRECISION)
    if start > 0:
        middle_values = load_rows(v, middle, v_token, every, C, WIDTH, BD, True)
        scores, _ = capped(products(queries, hold(middle_keys), PRECISION), scale, softcap, CAPPED)
        weights, shrink, total, peak = softmax_step(scores, total, peak, factor)
        acc = add_weighted(scaled(acc, shrink[:, None]), weights, middle_values, PRECISION)
    tl.store(lse + (row * HEADS + head) * tokens + t, peak + log2(total))
    acc = scaled(acc, (window_share * inverse_or_zero(total))[:, None])
    acc = add_weighted(acc, through, narrow(hold(mean), v.dtype.element_ty), PRECISION)
    acc = add_weighted(acc, causal(latent_scores(left, right, latent_keys, C, False), C), values, PRECISION)
    store_rows(y + (row * tokens * HEADS + head) * WIDTH, acc, start, HEADS * WIDTH, every, C, WIDTH, True)
