"""Rotary positions: scores of rotated queries and keys depend on how far apart they are."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from latte.ops.rotary import apply_rotary

__all__ = ["apply_rotary", "check_rotary", "rotary"]


def rotary(
    positions: Int[Tensor, "B T"], head_dim: int, theta: float = 10_000.0
) -> tuple[Float[Tensor, "B T half"], Float[Tensor, "B T half"]]:
    """cos and sin of position · theta^(−2i / head_dim) for i < head_dim / 2, in float32."""
    check_rotary(head_dim, theta)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.unsqueeze(-1).float() * theta**-exponents
    return angles.cos(), angles.sin()


def check_rotary(head_dim: int, theta: float) -> None:
    if head_dim % 2:
        raise ValueError(
            f"queries and keys are {head_dim} wide; rotary positions turn pairs of channels: make head_dim (or "
            "window_head_dim) even, or set rope_theta=None"
        )
    if not theta > 0:
        raise ValueError(f"rope_theta is {theta}; it must be positive, or None for no rotary positions")
