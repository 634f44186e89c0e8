"""Learned positions come to an end: a token beyond their table is refused, where that is known without waiting."""

from torch import Tensor
from torch.compiler import is_compiling
from transformers.cache_utils import Cache


def check_positions(positions: Tensor, limit: int, cache: Cache | None) -> None:
    """Raise ValueError if one of `positions` is not among the first `limit`.

    To look at positions on a GPU is to wait for it, so that is done only when there are more tokens than positions,
    padding and packed texts included. `position_ids` that someone has chosen may be larger without this being seen
    there, and so may those in a static cache or a compiled model: `check_text` sees the latter in `generate`, and a
    GPU has an assertion of its own.
    """
    if is_compiling() or positions.numel() == 0:
        return
    if positions.device.type != "cpu":
        before = 0 if cache is None else cache.get_seq_length()
        if isinstance(before, Tensor) or before + positions.shape[1] <= limit:
            return
    _check(int(positions.max()), limit)


def check_text(tokens: Tensor, attention_mask: Tensor | None, limit: int) -> None:
    """Raise ValueError if a text, of which `generate` knows all tokens, is longer than there are positions."""
    if tokens.shape[1] > limit:
        real = tokens.shape[1] if attention_mask is None else int(attention_mask.sum(dim=1).max())
        _check(real - 1, limit)


def _check(position: int, limit: int) -> None:
    if position >= limit:
        raise ValueError(
            f"a token is at position {position} and max_position_embeddings is {limit}: learned positions are 0 to "
            f'{limit - 1}; shorten the text, generate fewer tokens, or make a model with more, or "sinusoidal" ones'
        )
