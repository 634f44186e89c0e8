"""`LatteForCausalLM`: next-token prediction, generation, and a loss that holds no logits."""

# Transformers names in its types the dtypes and layouts of tensors, and of itself, that it was written with.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from latte.models.backbone import LatteModel, LattePreTrainedModel
from latte.models.configuration import LatteConfig
from latte.models.continuation import LatteGenerationMixin
from latte.models.learned_positions import check_text
from latte.ops.cross_entropy import linear_cross_entropy


class LanguageHead(nn.Linear):
    """Logits of the vocabulary, or the loss of targets without them: its weight is used within its own forward alone,
    where sharding has it whole."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden: Tensor, targets: Tensor | None = None, **options: Any
    ) -> Tensor:
        if targets is None:
            return super().forward(hidden)
        return linear_cross_entropy(hidden.flatten(0, -2), self.weight, targets.flatten(), **options)


class LatteForCausalLM(LattePreTrainedModel, LatteGenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012
    auto_class = "AutoModelForCausalLM"

    def __init__(self, config: LatteConfig) -> None:
        super().__init__(config)
        if not config.causal:
            raise ValueError("causal is False; a model that predicts the next token must be causal")
        self.model = self._make_backbone(config)
        self.lm_head = LanguageHead(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @staticmethod
    def _make_backbone(config: LatteConfig) -> LatteModel:
        return LatteModel(config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next tokens; with `labels`, the loss of predicting them, shifted here.

        The loss needs no logits. In training they are left out when there are labels, unless `return_logits` is True;
        in evaluation they are there, unless it is False.
        """
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, inputs_embeds=inputs_embeds, use_cache=use_cache, **kwargs,
        )  # fmt: skip
        hidden = outputs.last_hidden_state
        logits = loss = None
        fused = labels is not None and self._can_fuse()
        if return_logits is None:
            return_logits = labels is None or not self.training
        if return_logits or not (labels is None or fused):
            logits = self._logits(hidden, logits_to_keep if labels is None or fused else 0)
        if labels is not None:
            if fused:
                loss = self._fused_loss(hidden, labels, **kwargs)
            else:
                loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )

    def _logits(self, hidden: Tensor, logits_to_keep: int | Tensor) -> Tensor:
        rows = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, rows])
        softcap = self.config.logits_softcap
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def _can_fuse(self) -> bool:
        """Whether the head is as it was made: not wrapped, split among ranks, or given another loss function."""
        split = (self.tp_size or 1) > 1
        return type(self.lm_head) is LanguageHead and not split and not hasattr(self, "_loss_function")

    def _fused_loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        num_items_in_batch: int | Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Mean loss over the labels that count, or their sum divided by `num_items_in_batch`."""
        name, given = ("labels", labels) if shift_labels is None else ("shift_labels", shift_labels)
        if given.shape != hidden.shape[:2]:
            raise ValueError(f"{name} has shape {list(given.shape)}; it must be {list(hidden.shape[:2])}")
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(hidden.device)
        return self.lm_head(
            hidden, shift_labels.to(hidden.device), ignore_index=ignore_index, num_items=num_items_in_batch,
            softcap=self.config.logits_softcap, backend=self.config.backend,
        )  # fmt: skip

    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The model's next input. A generated token is real: its mask, which would grow, is left out."""
        if getattr(self.config, "positions", "none") == "learned":
            check_text(input_ids, attention_mask, self.config.max_position_embeddings)
        if next_sequence_length == 1 and not is_first_iteration:
            attention_mask = None
        if is_first_iteration and past_key_values is not None and (seen := int(past_key_values.get_seq_length())):
            length = (input_ids if inputs_embeds is None else inputs_embeds).shape[1]
            of_tokens = kwargs | {"attention_mask": attention_mask}
            next_sequence_length = self._new_tokens(seen, length, next_sequence_length, of_tokens)
        return super().prepare_inputs_for_generation(
            input_ids, next_sequence_length, past_key_values, attention_mask, inputs_embeds, is_first_iteration,
            **kwargs,
        )  # fmt: skip

    @staticmethod
    def create_masks_for_generate(
        config: LatteConfig, inputs_embeds: Tensor, attention_mask: Tensor | None, **_: Any
    ) -> Tensor | None:
        """The mask of the next tokens: a static cache has no use for that of the tokens before."""
        return None if attention_mask is None else attention_mask[:, -inputs_embeds.shape[1] :]
