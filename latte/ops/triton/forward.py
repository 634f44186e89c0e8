"""The outputs kernel: one tile of tokens of one head, window and latents in one pass."""

import triton
import triton.language as tl

from latte.ops.triton.latents import MINUS_INF, finite, latent_scores, log_norms
from latte.ops.triton.states import load_before, mean_rows, tile_is_wild
from latte.ops.triton.tiles import locate
from latte.ops.triton.window import load_rows, real_rows, sequence_span, store_rows, unit, window_scores


@triton.jit
def load_latents(
    x, t, l, token_stride, real, other, NUM: tl.constexpr, SHIFT: tl.constexpr, FULL: tl.constexpr, BL: tl.constexpr
):
    """Logits or keys [C L] of one head in float32, −inf beyond the last latent; SHIFT skips the window's logit."""
    at = x + t.to(tl.int64)[:, None] * token_stride + (l + SHIFT)[None, :]
    inside = (l < NUM)[None, :]
    if FULL and NUM % BL == 0:
        loaded = tl.load(at).to(tl.float32)
    else:
        loaded = tl.load(at, mask=real[:, None] & inside, other=other).to(tl.float32)
        loaded = tl.where(inside, loaded, MINUS_INF)
    return loaded


@triton.jit
def latent_block(
    q, k, state, row, tile, sequence, t, l, d, q_token, k_token, real, table, per_row, per_piece, pieces, head,
    HEADS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, BL: tl.constexpr,
    SHIFT: tl.constexpr, CAUSAL: tl.constexpr, UNDIRECTED: tl.constexpr, PACKED: tl.constexpr, GIVEN: tl.constexpr,
    FULL: tl.constexpr, HALF: tl.constexpr, WILD: tl.constexpr,
):  # fmt: skip
    """Logits and keys [C L], Z before [L], M before [L D] and the reference m [L].

    state is (tile_norm, tile_mean, tile_keys, start_norm, start_mean, first_norm, first_mean, last_norm, last_mean).
    """
    logits = load_latents(q, t, l, q_token, real, 0.0, NUM, SHIFT, FULL, BL)
    keys = load_latents(k, t, l, k_token, real, MINUS_INF, NUM, 0, FULL, BL)
    if CAUSAL:
        before, mean = load_before(
            state[0], state[1], state[3], state[4], state[5], state[6], row, tile, sequence, l, d, table, per_row,
            per_piece, pieces, head, HEADS, NUM, WIDTH, PACKED, GIVEN,
        )  # fmt: skip
        stats = state[2] + ((row * per_row + tile).to(tl.int64) * HEADS + head) * (3 * NUM) + l
        peak = tl.load(stats, mask=l < NUM, other=MINUS_INF)
        reference = finite(tl.maximum(before, peak))
        if UNDIRECTED:
            logits += log_norms(keys, before, reference, C, BL, HALF, WILD)
    else:
        index = (tl.maximum(sequence, 0).to(tl.int64) * HEADS + head) * NUM + l
        before = tl.load(state[7] + index, mask=l < NUM, other=MINUS_INF)
        inside = (l < NUM)[:, None] & (d < WIDTH)[None, :]
        mean = tl.load(mean_rows(state[8], index, d, WIDTH), mask=inside, other=0.0)
        reference = finite(before)
        if UNDIRECTED:
            logits += before[None, :]
    return logits, keys, before, mean, reference


