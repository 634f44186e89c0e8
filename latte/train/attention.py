"""Where a model's attention is, of those that can be converted and those that were."""

from torch import nn
from transformers import PreTrainedModel

from latte.models import LatteConvertedForCausalLM
from latte.models.families import FAMILIES, Family


def family_of(model: PreTrainedModel) -> Family:
    config = model.config
    kind = config.source["model_type"] if isinstance(model, LatteConvertedForCausalLM) else config.model_type
    if kind not in FAMILIES:
        raise ValueError(f"a {kind!r} model has its attention elsewhere than those that can be converted")
    return FAMILIES[kind]


def attention_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Attention modules by their names, in the order of the layers."""
    family, prefix = family_of(model), model.base_model_prefix
    names = [f"{prefix}.layers.{layer}.{family.attention}" for layer in range(model.config.num_hidden_layers)]
    return {name: model.get_submodule(name) for name in names}


def converted_attention(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Those that conversion has given latents; none in a model that was not converted."""
    if not isinstance(model, LatteConvertedForCausalLM):
        return {}
    return {
        name: module for name, module in attention_of(model).items() if getattr(module, "num_latents", None) is not None
    }
