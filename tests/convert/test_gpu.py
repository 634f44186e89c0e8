"""Converted models on a GPU: exact, step by step, and in CUDA graphs."""

import pytest
import torch
from transformers import DynamicCache

from latte.convert import calibrate, convert
from tests.convert.sources import FAMILIES, LATENTS, LOCAL, disturb_latents, make_source, make_tokens

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_source_s(family):
    source = make_source(family).cuda()
    converted = convert(source, window=LOCAL, num_latents=LATENTS, initial_window_share=1.0)
    tokens, cache = make_tokens(2, 23).cuda(), DynamicCache(config=converted.config)
    with torch.no_grad():
        expected = source(tokens).logits
        torch.testing.assert_close(converted(tokens).logits, expected, rtol=1e-3, atol=1e-3)
        parts = [converted(part, past_key_values=cache).logits for part in tokens.split([9, 3, 1, 1, 9], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_the_whole(family, dtype):
    source = make_source(family, hidden_size=96, num_attention_heads=6, head_dim=32).to("cuda", dtype)
    model = convert(source, window=7, num_latents=LATENTS, initial_window_share=0.6)
    disturb_latents(model.cpu())
    model, tokens = model.cuda(), make_tokens(3, 43).cuda()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in tokens.split([20, 1, 1, 1, 20], dim=1)]
        expected = model(tokens).logits.float()
    error = (torch.cat(parts, dim=1).float() - expected).norm() / expected.norm()
    assert error < (1e-4 if dtype == torch.float32 else 0.03)  # of bfloat16, its own distance from float32 is 0.02


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # one that torch.compile captures to set itself up
def test_generation_in_cuda_graphs():
    model = convert(make_source("gemma3_text", tie_word_embeddings=False).cuda(), window=7, num_latents=LATENTS)
    tokens = make_tokens(2, 17).cuda()
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    expected = model.generate(tokens, **options)
    assert torch.equal(model.generate(tokens, **options, cache_implementation="static"), expected)


def test_training_compiled():
    model = convert(make_source("llama").cuda(), window=7, num_latents=LATENTS).train()
    tokens = make_tokens(2, 131).cuda()
    loss = torch.compile(model, fullgraph=True)(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, model(tokens, labels=tokens).loss, rtol=1e-3, atol=1e-3)
    loss.backward()


def test_calibration():
    source = make_source("llama").cuda()
    model = convert(source, window=7, num_latents=LATENTS, mixer="none")
    before = model(make_tokens(2, 71).cuda()).logits
    calibrate(model, source, list(make_tokens(3, 71)))
    after = model(make_tokens(2, 71).cuda()).logits
    assert after.isfinite().all()
    assert not torch.equal(before, after)
