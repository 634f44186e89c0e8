"""The window's state after a call that holds all of it: one launch where copies and a fill would be three."""

import torch
import triton
from torch import Tensor

from latte.ops.triton.call import launch
from latte.ops.triton.kernels.window_tail import window_tail_kernel
from latte.ops.triton.replay import Cookbook, empty

BLOCK = 1024
TAILS = Cookbook()


def copy_tail(keys: Tensor, values: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """The last `slots` ≥ 1 of keys [B T Hv E] and values [B T Hv D], and that all are valid [B slots]."""
    keys, values = (x if x.stride(3) == 1 else x.contiguous() for x in (keys, values))

    def call() -> tuple[list[Tensor], list[Tensor]]:
        return list(_copy_tail(keys, values, slots)), []

    recipe = TAILS.find((keys, values), (slots,), call)
    tail_keys, tail_values, valid = call()[0] if recipe is None else recipe.run((keys, values))[0]
    return tail_keys, tail_values, valid


def _copy_tail(keys: Tensor, values: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, heads, key_width = keys.shape
    width, device = values.shape[3], keys.device
    tail_keys = empty((batch, slots, heads, key_width), keys.dtype, device)
    tail_values = empty((batch, slots, heads, width), values.dtype, device)
    valid = empty((batch, slots), torch.bool, device)
    widest = triton.next_power_of_2(heads * max(key_width, width))
    launch(
        window_tail_kernel, batch * slots, keys, values, tail_keys, tail_values, valid, tokens - slots, slots,
        *keys.stride()[:3], *values.stride()[:3],
        HEADS=heads, KEY_WIDTH=key_width, WIDTH=width, BLOCK=min(BLOCK, widest), num_warps=4,
    )  # fmt: skip
    return tail_keys, tail_values, valid
