"""Rotary positions on GPUs, in place: one launch for queries and keys that one product made."""

import triton
from torch import Tensor

from latte.ops.triton.call import launch, side_by_side
from latte.ops.triton.kernels.rotary import turn_kernel
from latte.ops.triton.replay import Cookbook

GROUP, PAIRS = 8, 2048  # heads and pairs of channels that a program turns
TURNS = Cookbook()


def turn_(x: Tensor, cos: Tensor, sin: Tensor, queries: int, keys: int, keys_at: int, *, back: bool = False) -> None:
    """Turn `queries` heads that begin in column 0 of x [B T columns], and `keys` that begin in column `keys_at`.

    `back` is the turn's inverse and, since it keeps lengths, what gradients go through. cos and sin have a row for each
    of x's or one for all.
    """
    batch, tokens, _ = x.shape
    cos, sin = side_by_side(cos), side_by_side(sin)
    half, heads = cos.shape[2], queries + keys
    block, group = triton.next_power_of_2(half), min(GROUP, triton.next_power_of_2(heads))
    each = max(1, PAIRS // (block * group))
    steps = [step for z in (cos, sin) for step in (z.stride(0) if z.shape[0] > 1 else 0, z.stride(1))]

    def call() -> list[Tensor]:
        launch(
            turn_kernel, (-(-batch * tokens // each), -(-heads // group)), x, cos, sin, batch * tokens, tokens,
            x.stride(1), *steps, keys_at,
            QUERIES=queries, HEADS=heads, HALF=half, B=block, C=each, GROUP=group, BACK=back, num_warps=4,
        )  # fmt: skip
        return []

    TURNS.perform((x, cos, sin), (queries, keys, keys_at, back), call)
