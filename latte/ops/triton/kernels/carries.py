"""Kernels for the gradients that flow back into states: the mirror image of `states`.

A carry is (Σ r dy, Σ r h) over later tokens, r_t = p_t exp(Z − Z_t) relative to the normaliser Z where it stands. Tiles
come with their own, relative to Z before them; pieces are walked from their end, merged, and met in `load_after`.
With WHOLE (bidirectional) there is one normaliser and all factors are 1.
"""

import triton
import triton.language as tl

from latte.ops.triton.kernels.arithmetic import MINUS_INF, dot, exp
from latte.ops.triton.kernels.latents import decay, finite
from latte.ops.triton.kernels.order import let_next_begin, wait_for_last
from latte.ops.triton.kernels.rows import load_means, mean_rows, plus, scaled, store_means
from latte.ops.triton.kernels.tiles import ends_of, given, sequence_of


@triton.jit
def norm_after(tile, row, sequence, before, last_norm, l, table, per_row, head,
               HEADS: tl.constexpr, NUM: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Z at the end of a tile: before the next one of its sequence, or after the sequence."""
    ends = sequence_of(tile + 1, row, table, per_row, PACKED) != sequence
    following = (((row * per_row + tile + 1) * HEADS + head) * NUM + l).to(tl.int64)
    last = (tl.maximum(sequence, 0).to(tl.int64) * HEADS + head) * NUM + l
    inside = given(sequence >= 0, l < NUM)
    final = tl.load(last_norm + last, mask=given(ends, inside), other=MINUS_INF)
    next_norm = tl.load(before + following, mask=given(ends == 0, inside), other=MINUS_INF)
    return tl.where(ends, final, next_norm)


@triton.jit
def carry_walk_kernel(
    before, last_norm, tile_carry, tile_carry_h, piece_carry, piece_carry_h, piece_end, first_carry, first_carry_h,
    table, per_row, per_piece, pieces,
    HEADS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """In place, each tile's own carry becomes that of the later tiles in its piece and sequence, relative to its end.

    Left too: the piece's carry relative to its start, Z at its end and, with FIRST, the carries where sequences start.
    """
    wait_for_last(EARLY)
    let_next_begin(EARLY)
    piece, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = piece // pieces
    l = block * BL + tl.arange(0, BL)
    d = tl.arange(0, BD)
    inside_l, inside = l < NUM, (l < NUM)[:, None] & (d < WIDTH)[None, :]
    carry = tl.zeros([BL, BD], tl.float32)
    carry_h = tl.zeros([BL], tl.float32)
    begin = (piece % pieces) * per_piece
    stop = tl.minimum(begin + per_piece, per_row)
    current = sequence_of(stop - 1, row, table, per_row, PACKED)
    if not WHOLE:
        end_norm = norm_after(stop - 1, row, current, before, last_norm, l, table, per_row, head, HEADS, NUM, PACKED)
        tl.store(piece_end + (piece.to(tl.int64) * HEADS + head) * NUM + l, end_norm, mask=inside_l)
    tile = begin + per_piece - 1
    at = (((row * per_row + tile) * HEADS + head) * NUM + l).to(tl.int64)
    keep_l, keep = given(tile < per_row, inside_l), given(tile < per_row, inside)
    next_own = tl.load(mean_rows(tile_carry, at, d, WIDTH), mask=keep, other=0.0).to(tl.float32)
    next_h = tl.load(tile_carry_h + at, mask=keep_l, other=0.0)
    for back in range(per_piece):
        tile = begin + per_piece - 1 - back
        exists = tile < per_row
        sequence = sequence_of(tile, row, table, per_row, PACKED)
        if PACKED:
            if exists & (sequence != current):
                carry = tl.zeros([BL, BD], tl.float32)
                carry_h = tl.zeros([BL], tl.float32)
                current = sequence
        index = (((row * per_row + tile) * HEADS + head) * NUM + l).to(tl.int64)
        own, own_h = next_own, next_h
        # What the next tile needs is asked for before this one's stores, which it would wait for.
        more = (tile > begin) & (tile <= per_row)
        next_own = tl.load(
            mean_rows(tile_carry, index - HEADS * NUM, d, WIDTH), mask=given(more, inside), other=0.0
        ).to(tl.float32)
        next_h = tl.load(tile_carry_h + index - HEADS * NUM, mask=given(more, inside_l), other=0.0)
        tl.store(
            mean_rows(tile_carry, index, d, WIDTH), carry.to(tile_carry.dtype.element_ty), mask=given(exists, inside)
        )
        tl.store(tile_carry_h + index, carry_h, mask=given(exists, inside_l))
        if WHOLE:
            kept = tl.full([BL], 1.0, tl.float32)
        else:
            norm = tl.load(before + index, mask=given(exists, inside_l), other=MINUS_INF)
            end_norm = norm_after(tile, row, sequence, before, last_norm, l, table, per_row, head, HEADS, NUM, PACKED)
            kept = decay(norm, end_norm)
        carry = tl.where(exists, own + kept[:, None] * carry, carry)
        carry_h = tl.where(exists, own_h + kept * carry_h, carry_h)
        if FIRST:
            if exists & (sequence >= 0) & (sequence_of(tile - 1, row, table, per_row, PACKED) != sequence):
                first = (sequence.to(tl.int64) * HEADS + head) * NUM + l
                tl.store(mean_rows(first_carry, first, d, WIDTH), carry, mask=inside)
                tl.store(first_carry_h + first, carry_h, mask=inside_l)
    index = (piece.to(tl.int64) * HEADS + head) * NUM + l
    tl.store(mean_rows(piece_carry, index, d, WIDTH), carry, mask=inside)
    tl.store(piece_carry_h + index, carry_h, mask=inside_l)


@triton.jit
def carry_scan_kernel(
    piece_carry, piece_carry_h, piece_end, before, last_norm, into_mean, into_h, after_carry, after_carry_h, table,
    per_row, per_piece, pieces,
    HEADS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr, BD: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr, INTO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The carry after each piece, of the sequence its last tile is in, the final state's gradient (INTO) included."""
    wait_for_last(EARLY)
    let_next_begin(EARLY)
    row, head, latent = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, BD)
    i = tl.arange(0, N)
    exists = i < pieces
    inside = exists[:, None] & (d < WIDTH)[None, :]
    index = ((row * pieces + i).to(tl.int64) * HEADS + head) * NUM + latent
    own = tl.load(mean_rows(piece_carry, index, d, WIDTH), mask=inside, other=0.0)
    own_h = tl.load(piece_carry_h + index, mask=exists, other=0.0)
    later = (i[:, None] < i[None, :]) & exists[None, :]
    if PACKED:
        first = sequence_of(i * per_piece, row, table, per_row, PACKED)
        last = sequence_of(tl.minimum((i + 1) * per_piece, per_row) - 1, row, table, per_row, PACKED)
        later = later & (last[:, None] == first[None, :])
    else:
        last = tl.where(exists, row, -1)
    into_at = (tl.maximum(last, 0).to(tl.int64) * HEADS + head) * NUM + latent
    if WHOLE:
        weights = tl.where(later, 1.0, 0.0)
        from_last = tl.where(last >= 0, 1.0, 0.0)
    else:
        tile = tl.minimum(i * per_piece, per_row - 1)
        begin = ((row * per_row + tile).to(tl.int64) * HEADS + head) * NUM + latent
        begin_norm = tl.load(before + begin, mask=exists, other=MINUS_INF)
        end_norm = tl.load(piece_end + index, mask=exists, other=MINUS_INF)
        seen = later & (end_norm > MINUS_INF)[:, None]
        weights = tl.where(seen, exp(finite(end_norm)[:, None] - finite(begin_norm)[None, :]), 0.0)
        from_last = tl.where(last >= 0, decay(end_norm, tl.load(last_norm + into_at)), 0.0)
    carry = dot(weights, own, PRECISION)
    carry_h = tl.sum(weights * own_h[None, :], 1)
    if INTO:
        carry += from_last[:, None] * tl.load(mean_rows(into_mean, into_at, d, WIDTH), mask=inside, other=0.0)
        carry_h += from_last * tl.load(into_h + into_at, mask=exists, other=0.0)
    tl.store(mean_rows(after_carry, index, d, WIDTH), carry, mask=inside)
    tl.store(after_carry_h + index, carry_h, mask=exists)


