"""Causal mixture of latents and window over a batch of sequences: one walk over stretches of tiles forward, one back.

The walk carries the latents' state (Z, M) forward, and the gradients that flow into it backward; only inputs are
needed for the latter, the states before each stretch are computed anew. Work space is one stretch, plus those states.
"""

import torch
from torch import Tensor

from latte.ops.torch.band import band_backward, span_product
from latte.ops.torch.gradients import Gradients
from latte.ops.torch.latents import KeyTiles, LatentTiles, latent_tiles_backward, means, stack
from latte.ops.torch.walk import Inputs, Options, Stretch, Walk

State = tuple[Tensor, Tensor]
MOST_JOINED = 16  # tiles whose states are held at once on the way to those that are kept


def forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """y and the state after the last token; without latents the state is empty."""
    walk = Walk(inputs, options)
    y = inputs.v.new_empty((walk.batch, walk.tokens, walk.heads, walk.width))
    log_norm, mean = walk.state()
    for at in (stretch for entry in walk.plan() for stretch in entry):
        v = walk.load_values(inputs.v, at, walk.empty)
        keys = tile = out = None
        if inputs.k is not None:
            keys = walk.load_keys(at, log_norm)
            tile = walk.load_latents(at, keys)
        if inputs.window_q is not None:
            weights, _, _, here = walk.window_weights(at)
            if keys is not None and tile is not None:
                weights *= tile.p[..., :1]
                weights[..., here] += _scores(walk, keys, tile)
            out = torch.bmm(stack(weights), walk.load_span(walk.values, at, "values"))
        if keys is not None and tile is not None:
            if out is None:
                out = torch.bmm(stack(_scores(walk, keys, tile)), v)
            states = means(keys, mean, v)
            past = torch.matmul(tile.u * keys.before, states[:-1].flatten(0, 1))
            out = past.add_(out.view_as(past))
            log_norm, mean = keys.norms[-1], states[-1]
        assert out is not None
        walk.store(y, out, at)
    if walk.empty is not None:
        y.masked_fill_(walk.empty[..., None, None], 0.0)
    return y, *walk.unstack(log_norm, mean)


def backward(
    inputs: Inputs, options: Options, dy: Tensor, dlog_norm: Tensor | None, dmean: Tensor | None
) -> dict[str, Tensor]:
    """Gradients of all floating point inputs that are present, by name, in the accumulation dtype or the input's."""
    walk = Walk(inputs, options)
    grads = Gradients(walk)
    plan = walk.plan()
    if walk.empty is not None:
        dy = dy.masked_fill(walk.empty[..., None, None], 0.0)
    states, last = _states(walk, plan)
    carry = _carry_from_state(last, dlog_norm, dmean)
    for entry, at_start in zip(reversed(plan), reversed(states), strict=True):
        before = [at_start]
        for at in entry[:-1]:
            before += _advance(walk, at, before[-1], [at.tiles])
        for at, state in zip(reversed(entry), reversed(before), strict=True):
            carry = _stretch_backward(walk, grads, at, state, dy, carry)
    carry, carry_h = carry
    return grads.finish((carry * walk.state()[1]).sum(dim=-1) - carry_h, carry)


def _stretch_backward(walk: Walk, grads: Gradients, at: Stretch, state: State, dy: Tensor, carry: State) -> State:
    """Add the gradients of a stretch; the carry is what flows into the state after it, then before it."""
    inputs, options = walk.inputs, walk.options
    pull = walk.load(dy, at)
    v = walk.load_values(inputs.v, at, walk.empty)
    keys = tile = scores = h = None
    if inputs.k is not None:
        keys = walk.load_keys(at, state[0])
        tile = walk.load_latents(at, keys)
        scores = _scores(walk, keys, tile)
    if inputs.window_q is not None:
        weights, slope, (q, window_keys), here = walk.window_weights(at)
        all_products = walk.products(pull, at)
        products = all_products[..., here] * walk.past(at.size)
        share = None if tile is None else tile.p[..., :1]
        dq, dkeys, h = band_backward(weights, slope, share, all_products, q, window_keys, walk.room)
        grads.add_window(at, dq.mul_(options.scale), dkeys)
        if scores is not None:
            weights[..., here] += scores
        grads.add_span_values(at, span_product(weights, pull, walk.room))
    else:
        assert scores is not None
        products = torch.bmm(stack(pull), v.transpose(1, 2)).view_as(scores).mul_(walk.past(at.size))
        grads.add_values(at, torch.bmm(stack(scores).transpose(1, 2), stack(pull)))
    if keys is None or tile is None:
        return carry
    mean = means(keys, state[1], v)[:-1].flatten(0, 1)
    part = latent_tiles_backward(keys, tile, mean, v, pull, products, h, *carry, options.undirected)
    grads.add_latents(at, part.logits, part.k)
    grads.add_values(at, part.v)
    return part.carry, part.carry_h


def _scores(walk: Walk, keys: KeyTiles, tile: LatentTiles) -> Tensor:
    """Σ_l p(l|t) p(s|l,t) for the tokens of the same tile, [R G C C]."""
    return torch.matmul(tile.u, keys.e.transpose(2, 3)).mul_(walk.past(tile.u.shape[2]))


def _states(walk: Walk, plan: list[list[Stretch]]) -> tuple[list[State], State]:
    """The latents' state before each entry of the plan, and after the last."""
    states = [walk.state()]
    if walk.inputs.k is None:
        return states * len(plan), states[0]
    for entry in _without_windows(plan):
        for at, wanted in entry:
            states[len(states) :] = _advance(walk, at, states[-1], wanted)
        del states[-len(entry) : -1]  # within an entry that a leap has cut
    return states[:-1], states[-1]


def _without_windows(plan: list[list[Stretch]]) -> list[list[tuple[Stretch, list[int]]]]:
    """The plan, with stretches joined that only windows keep apart; and the tiles after which old ones ended."""
    joined: list[list[tuple[Stretch, list[int]]]] = []
    for entry in plan:
        if joined and len(entry) == len(joined[-1]) == 1:
            (at,), ((whole, ends),) = entry, joined[-1]
            if at.size == whole.size and whole.tiles + at.tiles <= MOST_JOINED:
                joined[-1] = [(whole._replace(tiles=whole.tiles + at.tiles), [*ends, whole.tiles + at.tiles])]
                continue
        joined.append([(at, [at.tiles]) for at in entry])
    return joined


def _advance(walk: Walk, at: Stretch, state: State, wanted: list[int]) -> list[State]:
    """The states after the wanted numbers of tiles; copies, since a view would keep the states of all tiles."""
    keys = walk.load_keys(at, state[0])
    after = means(keys, state[1], walk.load_values(walk.inputs.v, at, walk.empty))
    return [(keys.norms[tiles].clone(), after[tiles].clone()) for tiles in wanted]


def _carry_from_state(state: State, dlog_norm: Tensor | None, dmean: Tensor | None) -> State:
    """Gradients into the final state, in the form of the carries: Σ r dy and Σ r h relative to its normaliser."""
    log_norm, mean = state
    carry = torch.zeros_like(mean) if dmean is None else dmean.to(mean.dtype).reshape_as(mean)
    carry_h = (carry * mean).sum(dim=-1)
    if dlog_norm is not None:
        carry_h = carry_h - dlog_norm.to(mean.dtype).reshape_as(log_norm)
    return carry, carry_h
