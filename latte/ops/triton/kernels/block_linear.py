"""Kernels for products of one x [tokens, N · I] with GROUPS block-diagonal matrices.

The results y [tokens, N · O] lie `y_group` elements apart, in whatever memory they have. Every program makes one piece
of one result; partial sums over tokens are added up afterwards, in a fixed order. The gradients of weight and bias lie
side by side in one row of such sums.
"""

import triton
import triton.language as tl

from latte.ops.triton.kernels.arithmetic import dot
from latte.ops.triton.kernels.recurrence import MASKED


@triton.jit
def load_piece(x, rows, columns, row_stride, height, width):
    """[rows, columns] of a matrix, 0 beyond its ends."""
    at = x + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    return tl.load(at, mask=(rows < height)[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def forward_kernel(
    x, weight, bias, y, tokens, x_token, y_token, y_group,
    GROUPS: tl.constexpr, N: tl.constexpr, I: tl.constexpr, O: tl.constexpr, BT: tl.constexpr, BI: tl.constexpr,
    BO: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y of a tile of tokens, one block and one piece of its columns, for all G matrices."""
    tile, block, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t = tile * BT + tl.arange(0, BT)
    o = piece * BO + tl.arange(0, BO)
    for g in tl.static_range(GROUPS):
        first = tl.load(bias + g * N * O + block * O + o, mask=o < O, other=0.0).to(tl.float32)
        acc = tl.zeros([BT, BO], tl.float32) + first[None, :]
        for start in range(0, I, BI):
            i = start + tl.arange(0, BI)
            rows = load_piece(x + block * I, t, i, x_token, tokens, I)
            columns = load_piece(weight + (g * N + block) * I * O, i, o, O, I, O)
            acc += dot(rows, columns, PRECISION)
        at = y + tl.cast(g, tl.int64) * y_group + block * O + t.to(tl.int64)[:, None] * y_token + o[None, :]
        tl.store(at, acc.to(y.dtype.element_ty), mask=(t < tokens)[:, None] & (o < O)[None, :])


@triton.jit
def input_grad_kernel(
    dy, weight, dx, tokens, dy_token, dy_group, dx_token,
    GROUPS: tl.constexpr, N: tl.constexpr, I: tl.constexpr, O: tl.constexpr, BT: tl.constexpr, BI: tl.constexpr,
    BO: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx of a tile of tokens, one block and one piece of its columns, from all G products."""
    tile, block, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t = tile * BT + tl.arange(0, BT)
    i = piece * BI + tl.arange(0, BI)
    acc = tl.zeros([BT, BI], tl.float32)
    for g in tl.static_range(GROUPS):
        for start in range(0, O, BO):
            o = start + tl.arange(0, BO)
            pull = load_piece(dy + tl.cast(g, tl.int64) * dy_group + block * O, t, o, dy_token, tokens, O)
            rows = load_piece(weight + (g * N + block) * I * O, i, o, O, I, O)
            acc += dot(pull, tl.trans(rows), PRECISION)
    at = dx + block * I + t.to(tl.int64)[:, None] * dx_token + i[None, :]
    tl.store(at, acc.to(dx.dtype.element_ty), mask=(t < tokens)[:, None] & (i < I)[None, :])


@triton.jit
def gradient_kernel(
    x, dy, other_dy, weight, other_weight, codes, dx, sums, tokens, part_tokens, x_token, dy_token, dx_token,
    N: tl.constexpr, I: tl.constexpr, O: tl.constexpr, BT: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
    ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of one block of two matrices from one part of the tokens, where a program can hold the blocks.

    If ADD, dx has a gradient already, to which this one is added, and the biases' are not asked for. With `codes`,
    tokens marked MASKED are not read.
    """
    part, block = tl.program_id(0), tl.program_id(1)
    i, o = tl.arange(0, BI), tl.arange(0, BO)
    narrow: tl.constexpr = dy.dtype.element_ty
    columns = tl.trans(load_piece(weight + block * I * O, i, o, O, I, O).to(narrow))
    other_columns = tl.trans(load_piece(other_weight + block * I * O, i, o, O, I, O).to(narrow))
    dweight, other_dweight = tl.zeros([BI, BO], tl.float32), tl.zeros([BI, BO], tl.float32)
    dbias, other_dbias = tl.zeros([BO], tl.float32), tl.zeros([BO], tl.float32)
    begin = part * part_tokens
    end = tl.minimum(begin + part_tokens, tokens)
    dx += block * I
    if ADD:
        given = load_piece(dx, begin + tl.arange(0, BT), i, dx_token, end, I)
    for start in range(begin, end, BT):
        t = start + tl.arange(0, BT)
        if ADD:
            following = load_piece(dx, t + BT, i, dx_token, end, I)  # a tile ahead
        known = t
        if codes is not None:
            marks = tl.load(codes + t, mask=t < end, other=MASKED)
            known = tl.where(marks == MASKED, end, t)  # beyond the end nothing is read
        rows = tl.trans(load_piece(x + block * I, known, i, x_token, end, I).to(narrow))
        pull = load_piece(dy + block * O, t, o, dy_token, end, O)
        other_pull = load_piece(other_dy + block * O, t, o, dy_token, end, O)
        dweight += dot(rows, pull, PRECISION)
        other_dweight += dot(rows, other_pull, PRECISION)
        acc = dot(pull, columns, PRECISION)
        acc += dot(other_pull, other_columns, PRECISION)
        if ADD:
            acc += given.to(tl.float32)
            given = following
        at = dx + t.to(tl.int64)[:, None] * dx_token + i[None, :]
        tl.store(at, acc.to(dx.dtype.element_ty), mask=(t < end)[:, None] & (i < I)[None, :])
        if not ADD:
            dbias += tl.sum(pull.to(tl.float32), 0)
            other_dbias += tl.sum(other_pull.to(tl.float32), 0)
    sums += tl.cast(part, tl.int64) * (2 * N * O * (I if ADD else I + 1))
    at = sums + (block * I + i[:, None]) * O + o[None, :]
    keep = (i < I)[:, None] & (o < O)[None, :]
    tl.store(at, dweight, mask=keep)
    tl.store(at + N * I * O, other_dweight, mask=keep)
    if not ADD:
        at = sums + 2 * N * I * O + block * O + o
        tl.store(at, dbias, mask=o < O)
        tl.store(at + N * O, other_dbias, mask=o < O)


@triton.jit
def weight_grad_kernel(
    x, dy, sums, tokens, part_tokens, x_token, dy_token, dy_group,
    GROUPS: tl.constexpr, N: tl.constexpr, I: tl.constexpr, O: tl.constexpr, BT: tl.constexpr, BI: tl.constexpr,
    BO: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of the tokens' sum of xᵀ dy, for a piece of one block of one matrix, and of its bias' gradient."""
    PIECES: tl.constexpr = (O + BO - 1) // BO
    part, which, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g, block = which // N, which % N
    i = (piece // PIECES) * BI + tl.arange(0, BI)
    o = (piece % PIECES) * BO + tl.arange(0, BO)
    acc = tl.zeros([BI, BO], tl.float32)
    total = tl.zeros([BO], tl.float32)
    begin = part * part_tokens
    end = tl.minimum(begin + part_tokens, tokens)
    dy += tl.cast(g, tl.int64) * dy_group + block * O
    for start in range(begin, end, BT):
        t = start + tl.arange(0, BT)
        rows = load_piece(x + block * I, t, i, x_token, end, I)
        pull = load_piece(dy, t, o, dy_token, end, O)
        acc += dot(tl.trans(rows), pull, PRECISION)
        total += tl.sum(pull.to(tl.float32), 0)
    sums += tl.cast(part, tl.int64) * (GROUPS * N * (I + 1) * O)
    at = sums + (which * I + i[:, None]) * O + o[None, :]
    tl.store(at, acc, mask=(i < I)[:, None] & (o < O)[None, :])
    if piece < PIECES:
        tl.store(sums + (GROUPS * N * I + which) * O + o, total, mask=o < O)
