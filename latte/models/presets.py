"""Settings of named models: the paper's variants, small ones for laptops, and shapes for timing.

A preset is a plain dictionary of `LatteConfig` words, and a variant is a few words that differ. The paper's Table 1
does not fit its hyper-parameter table; width 768, 12 layers and 128 latents in all give its parameter counts.
"""

from typing import Any

Settings = dict[str, Any]

WINDOW: Settings = {"window": 128}
CONVOLUTION: Settings = {"mixer": "conv", "conv_size": 3}
RECURRENCE: Settings = {"mixer": "rglru", "mixer_blocks": 16}
SOFTMAX: Settings = {"num_latents": None}
PLAIN: Settings = {"norm": "layernorm", "feedforward": "mlp"}  # without the paper's "++"

PAPER: Settings = {
    "vocab_size": 50_257,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_heads": 8,
    "num_latents": 16,
}
TINY: Settings = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_heads": 4,
    "num_latents": 16,
}
SMALL: Settings = {
    "vocab_size": 50_257,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_heads": 8,
    "num_latents": 16,
}
MEDIUM: Settings = {
    "vocab_size": 50_257,
    "hidden_size": 1024,
    "intermediate_size": 3328,
    "num_hidden_layers": 24,
    "num_heads": 8,
    "num_latents": 16,
}
LARGE: Settings = {  # Gemma-2 2B's shape
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_heads": 8,
    "num_value_heads": 4,
    "head_dim": 256,
    "num_latents": 16,
}

PRESETS: dict[str, Settings] = {
    "latte": PAPER | PLAIN,
    "latte++": PAPER,
    "latte-conv++": PAPER | CONVOLUTION,
    "latte-conv-swa++": PAPER | CONVOLUTION | WINDOW,
    "latte-r++": PAPER | RECURRENCE,
    "latte-r-swa++": PAPER | RECURRENCE | WINDOW,
    "transformer++": PAPER | SOFTMAX,
    "r-swa++": PAPER | SOFTMAX | RECURRENCE | WINDOW | {"window_head_dim": 16},
} | {
    f"{form}-{size}": shape | variant
    for size, shape in {"tiny": TINY, "small": SMALL, "400m": MEDIUM, "2.6b": LARGE}.items()
    for form, variant in {
        "latte": RECURRENCE,
        "macchiato": RECURRENCE | WINDOW,
        "transformer": SOFTMAX,
    }.items()
}


def preset_settings(name: str) -> Settings:
    """The settings called `name`, free to be changed."""
    if name not in PRESETS:
        raise ValueError(f"preset is {name!r}; it must be one of {', '.join(map(repr, PRESETS))}")
    return dict(PRESETS[name])
