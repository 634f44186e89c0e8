"""Partial sums that programs have left, added up by one launch."""

import torch
import triton
from torch import Tensor

from latte.ops.triton.call import launch
from latte.ops.triton.kernels.sums import add_parts_kernel
from latte.ops.triton.replay import empty

ROWS, BLOCK = 16, 64


def add_parts(parts: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sum of parts [P n] in float32: a tensor of `shape` and `dtype` from its first elements, and the rest."""
    count, total = parts.shape
    y = empty(shape, dtype, parts.device)
    rest = empty((total - y.numel(),), torch.float32, parts.device)
    launch(
        add_parts_kernel, triton.cdiv(total, BLOCK), parts, y, rest, count, y.numel(), total,
        ROWS=ROWS, BLOCK=BLOCK, num_warps=2,
    )  # fmt: skip
    return y, rest
