"""Packed sequences as a few padded batches: sequences of like length go together."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from latte.ops.checks import sequence_bounds


class Group(NamedTuple):
    """Sequences padded to the longest of them; padding is less than half."""

    rows: Tensor  # [n] which sequences
    tokens: Tensor  # [n T'] where their tokens lie in the packed row; 0 in the padding
    real: Tensor  # [n T'] False in the padding

    def gather(self, x: Tensor) -> Tensor:
        return x[0, self.tokens]

    def scatter(self, target: Tensor, x: Tensor) -> None:
        """Write x [n T' …] to its places in target [1 T …]."""
        target[0, self.tokens[self.real]] = x[self.real].to(target.dtype)


def groups(cu_seqlens: Tensor, tokens: int) -> Iterator[Group]:
    """All sequences, those whose lengths share a power of two together; empty ones in a group of their own."""
    bounds = sequence_bounds(cu_seqlens, tokens)
    by_size: dict[int, list[int]] = {}
    for row, (start, end) in enumerate(pairwise(bounds)):
        by_size.setdefault((end - start).bit_length(), []).append(row)
    for rows in by_size.values():
        index = torch.tensor(rows)
        starts = torch.tensor(bounds)[index]
        lengths = torch.tensor(bounds)[index + 1] - starts
        place = torch.arange(int(lengths.max()))
        real = place < lengths[:, None]
        where = torch.where(real, starts[:, None] + place, 0)
        device = cu_seqlens.device
        yield Group(index.to(device), where.to(device), real.to(device))
