"""Fixed configurations of the attention kernels, chosen from sizes and dtypes alone, and their launches."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from latte.ops.triton.prepare import compile_only, is_preparing
from latte.ops.triton.replay import note_launch

MOST_COMPILED = 4096


@dataclass(frozen=True)
class Form:
    """What a call computes, apart from batch and length."""

    heads: int
    value_heads: int
    latents: int  # 0 without latents
    width: int
    key_width: int  # 0 without a window
    window: int
    dtype: torch.dtype  # of values
    dtypes: tuple[torch.dtype | None, ...]  # of logits, keys and the window's queries, for which kernels are compiled
    causal: bool
    undirected: bool
    packed: bool
    masked: bool
    capped: bool
    given: bool  # a latents' state comes in
    full: bool  # every token of every tile is real
    early: bool  # launches may begin while others end


@dataclass(frozen=True)
class Plan:
    """Tile size, constants of the kernels and kernels compiled so far."""

    tile: int
    shared: dict[str, Any]  # constants of the output and gradient kernels, and of others by name
    tiles_each: int  # tiles that a program of their own states takes one after the other
    folds: bool  # the output kernel takes its short way
    own: dict[str, int]  # what the kernels take besides: that of tiles' own states, and the three large ones
    output: dict[str, int]
    query_grad: dict[str, int]
    key_grad: dict[str, int]
    keeps_states: bool  # for backward, those before tiles; otherwise it makes them again
    compiled: dict[Any, Any] = field(default_factory=dict)
    prepared: set[Hashable] = field(default_factory=set)  # passes whose kernels are all compiled

    def launch(self, name: Hashable, kernel: Any, grid: tuple[int, ...], tensors: tuple, numbers: tuple,
               constants: dict, aligned: bool) -> None:  # fmt: skip
        """Run a kernel; from the second time on without Triton's look at every argument.

        Of the constants, those that do not follow from the plan must be part of the name.
        What Triton specialises on are dtypes (fixed by the plan), numbers and absent tensors (part of the key) and
        alignment; what it compiles is loaded for one device.
        """
        if not all(grid):
            return
        if is_preparing():
            compile_only(kernel, grid, (*tensors, *numbers), constants)
            return
        device = next(x for x in tensors if x is not None).device.index
        key = (name, device, numbers, *(x is None for x in tensors))
        known = self.compiled.get(key) if aligned else None
        if known is None:
            binary = kernel[grid](*tensors, *numbers, **constants)
            if not aligned or binary is None:
                return
            if len(self.compiled) >= MOST_COMPILED:  # a length seen no more should not be kept for ever
                self.compiled.clear()
            known = self.compiled[key] = (binary, constexpr_values(kernel, constants))
        else:
            binary, values = known
            binary[(*grid, 1, 1)[:3]](*tensors, *numbers, *values)
        note_launch(known[0], grid, (*tensors, *numbers, *known[1]))


def states_are_small(form: Form, tile: int) -> bool:
    """Whether a tile's state is at most a tenth of its inputs and outputs."""
    size = form.dtype.itemsize
    q, k, window = (0 if dtype is None else dtype.itemsize for dtype in form.dtypes)
    shared = (form.width * size + form.key_width * window) * form.value_heads // form.heads  # v and the window's keys
    token = (form.latents + (form.key_width > 0)) * q + form.latents * k + form.width * size + form.key_width * window
    norms = 4 * tile if form.key_width else 0
    return 10 * (form.latents * (form.width * size + 8) + norms) <= tile * (token + shared)


def constexpr_values(kernel: Any, constants: dict) -> tuple:
    """The constants that a kernel takes as arguments, in its order."""
    return tuple(constants[parameter.name] for parameter in kernel.params if parameter.is_constexpr)


@cache
def make_plan(form: Form) -> Plan:
    """Tiles of 64 tokens; narrower blocks and fewer stages where float32 or wide heads fill shared memory."""
    exact = form.dtype == torch.float32
    widest = max(form.width, form.key_width)
    tile = 32 if widest > 128 and exact else 64
    block_l = min(64, max(16, triton.next_power_of_2(max(form.latents, 1))))
    if exact:
        block_l = min(block_l, 32)
    elif widest > 128:
        block_l = 16  # with eight warps, Triton 3.6 gave wrong outputs for more in one product
    # Triton 3.6 misreads means of 64 latents by 32 channels: wrong outputs, then an illegal access.
    narrowest = 64 if block_l == 64 else 16
    shared = {
        "HEADS": form.heads,
        "NUM": max(form.latents, 1),
        "WIDTH": form.width,
        "BD": max(narrowest, triton.next_power_of_2(form.width)),
        "BL": block_l,
        "PACKED": form.packed,
        "PRECISION": "tf32x3" if exact else "tf32",
        "GROUPS": form.heads // form.value_heads,
        "KEY_WIDTH": max(form.key_width, 1),
        "BE": max(16, triton.next_power_of_2(max(form.key_width, 1))),
        "C": tile,
        "BLOCKS": triton.cdiv(max(form.latents, 1), block_l),
        "WINDOW": form.window if form.key_width else 0,
        "LATENTS": form.latents > 0,
        "CAUSAL": form.causal,
        "UNDIRECTED": form.undirected,
        "MASKED": form.masked,
        "CAPPED": form.capped,
        "FULL": form.full,
        "HALF": not exact,
        "EARLY": form.early,
    }
    warps = 8 if widest > 128 else 4
    heavy = widest * (4 if exact else 2) > 256
    small = not exact and block_l <= 32 and widest <= 128

    def options(keys: int, stages: int, registers: int) -> dict[str, int]:
        """Keys of the window (for keys' gradients, queries) that one step takes, and how many steps reach back."""
        keys = min(keys, tile)
        near = triton.cdiv(max(form.window - 1, 0), keys)
        found = {"BN": keys, "NEAR": near, "num_warps": warps, "num_stages": 1 if heavy else stages}
        return {**found, "maxnreg": registers} if registers else found  # fewer registers, more programs at a time

    few = block_l == 16 and form.latents > 0
    tiles_each, own = 1, {"num_warps": 4, "num_stages": 1}
    query_grad = key_grad = options(32, 3, 168 if small and widest <= 96 else 0)
    folds = small and few and widest <= 64 and form.window == 2 * tile and is_plain(form)
    if small and widest <= 64:
        if few:
            tiles_each, own = 2, {"num_warps": 1, "num_stages": 1}
        output = options(64, 2, 128) if not few else options(32, 3, 96) if form.key_width else options(64, 2, 72)
    elif small and widest <= 96:  # rows in two parts
        if few:
            tiles_each, own = 2, {"num_warps": 1, "num_stages": 2}
        output = options(32, 3, 128) if few else options(64, 2, 168)
    else:
        output = options(32, 3, 168) if small else options(64, 2, 0)
    if folds:
        output["maxnreg"] = 128
    return Plan(tile, shared, tiles_each, folds, own, output, query_grad, key_grad, states_are_small(form, tile))


def is_plain(form: Form) -> bool:
    """Causal, with a window and latents of its tokens, in whole tiles that nothing is missing from."""
    return form.causal and form.full and form.key_width > 0 and form.latents > 0 and not form.undirected


def pick(constants: dict[str, Any], *names: str, **more: Any) -> dict[str, Any]:
    return {**{name: constants[name] for name in names}, **more}


def aligned(*tensors: Tensor | None) -> bool:
    """Whether all tensors start at 16 bytes: what allocators give and kernels are compiled for."""
    return all(x is None or x.data_ptr() % 16 == 0 for x in tensors)
