"""The launches of one call: outputs and gradients."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from latte.ops.states import WindowState
from latte.ops.triton.attention_call import LANES, SIZES, Call
from latte.ops.triton.kernels.carries import carry_finish_kernel, carry_scan_kernel, carry_walk_kernel
from latte.ops.triton.kernels.forward import output_kernel
from latte.ops.triton.kernels.key_gradients import key_grad_kernel
from latte.ops.triton.kernels.query_gradients import query_grad_kernel
from latte.ops.triton.plan import aligned, pick
from latte.ops.triton.replay import empty
from latte.ops.triton.rotary import row_stride
from latte.ops.triton.states import States
from latte.ops.triton.tiles import lanes
from latte.ops.triton.window_tail import block_size

WILD_PROGRAMS = 512  # enough to fill a GPU with wild tiles, and soon gone where there are none


def outputs(call: Call, states: States | None, tail: WindowState | None) -> tuple[Tensor, Tensor]:
    """y and, for windows, the base-2 log-normaliser of each token's window; a given `tail` is filled."""
    x, plan = call.inputs, call.plan
    y = call.empty(call.batch, call.tokens, call.form.heads, call.width, dtype=x.v.dtype)
    lse = call.empty(*((call.batch, call.form.heads, call.tokens) if x.window_q is not None else (0,)))
    tensors = (
        x.q, x.k, x.v, x.window_q, x.window_k, x.mask, *_seen(call, states), y, lse, call.tiles.table,
        call.tiles.bounds,
    )  # fmt: skip
    programs = call.tiles.total * call.form.heads
    numbers = (*call.numbers(), programs)
    follows = call.form.early and call.form.latents > 0  # kernels of the same call
    constants = {**plan.shared, **plan.output, "FOLD": plan.folds, "launch_pdl": follows}
    constants["BLOCK"] = block_size(call.form.value_heads, max(call.width, call.form.key_width))
    for name, wild in call.rounds("output"):
        slots = call.options.window - 1 if wild and tail is not None else 0
        kind = {**constants, "WILD": wild, "TAIL": slots}
        filled = tail if slots and tail is not None else (None,) * 3
        plan.launch(name, output_kernel, _grid(programs, wild), (*tensors, *filled), numbers, kind, call.aligned)
    return y, lse


def _grid(programs: int, wild: bool) -> tuple[int]:
    """A few programs look through all tiles for wild ones: where there are none, they are soon gone."""
    return (min(programs, WILD_PROGRAMS) if wild else programs,)


def _seen(call: Call, states: States | None) -> tuple[Tensor | None, ...]:
    return (None,) * 4 if states is None else states.seen(call.options.causal)