@triton.jit
def carry_into(
    after_carry, after_carry_h, piece_end, last_norm, into_mean, into_h, row, tile, sequence, norm, l, table,
    per_row, per_piece, pieces, head,
    HEADS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr,
    WHOLE: tl.constexpr, INTO: tl.constexpr,
):  # fmt: skip
    """What reaches a place with normaliser `norm` in a tile from after its piece, or from its sequence's last state.

    The carry comes in parts, as `rows.py` has them.
    """
    piece = tile // per_piece
    index = (((row * pieces + piece) * HEADS + head) * NUM + l).to(tl.int64)
    into_at = (tl.maximum(sequence, 0).to(tl.int64) * HEADS + head) * NUM + l
    inside_l = given(sequence >= 0, l < NUM)
    same = sequence == sequence
    if PACKED:
        end = tl.minimum((piece + 1) * per_piece, per_row) - 1
        same = sequence_of(end, row, table, per_row, PACKED) == sequence
    carry = load_means(after_carry, index, given(same, inside_l), WIDTH, BD)
    carry_h = tl.load(after_carry_h + index, mask=given(same, inside_l), other=0.0)
    if not WHOLE:
        later = tl.load(piece_end + index, mask=given(same, inside_l), other=MINUS_INF)
    if PACKED:
        ended = same == 0
        if INTO:
            carry = plus(carry, load_means(into_mean, into_at, given(ended, inside_l), WIDTH, BD))
            carry_h += tl.load(into_h + into_at, mask=given(ended, inside_l), other=0.0)
        if not WHOLE:
            final = tl.load(last_norm + into_at, mask=given(ended, inside_l), other=MINUS_INF)
            later = tl.where(ended, final, later)
    if not WHOLE:
        kept = decay(norm, later)
        carry = scaled(carry, kept[:, None])
        carry_h = kept * carry_h
    return carry, carry_h


