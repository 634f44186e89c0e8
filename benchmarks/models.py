"""The models that are measured: presets with random weights, and the transformers they are compared with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from latte.layers import LatteAttention
from latte.models import LatteConfig, LatteForCausalLM

Model = Any  # one of Transformers', whose types say little
OURS = "latte"
FLASH, CUDNN = "SDPA FlashAttention", "SDPA cuDNN"
KERNELS = {FLASH: SDPBackend.FLASH_ATTENTION, CUDNN: SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Entry:
    """A model of a table, and whose attention it runs on."""

    name: str
    by: str = OURS
    preset: str = ""  # the name, unless given
    overrides: tuple[tuple[str, Any], ...] = ()

    @property
    def is_ours(self) -> bool:
        return self.by == OURS

    def config(self) -> LatteConfig:
        return LatteConfig.from_preset(self.preset or self.name, **dict(self.overrides))

    def build(self, device: str, dtype: torch.dtype) -> Model:
        """The model with weights from a fixed seed, made where it will run."""
        torch.manual_seed(0)
        with torch.device(device):
            model: Model = LatteForCausalLM(self.config())
        return model.to(dtype)

    @contextmanager
    def kernel(self, device: str) -> Iterator[None]:
        """On a GPU only the attention kernel that the row names; elsewhere PyTorch chooses."""
        if device != "cuda" or self.by not in KERNELS:
            yield
            return
        with sdpa_kernel(KERNELS[self.by]):
            yield


@dataclass(frozen=True)
class OneOperationEntry(Entry):
    """Ours with projections and attention as one operation, which is off by default."""

    def build(self, device: str, dtype: torch.dtype) -> Model:
        model = super().build(device, dtype)
        for module in model.modules():
            if isinstance(module, LatteAttention):
                module.one_operation = True
        return model


@dataclass(frozen=True)
class LlamaEntry(Entry):
    """Transformers' own Llama with the sizes of a preset: a second opinion on the transformer."""

    def build(self, device: str, dtype: torch.dtype) -> Model:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = self.config()
        llama = LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size or 4 * config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_value_heads,
            head_dim=config.head_dim,
            max_position_embeddings=2**20,
            tie_word_embeddings=True,
        )
        llama._attn_implementation = "sdpa"
        torch.manual_seed(0)
        with torch.device(device):
            model: Model = LlamaForCausalLM(llama)
        return model.to(dtype)


def parameters(model: Model) -> int:
    """Their number; tied ones count once."""
    return sum(x.numel() for x in model.parameters())


def random_tokens(model: Model, batch: int, tokens: int, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(1)
    return torch.randint(model.config.vocab_size, (batch, tokens), generator=generator, device=device)
