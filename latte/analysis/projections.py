"""What a model's attention layers were made of, for one text of any length, read piece by piece."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from latte.analysis.finite import not_finite_because
from latte.analysis.usage import by_head, latent_layers
from latte.layers import CrossAttention, LatteAttention
from latte.layers.rotary import apply_rotary, rotary

CHUNK = 4096
"""Tokens read at once, unless another number is given: memory is that of a piece."""


class Projected(NamedTuple):
    """What one layer makes of T tokens; None where it has no such part. S is L, or L + 1 with a window."""

    latent_query: Tensor | None  # [T H S] logits of p(l|t), the window first
    latent_key: Tensor | None  # [T H L] logits of p(s|l,t)
    query: Tensor | None  # [T H E] softmax queries and keys, turned by their positions
    key: Tensor | None  # [T Hv E]


@dataclass(frozen=True)
class LayerForm:
    """The settings by which a layer's projections become attention."""

    name: str
    num_heads: int
    num_latents: int | None
    window: int | None
    causal: bool = True
    scale: float | None = None
    softcap: float | None = None
    key_width: int = 0  # numbers in a token's softmax keys, all heads together

    @property
    def num_states(self) -> int:
        """Latents, and one more for the window; 0 for softmax attention."""
        return 0 if self.num_latents is None else self.num_latents + (self.window is not None)

    @classmethod
    def of(cls, name: str, layer: Any) -> Self:
        scale, softcap = (getattr(layer, word, None) for word in ("scale", "softcap"))
        width = getattr(layer, "window_head_dim", 0) * getattr(layer, "num_value_heads", 0)
        causal = getattr(layer, "causal", True)
        return cls(name, layer.num_heads, layer.num_latents, layer.window, causal, scale, softcap, width)


class Piece(NamedTuple):
    """Some of a text's tokens, from `start` on, as every layer projects them."""

    start: int
    layers: dict[str, Projected]


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """A model's self-attention layers by name, those without latents too."""
    with_latents = latent_layers(model)
    return {
        name: module
        for name, module in model.named_modules()
        if (name in with_latents and not isinstance(module, CrossAttention))
        or (isinstance(module, LatteAttention) and module.feature_map is None)
    }


def layer_forms(model: nn.Module) -> list[LayerForm]:
    """The settings of all self-attention layers; raises ValueError where there is none that can be looked into."""
    layers = attention_layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no attention layer of Latte, neither its own nor a converted one; there is "
            "nothing to inspect. Choose a Latte model, not one of linear attention, or convert this one first"
        )
    return [LayerForm.of(name, layer) for name, layer in layers.items()]


@torch.no_grad()
def read_pieces(
    model: nn.Module, tokens: Tensor, chunk: int = CHUNK, progress: Callable[[int, int], None] | None = None
) -> Iterator[Piece]:
    """The projections of a text's tokens [T], `chunk` at a time: what is before a piece is in the model's cache.

    A model that reads both ways is given the whole text at once.
    """
    if tokens.ndim != 1 or not len(tokens):
        raise ValueError(f"tokens have shape {list(tokens.shape)}; they must be those of one text, at least one")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1")
    causal = all(form.causal for form in layer_forms(model))
    core: Any = getattr(model, "base_model", model)
    _check_reads_text(model, core)
    read = _reader(model, core)
    cache, total = None, len(tokens)
    chunk = chunk if causal else total
    with _Recorder(model) as recorder:
        for start in range(0, total, chunk):
            part = tokens[None, start : start + chunk]
            output = read(input_ids=part, past_key_values=cache, use_cache=True) if causal else read(input_ids=part)
            cache = output.past_key_values if causal else None
            piece = Piece(start, recorder.take(start))
            _check_finite(model, piece)
            yield piece
            if progress is not None:
                progress(min(start + chunk, total), total)


def _reader(model: Any, core: Any) -> Callable[..., Any]:
    """The model without its head, whose logits nobody needs here.

    Of a model in shards (FSDP2) every call begins at the model itself, which gathers what lies around its layers.
    """
    if core is model or not (dist.is_available() and dist.is_initialized()):
        return core
    from torch.distributed.fsdp import register_fsdp_forward_method

    model._read = core.__call__
    register_fsdp_forward_method(model, "_read")  # does nothing to a model that is not in shards
    return model.__dict__.pop("_read")


