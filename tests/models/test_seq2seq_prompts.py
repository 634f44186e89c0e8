"""Encoder and decoder: prompts for the decoder in chunks, and targets that go on from a cache."""

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache, EncoderDecoderCache

from latte import LatteForSeq2SeqLM
from tests.models.small import TIGHT, make_ids, make_model, pad

SETTINGS = {"num_encoder_layers": 3, "num_cross_latents": 5, "pad_token_id": 0, "decoder_start_token_id": 1}
GREEDY = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "no_repeat_ngram_size": 2}
FORMS = ("macchiato", "full")


def make(form="macchiato"):
    return make_model(LatteForSeq2SeqLM, form, **SETTINGS, tie_word_embeddings=False)


def make_cache(model):
    return EncoderDecoderCache(*(DynamicCache(config=model.config) for _ in range(2)))


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("form", FORMS)
def test_prompts_in_chunks(form, chunk):
    """Source and prompt are padded, and neither mask is taken for the other."""
    model = make(form)
    source, mask = pad(make_ids(2, 19), "left", 5, 41)
    prompt, prompt_mask = pad(make_ids(2, 7, seed=2), "left", 3, 41)
    masks = {"attention_mask": mask, "decoder_attention_mask": prompt_mask}
    for given in (masks, {"attention_mask": mask}, {}):
        for options in ({}, {"cache_implementation": "static"}, {"num_beams": 2}):
            expected = model.generate(source, decoder_input_ids=prompt, **given, **GREEDY, **options)
            options["prefill_chunk_size"] = chunk
            assert torch.equal(model.generate(source, decoder_input_ids=prompt, **given, **GREEDY, **options), expected)


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("mixer", ["conv", "rglru", "none"])
def test_padded_prompts_with_start_tokens_are_each_as_alone(mixer, chunk):
    """To prompts without, Transformers gives one before the padding, which is then a hole between it and the prompt."""
    model, source = make_model(LatteForSeq2SeqLM, "macchiato", **SETTINGS, mixer=mixer), make_ids(2, 19)
    options = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}
    short, long = (torch.cat([torch.tensor([[1]]), make_ids(1, length, seed=2)], dim=1) for length in (4, 17))
    padded, mask = pad(short, "left", 13, 0)
    masks = {"decoder_attention_mask": torch.cat([mask, torch.ones_like(long)])}
    both = model.generate(
        source, decoder_input_ids=torch.cat([padded, long]), **masks, **options, prefill_chunk_size=chunk
    )
    for row, prompt in enumerate((short, long)):
        alone = model.generate(source[row : row + 1], decoder_input_ids=prompt, **options)
        assert torch.equal(both.sequences[row, -alone.sequences.shape[1] :], alone.sequences[0])
        for actual, expected in zip(both.logits, alone.logits, strict=True):
            assert_close(actual[row], expected[0], **TIGHT)


@pytest.mark.parametrize("with_mask", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"prefill_chunk_size": 2}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": None}], ids=str
)
@pytest.mark.parametrize("form", FORMS)
def test_a_target_goes_on(form, options, with_mask):
    """Only what is new is read; Transformers would have all of it read again, behind itself, where there is no mask."""
    model, source = make(form), make_ids(1, 19)
    if "assistant_model" in options:
        options = {"assistant_model": make(form)}
    cache, text = make_cache(model), torch.tensor([[1]])
    for turn in range(3):
        masks = {"decoder_attention_mask": torch.ones_like(text)} if with_mask else {}
        expected = model.generate(source, decoder_input_ids=text, **masks, **GREEDY)
        actual = model.generate(source, decoder_input_ids=text, **masks, past_key_values=cache, **GREEDY, **options)
        assert torch.equal(actual, expected)
        text = torch.cat([actual, make_ids(1, 4, seed=turn)], dim=1)
        assert cache.get_seq_length() == text.shape[1] - 5  # all but the last token and the new words


@pytest.mark.parametrize(
    "options", [{}, {"prefill_chunk_size": 2}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": None}], ids=str
)
def test_a_target_that_the_cache_has_read_has_nothing_to_go_on_from(options):
    model, source, target = make(), make_ids(1, 19), torch.cat([torch.tensor([[1]]), make_ids(1, 6)], dim=1)
    if "assistant_model" in options:
        options = {"assistant_model": make()}
    cache = make_cache(model)
    with torch.no_grad():
        model(source, decoder_input_ids=target, past_key_values=cache)
    with pytest.raises(ValueError, match="has read 7 tokens, and the text has no more"):
        model.generate(source, decoder_input_ids=target, past_key_values=cache, **GREEDY, **options)


def test_a_draft_model_reads_only_what_is_new():
    """Its own twin drafts what it would write, so that a forward of the model gives several tokens."""
    model, source, calls = make(), make_ids(1, 19), []
    draft = make()
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    model.generate(source, **GREEDY | {"max_new_tokens": 15, "min_new_tokens": 15}, assistant_model=draft)
    assert len(calls) == 3
