"""The latents' share of a stretch of tiles, forward and backward.

A tile is cut so that the running normaliser of every latent moves by at most MAX_LEAP nats inside it
(`plan_tiles`). Then one reference per latent, the tile's largest key, makes the causal scores one masked matrix
product: with e_s = exp(k_s − m) and S_t = exp(Z_t − m) = exp(Z_prev − m) + Σ_{s≤t} e_s,

    p(l|t) p(s|l,t) = (p_t / S_t)_l · e_s,l,

and nothing can overflow. One token is always such a tile, so the recurrence is the last resort, in the same code.
Only the states (Z, M) go from tile to tile, in short loops; all else is done for the whole stretch at once.
Axes: N batch × value heads, R tiles × N, G query heads per value head, C tokens of a tile.
"""

from typing import NamedTuple

import torch
from torch import Tensor

TILE = 64
MAX_LEAP = 30.0  # nats; float32 keeps its relative precision over e**±30, sums and products included


class KeyTiles(NamedTuple):
    """The keys of a stretch, and what the state becomes with them."""

    e: Tensor  # [R G C L] exp(k_s − m)
    peak: Tensor  # [R G 1 L] m
    before: Tensor  # [R G 1 L] exp(Z_prev − m)
    total: Tensor  # [R G C L] S_t = exp(Z_t − m)
    last: Tensor  # [R G 1 L] 1 / S_t at the tile's end, 0 where nothing was seen
    norms: Tensor  # [tiles+1 N G L] Z before each tile, and after the last

    @property
    def decay(self) -> Tensor:
        """exp(Z_prev − Z) over each tile, [tiles N G L 1]."""
        return (self.before * self.last).view(len(self.norms) - 1, *self.norms.shape[1:], 1)


class LatentTiles(NamedTuple):
    """What the queries of a stretch see of its keys."""

    p: Tensor  # [R G C X+L] p(·|t) over the X other states (the window) and the latents
    inverse: Tensor  # [R G C L] exp(m − Z_t), 0 where nothing was seen
    u: Tensor  # [R G C L] p(l|t) exp(m − Z_t)


def key_tiles(k: Tensor, log_norm: Tensor, tiles: int) -> KeyTiles:
    """k is [R G C L], log_norm [N G L] the state before the first tile."""
    top = k.amax(dim=2, keepdim=True)
    own = _finite(top)
    e = torch.sub(k, own).exp_()
    total = e.cumsum(dim=2)
    ends = (own + total[:, :, -1:].log()).view(tiles, *log_norm.shape)
    norms = torch.logcumsumexp(torch.cat([log_norm.unsqueeze(0), ends]), dim=0)
    previous = norms[:-1].reshape(top.shape)
    peak = _finite(torch.maximum(previous, top))
    before, scale = torch.exp(previous - peak), torch.exp(top - peak)
    total.mul_(scale).add_(before)
    return KeyTiles(e.mul_(scale), peak, before, total, _inverse(total[:, :, -1:]), norms)


def latent_tiles(q: Tensor, keys: KeyTiles, undirected: bool) -> LatentTiles:
    """q is [R G C X+L]."""
    p = softmax(q + (keys.peak + torch.log(keys.total)) if undirected else q)
    inverse = _inverse(keys.total)
    return LatentTiles(p, inverse, p[..., -inverse.shape[3] :] * inverse)


def _finite(x: Tensor) -> Tensor:
    """A reference to subtract: −inf less it is still −inf."""
    return x.clamp(min=torch.finfo(x.dtype).min)


def _inverse(x: Tensor) -> Tensor:
    return x.reciprocal().masked_fill_(x == 0.0, 0.0)


def softmax(logits: Tensor) -> Tensor:
    """Softmax over the last axis that gives zeros, not NaN, where every logit is −inf."""
    empty = logits.amax(dim=-1, keepdim=True) == -torch.inf
    return torch.softmax(logits, dim=-1).masked_fill_(empty, 0.0)


