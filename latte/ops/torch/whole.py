"""Bidirectional mixture: every token sees the state (Z_T, M_T) of all tokens, and a window to both sides (eq. 6)."""

from typing import NamedTuple

import torch
from torch import Tensor

from latte.ops.torch.band import band_backward, span_product
from latte.ops.torch.gradients import Gradients
from latte.ops.torch.latents import softmax, stack
from latte.ops.torch.walk import Inputs, Options, Stretch, Walk


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
    for at in walk.stretches():
        p = _choice(walk, at, log_norm)
        out = torch.matmul(p[..., -log_norm.shape[-1] :], _repeat(mean, at))
        if inputs.window_q is not None:
            weights, _, _, _ = walk.window_weights(at)
            weights *= p[..., :1]
            out += torch.bmm(stack(weights), walk.load_span(walk.values, at, "values")).view_as(out)
        walk.store(y, out, at)
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
    for at in walk.stretches():
        pull = walk.load(dy, at)
        p = _choice(walk, at, log_norm)
        h = torch.matmul(pull, _repeat(mean, at).transpose(2, 3))
        if inputs.window_q is not None:
            weights, slope, (q, keys), _ = walk.window_weights(at)
            products = walk.products(pull, at)
            dq, dkeys, local = band_backward(weights, slope, p[..., :1], products, q, keys, walk.room)
            grads.add_window(at, dq.mul_(options.scale), dkeys)
            grads.add_span_values(at, span_product(weights, pull, walk.room))
            h = torch.cat([local, h], dim=3)
        dlogits.append(p * (h - (p * h).sum(dim=3, keepdim=True)))
        into_mean = into_mean + _sum(torch.matmul(p[..., -latents:].transpose(2, 3), pull), at)
        if options.undirected:
            into_norm = into_norm + _sum(dlogits[-1].sum(dim=2), at)

    inward = (into_mean * mean).sum(dim=-1) - into_norm
    for at, logits in zip(walk.stretches(), dlogits, strict=True):
        dk, dv = _into_tokens(walk, at, state, into_mean, inward)
        grads.add_latents(at, logits, dk)
        grads.add_values(at, dv)
    before, before_mean = walk.state()
    decay = torch.exp(before - state.peak) * state.inverse
    into_before = decay * ((into_mean * before_mean).sum(dim=-1) - inward)
    return grads.finish(into_before, decay.unsqueeze(-1) * into_mean)


def _keys(walk: Walk, at: Stretch) -> Tensor:
    assert walk.inputs.k is not None
    return walk.load(walk.inputs.k, at, walk.empty, -torch.inf)


def _choice(walk: Walk, at: Stretch, log_norm: Tensor) -> Tensor:
    """p(·|t) of a stretch's tokens, [R G C X+L]."""
    assert walk.inputs.q is not None
    q = walk.load(walk.inputs.q, at, walk.empty)
    return softmax(q + _repeat(log_norm, at).unsqueeze(2) if walk.options.undirected else q)


def _state(walk: Walk) -> Whole:
    """First the normaliser, then the means relative to it."""
    before, before_mean = walk.state()
    peak = before
    for at in walk.stretches():
        peak = torch.maximum(peak, _tiles(_keys(walk, at), at).amax(dim=(0, 3)))
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    total = torch.exp(before - peak)
    for at in walk.stretches():
        total = total + torch.exp(_tiles(_keys(walk, at), at) - peak.unsqueeze(2)).sum(dim=(0, 3))
    inverse = torch.where(total > 0, 1 / total, 0.0)
    state = Whole(peak + torch.log(total), before_mean, peak, inverse)
    mean = (torch.exp(before - peak) * inverse).unsqueeze(-1) * before_mean
    for at in walk.stretches():
        values = walk.load_values(walk.inputs.v, at, walk.empty)
        fresh = torch.bmm(stack(_share(walk, at, state).transpose(2, 3)), values)
        mean = mean + _sum(fresh, at).view_as(mean)
    return state._replace(mean=mean)


def _share(walk: Walk, at: Stretch, state: Whole) -> Tensor:
    """p(s|l) = exp(k_s − Z) of a stretch's tokens, [R G C L]."""
    share = torch.exp(_tiles(_keys(walk, at), at) - state.peak.unsqueeze(2))
    return share.mul_(state.inverse.unsqueeze(2)).flatten(0, 1)


def _into_tokens(walk: Walk, at: Stretch, state: Whole, into_mean: Tensor, inward: Tensor):
    """Gradients of keys and values through the state: exp(k − Z)(v·dM − Σ dM·M + dZ) and Σ_l exp(k − Z) dM."""
    share = _share(walk, at, state)
    values = walk.load_values(walk.inputs.v, at, walk.empty)
    r, g, c, latents = share.shape
    rows = _repeat(stack(into_mean), at)
    dk = torch.bmm(values, rows.transpose(1, 2)).view(r, c, g, latents).transpose(1, 2)
    dk = share * (dk - _repeat(inward, at).unsqueeze(2))
    return dk, torch.bmm(share.transpose(1, 2).reshape(r, c, g * latents), rows)


def _tiles(x: Tensor, at: Stretch) -> Tensor:
    """[R …] → [tiles N …]."""
    return x.unflatten(0, (at.tiles, x.shape[0] // at.tiles))


def _repeat(x: Tensor, at: Stretch) -> Tensor:
    """[N …] → [R …], the same for each tile."""
    return x.repeat(at.tiles, *(1 for _ in x.shape[1:]))


def _sum(x: Tensor, at: Stretch) -> Tensor:
    """[R …] → [N …], summed over tiles."""
    return _tiles(x, at).sum(dim=0)
