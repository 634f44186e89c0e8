"""Kernels for the states before each tile.

Three launches: every piece of tiles is walked by itself, leaving the state before each tile relative to the piece's
start; the pieces' own states are merged, one program per latent, in one matrix product whose factors exp(Z_j − Z_i) are
at most 1; then both are put together, tile by tile, and tiles in which a normaliser leaps are noted.
"""

import triton
import triton.language as tl

from latte.ops.triton.kernels.latents import (
    MINUS_INF,
    decay,
    dot,
    exp,
    finite,
    inverse_or_zero,
    is_wild,
    log_add,
    safe_log,
)
from latte.ops.triton.kernels.tiles import given, locate, sequence_of


@triton.jit
def mean_rows(x, at, d, WIDTH: tl.constexpr):
    return x + at.to(tl.int64)[:, None] * WIDTH + d[None, :]


@triton.jit
def walk_kernel(
    k, v, mask, tile_norm, tile_mean, tile_keys, piece_norm, piece_mean, last_norm, last_mean, wild, table,
    k_row, k_token, k_head, v_row, v_token, v_head, mask_row, tokens, per_row, per_piece, pieces,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr,
    C: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """States before the tiles of one piece relative to its start, the piece's own, and those where sequences end.

    tile_keys holds the largest, first and smallest key of each tile [tiles H 3 L].
    """
    piece, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if piece + head + block == 0:
        tl.store(wild, 0)  # no tile is known to be wild yet
    row = (piece // pieces).to(tl.int64)
    l = block * BL + tl.arange(0, BL)
    d = tl.arange(0, BD)
    inside_l, inside = l < NUM, (l < NUM)[:, None] & (d < WIDTH)[None, :]
    k += row * k_row + head * k_head
    v += row * v_row + (head // GROUPS) * v_head
    norm = tl.full([BL], MINUS_INF, tl.float32)
    mean = tl.zeros([BL, BD], tl.float32)
    begin = (piece % pieces) * per_piece
    current = sequence_of(begin, row, table, per_row, PACKED)
    # Within a tile 32-bit offsets do, and stay the same from tile to tile.
    k_at, v_at = tl.arange(0, C)[:, None] * k_token + l[None, :], tl.arange(0, C)[:, None] * v_token + d[None, :]
    mean_at = l[:, None] * WIDTH + d[None, :]
    for i in range(per_piece):
        tile = begin + i
        start, end, sequence = locate(tile, row, table, tokens, per_row, C, PACKED)
        t = start + tl.arange(0, C)
        real = t < end
        if MASKED:
            real = real & (tl.load(mask + row * mask_row + t, mask=real, other=0) != 0)
        tile_k, tile_v = k + start.to(tl.int64) * k_token, v + start.to(tl.int64) * v_token
        exists = tile < per_row
        keys = tl.load(tile_k + k_at, mask=real[:, None] & inside_l[None, :], other=MINUS_INF).to(tl.float32)
        values = tl.load(tile_v + v_at, mask=real[:, None] & (d < WIDTH)[None, :], other=0.0)
        if PACKED:
            if sequence != current:
                norm = tl.full([BL], MINUS_INF, tl.float32)
                mean = tl.zeros([BL, BD], tl.float32)
                current = sequence
        index = ((row * per_row + tile) * HEADS + head) * NUM
        tl.store(tile_norm + index + l, norm, mask=given(exists, inside_l))
        tl.store(tile_mean + index * WIDTH + mean_at, mean.to(tile_mean.dtype.element_ty), mask=given(exists, inside))
        peak = tl.max(keys, 0)
        if MASKED:  # the first real token may be any, and the smallest key bounds its key
            lowest = tl.min(tl.where(keys == MINUS_INF, float("inf"), keys), 0)
            real_first = tl.load(mask + row * mask_row + start, mask=start < end, other=0) != 0
            first = tl.load(tile_k + l, mask=given(real_first, inside_l), other=MINUS_INF).to(tl.float32)
        else:
            first = tl.load(tile_k + l, mask=given(start < end, inside_l), other=MINUS_INF).to(tl.float32)
            lowest = first
        stats = tile_keys + index * 3 + l
        tl.store(stats, peak, mask=given(exists, inside_l))
        tl.store(stats + NUM, first, mask=given(exists, inside_l))
        tl.store(stats + 2 * NUM, lowest, mask=given(exists, inside_l))

        reference = finite(tl.maximum(norm, peak))
        e = exp(keys - reference[None, :])
        kept = exp(norm - reference)
        total = kept + tl.sum(e, 0)
        scale = inverse_or_zero(total)
        share = tl.trans(e * scale[None, :]).to(values.dtype)
        mean = (kept * scale)[:, None] * mean + dot(share, values, PRECISION)
        norm = reference + safe_log(total)
        following = sequence_of(tile + 1, row, table, per_row, PACKED)
        if (sequence >= 0) & (following != sequence):
            last = (sequence.to(tl.int64) * HEADS + head) * NUM + l
            tl.store(last_norm + last, norm, mask=inside_l)
            tl.store(mean_rows(last_mean, last, d, WIDTH), mean, mask=inside)
    index = (piece.to(tl.int64) * HEADS + head) * NUM + l
    tl.store(piece_norm + index, norm, mask=inside_l)
    tl.store(mean_rows(piece_mean, index, d, WIDTH), mean, mask=inside)


@triton.jit
def piece_scan_kernel(
    piece_norm, piece_mean, first_norm, first_mean, start_norm, start_mean, table, per_row, per_piece, pieces,
    HEADS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr, BD: tl.constexpr,
    PACKED: tl.constexpr, GIVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before each piece, of the sequence its first tile is in, from the pieces' own and the given ones."""
    row, head, latent = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, BD)
    i = tl.arange(0, N)
    exists = i < pieces
    inside = exists[:, None] & (d < WIDTH)[None, :]
    index = ((row * pieces + i).to(tl.int64) * HEADS + head) * NUM + latent
    norm = tl.load(piece_norm + index, mask=exists, other=MINUS_INF)
    mean = tl.load(mean_rows(piece_mean, index, d, WIDTH), mask=inside, other=0.0)
    earlier = i[:, None] > i[None, :]
    if PACKED:
        first = sequence_of(i * per_piece, row, table, per_row, PACKED)
        last = sequence_of(tl.minimum((i + 1) * per_piece, per_row) - 1, row, table, per_row, PACKED)
        earlier = earlier & (first[:, None] == last[None, :])
    else:
        first = i * 0 + row
    seen = tl.where(earlier, norm[None, :], MINUS_INF)
    peak = tl.max(seen, 1)
    if GIVEN:
        handed_at = (tl.maximum(first, 0).to(tl.int64) * HEADS + head) * NUM + latent
        handed = tl.load(first_norm + handed_at).to(tl.float32)
        peak = tl.maximum(peak, handed)
    peak = finite(peak)
    weights = exp(seen - peak[:, None])
    total = tl.sum(weights, 1)
    if GIVEN:
        total += exp(handed - peak)
    scale = inverse_or_zero(total)
    merged = dot(weights * scale[:, None], mean, PRECISION)
    if GIVEN:
        handed_mean = tl.load(mean_rows(first_mean, handed_at, d, WIDTH), mask=(d < WIDTH)[None, :], other=0.0)
        merged += (exp(handed - peak) * scale)[:, None] * handed_mean.to(tl.float32)
    tl.store(start_norm + index, peak + safe_log(total), mask=exists)
    tl.store(mean_rows(start_mean, index, d, WIDTH), merged, mask=inside)


@triton.jit
def load_carried(
    norms, means, given_norms, given_means, row, tile, sequence, anchor, l, d, table, per_row, per_piece, pieces, head,
    HEADS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """What reaches a tile from outside its piece: the piece's entry, if its `anchor` tile is in the same sequence,
    else the sequence's own, if one is given."""
    inside = (l < NUM)[:, None] & (d < WIDTH)[None, :]
    index = (((row * pieces + tile // per_piece) * HEADS + head) * NUM + l).to(tl.int64)
    same = sequence == sequence
    if PACKED:
        same = sequence_of(anchor, row, table, per_row, PACKED) == sequence
    norm = tl.load(norms + index, mask=given(same, l < NUM), other=MINUS_INF)
    mean = tl.load(mean_rows(means, index, d, WIDTH), mask=given(same, inside), other=0.0)
    if PACKED and GIVEN:
        given_at = (tl.maximum(sequence, 0).to(tl.int64) * HEADS + head) * NUM + l
        own = (sequence >= 0) & (same == 0)
        handed = tl.load(given_norms + given_at, mask=given(own, l < NUM), other=MINUS_INF).to(tl.float32)
        handed_mean = tl.load(mean_rows(given_means, given_at, d, WIDTH), mask=given(own, inside), other=0.0)
        norm = tl.where(own, handed, norm)
        mean = tl.where(own, handed_mean.to(tl.float32), mean)
    return norm, mean


@triton.jit
def merge_kernel(
    tile_norm, tile_mean, tile_keys, start_norm, start_mean, first_norm, first_mean, last_norm, last_mean, wild, table,
    per_row, per_piece, pieces,
    HEADS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, BL: tl.constexpr, BLOCKS: tl.constexpr,
    BD: tl.constexpr, PACKED: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """In place, states relative to their piece become whole: before each tile, and after each sequence.

    The first of a tile's three key statistics becomes its reference m; wild says whether any tile is, then each one.
    """
    index, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, tile = (index // per_row).to(tl.int64), index % per_row
    sequence = sequence_of(tile, row, table, per_row, PACKED)
    l = block * BL + tl.arange(0, BL)
    d = tl.arange(0, BD)
    inside_l, inside = l < NUM, (l < NUM)[:, None] & (d < WIDTH)[None, :]
    anchor = (tile // per_piece) * per_piece
    carried, carried_mean = load_carried(
        start_norm, start_mean, first_norm, first_mean, row, tile, sequence, anchor, l, d, table, per_row, per_piece,
        pieces, head, HEADS, NUM, WIDTH, PACKED, GIVEN,
    )  # fmt: skip
    at = (index.to(tl.int64) * HEADS + head) * NUM + l
    norm = merge_into(tile_norm, tile_mean, at, carried, carried_mean, l, d, inside_l, inside, WIDTH)
    stats = tile_keys + (index.to(tl.int64) * HEADS + head) * (3 * NUM) + l
    peak = tl.load(stats, mask=inside_l, other=MINUS_INF)
    first = tl.load(stats + NUM, mask=inside_l, other=MINUS_INF)
    lowest = tl.load(stats + 2 * NUM, mask=inside_l, other=float("inf"))
    leaps = is_wild(norm, peak, first, lowest)
    tl.store(wild + 1 + (index * HEADS + head) * BLOCKS + block, leaps.to(tl.int32))
    if leaps:
        tl.store(wild, 1)
    tl.debug_barrier()  # what is overwritten has been read by all
    tl.store(stats, finite(tl.maximum(norm, peak)), mask=inside_l)
    if (sequence >= 0) & (sequence_of(tile + 1, row, table, per_row, PACKED) != sequence):
        last = (sequence.to(tl.int64) * HEADS + head) * NUM + l
        merge_into(last_norm, last_mean, last, carried, carried_mean, l, d, inside_l, inside, WIDTH)


@triton.jit
def merge_into(norms, means, at, carried, carried_mean, l, d, inside_l, inside, WIDTH: tl.constexpr):
    """Merge a carried state into the stored one; returns its normaliser."""
    own = tl.load(norms + at, mask=inside_l, other=MINUS_INF)
    own_mean = tl.load(mean_rows(means, at, d, WIDTH), mask=inside, other=0.0).to(tl.float32)
    norm = log_add(carried, own)
    mean = decay(carried, norm)[:, None] * carried_mean + decay(own, norm)[:, None] * own_mean
    tl.debug_barrier()  # what is overwritten has been read by all
    tl.store(norms + at, norm, mask=inside_l)
    tl.store(mean_rows(means, at, d, WIDTH), mean.to(means.dtype.element_ty), mask=inside)
    return norm


@triton.jit
def count_wild(wild, index, head, HEADS: tl.constexpr, BLOCKS: tl.constexpr):
    """How many of a tile's blocks of latents are wild."""
    count = 0
    for block in tl.static_range(BLOCKS):
        count += tl.load(wild + 1 + (index * HEADS + head) * BLOCKS + block)
    return count
