"""How accumulated values become the output's dtype."""

from typing import Any

import torch
from torch import Tensor


def round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` in `dtype`; float16, whose range they may leave, saturates instead of giving inf."""
    if dtype != torch.float16 or values.dtype == torch.float16:
        return values.to(dtype)
    return _Saturate.apply(values)  # type: ignore[no-any-return]


class _Saturate(torch.autograd.Function):
    """Rounding to float16 whose gradient, like that of rounding, is passed on as it is."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.dtype = values.dtype
        largest = torch.finfo(torch.float16).max
        return values.clamp(-largest, largest).to(torch.float16)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.to(ctx.dtype)
