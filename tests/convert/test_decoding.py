"""Converted models as language models: caches, padding, packing, beams, compilation."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from latte.convert import convert
from latte.models import load_cache, save_cache
from latte.models.cache import tensors
from tests.convert.sources import LATENTS, disturb_latents, make_source, make_tokens

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
CASES = {
    "llama, all layers": ("llama", {"layers": "all"}),
    "llama, one layer": ("llama", {"layers": [1]}),
    "gemma 3, global layers": ("gemma3_text", {"layers": "global", "mixer": "conv"}),
    "gemma 2, all layers": ("gemma2", {"layers": "all", "mixer": "none"}),
}
WINDOW = 7


def make_model(case):
    family, options = CASES[case]
    source = make_source(family, tie_word_embeddings=False)
    model = convert(source, window=WINDOW, num_latents=LATENTS, initial_window_share=0.6, **options)
    disturb_latents(model)
    return model.eval()


def make_cache(model, kind):
    return (
        DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=60)
    )


@pytest.fixture(params=CASES)
def model(request):
    return make_model(request.param)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_cut_anywhere_is_the_same(model, kind):
    tokens, cache = make_tokens(2, 43), make_cache(model, kind)
    parts = [model(part, past_key_values=cache).logits for part in tokens.split([20, 1, 1, 3, 1, 17], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens).logits, **CLOSE)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_a_prefix_can_be_saved(model, kind, tmp_path):
    tokens, cache = make_tokens(2, 43), make_cache(model, kind)
    model(tokens[:, :31], past_key_values=cache)
    save_cache(cache, tmp_path / "prefix", model.config)
    loaded = load_cache(tmp_path / "prefix", model.config)
    torch.testing.assert_close(
        model(tokens[:, 31:], past_key_values=loaded).logits, model(tokens).logits[:, 31:], **CLOSE
    )


@torch.no_grad()
def test_padding_does_not_matter(model):
    tokens = make_tokens(1, 31)
    padded = torch.cat([make_tokens(1, 6), tokens], dim=1)
    mask = (torch.arange(37) >= 6).long()[None]
    expected = model(tokens).logits
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 6:], expected, **CLOSE)
    cache = DynamicCache(config=model.config)
    first = model(padded[:, :20], attention_mask=mask[:, :20], past_key_values=cache).logits
    rest = model(padded[:, 20:], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(torch.cat([first, rest], dim=1)[:, 6:], expected, **CLOSE)


@torch.no_grad()
def test_packed_texts_do_not_see_each_other(model):
    texts = [make_tokens(1, length) for length in (13, 1, 22)]
    row = torch.cat(texts, dim=1)
    expected = torch.cat([model(text).logits for text in texts], dim=1)
    positions = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    bounds = torch.tensor([0, 13, 14, 36], dtype=torch.int32)
    numbers = torch.tensor([0] * 13 + [1] + [2] * 22)[None]
    for packing in ({"position_ids": positions}, {"cu_seq_lens_q": bounds}, {"seq_idx": numbers}):
        torch.testing.assert_close(model(row, **packing).logits, expected, **CLOSE)


def test_generation(model):
    tokens = make_tokens(2, 17)
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    expected = tokens
    with torch.no_grad():
        for _ in range(9):
            scores = model(expected, use_cache=False).logits[:, -1]
            scores[:, 2] = -torch.inf  # no end
            expected = torch.cat([expected, scores.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(model.generate(tokens, **options), expected)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(tokens, **options, **static), expected)
    assert torch.equal(model.generate(tokens, **options, prefill_chunk_size=5), expected)
    assert torch.equal(model.generate(tokens, **options, use_cache=False), expected)


def test_beams_and_assistance():
    model = make_model("llama, all layers")
    tokens = make_tokens(1, 17)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    beams = model.generate(tokens, **options, num_beams=3, num_return_sequences=3)
    plain = model.generate(tokens, **options, num_beams=3, num_return_sequences=3, use_cache=False)
    assert torch.equal(beams, plain)
    assert torch.equal(model.generate(tokens, **options, assistant_model=model), model.generate(tokens, **options))


@torch.no_grad()
def test_the_cache_does_not_grow():
    sizes = {}
    for case in ("llama, all layers", "gemma 3, global layers", "llama, one layer"):
        model, sizes[case] = make_model(case), []
        for length in (40, 80):
            cache = DynamicCache(config=model.config)
            model(make_tokens(1, length), past_key_values=cache)
            sizes[case].append(sum(x.nbytes for layer in cache.layers for x in tensors(layer.state)))
    assert len(set(sizes["llama, all layers"])) == 1
    assert len(set(sizes["gemma 3, global layers"])) == 1
    assert len(set(sizes["llama, one layer"])) == 2


def test_memory_is_linear_in_the_length():
    """No tensor of the forward has two axes of the text's length."""
    model = make_model("gemma 3, global layers")
    length, seen = 131, []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            output = function(*arguments, **(options or {}))
            for x in torch.utils._pytree.tree_leaves(output):
                if isinstance(x, torch.Tensor):
                    seen.append(max(x.numel(), 1))
            return output

    with torch.no_grad(), Watch():
        model(make_tokens(1, length), attention_mask=torch.ones(1, length))
    assert max(seen) < length * length


def test_hidden_states_are_given():
    model = make_model("gemma 2, all layers")
    output = model(make_tokens(2, 11), output_hidden_states=True)
    assert [tuple(x.shape) for x in output.hidden_states] == [(2, 11, 42)] * 4


def test_compiled_without_breaks():
    model = make_model("gemma 3, global layers").train()
    tokens = make_tokens(2, 29)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, model(tokens, labels=tokens).loss, rtol=1e-5, atol=1e-5)
    loss.backward()
    torch.compiler.reset()


def test_another_model_s_cache_is_refused():
    model = make_model("llama, all layers")
    source = make_source("llama")
    with pytest.raises(ValueError, match="another model"):
        model(make_tokens(1, 3), past_key_values=DynamicCache(config=source.config))
    with pytest.raises(ValueError, match="exactly one"):
        model()
