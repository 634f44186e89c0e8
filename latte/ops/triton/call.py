"""Calling kernels from PyTorch."""

from typing import Any

import torch
from torch import Tensor

from latte.ops.triton.plan import constexpr_values
from latte.ops.triton.replay import note_launch


def launch(kernel: Any, programs: int | tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run a kernel, by a number of programs or a grid of them, on the device of its first tensor."""
    grid = (programs,) if isinstance(programs, int) else programs
    with torch.cuda.device_of(next(x for x in arguments if x is not None)):
        binary = kernel[grid](*arguments, **options)
    if binary is not None:
        note_launch(binary, grid, (*arguments, *constexpr_values(kernel, options)))


def side_by_side(x: Tensor) -> Tensor:
    """x [B T W] itself if its channels lie side by side, else a copy in which they do."""
    return x if x.stride(2) == 1 else x.contiguous()


def dense(x: Tensor | None) -> Tensor | None:
    """x with all its elements side by side, if it is there."""
    return None if x is None else x.contiguous()
