"""The gradients of a tile of values and keys: what `query_gradients.py` left, and what later tiles send. No atomics."""

import triton
import triton.language as tl

from latte.ops.triton.kernels.arithmetic import MINUS_INF, exp, exp2
from latte.ops.triton.kernels.carries import carry_into, norm_after
from latte.ops.triton.kernels.forward import latent_block, logit_sums
from latte.ops.triton.kernels.latents import (
    causal,
    decay,
    latent_factors,
    latent_scores,
    normalisers,
)
from latte.ops.triton.kernels.order import let_next_begin, wait_for_last
from latte.ops.triton.kernels.rotary import turn_back
from latte.ops.triton.kernels.rows import (
    add_weighted,
    hold,
    load_means,
    load_rows,
    narrow,
    only_real,
    plus,
    products,
    scaled,
    store_rows,
    zero_rows,
)
from latte.ops.triton.kernels.states import any_noted, is_noted
from latte.ops.triton.kernels.tiles import locate
from latte.ops.triton.kernels.window import (
    capped,
    in_window,
    real_rows,
    sequence_span,
    unit,
)


@triton.jit
def key_grad_kernel(
    q, k, v, wq, wk, mask, dy, norms, means, peaks, wild, last_norm,
    tile_carry, tile_carry_h, after_carry, after_carry_h, piece_end, into_mean, into_h, whole_carry, whole_carry_h,
    shifted_lse, local_h, table, bounds, dk, dk_own, dv, dwk, cos, sin,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, wq_row, wq_token, wq_head,
    wk_row, wk_token, wk_head, dy_row, dy_token, dy_head, mask_row,
    tokens, per_row, slots, scale, softcap, angles_row, per_piece, pieces, key_tokens, programs,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, KEY_WIDTH: tl.constexpr,
    C: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, BLOCKS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    WINDOW: tl.constexpr, NEAR: tl.constexpr, LATENTS: tl.constexpr, CAUSAL: tl.constexpr, UNDIRECTED: tl.constexpr,
    PACKED: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, FULL: tl.constexpr,
    HALF: tl.constexpr, PRECISION: tl.constexpr, DK_TOKEN: tl.constexpr, DV_TOKEN: tl.constexpr,
    DWK_TOKEN: tl.constexpr, TURNED: tl.constexpr, WILD: tl.constexpr, PAST: tl.constexpr, INTO: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """`key_grad_tile` of every tile and value head, the last first; with WILD as in `query_grad_kernel`."""
    let_next_begin(EARLY)
    wait_for_last(EARLY)
    tensors = (
        q, k, v, wq, wk, mask, dy, norms, means, peaks, last_norm, tile_carry, tile_carry_h, after_carry, after_carry_h,
        piece_end, into_mean, into_h, whole_carry, whole_carry_h, shifted_lse, local_h, table, bounds, dk, dk_own, dv,
        dwk, cos, sin,
    )  # fmt: skip
    numbers = (
        q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, wq_row, wq_token, wq_head, wk_row,
        wk_token, wk_head, dy_row, dy_token, dy_head, mask_row, tokens, per_row, slots, scale, softcap, angles_row,
        per_piece, pieces, key_tokens,
    )  # fmt: skip
    if WILD:
        EACH: tl.constexpr = GROUPS * BLOCKS
        if not any_noted(wild, programs, EACH):
            return
        for program in range(tl.program_id(0), programs, tl.num_programs(0)):
            if is_noted(wild, program, EACH):
                key_grad_tile(
                    program, *tensors, *numbers,
                    HEADS, GROUPS, NUM, WIDTH, KEY_WIDTH, C, BN, BL, BLOCKS, BD, BE, WINDOW, NEAR, LATENTS, CAUSAL,
                    UNDIRECTED, PACKED, MASKED, CAPPED, FULL, HALF, PRECISION, DK_TOKEN, DV_TOKEN, DWK_TOKEN, TURNED,
                    WILD, PAST, INTO,
                )  # fmt: skip
    else:
        key_grad_tile(
            tl.program_id(0) if PAST else programs - 1 - tl.program_id(0), *tensors, *numbers,
            HEADS, GROUPS, NUM, WIDTH, KEY_WIDTH, C, BN, BL, BLOCKS, BD, BE, WINDOW, NEAR, LATENTS, CAUSAL, UNDIRECTED,
            PACKED, MASKED, CAPPED, FULL, HALF, PRECISION, DK_TOKEN, DV_TOKEN, DWK_TOKEN, TURNED, WILD, PAST, INTO,
        )  # fmt: skip


@triton.jit
def key_grad_tile(
    program,
    q, k, v, wq, wk, mask, dy, norms, means, peaks, last_norm,
    tile_carry, tile_carry_h, after_carry, after_carry_h, piece_end, into_mean, into_h, whole_carry, whole_carry_h,
    shifted_lse, local_h, table, bounds, dk, dk_own, dv, dwk, cos, sin,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, wq_row, wq_token, wq_head,
    wk_row, wk_token, wk_head, dy_row, dy_token, dy_head, mask_row,
    tokens, per_row, slots, scale, softcap, angles_row, per_piece, pieces, key_tokens,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, KEY_WIDTH: tl.constexpr,
    C: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, BLOCKS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    WINDOW: tl.constexpr, NEAR: tl.constexpr, LATENTS: tl.constexpr, CAUSAL: tl.constexpr, UNDIRECTED: tl.constexpr,
    PACKED: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, FULL: tl.constexpr,
    HALF: tl.constexpr, PRECISION: tl.constexpr, DK_TOKEN: tl.constexpr, DV_TOKEN: tl.constexpr,
    DWK_TOKEN: tl.constexpr, TURNED: tl.constexpr, WILD: tl.constexpr, PAST: tl.constexpr, INTO: tl.constexpr,
):  # fmt: skip
    """dv, dwk and dk of one tile of keys, for all query heads of one value head; with PAST, of past window slots."""
    VALUE_HEADS: tl.constexpr = HEADS // GROUPS
    value_head = program % VALUE_HEADS
    index = program // VALUE_HEADS
    if PAST:
        # Per sequence, tiles of slots before its first token: −C..−1, −2C..−C−1, …
        per_sequence = tl.cdiv(slots, C)
        sequence = index // per_sequence
        row = (sequence * 0).to(tl.int64) if PACKED else sequence.to(tl.int64)
        first, stop, offset = sequence_span(sequence, bounds, tokens, slots, PACKED)
        start = first - (index % per_sequence + 1) * C
        end = start + C
        tile = sequence * 0
    else:
        row, tile = (index // per_row).to(tl.int64), index % per_row
        start, end, sequence = locate(tile, row, table, tokens, per_row, C, PACKED)
        first, stop, offset = sequence_span(sequence, bounds, tokens, slots, PACKED)
    s = start + tl.arange(0, C)
    inside = s < end
    exists = inside & (s >= first - slots)
    if MASKED:
        mask += row * mask_row
    real = real_rows(s, first - slots, end, offset, mask, MASKED)
    v += row * v_row + value_head * v_head
    dy += row * dy_row
    values = load_rows(v, start + offset, v_token, real, C, WIDTH, BD, FULL)
    dvalues = zero_rows(C, WIDTH, BD)
    SHIFT: tl.constexpr = 1 if WINDOW > 0 else 0
    if WINDOW > 0:
        keys = load_rows(
            wk + row * wk_row + value_head * wk_head, start + offset, wk_token, real, C, KEY_WIDTH, BE, FULL
        )
        dkeys = zero_rows(C, KEY_WIDTH, BE)
        wq += row * wq_row

    for g in range(GROUPS):
        head = value_head * GROUPS + g
        if WINDOW > 0:
            factor = unit(scale, softcap, CAPPED)
            low = 0 if CAUSAL else tl.maximum(-NEAR, -tl.cdiv(start - first, BN))
            high = tl.minimum(C // BN + NEAR, tl.cdiv(stop - start, BN))
            for j in range(low, high):
                t = start + j * BN + tl.arange(0, BN)
                begin = start + j * BN
                real_t = real_rows(t, first, stop, offset, mask, MASKED)
                queries = load_rows(wq + head * wq_head, begin, wq_token, real_t, BN, KEY_WIDTH, BE, FULL)
                pull = load_rows(dy + head * dy_head, begin, dy_token, real_t, BN, WIDTH, BD, FULL)
                row_at = (row * HEADS + head) * tokens + t
                norm2 = tl.load(shifted_lse + row_at, mask=real_t, other=0.0)
                mean_h = tl.load(local_h + row_at, mask=real_t, other=0.0)
                scores, slope = key_scores(
                    keys, queries, t, s, real_t, real, scale, softcap, WINDOW, CAUSAL, CAPPED, FULL, PRECISION
                )
                weights = exp2(scores * factor - norm2[None, :])
                dscores = weights * (products(values, pull, PRECISION) - mean_h[None, :])
                if CAPPED:
                    dscores = dscores * slope
                dvalues = add_weighted(dvalues, weights, pull, PRECISION)
                dkeys = add_weighted(dkeys, dscores, queries, PRECISION)
                # Products of two rounds at a time would make all products wait for each other.
                dvalues, dkeys = hold(dvalues), hold(dkeys)

        if LATENTS and not PAST:
            q_here, k_here = q + row * q_row + head * q_head, k + row * k_row + head * k_head
            logits, keys_l, before, _, reference = latent_block(
                q_here, k_here, norms, means, peaks, index, sequence, start, tl.arange(0, BL), q_token,
                k_token, real, head,
                HEADS, NUM, WIDTH, BD, C, BL, SHIFT, CAUSAL, UNDIRECTED, FULL, WILD,
            )  # fmt: skip
            if CAUSAL:
                here = load_rows(dy + head * dy_head, start, dy_token, real, C, WIDTH, BD, FULL)
                peak, inverse, _ = logit_sums(
                    logits, q_here, k_here, norms, means, peaks, index, sequence, start, q_token, k_token,
                    real, head,
                    HEADS, NUM, WIDTH, BD, C, BL, BLOCKS, SHIFT, CAUSAL, UNDIRECTED, FULL, WILD,
                )  # fmt: skip
            for block in tl.static_range(BLOCKS):
                l = block * BL + tl.arange(0, BL)
                if block > 0:
                    logits, keys_l, before, _, reference = latent_block(
                        q_here, k_here, norms, means, peaks, index, sequence, start, l, q_token, k_token, real,
                        head,
                        HEADS, NUM, WIDTH, BD, C, BL, SHIFT, CAUSAL, UNDIRECTED, FULL, WILD,
                    )  # fmt: skip
                token_at = (row * tokens + s.to(tl.int64))[:, None]
                dk_at = dk + (token_at * DK_TOKEN + head * NUM + l[None, :])
                keep = inside[:, None] & (l < NUM)[None, :]
                if CAUSAL:
                    p = exp(logits - peak[:, None]) * inverse[:, None]
                    e, inverse_norm = normalisers(keys_l, before, reference, C, BL, WILD)
                    left, right, _ = latent_factors(p, e, inverse_norm, before, reference, HALF, WILD)
                    own = causal(latent_scores(left, right, keys_l, C, WILD), C)
                    if not FULL:
                        own = tl.where(real[:, None], own, 0.0)
                    dvalues = add_weighted(dvalues, tl.trans(own), here, PRECISION)
                    norm = norm_after(tile, row, sequence, norms, last_norm, l, table, per_row, head,
                                      HEADS, NUM, PACKED)  # fmt: skip
                    carry_at = ((row * per_row + tile) * HEADS + head) * NUM + l
                    carry, carry_h = carry_into(
                        after_carry, after_carry_h, piece_end, last_norm, into_mean, into_h, row, tile, sequence, norm,
                        l, table, per_row, per_piece, pieces, head, HEADS, NUM, WIDTH, BD, PACKED, False, INTO,
                    )  # fmt: skip
                    own_carry = load_means(tile_carry, carry_at, l < NUM, WIDTH, BD)
                    carry = plus(carry, narrow(own_carry, tl.float32))
                    carry_h += tl.load(tile_carry_h + carry_at, mask=l < NUM, other=0.0)
                    own_at = token_at * (HEADS * NUM) + head * NUM + l[None, :]
                    grads = tl.load(dk_own + own_at, mask=keep, other=0.0)
                else:
                    norm = before
                    whole_at = (tl.maximum(sequence, 0).to(tl.int64) * HEADS + head) * NUM + l
                    carry = load_means(whole_carry, whole_at, l < NUM, WIDTH, BD)
                    carry_h = tl.load(whole_carry_h + whole_at, mask=l < NUM, other=0.0)
                    grads = tl.zeros([C, BL], tl.float32)
                share = decay(keys_l, tl.broadcast_to(norm[None, :], [C, BL]))
                carry = narrow(carry, values[0].dtype)
                dvalues = add_weighted(dvalues, share, carry, PRECISION)
                grads += share * (products(values, carry, PRECISION) - carry_h[None, :])
                if not FULL:
                    grads = tl.where(real[:, None], grads, 0.0)
                tl.store(dk_at, grads.to(dk.dtype.element_ty), mask=keep)

    at = row * key_tokens + offset
    if not FULL:
        dvalues = only_real(dvalues, real)
    dv += at * DV_TOKEN + value_head * WIDTH
    store_rows(dv, dvalues, start, DV_TOKEN, exists, C, WIDTH, FULL)
    if WINDOW > 0:
        dkeys = scaled(dkeys, scale)
        if not FULL:
            dkeys = only_real(dkeys, real)
        dwk += at * DWK_TOKEN + value_head * KEY_WIDTH
        if TURNED:
            angles_at = row * angles_row + s.to(tl.int64) * (KEY_WIDTH // 2)
            dkeys = turn_back(dkeys, cos, sin, angles_at, exists, KEY_WIDTH, FULL)
        store_rows(dwk, dkeys, start, DWK_TOKEN, exists, C, KEY_WIDTH, FULL)


@triton.jit
def key_scores(
    keys, queries, t, s, real_t, real_s, scale, softcap, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`window_scores` the other way round: keys s are rows, queries t columns."""
    scores, slope = capped(products(keys, queries, PRECISION), scale, softcap, CAPPED)
    visible = in_window(t[None, :], s[:, None], WINDOW, CAUSAL)
    if not FULL:
        visible = visible & real_s[:, None] & real_t[None, :]
    return tl.where(visible, scores, MINUS_INF), slope
