"""The short causal convolution token by token."""

from itertools import pairwise

import torch
from torch import Tensor

from latte.ops.checks import sequence_bounds
from latte.ops.rounding import round_to


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    mask: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The convolution of every sequence in turn, in `dtype`; the output and the state in x's."""
    real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
    bounds = [0, x.shape[1]] if cu_seqlens is None else sequence_bounds(cu_seqlens, x.shape[1])
    taps = weight.shape[1]
    clean = x.masked_fill(~real[..., None], 0.0)
    outputs = [clean[:, :0].to(dtype)]
    states = []
    for n, (start, end) in enumerate(pairwise(bounds)):
        past = state if cu_seqlens is None else state[n : n + 1]
        tokens = torch.cat([past, clean[:, start:end]], dim=1)
        for t in range(end - start):
            y = (weight.to(dtype) * tokens[:, t : t + taps].to(dtype).transpose(1, 2)).sum(dim=2)
            if bias is not None:
                y = y + bias.to(dtype)
            outputs.append(y.masked_fill(~real[:, start + t, None], 0.0)[:, None])
        states.append(tokens[:, end - start :])
    return round_to(torch.cat(outputs, dim=1), x.dtype), torch.cat(states)
