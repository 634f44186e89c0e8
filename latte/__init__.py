"""Latte: linear-time attention as a latent probabilistic model (arXiv 2402.17512)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from latte.autoclasses import register_when_imported

if TYPE_CHECKING:
    from latte.layers import LatteAttention
    from latte.models import (
        LatteConfig,
        LatteForCausalLM,
        LatteForPairClassification,
        LatteForSeq2SeqLM,
        LatteForSequenceClassification,
        LatteModel,
    )
    from latte.ops import (
        LatteState,
        MacchiatoState,
        attention_weights,
        latte_attention,
        linear_attention,
        macchiato_attention,
        rglru,
        short_conv,
        window_attention,
    )

__version__ = "0.1.0"

__all__ = [
    "LatteAttention",
    "LatteConfig",
    "LatteForCausalLM",
    "LatteForPairClassification",
    "LatteForSeq2SeqLM",
    "LatteForSequenceClassification",
    "LatteModel",
    "LatteState",
    "MacchiatoState",
    "attention_weights",
    "latte_attention",
    "linear_attention",
    "macchiato_attention",
    "rglru",
    "short_conv",
    "window_attention",
]

_HOMES = {
    "LatteAttention": "latte.layers",
    "LatteConfig": "latte.models",
    "LatteForCausalLM": "latte.models",
    "LatteForPairClassification": "latte.models",
    "LatteForSeq2SeqLM": "latte.models",
    "LatteForSequenceClassification": "latte.models",
    "LatteModel": "latte.models",
    "LatteState": "latte.ops",
    "MacchiatoState": "latte.ops",
    "attention_weights": "latte.ops",
    "latte_attention": "latte.ops",
    "linear_attention": "latte.ops",
    "macchiato_attention": "latte.ops",
    "rglru": "latte.ops",
    "short_conv": "latte.ops",
    "window_attention": "latte.ops",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its home when it is asked for: `latte --help` need not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


register_when_imported()
