"""The last window − 1 positions, moved on by the tokens of one call."""

from functools import partial

import torch
from torch import Tensor

from latte.ops.checks import backend_for
from latte.ops.states import WindowState


def advance_window(
    past: WindowState | None,
    keys: Tensor,
    values: Tensor,
    window: int,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    backend: str,
) -> WindowState:
    """The window state after `keys` and `values`; slots before the first token, and masked ones, are not valid."""
    batch, tokens = keys.shape[:2]
    slots = window - 1
    if past is not None:  # the wider dtype, however many tokens there are
        keys = keys.to(torch.promote_types(keys.dtype, past.keys.dtype))
        values = values.to(torch.promote_types(values.dtype, past.values.dtype))
    if cu_seqlens is None and tokens >= slots:
        return _tail(keys, values, slots, mask, backend)
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if past is None:
        past = WindowState(
            keys.new_zeros((sequences, slots, *keys.shape[2:])),
            values.new_zeros((sequences, slots, *values.shape[2:])),
            torch.zeros((sequences, slots), dtype=torch.bool, device=keys.device),
        )
    real = torch.ones((batch, tokens), dtype=torch.bool, device=keys.device) if mask is None else mask
    last = _last if cu_seqlens is None else partial(_last_packed, cu_seqlens=cu_seqlens)
    valid = last(past.valid, real, slots)
    keys, values = last(past.keys, keys, slots), last(past.values, values, slots)
    return _valid_only(keys, values, valid) if mask is not None else WindowState(keys, values, valid)


def room_for_tail(
    keys: Tensor, values: Tensor, window: int, inputs: tuple[Tensor, ...], backend: str
) -> WindowState | None:
    """An empty window state, where the kernels can fill it in passing: all of it lies in this call, without gradients.

    That is for causal latents, with neither mask, packing nor past.
    """
    slots = window - 1
    batch, tokens = keys.shape[:2]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if needs_grad or torch.compiler.is_compiling() or not 0 < slots <= tokens or keys.numel() == 0:
        return None
    if backend_for(backend, keys.device) != "triton":
        return None
    return WindowState(
        keys.new_empty((batch, slots, *keys.shape[2:])),
        values.new_empty((batch, slots, *values.shape[2:])),
        torch.empty((batch, slots), dtype=torch.bool, device=keys.device),
    )


def _tail(keys: Tensor, values: Tensor, slots: int, mask: Tensor | None, backend: str) -> WindowState:
    """The window state where all of it lies in this call."""
    first = keys.shape[1] - slots
    keys, values = keys[:, first:], values[:, first:]
    if mask is not None:
        return _valid_only(keys, values, mask[:, first:].clone())
    # A copy does not hold a whole context in memory; where a graph does so anyway, there is no need of one.
    free = not (keys.requires_grad or values.requires_grad or torch.compiler.is_compiling())
    if free and keys.numel() > 0 and backend_for(backend, keys.device) == "triton":
        from latte.ops.triton.window_tail import copy_tail

        return WindowState(*copy_tail(keys, values))
    keys, values = (x if x.requires_grad else x.clone() for x in (keys, values))
    return WindowState(keys, values, torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device))


def _valid_only(keys: Tensor, values: Tensor, valid: Tensor) -> WindowState:
    """What stands in masked positions may be anything, so it is not kept."""
    empty = ~valid[..., None, None]
    return WindowState(keys.masked_fill(empty, 0.0), values.masked_fill(empty, 0.0), valid)


def in_order(window: WindowState, turn: Tensor) -> WindowState:
    """A window kept as a ring, of whose positions each row's oldest is at `turn` [B], with the oldest first."""
    slots = window.valid.shape[1]
    if slots == 0:
        return window
    place = (turn[:, None] + torch.arange(slots, device=turn.device)) % slots
    row = torch.arange(len(turn), device=turn.device)[:, None]
    return WindowState(*(part[row, place] for part in window))


def _last(past: Tensor, new: Tensor, slots: int) -> Tensor:
    tokens = new.shape[1]
    return torch.cat([past[:, tokens:], new[:, max(tokens - slots, 0) :]], dim=1)


def _last_packed(past: Tensor, new: Tensor, slots: int, cu_seqlens: Tensor) -> Tensor:
    """For each packed sequence, the last `slots` of its past followed by its tokens."""
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    place = lengths[:, None] + torch.arange(slots, device=new.device) - slots  # in the sequence; < 0 is in the past
    row = torch.arange(len(starts), device=new.device)[:, None]
    older = past[row, (slots + place).clamp(min=0, max=max(slots - 1, 0))] if slots else past
    if new.shape[1] == 0:
        return older
    token = (starts[:, None] + place).clamp(min=0, max=new.shape[1] - 1)
    recent = new[0, token]
    from_past = (place < 0).reshape(place.shape + (1,) * (past.ndim - 2))
    return torch.where(from_past, older, recent)
