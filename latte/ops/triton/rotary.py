"""Rotary positions on GPUs, in place: one launch for queries and keys that one product made."""

import triton
from torch import Tensor

from latte.ops.triton.call import launch
from latte.ops.triton.kernels.rotary import turn_kernel
from latte.ops.triton.replay import Cookbook

GROUP, CHANNELS = 8, 4096  # heads, and channels of all of them, that a program turns
TURNS = Cookbook()


def turn_(x: Tensor, cos: Tensor, sin: Tensor, queries: int, keys: int, keys_at: int) -> None:
    """Turn `queries` heads that begin in column 0 of x [B T columns], and `keys` that begin in column `keys_at`.

    Channels 2 i and 2 i + 1 of a head are pair i. cos and sin, with all elements side by side, have a row for each of
    x's or one for all.
    """
    batch, tokens, _ = x.shape
    width, heads = 2 * cos.shape[2], queries + keys
    block, group = triton.next_power_of_2(width), min(GROUP, triton.next_power_of_2(heads))
    each = max(1, CHANNELS // (block * group))

    def call() -> list[Tensor]:
        launch(
            turn_kernel, (-(-batch * tokens // each), -(-heads // group)), x, cos, sin, batch * tokens, tokens,
            x.stride(1), row_stride(cos), keys_at,
            QUERIES=queries, HEADS=heads, WIDTH=width, B=block, C=each, GROUP=group, num_warps=4,
        )  # fmt: skip
        return []

    TURNS.perform((x, cos, sin), (queries, keys, keys_at), call)


def row_stride(angles: Tensor) -> int:
    """Numbers between the angles of one row and of the next, which may have the same."""
    return angles.stride(0) if angles.shape[0] > 1 else 0
