"""Where tiles lie: batch rows in equal tiles, packed sequences in tiles of their own, found on the device."""

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LATENTS = 256  # of a head
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
    def total(self) -> int:
        return self.rows * self.per_row


def lay_tiles(batch: int, tokens: int, size: int, cu_seqlens: Tensor | None) -> Tiles:
    """The tiles of a call; nothing is copied to the host."""
    if cu_seqlens is None:
        per_row = (tokens + size - 1) // size
        return Tiles(size, batch, per_row, *_pieces(per_row), batch, tokens, None, None, None)
    bounds = cu_seqlens.long().contiguous()
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
    per_piece = max(8, -(-per_row // MAX_PIECES))
    return per_piece, -(-per_row // per_piece)


def lane_pieces(per_row: int) -> tuple[int, int]:
    """Tiles per piece and pieces for a program that has all pieces of a row side by side.

    16 pieces of up to 4 tiles, then 32 of up to 16, then 64: a program's fixed work grows with the pieces.
    """
    most = 16 if per_row <= 64 else 32 if per_row <= 512 else MAX_PIECES
    per_piece = max(1, -(-per_row // most))
    per_piece = 1 << (per_piece - 1).bit_length() if per_piece <= 8 else -(-per_piece // 8) * 8
    return per_piece, -(-per_row // per_piece)


def asked_ahead(per_piece: int) -> int:
    """Tiles of each piece that are asked for at once; divides the tiles of a piece."""
    return min(per_piece, 2) if per_piece <= 4 else 4 if per_piece <= 16 else 8


def lanes(pieces: int) -> int:
    """Pieces that a program holds, a power of two the matrix units take."""
    return max(16, 1 << (max(pieces, 1) - 1).bit_length())
