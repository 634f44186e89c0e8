"""Calling kernels from PyTorch."""

from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Run `programs` programs of a kernel on the device of its first argument."""
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](*arguments, **options)


def side_by_side(x: Tensor) -> Tensor:
    """x [B T W] itself if its channels lie side by side, else a copy in which they do."""
    return x if x.stride(2) == 1 else x.contiguous()
