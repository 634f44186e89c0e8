"""With a window over all tokens and no share of the latents, a converted model is its source."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from latte.convert import convert, restore
from tests.convert.sources import FAMILIES, LATENTS, LOCAL, WITH_GLOBAL, make_source, make_tokens

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
LENGTH = 23


def make_pair(family, source=None, **settings):
    source = make_source(family) if source is None else source
    options = {"window": LOCAL, "num_latents": LATENTS, "initial_window_share": 1.0} | settings
    return source, convert(source, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_source_s(family):
    source, converted = make_pair(family)
    tokens = make_tokens(2, LENGTH)
    with torch.no_grad():
        expected, actual = source(tokens).logits, converted(tokens).logits
    assert expected.std() > 0.2
    torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_source_s_with_a_cache(family, kind):
    source, converted = make_pair(family)
    tokens = make_tokens(2, LENGTH)
    config = converted.config
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=40)
    with torch.no_grad():
        expected = source(tokens).logits
        parts = [converted(part, past_key_values=cache).logits for part in tokens.split([9, 3, 1, 1, 9], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, **CLOSE)


@pytest.mark.parametrize("family", WITH_GLOBAL)
def test_local_layers_stay_as_they_are(family):
    """Texts longer than the source's local windows, whose layers are not converted."""
    source, converted = make_pair(family, window=97, layers="global")
    tokens = make_tokens(2, 83)
    cache = DynamicCache(config=converted.config)
    with torch.no_grad():
        expected = source(tokens).logits
        parts = [converted(part, past_key_values=cache).logits for part in tokens.split([50, 2, 1, 1, 29], dim=1)]
        torch.testing.assert_close(converted(tokens).logits, expected, **CLOSE)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_are_not_converted_are_exact_at_any_length(family):
    source, converted = make_pair(family, layers=[1])
    _, other = make_pair(family, source, layers=[0])
    converted.model.layers[1].self_attn = other.model.layers[1].self_attn
    tokens = make_tokens(2, 61)
    with torch.no_grad():
        torch.testing.assert_close(converted(tokens).logits, source(tokens).logits, **CLOSE)


@pytest.mark.parametrize("family", ["gemma3_text", "llama", "mistral"])
def test_generation_is_the_source_s(family):
    source = make_source(family, tie_word_embeddings=False)  # tied, it would write one token again and again
    _, converted = make_pair(family, source)
    tokens = make_tokens(2, 17)
    written = [
        model.generate(tokens, max_new_tokens=LOCAL - 17, min_new_tokens=LOCAL - 17, do_sample=False)
        for model in (source, converted)
    ]
    assert torch.equal(*written)
    assert len(written[0][0, 17:].unique()) > 3


@pytest.mark.parametrize("family", ["gemma2", "qwen3"])
def test_left_padding_is_the_source_s(family):
    source, converted = make_pair(family)
    tokens = make_tokens(3, LENGTH)
    mask = torch.ones_like(tokens)
    mask[0, :7] = mask[2, :1] = 0
    tokens = torch.where(mask == 1, tokens, 0)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        for options in ({}, {"position_ids": positions}):
            expected, actual = (model(tokens, attention_mask=mask, **options).logits for model in (source, converted))
            torch.testing.assert_close(actual[mask == 1], expected[mask == 1], **CLOSE)
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(source.generate(tokens, **options), converted.generate(tokens, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_source_comes_back(family):
    source = make_source(family)
    converted = convert(source, window=7, num_latents=LATENTS)
    back = restore(converted)
    assert type(back) is type(source)
    tokens = make_tokens(2, 61)
    with torch.no_grad():
        torch.testing.assert_close(back(tokens).logits, source(tokens).logits, **CLOSE)


def test_only_converted_models_have_a_source():
    with pytest.raises(ValueError, match="model is LlamaForCausalLM; it must be a converted one"):
        restore(make_source("llama"))


def test_a_source_without_a_cap_on_scores_comes_back():
    """Transformers has Gemma 2 compute no scaled_dot_product_attention, with a cap or without."""
    source = make_source("gemma2", attn_logit_softcapping=None)
    tokens = make_tokens(2, 61)
    with torch.no_grad():
        back = restore(convert(source, window=7, num_latents=LATENTS))
        torch.testing.assert_close(back(tokens).logits, source(tokens).logits, **CLOSE)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_settings_that_a_family_does_not_read_change_nothing(family):
    """Llama's code knows no local layers, and Mistral's no kinds of layers."""
    source = make_source(family, sliding_window=LOCAL, layer_types=["full_attention"] * 2 + ["sliding_attention"])
    _, converted = make_pair(family, source, layers=[1])
    _, other = make_pair(family, source, layers=[0])
    converted.model.layers[1].self_attn = other.model.layers[1].self_attn
    tokens = make_tokens(2, 61)
    with torch.no_grad():
        torch.testing.assert_close(converted(tokens).logits, source(tokens).logits, **CLOSE)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_dynamic_positions_of_a_source_that_has_read_a_long_text(family):
    """Its angles are stretched to that text, and go back with a short one."""
    kind = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    kinds = {"sliding_attention": kind, "full_attention": kind} if family == "gemma3_text" else kind
    source = make_source(family, max_position_embeddings=LOCAL, rope_parameters=kinds)
    tokens = make_tokens(2, 83)
    with torch.no_grad():
        expected = source(tokens[:, :LENGTH]).logits
        source(tokens)
        _, converted = make_pair(family, source)
        for model in (converted, restore(converted), source):
            torch.testing.assert_close(model(tokens[:, :LENGTH]).logits, expected, **CLOSE)


def test_a_head_of_its_own_is_kept_whatever_the_settings_say():
    """Transformers leaves embeddings and head apart where a checkpoint has both and config.json ties them."""
    source = make_source("qwen2", tie_word_embeddings=False)
    source.config.tie_word_embeddings = True
    tokens = make_tokens(2, LENGTH)
    _, converted = make_pair("qwen2", source)
    with torch.no_grad():
        for model in (converted, restore(converted)):
            assert not model.config.tie_word_embeddings
            torch.testing.assert_close(model(tokens).logits, source(tokens).logits, **CLOSE)


def test_bfloat16_is_close():
    source, converted = make_pair("gemma2", make_source("gemma2").bfloat16())
    tokens = make_tokens(2, LENGTH)
    with torch.no_grad():
        expected, actual = source(tokens).logits.float(), converted(tokens).logits.float()
    torch.testing.assert_close(actual, expected, rtol=0.1, atol=0.1)
    assert converted.model.layers[0].self_attn.mixer.a_param.dtype == torch.float32