def _check_reads_text(model: Any, core: Any) -> None:
    """Raise ValueError for a model that is given more than a text's tokens, or something else."""
    name = type(model).__name__
    meter = "UsageMeter measures it while it reads what it is made for"
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(f"{name} reads a source and a target; give its encoder, model.get_encoder(), or: {meter}")
    embeds = signature(core.forward).parameters.get("inputs_embeds")
    if embeds is not None and embeds.default is Parameter.empty:
        raise ValueError(f"{name} does not read tokens; {meter}")
    if isinstance(getattr(core, "embed_tokens", None), nn.Linear):
        raise ValueError(f'{name} reads no tokens: its input_kind is "continuous"; {meter}')
    if hasattr(model, "class_token"):
        raise ValueError(
            f'{name} has pooling "cls" and puts a token of its own before the text, to which others attend; {meter}, '
            "and model.base_model can be given, which reads without that token"
        )


def _check_finite(model: nn.Module, piece: Piece) -> None:
    """Raise ValueError for numbers of which no measure can be taken."""
    for name, projected in piece.layers.items():
        for word, x in zip(Projected._fields, projected, strict=True):
            if x is not None and not (fine := x.isfinite().flatten(1).all(dim=1)).all():
                token = piece.start + int(fine.logical_not().nonzero()[0])
                raise ValueError(
                    f"{name}: its {word} of token {token} is not finite, so that there is nothing to measure: "
                    f"{not_finite_because(model)}"
                )


class _Recorder:
    """While active, keeps the outputs of all layers' projections until they are taken."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.layers = model, attention_layers(model)
        self.outputs: dict[str, dict[str, Tensor]] = {name: {} for name in self.layers}
        self.rotary: dict[str, tuple[Tensor, Tensor]] = {}
        self.hooks = ExitStack()

    def __enter__(self) -> Self:
        for name, layer in self.layers.items():
            for word, projection in projections(layer).items():
                self._until_exit(projection.register_forward_hook(partial(self._keep, name, word)))
            for module in (self.model.get_submodule(name.rpartition(".")[0]), layer):
                self._until_exit(module.register_forward_pre_hook(partial(self._keep_rotary, name), with_kwargs=True))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.hooks.close()

    def take(self, start: int) -> dict[str, Projected]:
        """The projections of the call before, whose first token is number `start`, and nothing is kept."""
        taken = {name: self._projected(name, layer, start) for name, layer in self.layers.items()}
        for outputs in self.outputs.values():
            outputs.clear()
        return taken

    def _until_exit(self, handle: Any) -> None:
        self.hooks.callback(handle.remove)

    def _keep(self, name: str, word: str, _: nn.Module, __: Any, output: Tensor) -> None:
        self.outputs[name][word] = output.detach()[0]

    def _keep_rotary(self, name: str, _: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("rotary") is not None:
            self.rotary[name] = kwargs["rotary"]
        elif kwargs.get("position_embeddings") is not None:  # Transformers' own: each angle twice
            cos, sin = kwargs["position_embeddings"]
            self.rotary[name] = cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]

    def _projected(self, name: str, layer: Any, start: int) -> Projected:
        outputs = self.outputs[name]
        shapes = head_shapes(layer, LayerForm.of(name, layer))
        # norms of queries and keys have told heads apart already
        split = {word: by_head(x.flatten(1), *shapes[word]) for word, x in outputs.items()}
        if "query" in split and layer.rope_theta is not None:
            turn = self.rotary.get(name)
            if turn is None:
                place = start + torch.arange(len(split["query"]), device=split["query"].device)
                turn = rotary(place[None], split["query"].shape[-1], layer.rope_theta)
            split |= {word: apply_rotary(split[word][None], *turn)[0] for word in ("query", "key")}
        return Projected(*(split.get(word) for word in Projected._fields))


def head_shapes(layer: Any, form: LayerForm) -> dict[str, tuple[int, int]]:
    """How many heads, and how wide, a layer's projections have, by the words of `Projected`."""
    heads, width = form.num_heads, getattr(layer, "window_head_dim", 0)
    keys = getattr(layer, "num_value_heads", heads)
    return {
        "latent_query": (heads, form.num_states), "latent_key": (heads, form.num_latents or 0),
        "query": (heads, width), "key": (keys, width),
    }  # fmt: skip


def projections(layer: nn.Module) -> dict[str, nn.Module]:
    """The modules whose outputs are a layer's logits and softmax queries and keys, by the words of `Projected`.

    A converted layer has the names of its family, and its norms, if any, come last.
    """
    family: Any = getattr(layer, "family", None)
    names = {word: word for word in Projected._fields}
    if family is not None:
        names |= {"query": family.query_norm or family.query, "key": family.key_norm or family.key}
    found = {word: getattr(layer, name, None) for word, name in names.items()}
    return {word: module for word, module in found.items() if isinstance(module, nn.Module)}
