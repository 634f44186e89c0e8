"""The end of a window's keys and values, copied: the state after a call that holds all of it."""

import triton
import triton.language as tl

AT_ONCE = tl.constexpr(4)  # positions that a program copies side by side, where it has several


@triton.jit
def window_tail_kernel(
    keys, values, new_keys, new_values, valid, slots, positions, k_row, k_token, k_head, v_row, v_token, v_head,
    HEADS: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One of the positions of all rows, `slots` of each."""
    copy_tail(
        tl.program_id(0) + tl.arange(0, 1), keys, values, new_keys, new_values, valid, slots, positions,
        k_row, k_token, k_head, v_row, v_token, v_head, HEADS, KEY_WIDTH, WIDTH, BLOCK,
    )  # fmt: skip


@triton.jit
def copy_tail(
    n, keys, values, new_keys, new_values, valid, slots, positions, k_row, k_token, k_head, v_row, v_token, v_head,
    HEADS: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Positions n [P], numbered along all rows, with all their heads; every one is valid."""
    row, slot = (n // slots).to(tl.int64), (n % slots).to(tl.int64)
    inside = n < positions
    copy_heads(keys, new_keys, row * k_row + slot * k_token, n, inside, k_head, HEADS, KEY_WIDTH, BLOCK)
    copy_heads(values, new_values, row * v_row + slot * v_token, n, inside, v_head, HEADS, WIDTH, BLOCK)
    tl.store(valid + n, inside, mask=inside)


@triton.jit
def copy_heads(
    x, to, at, n, inside, head_stride, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """All heads of positions that lie `at` [P], to rows n of [· HEADS · WIDTH]."""
    for begin in range(0, HEADS * WIDTH, BLOCK):
        c = begin + tl.arange(0, BLOCK)
        keep = inside[:, None] & (c < HEADS * WIDTH)[None, :]
        found = tl.load(x + at[:, None] + ((c // WIDTH) * head_stride + c % WIDTH)[None, :], mask=keep, other=0.0)
        tl.store(to + (n.to(tl.int64) * (HEADS * WIDTH))[:, None] + c[None, :], found, mask=keep)
