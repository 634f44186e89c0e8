"""`LatteForSequenceClassification` and `LatteForPairClassification`: one vector of a sequence, and its labels."""
# Transformers annotates settings as optional and outputs as FloatTensor.
# pyright: reportArgumentType=false

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast, SequenceClassifierOutput
from transformers.utils.generic import ModelOutput, can_return_tuple

from latte.models.backbone import LatteModel, LattePreTrainedModel
from latte.models.configuration import LatteConfig
from latte.models.padding import check_real
from latte.models.pooling import ClassToken, pool
from latte.models.unpacked import check_unpacked

ARGUMENTS = {"tokens": "input_ids", "pixels": "pixel_values", "continuous": "input_values"}  # of each input_kind


@dataclass
class PairClassifierOutput(ModelOutput):
    """What a pair classifier gives; `hidden_states` are those of the first sequence, `hidden_states_b` the second's."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    hidden_states_b: tuple[Tensor, ...] | None = None


class LatteClassifier(LattePreTrainedModel):
    """What classifiers share: inputs of each kind, a backbone that is bidirectional by default, and pooling."""

    accepts_loss_kwargs = False  # losses are means over rows: Trainer divides by the steps that it accumulates

    def __init__(self, config: LatteConfig) -> None:
        config = config.unless_chosen(causal=False)
        super().__init__(config)
        self.loss_type = "ForSequenceClassification"
        self.main_input_name = ARGUMENTS[config.input_kind]
        self.model = LatteModel(config)
        if config.input_kind == "continuous":
            self.model.set_input_embeddings(nn.Linear(config.input_size, config.hidden_size))
            self.model.init_parallel_plans()  # anew: those were for an embedding
        if config.pooling == "cls":
            if config.causal:
                raise ValueError('pooling is "cls" and causal True: the first token sees no other; choose "last"')
            self.class_token = ClassToken(config.hidden_size)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ClassToken):
            init.normal_(module.weight, std=self.config.initializer_range)

    def _embed(
        self,
        input_ids: Tensor | None,
        pixel_values: Tensor | None,
        input_values: Tensor | None,
        inputs_embeds: Tensor | None,
        suffix: str = "",
    ) -> Tensor:
        """[B T C] of the one input that is given, which must be of this model's kind; `suffix` ends its name."""
        named = {"input_ids": input_ids, "pixel_values": pixel_values, "input_values": input_values}
        given = {name: x for name, x in {**named, "inputs_embeds": inputs_embeds}.items() if x is not None}
        wanted = self.main_input_name
        if len(given) != 1 or not given.keys() <= {wanted, "inputs_embeds"}:
            found = " and ".join(f"{name}{suffix}" for name in given) or "nothing"
            raise ValueError(
                f"{found} is given; input_kind is {self.config.input_kind!r}: give {wanted}{suffix}, "
                f"or inputs_embeds{suffix} in its place"
            )
        ((name, x),) = given.items()
        if name != "inputs_embeds":
            x = self.model.embed_tokens(self._values(name + suffix, x))
        if x.ndim != 3 or x.shape[1] == 0:
            raise ValueError(
                f"{name}{suffix}, embedded, has shape {list(x.shape)}; it must be [B, T, C] with T at least 1: "
                "without tokens there is nothing to give positions to or to pool"
            )
        return x

    def _values(self, name: str, x: Tensor) -> Tensor:
        """Inputs as the embedding takes them: ids [B T], with the pixels of an image in one row, or values [B T C]."""
        kind, size = self.config.input_kind, self.config.input_size
        if kind == "continuous":
            if x.ndim != 3 or x.shape[2] != size or not x.is_floating_point():
                raise ValueError(
                    f"{name} has shape {list(x.shape)} and dtype {x.dtype}; it must be [B, T, {size}], floating point"
                )
            return x.to(self.model.embed_tokens.weight.dtype)
        if x.is_floating_point():
            raise ValueError(
                f"{name} has dtype {x.dtype}; it must be integers below {self.config.vocab_size}, "
                'or make the model with input_kind "continuous"'
            )
        if x.ndim != 2 and (kind == "tokens" or x.ndim < 2):
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [B, T]")
        return x.flatten(1).long()

    def _pooled(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
        suffix: str = "",
        **kwargs: Any,
    ) -> tuple[Tensor, BaseModelOutputWithPast]:
        """One vector per row of embedded inputs [B T C], and what the backbone gave."""
        check_unpacked(kwargs)
        if kwargs.pop("past_key_values", None) is not None:
            raise ValueError("past_key_values is given; a classifier reads its sequences whole: leave it out")
        kwargs.pop("use_cache", None)  # whatever is asked, as of models that could: nothing is kept
        mask, place = check_mask(f"attention_mask{suffix}", attention_mask, x), None
        if position_ids is not None and self.config.pooling == "cls":
            raise ValueError('position_ids are given and pooling is "cls", whose token has none; leave them out')
        if self.config.pooling == "cls":
            x, mask, place = self.class_token(x, mask)
        if position_ids is not None and mask is None:  # which would look for packed sequences in them
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        outputs = self.model(inputs_embeds=x, attention_mask=mask, position_ids=position_ids, use_cache=False, **kwargs)
        return pool(outputs.last_hidden_state, mask, self.config.pooling, place), outputs

    def _loss(self, logits: Tensor, labels: Tensor | None) -> Tensor | None:
        """As `config.problem_type` says: mean squared error, cross entropy, or one binary cross entropy per label."""
        if labels is None:
            return None
        return self.loss_function(labels=labels, pooled_logits=logits, config=self.config)


