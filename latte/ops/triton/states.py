"""Kernels for the states before each tile.

Three launches: every piece of tiles is walked by itself, leaving the state before each tile relative to the piece's
start; the pieces' own states are merged, one program per latent, in one matrix product whose factors exp(Z_j − Z_i) are
at most 1; the states after each sequence are put together. `load_before` merges the first two where they are used.
"""

import triton
import triton.language as tl

from latte.ops.triton.latents import MINUS_INF, decay, finite, is_wild, key_range, log_add, safe_log
from latte.ops.triton.tiles import ends_of, given, locate, sequence_of


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
    for i in range(per_piece):
        tile = begin + i
        start, end, sequence = locate(tile, row, table, tokens, per_row, C, PACKED)
        t = start + tl.arange(0, C)
        real = t < end
        if MASKED:
            real = real & (tl.load(mask + row * mask_row + t, mask=real, other=0) != 0)
        keys = tl.load(
            k + t.to(tl.int64)[:, None] * k_token + l[None, :], mask=real[:, None] & inside_l[None, :], other=MINUS_INF
        ).to(tl.float32)
        values = tl.load(
            v + t.to(tl.int64)[:, None] * v_token + d[None, :], mask=real[:, None] & (d < WIDTH)[None, :], other=0.0
        )
        if PACKED:
            if sequence != current:
                norm = tl.full([BL], MINUS_INF, tl.float32)
                mean = tl.zeros([BL, BD], tl.float32)
                current = sequence
        index = ((row * per_row + tile) * HEADS + head) * NUM + l
        exists = tile < per_row
        tl.store(tile_norm + index, norm, mask=given(exists, inside_l))
        at = mean_rows(tile_mean, index, d, WIDTH)
        tl.store(at, mean.to(tile_mean.dtype.element_ty), mask=given(exists, inside))
        peak, first, lowest = key_range(keys, C)
        stats = tile_keys + ((row * per_row + tile) * HEADS + head) * (3 * NUM) + l
        tl.store(stats, peak, mask=given(exists, inside_l))
        tl.store(stats + NUM, first, mask=given(exists, inside_l))
        tl.store(stats + 2 * NUM, lowest, mask=given(exists, inside_l))

        reference = finite(tl.maximum(norm, peak))
        e = tl.exp(keys - reference[None, :])
        kept = tl.exp(norm - reference)
        total = kept + tl.sum(e, 0)
        scale = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
        share = tl.trans(e * scale[None, :]).to(values.dtype)
        mean = (kept * scale)[:, None] * mean + tl.dot(share, values, input_precision=PRECISION)
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
    weights = tl.exp(seen - peak[:, None])
    total = tl.sum(weights, 1)
    if GIVEN:
        total += tl.exp(handed - peak)
    scale = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    merged = tl.dot(weights * scale[:, None], mean, input_precision=PRECISION)
    if GIVEN:
        handed_mean = tl.load(mean_rows(first_mean, handed_at, d, WIDTH), mask=(d < WIDTH)[None, :], other=0.0)
        merged += (tl.exp(handed - peak) * scale)[:, None] * handed_mean.to(tl.float32)
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
def load_before(
    tile_norm, tile_mean, start_norm, start_mean, first_norm, first_mean, row, tile, sequence, l, d, table, per_row,
    per_piece, pieces, head,
    HEADS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """The state before a tile: Z [L] and M [L D] in float32."""
    anchor = (tile // per_piece) * per_piece
    carried, carried_mean = load_carried(
        start_norm, start_mean, first_norm, first_mean, row, tile, sequence, anchor, l, d, table, per_row, per_piece,
        pieces, head, HEADS, NUM, WIDTH, PACKED, GIVEN,
    )  # fmt: skip
    index = (((row * per_row + tile) * HEADS + head) * NUM + l).to(tl.int64)
    own = tl.load(tile_norm + index, mask=l < NUM, other=MINUS_INF)
    inside = (l < NUM)[:, None] & (d < WIDTH)[None, :]
    own_mean = tl.load(mean_rows(tile_mean, index, d, WIDTH), mask=inside, other=0.0).to(tl.float32)
    norm = log_add(carried, own)
    mean = decay(carried, norm)[:, None] * carried_mean + decay(own, norm)[:, None] * own_mean
    return norm, mean


@triton.jit
def norm_before(
    tile_norm, start_norm, first_norm, row, tile, sequence, l, table, per_row, per_piece, pieces, head,
    HEADS: tl.constexpr, NUM: tl.constexpr, PACKED: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """Z [L] before a tile: `load_before` without the means."""
    index = (((row * pieces + tile // per_piece) * HEADS + head) * NUM + l).to(tl.int64)
    carried = tl.load(start_norm + index, mask=l < NUM, other=MINUS_INF)
    if PACKED:
        same = sequence_of((tile // per_piece) * per_piece, row, table, per_row, PACKED) == sequence
        own_start = tl.full(carried.shape, MINUS_INF, tl.float32)
        if GIVEN:
            at = (tl.maximum(sequence, 0).to(tl.int64) * HEADS + head) * NUM + l
            own_start = tl.load(first_norm + at, mask=l < NUM, other=MINUS_INF).to(tl.float32)
        carried = tl.where(same, carried, own_start)
    index = (((row * per_row + tile) * HEADS + head) * NUM + l).to(tl.int64)
    return log_add(carried, tl.load(tile_norm + index, mask=l < NUM, other=MINUS_INF))


@triton.jit
def tile_is_wild(
    tile_norm, tile_keys, start_norm, first_norm, row, tile, sequence, table, per_row, per_piece, pieces, head,
    HEADS: tl.constexpr, NUM: tl.constexpr, BL: tl.constexpr, BLOCKS: tl.constexpr, PACKED: tl.constexpr,
    GIVEN: tl.constexpr,
):  # fmt: skip
    """Whether a normaliser of any latent leaps inside a tile."""
    wild = tile < 0
    for block in tl.static_range(BLOCKS):
        l = block * BL + tl.arange(0, BL)
        before = norm_before(
            tile_norm, start_norm, first_norm, row, tile, sequence, l, table, per_row, per_piece, pieces, head, HEADS,
            NUM, PACKED, GIVEN,
        )  # fmt: skip
        stats = tile_keys + ((row * per_row + tile).to(tl.int64) * HEADS + head) * (3 * NUM) + l
        peak = tl.load(stats, mask=l < NUM, other=MINUS_INF)
        first = tl.load(stats + NUM, mask=l < NUM, other=MINUS_INF)
        lowest = tl.load(stats + 2 * NUM, mask=l < NUM, other=float("inf"))
        wild = wild | is_wild(before, peak, first, lowest)
    return wild


@triton.jit
def finish_kernel(
    last_norm, last_mean, start_norm, start_mean, first_norm, first_mean, table, ends, sequences, per_row, per_piece,
    pieces,
    HEADS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr,
    PACKED: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """In place, the state a sequence gathered in its last piece becomes its state; an empty one keeps what it had."""
    sequence, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, _, tile = ends_of(sequence, ends, sequences, per_row, PACKED)
    l = block * BL + tl.arange(0, BL)
    d = tl.arange(0, BD)
    if tile >= 0:
        anchor = (tile // per_piece) * per_piece
        carried, carried_mean = load_carried(
            start_norm, start_mean, first_norm, first_mean, row, tile, sequence, anchor, l, d, table, per_row,
            per_piece, pieces, head, HEADS, NUM, WIDTH, PACKED, GIVEN,
        )  # fmt: skip
        index = (sequence.to(tl.int64) * HEADS + head) * NUM + l
        inside = (l < NUM)[:, None] & (d < WIDTH)[None, :]
        own = tl.load(last_norm + index, mask=l < NUM, other=MINUS_INF)
        own_mean = tl.load(mean_rows(last_mean, index, d, WIDTH), mask=inside, other=0.0)
        norm = log_add(carried, own)
        mean = decay(carried, norm)[:, None] * carried_mean + decay(own, norm)[:, None] * own_mean
        tl.debug_barrier()  # what is overwritten has been read by all
        tl.store(last_norm + index, norm, mask=l < NUM)
        tl.store(mean_rows(last_mean, index, d, WIDTH), mean, mask=inside)
