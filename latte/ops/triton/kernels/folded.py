"""The outputs of one tile in the common case: whole tiles without a mask, one block of latents, a window of two tiles.

Everything is asked for before it is needed. The latents' factors come first, while the window's keys are on their way;
then the weights of the whole window; then products of weights and values, the own tile's latents and window in one.
"""

import triton
import triton.language as tl

from latte.ops.triton.kernels.arithmetic import MINUS_INF, exp, exp2, inverse_or_zero, log2
from latte.ops.triton.kernels.latents import (
    finite,
    latent_factors,
    latent_scores,
    lower,
    normalisers,
    nothing,
    unknown_zero,
)
from latte.ops.triton.kernels.order import wait_for_last
from latte.ops.triton.kernels.rows import (
    add_weighted,
    hold,
    load_means,
    load_rows,
    narrow,
    products,
    store_rows,
    zero_rows,
)
from latte.ops.triton.kernels.window import capped, unit


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

    queries, keys, far_keys = hold(queries), hold(keys), hold(far_keys)
    factor = unit(scale, softcap, CAPPED)
    own_first = lower(C, unknown_zero(per_row))
    scores = tl.where(own_first, products(queries, keys, PRECISION), products(queries, far_keys, PRECISION))
    scores, _ = capped(scores, scale, softcap, CAPPED)
    if start < 2 * C:
        scores = tl.where(lower(C, unknown_zero(q_token)), scores, MINUS_INF)
    middle_keys = load_rows(wk, middle, wk_token, every, C, KEY_WIDTH, BE, True)
    middle_values = load_rows(v, middle, v_token, every, C, WIDTH, BD, True)
    values = load_rows(v, start, v_token, every, C, WIDTH, BD, True)
    far_values = load_rows(v, far, v_token, every, C, WIDTH, BD, True)
    near, _ = capped(products(queries, hold(middle_keys), PRECISION), scale, softcap, CAPPED)
    peak = tl.max(scores, 1) * factor
    peak = tl.where(start > 0, tl.maximum(peak, tl.max(near, 1) * factor), peak)
    near = exp2(near * factor - tl.where(start > 0, peak, float("inf"))[:, None])
    weights = exp2(scores * factor - peak[:, None])
    total = tl.sum(weights, 1) + tl.sum(near, 1)
    tl.store(lse + (row * HEADS + head) * tokens + t, peak + log2(total))
    share = (window_share * inverse_or_zero(total))[:, None]
    acc = add_weighted(zero_rows(C, WIDTH, BD), near * share, middle_values, PRECISION)
    acc = add_weighted(acc, through, narrow(hold(mean), v.dtype.element_ty), PRECISION)
    weights *= share
    beyond = tl.where(lower(C, unknown_zero(tokens)), nothing(), weights)
    acc = add_weighted(acc, beyond, far_values, PRECISION)
    # The product is added to the weights where they are, so nothing may read them afterwards: with Triton 3.6 it gets
    # the sum.
    weights += latent_scores(left, right, latent_keys, C, False)
    own = tl.where(lower(C, unknown_zero(k_token)), weights, nothing())
    acc = add_weighted(acc, own, values, PRECISION)
    store_rows(y + (row * tokens * HEADS + head) * WIDTH, acc, start, HEADS * WIDTH, every, C, WIDTH, True)
