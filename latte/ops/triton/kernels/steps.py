"""Kernels for one more token: states are advanced where they lie.

Each program owns what it overwrites: the window and latents of one value head. Only validity, position and turn belong
to all heads of a row; the program that comes last moves them on, when all others have read them.
"""

import triton
import triton.language as tl

from latte.ops.triton.kernels.arithmetic import MINUS_INF, dot, exp, inverse_or_zero
from latte.ops.triton.kernels.latents import decay, finite, log_add
from latte.ops.triton.kernels.window import capped, unit


@triton.jit
def load_turned(x, cos, sin, g, e, head_stride, inside, WIDTH: tl.constexpr, ROTARY: tl.constexpr):
    """Rows [G E] of heads side by side, turned by their position and rounded as a tensor of their dtype would be."""
    at = x + g[:, None] * head_stride
    rows = tl.load(at + e[None, :], mask=inside, other=0.0)
    if ROTARY:
        HALF: tl.constexpr = WIDTH // 2
        angle = e % HALF
        partner = tl.load(at + ((e + HALF) % WIDTH)[None, :], mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + angle, mask=e < WIDTH, other=0.0)[None, :]
        s = tl.load(sin + angle, mask=e < WIDTH, other=0.0)[None, :]
        turned = rows.to(tl.float32) * c + tl.where(e < HALF, -1.0, 1.0)[None, :] * partner * s
        rows = turned.to(rows.dtype)
    return rows.to(tl.float32)


@triton.jit
def load_parts(at, part, keep, other, PARTS: tl.constexpr):
    """The sum of what lies at `at` and in the parts after it, in float32."""
    total = tl.load(at, mask=keep, other=other).to(tl.float32)
    for p in tl.static_range(1, PARTS):
        total += tl.load(at + p * part, mask=keep, other=0.0).to(tl.float32)
    return total