class LatteForSequenceClassification(LatteClassifier):
    """Logits of a sequence's labels, from the pooled hidden states of its tokens, pixels or continuous values."""

    auto_class = "AutoModelForSequenceClassification"

    def __init__(self, config: LatteConfig) -> None:
        super().__init__(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        pixel_values: Tensor | None = None,
        input_values: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Logits [B, num_labels]; with `labels`, the loss too.

        The input is `input_ids` [B T], `pixel_values` [B …] (intensities, read row by row) or `input_values` [B T C],
        as `config.input_kind` says, or embeddings of any of them. `attention_mask` is 1 at real tokens.
        """
        x = self._embed(input_ids, pixel_values, input_values, inputs_embeds)
        pooled, outputs = self._pooled(x, attention_mask, position_ids, **kwargs)
        logits = self.classifier(pooled)
        return SequenceClassifierOutput(
            loss=self._loss(logits, labels), logits=logits, hidden_states=outputs.hidden_states
        )


class LatteForPairClassification(LatteClassifier):
    """Logits of a pair's labels: one backbone reads both sequences, a small network combines a, b, a − b and a ∘ b."""

    auto_class = "AutoModelForSequenceClassification"

    def __init__(self, config: LatteConfig) -> None:
        super().__init__(config)
        hidden_size = config.hidden_size
        self.pair_classifier = nn.Sequential(
            nn.Linear(4 * hidden_size, hidden_size), nn.GELU(), nn.Linear(hidden_size, config.num_labels)
        )
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        input_ids_b: Tensor | None = None,
        attention_mask_b: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        inputs_embeds_b: Tensor | None = None,
        labels: Tensor | None = None,
        pixel_values: Tensor | None = None,
        pixel_values_b: Tensor | None = None,
        input_values: Tensor | None = None,
        input_values_b: Tensor | None = None,
        **kwargs: Any,
    ) -> PairClassifierOutput:
        """Logits [B, num_labels] of the pairs; with `labels`, the loss too.

        The second sequence of each pair is in the arguments that end in `_b`; it may have another length.
        """
        first = self._embed(input_ids, pixel_values, input_values, inputs_embeds)
        second = self._embed(input_ids_b, pixel_values_b, input_values_b, inputs_embeds_b, suffix="_b")
        if first.shape[0] != second.shape[0]:
            raise ValueError(f"there are {first.shape[0]} first and {second.shape[0]} second sequences; pair them up")
        a, outputs = self._pooled(first, attention_mask, **kwargs)
        b, outputs_b = self._pooled(second, attention_mask_b, suffix="_b", **kwargs)
        logits = self.pair_classifier(torch.cat([a, b, a - b, a * b], dim=-1))
        return PairClassifierOutput(
            loss=self._loss(logits, labels), logits=logits, hidden_states=outputs.hidden_states,
            hidden_states_b=outputs_b.hidden_states,
        )  # fmt: skip


def check_mask(name: str, mask: Tensor | None, x: Tensor) -> Tensor | None:
    """The mask of x [B T C] as bool [B T]."""
    if mask is None:
        return None
    if mask.shape != x.shape[:2]:
        raise ValueError(
            f"{name} has shape {list(mask.shape)}; it must be {list(x.shape[:2])}, 1 at real tokens and 0 at padding"
        )
    check_real(name, mask)
    return mask.bool()
