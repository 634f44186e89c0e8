"""Small models of every form with weights that matter, and inputs for them."""

from typing import Any

import torch
from torch import Tensor, nn

from latte import LatteConfig

# Distinct primes where that can be (heads are 2 × 3, rotary widths even): a swapped axis cannot pass.
VOCAB, HIDDEN, HEADS, VALUE_HEADS, WIDTH, LATENTS, WINDOW, SCORE_WIDTH, BLOCKS = 53, 26, 6, 2, 5, 7, 11, 22, 13
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 31,
    "num_hidden_layers": 2,
    "num_heads": HEADS,
    "num_value_heads": VALUE_HEADS,
    "head_dim": WIDTH,
    "num_latents": LATENTS,
    "mixer_blocks": BLOCKS,
}
SCORES = {"window_head_dim": SCORE_WIDTH}
FORMS: dict[str, dict[str, Any]] = {
    "latte": {"mixer": "conv", "norm": "layernorm", "feedforward": "mlp", "bias": True},
    "macchiato": {"mixer": "rglru", "window": WINDOW, **SCORES},
    "full": {"num_latents": None, **SCORES},
}
TIGHT = {"rtol": 0, "atol": 1e-10}


def make_model(kind: type, form: str = "macchiato", **settings: Any) -> Any:
    """A model in float64, for evaluation, whose weights are large enough for every part of it to be seen."""
    torch.manual_seed(0)
    model = kind(LatteConfig(**(SIZES | FORMS[form] | settings))).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("a_param"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def make_ids(batch: int, tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def pad(ids: Tensor, side: str, tokens: int, content: int) -> tuple[Tensor, Tensor]:
    """ids with `tokens` more on one side, and their mask."""
    padding = torch.full((ids.shape[0], tokens), content)
    parts = [padding, ids] if side == "left" else [ids, padding]
    return torch.cat(parts, dim=1), torch.cat([torch.full_like(part, part is ids) for part in parts], dim=1)


def idle_parameters(model: nn.Module, loss: Tensor) -> list[str]:
    """Names of the parameters that the loss does not depend on."""
    model.zero_grad()
    loss.backward()
    return [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of nested tuples, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [] if tree is None else [x for part in tree for x in tensors(part)]
