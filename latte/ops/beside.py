"""Weights of several products side by side, so that one product gives what all of them would."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

ROW = 16  # columns: rows of 16-bit numbers begin at multiples of 32 bytes, which is what a GPU reads at once


def padded(size: int, row: int = ROW) -> int:
    """The least multiple of `row` that is at least `size`."""
    return -(-size // row) * row


def beside(parts: Sequence[Tensor], row: int = ROW) -> Tensor:
    """Weights, or biases, in one; each begins at a multiple of `row`, with zeros in between."""
    filled = []
    for x in parts:
        filled.append(x)
        gap = padded(x.shape[0], row) - x.shape[0]
        if gap:
            filled.append(x.new_zeros((gap, *x.shape[1:])))
    return torch.cat(filled)


def starts(sizes: Sequence[int], row: int = ROW) -> list[int]:
    """Where each of the parts begins, and how many columns they are in all."""
    return [0, *accumulate(padded(size, row) for size in sizes)]
