"""The gradients of a tile of queries. No atomics.

What stays inside the tile is finished here, the keys' gradients among its own tokens; and each tile's carry
(Σ r dy, Σ r h) is left for `key_gradients.py`.
"""

import triton
import triton.language as tl

from latte.ops.triton.kernels.arithmetic import MINUS_INF, exp, exp2
from latte.ops.triton.kernels.forward import latent_block, logit_sums
from latte.ops.triton.kernels.latents import (
    causal,
    latent_key_grads,
    latent_means,
    normalisers,
)
from latte.ops.triton.kernels.order import let_next_begin, wait_for_last
from latte.ops.triton.kernels.rotary import turn_back
from latte.ops.triton.kernels.rows import (
    add_weighted,
    load_rows,
    narrow,
    only_real,
    plus,
    products,
    scaled,
    store_means,
    store_rows,
    zero_rows,
)
from latte.ops.triton.kernels.states import any_noted, is_noted
from latte.ops.triton.kernels.tiles import locate
from latte.ops.triton.kernels.window import (
    real_rows,
    sequence_span,
    unit,
    window_step,
    window_steps,
)


@triton.jit
def query_grad_kernel(
    q, k, v, wq, wk, mask, dy, norms, means, peaks, wild, lse, table, bounds,
    dq, dk, dwq, tile_carry, tile_carry_h, shifted_lse, local_h, cos, sin,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, wq_row, wq_token, wq_head,
    wk_row, wk_token, wk_head, dy_row, dy_token, dy_head, mask_row,
    tokens, per_row, slots, scale, softcap, angles_row, programs,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, KEY_WIDTH: tl.constexpr,
    C: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, BLOCKS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    WINDOW: tl.constexpr, NEAR: tl.constexpr, LATENTS: tl.constexpr, CAUSAL: tl.constexpr, UNDIRECTED: tl.constexpr,
    PACKED: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, FULL: tl.constexpr,
    HALF: tl.constexpr, PRECISION: tl.constexpr, DQ_TOKEN: tl.constexpr, DWQ_TOKEN: tl.constexpr,
    TURNED: tl.constexpr, WILD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """`query_grad_tile` of all tiles and heads; with WILD, a second launch, few programs look for wild ones."""
    let_next_begin(EARLY)
    wait_for_last(EARLY)
    tensors = (
        q, k, v, wq, wk, mask, dy, norms, means, peaks, lse, table, bounds, dq, dk, dwq, tile_carry, tile_carry_h,
        shifted_lse, local_h, cos, sin,
    )  # fmt: skip
    numbers = (
        q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, wq_row, wq_token, wq_head, wk_row,
        wk_token, wk_head, dy_row, dy_token, dy_head, mask_row, tokens, per_row, slots, scale, softcap, angles_row,
    )  # fmt: skip
    if WILD:
        if not any_noted(wild, programs, BLOCKS):
            return
        for program in range(tl.program_id(0), programs, tl.num_programs(0)):
            if is_noted(wild, program, BLOCKS):
                query_grad_tile(
                    program, *tensors, *numbers,
                    HEADS, GROUPS, NUM, WIDTH, KEY_WIDTH, C, BN, BL, BLOCKS, BD, BE, WINDOW, NEAR, LATENTS, CAUSAL,
                    UNDIRECTED, PACKED, MASKED, CAPPED, FULL, HALF, PRECISION, DQ_TOKEN, DWQ_TOKEN, TURNED, WILD,
                )  # fmt: skip
    else:
        query_grad_tile(
            tl.program_id(0), *tensors, *numbers,
            HEADS, GROUPS, NUM, WIDTH, KEY_WIDTH, C, BN, BL, BLOCKS, BD, BE, WINDOW, NEAR, LATENTS, CAUSAL, UNDIRECTED,
            PACKED, MASKED, CAPPED, FULL, HALF, PRECISION, DQ_TOKEN, DWQ_TOKEN, TURNED, WILD,
        )  # fmt: skip


@triton.jit
def query_grad_tile(
    program,
    q, k, v, wq, wk, mask, dy, norms, means, peaks, lse, table, bounds,
    dq, dk, dwq, tile_carry, tile_carry_h, shifted_lse, local_h, cos, sin,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, wq_row, wq_token, wq_head,
    wk_row, wk_token, wk_head, dy_row, dy_token, dy_head, mask_row,
    tokens, per_row, slots, scale, softcap, angles_row,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, KEY_WIDTH: tl.constexpr,
    C: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, BLOCKS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    WINDOW: tl.constexpr, NEAR: tl.constexpr, LATENTS: tl.constexpr, CAUSAL: tl.constexpr, UNDIRECTED: tl.constexpr,
    PACKED: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, FULL: tl.constexpr,
    HALF: tl.constexpr, PRECISION: tl.constexpr, DQ_TOKEN: tl.constexpr, DWQ_TOKEN: tl.constexpr,
    TURNED: tl.constexpr, WILD: tl.constexpr,
):  # fmt: skip
    """dq, dwq and the tile's own part of dk; its carry and Z before it; h_0 and lse − log2 p(0|t) of each token.

    TURNED: dwq, and in `key_grad_tile` dwk, are turned back to what queries and keys were before their positions.
    """
    head = program % HEADS
    index = program // HEADS
    row, tile = (index // per_row).to(tl.int64), index % per_row
    start, end, sequence = locate(tile, row, table, tokens, per_row, C, PACKED)
    first, stop, offset = sequence_span(sequence, bounds, tokens, slots, PACKED)
    t = start + tl.arange(0, C)
    inside = t < end
    if MASKED:
        mask += row * mask_row
    real = real_rows(t, start, end, offset, mask, MASKED)
    v += row * v_row + (head // GROUPS) * v_head
    pull = load_rows(dy + row * dy_row + head * dy_head, start, dy_token, real, C, WIDTH, BD, FULL)
    SHIFT: tl.constexpr = 1 if WINDOW > 0 else 0
    row_at = (row * HEADS + head) * tokens + t
    if WINDOW > 0:
        wk += row * wk_row + (head // GROUPS) * wk_head
        queries = load_rows(wq + row * wq_row + head * wq_head, start, wq_token, real, C, KEY_WIDTH, BE, FULL)
        norm2 = tl.load(lse + row_at, mask=inside, other=0.0)
        weighted_keys = zero_rows(C, KEY_WIDTH, BE)  # Σ a g k
        mean_keys = zero_rows(C, KEY_WIDTH, BE)  # Σ a k
        h_local = tl.zeros([C], tl.float32)
        factor = unit(scale, softcap, CAPPED)
        low, high = window_steps(start, first, slots, C, BN, NEAR, CAUSAL)
        for j in range(low, high):
            keys, values, scores, slope = window_step(
                j, queries, wk, v, mask, t, real, start, first, stop, offset, slots, wk_token, v_token, scale, softcap,
                WIDTH, KEY_WIDTH, BN, BD, BE, WINDOW, CAUSAL, MASKED, CAPPED, FULL, PRECISION,
            )  # fmt: skip
            weights = exp2(scores * factor - norm2[:, None])
            weighted = weights * products(pull, values, PRECISION)
            h_local += tl.sum(weighted, 1)
            if CAPPED:
                weighted = weighted * slope
                weights = weights * slope
            weighted_keys = add_weighted(weighted_keys, weighted, keys, PRECISION)
            mean_keys = add_weighted(mean_keys, weights, keys, PRECISION)
    if LATENTS:
        q += row * q_row + head * q_head
        k += row * k_row + head * k_head
        logits, keys_l, before, mean, reference = latent_block(
            q, k, norms, means, peaks, index, sequence, start, tl.arange(0, BL), q_token, k_token, real, head,
            HEADS, NUM, WIDTH, BD, C, BL, SHIFT, CAUSAL, UNDIRECTED, FULL, WILD,
        )  # fmt: skip
        peak, inverse, window_share = logit_sums(
            logits, q, k, norms, means, peaks, index, sequence, start, q_token, k_token, real, head,
            HEADS, NUM, WIDTH, BD, C, BL, BLOCKS, SHIFT, CAUSAL, UNDIRECTED, FULL, WILD,
        )  # fmt: skip
    if WINDOW > 0:
        tl.store(local_h + row_at, h_local, mask=inside)
        dwindow = scaled(plus(weighted_keys, scaled(mean_keys, -h_local[:, None])), scale)
        if LATENTS:
            dwindow = scaled(dwindow, window_share[:, None])
            log_share = tl.where(window_share > 0, tl.log2(tl.where(window_share > 0, window_share, 1.0)), MINUS_INF)
            norm2 = norm2 - log_share
        if not FULL:
            dwindow = only_real(dwindow, real)
        if TURNED:
            at = row * angles_row + t.to(tl.int64) * (KEY_WIDTH // 2)
            dwindow = turn_back(dwindow, cos, sin, at, inside, KEY_WIDTH, FULL)
        dwq += row * tokens * DWQ_TOKEN + head * KEY_WIDTH
        store_rows(dwq, dwindow, start, DWQ_TOKEN, inside, C, KEY_WIDTH, FULL)
        tl.store(shifted_lse + row_at, norm2, mask=inside)

    if LATENTS:
        pulls = tl.zeros([C, C], tl.float32)
        if CAUSAL:
            values = load_rows(v, start + offset, v_token, real, C, WIDTH, BD, FULL)
            pulls = causal(products(pull, values, PRECISION), C)
        average = tl.zeros([C], tl.float32)
        if WINDOW > 0:
            average += window_share * h_local
        # Two rounds over the blocks of latents: the mean of h over all of them, then the gradients.
        for again in tl.static_range(2 if BLOCKS > 1 else 1):
            for block in tl.static_range(BLOCKS):
                l = block * BL + tl.arange(0, BL)
                if block > 0 or again > 0:
                    logits, keys_l, before, mean, reference = latent_block(
                        q, k, norms, means, peaks, index, sequence, start, l, q_token, k_token, real, head,
                        HEADS, NUM, WIDTH, BD, C, BL, SHIFT, CAUSAL, UNDIRECTED, FULL, WILD,
                    )  # fmt: skip
                p = exp(logits - peak[:, None]) * inverse[:, None]
                if not FULL:
                    p = tl.where(real[:, None], p, 0.0)
                h = products(pull, narrow(mean, pull[0].dtype), PRECISION)
                if CAUSAL:
                    e, inverse_norm = normalisers(keys_l, before, reference, C, BL, WILD, HALF)
                    h = latent_means(pulls, h, keys_l, e, inverse_norm, before, reference, C, HALF, WILD)
                if again == 0:
                    average += tl.sum(p * h, 1)
                if BLOCKS == 1 or again == 1:
                    keep = inside[:, None] & (l < NUM)[None, :]
                    dlogits = p * (h - average[:, None])
                    dq_at = dq + (row * tokens + start) * DQ_TOKEN + head * (NUM + SHIFT) + SHIFT
                    dq_at += tl.arange(0, C)[:, None] * DQ_TOKEN + l[None, :]
                    tl.store(dq_at, dlogits.to(dq.dtype.element_ty), mask=keep)
                    if UNDIRECTED:
                        h = tl.broadcast_to(average[:, None], [C, BL])
                    through = p
                    carry_at = ((row * per_row + tile) * HEADS + head) * NUM + l
                    if CAUSAL:
                        own, through = latent_key_grads(
                            pulls, p, h, keys_l, e, inverse_norm, before, reference, C, BL, HALF, WILD
                        )
                        dk_at = dk + ((row * tokens + start) * HEADS + head) * NUM
                        dk_at += tl.arange(0, C)[:, None] * (HEADS * NUM) + l[None, :]
                        tl.store(dk_at, own, mask=keep)
                    carry_h = tl.sum(through * h, 0)
                    carry = add_weighted(zero_rows(BL, WIDTH, BD), tl.trans(through), pull, PRECISION)
                    store_means(tile_carry, carry, carry_at, l < NUM, WIDTH)
                    tl.store(tile_carry_h + carry_at, carry_h, mask=l < NUM)
        if WINDOW > 0:
            dlogit = tl.where(real, window_share * (h_local - average), 0.0)
            dq_at = dq + (row * tokens + start) * DQ_TOKEN + head * (NUM + 1) + tl.arange(0, C) * DQ_TOKEN
            tl.store(dq_at, dlogit.to(dq.dtype.element_ty), mask=inside)