def stack(x: Tensor) -> Tensor:
    """[R G C X] → [R G·C X]: the query heads of one value head, one below the other."""
    return x.flatten(1, 2)


def means(keys: KeyTiles, mean: Tensor, v: Tensor) -> Tensor:
    """M before each tile and after the last [tiles+1 N G L D]; mean [N G L D], v [R C D].

    M = exp(Z_prev − Z) M_prev + Σ_s exp(k_s − Z) v_s.
    """
    share = stack((keys.e * keys.last).transpose(2, 3))  # exp(k_s − Z), [R G·L C]
    states = torch.cat([mean.unsqueeze(0), torch.bmm(share, v).view(len(keys.norms) - 1, *mean.shape)])
    for i, decay in enumerate(keys.decay):
        states[i + 1].addcmul_(decay, states[i])
    return states


class LatentGrads(NamedTuple):
    logits: Tensor  # [R G C X+L]
    k: Tensor  # [R G C L]
    v: Tensor  # [R C D], the part through the states after the tile
    carry: Tensor  # [N G L D] Σ_{t after the stretch's start} p_t exp(Z_start − Z_t) dy_t
    carry_h: Tensor  # [N G L] the same sum of h_t


def latent_tiles_backward(
    keys: KeyTiles,
    tile: LatentTiles,
    mean: Tensor,
    v: Tensor,
    dy: Tensor,
    products: Tensor,
    window_h: Tensor | None,
    carry: Tensor,
    carry_h: Tensor,
    undirected: bool,
) -> LatentGrads:
    """Gradients of a stretch given those that flow into the state after it.

    mean [R G L D] is M before each tile; products [R G C C] the causal part of dy·v; window_h [R G C 1] the window's
    mean gradient h_0; carry and carry_h are the sums over later tokens, relative to the normaliser at the end.
    """
    r, g, c, latents = keys.e.shape
    past_h = torch.matmul(dy, mean.transpose(2, 3))
    h = torch.matmul(products, keys.e).addcmul_(keys.before, past_h).mul_(tile.inverse)
    all_h = h if window_h is None else torch.cat([window_h, h], dim=3)
    average = (tile.p * all_h).sum(dim=3, keepdim=True)
    dlogits = tile.p * (all_h - average)

    weighted = tile.u * (average if undirected else h)
    later = weighted.flip(2).cumsum(dim=2).flip(2)  # Σ_{t≥s}, summed from the end: early terms may be far larger
    dk = torch.matmul(products.transpose(2, 3), tile.u).sub_(later).mul_(keys.e)

    pull = torch.matmul((tile.u * keys.before).transpose(2, 3), dy)
    carries = _carry_back(keys.decay, pull, carry)
    carries_h = _carry_back(keys.decay.squeeze(-1), keys.before.squeeze(2) * weighted.sum(dim=2), carry_h)

    share = keys.e * keys.last
    carry_rows = carries[1:].reshape(r, g * latents, v.shape[2])
    from_carry = torch.bmm(v, carry_rows.transpose(1, 2)).view(r, c, g, latents).transpose(1, 2)
    dk += (from_carry - carries_h[1:].reshape(r, g, 1, latents)).mul_(share)
    dv = torch.bmm(share.transpose(1, 2).reshape(r, c, g * latents), carry_rows)
    return LatentGrads(dlogits, dk, dv, carries[0], carries_h[0])


def _carry_back(decay: Tensor, added: Tensor, after: Tensor) -> Tensor:
    """x_i = added_i + decay_i x_{i+1} from x_tiles = `after`, the state's shape; [tiles+1 …]."""
    states = torch.cat([added.view(len(decay), *after.shape), after.unsqueeze(0)])
    for i in range(len(states) - 2, -1, -1):
        states[i].addcmul_(decay[i], states[i + 1])
    return states


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
