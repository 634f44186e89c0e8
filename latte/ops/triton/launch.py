"""The launches of one call: states, outputs, gradients."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from latte.ops.triton.device import launches_overlap
from latte.ops.triton.kernels.backward import key_grad_kernel, query_grad_kernel
from latte.ops.triton.kernels.carries import carry_finish_kernel, carry_scan_kernel, carry_walk_kernel
from latte.ops.triton.kernels.forward import output_kernel
from latte.ops.triton.kernels.states import prefix_kernel, tile_kernel
from latte.ops.triton.plan import Form, aligned, make_plan, pick
from latte.ops.triton.replay import empty
from latte.ops.triton.tiles import Tiles, lay_tiles, spread

WILD_PROGRAMS = 512  # enough to fill a GPU with wild tiles, and soon gone where there are none
LANES = ("HEADS", "NUM", "WIDTH", "BD", "PACKED", "PRECISION", "EARLY")
SIZES = ("HEADS", "NUM", "WIDTH", "BL", "BD", "PACKED", "EARLY")


class Inputs(NamedTuple):
    """One call's tensors, the last axis of each contiguous; absent parts are None.

    With a past, `v`, `window_k` and `mask` hold its `slots` positions before each sequence's tokens; `tokens_v` and
    `tokens_mask` are without it.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor
    window_q: Tensor | None
    window_k: Tensor | None
    mask: Tensor | None
    tokens_v: Tensor
    tokens_mask: Tensor | None
    first_norm: Tensor | None
    first_mean: Tensor | None
    cu_seqlens: Tensor | None
    slots: int


class Options(NamedTuple):
    window: int
    scale: float
    softcap: float
    undirected: bool
    causal: bool


class States(NamedTuple):
    """What the states' kernels leave, all float32 but the means before tiles."""

    norm: Tensor  # [tiles H L] before each tile
    mean: Tensor  # [tiles H L D]
    peak: Tensor  # [tiles H L] the largest of each tile's keys
    wild: Tensor  # [1 + tiles H blocks] int32: whether any tile is wild, then each
    last_norm: Tensor  # [N H L] after each sequence
    last_mean: Tensor  # [N H L D]

    def seen(self, causal: bool) -> tuple[Tensor, ...]:
        """What a token's latents see: the state before its tile, or that of its sequence."""
        norm, mean = (self.norm, self.mean) if causal else (self.last_norm, self.last_mean)
        return (norm, mean, self.peak, self.wild)


class Call:
    """The plan, tiles and numbers of a call: what its launches share."""

    def __init__(self, inputs: Inputs, options: Options):
        queries = inputs.q if inputs.q is not None else inputs.window_q
        if queries is None:
            raise ValueError("neither q nor window_q is given; a call needs latents or a window")
        self.inputs, self.options = inputs, options
        self.batch, self.tokens, heads = queries.shape[:3]
        self.width = inputs.v.shape[3]
        packed, masked = inputs.cu_seqlens is not None, inputs.mask is not None
        key_width = 0 if inputs.window_q is None else inputs.window_q.shape[3]
        exact_wide = inputs.v.dtype == torch.float32 and max(self.width, key_width) > 128
        dtypes = tuple(None if x is None else x.dtype for x in (inputs.q, inputs.k, inputs.window_q))
        full = not packed and not masked and self.tokens % (32 if exact_wide else 64) == 0
        form = Form(
            heads, inputs.v.shape[2], 0 if inputs.k is None else inputs.k.shape[3], self.width, key_width,
            options.window, inputs.v.dtype, dtypes, options.causal, options.undirected, packed, masked,
            options.softcap > 0, inputs.first_norm is not None, full, launches_overlap(inputs.v.device),
        )  # fmt: skip
        self.form, self.plan = form, make_plan(form)
        self.tiles: Tiles = lay_tiles(self.batch, self.tokens, self.plan.tile, inputs.cu_seqlens)
        self.spread = (self.tiles.per_row, self.tiles.per_piece, self.tiles.pieces)

    @cached_property
    def aligned(self) -> bool:
        return aligned(*self.inputs[:10])

    def strides(self, dy: Tensor | None = None) -> tuple[int, ...]:
        x = self.inputs
        rows = (x.q, x.k, x.v, x.window_q, x.window_k) if dy is None else (x.q, x.k, x.v, x.window_q, x.window_k, dy)
        flat = [step for tensor in rows for step in (tensor.stride()[:3] if tensor is not None else (0, 0, 0))]
        return (*flat, 0 if x.mask is None else x.mask.stride(0))

    def numbers(self, dy: Tensor | None = None) -> tuple[float, ...]:
        options = self.options
        scores = (options.scale, options.softcap or 1.0)
        return (*self.strides(dy), self.tokens, self.tiles.per_row, self.inputs.slots, *scores)

    def rounds(self, name: str) -> tuple[tuple[str, bool], ...]:
        """Launches of a kernel: the second takes the wild tiles, which only causal latents have."""
        return ((name, False), (f"wild_{name}", True)) if self.form.latents and self.form.causal else ((name, False),)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return empty(shape, dtype, self.inputs.v.device)


