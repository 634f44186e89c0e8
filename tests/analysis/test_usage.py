"""The meter measures what the model does, counts every real token once, and changes nothing."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from latte import LatteForPairClassification, LatteForSeq2SeqLM
from latte.analysis.usage import COLLAPSE_THRESHOLD, LayerUsage, UsageMeter, merge_usage
from latte.layers import LatteAttention
from latte.models.recomputation import recompute_layers
from tests.analysis.small import HEADS, LATENTS, LAYERS, make_model, make_tokens, slow_logits

B, T = 2, 29


def measured(model, *args, **kwargs):
    with torch.no_grad(), UsageMeter(model) as meter:
        model(*args, **kwargs)
    return meter.layers()


def assert_same_usage(actual, expected):
    assert [layer.name for layer in actual] == [layer.name for layer in expected]
    for a, b in zip(actual, expected, strict=True):
        assert a.tokens == b.tokens
        assert_close((a.usage, a.entropy), (b.usage, b.entropy))


@pytest.mark.parametrize("form", ["latte", "macchiato"])
def test_it_is_the_average_over_tokens(form):
    model, ids = make_model(form), make_tokens(B, T)
    layers = measured(model, ids)
    assert [layer.name for layer in layers] == [f"model.layers.{index}.attention" for index in range(LAYERS)]
    for layer, (logits, _) in zip(layers, slow_logits(model, ids), strict=True):
        p = torch.softmax(logits, dim=-1).flatten(0, 1)
        entropies = torch.tensor([[-sum(x * math.log(x) for x in head) for head in token] for token in p.tolist()])
        assert layer.tokens == B * T
        assert_close(layer.usage, p.mean(dim=0))
        assert_close(layer.entropy, entropies.double().mean(dim=0), rtol=1e-5, atol=1e-6)
        assert_close(layer.usage.sum(dim=1), torch.ones(HEADS).double())
        if form == "latte":
            assert layer.window_share is None
        else:
            assert_close(layer.window_share, p[..., 0].mean(dim=0))
        assert layer.latent_usage.shape == (HEADS, LATENTS)


def make_usage(rows, latents, entropy=0.0):
    usage = torch.tensor(rows, dtype=torch.float64)
    return LayerUsage("layer", latents, 11, torch.full((len(rows),), entropy, dtype=torch.float64), usage)


def test_effective_latents_leave_the_window_out():
    # a window that takes nine tenths changes nothing; one latent, two alike of four, all four, and none
    usage = make_usage(
        [[0.9, 0.1, 0, 0, 0], [0, 0.5, 0.5, 0, 0], [0.9, 0.025, 0.025, 0.025, 0.025], [1, 0, 0, 0, 0]], latents=4
    )
    assert_close(usage.effective_latents, torch.tensor([1, 2, 4, 0]).double())
    assert_close(usage.collapse_score, torch.tensor([1, 2 / 3, 0, 1]).double())
    assert usage.collapsed.tolist() == [True, False, False, True]


def test_the_threshold():
    latents = 16

    def score(share):  # one latent takes `share`, the others the rest
        rest = (1 - share) / (latents - 1)
        return make_usage([[share, *[rest] * (latents - 1)]], latents)

    mild, heavy = score(0.8), score(0.9)
    assert mild.collapse_score < COLLAPSE_THRESHOLD < heavy.collapse_score
    assert (mild.collapsed.tolist(), heavy.collapsed.tolist()) == ([False], [True])
    assert heavy.effective_latents < 2.5 < mild.effective_latents


def test_a_single_latent_cannot_collapse():
    usage = make_usage([[0.3, 0.7]], latents=1)
    assert usage.collapse_score.tolist() == [0]
    assert usage.collapsed.tolist() == [False]


def test_information_tells_certain_choices_from_uniform_ones():
    uniform = make_usage([[0.25] * 4], latents=4, entropy=math.log(4))
    certain = make_usage([[0.25] * 4], latents=4, entropy=0.0)
    assert uniform.information.item() == pytest.approx(0)
    assert certain.information.item() == pytest.approx(math.log(4))


def test_padding_does_not_count():
    model, ids = make_model(), make_tokens(B, T)
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    padded = measured(model, ids, attention_mask=mask)
    alone = zip(measured(model, ids[:1, 11:]), measured(model, ids[1:]), strict=True)
    assert_same_usage(padded, [merge_usage(parts) for parts in alone])
    assert_same_usage(measured(model, ids, mask), padded)  # as a positional argument


def test_packed_rows_count_every_token():
    model, ids = make_model(), make_tokens(1, T)
    packed = measured(model, ids, cu_seq_lens_q=torch.tensor([0, 13, T]), use_cache=False)
    alone = zip(measured(model, ids[:, :13]), measured(model, ids[:, 13:]), strict=True)
    assert_same_usage(packed, [merge_usage(parts) for parts in alone])


def test_steps_with_a_cache_count_as_one_pass_does():
    model, ids = make_model(), make_tokens(B, T)
    with torch.no_grad(), UsageMeter(model) as meter:
        cache = model(ids[:, :20], use_cache=True).past_key_values
        for place in range(20, T):
            model(ids[:, place : place + 1], attention_mask=torch.ones(B, place + 1), past_key_values=cache)
    assert_same_usage(meter.layers(), measured(model, ids))


def test_results_and_gradients_are_what_they_were():
    model, ids = make_model().train(), make_tokens(B, T)

    def run():
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        return loss, [parameter.grad for parameter in model.parameters()]

    expected = run()
    with UsageMeter(model):
        assert_close(run(), expected, rtol=1e-12, atol=1e-12)
    assert_close(run(), expected, rtol=0, atol=0)


def test_checkpointing_counts_once():
    model, ids = make_model().train(), make_tokens(B, T)
    expected = measured(model, ids, use_cache=False)
    recompute_layers(model)
    with UsageMeter(model) as meter:
        model(ids, labels=ids).loss.backward()
    assert_same_usage(meter.layers(), expected)


def test_hooks_go_away_even_after_an_error():
    model = make_model()
    with pytest.raises(IndexError), UsageMeter(model) as meter:
        model(torch.tensor([[1000]]))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with meter:
        model(make_tokens(B, T))
    assert meter.layers()[0].tokens == B * T


def test_reset_forgets():
    model = make_model()
    with UsageMeter(model) as meter:
        model(make_tokens(B, 5))
        meter.reset()
        model(make_tokens(B, T))
    assert_same_usage(meter.layers(), measured(model, make_tokens(B, T)))


def test_masks_of_both_texts_of_a_pair():
    model = make_model(kind=LatteForPairClassification, causal=False, pad_token_id=0, num_labels=2)
    first, second = make_tokens(B, T), make_tokens(B, 17, seed=1)
    first[0, 20:], second[1, 4:] = 0, 0
    layers = measured(
        model, first, attention_mask=first.ne(0).long(), input_ids_b=second, attention_mask_b=second.ne(0).long()
    )
    assert layers[0].tokens == first.ne(0).sum() + second.ne(0).sum()


def test_a_source_mask_is_not_the_targets():
    model = make_model(kind=LatteForSeq2SeqLM, num_encoder_layers=1, num_cross_latents=2, pad_token_id=0)
    source, target = make_tokens(B, T), make_tokens(B, T, seed=1)
    mask = torch.ones_like(source)
    mask[0, 9:] = 0
    counts = {
        layer.name: layer.tokens for layer in measured(model, source, attention_mask=mask, decoder_input_ids=target)
    }
    assert {name: count for name, count in counts.items() if "decoder" not in name} == {
        "model.encoder.layers.0.attention": B * T - 20
    }
    decoder = {name: count for name, count in counts.items() if "decoder" in name}
    assert any("cross_attention" in name for name in decoder)
    assert set(decoder.values()) == {B * T}


class Converted(nn.Module):
    """A layer as converted models have: scores [B 1 T S] for a mask inside, the two-dimensional one outside."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.num_latents, self.window = HEADS, LATENTS, 7
        self.latent_query = nn.Linear(4, HEADS * (LATENTS + 1))
        self.latent_key = nn.Linear(4, HEADS * LATENTS)

    def forward(self, hidden_states, attention_mask=None):
        return self.latent_query(hidden_states).sum(dim=-1)


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Converted()

    def forward(self, x, attention_mask=None):
        return self.layer(x, attention_mask=attention_mask[:, None, None].log())


