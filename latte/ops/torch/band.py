"""The window's share of one tile: softmax over the band of positions near each token, forward and backward.

Axes: N batch × value heads, G query heads per value head, C tokens of the tile, S positions its windows reach.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from latte.ops.torch.latents import softmax, stack


class Band(NamedTuple):
    """Where windows lie: the first call position is `offset` slots after the oldest kept one."""

    window: int
    offset: int
    length: int  # positions in all, the past's included
    causal: bool

    def span(self, start: int, end: int) -> tuple[int, int]:
        """The positions, past included, that the windows of tokens start..end reach."""
        first = max(0, start + self.offset - self.window + 1)
        last = end + self.offset
        return first, last if self.causal else min(self.length, last + self.window - 1)

    def hidden(self, start: int, end: int, device: torch.device) -> Tensor:
        """[C S] True where a position lies outside a token's window."""
        first, last = self.span(start, end)
        t = torch.arange(start + self.offset, end + self.offset, device=device).unsqueeze(1)
        distance = t - torch.arange(first, last, device=device)
        outside = distance >= self.window
        return outside | (distance < 0 if self.causal else distance <= -self.window)


def band_weights(q: Tensor, k: Tensor, hidden: Tensor, softcap: float) -> tuple[Tensor, Tensor | None]:
    """softmax_s(cap(q_t·k_s)) and the cap's slope; q [N G C E] comes scaled, k [N S E], hidden [N or 1, C, S]."""
    scores = torch.bmm(stack(q), k.transpose(1, 2)).view(*q.shape[:3], k.shape[1])
    slope = None
    if softcap:
        bend = torch.tanh(scores / softcap)
        slope = 1 - bend * bend
        scores = softcap * bend
    return softmax(scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)), slope


def band_backward(
    weights: Tensor, slope: Tensor | None, share: Tensor | None, products: Tensor, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq scaled, dk) and h_0 = Σ_s a_ts dy_t·v_s, for products = dy·v [N G C S] and share p(0|t)."""
    h = (weights * products).sum(dim=3, keepdim=True)
    dscores = weights * (products - h)
    if share is not None:
        dscores = dscores * share
    if slope is not None:
        dscores = dscores * slope
    rows = stack(dscores)
    dq = torch.bmm(rows, k).view_as(q)
    return dq, torch.bmm(rows.transpose(1, 2), stack(q)), h
