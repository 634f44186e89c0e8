"""`convert`: a pretrained model in memory, with Latte Macchiato in place of its attention."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from latte.convert.latents import begin_latents, new_parameters
from latte.convert.settings import conversion_config
from latte.models import LatteConvertedConfig, LatteConvertedForCausalLM
from latte.models.families import find_family


def convert(
    model: PreTrainedModel,
    *,
    window: int = 128,
    num_latents: int = 16,
    mixer: str = "rglru",
    layers: str | Sequence[int] = "all",
    initial_window_share: float = 0.95,
) -> LatteConvertedForCausalLM:
    """A model that has every weight of `model`, and in its attention layers a window and latents.

    `layers` are "all", "global" (those that see all tokens) or numbers; the others stay as they are.
    `initial_window_share` is p(0|t) before training: with 1.0 the converted model is exactly the source restricted to
    its window, and its latents cannot be trained. The new weights are drawn from PyTorch's global generator.

    The weights are not copied: both models hold the same tensors, so copy `model` first if you train all weights of one
    and go on to use the other.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model is {type(model).__name__}; it must be a pretrained model of Transformers")
    if not all(parameter.is_floating_point() for parameter in model.parameters()):
        raise ValueError("model is quantized; load it without quantization, or call its dequantize()")
    config = conversion_config(
        model.config,
        window=window,
        num_latents=num_latents,
        mixer=mixer,
        layers=layers,
        initial_window_share=initial_window_share,
    )
    config.dtype = model.dtype
    if config.tie_word_embeddings and not tied(model):
        config.tie_word_embeddings = False
    converted = empty_model(config)
    adopt_weights(converted, model)
    begin_all_latents(converted, model.dtype, model.device)
    converted.generation_config = copy.deepcopy(model.generation_config)
    return converted.train(model.training)


def tied(model: PreTrainedModel) -> bool:
    """Whether the head's weights are the embeddings': Transformers leaves them apart where a checkpoint holds two."""
    embeddings: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    return head is None or head.weight is embeddings.weight or torch.equal(head.weight, embeddings.weight)


def empty_model(config: LatteConvertedConfig) -> LatteConvertedForCausalLM:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return LatteConvertedForCausalLM(config)  # pyright: ignore[reportArgumentType] - its settings are others


def adopt_weights(converted: LatteConvertedForCausalLM, source: PreTrainedModel) -> None:
    """Put the source's tensors, buffers that are not saved included, in the places of the same names."""
    missing, unexpected = converted.load_state_dict(source.state_dict(), strict=False, assign=True)
    if unexpected or set(missing) - set(new_parameters(converted)):
        raise ValueError(f"model is {type(source).__name__}; it must be its family's …ForCausalLM")
    _share_buffers(source, converted)


def restore(converted: LatteConvertedForCausalLM) -> PreTrainedModel:
    """The source of a converted model, with its own attention: a teacher, or what to compare with.

    It holds the weights that the converted model has now, which are the source's as long as only new ones were trained,
    and does not copy them.
    """
    if not isinstance(converted, LatteConvertedForCausalLM):
        raise ValueError(f"model is {type(converted).__name__}; it must be a converted one")
    config = converted.config.source_config()
    with torch.device("meta"):
        # None is PyTorch's own attention, where Transformers has the family compute so.
        source = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if softcapped(config) else None)
    share_weights(converted, source)
    source.generation_config = copy.deepcopy(converted.generation_config)
    return source.train(converted.training)


def softcapped(config: PreTrainedConfig) -> bool:
    """Whether scores are bounded, which PyTorch's own attention does not do."""
    word = find_family(config).softcap
    return word is not None and getattr(config, word) is not None


def share_weights(one: PreTrainedModel, other: PreTrainedModel) -> None:
    """Put the tensors of `one` into `other`, in the places of the same names; what has no place there is left out."""
    other.load_state_dict(one.state_dict(), strict=False, assign=True)
    _share_buffers(one, other)


def _share_buffers(one: PreTrainedModel, other: PreTrainedModel) -> None:
    """Put also those buffers of `one` that are not saved into `other`, and tie what is to be tied.

    Rotary positions of the dynamic kind hold angles for the longest text so far, and beside them its length.
    """
    for name, buffer in one.named_buffers():
        module, _, leaf = name.rpartition(".")
        setattr(other.get_submodule(module), leaf, buffer)
        for word, value in vars(one.get_submodule(module)).items():
            if word.endswith("max_seq_len_cached"):
                setattr(other.get_submodule(module), word, value)
    other.tie_weights()


def begin_all_latents(converted: LatteConvertedForCausalLM, dtype: torch.dtype, device: torch.device) -> None:
    family = find_family(converted.model.config)
    for index in converted.config.layers:
        layer = converted.model.layers[index]
        begin_latents(getattr(layer, family.attention), getattr(layer, family.attention_norm), dtype)
    for parameter in new_parameters(converted).values():
        parameter.data = parameter.data.to(device)
