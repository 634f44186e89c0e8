"""`LatteModel`: embeddings, blocks and a norm, as a Transformers model."""

# Settings that are None when they are given are numbers when they are read, and tensors are of all dtypes.
# pyright: reportArgumentType=false, reportOptionalSubscript=false

from contextlib import nullcontext
from itertools import islice
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from latte.layers import LatteAttention, make_feedforward, make_norm, token_positions
from latte.layers.mixers import RGLRU, BlockDiagonal, ShortConvolution, initial_a_param
from latte.layers.rotary import rotary
from latte.models.cache import check_cache, state_layer
from latte.models.checkpoint import loader_beside
from latte.models.configuration import LatteConfig
from latte.models.learned_positions import check_positions
from latte.models.offload import weights_at_hand
from latte.models.padding import Layout, find_layout
from latte.models.rollback import Step
from latte.models.rotary import LatteRotaryEmbedding


class LatteLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + feedforward(norm(x)); attention's past is in the cache, if there is one."""

    def __init__(self, config: LatteConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.attention_norm = make_norm(config.norm, config.hidden_size, config.norm_eps)
        self.attention = LatteAttention(
            config.hidden_size, config.num_heads, config.num_latents, head_dim=config.head_dim,
            num_value_heads=config.num_value_heads, window=config.window, window_head_dim=config.window_head_dim,
            mixer=config.mixer, conv_size=config.conv_size, mixer_blocks=config.mixer_blocks, causal=config.causal,
            rope_theta=config.rope_parameters["rope_theta"] if config.has_scores else None, bias=config.bias,
            scale=config.scale, softcap=config.softcap, feature_map=config.feature_map, backend=config.backend,
        )  # fmt: skip
        self.feedforward_norm = make_norm(config.norm, config.hidden_size, config.norm_eps)
        self.feedforward = make_feedforward(
            config.feedforward, config.hidden_size, config.intermediate_size, config.activation, config.bias
        )

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        x = self.attention_norm(hidden_states)
        with weights_at_hand(self.attention.mixer):
            if past_key_values is None:
                y = self.attention(x, mask, cu_seqlens, rotary=rotary)
            else:
                past = state_layer(past_key_values, self.layer_idx)
                y = past.advance(self.attention, Step(x, mask, cu_seqlens, rotary))
        hidden_states = hidden_states + y
        return hidden_states + self.feedforward(self.feedforward_norm(hidden_states))


class LattePreTrainedModel(PreTrainedModel):
    config_class = LatteConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LatteLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": LatteLayer}  # noqa: RUF012
    auto_class = "AutoModel"  # by which a saved model is loaded

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RGLRU):
            init.copy_(module.a_param, initial_a_param(module.a_param))
        elif isinstance(module, (BlockDiagonal, ShortConvolution)):
            module.reset_parameters()

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: saved models carry a file that imports this package, in place of a copy of its code."""

    def save_pretrained(
        self, save_directory: str | PathLike[str], is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Write weights, settings and the file by which `trust_remote_code=True` finds this package."""
        classes = {"AutoConfig": "LatteConfig", "AutoModel": "LatteModel", self.auto_class: type(self).__name__}
        loader = loader_beside(save_directory, self.config, classes) if is_main_process else nullcontext()
        with loader:
            super().save_pretrained(save_directory, is_main_process, *args, **kwargs)


class LatteModel(LattePreTrainedModel):
    """Hidden states of tokens: causal, or with `config.causal=False` each token sees the whole sequence."""

    def __init__(self, config: LatteConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        if config.has_scores:
            self.rotary_emb = LatteRotaryEmbedding(config)
        self.layers = nn.ModuleList([LatteLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = make_norm(config.norm, config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        if config.mixer == "rglru":  # decays near 1, which bfloat16 cannot tell apart
            self._keep_in_fp32_modules_strict = ["a_param"]
        self.post_init()

    def init_parallel_plans(self) -> None:
        """Those of the settings, for the number of ranks that the model is loaded for."""
        super().init_parallel_plans()
        ranks = getattr(getattr(self.config, "distributed_config", None), "tp_size", None)
        self._tp_plan |= self.config.tensor_parallel_plan(ranks or 1)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of the next tokens.

        `attention_mask` is 1 at real tokens of all that was read so far. Sequences packed into a row are told by
        `cu_seq_lens_q` or `seq_idx`, or, without mask and cache, by `position_ids` that begin anew.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids and inputs_embeds: give exactly one of them")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if past_key_values is not None:
            check_cache(past_key_values, self.config)
        layout = find_layout(
            inputs_embeds, attention_mask, position_ids, kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx"),
            cached=past_key_values is not None,
        )  # fmt: skip
        if use_cache and past_key_values is None and self.config.causal and not self.training:
            past_key_values = DynamicCache(config=self.config)
        hidden_states = self._run(inputs_embeds, layout, past_key_values)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states, past_key_values=past_key_values if use_cache else None
        )

    def _run(self, x: Tensor, layout: Layout, cache: Cache | None) -> Tensor:
        shape = x.shape
        mask, cu_seqlens, positions, flat = layout
        if flat:
            x = x.flatten(0, 1).unsqueeze(0)
            mask, positions = (None if part is None else part.reshape(1, -1) for part in (mask, positions))
        if positions is None and (self.config.has_scores or self.config.positions != "none"):
            before = None if cache is None else state_layer(cache, 0).position
            positions = token_positions(x.shape[1], x.device, before=before, mask=mask, cu_seqlens=cu_seqlens)
        x = self._add_positions(x, positions, cache)
        angles = self.rotary_emb(x, positions) if self.config.has_scores else None
        for layer in islice(self.layers, self.config.num_hidden_layers):  # fewer where a draft leaves early
            x = layer(x, mask=mask, cu_seqlens=cu_seqlens, rotary=angles, past_key_values=cache)
        return self.norm(x).reshape(shape)

    def _add_positions(self, x: Tensor, positions: Tensor, cache: Cache | None) -> Tensor:
        if self.config.positions == "learned":
            check_positions(positions, self.config.max_position_embeddings, cache)
            return x + self.embed_positions(positions)
        if self.config.positions == "sinusoidal":
            cos, sin = rotary(positions, x.shape[-1])
            return x + torch.cat([sin, cos], dim=-1).to(x.dtype)
        return x
