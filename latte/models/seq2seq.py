"""`LatteForSeq2SeqLM`: an encoder that reads the source both ways, and a decoder that attends to a summary of it."""
# Transformers annotates settings as optional and outputs as FloatTensor.
# pyright: reportArgumentType=false

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPast,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from latte.layers import AttentionOutput, AttentionState, CrossAttention, count_tokens, make_norm, token_positions
from latte.layers.positions import sequence_numbers
from latte.models.backbone import LatteLayer, LatteModel, LattePreTrainedModel
from latte.models.cache import StateLayer, check_cache
from latte.models.causal_lm import LanguageHead, LatteForCausalLM
from latte.models.configuration import LatteConfig
from latte.models.continuation import LatteGenerationMixin
from latte.models.learned_positions import check_text
from latte.models.padding import find_layout
from latte.models.rollback import Step
from latte.models.unpacked import check_unpacked
from latte.ops import LatteState


class SourceReader(NamedTuple):
    """Cross attention as a layer that streams: what it keeps of the tokens it reads is the source's summary."""

    attention: CrossAttention

    def stream(
        self, x: Tensor, state: AttentionState | None = None, mask: Tensor | None = None, *_: Any, **__: Any
    ) -> AttentionOutput:
        summary = self.attention.summarize(x, mask, None if state is None else state.attention)
        before = None if state is None else state.position
        position = count_tokens(x.shape[0], x.shape[1], x.device, before=before, mask=mask)
        return AttentionOutput(x, AttentionState(None, summary, position))


class Bounds(NamedTuple):
    """cu_seqlens of pairs that are packed into a row of sources and a row of targets; None: one pair per row."""

    targets: Tensor | None = None
    sources: Tensor | None = None

    @classmethod
    def take(cls, arguments: dict[str, Any], cache: Cache | None) -> "Bounds":
        """Those among `arguments`, by the names of flash attention, where queries are the target's."""
        bounds = cls(arguments.pop("cu_seq_lens_q", None), arguments.pop("cu_seq_lens_k", None))
        if (bounds.targets is None) != (bounds.sources is None):
            raise ValueError("cu_seq_lens_q bounds the targets and cu_seq_lens_k the sources; give both, or none")
        if bounds.targets is not None and cache is not None:
            raise ValueError("packed pairs are read at once; leave past_key_values out, or give one pair per row")
        return bounds


class LatteDecoderLayer(LatteLayer):
    """A `LatteLayer` with cross attention to the source between attention and feed-forward."""

    def __init__(self, config: LatteConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.cross_norm = make_norm(config.norm, config.hidden_size, config.norm_eps)
        self.cross_attention = CrossAttention(
            config.hidden_size, config.num_heads, config.num_cross_latents, head_dim=config.head_dim,
            num_value_heads=config.num_value_heads, bias=config.bias,
        )  # fmt: skip

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: Tensor,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
        mask: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        bounds: Bounds = Bounds(),  # noqa: B008 - a tuple
    ) -> Tensor:
        x = self.attention_norm(hidden_states)
        if past_key_values is None:
            y = self.attention(x, mask, bounds.targets, rotary=rotary)
            summary = self.cross_attention.summarize(source, source_mask, cu_seqlens=bounds.sources)
        else:
            past = state_layer(past_key_values.self_attention_cache, self.layer_idx)
            y = past.advance(self.attention, Step(x, mask, None, rotary))
            summary = self._summary(past_key_values, source, source_mask)
        hidden_states = hidden_states + y
        hidden_states = hidden_states + self.cross_attention(self.cross_norm(hidden_states), summary, bounds.targets)
        return hidden_states + self.feedforward(self.feedforward_norm(hidden_states))

    def _summary(self, cache: EncoderDecoderCache, source: Tensor | None, mask: Tensor | None) -> LatteState:
        """The summary in the cache, where the first call puts it."""
        past = state_layer(cache.cross_attention_cache, self.layer_idx)
        if not cache.is_updated.get(self.layer_idx):
            past.advance(SourceReader(self.cross_attention), Step(source, mask))
            cache.is_updated[self.layer_idx] = True
        return past.state.attention  # pyright: ignore[reportOptionalMemberAccess, reportReturnType]


class OwnPlans:
    """How to shard a model whose settings describe another: only by the entries that name its own modules."""

    def init_parallel_plans(self) -> None:
        super().init_parallel_plans()  # pyright: ignore[reportAttributeAccessIssue]
        for plan in (self._tp_plan, self._pp_plan, self._fsdp_plan):  # pyright: ignore[reportAttributeAccessIssue]
            for name in [name for name in plan if not hasattr(self, name.partition(".")[0])]:
                del plan[name]