@triton.jit
def logit_sums(
    logits, q, k, state, row, tile, sequence, t, d, q_token, k_token, real, table, per_row, per_piece, pieces, head,
    HEADS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, BL: tl.constexpr,
    BLOCKS: tl.constexpr, SHIFT: tl.constexpr, CAUSAL: tl.constexpr, UNDIRECTED: tl.constexpr, PACKED: tl.constexpr,
    GIVEN: tl.constexpr, FULL: tl.constexpr, HALF: tl.constexpr, WILD: tl.constexpr,
):  # fmt: skip
    """Peak and 1 / Σ exp over all logits of each token, and p(0|t); `logits` are the first block's.

    p(l|t) = exp(logit − peak) · inverse. Further blocks are loaded again when they are used.
    """
    peak = tl.max(logits, 1)
    total = tl.sum(tl.exp(logits - finite(peak)[:, None]), 1)
    for block in tl.static_range(1, BLOCKS):
        logits, _, _, _, _ = latent_block(
            q, k, state, row, tile, sequence, t, block * BL + tl.arange(0, BL), d, q_token, k_token, real, table,
            per_row, per_piece, pieces, head, HEADS, NUM, WIDTH, C, BL, SHIFT, CAUSAL, UNDIRECTED, PACKED, GIVEN, FULL,
            HALF, WILD,
        )  # fmt: skip
        higher = tl.maximum(peak, tl.max(logits, 1))
        total = total * tl.exp(peak - finite(higher)) + tl.sum(tl.exp(logits - finite(higher)[:, None]), 1)
        peak = higher
    window_share = tl.zeros([C], tl.float32)
    if SHIFT:
        window_logit = tl.load(q + t.to(tl.int64) * q_token, mask=real, other=0.0).to(tl.float32)
        higher = tl.maximum(peak, window_logit)
        total = total * tl.exp(peak - finite(higher)) + tl.exp(window_logit - finite(higher))
        peak = higher
        window_share = tl.exp(window_logit - finite(peak)) / tl.maximum(total, 1.0)
    return finite(peak), 1.0 / tl.maximum(total, 1.0), window_share  # the sum is at least 1, or 0