@triton.jit
def mixture_step_kernel(
    q, k, v, wq, wk, cos, sin, mask, log_norm, mean, keys, values, valid, position, arrivals, seen_tokens, turn,
    y,
    q_row, q_part, q_head, k_row, k_part, k_head, v_row, v_head, wq_row, wq_head, wk_row, wk_head, cos_row, mask_row,
    scale, softcap, PARTS: tl.constexpr,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, BG: tl.constexpr, NUM: tl.constexpr, BL: tl.constexpr,
    WIDTH: tl.constexpr, BD: tl.constexpr, KEY_WIDTH: tl.constexpr, BE: tl.constexpr, SLOTS: tl.constexpr,
    BP: tl.constexpr, VALID: tl.constexpr, LATENTS: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr,
    ROTARY: tl.constexpr,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y [G D] of one token for the G heads that share a value head, whose state moves on by that token."""
    VALUE_HEADS: tl.constexpr = HEADS // GROUPS
    SHIFT: tl.constexpr = 1 if WINDOW else 0
    row, value_head = (tl.program_id(0) // VALUE_HEADS).to(tl.int64), tl.program_id(0) % VALUE_HEADS
    first = value_head * GROUPS
    g, d = tl.arange(0, BG), tl.arange(0, BD)
    in_group = g < GROUPS
    inside_d = d < WIDTH
    real = row >= 0
    if MASKED:
        real = tl.load(mask + row * mask_row) != 0
    value = tl.load(v + row * v_row + value_head * v_head + d, mask=inside_d, other=0.0)
    if MASKED:
        value = tl.where(real, value, 0.0)
    narrow = value
    value = value.to(tl.float32)
    acc = tl.zeros([BG, BD], tl.float32)
    r = tl.arange(0, ROWS)  # the group's heads, as many rows as the matrix units want
    # All that is read first is asked for before anything is waited for: a step is all latency.
    if WINDOW:
        e, slot = tl.arange(0, BE), tl.arange(0, BP)
        inside_e = e < KEY_WIDTH
        base = row * SLOTS * VALUE_HEADS + value_head
        key_at = keys + (base + slot[:, None] * VALUE_HEADS) * KEY_WIDTH + e[None, :]
        value_at = values + (base + slot[:, None] * VALUE_HEADS) * WIDTH + d[None, :]
        valid_at = valid + row * SLOTS + slot
        keep = slot < SLOTS
        old_keys = tl.load(key_at, mask=keep[:, None] & inside_e[None, :], other=0.0)
        old_values = tl.load(value_at, mask=keep[:, None] & inside_d[None, :], other=0.0)
        seen = tl.load(valid_at, mask=keep, other=0)
        oldest = 0
        if RING:
            oldest = tl.load(turn + row)
    if LATENTS:
        l = tl.arange(0, BL)
        q_at = q + row * q_row + (first + g) * q_head
        k_at = k + row * k_row + (first + g)[:, None] * k_head + l[None, :]
        norm_at = log_norm + (row * HEADS + first + g)[:, None] * NUM + l[None, :]
        mean_at = mean + ((row * HEADS + first + g)[:, None, None] * NUM + l[None, :, None]) * WIDTH + d[None, None, :]
        some = in_group[:, None] & (l < NUM)[None, :]
        logits = load_parts(q_at[:, None] + (l + SHIFT)[None, :], q_part, some, MINUS_INF, PARTS)
        new = load_parts(k_at, k_part, some, MINUS_INF, PARTS)
        old = tl.load(norm_at, mask=some, other=MINUS_INF)
        means = tl.load(mean_at, mask=some[:, :, None] & inside_d[None, None, :], other=0.0)
        if WINDOW:
            choice = load_parts(q_at, q_part, in_group, 0.0, PARTS)

    if WINDOW:
        if ROTARY:
            cos += row * cos_row
            sin += row * cos_row
        queries = load_turned(
            wq + row * wq_row + first * wq_head, cos, sin, r, e, wq_head,
            (r < GROUPS)[:, None] & inside_e[None, :], KEY_WIDTH, ROTARY,
        )  # fmt: skip
        one = tl.arange(0, 1)
        key = load_turned(
            wk + row * wk_row + value_head * wk_head, cos, sin, one, e, wk_head,
            (one == 0)[:, None] & inside_e[None, :], KEY_WIDTH, ROTARY,
        )  # fmt: skip
        if MASKED:
            key = tl.where(real, key, 0.0)
        factor = unit(scale, softcap, CAPPED)
        own, _ = capped(tl.sum(queries * key, 1), scale, softcap, CAPPED)
        queries = queries.to(keys.dtype.element_ty)
        peak = own * factor
        total = tl.full([ROWS], 1.0, tl.float32)
        local = tl.zeros([ROWS, BD], tl.float32) + value[None, :]
        for start in range(0, SLOTS, BP):
            scores, _slope = capped(dot(queries, tl.trans(old_keys), PRECISION), scale, softcap, CAPPED)
            scores = tl.where((seen != 0)[None, :], scores * factor, MINUS_INF)
            higher = tl.maximum(peak, tl.max(scores, 1))
            shrink = tl.exp2(peak - higher)
            weights = tl.exp2(scores - higher[:, None])
            total = total * shrink + tl.sum(weights, 1)
            local = local * shrink[:, None] + dot(weights.to(old_values.dtype), old_values, PRECISION)
            peak = higher
            moved = (start + slot > 0) & (start + slot < SLOTS)
            here_key, here_value, keys_now, values_now = key_at, value_at, old_keys, old_values
            key_at += BP * VALUE_HEADS * KEY_WIDTH
            value_at += BP * VALUE_HEADS * WIDTH
            valid_at += BP
            if SLOTS > BP:
                keep = start + BP + slot < SLOTS
                old_keys = tl.load(key_at, mask=keep[:, None] & inside_e[None, :], other=0.0)
                old_values = tl.load(value_at, mask=keep[:, None] & inside_d[None, :], other=0.0)
                seen = tl.load(valid_at, mask=keep, other=0)
            if not RING:
                tl.debug_barrier()  # what is overwritten has been read by all
                tl.store(here_key - VALUE_HEADS * KEY_WIDTH, keys_now, mask=moved[:, None] & inside_e[None, :])
                tl.store(here_value - VALUE_HEADS * WIDTH, values_now, mask=moved[:, None] & inside_d[None, :])
        if SLOTS > 0:
            last = base + (SLOTS - 1) * VALUE_HEADS
            if RING:
                last = base + oldest * VALUE_HEADS
                tl.debug_barrier()  # the oldest has been read by all
            last_key = keys + last * KEY_WIDTH + e
            tl.store(last_key[None, :], key.to(keys.dtype.element_ty), mask=inside_e[None, :])
            tl.store(values + last * WIDTH + d, narrow.to(values.dtype.element_ty), mask=inside_d)
        local = local * inverse_or_zero(total)[:, None]
        acc = tl.sum(tl.where(g[:, None, None] == r[None, :, None], local[None, :, :], 0.0), 1)

    if LATENTS:
        if WINDOW:
            peak, total = choice, tl.full([BG], 1.0, tl.float32)
        else:
            peak, total = tl.full([BG], MINUS_INF, tl.float32), tl.zeros([BG], tl.float32)
        for begin in range(0, NUM, BL):
            some = in_group[:, None] & (begin + l < NUM)[None, :]
            if MASKED:
                new = tl.where(real, new, MINUS_INF)
            norm = log_add(old, new)
            means = decay(old, norm)[:, :, None] * means + decay(new, norm)[:, :, None] * value[None, None, :]
            tl.store(norm_at, norm, mask=some)
            tl.store(mean_at, means, mask=some[:, :, None] & inside_d[None, None, :])
            higher = tl.maximum(peak, tl.max(logits, 1))
            shrink = exp(peak - finite(higher))
            weights = exp(logits - finite(higher)[:, None])
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None] + tl.sum(weights[:, :, None] * means, 1)
            peak = higher
            if NUM > BL:
                q_at += BL
                k_at += BL
                norm_at += BL
                mean_at += BL * WIDTH
                some = in_group[:, None] & (begin + BL + l < NUM)[None, :]
                logits = load_parts(q_at[:, None] + (l + SHIFT)[None, :], q_part, some, MINUS_INF, PARTS)
                new = load_parts(k_at, k_part, some, MINUS_INF, PARTS)
                old = tl.load(norm_at, mask=some, other=MINUS_INF)
                means = tl.load(mean_at, mask=some[:, :, None] & inside_d[None, None, :], other=0.0)
        acc = acc * inverse_or_zero(total)[:, None]
    if MASKED:
        acc = tl.where(real, acc, 0.0)
    y_at = y + ((row * HEADS + first + g) * WIDTH)[:, None] + d[None, :]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=in_group[:, None] & inside_d[None, :])

    tl.debug_barrier()  # all of this program has read validity
    if tl.atomic_add(arrivals + row, 1) == VALUE_HEADS - 1:
        tl.store(arrivals + row, 0)
        tl.store(position + row, tl.load(position + row) + real.to(tl.int64))
        if row == 0:
            tl.store(seen_tokens, tl.load(seen_tokens) + 1)
        if RING and SLOTS > 0:
            tl.store(valid + row * SLOTS + oldest, real)
            tl.store(turn + row, (oldest + 1) % SLOTS)
        elif WINDOW and SLOTS > 0:
            p = tl.arange(0, VALID)
            following = tl.load(valid + row * SLOTS + p + 1, mask=p + 1 < SLOTS, other=0)
            tl.debug_barrier()
            tl.store(valid + row * SLOTS + p, following, mask=p + 1 < SLOTS)
            tl.store(valid + row * SLOTS + SLOTS - 1, real)
