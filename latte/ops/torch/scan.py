"""The linear recurrence h_t = a_t h_{t−1} + b_t along tokens, in about 3√T steps instead of T."""

import math

import torch
from torch import Tensor


def scan(a: Tensor, h: Tensor, before: Tensor, *, reverse: bool = False) -> Tensor:
    """h_t ← a_t h_{t−1} + h_t in place for [B T W], from h = `before` [B W]; `reverse` runs from the last token.

    Returns the last h, a view. With a ≤ 1 the products in between can only vanish, which is what they should do.
    """
    tokens = a.shape[1]
    chunk = math.isqrt(tokens) if tokens >= 16 else tokens + 1
    rest = tokens % chunk
    if rest < tokens:
        chunked = slice(rest, tokens) if reverse else slice(0, tokens - rest)
        a_chunks, h_chunks = (part[:, chunked].unflatten(1, (-1, chunk)) for part in (a, h))
        before = _scan_chunks(a_chunks, h_chunks, before, reverse)
    remaining = slice(0, rest) if reverse else slice(tokens - rest, tokens)
    for a_t, h_t in zip(*(_slices(part[:, remaining], 1, reverse) for part in (a, h)), strict=True):
        before = h_t.addcmul_(a_t, before)
    return before


def _scan_chunks(a: Tensor, h: Tensor, before: Tensor, reverse: bool) -> Tensor:
    """`scan` over [B N C W], N chunks of C tokens: what each adds, what comes before each, then all of h."""
    tokens_a, tokens_h = _slices(a, 2, reverse), _slices(h, 2, reverse)
    ends = tokens_h[0].clone()
    for a_t, h_t in zip(tokens_a[1:], tokens_h[1:], strict=True):
        torch.addcmul(h_t, a_t, ends, out=ends)

    last = before
    for decay, end in zip(_slices(a.prod(dim=2), 1, reverse), _slices(ends, 1, reverse), strict=True):
        last = end.addcmul_(decay, last)

    outer = before.unsqueeze(1)
    previous = torch.cat([ends[:, 1:], outer] if reverse else [outer, ends[:, :-1]], dim=1)
    for a_t, h_t in zip(tokens_a, tokens_h, strict=True):
        previous = h_t.addcmul_(a_t, previous)
    return last


def _slices(x: Tensor, dim: int, reverse: bool) -> tuple[Tensor, ...]:
    slices = x.unbind(dim)
    return slices[::-1] if reverse else slices
