"""From the hidden states of a row to one vector: their mean, the last token's, or that of a token added for it."""

import torch
from torch import Tensor, nn

from latte.ops.states import accumulation_dtype


class ClassToken(nn.Module):
    """A learned vector put right before the first real token of each row; what it gathers is the row's vector.

    Standing beside real tokens, on whichever side the padding is, it sees the same as without padding.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """x [B T C] and its mask [B T] with one more token, and where that stands, [B]."""
        batch, tokens, _ = x.shape
        token = self.weight.to(x.dtype).expand(batch, 1, -1)
        if mask is None:
            first = torch.zeros(batch, dtype=torch.long, device=x.device)
            return torch.cat([token, x], dim=1), None, first
        first = mask.int().argmax(dim=1)
        place = torch.arange(tokens + 1, device=x.device)
        before, here = place < first[:, None], place == first[:, None]
        rest = torch.where(before[..., None], torch.cat([x, token], dim=1), torch.cat([token, x], dim=1))
        shifted = nn.functional.pad(mask, (1, 0), value=False)
        return torch.where(here[..., None], token, rest), here | (shifted & ~before), first


def pool(hidden: Tensor, mask: Tensor | None, pooling: str, place: Tensor | None = None) -> Tensor:
    """[B C] of hidden states [B T C]: "mean" and "last" are of the real tokens, "cls" of the one at `place`.

    A row without real tokens has mean 0.
    """
    if pooling == "mean":
        return _mean(hidden, mask)
    if pooling == "last":
        if mask is None:
            return hidden[:, -1]
        order = torch.arange(hidden.shape[1], device=hidden.device)
        place = torch.where(mask, order, 0).amax(dim=1)
    if place is None:
        raise ValueError('place is None; with pooling "cls" it must say where the token of ClassToken stands')
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), place]


def _mean(hidden: Tensor, mask: Tensor | None) -> Tensor:
    dtype = accumulation_dtype(hidden)
    if mask is None:
        return hidden.mean(dim=1, dtype=dtype).to(hidden.dtype)
    total = hidden.masked_fill(~mask[..., None], 0.0).sum(dim=1, dtype=dtype)
    return (total / mask.sum(dim=1, keepdim=True).clamp(min=1)).to(hidden.dtype)
