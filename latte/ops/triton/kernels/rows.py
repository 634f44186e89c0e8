"""Rows of a head, in parts whose widths are powers of two: 96 channels are 64 and 32, not 128 with a quarter of zeros.

A tile [C WIDTH] is a tuple of one part [C B] or, where WIDTH is at most 96 and B is 128, of two, [C 64] and [C 32].
Sums, products and stores of tiles take such tuples.
"""

import triton
import triton.language as tl

from latte.ops.triton.kernels.arithmetic import INTERPRETED, dot


@triton.jit
def mean_rows(x, at, d, WIDTH: tl.constexpr):
    """Where rows `at` [R] of means [… WIDTH] have their channels d."""
    return x + at.to(tl.int64)[:, None] * WIDTH + d[None, :]


@triton.jit
def load_rows(x, begin, token_stride, real, C: tl.constexpr, WIDTH: tl.constexpr, B: tl.constexpr, FULL: tl.constexpr):
    """C rows of a head from token `begin` on; what is not real is not read and gives 0. FULL: all are."""
    x += begin.to(tl.int64) * token_stride
    if B == 128 and WIDTH <= 96:
        rows = (
            load_part(x, token_stride, real, C, WIDTH, 64, FULL),
            load_part(x + 64, token_stride, real, C, WIDTH - 64, 32, FULL),
        )
    else:
        rows = (load_part(x, token_stride, real, C, WIDTH, B, FULL),)
    return rows


@triton.jit
def load_part(x, token_stride, real, C: tl.constexpr, WIDTH: tl.constexpr, B: tl.constexpr, FULL: tl.constexpr):
    """Of C rows the first WIDTH columns, but at most B."""
    column = tl.arange(0, B)
    at = x + (tl.arange(0, C)[:, None] * token_stride + column[None, :])
    if FULL and WIDTH >= B:
        part = tl.load(at)
    elif FULL:
        part = tl.load(at, mask=(column < WIDTH)[None, :], other=0.0)
    elif WIDTH >= B:
        part = tl.load(at, mask=real[:, None], other=0.0)
    else:
        part = tl.load(at, mask=real[:, None] & (column < WIDTH)[None, :], other=0.0)
    return part


@triton.jit
def store_rows(
    x, rows, begin, token_stride, inside, C: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    """Write rows of a head from token `begin` on where inside."""
    x += begin.to(tl.int64) * token_stride
    store_part(x, rows[0], token_stride, inside, C, WIDTH, FULL)
    if len(rows) > 1:
        store_part(x + 64, rows[1], token_stride, inside, C, WIDTH - 64, FULL)


@triton.jit
def store_part(x, part, token_stride, inside, C: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr):
    B: tl.constexpr = part.shape[1]
    column = tl.arange(0, B)
    at = x + (tl.arange(0, C)[:, None] * token_stride + column[None, :])
    part = part.to(x.dtype.element_ty)
    if FULL and WIDTH >= B:
        tl.store(at, part)
    elif WIDTH >= B:
        tl.store(at, part, mask=inside[:, None])
    else:
        tl.store(at, part, mask=inside[:, None] & (column < WIDTH)[None, :])


@triton.jit
def load_means(x, at, inside, WIDTH: tl.constexpr, B: tl.constexpr):
    """Rows `at` [L] of means [… WIDTH], 0 where not inside."""
    if B == 128 and WIDTH <= 96:
        means = load_mean(x, at, inside, 0, WIDTH, 64), load_mean(x, at, inside, 64, WIDTH, 32)
    else:
        means = (load_mean(x, at, inside, 0, WIDTH, B),)
    return means


@triton.jit
def load_mean(x, at, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, B: tl.constexpr):
    d = FIRST + tl.arange(0, B)
    return tl.load(mean_rows(x, at, d, WIDTH), mask=inside[:, None] & (d < WIDTH)[None, :], other=0.0)


@triton.jit
def store_means(x, means, at, inside, WIDTH: tl.constexpr):
    store_mean(x, means[0], at, inside, 0, WIDTH)
    if len(means) > 1:
        store_mean(x, means[1], at, inside, 64, WIDTH)


@triton.jit
def store_mean(x, mean, at, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    d = FIRST + tl.arange(0, mean.shape[1])
    to = mean_rows(x, at, d, WIDTH)
    tl.store(to, mean.to(x.dtype.element_ty), mask=inside[:, None] & (d < WIDTH)[None, :])


@triton.jit
def zero_rows(C: tl.constexpr, WIDTH: tl.constexpr, B: tl.constexpr):
    if B == 128 and WIDTH <= 96:
        rows = tl.zeros([C, 64], tl.float32), tl.zeros([C, 32], tl.float32)
    else:
        rows = (tl.zeros([C, B], tl.float32),)
    return rows


@triton.jit
def products(a, b, PRECISION: tl.constexpr):
    """a · bᵀ of two tiles of rows, [rows of a, rows of b]."""
    y = dot(a[0], tl.trans(b[0]), PRECISION)
    if len(a) > 1:
        y += dot(a[1], tl.trans(b[1]), PRECISION)
    return y


@triton.jit
def add_weighted(acc, weights, rows, PRECISION: tl.constexpr):
    """acc + weights · rows, the weights [rows of acc, rows] in the rows' dtype."""
    weights = weights.to(rows[0].dtype)
    total = (acc[0] + dot(weights, rows[0], PRECISION),)
    if len(acc) > 1:
        total = total + (acc[1] + dot(weights, rows[1], PRECISION),)
    return total


@triton.jit
def scaled(rows, factor):
    """Rows times a factor each [C 1], or one for all."""
    found = (rows[0] * factor,)
    if len(rows) > 1:
        found = found + (rows[1] * factor,)
    return found


@triton.jit
def plus(a, b):
    total = (a[0] + b[0],)
    if len(a) > 1:
        total = total + (a[1] + b[1],)
    return total


@triton.jit
def narrow(rows, DTYPE: tl.constexpr):
    """Rows in another dtype."""
    found = (rows[0].to(DTYPE),)
    if len(rows) > 1:
        found = found + (rows[1].to(DTYPE),)
    return found


@triton.jit
def hold(rows):
    """The same rows, for the compiler made here: loads and products before do not wait until they are needed here."""
    found = (hold_part(rows[0]),)
    if len(rows) > 1:
        found = found + (hold_part(rows[1]),)
    return found


@triton.jit
def hold_part(part):
    if INTERPRETED:
        held = part
    elif part.dtype.primitive_bitwidth == 16:
        held = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [part], dtype=part.dtype, is_pure=False, pack=2)
    else:
        held = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [part], dtype=part.dtype, is_pure=False, pack=1)
    return held


@triton.jit
def only_real(rows, real):
    """Rows, 0 where not real [C]."""
    found = (tl.where(real[:, None], rows[0], 0.0),)
    if len(rows) > 1:
        found = found + (tl.where(real[:, None], rows[1], 0.0),)
    return found
