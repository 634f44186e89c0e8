"""`LatteConvertedForCausalLM`: a pretrained transformer with other attention, and for the rest its own code."""

# Transformers makes the source's classes, of which types know nothing.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIncompatibleVariableOverride=false, reportIncompatibleMethodOverride=false

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from latte.layers import token_positions
from latte.layers.mixers import RGLRU, BlockDiagonal, ShortConvolution, initial_a_param
from latte.models.cache import check_cache
from latte.models.causal_lm import LatteForCausalLM
from latte.models.checkpoint import loader_beside
from latte.models.converted_attention import ConvertedAttention, LatentQuery
from latte.models.converted_configuration import LatteConvertedConfig
from latte.models.families import find_family
from latte.models.padding import find_layout

NO_MASKS = "latte"  # an attention for which Transformers makes no masks, as there is no function for them of this name


def never_called(*_: Any, **__: Any) -> None:
    raise TypeError(f"attn_implementation={NO_MASKS!r} is the mark of a converted model; it computes no attention")


AttentionInterface.register(NO_MASKS, never_called)


class ConvertedBackbone:
    """Goes before the source's own model class: changes the attention modules, and what comes with the input.

    A mask stays [B T], so that memory is linear in T. Mask and packing reach the attention modules as a `Layout`, by
    the keyword arguments that every model passes on to them.
    """

    def __init__(self, source: PreTrainedConfig, config: LatteConvertedConfig) -> None:
        super().__init__(source)
        self.conversion, family = config, find_family(source)
        for index, layer in enumerate(self.layers):
            attention = getattr(layer, family.attention)
            setattr(layer, family.attention, ConvertedAttention(config, source, family, index, attention))
        if config.mixer == "rglru":  # decays near 1, which bfloat16 cannot tell apart
            self._keep_in_fp32_modules_strict = {"a_param"}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, LatentQuery):
            init.zeros_(module.weight)
            init.copy_(module.bias, module.first_logits())
        elif isinstance(module, RGLRU):
            init.copy_(module.a_param, initial_a_param(module.a_param))
        elif isinstance(module, (BlockDiagonal, ShortConvolution)):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of the next tokens; the arguments are those of `LatteModel`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids and inputs_embeds: give exactly one of them")
        if past_key_values is not None:
            check_cache(past_key_values, self.conversion)
        given: Any = input_ids if inputs_embeds is None else inputs_embeds
        rows, tokens = given.shape[:2]
        layout = find_layout(
            given, attention_mask, position_ids, cu_seq_lens_q, seq_idx, cached=past_key_values is not None
        )
        if layout.flat:
            input_ids, inputs_embeds, mask, positions = (
                None if x is None else x.flatten(0, 1).unsqueeze(0)
                for x in (input_ids, inputs_embeds, layout.mask, layout.positions)
            )
            layout = layout._replace(mask=mask, positions=positions)
        if layout.cu_seqlens is not None and layout.positions is None:
            positions = token_positions(rows * tokens, given.device, mask=layout.mask, cu_seqlens=layout.cu_seqlens)
            layout = layout._replace(positions=positions)
        if use_cache is None:
            use_cache = self.conversion.use_cache
        if use_cache and past_key_values is None and not self.training:
            past_key_values = DynamicCache(config=self.conversion)
        outputs = super().forward(
            input_ids=input_ids, inputs_embeds=inputs_embeds, position_ids=layout.positions, attention_mask=None,
            past_key_values=past_key_values, use_cache=False, layout=layout, **kwargs,
        )  # fmt: skip
        outputs.last_hidden_state = outputs.last_hidden_state.reshape(rows, tokens, -1)
        outputs.past_key_values = past_key_values if use_cache else None
        return outputs


@lru_cache
def converted_class(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    return type(f"Converted{kind.__name__}", (ConvertedBackbone, kind), {})


def tensor_parallel_plan(source: PreTrainedConfig) -> dict[str, str]:
    """The source's plan, but that every rank gathers all heads, as mixers see all channels."""
    family = find_family(source)
    plan = {name: how for name, how in (source.base_model_tp_plan or {}).items() if family.attention not in name}
    projections = (family.query, family.key, family.value, family.output, "latent_query", "latent_key")
    return plan | {f"layers.*.{family.attention}.{name}": "colwise_gather_output" for name in projections}


class LatteConvertedForCausalLM(LatteForCausalLM):
    """A pretrained language model whose attention is, in some layers, Latte Macchiato."""

    config_class = LatteConvertedConfig
    _no_split_modules = []  # noqa: RUF012 - the source knows them

    @staticmethod
    def _make_backbone(config: LatteConvertedConfig) -> PreTrainedModel:
        source = config.source_config()
        source._attn_implementation = NO_MASKS
        source.base_model_tp_plan = tensor_parallel_plan(source)
        return converted_class(MODEL_MAPPING[type(source)])(source, config)

    def save_pretrained(
        self, save_directory: str | PathLike[str], is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Write weights, settings and the file by which `trust_remote_code=True` finds this package."""
        with self._loader(save_directory) if is_main_process else nullcontext():
            PreTrainedModel.save_pretrained(self, save_directory, is_main_process, *args, **kwargs)

    def save_settings(self, save_directory: str | PathLike[str]) -> None:
        """Write what `save_pretrained` does, but for the weights and how to generate."""
        self.config.architectures = [type(self).__name__]
        with self._loader(save_directory):
            self.config.save_pretrained(save_directory)

    def _loader(self, directory: str | PathLike[str]) -> AbstractContextManager[None]:
        classes = {"AutoConfig": "LatteConvertedConfig", "AutoModelForCausalLM": type(self).__name__}
        return loader_beside(directory, self.config, classes)
