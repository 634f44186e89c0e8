"""Latte: linear-time attention as a latent probabilistic model (arXiv 2402.17512)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    """Load the ops only when one of them is asked for: `latte --help` need not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from latte import ops

    value = globals()[name] = getattr(ops, name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
