"""Adding up what programs have left, in a fixed order."""

import triton
import triton.language as tl


@triton.jit
def add_parts_kernel(parts, y, rest, count, size, total, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum over parts [count total]: the first `size` elements go to y, the others to `rest`."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, count, ROWS):
        part = first + tl.arange(0, ROWS)
        at = parts + part.to(tl.int64)[:, None] * total + n[None, :]
        tile += tl.load(at, mask=(part < count)[:, None] & (n < total)[None, :], other=0.0)
    acc = tl.sum(tile, 0)
    tl.store(y + n, acc.to(y.dtype.element_ty), mask=n < size)
    tl.store(rest + (n - size), acc.to(rest.dtype.element_ty), mask=(n >= size) & (n < total))
