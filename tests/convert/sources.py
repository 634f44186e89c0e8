"""Small pretrained models, of random weights, of every family."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from latte.convert import Settings
from latte.models import LatteConvertedForCausalLM

VOCABULARY, LATENTS = 101, 5
SETTINGS = Settings(window=7, num_latents=LATENTS)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
LOCAL = 29  # the sources' own window, in layers that have one
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 42,
    "intermediate_size": 53,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {"head_dim": 10, "sliding_window": LOCAL, "query_pre_attn_scalar": 17, "layer_types": MIXED}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": GEMMA | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    "gemma3_text": GEMMA | {"final_logit_softcapping": 3.0},
    "llama": {"head_dim": 14, "rope_parameters": STRETCHED, "attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 8, "sliding_window": LOCAL},
    "qwen2": {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 10, "use_sliding_window": True, "sliding_window": LOCAL, "layer_types": MIXED},
}
WITH_GLOBAL = [family for family in FAMILIES if family != "mistral"]  # some of whose layers see all tokens


def make_source(family: str, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A model of a family, with norms and biases that are not 0 or 1, and attention that is far from even."""
    config = AutoConfig.for_model(family, **(SIZES | FAMILIES[family] | settings))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * (0.3 if weight.ndim == 1 else 0.2))
    return model


def make_tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def disturb_latents(model: torch.nn.Module, seed: int = 1) -> None:
    """Give the new weights values as after training: choices differ by token."""
    from latte.convert import new_parameters

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in new_parameters(model).items():
            if "a_param" not in name:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.3)


def save_source(folder: Path, family: str = "gemma3_text", **settings) -> Path:
    """A source with all that may stand beside its weights."""
    model = make_source(family)
    model.generation_config.temperature, model.generation_config.do_sample = 0.7, True
    model.save_pretrained(folder, **settings)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w2")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    (folder / "LICENSE").write_text("free")
    return folder


def load(folder: Path) -> LatteConvertedForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder)