@triton.jit
def carry_finish_kernel(
    first_carry, first_carry_h, after_carry, after_carry_h, piece_end, before, last_norm, into_mean, into_h, table,
    ends, sequences, per_row, per_piece, pieces,
    HEADS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, INTO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """In place, the carry a sequence gathered in its first piece becomes that of the whole, relative to its start."""
    wait_for_last(EARLY)
    let_next_begin(EARLY)
    sequence, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, tile, _ = ends_of(sequence, ends, sequences, per_row, PACKED)
    l = block * BL + tl.arange(0, BL)
    if tile >= 0:
        index = (((row * per_row + tile) * HEADS + head) * NUM + l).to(tl.int64)
        norm = tl.load(before + index, mask=l < NUM, other=MINUS_INF) if not WHOLE else tl.zeros([BL], tl.float32)
        carry, carry_h = carry_into(
            after_carry, after_carry_h, piece_end, last_norm, into_mean, into_h, row, tile, sequence, norm, l, table,
            per_row, per_piece, pieces, head, HEADS, NUM, WIDTH, BD, PACKED, WHOLE, INTO,
        )  # fmt: skip
        first = (sequence.to(tl.int64) * HEADS + head) * NUM + l
        carry = plus(carry, load_means(first_carry, first, l < NUM, WIDTH, BD))
        carry_h += tl.load(first_carry_h + first, mask=l < NUM, other=0.0)
        tl.debug_barrier()  # what is overwritten has been read by all
        store_means(first_carry, carry, first, l < NUM, WIDTH)
        tl.store(first_carry_h + first, carry_h, mask=l < NUM)
