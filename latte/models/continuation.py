"""A text whose beginning is in the cache: `generate` is given the whole of it, and only what is new is read."""

# Transformers writes its mixin for models of its own, and types nothing of what a model's forward takes.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIncompatibleMethodOverride=false

from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils.generic import ModelOutput

from latte.layers.checks import check_count


class LatteGenerationMixin(GenerationMixin):
    """`generate` for models whose cache is a state: what is read twice, or left out, is seen in no length of it."""

    def _prefill(
        self,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        is_first_iteration: bool = True,
    ) -> ModelOutput:
        """What the model gives for the prompt. One in chunks is read here, embedded or not, behind a cache or not:
        Transformers cuts the mask of an encoder-decoder's source too, leaves embeddings whole, and before 5.21 begins
        anew behind a cache."""
        size, cache = generation_config.prefill_chunk_size, model_kwargs.get("past_key_values")
        if size is None or cache is None:
            return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)
        check_count("prefill_chunk_size", size, ", or None")
        prompt, length = {"input_ids": input_ids}, input_ids.shape[1]
        if not self.config.is_encoder_decoder and model_kwargs.get("inputs_embeds") is not None:
            prompt["inputs_embeds"] = model_kwargs["inputs_embeds"]
            length = prompt["inputs_embeds"].shape[1]
        seen = int(cache.get_seq_length())
        start = length - (self._new_tokens(seen, length, None, model_kwargs) or length) if seen else 0
        outputs: Any = None
        for stop in [*range(start + size, length, size), length]:
            part = {name: x[:, :stop] for name, x in prompt.items()}
            part |= {name: x[:, : x.shape[1] - (length - stop)] for name, x in self._of_tokens(model_kwargs).items()}
            inputs = self.prepare_inputs_for_generation(
                next_sequence_length=stop - start, is_first_iteration=is_first_iteration, **(model_kwargs | part)
            )  # fmt: skip
            outputs, start = self(**inputs, return_dict=True), stop
        return outputs

    def _get_candidate_generator(
        self, *, input_ids: Tensor, model_kwargs: dict[str, Any], **rest: Any
    ) -> CandidateGenerator:
        """Where drafts come from. They lengthen the text, so that it is now or never seen whether it has new tokens."""
        if seen := int(model_kwargs["past_key_values"].get_seq_length()):
            self._new_tokens(seen, input_ids.shape[1], None, model_kwargs)
        return super()._get_candidate_generator(input_ids=input_ids, model_kwargs=model_kwargs, **rest)

    def _new_tokens(self, seen: int, length: int, chosen: int | None, arguments: dict[str, Any]) -> int | None:
        """How many of the last of `length` tokens are to be read behind the `seen` ones of the cache; None: all.

        Transformers has `chosen` so many. But it chooses nothing in assisted decoding, which would read again what was
        read, and 0 where nothing is new, which means all. Raise ValueError if nothing is.
        """
        of_tokens = self._of_tokens(arguments)
        # Before the target of an encoder-decoder `generate` puts the start token: it is given whole.
        if chosen is None and (is_whole(length, of_tokens) or (self.config.is_encoder_decoder and not of_tokens)):
            chosen = length - seen
        if length == 0 or (chosen is not None and chosen <= 0):
            raise ValueError(
                f"the cache has read {seen} tokens, and the text has no more; "
                "give the whole text, with a token that is new"
            )
        return chosen

    def _of_tokens(self, arguments: dict[str, Any]) -> dict[str, Tensor]:
        """Those of `arguments` that say something of each token that is generated."""
        prefix = "decoder_" if self.config.is_encoder_decoder else ""
        names = [f"{prefix}attention_mask", f"{prefix}position_ids"]
        return {name: arguments[name] for name in names if arguments.get(name) is not None}


def is_whole(length: int, of_tokens: dict[str, Tensor]) -> bool:
    """Whether `length` tokens are the text from its beginning, and not only what is new, or a chunk of that."""
    for name, x in of_tokens.items():
        if name.endswith("attention_mask"):
            return x.shape[1] == length
        return x.shape[-1] == length and int(x[0, 0]) == 0
    return False