def tile_states(call: Call) -> States:
    """The latents' states before tiles and after sequences."""
    x, plan, tiles = call.inputs, call.plan, call.tiles
    if x.k is None:
        raise ValueError("k is missing; only latents have states")
    heads, latents, width = call.form.heads, call.form.latents, call.width
    tile = (tiles.total, heads, latents)
    norm, peak, own_norm = (call.empty(*tile) for _ in range(3))
    mean, own_mean = (call.empty(*tile, width, dtype=x.v.dtype) for _ in range(2))
    wild = call.empty(1 + tiles.total * heads * plan.shared["BLOCKS"], dtype=torch.int32)
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
    shared, (per_lane, used) = plan.shared, spread(tiles.per_row)
    lanes = _power(used)
    k, v, mask = x.k, x.tokens_v, x.tokens_mask
    plan.launch(
        "tile", tile_kernel, (tiles.total * heads, shared["BLOCKS"]),
        (k, v, mask, own_norm, own_mean, peak, wild, tiles.table),
        (*k.stride()[:3], *v.stride()[:3], 0 if mask is None else mask.stride(0), call.tokens, tiles.per_row),
        pick(shared, *SIZES, "BLOCKS", "GROUPS", "C", "FULL", "PRECISION", MASKED=mask is not None, **plan.own),
        call.aligned,
    )  # fmt: skip
    plan.launch(
        "prefix", prefix_kernel, (tiles.rows, heads, latents),
        (own_norm, own_mean, x.first_norm, x.first_mean, norm, mean, wild, last_norm, last_mean, tiles.table),
        (tiles.per_row, per_lane, used),
        pick(shared, *LANES, "BLOCKS", GIVEN=call.form.given, N=lanes, num_warps=lanes // 8,
             launch_pdl=call.form.early),
        call.aligned,
    )  # fmt: skip
    return States(norm, mean, peak, wild, last_norm, last_mean)


KEPT = 4  # tensors of states that backward keeps, besides those after sequences


def states_to_keep(call: Call, states: States) -> tuple[Tensor, ...]:
    """Those before tiles, or nothing where a bidirectional pass needs none and where the plan has them made again."""
    kept = call.form.causal and call.plan.keeps_states
    return states[:KEPT] if kept else tuple(call.empty(0) for _ in range(KEPT))


def kept_shapes(call: Call) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of `states_to_keep`."""
    if not (call.form.causal and call.plan.keeps_states):
        return [((0,), torch.float32)] * KEPT
    tile = (call.tiles.total, call.form.heads, call.form.latents)
    notes = (1 + tile[0] * tile[1] * call.plan.shared["BLOCKS"],)
    return [(tile, torch.float32), ((*tile, call.width), call.form.dtype), (tile, torch.float32), (notes, torch.int32)]


def kept_states(call: Call, kept: Sequence[Tensor], last_norm: Tensor, last_mean: Tensor) -> States:
    """The states that a backward pass needs, from what `states_to_keep` gave."""
    if call.form.causal and not call.plan.keeps_states:
        return tile_states(call)
    norm, mean, peak, wild = kept
    return States(norm, mean, peak, wild, last_norm, last_mean)


def _power(pieces: int) -> int:
    """Pieces that a program holds, a power of two the matrix units take."""
    return max(16, 1 << (max(pieces, 1) - 1).bit_length())


def outputs(call: Call, states: States | None) -> tuple[Tensor, Tensor]:
    """y and, for windows, the base-2 log-normaliser of each token's window."""
    x, plan = call.inputs, call.plan
    y = call.empty(call.batch, call.tokens, call.form.heads, call.width, dtype=x.v.dtype)
    lse = call.empty(*((call.batch, call.form.heads, call.tokens) if x.window_q is not None else (0,)))
    tensors = (
        x.q, x.k, x.v, x.window_q, x.window_k, x.mask, *_seen(call, states), y, lse, call.tiles.table,
        call.tiles.bounds,
    )  # fmt: skip
    programs = call.tiles.total * call.form.heads
    numbers = (*call.numbers(), programs)
    for name, wild in call.rounds("output"):
        follows = call.form.early and call.form.latents > 0  # kernels of the same call
        constants = {**plan.shared, **plan.output, "WILD": wild, "launch_pdl": follows}
        plan.launch(name, output_kernel, _grid(programs, wild), tensors, numbers, constants, call.aligned)
    return y, lse


def _grid(programs: int, wild: bool) -> tuple[int]:
    """A few programs look through all tiles for wild ones: where there are none, they are soon gone."""
    return (min(programs, WILD_PROGRAMS) if wild else programs,)