@triton.jit
def output_kernel(
    q, k, v, wq, wk, mask, tile_norm, tile_mean, tile_keys, start_norm, start_mean, first_norm, first_mean, last_norm,
    last_mean, wild, y, lse, table, bounds,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, wq_row, wq_token, wq_head,
    wk_row, wk_token, wk_head, mask_row, tokens, per_row, per_piece, pieces, slots, scale, softcap,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, KEY_WIDTH: tl.constexpr,
    C: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, BLOCKS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    WINDOW: tl.constexpr, NEAR: tl.constexpr, LATENTS: tl.constexpr, CAUSAL: tl.constexpr, UNDIRECTED: tl.constexpr,
    PACKED: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, GIVEN: tl.constexpr, FULL: tl.constexpr,
    HALF: tl.constexpr, PRECISION: tl.constexpr, WILD: tl.constexpr,
):  # fmt: skip
    """y of one tile; WINDOW = 0 leaves out the window, LATENTS = False the latents.

    The launch without WILD notes the wild tiles and leaves them to a second one with it. wild: whether any is, then each.
    """
    head = tl.program_id(0) % HEADS
    index = tl.program_id(0) // HEADS
    row, tile = (index // per_row).to(tl.int64), index % per_row
    start, end, sequence = locate(tile, row, table, tokens, per_row, C, PACKED)
    if LATENTS and CAUSAL:
        if WILD:
            if tl.load(wild) == 0:
                return
            if tl.load(wild + 1 + tl.program_id(0)) == 0:
                return
        else:
            leaps = tile_is_wild(
                tile_norm, tile_keys, start_norm, first_norm, row, tile, sequence, table, per_row, per_piece, pieces,
                head, HEADS, NUM, BL, BLOCKS, PACKED, GIVEN,
            )  # fmt: skip
            tl.store(wild + 1 + tl.program_id(0), leaps.to(tl.int32))
            if leaps:
                tl.store(wild, 1)
                return
    first, stop, offset = sequence_span(sequence, bounds, tokens, slots, PACKED)
    t = start + tl.arange(0, C)
    d = tl.arange(0, BD)
    if MASKED:
        mask += row * mask_row
    real = real_rows(t, start, end, offset, mask, MASKED)
    v += row * v_row + (head // GROUPS) * v_head
    acc = tl.zeros([C, BD], tl.float32)
    SHIFT: tl.constexpr = 1 if WINDOW > 0 else 0
    if LATENTS:
        q += row * q_row + head * q_head
        k += row * k_row + head * k_head
        state = (
            tile_norm, tile_mean, tile_keys, start_norm, start_mean, first_norm, first_mean, last_norm, last_mean,
        )  # fmt: skip

    if WINDOW > 0:
        wk += row * wk_row + (head // GROUPS) * wk_head
        queries = load_rows(wq + row * wq_row + head * wq_head, t, wq_token, real, KEY_WIDTH, BE, FULL)
        peak = tl.full([C], MINUS_INF, tl.float32)
        total = tl.zeros([C], tl.float32)
        factor = unit(scale, softcap, CAPPED)
        low = tl.maximum(-NEAR, -tl.cdiv(start - first + slots, BN))  # none before the sequence and its past
        high = C // BN if CAUSAL else C // BN + NEAR
        for j in range(low, high):
            s = start + j * BN + tl.arange(0, BN)
            real_s = real_rows(s, first - slots, stop, offset, mask, MASKED)
            keys = load_rows(wk, s + offset, wk_token, real_s, KEY_WIDTH, BE, FULL and CAUSAL)
            values = load_rows(v, s + offset, v_token, real_s, WIDTH, BD, FULL and CAUSAL)
            scores, _ = window_scores(
                queries, keys, t, s, real, real_s, scale, softcap, WINDOW, CAUSAL, CAPPED, FULL and CAUSAL, PRECISION
            )
            higher = tl.maximum(peak, tl.max(scores, 1) * factor)
            shrink = tl.exp2(peak - finite(higher))
            weights = tl.exp2(scores * factor - finite(higher)[:, None])
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None]
            acc += tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
            peak = higher
        share = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
        row_at = (row * HEADS + head) * tokens + t
        tl.store(lse + row_at, finite(peak) + tl.log2(tl.where(total > 0, total, 1.0)), mask=t < end)
        acc = acc * share[:, None]

    if LATENTS:
        logits, keys_l, before, mean, reference = latent_block(
            q, k, state, row, tile, sequence, t, tl.arange(0, BL), d, q_token, k_token, real, table, per_row, per_piece,
            pieces, head, HEADS, NUM, WIDTH, C, BL, SHIFT, CAUSAL, UNDIRECTED, PACKED, GIVEN, FULL, HALF, WILD,
        )  # fmt: skip
        logit_peak, inverse, window_share = logit_sums(
            logits, q, k, state, row, tile, sequence, t, d, q_token, k_token, real, table, per_row, per_piece, pieces,
            head, HEADS, NUM, WIDTH, C, BL, BLOCKS, SHIFT, CAUSAL, UNDIRECTED, PACKED, GIVEN, FULL, HALF, WILD,
        )  # fmt: skip
        if WINDOW > 0:
            acc = acc * window_share[:, None]
        for block in tl.static_range(BLOCKS):
            if block > 0:
                logits, keys_l, before, mean, reference = latent_block(
                    q, k, state, row, tile, sequence, t, block * BL + tl.arange(0, BL), d, q_token, k_token, real,
                    table, per_row, per_piece, pieces, head, HEADS, NUM, WIDTH, C, BL, SHIFT, CAUSAL, UNDIRECTED,
                    PACKED, GIVEN, FULL, HALF, WILD,
                )  # fmt: skip
            p = tl.exp(logits - logit_peak[:, None]) * inverse[:, None]
            if CAUSAL:
                own, through = latent_scores(p, keys_l, before, reference, C, BL, HALF, WILD)
                values = load_rows(v, t + offset, v_token, real, WIDTH, BD, FULL)
                acc += tl.dot(own.to(values.dtype), values, input_precision=PRECISION)
            else:
                through = p
            narrow = v.dtype.element_ty
            acc += tl.dot(through.to(narrow), mean.to(narrow), input_precision=PRECISION)
    if not FULL:
        acc = tl.where(real[:, None], acc, 0.0)
    store_rows(y + (row * tokens * HEADS + head) * WIDTH, acc, t, HEADS * WIDTH, t < end, WIDTH, BD, FULL)
