"""Modules with parameters, on top of the ops: attention layers, what feeds them and what stands around them.

Each maps [B T C] to [B T C] and is usable alone. Those with a past have `stream(x, state, …) -> (y, state)` beside
`forward`.
"""

from latte.layers.attention import LatteAttention
from latte.layers.attention_state import AttentionOutput, AttentionState, StepCounters
from latte.layers.block import Block
from latte.layers.cross import CrossAttention
from latte.layers.feedforward import GLU, MLP, make_feedforward
from latte.layers.mixers import RGLRU, BlockDiagonal, ShortConvolution, make_mixer
from latte.layers.norms import LayerNorm, RMSNorm, make_norm
from latte.layers.positions import count_tokens, token_positions
from latte.layers.softmax import SoftmaxRoom, SoftmaxState

__all__ = [
    "GLU",
    "MLP",
    "RGLRU",
    "AttentionOutput",
    "AttentionState",
    "Block",
    "BlockDiagonal",
    "CrossAttention",
    "LatteAttention",
    "LayerNorm",
    "RMSNorm",
    "ShortConvolution",
    "SoftmaxRoom",
    "SoftmaxState",
    "StepCounters",
    "count_tokens",
    "make_feedforward",
    "make_mixer",
    "make_norm",
    "token_positions",
]
