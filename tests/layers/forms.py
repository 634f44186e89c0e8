"""Layers of every form, inputs for them, and obvious twins: the same sums, written as the equations read."""

from typing import Any

import torch
from torch import Tensor, nn

from latte.layers import RGLRU, AttentionState, LatteAttention, ShortConvolution
from latte.ops import LatteState, attention_weights

# Distinct primes where that can be (heads are 2 × 3, rotary widths even): a swapped axis cannot pass.
B, HIDDEN, HEADS, VALUE_HEADS, WIDTH, LATENTS, WINDOW, SCORE_WIDTH, BLOCKS = 3, 26, 6, 2, 5, 7, 11, 22, 13

LATTE = {"num_latents": LATENTS}
MACCHIATO = {"num_latents": LATENTS, "window": WINDOW, "window_head_dim": SCORE_WIDTH}
SLIDING = {"num_latents": None, "window": WINDOW, "window_head_dim": SCORE_WIDTH}
FULL = {"num_latents": None, "window_head_dim": SCORE_WIDTH}
FORMS: dict[str, dict[str, Any]] = {
    "latte": LATTE,
    "latte conv": LATTE | {"mixer": "conv"},
    "latte rglru": LATTE | {"mixer": "rglru"},
    "linear": LATTE | {"feature_map": "elu+1"},
    "macchiato": MACCHIATO,
    "macchiato conv": MACCHIATO | {"mixer": "conv"},
    "macchiato rglru": MACCHIATO | {"mixer": "rglru", "softcap": 3.0, "scale": 0.3},
    "window": SLIDING | {"softcap": 2.0},
    "window rglru": SLIDING | {"mixer": "rglru"},
    "full": FULL,
    "full capped": FULL | {"softcap": 2.0},
}
MAIN_FORMS = ("latte rglru", "macchiato conv", "window rglru", "full")


def make_layer(form: str, dtype: torch.dtype = torch.float64, **settings: Any) -> LatteAttention:
    torch.manual_seed(0)
    sizes = {"head_dim": WIDTH, "num_value_heads": VALUE_HEADS, "mixer_blocks": BLOCKS, "bias": True}
    layer = LatteAttention(HIDDEN, HEADS, **(sizes | FORMS[form] | settings))
    return randomize(layer).to(dtype)


def randomize(module: nn.Module) -> Any:
    """Biases and norms take part too."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.5 * torch.randn_like(parameter))
    return module


def make_inputs(tokens: int, batch: int = B, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.randn((batch, tokens, HIDDEN), generator=noise, dtype=torch.float64).to(dtype)


def make_mask(kind: str, tokens: int, batch: int = B) -> Tensor | None:
    """Left padding of a different length in each row, one of them all padding; or holes anywhere; or none."""
    if kind == "none":
        return None
    if kind == "left":
        return torch.arange(tokens) >= torch.arange(batch)[:, None] * tokens // max(batch - 1, 1)
    return torch.rand((batch, tokens), generator=torch.Generator().manual_seed(2)) > 0.3


def tensors(state: Any) -> list[Tensor]:
    """All tensors of a state, in order."""
    if isinstance(state, Tensor):
        return [state]
    return [] if state is None else [x for part in state for x in tensors(part)]


def assert_states_close(actual: AttentionState, expected: AttentionState, **tolerance: float) -> None:
    assert type(actual.attention) is type(expected.attention)
    for x, other in zip(tensors(actual), tensors(expected), strict=True):
        torch.testing.assert_close(x, other, **tolerance)


def twin(layer: LatteAttention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """The layer's y by way of its matrix p(s|t), for whole sequences."""
    source = x if layer.mixer is None else mixer_twin(layer.mixer, x, mask)
    parts: dict[str, Tensor] = {}
    if layer.num_latents is not None:
        parts |= {"q": split(layer.latent_query(source), HEADS), "k": split(layer.latent_key(source), HEADS)}
        source = x
    elif layer.mixer is not None:
        mean = source.square().mean(dim=-1, keepdim=True)
        source = source / torch.sqrt(mean + layer.mixer_norm.eps) * layer.mixer_norm.weight
    if layer.has_scores:
        real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        place = real.cumsum(dim=1) - 1
        parts["window_q"] = turn(split(layer.query(source), HEADS), place, layer.rope_theta)
        parts["window_k"] = turn(split(layer.key(source), VALUE_HEADS), place, layer.rope_theta)
    window = max(x.shape[1], 1) if layer.window is None else layer.window
    a = attention_weights(
        **parts,
        window=window,
        scale=layer.scale,
        softcap=layer.softcap,
        causal=layer.causal,
        mask=mask,
        feature_map=layer.feature_map,
    )
    v = split(layer.value(x), VALUE_HEADS).repeat_interleave(HEADS // VALUE_HEADS, dim=2)
    return layer.output(torch.einsum("bhts,bshd->bthd", a, v).flatten(2))


def split(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:2], heads, -1)


def turn(x: Tensor, place: Tensor, theta: float | None) -> Tensor:
    """Rotary positions as complex numbers: channel i and i + E/2 are one of them, times exp(i · place · θ^(−2i/E))."""
    if theta is None:
        return x
    half = x.shape[-1] // 2
    speed = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = place[..., None, None] * speed
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], dim=-1)


def mixer_twin(mixer: nn.Module, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """A mixer row by row and token by token."""
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    one = conv_twin if isinstance(mixer, ShortConvolution) else rglru_twin
    return torch.stack([one(mixer, row, keep) for row, keep in zip(x, real, strict=True)])


def conv_twin(mixer: ShortConvolution, x: Tensor, real: Tensor) -> Tensor:
    size = mixer.size
    after = 0 if mixer.causal else size // 2
    x = torch.where(real[:, None], x, 0.0)
    rows = []
    for t in range(len(x)):
        y = torch.zeros_like(x[0]) if mixer.bias is None else mixer.bias
        for j in range(size):
            s = t - size + 1 + j + after
            if 0 <= s < len(x):
                y = y + mixer.weight[:, j] * x[s]
        rows.append(y if real[t] else torch.zeros_like(y))
    return torch.stack(rows)


def rglru_twin(mixer: RGLRU, x: Tensor, real: Tensor) -> Tensor:
    if mixer.causal:
        return scan_twin(mixer, x, real)
    return (scan_twin(mixer, x, real) + scan_twin(mixer, x.flip(0), real.flip(0)).flip(0)) / 2


def scan_twin(mixer: RGLRU, x: Tensor, real: Tensor) -> Tensor:
    def gate(layer: nn.Module) -> Tensor:
        return torch.sigmoid(x @ torch.block_diag(*layer.weight) + layer.bias)

    a = torch.exp(-8 * nn.functional.softplus(mixer.a_param) * gate(mixer.recurrence_gate))
    added = gate(mixer.input_gate) * x
    rows, h = [], None
    for t in range(len(x)):
        if real[t]:
            h = added[t] if h is None else a[t] * h + torch.sqrt(1 - a[t] ** 2) * added[t]
        rows.append(h if real[t] else torch.zeros_like(x[0]))
    return torch.stack(rows)


def summary_twin(k: Tensor, v: Tensor, mask: Tensor) -> LatteState:
    """(Z, M) of a source, from softmax over its tokens."""
    k = k.masked_fill(~mask[..., None, None], -torch.inf)
    v = v.repeat_interleave(k.shape[2] // v.shape[2], dim=2)
    return LatteState(k.logsumexp(dim=1), torch.einsum("bshl,bshd->bhld", k.softmax(dim=1), v))
