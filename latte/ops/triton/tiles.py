"""Where tiles lie: batch rows in equal tiles, packed sequences in tiles of their own, found on the device."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_PIECES = 64  # per row: what one step of a scan merges


class Tiles(NamedTuple):
    """Tiles of `size` tokens, none across sequences, and pieces of `per_piece` tiles, which states are carried over.

    A packed call is one row; it may have a few empty tiles at its end.
    """

    size: int
    rows: int
    per_row: int
    per_piece: int
    pieces: int  # per row
    sequences: int
    tokens: int
    table: Tensor | None  # [3 per_row] first token, end, sequence of each tile; None for equal tiles
    ends: Tensor | None  # [2 sequences] first and last tile of each sequence, −1 for an empty one
    bounds: Tensor | None  # cu_seqlens

    @property
    def count(self) -> int:
        return self.rows * self.per_row


def lay_tiles(batch: int, tokens: int, size: int, cu_seqlens: Tensor | None) -> Tiles:
    """The tiles of a call; nothing is copied to the host."""
    if cu_seqlens is None:
        per_row = (tokens + size - 1) // size
        return Tiles(size, batch, per_row, *_pieces(per_row), batch, tokens, None, None, None)
    bounds = cu_seqlens.long()
    sequences = bounds.shape[0] - 1
    count = (tokens + size - 1) // size + sequences  # the most there can be
    tiles = (bounds.diff() + size - 1) // size
    stops = tiles.cumsum(0)
    index = torch.arange(count, device=bounds.device)
    sequence = torch.searchsorted(stops, index, right=True)
    inside = sequence < sequences
    safe = sequence.clamp(max=sequences - 1)
    start = bounds[safe] + (index - stops[safe] + tiles[safe]) * size
    end = torch.minimum(start + size, bounds[safe + 1])
    table = torch.stack([start, end, sequence]).masked_fill(~inside, -1).to(torch.int32)
    ends = torch.stack([stops - tiles, stops - 1]).masked_fill(tiles == 0, -1).to(torch.int32)
    return Tiles(size, 1, count, *_pieces(count), sequences, tokens, table, ends, bounds)


def _pieces(per_row: int) -> tuple[int, int]:
    """Tiles per piece and pieces per row: pieces of 8 tiles, longer ones where they would be too many."""
    per_piece = max(8, (per_row + MAX_PIECES - 1) // MAX_PIECES)
    return per_piece, (per_row + per_piece - 1) // per_piece


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
