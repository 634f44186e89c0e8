"""Pure functions on tensors: the attention forms, the mixers that feed them, and their states.

Every operation takes `backend="auto"`: Triton kernels on CUDA, chunked PyTorch elsewhere; "reference" is the token by
token oracle. Each takes and returns an explicit state, so a sequence may be cut anywhere.
"""

from latte.ops.attention import latte_attention, linear_attention, macchiato_attention, window_attention
from latte.ops.convolution import short_conv
from latte.ops.cross_entropy import linear_cross_entropy
from latte.ops.recurrence import rglru
from latte.ops.states import (
    LatteOutput,
    LatteState,
    LinearOutput,
    MacchiatoOutput,
    MacchiatoState,
    RGLRUOutput,
    ShortConvOutput,
    WindowOutput,
    WindowState,
)
from latte.ops.weights import attention_weights

__all__ = [
    "LatteOutput",
    "LatteState",
    "LinearOutput",
    "MacchiatoOutput",
    "MacchiatoState",
    "RGLRUOutput",
    "ShortConvOutput",
    "WindowOutput",
    "WindowState",
    "attention_weights",
    "latte_attention",
    "linear_attention",
    "linear_cross_entropy",
    "macchiato_attention",
    "rglru",
    "short_conv",
    "window_attention",
]
