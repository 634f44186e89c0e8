"""The weights that conversion adds: what they are at first, and that training can move them and nothing else."""

import pytest
import torch
from torch import nn

from latte.convert import convert, new_parameters
from latte.convert.latents import output_size
from latte.models.converted_attention import ConvertedAttention
from latte.models.recomputation import recompute_layers
from latte.ops import macchiato_attention, window_attention
from tests.convert.sources import FAMILIES, LATENTS, VOCABULARY, disturb_latents, make_source, make_tokens


def attention_inputs(model, layer=1, length=17):
    """What a layer's attention reads."""
    seen = []
    attention = model.model.layers[layer].self_attn
    handle = attention.register_forward_pre_hook(lambda _, __, arguments: seen.append(arguments), with_kwargs=True)
    with torch.no_grad():
        model(make_tokens(2, length))
    handle.remove()
    return attention, seen[0]["hidden_states"]


@pytest.mark.parametrize("share", [0.3, 0.95, 1.0])
def test_the_window_s_share_is_as_asked_for(share):
    model = convert(make_source("llama"), window=7, num_latents=LATENTS, initial_window_share=share)
    attention, x = attention_inputs(model)
    logits = attention.latent_query(attention.mixer(x)).unflatten(2, (6, LATENTS + 1))
    shares = logits.softmax(-1)
    torch.testing.assert_close(shares[..., 0], torch.full(shares.shape[:3], share))
    torch.testing.assert_close(shares[..., 1:], torch.full_like(shares[..., 1:], (1 - share) / LATENTS))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_layer_is_macchiato_of_the_source_s_projections(family):
    """Against the operation called by hand, and a recurrence whose gates are products by hand."""
    model = convert(make_source(family), window=7, num_latents=LATENTS, layers=[1])
    disturb_latents(model)
    attention, x = attention_inputs(model)
    source, rotary = model.config.source, model.model.rotary_emb
    positions = torch.arange(x.shape[1])[None]
    cos, sin = rotary(x, positions, "full_attention") if family == "gemma3_text" else rotary(x, positions)
    q, k, v = (getattr(attention, f"{name}_proj")(x).unflatten(2, (-1, source["head_dim"])) for name in "qkv")
    if family == "gemma3_text":
        q, k = attention.q_norm(q), attention.k_norm(k)

    def turn(y):
        first, second = y.chunk(2, dim=-1)
        return y * cos[:, :, None] + torch.cat([-second, first], dim=-1) * sin[:, :, None]

    mixed = attention.mixer(x)
    logits = nn.functional.linear(mixed, attention.latent_query.weight, attention.latent_query.bias)
    keys = nn.functional.linear(mixed, attention.latent_key.weight)
    scale = (source["query_pre_attn_scalar"] if family == "gemma3_text" else source["head_dim"]) ** -0.5
    expected, _ = macchiato_attention(
        logits.unflatten(2, (6, -1)), keys.unflatten(2, (6, -1)), v, turn(q), turn(k), window=7, scale=scale,
        backend="reference",
    )  # fmt: skip
    actual = capture_output(model, attention)
    torch.testing.assert_close(actual, attention.o_proj(expected.flatten(2)), rtol=1e-5, atol=1e-5)
    alone = window_attention(turn(q), turn(k), v, window=7, scale=scale).y
    assert (attention.o_proj(alone.flatten(2)) - actual).abs().max() > 1e-2


def capture_output(model, attention):
    seen = []
    handle = attention.register_forward_hook(lambda _, __, output: seen.append(output[0]))
    with torch.no_grad():
        model(make_tokens(2, 17))
    handle.remove()
    return seen[0]


def test_every_weight_of_the_source_is_kept_and_shared():
    source = make_source("gemma2")
    converted = convert(source, window=7)
    kept = converted.state_dict()
    for name, tensor in source.state_dict().items():
        assert kept[name].data_ptr() == tensor.data_ptr()
    assert set(kept) - set(source.state_dict()) == set(new_parameters(converted))
    assert converted.lm_head.weight is converted.model.embed_tokens.weight


@pytest.mark.parametrize("mixer", ["none", "conv", "rglru"])
def test_gradients_reach_all_new_weights_and_no_others(mixer):
    model = convert(make_source("qwen3"), window=5, num_latents=LATENTS, mixer=mixer).train()
    model.requires_grad_(False)
    new = new_parameters(model)
    for weight in new.values():
        weight.requires_grad_(True)
    tokens = make_tokens(2, 37)
    model(tokens, labels=tokens).loss.backward()
    for name, weight in new.items():
        assert weight.grad is not None, name
        assert weight.grad.abs().max() > 0, name
    assert all(weight.grad is None for name, weight in model.named_parameters() if name not in new)


def test_training_the_new_weights_lowers_the_loss():
    """Texts that repeat from further away than the window: only the latents can tell what comes."""
    model = convert(make_source("llama"), window=3, num_latents=LATENTS).train()
    model.requires_grad_(False)
    new = list(new_parameters(model).values())
    for weight in new:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(new, lr=1e-2)
    tokens = make_tokens(3, 19).repeat(1, 2)
    losses = []
    for _ in range(15):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_nothing(family):
    model = convert(make_source(family), window=5, num_latents=LATENTS).train()
    tokens = make_tokens(2, 29)

    def gradients():
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters()}

    expected = gradients()
    recompute_layers(model, {"use_reentrant": False})
    actual = gradients()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6)


def test_keys_and_gates_are_drawn_for_the_size_of_their_inputs():
    source = make_source("llama", hidden_size=96)
    with torch.no_grad():
        for layer in source.model.layers:
            layer.input_layernorm.weight.fill_(20.0)
    attention, x = attention_inputs(convert(source))
    assert 15 < x.square().mean().sqrt() < 25
    assert 0.5 < attention.mixer.recurrence_gate(x).std() < 2
    assert 0.5 < attention.mixer.input_gate(x).std() < 2
    assert 0.1 < attention.latent_key(attention.mixer(x)).std() < 2


def test_the_size_of_a_norm():
    norm = nn.RMSNorm(64, elementwise_affine=True)
    nn.init.constant_(norm.weight, 3.0)
    assert output_size(norm, 64) == pytest.approx(3.0, rel=1e-3)
    nn.init.zeros_(norm.weight)
    assert output_size(norm, 64) == 1.0


def test_the_conventions_that_others_rely_on():
    model = convert(make_source("gemma3_text"), window=7, num_latents=LATENTS, layers="global")
    layers = [layer.self_attn for layer in model.model.layers]
    assert [layer.num_latents for layer in layers] == [None, LATENTS, None]
    assert [layer.window for layer in layers] == [29, 7, 29]
    assert all(isinstance(layer, ConvertedAttention) and layer.num_heads == 6 for layer in layers)
    names = {name.split(".self_attn.")[1].split(".")[0] for name in new_parameters(model)}
    assert names == {"latent_query", "latent_key", "mixer"}


def test_the_loss_needs_no_logits_and_is_that_of_the_logits():
    model = convert(make_source("gemma2"), window=5)
    tokens = make_tokens(2, 23)
    output = model.train()(tokens, labels=tokens)
    assert output.logits is None
    logits = model.eval()(tokens).logits
    assert logits.abs().max() <= 2.0  # the source's own bound
    expected = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=1e-5)
