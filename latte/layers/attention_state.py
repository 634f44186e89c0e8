"""What an attention layer gives, and the state that carries its past."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from latte.layers.softmax import SoftmaxRoom, SoftmaxState
from latte.ops import LatteState, MacchiatoState, WindowState

Rotary = tuple[Float[Tensor, "_ T half"], Float[Tensor, "_ T half"]]


class AttentionState(NamedTuple):
    """All that the past contributes to a layer; packed sequences have a row each in place of B."""

    mixer: Tensor | None  # RG-LRU's h [B C] in float32, or the convolution's last inputs [B K-1 C]
    attention: LatteState | MacchiatoState | WindowState | SoftmaxState | SoftmaxRoom
    position: Int[Tensor, " B"]  # real tokens seen, which is the next one's rotary position


torch.serialization.add_safe_globals([AttentionState])


class StepCounters(NamedTuple):
    """What steps in place count besides a row's position."""

    arrivals: Int[Tensor, " B"]  # int32, 0 between calls
    seen: Int[Tensor, ""]  # tokens, real or not
    turn: Int[Tensor, " B"] | None = None  # int32: with it the window is a ring, and its oldest position is there


class AttentionOutput(NamedTuple):
    y: Float[Tensor, "B T C"]
    state: AttentionState