def test_converted_layers_and_masks_around_them():
    torch.manual_seed(0)
    model, x = Wrapped(), torch.randn(B, T, 4)
    mask = torch.ones(B, T)
    mask[1, 3:] = 0
    (layer,) = measured(model, x, mask)
    p = torch.softmax(model.layer.latent_query(x).unflatten(-1, (HEADS, -1)), dim=-1)
    assert (layer.name, layer.tokens) == ("layer", T + 3)
    assert_close(layer.usage, p[mask.bool()].double().mean(dim=0), rtol=1e-5, atol=1e-6)


def test_some_of_the_heads_are_not_taken_for_all():
    """As tensor parallelism deals them out: an even number of latents could be read as half as many of all heads."""
    layer = LatteAttention(12, HEADS, 4)
    layer.num_heads *= 2
    with pytest.raises(ValueError, match="tensor parallelism"):
        measured(layer, torch.randn(B, T, 12))


def test_a_layer_alone():
    torch.manual_seed(0)
    layer, x = LatteAttention(12, HEADS, LATENTS), torch.randn(B, T, 12)
    (usage,) = measured(layer, x)
    assert (usage.name, usage.tokens) == ("", B * T)


def test_without_latents_there_is_nothing_to_measure():
    with pytest.raises(ValueError, match="no attention layer with latents"):
        UsageMeter(make_model("softmax"))


def test_a_meter_that_saw_nothing_says_so():
    meter = UsageMeter(make_model())
    with pytest.raises(ValueError, match="no token has gone through"):
        meter.layers()
    with pytest.raises(ValueError, match="active already"), meter, meter:
        pass


def test_records_are_plain_numbers():
    record = measured(make_model(), make_tokens(B, T))[0].record()
    assert record["layer"] == "model.layers.0.attention"
    assert {len(record[word]) for word in ("entropy", "effective_latents", "window_share", "collapsed")} == {HEADS}
    assert all(type(x) is float for x in record["entropy"])
    assert all(type(x) is bool for x in record["collapsed"])
