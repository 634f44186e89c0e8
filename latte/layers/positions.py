"""Which real token of its sequence each token is: where rotary positions come from when none are given."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.compiler import is_compiling

from latte.ops.checks import check_bounds, check_cu_seqlens


def token_positions(
    tokens: int,
    device: torch.device,
    *,
    before: Int[Tensor, " N"] | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
) -> Int[Tensor, "_ T"]:
    """The number of real tokens before each token of its sequence, of which `before` are in earlier calls.

    Masked positions do not count. One row where all rows are the same.
    """
    if cu_seqlens is None:
        if mask is None:
            place = torch.arange(tokens, device=device).unsqueeze(0)
        else:
            place = (mask.cumsum(dim=1) - 1).clamp(min=0)
        return place if before is None else before.unsqueeze(1) + place
    check_packing(cu_seqlens, 1, tokens)
    if before is not None and before.shape[0] != cu_seqlens.shape[0] - 1:
        raise ValueError(
            f"cu_seqlens bounds {cu_seqlens.shape[0] - 1} sequences and the state is of {before.shape[0]}; "
            "it must have a row for each"
        )
    sequence = sequence_numbers(cu_seqlens, tokens)
    count = _counts(tokens, mask, cu_seqlens)
    place = (count[1:] - count[cu_seqlens[:-1]][sequence] - 1).clamp(min=0)
    return (place if before is None else before[sequence] + place).unsqueeze(0)


def count_tokens(
    batch: int,
    tokens: int,
    device: torch.device,
    *,
    before: Int[Tensor, " N"] | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
) -> Int[Tensor, " N"]:
    """The number of real tokens of each sequence, of which `before` are in earlier calls."""
    if cu_seqlens is not None:
        count = _counts(tokens, mask, cu_seqlens)[cu_seqlens].diff()
    elif mask is not None:
        count = mask.sum(dim=1)
    elif before is None:
        return torch.full((batch,), tokens, device=device)
    else:
        return before + tokens
    return count if before is None else before + count


def check_packing(cu_seqlens: Tensor | None, batch: int, tokens: int) -> int:
    """Raise ValueError unless `cu_seqlens` bounds sequences in a row of so many tokens; returns the number of states.

    Its values are looked at before anything is found by them: on a GPU, a place that there is not ends the process.
    """
    sequences = check_cu_seqlens(cu_seqlens, batch)
    if cu_seqlens is not None and not is_compiling():
        check_bounds(cu_seqlens, tokens)
    return sequences


def sequence_numbers(cu_seqlens: Int[Tensor, " bounds"], tokens: int) -> Int[Tensor, " T"]:
    """The packed sequence that each token belongs to."""
    place = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), place, right=True)


def _counts(tokens: int, mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """The number of real tokens before each of T + 1 places of the packed row."""
    if mask is None:
        return torch.arange(tokens + 1, device=cu_seqlens.device)
    return torch.cat([mask.new_zeros(1, dtype=torch.long), mask[0].cumsum(dim=0)])
