"""Which parts of some documents calibration reads."""

from collections.abc import Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor


def choose_stretches(
    documents: Iterable[Sequence[int]], *, tokens: int, count: int, least: int, begin: int | None
) -> list[Tensor]:
    """At most `count` rows of at most `tokens` tokens from the midst of documents, behind the token to `begin` with.

    One document gives a row before any gives a second, and reading stops when there are enough. Documents that would
    give rows shorter than `least` are left out; there may be none.
    """
    prefix = [] if begin is None else [begin]
    long_enough = (document for document in documents if len(document) + len(prefix) >= least)
    kept = list(islice(long_enough, count))
    shares = [count // len(kept) + (index < count % len(kept)) for index in range(len(kept))]
    pieces = [
        part
        for document, share in zip(kept, shares, strict=True)
        for part in midst(document, tokens - len(prefix), share)
    ]
    rows = [torch.tensor([*prefix, *piece]) for piece in pieces]
    return [row for row in rows if len(row) >= least]


def midst(document: Sequence[int], size: int, most: int) -> list[Sequence[int]]:
    """At most `most` pieces of `size` tokens, from the middle of a document on or as near to it as there is room."""
    start = max(0, min(len(document) // 2, len(document) - most * size))
    return [document[at : at + size] for at in range(start, len(document), size)][:most]
