"""The end of a window's keys and values, copied by one launch."""

import triton
import triton.language as tl


@triton.jit
def window_tail_kernel(
    keys, values, new_keys, new_values, valid, slots, k_row, k_token, k_head, v_row, v_token, v_head,
    HEADS: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One position of one row, which is valid."""
    program = tl.program_id(0)
    row, slot = (program // slots).to(tl.int64), (program % slots).to(tl.int64)
    to = program.to(tl.int64) * HEADS
    copy_heads(keys + row * k_row + slot * k_token, new_keys + to * KEY_WIDTH, k_head, HEADS, KEY_WIDTH, BLOCK)
    copy_heads(values + row * v_row + slot * v_token, new_values + to * WIDTH, v_head, HEADS, WIDTH, BLOCK)
    tl.store(valid + program, program >= 0)


@triton.jit
def copy_heads(x, to, head_stride, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """All heads of a position, side by side from `to` on."""
    for begin in range(0, HEADS * WIDTH, BLOCK):
        n = begin + tl.arange(0, BLOCK)
        inside = n < HEADS * WIDTH
        tl.store(to + n, tl.load(x + (n // WIDTH) * head_stride + n % WIDTH, mask=inside, other=0.0), mask=inside)
