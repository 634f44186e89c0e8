"""One call of the attention kernels: its tensors, its plan, and the numbers that its launches share."""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from latte.ops.triton.device import launches_overlap
from latte.ops.triton.plan import Form, aligned, make_plan
from latte.ops.triton.replay import empty
from latte.ops.triton.tiles import Tiles, lay_tiles

# Constants that kernels take: those that have blocks of latents, and those that have a latent's pieces side by side.
SIZES = ("HEADS", "NUM", "WIDTH", "BL", "BD", "PACKED")
LANES = ("HEADS", "NUM", "WIDTH", "BD", "PACKED", "PRECISION", "EARLY")


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
        scores = (float(options.scale), float(options.softcap or 1.0))  # 2 is no 2.0 to what is compiled for one
        return (*self.strides(dy), self.tokens, self.tiles.per_row, self.inputs.slots, *scores)

    def rounds(self, name: str) -> tuple[tuple[str, bool], ...]:
        """Launches of a kernel: the second takes the wild tiles, which only causal latents have."""
        return ((name, False), (f"wild_{name}", True)) if self.form.latents and self.form.causal else ((name, False),)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return empty(shape, dtype, self.inputs.v.device)