def _seen(call: Call, states: States | None) -> tuple[Tensor | None, ...]:
    return (None,) * 4 if states is None else states.seen(call.options.causal)


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
    call: Call, states: States | None, lse: Tensor, dy: Tensor, into: tuple[Tensor, Tensor] | None
) -> Gradients:
    """All gradients; `into` is the gradient of the final state as a carry."""
    x, plan, tiles = call.inputs, call.plan, call.tiles
    heads, latents = call.form.heads, call.form.latents
    dq, dk, dwq, dwk = (None if part is None else _like(part) for part in (x.q, x.k, x.window_q, x.window_k))
    dv = _like(x.v)
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
    is_aligned = call.aligned and aligned(dy)
    programs = tiles.total * heads
    numbers = (*call.numbers(dy), programs)
    tensors = (
        *head, lse, tiles.table, tiles.bounds, dq, own, dwq, *(carries[:2] if carries else (None,) * 2), shifted,
        local_h,
    )  # fmt: skip
    for name, wild in call.rounds("query_grad"):
        constants = {**plan.shared, **plan.query_grad, "WILD": wild, "launch_pdl": wild and call.form.early}
        plan.launch(name, query_grad_kernel, _grid(programs, wild), tensors, numbers, constants, is_aligned)
    if carries is not None and states is not None:
        carries = _scan_carries(call, states, carries, into)
    final = (None, None) if into is None else into
    tensors = (
        *head, None if states is None else states.last_norm, *(carries[:5] if carries else (None,) * 5), *final,
        *(carries[5:] if carries else (None,) * 2), shifted,
        local_h, tiles.table, tiles.bounds, dk, own, dv, dwk,
    )  # fmt: skip
    programs = tiles.total * call.form.value_heads
    numbers = (*call.numbers(dy), *call.spread[1:], x.v.shape[1], programs)
    constants = {**plan.shared, **plan.key_grad, "INTO": into is not None, "launch_pdl": call.form.early}
    for name, wild in call.rounds("key_grad"):
        kind = {**constants, "WILD": wild, "PAST": False}
        plan.launch(name, key_grad_kernel, _grid(programs, wild), tensors, numbers, kind, is_aligned)
    if x.slots:
        grid = (tiles.sequences * -(-x.slots // plan.tile) * call.form.value_heads,)
        constants = {**constants, "WILD": False, "PAST": True}
        plan.launch("past_grad", key_grad_kernel, grid, tensors, numbers, constants, is_aligned)
    first = None
    if carries is not None and carries.whole is not None and carries.whole_h is not None:
        first = (carries.whole, carries.whole_h)
    return Gradients(dq, dk, dv, dwq, dwk, first)


def _like(x: Tensor) -> Tensor:
    return empty(x.shape, x.dtype, x.device)


def _scan_carries(call: Call, states: States, carries: Carries, into: tuple[Tensor, Tensor] | None) -> Carries:
    """Each tile's own carry becomes the carry after it; whole sequences' too where someone asks for them."""
    plan, tiles, form = call.plan, call.tiles, call.form
    pieces = tiles.rows * tiles.pieces
    small, wide = (
        call.empty(3, pieces, form.heads, form.latents),
        call.empty(2, pieces, form.heads, form.latents, call.width),
    )
    piece_h, after_h, piece_end = small.unbind()
    piece, after = wide.unbind()
    whole = whole_h = None
    if form.given or not form.causal:  # someone asks for the carry of whole sequences
        whole, whole_h = (torch.zeros_like(x) for x in (states.last_mean, states.last_norm)) if into is None else (
            x.clone() for x in into
        )  # fmt: skip
    shared, blocks, constants = (
        plan.shared,
        plan.shared["BLOCKS"],
        {
            "WHOLE": not form.causal,
            "num_warps": 4,
            "launch_pdl": form.early,
        },
    )
    last, final = states.last_norm, (None, None) if into is None else into
    handed = {"INTO": into is not None}
    plan.launch(
        "carry_walk", carry_walk_kernel, (pieces, form.heads, blocks),
        (states.norm, last, carries.tile, carries.tile_h, piece, piece_h, piece_end, whole, whole_h, tiles.table),
        call.spread, pick(shared, *SIZES, FIRST=whole is not None, **constants), True,
    )  # fmt: skip
    plan.launch(
        "carry_scan", carry_scan_kernel, (tiles.rows, form.heads, form.latents),
        (piece, piece_h, piece_end, states.norm, last, *final, after, after_h, tiles.table), call.spread,
        pick(shared, *LANES, N=_power(tiles.pieces), **handed, **constants),
        True,
    )  # fmt: skip
    if whole is not None:
        plan.launch(
            "carry_finish", carry_finish_kernel, (tiles.sequences, form.heads, blocks) if tiles.total else (0,),
            (whole, whole_h, after, after_h, piece_end, states.norm, last, *final, tiles.table, tiles.ends),
            (tiles.sequences, *call.spread), pick(shared, *SIZES, **handed, **constants), True,
        )  # fmt: skip
    return carries._replace(after=after, after_h=after_h, piece_end=piece_end, whole=whole, whole_h=whole_h)
