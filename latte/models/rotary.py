"""Rotary positions as Transformers configures them: `rope_parameters`, with any of its ways to longer contexts."""

# Settings that are None when they are given are there when they are read.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalSubscript=false

import copy

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

from latte.models.configuration import LatteConfig


class LatteRotaryEmbedding(nn.Module):
    """cos and sin of position · frequency, in float32, computed once for all layers."""

    inv_freq: Tensor
    original_inv_freq: Tensor

    def __init__(self, config: LatteConfig) -> None:
        super().__init__()
        if config.window_head_dim is not None:  # Transformers knows one width of heads
            config = copy.copy(config)
            config.head_dim = config.window_head_dim
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        make = self.compute_default_rope_parameters
        frequencies, self.attention_scaling = ROPE_INIT_FUNCTIONS.get(self.rope_type, make)(config)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.register_buffer("original_inv_freq", frequencies.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(
        config: LatteConfig, device: object = None, **_: object
    ) -> tuple[Tensor, float]:
        """theta^(−2i / width) for i < width / 2, and no scaling."""
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return (config.rope_parameters["rope_theta"] ** -exponents).to(device), 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.to(x.device, torch.float32)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
