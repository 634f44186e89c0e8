"""Small models whose latents differ, and a slow way to see what they do."""

from typing import Any

import torch
from torch import Tensor

from latte import LatteConfig, LatteForCausalLM

# Distinct primes: a swapped axis cannot pass.
VOCAB, HEADS, LATENTS, WINDOW, LAYERS = 53, 3, 5, 7, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 30,
    "intermediate_size": 41,
    "num_hidden_layers": LAYERS,
    "num_heads": HEADS,
    "num_latents": LATENTS,
    "mixer_blocks": 5,
    "initializer_range": 0.4,  # far from uniform
}
FORMS: dict[str, dict[str, Any]] = {
    "latte": {"mixer": "conv"},
    "macchiato": {"mixer": "rglru", "window": WINDOW, "num_value_heads": 1, "softcap": 3.0, "scale": 0.7},
    "window": {"mixer": "rglru", "window": WINDOW, "num_latents": None},
    "softmax": {"num_latents": None},
}


def make_model(form: str = "macchiato", kind: Any = LatteForCausalLM, **settings: Any) -> Any:
    torch.manual_seed(0)
    return kind(LatteConfig(**(SIZES | FORMS[form] | settings))).double().eval()


def make_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def slow_logits(model: Any, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Latent query and key logits of every layer, [B T H ·], from the hidden states before it."""
    hidden = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    logits = []
    for x, layer in zip(hidden[:-1], model.model.layers, strict=True):
        mixed = layer.attention_norm(x)
        if layer.attention.mixer is not None:
            mixed = layer.attention.mixer(mixed)
        both = (layer.attention.latent_query(mixed), layer.attention.latent_key(mixed))
        logits.append(tuple(part.unflatten(-1, (HEADS, -1)) for part in both))
    return logits