class LatteDecoder(OwnPlans, LatteModel):
    """Hidden states of embedded target tokens, given those of the source, to which every layer attends.

    It has no embeddings of its own: source and target share the encoder's.
    """

    _no_split_modules = ["LatteDecoderLayer"]  # noqa: RUF012

    def __init__(self, config: LatteConfig) -> None:
        super().__init__(config)
        del self.embed_tokens
        self.layers = nn.ModuleList([LatteDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        use_cache: bool | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        bounds: Bounds = Bounds(),  # noqa: B008 - a tuple
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of the next target tokens; the source is needed until the cache has its summaries."""
        use_cache = use_cache and bounds.targets is None
        if past_key_values is None and use_cache and not self.training:
            past_key_values = make_cache(self.config)
        source_mask = None
        if not has_read(past_key_values):
            if encoder_hidden_states is None:
                raise ValueError("there is no source; give input_ids, inputs_embeds or encoder_outputs")
            source_mask = find_layout(encoder_hidden_states, encoder_attention_mask).mask
        mask, _, positions, _ = find_layout(inputs_embeds, attention_mask, position_ids, cached=True)
        x, angles = self._place(inputs_embeds, positions, mask, past_key_values, bounds.targets)
        for layer in self.layers:
            x = layer(
                x, encoder_hidden_states, source_mask, mask=mask, rotary=angles, past_key_values=past_key_values,
                bounds=bounds,
            )  # fmt: skip
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(x), past_key_values=past_key_values if use_cache else None
        )

    def _place(
        self,
        x: Tensor,
        positions: Tensor | None,
        mask: Tensor | None,
        cache: EncoderDecoderCache | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """x with its positions added, and the rotary ones."""
        if not self.config.has_scores and self.config.positions == "none":
            return x, None
        if positions is None:
            before = None if cache is None else state_layer(cache.self_attention_cache, 0).position
            positions = token_positions(x.shape[1], x.device, before=before, mask=mask, cu_seqlens=cu_seqlens)
        x = self._add_positions(x, positions, cache)
        return x, self.rotary_emb(x, positions) if self.config.has_scores else None


class LatteEncoderDecoder(OwnPlans, LattePreTrainedModel):
    """The encoder, and the decoder that attends to what it gives."""

    def __init__(self, config: LatteConfig) -> None:
        super().__init__(config)
        inner = copy.deepcopy(config)
        inner.is_encoder_decoder = False
        self.decoder = LatteDecoder(inner)
        inner = copy.deepcopy(inner)
        inner.causal = inner.use_cache = False
        inner.num_hidden_layers = config.num_encoder_layers or config.num_hidden_layers
        self.encoder = LatteModel(inner)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.set_input_embeddings(value)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """Hidden states of the next target tokens; see `LatteForSeq2SeqLM`."""
        bounds = Bounds.take(kwargs, past_key_values)
        check_unpacked(kwargs)
        if kwargs.pop("position_ids", None) is not None:
            raise ValueError(
                "position_ids is given; a source's tokens are counted, and a target's positions are "
                "decoder_position_ids: leave it out"
            )
        if past_key_values is not None:
            check_pair(past_key_values, self.decoder.config)
        if encoder_outputs is None and not has_read(past_key_values):
            encoder_outputs = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, use_cache=False,
                cu_seq_lens_q=bounds.sources, **kwargs,
            )  # fmt: skip
        if (decoder_input_ids is None) == (decoder_inputs_embeds is None):
            raise ValueError("decoder_input_ids and decoder_inputs_embeds: give exactly one of them, or labels alone")
        if decoder_inputs_embeds is None:
            decoder_inputs_embeds = self.get_input_embeddings()(decoder_input_ids)
        source = None if encoder_outputs is None else encoder_outputs[0]
        outputs = self.decoder(
            decoder_inputs_embeds, attention_mask=decoder_attention_mask, position_ids=decoder_position_ids,
            past_key_values=past_key_values, use_cache=use_cache, encoder_hidden_states=source,
            encoder_attention_mask=attention_mask, bounds=bounds, **kwargs,
        )  # fmt: skip
        return Seq2SeqModelOutput(
            last_hidden_state=outputs.last_hidden_state, past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.hidden_states, encoder_last_hidden_state=source,
            encoder_hidden_states=getattr(encoder_outputs, "hidden_states", None),
        )  # fmt: skip


class LatteForSeq2SeqLM(LattePreTrainedModel, LatteGenerationMixin):
    """Target tokens given a source. The source is summed up once; what a token costs does not depend on its length."""

    auto_class = "AutoModelForSeq2SeqLM"
    _tied_weights_keys = {"lm_head.weight": "model.encoder.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = LatteForCausalLM._tp_plan
    _fsdp_plan = LatteForCausalLM._fsdp_plan

    def __init__(self, config: LatteConfig) -> None:
        config = config.unless_chosen(causal=True)
        if not config.causal:
            raise ValueError("causal is False; the decoder is causal and the encoder is not: leave it out")
        config.is_encoder_decoder = True
        config.num_encoder_layers = config.num_encoder_layers or config.num_hidden_layers
        config.num_cross_latents = config.num_cross_latents or config.num_latents
        if config.num_cross_latents is None:
            raise ValueError("num_cross_latents and num_latents are None; cross attention is through latents: set one")
        super().__init__(config)
        self.loss_type = "ForCausalLM"
        self.model = LatteEncoderDecoder(config)
        self.lm_head = LanguageHead(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Logits of the next target tokens; with `labels`, the loss of predicting them from those before.

        `input_ids` are the source and `attention_mask` is 1 at its real tokens. Decoder inputs are by default the
        labels, moved one place to the right. As in `LatteForCausalLM`, training with labels leaves logits out unless
        `return_logits` is True. Once a cache has read the source, it need not be given again.

        Pairs may be packed into a row of sources, bounded by `cu_seq_lens_k`, and one of targets, by `cu_seq_lens_q`.
        """
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels, kwargs.get("cu_seq_lens_q"))
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask, decoder_position_ids=decoder_position_ids,
            encoder_outputs=encoder_outputs, past_key_values=past_key_values, inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds, use_cache=use_cache, **kwargs,
        )  # fmt: skip
        if return_logits is None:
            return_logits = labels is None or not self.training
        loss, logits = self._predict(outputs.last_hidden_state, labels, logits_to_keep, return_logits, kwargs)
        return Seq2SeqLMOutput(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
        )  # fmt: skip

    def _predict(
        self,
        hidden: Tensor,
        labels: Tensor | None,
        logits_to_keep: int | Tensor,
        return_logits: bool,
        options: dict[str, Any],
    ) -> tuple[Tensor | None, Tensor | None]:
        """The loss if there are labels, and the logits if they are wanted or the loss needs them."""
        if labels is None:
            return None, self._logits(hidden, logits_to_keep) if return_logits else None
        options = {**options, "shift_labels": labels}  # decoder inputs are shifted already
        differentiable = return_logits and torch.is_grad_enabled()  # the loss is then a function of the logits returned
        if self._can_fuse() and not differentiable:
            logits = self._logits(hidden, logits_to_keep) if return_logits else None
            return self._fused_loss(hidden, labels, **options), logits
        logits = self._logits(hidden, 0)
        return self.loss_function(logits, labels, self.config.vocab_size, **options), logits

    _logits = LatteForCausalLM._logits  # the head is the same
    _can_fuse = LatteForCausalLM._can_fuse
    _fused_loss = LatteForCausalLM._fused_loss
    create_masks_for_generate = staticmethod(LatteForCausalLM.create_masks_for_generate)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Labels one place to the right, each behind the start token; padding, −100, becomes `pad_token_id`."""
        config = self.config
        start = config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
        if start is None:
            raise ValueError(
                "decoder_start_token_id and bos_token_id are None; set one in the config, or give decoder_input_ids"
            )
        pad = start if config.pad_token_id is None else config.pad_token_id
        moved = nn.functional.pad(labels[:, :-1], (1, 0), value=start)
        if cu_seqlens is not None:
            begins = sequence_numbers(cu_seqlens, labels.shape[1]).diff(prepend=cu_seqlens.new_tensor([-1])) != 0
            moved = moved.masked_fill(begins, start)
        return moved.masked_fill(moved == -100, pad)

    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Cache | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The model's next input. The source is left out once it has been read, and so is a mask that would grow."""
        if self.config.positions == "learned":
            check_text(input_ids, kwargs.get("decoder_attention_mask"), self.config.max_position_embeddings)
        if next_sequence_length == 1 and not is_first_iteration:
            kwargs.pop("decoder_attention_mask", None)
        elif past_key_values is not None and (seen := int(past_key_values.get_seq_length())):
            next_sequence_length = self._new_tokens(seen, input_ids.shape[1], next_sequence_length, kwargs)
        if has_read(past_key_values):
            kwargs = {name: x for name, x in kwargs.items() if name not in ("attention_mask", "encoder_outputs")}
        return super().prepare_inputs_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
            input_ids, next_sequence_length, past_key_values, is_first_iteration=is_first_iteration, **kwargs
        )


def make_cache(config: LatteConfig) -> EncoderDecoderCache:
    """An empty cache: states of the decoder's attention, and summaries of the source."""
    return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))


def state_layer(cache: Cache, index: int) -> StateLayer:
    return cache.layers[index]  # pyright: ignore[reportReturnType]


def has_read(cache: Cache | None) -> bool:
    """Whether the cache has the source's summaries."""
    return isinstance(cache, EncoderDecoderCache) and bool(cache.is_updated) and all(cache.is_updated.values())


def check_pair(cache: Any, config: LatteConfig) -> None:
    """Raise ValueError unless `cache` is one that an encoder-decoder of these settings can use."""
    if not isinstance(cache, EncoderDecoderCache):
        raise ValueError(
            f"past_key_values is {type(cache).__name__}; it must be an EncoderDecoderCache of two caches, "
            "each DynamicCache(config=model.config)"
        )
    check_cache(cache.self_attention_cache, config)
    check_cache(cache.cross_attention_cache, config)
