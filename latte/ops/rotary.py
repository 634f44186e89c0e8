"""Rotary positions: scores of rotated queries and keys depend on how far apart they are."""

import torch
from jaxtyping import Float
from torch import Tensor


def apply_rotary(
    x: Float[Tensor, "B T H E"], cos: Float[Tensor, "_ T half"], sin: Float[Tensor, "_ T half"]
) -> Float[Tensor, "B T H E"]:
    """Turn channel pairs (i, i + E/2) of every head by their angles, as in Llama; multiplied in float32 or better.

    cos and sin have a row for each of x's or, with a first axis of 1, one for all.
    """
    check_pairs(cos, x.shape[-1])
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    wide = torch.promote_types(x.dtype, cos.dtype)  # of the parts, so that their gradients are added up in it too
    first, second = x.to(wide).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def check_pairs(angles: Tensor, width: int) -> None:
    """Cosines or sines must be as many as there are pairs of channels in a head."""
    if 2 * angles.shape[-1] != width:
        raise ValueError(
            f"rotary has {angles.shape[-1]} angles for heads of width {width}; "
            f"it must have one for each pair of channels, {width // 2}"
        )
