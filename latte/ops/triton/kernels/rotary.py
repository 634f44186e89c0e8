"""Rotary positions, in place."""

import triton
import triton.language as tl


@triton.jit
def turn_kernel(
    x, cos, sin, rows, tokens, x_token, cos_row, cos_token, sin_row, sin_token, keys_at,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    GROUP: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Turn pairs of channels (i, i + HALF) of C tokens and GROUP heads by their angles, or BACK.

    The QUERIES first heads begin in column 0 of a token's row, the others in column `keys_at`.
    """
    n = tl.program_id(0) * C + tl.arange(0, C)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    i = tl.arange(0, B)
    pairs = (n < rows)[:, None, None] & (i < HALF)[None, None, :]
    row, t = (n // tokens).to(tl.int64), n % tokens
    c = load_angles(cos, row, t, cos_row, cos_token, i, pairs)
    s = load_angles(sin, row, t, sin_row, sin_token, i, pairs)
    if BACK:
        s = -s
    column = tl.where(head < QUERIES, head * 2 * HALF, keys_at + (head - QUERIES) * 2 * HALF)
    at = x + (n.to(tl.int64) * x_token)[:, None, None] + (column[:, None] + i[None, :])[None, :, :]
    keep = pairs & (head < HEADS)[None, :, None]
    first = tl.load(at, mask=keep, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=keep, other=0.0).to(tl.float32)
    tl.store(at, (first * c - second * s).to(x.dtype.element_ty), mask=keep)
    tl.store(at + HALF, (second * c + first * s).to(x.dtype.element_ty), mask=keep)


@triton.jit
def load_angles(x, row, t, x_row, x_token, i, inside):
    at = x + (row * x_row + t.to(tl.int64) * x_token)[:, None, None] + i[None, None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)
