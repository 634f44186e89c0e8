"""Causal mixture of latents and window over a batch of sequences: one walk over tiles forward, one back.

The walk carries the latents' state (Z, M) forward, and the gradients that flow into it backward; only inputs are
needed for the latter, the states before each tile are computed anew. Work space is one tile, plus those states.
"""

import torch
from torch import Tensor

from latte.ops.torch.band import band_backward
from latte.ops.torch.gradients import Gradients
from latte.ops.torch.latents import latent_tile_backward, next_mean, stack
from latte.ops.torch.walk import Inputs, Options, Walk


def forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """y and the state after the last token; without latents the state is empty."""
    walk = Walk(inputs, options)
    y = inputs.v.new_empty((walk.batch, walk.tokens, walk.heads, walk.width))
    has_latents, has_window = inputs.k is not None, inputs.window_q is not None
    log_norm, mean = walk.state()
    for start, end in (tile for tiles in walk.plan() for tile in tiles):
        v = walk.load_values(inputs.v, start, end, walk.empty)
        tile, following = walk.latents(start, end, log_norm) if has_latents else (None, log_norm)
        out = None
        if has_window:
            weights, _, _, here = walk.window_weights(start, end)
            if tile is not None:
                weights = weights * tile.p[..., :1]
                weights[..., here] += _causal(torch.matmul(tile.u, tile.e.transpose(2, 3)))
            out = torch.bmm(stack(weights), walk.near_values(start, end))
        if tile is not None:
            if out is None:
                out = torch.bmm(stack(_causal(torch.matmul(tile.u, tile.e.transpose(2, 3)))), v)
            out = out.view(walk.rows, walk.groups, end - start, walk.width)
            out += torch.matmul(tile.u * tile.before, mean)
            mean = next_mean(tile, mean, v)
        assert out is not None
        walk.store(y, out, start, end)
        log_norm = following
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
    has_window = inputs.window_q is not None
    if walk.empty is not None:
        dy = dy.masked_fill(walk.empty[..., None, None], 0.0)
    states, last = _tile_states(walk, plan)
    carry, carry_h = _carry_from_state(walk, last, dlog_norm, dmean)
    for tiles, at_start in zip(reversed(plan), reversed(states), strict=True):
        for (start, end), (log_norm, mean) in zip(
            reversed(tiles), reversed(_states_within(walk, tiles, at_start)), strict=True
        ):
            pull = walk.load(dy, start, end)
            v = walk.load_values(inputs.v, start, end, walk.empty)
            tile = walk.latents(start, end, log_norm)[0] if inputs.k is not None else None
            scores = None if tile is None else _causal(torch.matmul(tile.u, tile.e.transpose(2, 3)))
            h = None
            if has_window:
                weights, slope, (q, keys), here = walk.window_weights(start, end)
                span_v = walk.near_values(start, end)
                products = torch.bmm(stack(pull), span_v.transpose(1, 2)).view_as(weights)
                share = None if tile is None else tile.p[..., :1]
                dq, dkeys, h = band_backward(weights, slope, share, products, q, keys)
                grads.add_window(start, end, dq * options.scale, dkeys)
                if scores is not None and share is not None:
                    weights = weights * share
                    weights[..., here] += scores
                grads.add_span_values(start, end, torch.bmm(stack(weights).transpose(1, 2), stack(pull)))
                products = products[..., here]
            else:
                products = torch.bmm(stack(pull), v.transpose(1, 2)).view(*pull.shape[:3], end - start)
                assert scores is not None
                grads.add_values(start, end, torch.bmm(stack(scores).transpose(1, 2), stack(pull)))
            if tile is not None:
                part = latent_tile_backward(
                    tile, mean, v, pull, _causal(products), h, carry, carry_h, options.undirected
                )
                grads.add_latents(start, end, part.logits, part.k)
                grads.add_values(start, end, part.v)
                carry, carry_h = part.carry, part.carry_h
    return grads.finish((carry * walk.state()[1]).sum(dim=-1) - carry_h, carry)


def _causal(square: Tensor) -> Tensor:
    return square.tril_()


def _tile_states(walk: Walk, plan: list[list[tuple[int, int]]]):
    """The latents' state before each entry of the plan, and after the last."""
    state = walk.state()
    states = []
    for tiles in plan:
        states.append(state)
        for start, end in tiles:
            state = _step(walk, start, end, state)
    return states, state


def _states_within(walk: Walk, tiles: list[tuple[int, int]], state: tuple[Tensor, Tensor]):
    """The state before each tile of one plan entry."""
    states = [state]
    for start, end in tiles[:-1]:
        states.append(_step(walk, start, end, states[-1]))
    return states


def _step(walk: Walk, start: int, end: int, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if walk.inputs.k is None:
        return state
    tile, log_norm = walk.latents(start, end, state[0])
    return log_norm, next_mean(tile, state[1], walk.load_values(walk.inputs.v, start, end, walk.empty))


def _carry_from_state(walk: Walk, state, dlog_norm: Tensor | None, dmean: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients into the final state, in the form of the carries: Σ r dy and Σ r h relative to its normaliser."""
    log_norm, mean = state
    carry = torch.zeros_like(mean) if dmean is None else dmean.to(mean.dtype).reshape_as(mean)
    carry_h = (carry * mean).sum(dim=-1)
    if dlog_norm is not None:
        carry_h = carry_h - dlog_norm.to(mean.dtype).reshape_as(log_norm)
    return carry, carry_h
