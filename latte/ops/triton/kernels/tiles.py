"""Kernel parts that find a tile: its tokens, its sequence, and the tiles of a sequence."""

import triton
import triton.language as tl


@triton.jit
def given(condition, mask):
    """mask where the scalar condition holds, else nothing (the interpreter spoils `mask & scalar`)."""
    return tl.where(condition, mask, False)


@triton.jit
def locate(tile, row, table, tokens, per_row, SIZE: tl.constexpr, PACKED: tl.constexpr):
    """First token, end and sequence of a row's tile; a tile that is empty or beyond the row is in sequence −1."""
    exists = tile < per_row
    if PACKED:
        start = tl.load(table + tile, mask=exists, other=-1)
        end = tl.load(table + per_row + tile, mask=exists, other=-1)
        sequence = tl.load(table + 2 * per_row + tile, mask=exists, other=-1)
    else:
        start = tile * SIZE
        end = tl.minimum(start + SIZE, tokens)
        sequence = tl.where(exists, row.to(tl.int32), -1)
        end = tl.where(exists, end, start)
    return start, end, sequence


@triton.jit
def sequence_of(tile, row, table, per_row, PACKED: tl.constexpr):
    """The sequence of a row's tile (a scalar or several), −1 where there is none."""
    exists = (tile >= 0) & (tile < per_row)
    if PACKED:
        sequence = tl.load(table + 2 * per_row + tile, mask=exists, other=-1)
    else:
        sequence = tl.where(exists, row.to(tl.int32), -1)
    return sequence


@triton.jit
def ends_of(sequence, ends, sequences, per_row, PACKED: tl.constexpr):
    """Row, first and last tile of a sequence; −1 for the tiles of an empty one."""
    if PACKED:
        row = sequence * 0
        first = tl.load(ends + sequence)
        last = tl.load(ends + sequences + sequence)
    else:
        row = sequence
        first = sequence * 0
        last = first + per_row - 1
    return row, first, last
