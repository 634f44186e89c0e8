"""Kernels for what one more token goes through before attention: the mixer, and the projections.

Each program owns what it overwrites: a block of the RG-LRU's channels, or some channels of the convolution.
"""

import triton
import triton.language as tl

from latte.ops.triton.kernels.arithmetic import MINUS_INF
from latte.ops.triton.kernels.recurrence import decay_and_rest, decay_rate, inverse_root, sigmoids


@triton.jit
def is_real(mask, row, mask_row, MASKED: tl.constexpr):
    """Whether the row's token is one that counts."""
    real = row >= 0
    if MASKED:
        real = tl.load(mask + row * mask_row) != 0
    return real


@triton.jit
def recurrence_step(
    x, a_weight, a_bias, x_weight, x_bias, a_param, state, real, block,
    W: tl.constexpr, SIZE: tl.constexpr, BS: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """y = h of one block of channels, and h in place: both gates' products, then the recurrence."""
    o = tl.arange(0, BS)
    inside = o < SIZE
    cols = block * SIZE + o
    own = tl.load(x + cols, mask=inside, other=0.0).to(tl.float32)
    h = tl.load(state + cols, mask=inside, other=0.0)
    a_gate = tl.load(a_bias + cols, mask=inside, other=0.0).to(tl.float32)
    x_gate = tl.load(x_bias + cols, mask=inside, other=0.0).to(tl.float32)
    for start in range(0, SIZE, BI):
        i = start + tl.arange(0, BI)
        part = tl.load(x + block * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
        at = block * SIZE * SIZE + i[:, None] * SIZE + o[None, :]
        keep = (i < SIZE)[:, None] & inside[None, :]
        a_rows = tl.load(a_weight + at, mask=keep, other=0.0)
        x_rows = tl.load(x_weight + at, mask=keep, other=0.0)
        a_gate += tl.sum(part[:, None] * a_rows.to(tl.float32), 0)
        x_gate += tl.sum(part[:, None] * x_rows.to(tl.float32), 0)
    r, i_gate = sigmoids(a_gate, x_gate)
    rate, _ = decay_rate(a_param, cols, W)
    a, rest = decay_and_rest(r, rate)
    unseen = h == MINUS_INF
    rest = tl.where(unseen, 1.0, rest)
    after = tl.where(unseen, 0.0, a * tl.where(unseen, 0.0, h)) + rest * inverse_root(rest) * i_gate * own
    tl.store(state + cols, tl.where(real, after, h), mask=inside)
    return tl.where(real, after, 0.0)


@triton.jit
def convolution_step(x, weight, bias, state, real, cols, W: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr):
    """y of some channels from the last K inputs, which move up by one."""
    inside = cols < W
    new = tl.load(x + cols, mask=inside, other=0.0)
    new = tl.where(real, new, 0.0)
    acc = new.to(tl.float32) * tl.load(weight + cols * K + (K - 1), mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        acc += tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
    at = state + cols
    for j in tl.static_range(K - 1):
        past = tl.load(at + j * W, mask=inside, other=0.0)
        acc += past.to(tl.float32) * tl.load(weight + cols * K + j, mask=inside, other=0.0).to(tl.float32)
        if j > 0:
            tl.store(at + (j - 1) * W, past, mask=inside)
    if K > 1:
        tl.store(at + (K - 2) * W, new, mask=inside)
    return tl.where(real, acc, 0.0)


@triton.jit
def rglru_step_kernel(
    x, a_weight, a_bias, x_weight, x_bias, a_param, mask, state, y, x_row, mask_row,
    W: tl.constexpr, SIZE: tl.constexpr, BS: tl.constexpr, BI: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The RG-LRU of one token, a block of channels each."""
    BLOCKS: tl.constexpr = W // SIZE
    row, block = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(0) % BLOCKS
    real = is_real(mask, row, mask_row, MASKED)
    out = recurrence_step(
        x + row * x_row, a_weight, a_bias, x_weight, x_bias, a_param, state + row * W, real, block, W, SIZE, BS, BI
    )
    o = tl.arange(0, BS)
    tl.store(y + row * W + block * SIZE + o, out.to(y.dtype.element_ty), mask=o < SIZE)


@triton.jit
def short_conv_step_kernel(
    x, weight, bias, mask, state, y, x_row, mask_row,
    W: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The convolution of one token, some channels each."""
    BLOCKS: tl.constexpr = (W + BLOCK - 1) // BLOCK
    row, block = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(0) % BLOCKS
    cols = block * BLOCK + tl.arange(0, BLOCK)
    real = is_real(mask, row, mask_row, MASKED)
    acc = convolution_step(x + row * x_row, weight, bias, state + row * (K - 1) * W, real, cols, W, K, BIAS)
    tl.store(y + row * W + cols, acc.to(y.dtype.element_ty), mask=cols < W)


@triton.jit
def load_columns(weight, first, cols, inside, W: tl.constexpr, N: tl.constexpr, BN: tl.constexpr):
    """BN rows of a weight [N W] in some of its columns."""
    n = first + tl.arange(0, BN)
    return tl.load(weight + n[:, None] * W + cols[None, :], mask=(n < N)[:, None] & inside[None, :], other=0.0)


@triton.jit
def store_part(
    tile, weight, bias, part, mixed, cols, inside, begins,
    W: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """What some columns of a weight [N W], and its bias where `begins`, contribute; `tile` is its first rows."""
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        total = tl.sum(tile.to(tl.float32) * mixed[None, :], 1)
        if BIAS:
            total += tl.where(begins, tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32), 0.0)
        tl.store(part + n, total, mask=n < N)
        if N > BN:
            tile = load_columns(weight, first + BN, cols, inside, W, N, BN)


@triton.jit
def store_rows(
    x, weight, bias, y, first, W: tl.constexpr, N: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, BIAS: tl.constexpr
):
    """BR outputs of a linear layer."""
    n = first + tl.arange(0, BR)
    acc = tl.zeros([BR, BC], tl.float32)
    for begin in tl.static_range(0, W, BC):
        cols = begin + tl.arange(0, BC)
        tile = load_columns(weight, first, cols, cols < W, W, N, BR)
        acc += tile.to(tl.float32) * tl.load(x + cols, mask=cols < W, other=0.0).to(tl.float32)[None, :]
    total = tl.sum(acc, 1)
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + n, total.to(y.dtype.element_ty), mask=n < N)


@triton.jit
def input_step_kernel(
    x, mask, state, a_weight, a_bias, x_weight, x_bias, a_param, taps, taps_bias,
    query, query_bias, key, key_bias, logits, w0, w1, w2, b0, b1, b2, y, x_row, mask_row,
    RECURRENT: tl.constexpr, TAPS: tl.constexpr, TAPS_BIAS: tl.constexpr, MASKED: tl.constexpr, BIAS: tl.constexpr,
    W: tl.constexpr, SIZE: tl.constexpr, BS: tl.constexpr, BI: tl.constexpr,
    NQ: tl.constexpr, BQ: tl.constexpr, NK: tl.constexpr, BK: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One token through the mixer and the logits' layers, and through up to three layers that read x itself.

    A program of the first kind has a block of channels: it advances their mixer and writes what they contribute to
    every logit, to be added up by whoever reads the logits. The others have BR outputs each.
    """
    BLOCKS: tl.constexpr = (W + SIZE - 1) // SIZE
    P0: tl.constexpr = BLOCKS + (N0 + BR - 1) // BR
    P1: tl.constexpr = P0 + (N1 + BR - 1) // BR
    P2: tl.constexpr = P1 + (N2 + BR - 1) // BR
    row, job = (tl.program_id(0) // P2).to(tl.int64), tl.program_id(0) % P2
    x += row * x_row
    y += row * (N0 + N1 + N2)
    if job < BLOCKS:
        o = tl.arange(0, BS)
        cols = job * SIZE + o
        inside = (o < SIZE) & (cols < W)
        query_rows = load_columns(query, 0, cols, inside, W, NQ, BQ)  # asked for before anything is waited for
        key_rows = load_columns(key, 0, cols, inside, W, NK, BK)
        real = is_real(mask, row, mask_row, MASKED)
        if RECURRENT:
            mixed = recurrence_step(
                x, a_weight, a_bias, x_weight, x_bias, a_param, state + row * W, real, job, W, SIZE, BS, BI
            )
        elif TAPS > 0:
            mixed = convolution_step(x, taps, taps_bias, state + row * (TAPS - 1) * W, real, cols, W, TAPS, TAPS_BIAS)
        else:
            mixed = tl.load(x + cols, mask=inside, other=0.0).to(tl.float32)
        mixed = tl.where(inside, mixed, 0.0).to(x.dtype.element_ty).to(tl.float32)  # as the mixer's output would be
        part = logits + (row * BLOCKS + job) * (NQ + NK)
        store_part(query_rows, query, query_bias, part, mixed, cols, inside, job == 0, W, NQ, BQ, BIAS)
        store_part(key_rows, key, key_bias, part + NQ, mixed, cols, inside, job == 0, W, NK, BK, BIAS)
    elif job < P0:
        store_rows(x, w0, b0, y, (job - BLOCKS) * BR, W, N0, BR, BC, BIAS)
    elif N1 > 0 and job < P1:
        store_rows(x, w1, b1, y + N0, (job - P0) * BR, W, N1, BR, BC, BIAS)
    elif N2 > 0:
        store_rows(x, w2, b2, y + (N0 + N1), (job - P1) * BR, W, N2, BR, BC, BIAS)
