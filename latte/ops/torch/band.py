"""The window's share of a stretch of tiles: softmax over the band of positions near each token, forward and backward.

Axes: R tiles × batch × value heads, G query heads per value head, C tokens of a tile, S positions its windows reach.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from latte.ops.torch.latents import stack

Room = Callable[[str, tuple[int, ...]], Tensor]  # a buffer of that name and shape, to be filled


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

    def reach(self, start: int, end: int) -> tuple[int, int]:
        """How many positions of the span come before token `start`, and how many there are."""
        first, last = self.span(start, end)
        return start + self.offset - first, last - first

    def hidden(self, start: int, end: int, device: torch.device) -> Tensor:
        """[C S] True where a position lies outside a token's window."""
        first, last = self.span(start, end)
        t = torch.arange(start + self.offset, end + self.offset, device=device).unsqueeze(1)
        distance = t - torch.arange(first, last, device=device)
        outside = distance >= self.window
        return outside | (distance < 0 if self.causal else distance <= -self.window)


def band_weights(
    q: Tensor, k: Tensor, limit: Tensor, softcap: float, room: Room, *, may_be_empty: bool
) -> tuple[Tensor, Tensor | None]:
    """softmax_s(cap(q_t·k_s)) and the cap's slope; q [R G C E] comes scaled, k [R S E].

    limit [R or 1, C, S] is −inf where a position is hidden, else inf. With all of them hidden, weights are 0.
    """
    shape = (*q.shape[:3], k.shape[1])
    scores = room("scores", shape)
    torch.bmm(stack(q), k.transpose(1, 2), out=stack(scores))
    slope = None
    if softcap:
        scores.div_(softcap).tanh_()
        slope = 1 - scores * scores
        scores *= softcap
    limit = limit.unsqueeze(1)
    torch.minimum(scores, limit, out=scores)
    weights = torch.softmax(scores, dim=3, out=room("weights", shape))
    if may_be_empty:
        weights.masked_fill_(limit.amax(dim=3, keepdim=True) < 0, 0.0)
    return weights, slope


def band_backward(
    weights: Tensor, slope: Tensor | None, share: Tensor | None, products: Tensor, q: Tensor, k: Tensor, room: Room
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq scaled, dk) and h_0 = Σ_s a_ts dy_t·v_s, for products = dy·v [R G C S] and share p(0|t).

    Uses up the products, and leaves the weights times the share.
    """
    h = torch.linalg.vecdot(weights, products).unsqueeze(3)
    if share is not None:
        weights *= share
    dscores = products.sub_(h).mul_(weights)
    if slope is not None:
        dscores *= slope
    dq = torch.bmm(stack(dscores), k).view_as(q)
    return dq, span_product(dscores, q, room), h


def span_product(weights: Tensor, x: Tensor, room: Room) -> Tensor:
    """Σ_t weights_ts x_t [R S X], for x [R G C X]: what positions get from the tokens whose windows they are in."""
    out = room("values", (x.shape[0], weights.shape[3], x.shape[3]))  # which are used up by then
    return torch.bmm(stack(weights).transpose(1, 2), stack(x), out=out)
