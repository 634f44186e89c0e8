"""The latents' share of one tile of tokens, forward and backward.

A tile is cut so that the running normaliser of every latent moves by at most MAX_LEAP nats inside it
(`plan_tiles`). Then one reference per latent, the tile's largest key, makes the causal scores one masked matrix
product: with e_s = exp(k_s − m) and S_t = exp(Z_t − m) = exp(Z_prev − m) + Σ_{s≤t} e_s,

    p(l|t) p(s|l,t) = (p_t / S_t)_l · e_s,l,

and nothing can overflow. One token is always such a tile, so the recurrence is the last resort, in the same code.
Axes: N batch × value heads, G query heads per value head, C tokens of the tile.
"""

from typing import NamedTuple

import torch
from torch import Tensor

TILE = 64
MAX_LEAP = 30.0  # nats; float32 keeps its relative precision over e**±30, sums and products included


class LatentTile(NamedTuple):
    """What forward and backward of a tile share."""

    p: Tensor  # [N G C X+L] p(·|t) over the X other states (the window) and the latents
    e: Tensor  # [N G C L] exp(k_s − m)
    before: Tensor  # [N G 1 L] exp(Z_prev − m)
    inverse: Tensor  # [N G C L] exp(m − Z_t), 0 where nothing was seen
    u: Tensor  # [N G C L] p(l|t) exp(m − Z_t)


def latent_tile(q: Tensor, k: Tensor, log_norm: Tensor, undirected: bool) -> tuple[LatentTile, Tensor]:
    """The tile's factors and the log-normaliser after it; q is [N G C X+L], k [N G C L], log_norm [N G L]."""
    peak = torch.maximum(log_norm, k.amax(dim=2))
    peak = torch.where(peak == -torch.inf, 0.0, peak).unsqueeze(2)
    e = torch.exp(k - peak)
    before = torch.exp(log_norm.unsqueeze(2) - peak)
    total = before + e.cumsum(dim=2)
    log_total = peak + torch.log(total)
    inverse = torch.where(total > 0, 1 / total, 0.0)
    p = softmax(q + log_total if undirected else q)
    u = p[..., -k.shape[3] :] * inverse
    return LatentTile(p, e, before, inverse, u), log_total[:, :, -1]


def softmax(logits: Tensor) -> Tensor:
    """Softmax over the last axis that gives zeros, not NaN, where every logit is −inf."""
    peak = logits.amax(dim=-1, keepdim=True)
    weights = torch.exp(logits - torch.where(peak == -torch.inf, 0.0, peak))
    return weights / weights.sum(dim=-1, keepdim=True).clamp(min=1.0)  # the sum is at least 1, or 0


def stack(x: Tensor) -> Tensor:
    """[N G C X] → [N G·C X]: the query heads of one value head, one below the other."""
    return x.flatten(1, 2)


def next_mean(tile: LatentTile, mean: Tensor, v: Tensor) -> Tensor:
    """M after the tile: exp(Z_prev − Z) M_prev + Σ_s exp(k_s − Z) v_s; mean [N G L D], v [N C D]."""
    last = tile.inverse[:, :, -1:]
    share = (tile.e * last).transpose(2, 3)  # exp(k_s − Z), [N G L C]
    fresh = torch.bmm(stack(share), v).view_as(mean)
    return torch.addcmul(fresh, (tile.before * last).transpose(2, 3), mean)


class LatentGrads(NamedTuple):
    logits: Tensor  # [N G C X+L]
    k: Tensor  # [N G C L]
    v: Tensor  # [N C D], the part through the states after the tile
    carry: Tensor  # [N G L D] Σ_{t after the tile's start} p_t exp(Z_start − Z_t) dy_t
    carry_h: Tensor  # [N G L] the same sum of h_t


