"""The latents' states of one call: made by two launches, kept for backward or made again."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from latte.ops.triton.attention_call import LANES, SIZES, Call
from latte.ops.triton.kernels.states import prefix_kernel, tile_kernel
from latte.ops.triton.plan import pick
from latte.ops.triton.tiles import asked_ahead, lane_pieces, lanes

FILLING = 1024  # programs that fill a device
KEPT = 4  # tensors of states that backward keeps, besides those after sequences


class States(NamedTuple):
    """What the states' kernels leave, all float32 but the means before tiles."""

    norm: Tensor  # [tiles H L] before each tile
    mean: Tensor  # [tiles H L D]
    peak: Tensor  # [tiles H L] the largest of each tile's keys
    wild: Tensor  # [tiles H blocks] int32: which tiles are wild, by block of latents
    last_norm: Tensor  # [N H L] after each sequence
    last_mean: Tensor  # [N H L D]

    def seen(self, causal: bool) -> tuple[Tensor, ...]:
        """What a token's latents see: the state before its tile, or that of its sequence."""
        norm, mean = (self.norm, self.mean) if causal else (self.last_norm, self.last_mean)
        return (norm, mean, self.peak, self.wild)


def tile_states(call: Call) -> States:
    """The latents' states before tiles and after sequences."""
    x, plan, tiles = call.inputs, call.plan, call.tiles
    if x.k is None:
        raise ValueError("k is missing; only latents have states")
    heads, latents, width = call.form.heads, call.form.latents, call.width
    tile = (tiles.total, heads, latents)
    norm, peak, own_norm = (call.empty(*tile) for _ in range(3))
    mean, own_mean = (call.empty(*tile, width, dtype=x.v.dtype) for _ in range(2))
    wild = call.empty(tiles.total, heads, plan.shared["BLOCKS"], dtype=torch.int32)
    if x.first_norm is not None and x.first_mean is not None:
        last_norm, last_mean = x.first_norm.clone(), x.first_mean.clone()
    elif tiles.table is not None or tiles.total == 0:  # some sequences may be empty
        last_norm = call.empty(tiles.sequences, heads, latents).fill_(-torch.inf)
        last_mean = call.empty(tiles.sequences, heads, latents, width).zero_()
    else:
        last_norm, last_mean = (
            call.empty(tiles.sequences, heads, latents),
            call.empty(tiles.sequences, heads, latents, width),
        )
    shared, (per_lane, used) = plan.shared, lane_pieces(tiles.per_row)
    k, v, mask = x.k, x.tokens_v, x.tokens_mask
    each = max(1, min(plan.tiles_each, tiles.total * heads // FILLING))
    plan.launch(
        "tile", tile_kernel, (-(-tiles.total // each) * heads, shared["BLOCKS"]),
        (k, v, mask, own_norm, own_mean, peak, wild, tiles.table),
        (*k.stride()[:3], *v.stride()[:3], 0 if mask is None else mask.stride(0), call.tokens, tiles.per_row,
         tiles.total, each),
        pick(shared, *SIZES, "BLOCKS", "GROUPS", "C", "FULL", "PRECISION", "EARLY", MASKED=mask is not None,
             launch_pdl=shared["EARLY"], **plan.own),
        call.aligned,
    )  # fmt: skip
    # The tiles' kernel does not let it begin earlier: its programs would take the places of the last tiles'.
    plan.launch(
        "prefix", prefix_kernel, (tiles.rows, heads, latents),
        (own_norm, own_mean, x.first_norm, x.first_mean, norm, mean, last_norm, last_mean, tiles.table),
        (tiles.per_row, per_lane, used),
        pick(shared, *LANES, GIVEN=call.form.given, DEPTH=asked_ahead(per_lane), N=lanes(used),
             SHORT=per_lane == 1 and not (call.form.packed or call.form.given),
             num_warps=1 if per_lane == 1 else lanes(used) // 8, launch_pdl=shared["EARLY"]),
        call.aligned,
    )  # fmt: skip
    return States(norm, mean, peak, wild, last_norm, last_mean)


def states_to_keep(call: Call, states: States) -> tuple[Tensor, ...]:
    """Those before tiles, or nothing where a bidirectional pass needs none and where the plan has them made again."""
    kept = call.form.causal and call.plan.keeps_states
    return states[:KEPT] if kept else tuple(call.empty(0) for _ in range(KEPT))


def kept_shapes(call: Call) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of `states_to_keep`."""
    if not (call.form.causal and call.plan.keeps_states):
        return [((0,), torch.float32)] * KEPT
    tile = (call.tiles.total, call.form.heads, call.form.latents)
    notes = (*tile[:2], call.plan.shared["BLOCKS"])
    return [(tile, torch.float32), ((*tile, call.width), call.form.dtype), (tile, torch.float32), (notes, torch.int32)]


def kept_states(call: Call, kept: Sequence[Tensor], last_norm: Tensor, last_mean: Tensor) -> States:
    """The states that a backward pass needs, from what `states_to_keep` gave."""
    if call.form.causal and not call.plan.keeps_states:
        return tile_states(call)
    norm, mean, peak, wild = kept
    return States(norm, mean, peak, wild, last_norm, last_mean)
