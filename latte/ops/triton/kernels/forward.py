"""The outputs kernel: one tile of tokens of one head, window and latents in one pass."""

import triton
import triton.language as tl

from latte.ops.triton.kernels.arithmetic import MINUS_INF, exp, inverse_or_zero, log2
from latte.ops.triton.kernels.folded import folded_tile
from latte.ops.triton.kernels.latents import causal, finite, latent_factors, latent_scores, log_norms, normalisers
from latte.ops.triton.kernels.order import let_next_begin, wait_for_last
from latte.ops.triton.kernels.rows import (
    add_weighted,
    load_means,
    load_rows,
    narrow,
    only_real,
    scaled,
    store_rows,
    zero_rows,
)
from latte.ops.triton.kernels.states import any_noted, is_noted
from latte.ops.triton.kernels.tiles import locate
from latte.ops.triton.kernels.window import real_rows, sequence_span, softmax_step, unit, window_step, window_steps
from latte.ops.triton.kernels.window_tail import AT_ONCE, copy_tail


@triton.jit
def load_latents(
    x, begin, l, token_stride, real, other, C: tl.constexpr, NUM: tl.constexpr, SHIFT: tl.constexpr,
    FULL: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Logits or keys [C L] of one head in float32, −inf beyond the last latent; SHIFT skips the window's logit."""
    at = x + begin.to(tl.int64) * token_stride + (tl.arange(0, C)[:, None] * token_stride + (l + SHIFT)[None, :])
    inside = (l < NUM)[None, :]
    if FULL and NUM % BL == 0:
        loaded = tl.load(at).to(tl.float32)
    else:
        loaded = tl.load(at, mask=real[:, None] & inside, other=other).to(tl.float32)
        loaded = tl.where(inside, loaded, MINUS_INF)
    return loaded


@triton.jit
def latent_block(
    q, k, norms, means, peaks, index, sequence, start, l, q_token, k_token, real, head,
    HEADS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    BL: tl.constexpr,
    SHIFT: tl.constexpr, CAUSAL: tl.constexpr, UNDIRECTED: tl.constexpr, FULL: tl.constexpr, WILD: tl.constexpr,
):  # fmt: skip
    """Logits and keys [C L], Z before [L], M before [L D] and the reference m [L] of one block of latents.

    norms and means are states before tiles or, with CAUSAL = False, those of sequences.
    """
    logits = load_latents(q, start, l, q_token, real, 0.0, C, NUM, SHIFT, FULL, BL)
    keys = load_latents(k, start, l, k_token, real, MINUS_INF, C, NUM, 0, FULL, BL)
    if CAUSAL:
        at = index.to(tl.int64) * HEADS + head
        peak = tl.load(peaks + at * NUM + l, mask=l < NUM, other=MINUS_INF)
    else:
        at = tl.maximum(sequence, 0).to(tl.int64) * HEADS + head
    before = tl.load(norms + at * NUM + l, mask=l < NUM, other=MINUS_INF)
    mean = load_means(means, at * NUM + l, l < NUM, WIDTH, BD)
    reference = finite(tl.maximum(before, peak) if CAUSAL else before)
    if UNDIRECTED:
        if CAUSAL:
            e, inverse = normalisers(keys, before, reference, C, BL, WILD)
            logits += log_norms(e, inverse, reference, WILD)
        else:
            logits += before[None, :]
    return logits, keys, before, mean, reference


@triton.jit
def logit_sums(
    logits, q, k, norms, means, peaks, index, sequence, start, q_token, k_token, real, head,
    HEADS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    BL: tl.constexpr,
    BLOCKS: tl.constexpr, SHIFT: tl.constexpr, CAUSAL: tl.constexpr, UNDIRECTED: tl.constexpr, FULL: tl.constexpr,
    WILD: tl.constexpr,
):  # fmt: skip
    """Peak and 1 / Σ exp over all logits of each token, and p(0|t); `logits` are the first block's.

    p(l|t) = exp(logit − peak) · inverse. Further blocks are loaded again when they are used.
    """
    peak = tl.max(logits, 1)
    total = tl.sum(exp(logits - finite(peak)[:, None]), 1)
    for block in tl.static_range(1, BLOCKS):
        logits, _, _, _, _ = latent_block(
            q, k, norms, means, peaks, index, sequence, start, block * BL + tl.arange(0, BL), q_token, k_token,
            real, head,
            HEADS, NUM, WIDTH, BD, C, BL, SHIFT, CAUSAL, UNDIRECTED, FULL, WILD,
        )  # fmt: skip
        higher = tl.maximum(peak, tl.max(logits, 1))
        total = total * exp(peak - finite(higher)) + tl.sum(exp(logits - finite(higher)[:, None]), 1)
        peak = higher
    window_share = tl.zeros([C], tl.float32)
    if SHIFT:
        at = q + start.to(tl.int64) * q_token + tl.arange(0, C) * q_token
        window_logit = tl.load(at, mask=real, other=0.0).to(tl.float32)
        higher = tl.maximum(peak, window_logit)
        total = total * exp(peak - finite(higher)) + exp(window_logit - finite(higher))
        peak = higher
        window_share = exp(window_logit - finite(peak)) * inverse_or_zero(total)
    return finite(peak), inverse_or_zero(total), window_share


@triton.jit
def output_kernel(
    q, k, v, wq, wk, mask, norms, means, peaks, wild, y, lse, table, bounds, new_keys, new_values, valid,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, wq_row, wq_token, wq_head,
    wk_row, wk_token, wk_head, mask_row, tokens, per_row, slots, scale, softcap, programs,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, KEY_WIDTH: tl.constexpr,
    C: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, BLOCKS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    WINDOW: tl.constexpr, NEAR: tl.constexpr, LATENTS: tl.constexpr, CAUSAL: tl.constexpr, UNDIRECTED: tl.constexpr,
    PACKED: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, FULL: tl.constexpr,
    HALF: tl.constexpr, PRECISION: tl.constexpr, WILD: tl.constexpr, FOLD: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y of one tile; WINDOW = 0 leaves out the window, LATENTS = False the latents.

    The last tile comes first: what the launches before it read last is still in the GPU's cache.
    norms and means are the states before tiles or, with CAUSAL = False, those of sequences; peaks tiles' largest keys.
    A second launch, with WILD, writes wild tiles anew; its few programs look through all tiles. Before, they copy the
    last TAIL keys and values of each row: the window's state. FOLD: see `folded.py`.
    """
    let_next_begin(EARLY)
    if WILD:
        if TAIL > 0:  # needs nothing of this call; by now all that ran before it has ended, so nobody uses the room
            first, positions = tl.cast(tokens - TAIL, tl.int64), programs // (per_row * HEADS) * TAIL
            for n in range(tl.program_id(0) * AT_ONCE, positions, tl.num_programs(0) * AT_ONCE):
                copy_tail(
                    n + tl.arange(0, AT_ONCE), wk + first * wk_token, v + first * v_token, new_keys, new_values, valid,
                    TAIL, positions,
                    wk_row, wk_token, wk_head, v_row, v_token, v_head, HEADS // GROUPS, KEY_WIDTH, WIDTH, BLOCK,
                )  # fmt: skip
        wait_for_last(EARLY)
        if not any_noted(wild, programs, BLOCKS):
            return
        for program in range(tl.program_id(0), programs, tl.num_programs(0)):
            if is_noted(wild, program, BLOCKS):
                output_tile(
                    program, q, k, v, wq, wk, mask, norms, means, peaks, y, lse, table, bounds,
                    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, wq_row, wq_token, wq_head,
                    wk_row, wk_token, wk_head, mask_row, tokens, per_row, slots, scale, softcap,
                    HEADS, GROUPS, NUM, WIDTH, KEY_WIDTH, C, BN, BL, BLOCKS, BD, BE, WINDOW, NEAR, LATENTS, CAUSAL,
                    UNDIRECTED, PACKED, MASKED, CAPPED, FULL, HALF, PRECISION, WILD, EARLY,
                )  # fmt: skip
    elif FOLD:
        folded_tile(
            programs - 1 - tl.program_id(0), q, k, v, wq, wk, norms, means, peaks, y, lse,
            q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, wq_row, wq_token, wq_head,
            wk_row, wk_token, wk_head, tokens, per_row, scale, softcap,
            HEADS, GROUPS, NUM, WIDTH, KEY_WIDTH, C, BL, BD, BE, CAPPED, PRECISION, EARLY,
        )  # fmt: skip
    else:
        output_tile(
            programs - 1 - tl.program_id(0), q, k, v, wq, wk, mask, norms, means, peaks, y, lse, table, bounds,
            q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, wq_row, wq_token, wq_head,
            wk_row, wk_token, wk_head, mask_row, tokens, per_row, slots, scale, softcap,
            HEADS, GROUPS, NUM, WIDTH, KEY_WIDTH, C, BN, BL, BLOCKS, BD, BE, WINDOW, NEAR, LATENTS, CAUSAL,
            UNDIRECTED, PACKED, MASKED, CAPPED, FULL, HALF, PRECISION, WILD, EARLY,
        )  # fmt: skip


@triton.jit
def output_tile(
    program, q, k, v, wq, wk, mask, norms, means, peaks, y, lse, table, bounds,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, wq_row, wq_token, wq_head,
    wk_row, wk_token, wk_head, mask_row, tokens, per_row, slots, scale, softcap,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, KEY_WIDTH: tl.constexpr,
    C: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, BLOCKS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    WINDOW: tl.constexpr, NEAR: tl.constexpr, LATENTS: tl.constexpr, CAUSAL: tl.constexpr, UNDIRECTED: tl.constexpr,
    PACKED: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, FULL: tl.constexpr,
    HALF: tl.constexpr, PRECISION: tl.constexpr, WILD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y of one tile of one head: first the window, then the latents, so that the registers of one serve the other."""
    head = program % HEADS
    index = program // HEADS
    row, tile = (index // per_row).to(tl.int64), index % per_row
    start, end, sequence = locate(tile, row, table, tokens, per_row, C, PACKED)
    first, stop, offset = sequence_span(sequence, bounds, tokens, slots, PACKED)
    t = start + tl.arange(0, C)
    if MASKED:
        mask += row * mask_row
    real = real_rows(t, start, end, offset, mask, MASKED)
    v += row * v_row + (head // GROUPS) * v_head
    SHIFT: tl.constexpr = 1 if WINDOW > 0 else 0
    if WINDOW > 0:
        wk += row * wk_row + (head // GROUPS) * wk_head
        queries = load_rows(wq + row * wq_row + head * wq_head, start, wq_token, real, C, KEY_WIDTH, BE, FULL)
        acc, total, peak = window_sums(
            queries, wk, v, mask, t, real, start, first, stop, offset, slots, wk_token, v_token, scale, softcap,
            WIDTH, KEY_WIDTH, C, BN, BD, BE, WINDOW, NEAR, CAUSAL, MASKED, CAPPED, FULL, PRECISION,
        )  # fmt: skip
        share = inverse_or_zero(total)
    else:
        acc = zero_rows(C, WIDTH, BD)
    if not WILD:
        wait_for_last(EARLY)  # the window needs no states
    if WINDOW > 0:
        row_at = (row * HEADS + head) * tokens + t
        tl.store(lse + row_at, finite(peak) + log2(tl.where(total > 0, total, 1.0)), mask=t < end)

    if LATENTS:
        q += row * q_row + head * q_head
        k += row * k_row + head * k_head
        logits, keys_l, before, mean, reference = latent_block(
            q, k, norms, means, peaks, index, sequence, start, tl.arange(0, BL), q_token, k_token, real, head,
            HEADS, NUM, WIDTH, BD, C, BL, SHIFT, CAUSAL, UNDIRECTED, FULL, WILD,
        )  # fmt: skip
        logit_peak, inverse, window_share = logit_sums(
            logits, q, k, norms, means, peaks, index, sequence, start, q_token, k_token, real, head,
            HEADS, NUM, WIDTH, BD, C, BL, BLOCKS, SHIFT, CAUSAL, UNDIRECTED, FULL, WILD,
        )  # fmt: skip
        through = exp(logits - logit_peak[:, None]) * inverse[:, None]
        if CAUSAL:
            e, inverse_norm = normalisers(keys_l, before, reference, C, BL, WILD)
            left, right, through = latent_factors(through, e, inverse_norm, before, reference, HALF, WILD)
        through = through.to(v.dtype.element_ty)
        if WINDOW > 0:
            share = share * window_share
    if WINDOW > 0:
        acc = scaled(acc, share[:, None])
    if LATENTS:
        for block in tl.static_range(BLOCKS):
            if block > 0:
                logits, keys_l, before, mean, reference = latent_block(
                    q, k, norms, means, peaks, index, sequence, start, block * BL + tl.arange(0, BL), q_token,
                    k_token, real, head,
                    HEADS, NUM, WIDTH, BD, C, BL, SHIFT, CAUSAL, UNDIRECTED, FULL, WILD,
                )  # fmt: skip
                through = exp(logits - logit_peak[:, None]) * inverse[:, None]
                if CAUSAL:
                    e, inverse_norm = normalisers(keys_l, before, reference, C, BL, WILD)
                    left, right, through = latent_factors(through, e, inverse_norm, before, reference, HALF, WILD)
                through = through.to(v.dtype.element_ty)
            if CAUSAL:
                scores = latent_scores(left, right, keys_l, C, WILD)
                own = scores if block == 0 else own + scores
            acc = add_weighted(acc, through, narrow(mean, v.dtype.element_ty), PRECISION)
    if CAUSAL and LATENTS:
        values = load_rows(v, start + offset, v_token, real, C, WIDTH, BD, FULL)
        acc = add_weighted(acc, causal(own, C), values, PRECISION)
    if not FULL:
        acc = only_real(acc, real)
    store_rows(y + (row * tokens * HEADS + head) * WIDTH, acc, start, HEADS * WIDTH, t < end, C, WIDTH, FULL)


@triton.jit
def window_sums(
    queries, wk, v, mask, t, real, start, first, stop, offset, slots, wk_token, v_token, scale, softcap,
    WIDTH: tl.constexpr, KEY_WIDTH: tl.constexpr, C: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, WINDOW: tl.constexpr, NEAR: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    CAPPED: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Weighted values [C WIDTH], total weight [C] and peak [C] over each token's window, by online softmax."""
    acc = zero_rows(C, WIDTH, BD)
    peak = tl.full([C], MINUS_INF, tl.float32)
    total = tl.zeros([C], tl.float32)
    factor = unit(scale, softcap, CAPPED)
    low, high = window_steps(start, first, slots, C, BN, NEAR, CAUSAL)
    for j in range(low, high):
        _, values, scores, _ = window_step(
            j, queries, wk, v, mask, t, real, start, first, stop, offset, slots, wk_token, v_token, scale, softcap,
            WIDTH, KEY_WIDTH, BN, BD, BE, WINDOW, CAUSAL, MASKED, CAPPED, FULL, PRECISION,
        )  # fmt: skip
        weights, shrink, total, peak = softmax_step(scores, total, peak, factor)
        acc = add_weighted(scaled(acc, shrink[:, None]), weights, values, PRECISION)
    return acc, total, peak
