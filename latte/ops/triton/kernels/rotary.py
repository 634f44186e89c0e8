"""Rotary positions of heads whose channels 2 i and 2 i + 1 are pair i: what turns together lies together."""

import triton
import triton.language as tl


@triton.jit
def turn_kernel(
    x, cos, sin, rows, tokens, x_token, angles_row, keys_at,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Turn C tokens and GROUP heads in place. QUERIES begin in column 0 of a token's row, the others in `keys_at`."""
    n = tl.program_id(0) * C + tl.arange(0, C)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    row, t = (n // tokens).to(tl.int64), (n % tokens).to(tl.int64)
    c, s = load_angles(cos, sin, row * angles_row + t * (WIDTH // 2), n < rows, 0, WIDTH, B // 2, False)
    channel = tl.arange(0, B)
    column = tl.where(head < QUERIES, head * WIDTH, keys_at + (head - QUERIES) * WIDTH)
    at = x + (n.to(tl.int64) * x_token)[:, None, None] + (column[:, None] + channel[None, :])[None, :, :]
    keep = (n < rows)[:, None, None] & ((head < HEADS)[:, None] & (channel < WIDTH)[None, :])[None, :, :]
    pairs = tl.reshape(tl.load(at, mask=keep, other=0.0).to(tl.float32), [C, GROUP, B // 2, 2])
    turned = tl.reshape(turn(pairs, c[:, None, :], s[:, None, :]), [C, GROUP, B])
    tl.store(at, turned.to(x.dtype.element_ty), mask=keep)


@triton.jit
def turn_back(rows, cos, sin, at, inside, WIDTH: tl.constexpr, FULL: tl.constexpr):
    """Rows of a head (`kernels/rows.py`) turned back by the angles that begin `at`, where they are inside, or FULL."""
    found = (turn_part_back(rows[0], cos, sin, at, inside, 0, WIDTH, FULL),)
    if len(rows) > 1:
        found = found + (turn_part_back(rows[1], cos, sin, at, inside, 32, WIDTH, FULL),)
    return found


@triton.jit
def turn_part_back(part, cos, sin, at, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr):
    C: tl.constexpr = part.shape[0]
    B: tl.constexpr = part.shape[1]
    c, s = load_angles(cos, sin, at, inside, FIRST, WIDTH, B // 2, FULL)
    return tl.reshape(turn(tl.reshape(part, [C, B // 2, 2]), c, -s), [C, B])


@triton.jit
def load_angles(
    cos, sin, at, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, B: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    """Cosines and sines of B pairs from FIRST on, [rows B]."""
    pair = FIRST + tl.arange(0, B)
    at = at[:, None] + pair[None, :]
    if FULL and FIRST + B <= WIDTH // 2:
        c, s = tl.load(cos + at), tl.load(sin + at)
    else:
        keep = inside[:, None] & (pair < WIDTH // 2)[None, :]
        c, s = tl.load(cos + at, mask=keep, other=0.0), tl.load(sin + at, mask=keep, other=0.0)
    return c.to(tl.float32), s.to(tl.float32)


@triton.jit
def turn(pairs, c, s):
    """Pairs [… 2] by angles of which c and s are cosine and sine."""
    first, second = tl.split(pairs)
    return tl.join(first * c - second * s, second * c + first * s)
