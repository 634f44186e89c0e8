"""Converted models are looked into as ours are, with their families' projections, norms and scores."""

import pytest
import torch
from torch.testing import assert_close
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from latte.analysis.measures import measure
from latte.analysis.rows import attention_matrix, attention_row, trace
from latte.analysis.usage import UsageMeter

T, LATENTS, WINDOW = 23, 3, 5
SIZES = {
    "vocab_size": 53, "hidden_size": 24, "intermediate_size": 31, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6,
}  # fmt: skip
SOURCES = {
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, query_pre_attn_scalar=5, attn_logit_softcapping=2.0, sliding_window=7, pad_token_id=0)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, pad_token_id=0)),
}


@pytest.fixture(params=SOURCES)
def model(request):
    from latte.convert import convert

    torch.manual_seed(0)
    source = SOURCES[request.param]().double().eval()
    converted = convert(source, window=WINDOW, num_latents=LATENTS, layers=[0], initial_window_share=0.6)
    with torch.no_grad():
        for parameter in converted.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return converted


@pytest.mark.parametrize(("index", "latents"), [(0, LATENTS), (1, None)])
def test_the_matrix_gives_the_layers_output(model, index, latents):
    tokens, name, seen = torch.randint(1, 53, (T,)), f"model.layers.{index}.self_attn", {}
    attention = model.get_submodule(name)
    handles = [
        attention.o_proj.register_forward_pre_hook(lambda _, inputs: seen.update(y=inputs[0][0])),
        attention.v_proj.register_forward_hook(lambda _, __, output: seen.update(v=output[0])),
    ]
    with torch.no_grad():
        model(tokens[None])
    for handle in handles:
        handle.remove()
    layer = trace(model, tokens, chunk=9)[name]
    assert layer.form.num_latents == latents
    v = seen["v"].unflatten(-1, (2, -1)).repeat_interleave(2, dim=1)
    y = torch.einsum("hts,shd->thd", attention_matrix(layer), v).flatten(1)
    assert_close(y, seen["y"], rtol=1e-6, atol=1e-6)
    assert_close(attention_row(layer, -1).weights, attention_matrix(layer)[:, -1])


def test_usage_and_measures(model):
    tokens = torch.randint(1, 53, (2, T))
    mask = torch.ones_like(tokens)
    mask[0, :6] = 0
    with torch.no_grad(), UsageMeter(model) as meter:
        model(tokens, attention_mask=mask)
    (usage,) = meter.layers()
    assert (usage.name, usage.tokens) == ("model.layers.0.self_attn", 2 * T - 6)
    first, second = measure(model, tokens[1], chunk=7)
    assert first.usage.window_share.shape == (4,)
    assert first.latent_reach.mean.shape == (4, LATENTS)
    assert second.usage is None
    assert second.score_reach.mean.shape == (4,)
