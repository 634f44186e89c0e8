"""Bidirectional mixture: every token sees the state (Z_T, M_T) of all tokens, and a window to both sides (eq. 6)."""

from typing import NamedTuple

import torch
from torch import Tensor

from latte.ops.torch.band import band_backward
from latte.ops.torch.gradients import Gradients
from latte.ops.torch.latents import TILE, softmax, stack
from latte.ops.torch.walk import Inputs, Options, Walk


class Whole(NamedTuple):
    """(Z_T, M_T), and Z_T in two parts: exp(k − Z) = exp(k − peak) · inverse sums to 1 even where Z is coarse."""

    log_norm: Tensor  # [N G L]
    mean: Tensor  # [N G L D]
    peak: Tensor  # [N G L] the largest key, 0 where nothing was seen
    inverse: Tensor  # [N G L] exp(peak − Z), 0 where nothing was seen


def forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """y and the state of all tokens together with what came before."""
    walk = Walk(inputs, options)
    log_norm, mean, _, _ = _state(walk)
    y = inputs.v.new_empty((walk.batch, walk.tokens, walk.heads, walk.width))
    for start, end in _tiles(walk):
        p = _choice(walk, start, end, log_norm)
        out = torch.matmul(p[..., -log_norm.shape[-1] :], mean)
        if inputs.window_q is not None:
            weights, _, _, _ = walk.window_weights(start, end)
            out += torch.bmm(stack(weights * p[..., :1]), walk.near_values(start, end)).view_as(out)
        walk.store(y, out, start, end)
    if walk.empty is not None:
        y.masked_fill_(walk.empty[..., None, None], 0.0)
    return y, *walk.unstack(log_norm, mean)


def backward(
    inputs: Inputs, options: Options, dy: Tensor, dlog_norm: Tensor | None, dmean: Tensor | None
) -> dict[str, Tensor]:
    """Gradients of all floating point inputs that are present, by name."""
    walk = Walk(inputs, options)
    grads = Gradients(walk)
    state = _state(walk)
    log_norm, mean = state.log_norm, state.mean
    latents = log_norm.shape[-1]
    into_norm = torch.zeros_like(log_norm) if dlog_norm is None else dlog_norm.to(mean.dtype).reshape_as(log_norm)
    into_mean = torch.zeros_like(mean) if dmean is None else dmean.to(mean.dtype).reshape_as(mean)
    if walk.empty is not None:
        dy = dy.masked_fill(walk.empty[..., None, None], 0.0)

    dlogits: list[Tensor] = []
    for start, end in _tiles(walk):
        pull = walk.load(dy, start, end)
        p = _choice(walk, start, end, log_norm)
        h = torch.matmul(pull, mean.transpose(2, 3))
        if inputs.window_q is not None:
            weights, slope, (q, keys), _ = walk.window_weights(start, end)
            products = torch.bmm(stack(pull), walk.near_values(start, end).transpose(1, 2)).view_as(weights)
            dq, dkeys, local = band_backward(weights, slope, p[..., :1], products, q, keys)
            grads.add_window(start, end, dq * options.scale, dkeys)
            grads.add_span_values(start, end, torch.bmm(stack(weights * p[..., :1]).transpose(1, 2), stack(pull)))
            h = torch.cat([local, h], dim=3)
        dlogits.append(p * (h - (p * h).sum(dim=3, keepdim=True)))
        into_mean = into_mean + torch.matmul(p[..., -latents:].transpose(2, 3), pull)
        if options.undirected:
            into_norm = into_norm + dlogits[-1].sum(dim=2)

    inward = (into_mean * mean).sum(dim=-1) - into_norm
    for (start, end), logits in zip(_tiles(walk), dlogits, strict=True):
        dk, dv = _into_tokens(walk, start, end, state, into_mean, inward)
        grads.add_latents(start, end, logits, dk)
        grads.add_values(start, end, dv)
    before, before_mean = walk.state()
    decay = torch.exp(before - state.peak) * state.inverse
    into_before = decay * ((into_mean * before_mean).sum(dim=-1) - inward)
    return grads.finish(into_before, decay.unsqueeze(-1) * into_mean)


def _tiles(walk: Walk) -> list[tuple[int, int]]:
    return [(start, min(start + TILE, walk.tokens)) for start in range(0, walk.tokens, TILE)]


def _keys(walk: Walk, start: int, end: int) -> Tensor:
    assert walk.inputs.k is not None
    return walk.load(walk.inputs.k, start, end, walk.empty, -torch.inf)


def _choice(walk: Walk, start: int, end: int, log_norm: Tensor) -> Tensor:
    """p(·|t) of the tile's tokens, [N G C X+L]."""
    assert walk.inputs.q is not None
    q = walk.load(walk.inputs.q, start, end, walk.empty)
    return softmax(q + log_norm.unsqueeze(2) if walk.options.undirected else q)


def _state(walk: Walk) -> Whole:
    """First the normaliser, then the means relative to it."""
    before, before_mean = walk.state()
    peak = before
    for start, end in _tiles(walk):
        peak = torch.maximum(peak, _keys(walk, start, end).amax(dim=2))
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    total = torch.exp(before - peak)
    for start, end in _tiles(walk):
        total = total + torch.exp(_keys(walk, start, end) - peak.unsqueeze(2)).sum(dim=2)
    inverse = torch.where(total > 0, 1 / total, 0.0)
    state = Whole(peak + torch.log(total), before_mean, peak, inverse)
    mean = (torch.exp(before - peak) * inverse).unsqueeze(-1) * before_mean
    for start, end in _tiles(walk):
        values = walk.load_values(walk.inputs.v, start, end, walk.empty)
        mean = mean + torch.bmm(stack(_share(walk, start, end, state).transpose(2, 3)), values).view_as(mean)
    return state._replace(mean=mean)


def _share(walk: Walk, start: int, end: int, state: Whole) -> Tensor:
    """p(s|l) = exp(k_s − Z) of the tile's tokens, [N G C L]."""
    return torch.exp(_keys(walk, start, end) - state.peak.unsqueeze(2)) * state.inverse.unsqueeze(2)


def _into_tokens(walk: Walk, start: int, end: int, state: Whole, into_mean: Tensor, inward: Tensor):
    """Gradients of keys and values through the state: exp(k − Z)(v·dM − Σ dM·M + dZ) and Σ_l exp(k − Z) dM."""
    share = _share(walk, start, end, state)
    values = walk.load_values(walk.inputs.v, start, end, walk.empty)
    n, g, c, latents = share.shape
    rows = stack(into_mean)
    dk = share * (torch.bmm(values, rows.transpose(1, 2)).view(n, c, g, latents).transpose(1, 2) - inward.unsqueeze(2))
    return dk, torch.bmm(share.transpose(1, 2).reshape(n, c, g * latents), rows)
