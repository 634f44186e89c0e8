"""A text whose beginning is in the cache: `generate` is given the whole of it, and only what is new is read."""

from torch import Tensor


def new_tokens(
    seen: int, length: int, chosen: int | None, attention_mask: Tensor | None, position_ids: Tensor | None
) -> int | None:
    """How many of the last of `length` tokens are to be read behind the `seen` ones of the cache; None: all of them.

    Transformers has `chosen` so many. But it chooses nothing in assisted decoding, which would read again what was
    read, and 0 where nothing is new, which means all. Raise ValueError if nothing is.
    """
    if chosen is None and is_whole(length, attention_mask, position_ids):
        chosen = length - seen
    empty = length == 0 or (position_ids is not None and position_ids.shape[-1] == 0)  # a prompt in chunks, without any
    if empty or (chosen is not None and chosen <= 0):
        raise ValueError(
            f"the cache has read {seen} tokens, and the text has no more; give the whole text, with a token that is new"
        )
    return chosen


def is_whole(length: int, attention_mask: Tensor | None, position_ids: Tensor | None) -> bool:
    """Whether `length` tokens are the text from its beginning, and not only what is new, or a chunk of that."""
    if attention_mask is not None:
        return attention_mask.shape[1] == length
    return position_ids is not None and position_ids.shape[-1] == length and int(position_ids[0, 0]) == 0
