"""From a source's settings and what was asked for to the settings of the converted model."""

import json
from collections.abc import Collection, Sequence
from typing import Any

from transformers import PreTrainedConfig

from latte.models.converted_configuration import LatteConvertedConfig, check_conversion
from latte.models.families import find_family, own_window

MOST_MIXER_BLOCKS = 16
NOT_THE_MODEL = {  # what Transformers writes besides the architecture, and what is this file's or this copy's alone
    "_model_name_or_path", "_name_or_path", "auto_map", "dtype", "id2label", "label2id", "problem_type",
    "quantization_config", "transformers_version",
}  # fmt: skip


def conversion_config(
    source: PreTrainedConfig,
    *,
    window: int = 128,
    num_latents: int = 16,
    mixer: str = "rglru",
    layers: str | Sequence[int] = "all",
    initial_window_share: float = 0.95,
) -> LatteConvertedConfig:
    """Settings of the converted model; raises ValueError for what cannot be."""
    find_family(source)
    check_conversion(window, num_latents, mixer, initial_window_share)
    chosen = choose_layers(layers, source)
    check_window(window, source, chosen)
    settings = json.loads(source.to_json_string(use_diff=False))
    tokens: Any = {f"{token}_token_id": getattr(source, f"{token}_token_id", None) for token in ("pad", "bos", "eos")}
    return LatteConvertedConfig(
        source={name: value for name, value in settings.items() if name not in NOT_THE_MODEL},
        layers=chosen,
        window=window,
        num_latents=num_latents,
        mixer=mixer,
        mixer_blocks=mixer_blocks(source.hidden_size),
        initial_window_share=initial_window_share,
        dtype=source.dtype,
        **tokens,
    )


def choose_layers(layers: str | Sequence[int], source: PreTrainedConfig) -> list[int]:
    """Numbers of the layers to convert: "all", "global" (those that see all tokens) or a list of numbers from 0."""
    every = range(source.num_hidden_layers)
    if layers == "all":
        return list(every)
    if layers == "global":
        chosen = [layer for layer in every if own_window(source, layer) is None]
        if not chosen:
            raise ValueError('layers is "global", but every layer of the source has a window; use "all" or a list')
        return chosen
    if isinstance(layers, str) or not isinstance(layers, Collection) or not len(layers):
        raise ValueError(f'layers is {layers!r}; it must be "all", "global" or numbers of layers, e.g. [0, 3, 5]')
    for layer in layers:
        if not isinstance(layer, int) or isinstance(layer, bool) or layer not in every:
            raise ValueError(f"layers has {layer!r}; the source's layers are numbered from 0 to {len(every) - 1}")
    return sorted(set(layers))


def check_window(window: int, source: PreTrainedConfig, chosen: Sequence[int]) -> None:
    """A window must not see more than the source has learned to."""
    longest = source.max_position_embeddings
    if window > longest:
        raise ValueError(f"window is {window}, over the source's own context of {longest}; choose a shorter one")
    for layer in chosen:
        own = own_window(source, layer)
        if own is not None and window > own:
            raise ValueError(
                f"window is {window}, over layer {layer}'s own of {own}; choose at most {own}, or convert other layers"
            )


def mixer_blocks(hidden_size: int) -> int:
    """Sixteen blocks of gates, or the next smaller number that divides hidden_size."""
    return next(blocks for blocks in range(MOST_MIXER_BLOCKS, 0, -1) if hidden_size % blocks == 0)
