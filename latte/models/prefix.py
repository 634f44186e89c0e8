"""Prefix caches: the states after a text that many others begin with, as a safetensors file."""

# Settings of either kind have the number of layers, and parts of a state are of the kinds that it names.
# pyright: reportArgumentType=false

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from latte.layers import AttentionState, SoftmaxState
from latte.models.cache import StateLayer, check_cache
from latte.models.configuration import LatteConfig
from latte.models.converted_configuration import LatteConvertedConfig
from latte.ops import LatteState, MacchiatoState, WindowState

Settings = LatteConfig | LatteConvertedConfig
KINDS: dict[str, type] = {kind.__name__: kind for kind in (LatteState, MacchiatoState, WindowState, SoftmaxState)}


def save_cache(cache: Cache, path: str | Path, config: Settings) -> None:
    """Write the states of all layers as safetensors: a prefix that was read once need not be read again."""
    named: dict[str, Tensor] = {}
    kinds: list[str] = []
    for index, layer in enumerate(_state_layers(cache, config)):
        if layer.state is None or (layer.recording is not None and layer.recording.cut):
            raise ValueError("the cache has read nothing, or tokens were taken back since; run the model on it first")
        state = cast(AttentionState, layer.movable_state())
        named.update(_named(state, f"layers.{index}"))
        kinds.append(type(state.attention).__name__)
    metadata = {"model_type": config.model_type, "seen": str(int(cache.get_seq_length())), "shape": _shape(config)}
    metadata["kinds"] = ", ".join(kinds)
    own = {
        name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in named.items()
    }  # masks are shared
    save_file(own, path, metadata=metadata)


def load_cache(path: str | Path, config: Settings, device: str | torch.device = "cpu") -> DynamicCache:
    """The cache that `save_cache` wrote, for a model of the same settings."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            named = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        shape, seen, kinds = metadata["shape"], int(metadata["seen"]), metadata["kinds"].split(", ")
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is no cache that save_cache has written, or a part of one: {error}") from error
    if shape != _shape(config):
        raise ValueError(
            f"{path} is a cache of another model, whose settings are {shape}; this one's are {_shape(config)}"
        )
    cache = DynamicCache(config=config)
    for index, (layer, kind) in enumerate(zip(_state_layers(cache, config), kinds, strict=True)):
        try:
            layer.state = _state(named, f"layers.{index}", KINDS[kind])
        except KeyError as error:
            raise ValueError(f"{path} has no tensor {error}; save the cache again") from error
        layer.seen, layer.is_initialized = seen, True
    return cache


def _state_layers(cache: Cache, config: Settings) -> list[StateLayer]:
    check_cache(cache, config)
    return cache.layers  # pyright: ignore[reportReturnType]


def _shape(config: Settings) -> str:
    words = ["num_hidden_layers", "hidden_size", "num_heads", "num_value_heads", "head_dim", "num_latents", "window"]
    words += ["window_head_dim", "mixer", "conv_size"]
    words += [word for word in ("feature_map", "layers") if getattr(config, word, None) is not None]
    return ", ".join(f"{word}={getattr(config, word)}" for word in words if hasattr(config, word))


def _named(tree: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested named tuples with the path to each."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif tree is not None:
        for field, part in zip(tree._fields, tree, strict=True):
            yield from _named(part, f"{name}.{field}")


def _state(named: dict[str, Tensor], name: str, kind: type) -> AttentionState:
    """The state whose tensors `_named` has listed, of attention of a kind; raises KeyError for a tensor's name."""
    path, fields = f"{name}.attention", list(kind._fields)
    parts: dict[str, Any] = {}
    if kind is MacchiatoState:
        fields.remove("latents")
        parts["latents"] = LatteState(*(named[f"{path}.latents.{field}"] for field in LatteState._fields))
    if kind is SoftmaxState:  # where all positions are real there is no mask
        fields.remove("valid")
        parts["valid"] = named.get(f"{path}.valid")
    attention = kind(**parts, **{field: named[f"{path}.{field}"] for field in fields})
    return AttentionState(named.get(f"{name}.mixer"), attention, named[f"{name}.position"])
