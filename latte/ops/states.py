"""What the operations return: outputs and the states that carry the past.

Shapes throughout the package: B batch, T tokens, H heads, Hv value heads (H is a multiple of Hv), L latents
per head, D value width, E window query/key width, W recurrent width, K convolution taps, N packed sequences (and
N + 1 bounds); P = window − 1 kept positions; L + 1 choices of Macchiato, the window and its latents.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class LatteState(NamedTuple):
    """All that the past contributes to the latents: bounded weighted means, one per latent."""

    log_norm: Float[Tensor, "B H L"]  # Z = log Σ exp(k_s), float32; -inf where nothing was seen
    mean: Float[Tensor, "B H L D"]  # M = Σ exp(k_s − Z) v_s, float32; 0 where nothing was seen


class WindowState(NamedTuple):
    """The last window − 1 positions; those before the first token, and masked ones, are not valid."""

    keys: Float[Tensor, "B P Hv E"]
    values: Float[Tensor, "B P Hv D"]
    valid: Bool[Tensor, "B P"]


class MacchiatoState(NamedTuple):
    """The latents' state and the last window − 1 positions."""

    latents: LatteState
    keys: Float[Tensor, "B P Hv E"]
    values: Float[Tensor, "B P Hv D"]
    valid: Bool[Tensor, "B P"]


torch.serialization.add_safe_globals([LatteState, WindowState, MacchiatoState])  # for torch.load as it is by default


class LatteOutput(NamedTuple):
    y: Float[Tensor, "B T H D"]
    state: LatteState


class LinearOutput(NamedTuple):
    y: Float[Tensor, "B T H D"]
    state: LatteState


class WindowOutput(NamedTuple):
    y: Float[Tensor, "B T H D"]
    state: WindowState


class MacchiatoOutput(NamedTuple):
    y: Float[Tensor, "B T H D"]
    state: MacchiatoState


class RGLRUOutput(NamedTuple):
    y: Float[Tensor, "B T W"]
    state: Float[Tensor, "B W"]  # h, float32; -inf where nothing was seen


class ShortConvOutput(NamedTuple):
    y: Float[Tensor, "B T W"]
    state: Float[Tensor, "B K-1 W"]  # the last K − 1 inputs


def accumulation_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any input has it, else float32: what sums and states are kept in."""
    wide = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def merge(first: LatteState, second: LatteState) -> LatteState:
    """State of two adjacent pieces from the states of each: associative, with (−inf, 0) as the empty piece."""
    peak = torch.maximum(first.log_norm, second.log_norm).detach()
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    a, b = torch.exp(first.log_norm - peak), torch.exp(second.log_norm - peak)
    total = a + b
    seen = total > 0
    safe = torch.where(seen, total, 1.0)
    mean = (a / safe).unsqueeze(-1) * first.mean + (b / safe).unsqueeze(-1) * second.mean
    return LatteState(torch.where(seen, peak + torch.log(safe), -torch.inf), mean)


def empty_latte_state(batch: int, heads: int, latents: int, width: int, like: Tensor, dtype: torch.dtype) -> LatteState:
    """The state before the first token."""
    return LatteState(
        like.new_full((batch, heads, latents), -torch.inf, dtype=dtype),
        like.new_zeros((batch, heads, latents, width), dtype=dtype),
    )
