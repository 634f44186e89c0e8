"""Kernels for the states before each tile.

Two launches. The first takes every tile by itself, leaves its own state and notes it if a normaliser may leap there.
The second has one program for a row, head and latent: it goes over the tiles of all pieces side by side, for each
piece's own state; merges the pieces in one matrix product whose factors exp(Z_j − Z_i) are at most 1; then goes over
the tiles once more and leaves the state before each. Of a short row every tile is a piece, and the product is all.
"""

import triton
import triton.language as tl

from latte.ops.triton.kernels.arithmetic import MINUS_INF, dot, exp, inverse_or_zero
from latte.ops.triton.kernels.latents import finite, is_wild, safe_log
from latte.ops.triton.kernels.order import let_next_begin, wait_for_last
from latte.ops.triton.kernels.rows import add_weighted, load_rows, mean_rows, scaled, store_means, zero_rows
from latte.ops.triton.kernels.tiles import given, locate, sequence_of

NOTES = tl.constexpr(32)  # on wild tiles that are read at once


@triton.jit
def tile_kernel(
    k, v, mask, own_norm, own_mean, peaks, wild, table,
    k_row, k_token, k_head, v_row, v_token, v_head, mask_row, tokens, per_row, total, each,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr,
    C: tl.constexpr, BL: tl.constexpr, BLOCKS: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr,
    MASKED: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The states that `each` tiles' tokens alone make, the largest of their keys, and which are wild."""
    wait_for_last(EARLY)
    head, block = tl.program_id(0) % HEADS, tl.program_id(1)
    l = block * BL + tl.arange(0, BL)
    inside = l < NUM
    begin = tl.program_id(0) // HEADS * each
    for n in range(tl.minimum(each, total - begin)):
        index = begin + n
        row, tile = (index // per_row).to(tl.int64), index % per_row
        start, end, _ = locate(tile, row, table, tokens, per_row, C, PACKED)
        t = start + tl.arange(0, C)
        real = t < end
        if MASKED:
            real = real & (tl.load(mask + row * mask_row + t, mask=real, other=0) != 0)
        k_at = k + row * k_row + head * k_head + start.to(tl.int64) * k_token
        values = load_rows(v + row * v_row + (head // GROUPS) * v_head, start, v_token, real, C, WIDTH, BD, FULL)
        at = k_at + (tl.arange(0, C)[:, None] * k_token + l[None, :])
        if FULL and NUM % BL == 0:
            keys = tl.load(at).to(tl.float32)
        else:
            keys = tl.load(at, mask=real[:, None] & inside[None, :], other=MINUS_INF).to(tl.float32)
        is_real = start < end
        if MASKED:  # the first real token may be any, and the smallest key bounds its key
            is_real = tl.load(mask + row * mask_row + start, mask=is_real, other=0) != 0
        first = tl.load(k_at + l, mask=given(is_real, inside), other=MINUS_INF).to(tl.float32)
        lowest = first
        if MASKED:
            lowest = tl.min(tl.where(keys == MINUS_INF, float("inf"), keys), 0)
        peak = tl.max(keys, 0)
        reference = finite(peak)
        e = exp(keys - reference[None, :])
        sums = tl.sum(e, 0)
        mean = add_weighted(zero_rows(BL, WIDTH, BD), tl.trans(e.to(v.dtype.element_ty)), values, PRECISION)
        state_at = (index.to(tl.int64) * HEADS + head) * NUM + l
        tl.store(wild + (index * HEADS + head) * BLOCKS + block, is_wild(peak, first, lowest).to(tl.int32))
        tl.store(peaks + state_at, peak, mask=inside)
        tl.store(own_norm + state_at, reference + safe_log(sums), mask=inside)
        store_means(own_mean, scaled(mean, inverse_or_zero(sums)[:, None]), state_at, inside, WIDTH)


@triton.jit
def prefix_kernel(
    own_norm, own_mean, first_norm, first_mean, norms, means, last_norm, last_mean, table, per_row, per_piece, pieces,
    HEADS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr, BD: tl.constexpr,
    PACKED: tl.constexpr, GIVEN: tl.constexpr, DEPTH: tl.constexpr, SHORT: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The state of one latent before each tile of a row and after each sequence."""
    wait_for_last(EARLY)
    let_next_begin(EARLY)
    row, head, latent = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if SHORT:
        short_row(own_norm, own_mean, norms, means, last_norm, last_mean, row, head, latent, per_row,
                  HEADS, NUM, WIDTH, N, BD, PRECISION)  # fmt: skip
    else:
        long_row(own_norm, own_mean, first_norm, first_mean, norms, means, last_norm, last_mean, table,
                 row, head, latent, per_row, per_piece, pieces,
                 HEADS, NUM, WIDTH, N, BD, PACKED, GIVEN, DEPTH, PRECISION)  # fmt: skip


@triton.jit
def short_row(
    own_norm, own_mean, norms, means, last_norm, last_mean, row, head, latent, per_row,
    HEADS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A row of at most N tiles, one sequence that begins with nothing."""
    i, d = tl.arange(0, N), tl.arange(0, BD)
    norm, mean = load_own(own_norm, own_mean, row, i, 0, head, latent, d, per_row, 1, per_row,
                          HEADS, NUM, WIDTH, 1)  # fmt: skip
    mean = mean.to(tl.float32)
    peak = finite(tl.max(norm, 0))
    weights = exp(norm - peak)
    total = tl.sum(weights, 0)
    last_at = (row.to(tl.int64) * HEADS + head) * NUM + latent
    tl.store(last_norm + last_at, peak + safe_log(total))
    last = tl.sum(mean * weights[:, None], 0) * inverse_or_zero(total)
    tl.store(last_mean + last_at * WIDTH + d, last, mask=d < WIDTH)
    norm, mean = before_pieces(norm, mean, None, None, row, i, i * 0, head, latent, d, None, per_row, 1, per_row,
                               HEADS, NUM, WIDTH, False, False, PRECISION)  # fmt: skip
    at = ((row * per_row + i).to(tl.int64) * HEADS + head) * NUM + latent
    tl.store(norms + at, norm, mask=i < per_row)
    keep = (i < per_row)[:, None] & (d < WIDTH)[None, :]
    tl.store(mean_rows(means, at, d, WIDTH), mean.to(means.dtype.element_ty), mask=keep)


@triton.jit
def long_row(
    own_norm, own_mean, first_norm, first_mean, norms, means, last_norm, last_mean, table,
    row, head, latent, per_row, per_piece, pieces,
    HEADS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr, BD: tl.constexpr,
    PACKED: tl.constexpr, GIVEN: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A row in pieces of several tiles, or of several sequences."""
    i, d = tl.arange(0, N), tl.arange(0, BD)
    norm = tl.full([N], MINUS_INF, tl.float32)
    mean = tl.zeros([N, BD], tl.float32)
    begin = sequence_of(i * per_piece, row, table, per_row, PACKED)
    current = begin
    for chunk in range(0, per_piece, DEPTH):
        tiles = load_own(own_norm, own_mean, row, i, chunk, head, latent, d, per_row, per_piece, pieces,
                         HEADS, NUM, WIDTH, DEPTH)  # fmt: skip
        for n in tl.static_range(DEPTH):
            tile = i * per_piece + chunk + n
            if PACKED:
                sequence = sequence_of(tile, row, table, per_row, PACKED)
                norm = tl.where(sequence == current, norm, MINUS_INF)
                mean = tl.where((sequence == current)[:, None], mean, 0.0)
                current = sequence
            norm, mean = merged(norm, mean, tiles[2 * n], tiles[2 * n + 1])

    norm, mean = before_pieces(norm, mean, first_norm, first_mean, row, i, begin, head, latent, d, table, per_row,
                               per_piece, pieces, HEADS, NUM, WIDTH, PACKED, GIVEN, PRECISION)  # fmt: skip
    # To memory and back: otherwise Triton takes every tile below to the layout of the product and back.
    start = ((row * per_row + i * per_piece).to(tl.int64) * HEADS + head) * NUM + latent
    start_at, keep = mean_rows(means, start, d, WIDTH), (i < pieces)[:, None] & (d < WIDTH)[None, :]
    tl.store(start_at, mean.to(means.dtype.element_ty), mask=keep)
    tl.debug_barrier()
    mean = tl.load(start_at, mask=keep, other=0.0).to(tl.float32)
    current = begin
    for chunk in range(0, per_piece, DEPTH):
        tiles = load_own(own_norm, own_mean, row, i, chunk, head, latent, d, per_row, per_piece, pieces,
                         HEADS, NUM, WIDTH, DEPTH)  # fmt: skip
        for n in tl.static_range(DEPTH):
            tile = i * per_piece + chunk + n
            exists = (i < pieces) & (tile < per_row)
            sequence = sequence_of(tile, row, table, per_row, PACKED)
            if PACKED:
                fresh = sequence != current
                current = sequence
                norm = tl.where(fresh, MINUS_INF, norm)
                mean = tl.where(fresh[:, None], 0.0, mean)
                if GIVEN:
                    handed, handed_mean = load_given(first_norm, first_mean, sequence, fresh & exists, head, latent, d,
                                                     HEADS, NUM, WIDTH)  # fmt: skip
                    norm = tl.where(fresh, handed, norm)
                    mean = tl.where(fresh[:, None], handed_mean, mean)
            at = ((row * per_row + tile).to(tl.int64) * HEADS + head) * NUM + latent
            keep = exists[:, None] & (d < WIDTH)[None, :]
            tl.store(norms + at, norm, mask=exists)
            tl.store(mean_rows(means, at, d, WIDTH), mean.to(means.dtype.element_ty), mask=keep)
            norm, mean = merged(norm, mean, tiles[2 * n], tiles[2 * n + 1])
            if PACKED:
                following = sequence_of(tile + 1, row, table, per_row, PACKED)
                store_last(last_norm, last_mean, norm, mean, sequence,
                           exists & (sequence >= 0) & (following != sequence),
                           head, latent, d, HEADS, NUM, WIDTH)  # fmt: skip
    if not PACKED:
        store_last(last_norm, last_mean, norm, mean, i * 0 + row, i == pieces - 1, head, latent, d, HEADS, NUM, WIDTH)


@triton.jit
def load_own(
    own_norm, own_mean, row, i, first, head, latent, d, per_row, per_piece, pieces,
    HEADS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Norm and mean, DEPTH times, of the own states of each piece's tiles from its `first` on; nothing where none is.

    All are asked for before one is used.
    """
    loaded = ()
    for n in tl.static_range(DEPTH):
        tile = i * per_piece + first + n
        exists = (i < pieces) & (tile < per_row)
        at = ((row * per_row + tile).to(tl.int64) * HEADS + head) * NUM + latent
        norm = tl.load(own_norm + at, mask=exists, other=MINUS_INF)
        mean = tl.load(mean_rows(own_mean, at, d, WIDTH), mask=exists[:, None] & (d < WIDTH)[None, :], other=0.0)
        loaded = loaded + (norm, mean)
    return loaded


@triton.jit
def load_given(
    norms, means, sequence, wanted, head, latent, d, HEADS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr
):
    """States that sequences begin with, where wanted; nothing for those before the first."""
    wanted = wanted & (sequence >= 0)
    at = (tl.maximum(sequence, 0).to(tl.int64) * HEADS + head) * NUM + latent
    norm = tl.load(norms + at, mask=wanted, other=MINUS_INF).to(tl.float32)
    mean = tl.load(mean_rows(means, at, d, WIDTH), mask=wanted[:, None] & (d < WIDTH)[None, :], other=0.0)
    return norm, mean.to(tl.float32)


@triton.jit
def store_last(
    norms, means, norm, mean, sequence, wanted, head, latent, d,
    HEADS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """States after sequences, where wanted."""
    at = (tl.maximum(sequence, 0).to(tl.int64) * HEADS + head) * NUM + latent
    tl.store(norms + at, norm, mask=wanted)
    tl.store(mean_rows(means, at, d, WIDTH), mean, mask=wanted[:, None] & (d < WIDTH)[None, :])


@triton.jit
def merged(norm, mean, later, later_mean):
    """Two states in one, row by row."""
    peak = finite(tl.maximum(norm, later))
    weight, later_weight = exp(norm - peak), exp(later - peak)
    total = weight + later_weight
    scale = inverse_or_zero(total)
    both = (weight * scale)[:, None] * mean + (later_weight * scale)[:, None] * later_mean.to(tl.float32)
    return peak + safe_log(total), both


@triton.jit
def before_pieces(
    norm, mean, first_norm, first_mean, row, i, begin, head, latent, d, table, per_row, per_piece, pieces,
    HEADS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, GIVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before each piece i, of the sequence `begin` its first tile is in, from the pieces' own."""
    earlier = i[:, None] > i[None, :]
    if PACKED:
        last = sequence_of(tl.minimum((i + 1) * per_piece, per_row) - 1, row, table, per_row, PACKED)
        earlier = earlier & (begin[:, None] == last[None, :])
    seen = tl.where(earlier, norm[None, :], MINUS_INF)
    peak = tl.max(seen, 1)
    if GIVEN:
        handed, handed_mean = load_given(first_norm, first_mean, begin, i < pieces, head, latent, d,
                                         HEADS, NUM, WIDTH)  # fmt: skip
        peak = tl.maximum(peak, handed)
    peak = finite(peak)
    weights = exp(seen - peak[:, None])
    total = tl.sum(weights, 1)
    if GIVEN:
        total += exp(handed - peak)
    scale = inverse_or_zero(total)
    start = dot(weights * scale[:, None], mean, PRECISION)
    if GIVEN:
        start += (exp(handed - peak) * scale)[:, None] * handed_mean
    return peak + safe_log(total), start


@triton.jit
def is_noted(wild, program, EACH: tl.constexpr):
    """Whether a program's tile is wild, by its EACH notes: of blocks of latents, and of the heads it has."""
    count = 0
    for n in tl.static_range(EACH):
        count += tl.load(wild + program * EACH + n)
    return count != 0


@triton.jit
def any_noted(wild, programs, EACH: tl.constexpr):
    """`is_noted` of any tile that this program, one of few, has to look through; asked for many at a time."""
    n = tl.arange(0, NOTES) * tl.num_programs(0)
    notes = tl.zeros([NOTES], tl.int32)
    for first in range(tl.program_id(0), programs, tl.num_programs(0) * NOTES):
        for part in tl.static_range(EACH):
            notes |= tl.load(wild + (first + n) * EACH + part, mask=first + n < programs, other=0)
    return tl.max(notes, 0) != 0