class Room(NamedTuple):
    """Where gradients of what the kernels take are written: rows of a head side by side, heads too, tokens anyhow."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor
    window_q: Tensor | None
    window_k: Tensor | None
    cos: Tensor | None = None  # of the angles by which the window's queries and keys were turned: gradients are
    sin: Tensor | None = None  # turned back


class Gradients(NamedTuple):
    q: Tensor | None
    k: Tensor | None
    v: Tensor  # like Inputs.v, past slots included
    window_q: Tensor | None
    window_k: Tensor | None  # like Inputs.window_k
    first: tuple[Tensor, Tensor] | None  # the carry of whole sequences, relative to the state before them


class Carries(NamedTuple):
    """Buffers between the query and the key kernel."""

    tile: Tensor  # [tiles H L D] Σ r dy
    tile_h: Tensor  # [tiles H L] Σ r h
    after: Tensor | None = None
    after_h: Tensor | None = None
    piece_end: Tensor | None = None
    whole: Tensor | None = None
    whole_h: Tensor | None = None


def gradients(
    call: Call, states: States | None, lse: Tensor, dy: Tensor, into: tuple[Tensor, Tensor] | None, room: Room | None
) -> Gradients:
    """All gradients, in `room` if that is given; `into` is the gradient of the final state as a carry."""
    x, plan, tiles = call.inputs, call.plan, call.tiles
    heads, latents = call.form.heads, call.form.latents
    room = room or Room(_like(x.q), _like(x.k), _room(x.v), _like(x.window_q), _like(x.window_k))
    dq, dk, dv, dwq, dwk, *angles = room
    own = carries = shifted = local_h = None
    if latents:
        own = call.empty(call.batch, call.tokens, heads, latents)
        wide = torch.float32 if x.v.dtype == torch.float16 else x.v.dtype  # sums of dy can overflow float16
        carries = Carries(
            call.empty(tiles.total, heads, latents, call.width, dtype=wide),
            call.empty(tiles.total, heads, latents),
        )
    if x.window_q is not None:
        shifted, local_h = call.empty(2, *lse.shape).unbind()
    head = (x.q, x.k, x.v, x.window_q, x.window_k, x.mask, dy, *_seen(call, states))
    is_aligned = call.aligned and aligned(dy, *room)
    programs = tiles.total * heads
    angles_row = 0 if room.cos is None else row_stride(room.cos)
    numbers = (*call.numbers(dy), angles_row, programs)
    tensors = (
        *head, lse, tiles.table, tiles.bounds, dq, own, dwq, *(carries[:2] if carries else (None,) * 2), shifted,
        local_h, *angles,
    )  # fmt: skip
    turned: dict[str, Any] = {"TURNED": room.cos is not None}
    steps = _token_strides(DQ_TOKEN=dq, DWQ_TOKEN=dwq)
    constants = {**plan.shared, **plan.query_grad, **steps, **turned}
    for name, wild in call.rounds("query_grad"):
        kind, name = {**constants, "WILD": wild, "launch_pdl": wild and call.form.early}, (name, *steps.values())
        plan.launch(name, query_grad_kernel, _grid(programs, wild), tensors, numbers, kind, is_aligned)
    if carries is not None and states is not None:
        carries = _scan_carries(call, states, carries, into)
    final = (None, None) if into is None else into
    tensors = (
        *head, None if states is None else states.last_norm, *(carries[:5] if carries else (None,) * 5), *final,
        *(carries[5:] if carries else (None,) * 2), shifted,
        local_h, tiles.table, tiles.bounds, dk, own, dv, dwk, *angles,
    )  # fmt: skip
    programs = tiles.total * call.form.value_heads
    numbers = (*call.numbers(dy), angles_row, *call.spread[1:], x.v.shape[1], programs)
    steps = _token_strides(DK_TOKEN=dk, DV_TOKEN=dv, DWK_TOKEN=dwk)
    constants = {**plan.shared, **plan.key_grad, **steps, **turned, "INTO": into is not None}
    constants["launch_pdl"] = call.form.early
    for name, wild in call.rounds("key_grad"):
        kind, name = {**constants, "WILD": wild, "PAST": False}, (name, *steps.values())
        plan.launch(name, key_grad_kernel, _grid(programs, wild), tensors, numbers, kind, is_aligned)
    if x.slots:
        grid = (tiles.sequences * -(-x.slots // plan.tile) * call.form.value_heads,)
        constants = {**constants, "WILD": False, "PAST": True}
        plan.launch(("past_grad", *steps.values()), key_grad_kernel, grid, tensors, numbers, constants, is_aligned)
    first = None
    if carries is not None and carries.whole is not None and carries.whole_h is not None:
        first = (carries.whole, carries.whole_h)
    return Gradients(dq, dk, dv, dwq, dwk, first)


def _room(x: Tensor) -> Tensor:
    return empty(x.shape, x.dtype, x.device)


def _like(x: Tensor | None) -> Tensor | None:
    return None if x is None else _room(x)


def _token_strides(**room: Tensor | None) -> dict[str, int]:
    """Numbers from one token to the next, in one row of the batch or, where a row is one token, from row to row."""
    return {name: 0 if x is None else x.stride(0 if x.shape[1] == 1 else 1) for name, x in room.items()}


def _scan_carries(call: Call, states: States, carries: Carries, into: tuple[Tensor, Tensor] | None) -> Carries:
    """Each tile's own carry becomes the carry after it; whole sequences' too where someone asks for them."""
    plan, tiles, form = call.plan, call.tiles, call.form
    pieces = tiles.rows * tiles.pieces
    piece_h, after_h, piece_end = call.empty(3, pieces, form.heads, form.latents).unbind()
    piece, after = call.empty(2, pieces, form.heads, form.latents, call.width).unbind()
    whole = whole_h = None
    if form.given or not form.causal:  # someone asks for the carry of whole sequences
        whole, whole_h = (
            map(torch.zeros_like, (states.last_mean, states.last_norm)) if into is None else (x.clone() for x in into)
        )
    shared, blocks = plan.shared, plan.shared["BLOCKS"]
    constants = {"WHOLE": not form.causal, "num_warps": 4, "launch_pdl": form.early}
    last, final = states.last_norm, (None, None) if into is None else into
    handed = {"INTO": into is not None}
    plan.launch(
        "carry_walk", carry_walk_kernel, (pieces, form.heads, blocks),
        (states.norm, last, carries.tile, carries.tile_h, piece, piece_h, piece_end, whole, whole_h, tiles.table),
        call.spread, pick(shared, *SIZES, "EARLY", FIRST=whole is not None, **constants), True,
    )  # fmt: skip
    plan.launch(
        "carry_scan", carry_scan_kernel, (tiles.rows, form.heads, form.latents),
        (piece, piece_h, piece_end, states.norm, last, *final, after, after_h, tiles.table), call.spread,
        pick(shared, *LANES, N=lanes(tiles.pieces), **handed, **constants),
        True,
    )  # fmt: skip
    if whole is not None:
        plan.launch(
            "carry_finish", carry_finish_kernel, (tiles.sequences, form.heads, blocks) if tiles.total else (0,),
            (whole, whole_h, after, after_h, piece_end, states.norm, last, *final, tiles.table, tiles.ends),
            (tiles.sequences, *call.spread), pick(shared, *SIZES, "EARLY", **handed, **constants), True,
        )  # fmt: skip
    return carries._replace(after=after, after_h=after_h, piece_end=piece_end, whole=whole, whole_h=whole_h)
