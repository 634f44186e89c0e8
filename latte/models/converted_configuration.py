"""`LatteConvertedConfig`: the source's own settings, and what conversion has made of its attention."""

import copy
from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig

from latte.layers.checks import check_choice, check_count
from latte.layers.mixers import MIXERS
from latte.models.configuration import STATE_LAYER
from latte.models.families import FAMILIES, find_family


class FromSource:
    """A setting that is the source's: there is one of it, in `source`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, config: "LatteConvertedConfig | None", owner: type | None = None) -> Any:
        if config is None:
            raise AttributeError(self.name)  # so that nobody takes this for a default
        return config.source.get(self.name)

    def __set__(self, config: "LatteConvertedConfig", value: Any) -> None:
        config.source[self.name] = value


@strict
class LatteConvertedConfig(PreTrainedConfig):
    """Settings of a pretrained transformer whose attention, in some layers, is now Latte Macchiato.

    `source` are the settings of the pretrained model, with its `model_type`. In the layers numbered in `layers`,
    attention is over the last `window` tokens and `num_latents` latents per head that `mixer` feeds; in the others it
    is what it was. `initial_window_share` is p(0|t) before training: the part of the window in what a token reads.
    """

    model_type = "latte_converted"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - the base class is not written as a ClassVar either
    has_no_defaults_at_init = True
    causal = True

    source: dict[str, Any] = field(default_factory=dict)
    layers: list[int] | None = None
    window: int = 128
    num_latents: int = 16
    mixer: str = "rglru"
    conv_size: int = 3
    mixer_blocks: int = 16
    initial_window_share: float | int = 0.95
    backend: str = "auto"
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    vocab_size = FromSource()
    hidden_size = FromSource()
    intermediate_size = FromSource()
    num_hidden_layers = FromSource()
    num_attention_heads = FromSource()
    num_key_value_heads = FromSource()
    max_position_embeddings = FromSource()
    initializer_range = FromSource()
    tie_word_embeddings = FromSource()

    def __post_init__(self, **kwargs: Any) -> None:
        if "model_type" not in self.source:
            raise ValueError("source has no model_type; it must be a pretrained model's settings: use latte.convert")
        find_family(self.source_config())
        if self.layers is None:
            self.layers = list(range(self.num_hidden_layers))
        for layer in self.layers:
            if layer not in range(self.num_hidden_layers):
                last = self.num_hidden_layers - 1
                raise ValueError(f"layers has {layer}; the source's layers are numbered from 0 to {last}")
        for name in ("tie_word_embeddings", "vocab_size"):  # what Transformers gives to every class of settings
            if name in kwargs:
                setattr(self, name, kwargs.pop(name))
        kwargs.pop("auto_map", None)  # how to find this class, which is found
        super().__post_init__(**kwargs)
        check_conversion(self.window, self.num_latents, self.mixer, self.initial_window_share)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: saved models carry a file that imports this package, in place of a copy of its code."""

    def source_config(self) -> PreTrainedConfig:
        """The source's settings, as an object of their own."""
        settings = copy.deepcopy(self.source)
        return AutoConfig.for_model(settings.pop("model_type"), **settings)

    @property
    def logits_softcap(self) -> float | None:
        word = FAMILIES[self.source["model_type"]].logits_softcap
        return None if word is None else self.source[word]

    @property
    def num_heads(self) -> int:
        return self.num_attention_heads

    @property
    def layer_types(self) -> list[str]:
        """What kind of cache layer each layer needs: always ours."""
        return [STATE_LAYER] * self.num_hidden_layers

    def validate_layer_type(self) -> None:
        """Every layer is of our own type, which Transformers does not know; there is nothing to check."""


def check_conversion(window: object, num_latents: object, mixer: str, initial_window_share: object) -> None:
    """Raise ValueError for what no source could be converted with."""
    check_count("window", window, " (the token itself counts)")
    check_count("num_latents", num_latents)
    check_choice("mixer", mixer, MIXERS)
    if not isinstance(initial_window_share, int | float) or not 0 < initial_window_share <= 1:
        raise ValueError(f"initial_window_share is {initial_window_share}; it must be above 0 and at most 1")
