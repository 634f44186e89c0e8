"""Where sequences begin and end: in a batch with padding, or packed into one row."""

from typing import NamedTuple

import torch
from torch import Tensor


class Spans(NamedTuple):
    """For each of N sequences the row it lies in, its first real token and its last position.

    `first` is T, and `last` T too, where a sequence has no real token: nothing happens to its state.
    """

    row: Tensor
    first: Tensor
    last: Tensor


def spans(mask: Tensor | None, cu_seqlens: Tensor | None, batch: int, tokens: int, device: torch.device) -> Spans:
    """The spans of a batch [B, T] or of packed sequences, found on the device without waiting for it."""
    if cu_seqlens is None:
        row = torch.arange(batch, device=device)
        if mask is None or tokens == 0:
            first = torch.zeros_like(row)  # which is T, hence "none", when T = 0
        else:
            first = torch.where(mask.any(dim=1), mask.byte().argmax(dim=1), tokens)
        return Spans(row, first, torch.where(first < tokens, max(tokens - 1, 0), tokens))

    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    first = starts
    seen = ends > starts
    if mask is not None:
        count = torch.cat([mask.new_zeros(1, dtype=torch.long), mask[0].cumsum(dim=0)])  # real tokens before t
        first = torch.searchsorted(count, count[starts] + 1) - 1
        seen = count[ends] > count[starts]
    return Spans(torch.zeros_like(starts), torch.where(seen, first, tokens), torch.where(seen, ends - 1, tokens))


def bounds(cu_seqlens: Tensor | None, batch: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each of N sequences the row it lies in, its first position and the one after its last."""
    if cu_seqlens is None:
        row = torch.arange(batch, device=device)
        return row, torch.zeros_like(row), torch.full_like(row, tokens)
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    return torch.zeros_like(starts), starts, ends


def last_tokens(past: Tensor, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The last P positions of each sequence's past [N P W] followed by its tokens in x [B T W]."""
    slots, tokens = past.shape[1], x.shape[1]
    if cu_seqlens is None:
        return x[:, tokens - slots :].clone() if tokens >= slots else torch.cat([past[:, tokens:], x], dim=1)
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    place = lengths[:, None] + torch.arange(slots, device=x.device) - slots  # in the sequence; before 0 lies the past
    sequence = torch.arange(lengths.shape[0], device=x.device)[:, None]
    older = past[sequence, (slots + place).clamp(0, max(slots - 1, 0))] if slots else past
    if tokens == 0:
        return older.clone()
    return torch.where((place < 0)[..., None], older, x[0, (starts[:, None] + place).clamp(0, tokens - 1)])
