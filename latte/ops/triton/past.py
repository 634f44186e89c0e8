"""Window positions that came before a call, laid in front of each sequence's tokens."""

import torch
from torch import Tensor

from latte.ops.rounding import round_to


def lay_past(past: Tensor, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """x [B T …] with the past [N P …] of each sequence in front of it; packed sequences each get their own."""
    past = round_to(past, x.dtype)
    if cu_seqlens is None:
        return torch.cat([past, x], dim=1)
    sequences, slots = past.shape[:2]
    laid = x.new_empty((1, x.shape[1] + sequences * slots, *x.shape[2:]))
    laid[0, token_rows(cu_seqlens, x.shape[1], slots)] = x[0]
    laid[0, past_rows(cu_seqlens, slots)] = past.flatten(0, 1)
    return laid


def lift_past(laid: Tensor, slots: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The past [N P …] and the tokens [B T …] that `lay_past` put together."""
    if cu_seqlens is None:
        own = torch.contiguous_format  # each in memory of its own, as custom operations must return them
        return laid[:, :slots].clone(memory_format=own), laid[:, slots:].clone(memory_format=own)
    sequences = cu_seqlens.shape[0] - 1
    tokens = laid.shape[1] - sequences * slots
    past = laid[0, past_rows(cu_seqlens, slots)].unflatten(0, (sequences, slots))
    return past, laid[:, token_rows(cu_seqlens, tokens, slots)]


def token_rows(cu_seqlens: Tensor, tokens: int, slots: int) -> Tensor:
    place = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].long().contiguous(), place, right=True)
    return place + (sequence + 1) * slots


def past_rows(cu_seqlens: Tensor, slots: int) -> Tensor:
    starts = cu_seqlens[:-1].long()
    before = torch.arange(len(starts), device=cu_seqlens.device) * slots
    return ((starts + before)[:, None] + torch.arange(slots, device=cu_seqlens.device)).flatten()
