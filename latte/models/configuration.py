"""`LatteConfig`: every variant of the model as settings of one class."""

import copy
import math
from dataclasses import field, fields
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from latte.layers.attention import FEATURE_MAPS
from latte.layers.checks import check_choice, check_count
from latte.layers.feedforward import ACTIVATIONS, FEEDFORWARDS
from latte.layers.mixers import MIXERS
from latte.layers.norms import NORMS
from latte.layers.projections import head_width, value_heads
from latte.models.presets import preset_settings
from latte.ops.checks import check_scores, check_softcap

POSITIONS = ("none", "learned", "sinusoidal")
POOLINGS = ("mean", "last", "cls")
INPUT_KINDS = ("tokens", "pixels", "continuous")
STATE_LAYER = "latte"  # the layer type that stands for our cache layers
NO_LIMIT = 2**20  # tokens, where there is none and Transformers wants a number


@strict
class LatteConfig(PreTrainedConfig):
    """Settings of a Latte model.

    `num_latents` (per head) and `window` choose the attention: both set are Latte Macchiato, latents alone Latte, a
    window alone sliding-window attention, and neither full softmax attention. With a `feature_map` the latents are the
    features of linear attention. `mixer` ("none", "conv", "rglru") feeds
    the latents' logits. The rest of the words mean what they mean in `latte.layers`; `num_attention_heads`,
    `num_key_value_heads` and `hidden_act` are other names of `num_heads`, `num_value_heads` and `activation`.

    `positions` ("none", "learned", "sinusoidal") are added to the embeddings; queries and keys of softmax attention
    have rotary positions besides, as `rope_parameters` says. `max_position_embeddings` is the number of learned ones,
    and no limit otherwise. `logits_softcap` bounds the output's logits, `softcap` the window's scores.

    Models are causal, but for classifiers, unless `causal` says otherwise. Classifiers have `pooling` ("mean", "last",
    "cls") and `input_kind` ("tokens", "pixels", "continuous"); `input_size` is the number of a pixel's intensities, or
    of channels. An encoder-decoder has `num_encoder_layers` beside the decoder's `num_hidden_layers`, and its cross
    attention `num_cross_latents` per head.
    """

    model_type = "latte"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - the base class is not written as a ClassVar either
    attribute_map = {  # noqa: RUF012
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_value_heads",
        "hidden_act": "activation",
    }
    base_model_pp_plan = {  # noqa: RUF012
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 50_257
    hidden_size: int = 768
    intermediate_size: int | None = None  # four times hidden_size
    num_hidden_layers: int = 12
    num_heads: int = 8
    num_value_heads: int | None = None  # as many as num_heads
    head_dim: int | None = None  # hidden_size / num_heads
    num_latents: int | None = 16
    window: int | None = None
    window_head_dim: int | None = None  # as wide as head_dim
    mixer: str = "none"
    conv_size: int = 3
    mixer_blocks: int = 16
    feature_map: str | None = None
    causal: bool | None = None  # True, but False in a classifier
    bias: bool = False
    scale: float | int | None = None
    softcap: float | int | None = None
    norm: str = "rmsnorm"
    norm_eps: float = 1e-6
    feedforward: str = "glu"
    activation: str | None = None  # "silu" in a glu, "gelu" in an mlp
    rope_parameters: dict[str, Any] | None = field(default_factory=lambda: None)  # where there are scores
    positions: str = "none"
    max_position_embeddings: int | None = None
    logits_softcap: float | int | None = None
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    backend: str = "auto"
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pooling: str = "mean"
    input_kind: str = "tokens"
    input_size: int | None = None  # 256 intensities of a pixel
    num_encoder_layers: int | None = None  # as many as num_hidden_layers
    num_cross_latents: int | None = None  # as many as num_latents
    decoder_start_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for alias, name in self.attribute_map.items():  # before anything is derived from them
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))
        self._causal_is_chosen = self.causal is not None
        self.causal = True if self.causal is None else self.causal
        if self.input_kind == "pixels":
            self.vocab_size = self.input_size = 256 if self.input_size is None else self.input_size
        self.validate_architecture()
        if self.max_position_embeddings is None:
            self.max_position_embeddings = NO_LIMIT
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        self.head_dim = head_width(self.hidden_size, self.num_heads, self.head_dim)
        self.num_value_heads = value_heads(self.num_heads, self.num_value_heads)
        kwargs.pop("auto_map", None)  # how to find this class, which is found
        if "num_labels" in kwargs:
            check_count("num_labels", kwargs["num_labels"])
        super().__post_init__(**kwargs)
        if not self.has_scores:  # by which Transformers knows a model without rotary positions
            del self.rope_parameters
        self.base_model_tp_plan = self.tensor_parallel_plan()  # pyright: ignore[reportAttributeAccessIssue]

    def __getattr__(self, name: str) -> Any:
        if name == "rope_parameters" and self.has_scores:  # the window came later: `from_pretrained(…, window=64)`
            return {"rope_type": "default", "rope_theta": self.default_theta}
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "LatteConfig":
        """The settings called `name` in `latte.models.presets`, with some of them replaced."""
        words = {"num_labels", *cls.attribute_map, *(field.name for field in fields(cls))}
        if unknown := set(overrides) - words:
            raise ValueError(f"{', '.join(sorted(unknown))}: no such setting; there are {', '.join(sorted(words))}")
        return cls(**(preset_settings(name) | overrides))

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: saved models carry a file that imports this package, in place of a copy of its code."""

    def tensor_parallel_plan(self, ranks: int = 1) -> dict[str, str]:
        """What each of `ranks` has of a model: its share of the heads, and of feed-forward and embeddings.

        Mixers see all channels, so that every rank has them whole. Where heads cannot be dealt out evenly, projections
        are split anyhow, and their outputs gathered.
        """
        whole_heads = not (self.num_heads % ranks or value_heads(self.num_heads, self.num_value_heads) % ranks)
        projections = ["value"]
        projections += ["query", "key"] if self.has_scores else []
        projections += ["latent_query", "latent_key"] if self.num_latents is not None else []
        inner, outer = ("colwise", "rowwise") if whole_heads else 2 * ("colwise_gather_output",)
        plan = {"embed_tokens": "embedding_rowwise", "layers.*.attention.output": outer}
        plan |= {f"layers.*.attention.{name}": inner for name in projections}
        if self.feedforward == "glu":
            plan["layers.*.feedforward.gate"] = "colwise"
        return plan | {"layers.*.feedforward.up": "colwise", "layers.*.feedforward.down": "rowwise"}

    def unless_chosen(self, *, causal: bool) -> "LatteConfig":
        """A copy whose `causal` is what these settings were made with, or else as given here."""
        config = copy.deepcopy(self)
        config.causal = self.causal if self._causal_is_chosen else causal
        config._causal_is_chosen = True
        return config

    def _remove_keys_not_serialized(self, d: dict[str, Any]) -> None:
        super()._remove_keys_not_serialized(d)
        d.pop("_causal_is_chosen", None)

    @property
    def layer_types(self) -> list[str]:
        """What kind of cache layer each layer needs: always ours."""
        return [STATE_LAYER] * self.num_hidden_layers

    @property
    def has_scores(self) -> bool:
        """Whether attention is, in part or all, by scores of queries and keys: those have rotary positions."""
        return self.num_latents is None or self.window is not None

    def validate_layer_type(self) -> None:
        """Every layer is of our own type, which Transformers does not know; there is nothing to check."""

    def validate_rope(self) -> None:
        """Check `rope_parameters` where there is something to turn, and its width is the one Transformers looks at."""
        if self.has_scores and self.window_head_dim is None:
            super().validate_rope()

    def validate_architecture(self) -> None:
        """Raise ValueError for settings that make no model."""
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads"):
            check_count(name, getattr(self, name))
        optional = ("intermediate_size", "num_latents", "window", "window_head_dim", "input_size")
        for name in (*optional, "num_encoder_layers", "num_cross_latents", "max_position_embeddings"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), ", or None")
        check_choice("mixer", self.mixer, MIXERS)
        if self.feature_map is not None:
            check_choice("feature_map", self.feature_map, FEATURE_MAPS)
        check_choice("norm", self.norm, NORMS)
        check_choice("feedforward", self.feedforward, FEEDFORWARDS)
        check_choice("positions", self.positions, POSITIONS)
        check_choice("pooling", self.pooling, POOLINGS)
        self._check_inputs()
        self._check_tokens()
        if self.activation is not None:
            check_choice("activation", self.activation, ACTIVATIONS)
        if self.positions == "learned" and self.max_position_embeddings is None:
            raise ValueError('positions is "learned" and max_position_embeddings None; it is the number of them')
        if self.positions == "sinusoidal" and self.hidden_size % 2:
            raise ValueError(f'positions is "sinusoidal" and hidden_size {self.hidden_size}; make it even')
        check_scores(self.scale, self.softcap)
        if not 0 < self.norm_eps < math.inf:
            raise ValueError(f"norm_eps is {self.norm_eps}; it must be positive and finite")
        if not 0 <= self.initializer_range < math.inf:
            raise ValueError(f"initializer_range is {self.initializer_range}; it must be finite, and not negative")
        check_softcap("logits_softcap", self.logits_softcap)
        self._check_rope()

    def _check_inputs(self) -> None:
        check_choice("input_kind", self.input_kind, INPUT_KINDS)
        if self.input_kind == "continuous" and self.input_size is None:
            raise ValueError('input_size is None and input_kind "continuous"; say how many channels the input has')
        if self.input_kind == "tokens" and self.input_size is not None:
            raise ValueError(
                f'input_size is {self.input_size} and input_kind "tokens", of which there are vocab_size; leave it None'
            )

    def _check_tokens(self) -> None:
        """Those that are looked up among the embeddings."""
        for name in ("pad_token_id", "decoder_start_token_id"):
            token = getattr(self, name)
            if token is not None and not 0 <= token < self.vocab_size:
                raise ValueError(f"{name} is {token}; it must be 0 to {self.vocab_size - 1}, below vocab_size, or None")

    def _check_rope(self) -> None:
        given = getattr(self, "rope_parameters", None) or {}
        kind = given.get("rope_type", "default")
        if not self.has_scores and kind != "default":
            raise ValueError(
                f"rope_type is {kind!r} and latents have no rotary positions; set window, or leave rope_parameters out"
            )
        check_choice("rope_type", kind, dict.fromkeys(["default", *ROPE_INIT_FUNCTIONS]))
        share = given.get("partial_rotary_factor") or 1.0
        if self.has_scores and share != 1.0:
            raise ValueError(f"partial_rotary_factor is {share}; it must be 1: rotary positions turn all channels")
        theta = given.get("rope_theta", self.default_theta)
        if self.has_scores and not (isinstance(theta, (int, float)) and 0 < theta < math.inf):
            raise ValueError(f"rope_theta is {theta!r}; it must be a positive number")
        width = self.window_head_dim or head_width(self.hidden_size, self.num_heads, self.head_dim)
        if self.has_scores and width % 2:
            raise ValueError(
                f"queries and keys are {width} wide and rotary positions turn pairs of channels; make head_dim, or "
                "window_head_dim, even"
            )
