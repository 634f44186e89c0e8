"""The RG-LRU token by token."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops.checks import sequence_bounds
from latte.ops.rounding import round_to


def recur(
    x: Tensor,
    a_gate: Tensor,
    x_gate: Tensor,
    a_param: Tensor,
    *,
    mask: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The recurrence of every sequence in turn, in `dtype`; the output in x's."""
    real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
    bounds = [0, x.shape[1]] if cu_seqlens is None else sequence_bounds(cu_seqlens, x.shape[1])
    if state is None:
        sequences = x.shape[0] if cu_seqlens is None else len(bounds) - 1
        state = x.new_full((sequences, x.shape[2]), -torch.inf)
    hidden = state.to(dtype)

    inputs = [part.to(dtype).masked_fill(~real[..., None], 0.0) for part in (x, a_gate, x_gate)]
    outputs = [inputs[0][:, :0]]
    states = []
    for n, (start, end) in enumerate(pairwise(bounds)):
        h = hidden if cu_seqlens is None else hidden[n : n + 1]
        for t in range(start, end):
            token = real[:, t, None]
            x_t, a_gate_t, x_gate_t = (part[:, t] for part in inputs)
            h = torch.where(token, _step(h, x_t, a_gate_t, x_gate_t, a_param.to(dtype)), h)
            outputs.append(h.masked_fill(~token, 0.0)[:, None])
        states.append(h)
    return round_to(torch.cat(outputs, dim=1), x.dtype), torch.cat(states)


def _step(h: Tensor, x: Tensor, a_gate: Tensor, x_gate: Tensor, a_param: Tensor) -> Tensor:
    """h after one token; before it, h is −inf where there was none."""
    first = h == -torch.inf
    rate = (8.0 * F.softplus(a_param)).clamp(max=1e30)  # finite, so that rate · 0 = 0
    log_a = -rate * torch.sigmoid(a_gate)
    gated = torch.sigmoid(x_gate) * x
    later = torch.exp(log_a) * h.masked_fill(first, 0.0) + _ClippedSqrt.apply(-torch.expm1(2.0 * log_a)) * gated
    return torch.where(first, gated, later)


class _ClippedSqrt(torch.autograd.Function):
    """sqrt(u) with its derivative, 1 / (2 sqrt(u)), clipped to 1000."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        root = torch.sqrt(u)
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (root,) = ctx.saved_tensors
        return gradient / (2.0 * root).clamp(min=1e-3)
