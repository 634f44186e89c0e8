"""Speed and the size of the cache."""

import pytest
from transformers import DynamicCache

from latte.tasks.evaluation import decode_speed
from tests.tasks.evaluation.small import HEADS, make_model


def test_a_state_that_does_not_grow():
    short, long = decode_speed(make_model("macchiato"), [16, 64], steps=3)
    assert (short.length, long.length) == (16, 64)
    assert short.cache_bytes == long.cache_bytes > 0


def test_a_cache_that_grows():
    results = decode_speed(make_model("llama"), [16, 64], batch=3, steps=3)
    for result in results:
        per_token = 2 * 2 * HEADS["num_key_value_heads"] * HEADS["head_dim"] * 4  # keys and values of two layers
        assert result.cache_bytes == 3 * result.length * per_token
        assert result.tokens_per_s == pytest.approx(3 / result.step_seconds)
        assert result.prefill_tokens_per_s == pytest.approx(3 * result.length / result.prefill_seconds)


def test_the_cache_is_that_of_transformers():
    model = make_model("gemma3")
    cache = DynamicCache(config=model.config)
    (result,) = decode_speed(model, [16], steps=1)
    model(input_ids=model.dummy_inputs["input_ids"][:1, :1].repeat(1, 16), past_key_values=cache)
    held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    assert held <= result.cache_bytes <= held + 64