def latent_tile_backward(
    tile: LatentTile,
    mean: Tensor,
    v: Tensor,
    dy: Tensor,
    products: Tensor,
    window_h: Tensor | None,
    carry: Tensor,
    carry_h: Tensor,
    undirected: bool,
) -> LatentGrads:
    """Gradients of a tile (maths of `LatentTile`) given those that flow into the state after it.

    products [N G C C] is the causal part of dy·v; window_h [N G C 1] the window's mean gradient h_0; carry and
    carry_h are the sums over later tokens, relative to the normaliser at the tile's end.
    """
    n, g, c, latents = tile.e.shape
    past_h = torch.matmul(dy, mean.transpose(2, 3))
    h = (torch.matmul(products, tile.e) + tile.before * past_h) * tile.inverse
    all_h = h if window_h is None else torch.cat([window_h, h], dim=3)
    average = (tile.p * all_h).sum(dim=3, keepdim=True)
    dlogits = tile.p * (all_h - average)

    weighted = tile.u * (average if undirected else h)
    later = weighted.flip(2).cumsum(dim=2).flip(2)  # Σ_{t≥s}, summed from the end: early terms may be far larger
    dk = tile.e * (torch.matmul(products.transpose(2, 3), tile.u) - later)

    last = tile.inverse[:, :, -1:]
    share = tile.e * last
    carry_rows = stack(carry)  # [N G·L D]
    from_carry = torch.bmm(v, carry_rows.transpose(1, 2)).view(n, c, g, latents).transpose(1, 2)
    dk = dk + share * (from_carry - carry_h.unsqueeze(2))
    dv = torch.bmm(share.transpose(1, 2).reshape(n, c, g * latents), carry_rows)

    decay = (tile.before * last).transpose(2, 3)
    pull = (tile.u * tile.before).transpose(2, 3)
    carry = torch.addcmul(torch.matmul(pull, dy), decay, carry)
    carry_h = tile.before.squeeze(2) * (carry_h * last.squeeze(2) + weighted.sum(dim=2))
    return LatentGrads(dlogits, dk, dv, carry, carry_h)


def plan_tiles(k: Tensor, log_norm: Tensor) -> list[list[tuple[int, int]]]:
    """For every TILE tokens, the tiles they are cut into: one, unless a normaliser leaps by more than MAX_LEAP.

    k is [B T H L] with −inf at masked positions, log_norm [B H L] the state before.
    """
    tokens = k.shape[1]
    whole = tokens // TILE
    blocks = k[:, : whole * TILE].unflatten(1, (whole, TILE))
    before = torch.cat([log_norm.unsqueeze(1), blocks.amax(dim=2)], dim=1).cummax(dim=1).values
    wild = (_leap(blocks, before[:, :-1]) > MAX_LEAP).tolist()
    plan = [
        _cut(k, i * TILE, (i + 1) * TILE, before[:, i]) if wild[i] else [(i * TILE, (i + 1) * TILE)]
        for i in range(whole)
    ]
    if tokens > whole * TILE:
        plan.append(_cut(k, whole * TILE, tokens, before[:, -1]))
    return plan


def _leap(blocks: Tensor, before: Tensor) -> Tensor:
    """An upper bound, up to log C, on how far any normaliser moves after the first token of each block [B n C H L]."""
    first = blocks[:, :, 0]
    lowest = torch.where(blocks == -torch.inf, torch.inf, blocks).amin(dim=2)
    start = torch.where(first == -torch.inf, lowest, first)
    start = torch.where(before == -torch.inf, start, torch.maximum(before, first))
    return (torch.maximum(before, blocks.amax(dim=2)) - start).amax(dim=(0, 2, 3))


def _cut(k: Tensor, start: int, end: int, before: Tensor) -> list[tuple[int, int]]:
    if end - start == 1 or not bool(_leap(k[:, None, start:end], before[:, None]) > MAX_LEAP):
        return [(start, end)]
    middle = (start + end) // 2
    peak = torch.maximum(before, k[:, start:middle].amax(dim=1))
    return _cut(k, start, middle, before) + _cut(k, middle, end, peak)
