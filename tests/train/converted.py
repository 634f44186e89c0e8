"""Converted models that are as small as can be, for the task of counting."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from latte.convert import convert
from latte.models import LatteConvertedForCausalLM
from latte.train import RunSettings
from tests.train import tiny

SIZES = {
    "vocab_size": 13, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


def make_source(seed: int = 0, **sizes: Any) -> LlamaForCausalLM:
    """Weights so large that attention is far from even."""
    torch.manual_seed(seed)
    source = LlamaForCausalLM(LlamaConfig(**(SIZES | sizes)))
    with torch.no_grad():
        for weight in source.parameters():
            weight.add_(torch.randn_like(weight) * 0.4)
    return source.eval()


def make_converted(seed: int = 0, **options: Any) -> LatteConvertedForCausalLM:
    source = make_source(seed)
    torch.manual_seed(seed + 1)
    return convert(source, **({"window": 3, "num_latents": 4, "initial_window_share": 0.5} | options))


def save(folder: Path, **options: Any) -> Path:
    make_converted(**options).save_pretrained(folder)
    return folder


def settings(output: Path, model: Path, **given: Any) -> RunSettings:
    return replace(tiny.settings(output, **({"trainable": "latents"} | given)), model=model, words={}, preset=None)


def learning(model: nn.Module) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}
