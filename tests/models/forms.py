"""Small models of every form, tokens for them, and what is compared."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from latte.models import LatteConfig, LatteForCausalLM
from latte.models.cache import tensors

VOCABULARY, LATENTS, WINDOW = 101, 7, 11
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 30,
    "intermediate_size": 41,
    "num_hidden_layers": 2,
    "num_heads": 3,
    "num_latents": LATENTS,
    "mixer_blocks": 5,
    "initializer_range": 0.3,  # far from uniform, and
    "tie_word_embeddings": False,  # not the same token again: chosen tokens differ
}
FORMS: dict[str, dict[str, Any]] = {
    "latte": {"norm": "layernorm", "feedforward": "mlp"},
    "latte conv": {"mixer": "conv"},
    "latte rglru": {"mixer": "rglru"},
    "linear": {"mixer": "conv", "feature_map": "elu+1"},
    "macchiato": {"mixer": "rglru", "window": WINDOW},
    "macchiato conv": {"mixer": "conv", "window": WINDOW, "num_value_heads": 1, "logits_softcap": 5.0},
    "window": {"mixer": "rglru", "window": WINDOW, "num_latents": None, "window_head_dim": 4},
    "softmax": {"num_latents": None},
}
MAIN_FORMS = ("latte", "latte rglru", "macchiato", "softmax")  # a pure one, recurrent ones, and the one that grows
STATE_FORMS = ("latte", "latte conv", "macchiato")  # whose state does not grow


def make_config(form: str, **settings: Any) -> LatteConfig:
    return LatteConfig(**(SIZES | FORMS[form] | settings))


def make_model(form: str, seed: int = 0, **settings: Any) -> LatteForCausalLM:
    torch.manual_seed(seed)
    return LatteForCausalLM(make_config(form, **settings)).eval()


def make_tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def padded(tokens: Tensor, lengths: list[int], filler: int = 0) -> tuple[Tensor, Tensor]:
    """Rows whose last `lengths` tokens are real, and the mask that says so."""
    place = torch.arange(tokens.shape[1]) - tokens.shape[1]
    mask = place >= -torch.tensor(lengths)[:, None]
    return torch.where(mask, tokens, filler), mask.long()


def greedy(model: LatteForCausalLM, tokens: Tensor, count: int = 9, **options: Any) -> Tensor:
    """The tokens that `generate` adds; none of them ends it, or is taken for padding."""
    options.setdefault("attention_mask", torch.ones_like(tokens))
    output = model.generate(tokens, max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0, **options)
    return output[:, tokens.shape[1] :]


def assert_same_cache(actual: Cache, expected: Cache, atol: float = 1e-5) -> None:
    """Both have read as much, and hold the same."""
    assert int(actual.get_seq_length()) == int(expected.get_seq_length())
    for left, right in zip(actual.layers, expected.layers, strict=True):
        for a, b in zip(tensors(left.movable_state()), tensors(right.movable_state()), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=atol)
