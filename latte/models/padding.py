"""From the arguments that Transformers' callers give to those of our layers: mask, packing, positions."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling


class Layout(NamedTuple):
    """Where the real tokens and the sequences are."""

    mask: Tensor | None  # [B T], True = real; None: all are
    cu_seqlens: Tensor | None  # bounds of packed sequences
    positions: Tensor | None  # [_ T]; None: count the real tokens
    flat: bool = False  # lay the rows one after another, as cu_seqlens says


def find_layout(
    embeds: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cached: bool = False,
) -> Layout:
    """Masks say which of the last T tokens are real; packing is said by `cu_seq_lens`, `seq_idx` or `position_ids`.

    A sequence begins where `seq_idx` changes, or where `position_ids` do not go on by one: the latter counts only when
    there is neither mask nor cache, as elsewhere in Transformers.
    """
    if position_ids is not None:
        _check_places("position_ids", position_ids, embeds)
    mask = _mask(attention_mask, embeds, cached)
    if cu_seq_lens is not None:
        return Layout(mask, cu_seq_lens, position_ids)
    if seq_idx is not None:
        _check_places("seq_idx", seq_idx, embeds)
        seq_idx = seq_idx.expand(embeds.shape[0], -1)
        starts = seq_idx.diff(dim=1, prepend=seq_idx[:, :1] - 1) != 0
        return Layout(mask, _bounds(starts), position_ids, flat=True)
    if position_ids is None or attention_mask is not None or cached:
        return Layout(mask, None, position_ids)
    position_ids = position_ids.expand(embeds.shape[0], -1)
    starts = position_ids.diff(dim=1, prepend=position_ids[:, :1] - 2) != 1
    if is_compiling():  # the number of sequences would be one graph each
        message = "position_ids begin anew within a row; under torch.compile say so with cu_seq_lens_q"
        torch._assert_async(~starts[:, 1:].any(), message)  # pyright: ignore[reportPrivateImportUsage]
    elif starts[:, 1:].any():
        return Layout(None, _bounds(starts), position_ids, flat=True)
    return Layout(None, None, position_ids)


def _check_places(name: str, places: Tensor, embeds: Tensor) -> None:
    """Raise ValueError unless `places` says something of each token, in a row for all rows or one for each."""
    batch, tokens = embeds.shape[:2]
    if tuple(places.shape) not in ((tokens,), (1, tokens), (batch, tokens)):
        raise ValueError(f"{name} has shape {list(places.shape)}; it must be {[batch, tokens]}, or {[1, tokens]}")


def _mask(attention_mask: Tensor | None, embeds: Tensor, cached: bool) -> Tensor | None:
    """The mask of the last T tokens as bool, or None where all are real."""
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor):  # Transformers has masks in a dict too, by kinds of layers
        raise ValueError(
            f"attention_mask is a {type(attention_mask).__name__}; it must be a tensor [batch, tokens so far], "
            "with 1 at real tokens and 0 at padding"
        )
    before = attention_mask.shape[-1] - embeds.shape[1]
    if attention_mask.ndim != 2 or before < 0 or (before > 0 and not cached):
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; it must be [batch, tokens so far], "
            f"with 1 at real tokens and 0 at padding; {embeds.shape[1]} are given, and "
            f"{'more are in the cache' if cached else 'there is no cache'}"
        )
    check_real("attention_mask", attention_mask)
    mask = attention_mask[:, attention_mask.shape[1] - embeds.shape[1] :].bool()
    if not is_compiling() and mask.all():
        return None
    return mask


def check_real(name: str, mask: Tensor) -> None:
    """Raise ValueError for a mask that is added to scores, whose 0 is a real token."""
    if not mask.is_floating_point():  # not looked at, which would make the host wait
        return
    plain = (mask >= 0).all()
    message = (
        f"{name} holds negative numbers or NaN, as masks do that are added to scores; "
        "it must be 1 at real tokens and 0 at padding"
    )
    if is_compiling():
        torch._assert_async(plain, message)  # pyright: ignore[reportPrivateImportUsage]
    elif not plain:
        raise ValueError(message)


def _bounds(starts: Tensor) -> Tensor:
    """cu_seqlens of the rows laid one after another, from where sequences start in them."""
    first = starts.flatten().nonzero().squeeze(1)
    return torch.cat([first, first.new_tensor([starts.numel()])])
