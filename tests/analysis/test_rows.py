"""Rows of implied attention are those of the whole matrix, and their parts sum up to them."""

import pytest
import torch
from torch.testing import assert_close

from latte import LatteForSequenceClassification
from latte.analysis.rows import LONGEST_MATRIX, attention_matrix, attention_row, trace
from tests.analysis.small import FORMS, HEADS, LATENTS, LAYERS, WINDOW, make_model, make_tokens

T = 43


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [1, 8, 100])
def test_rows_are_those_of_the_whole_matrix(form, chunk):
    traces = trace(make_model(form), make_tokens(T), chunk=chunk)
    assert len(traces) == LAYERS
    for layer in traces.values():
        matrix = attention_matrix(layer)
        assert matrix.shape == (HEADS, T, T)
        for token in (0, 1, WINDOW - 1, WINDOW, T - 1):
            row = attention_row(layer, token)
            assert_close(row.weights, matrix[:, token, : token + 1])
            assert_close(row.weights.sum(dim=1), torch.ones(HEADS).double())


@pytest.mark.parametrize("form", ["latte", "macchiato", "softmax"])
def test_attention_of_the_trace_gives_the_layers_output(form):
    model, ids = make_model(form), make_tokens(T)
    layer = model.model.layers[0]
    seen = {}
    handle = layer.attention.output.register_forward_pre_hook(lambda _, inputs: seen.update(y=inputs[0][0]))
    values = layer.attention.value.register_forward_hook(lambda _, __, output: seen.update(v=output[0]))
    with torch.no_grad():
        model(ids[None])
    handle.remove()
    values.remove()
    matrix = attention_matrix(trace(model, ids)["model.layers.0.attention"])
    v = seen["v"].unflatten(-1, (layer.attention.num_value_heads, -1))
    v = v.repeat_interleave(HEADS // v.shape[1], dim=1)
    assert_close(torch.einsum("hts,shd->thd", matrix, v).flatten(1), seen["y"])


@pytest.mark.parametrize("form", FORMS)
def test_parts_sum_to_the_weight(form):
    layer = trace(make_model(form), make_tokens(T))["model.layers.1.attention"]
    row = attention_row(layer, -2)
    assert row.token == T - 2
    for head in range(HEADS):
        top = row.top(head, 9)
        assert len(top) == 9
        assert [x.weight for x in top] == sorted(row.weights[head].tolist(), reverse=True)[:9]
        for attended in top:
            assert attended.weight == pytest.approx(row.weights[head, attended.position].item())
            assert attended.local + sum(attended.latents) == pytest.approx(attended.weight)
            assert len(attended.latents) == (0 if layer.form.num_latents is None else LATENTS)
            if layer.form.window is not None and attended.position <= row.token - WINDOW:
                assert attended.local == 0
    shares = {"latte": 0.0, "window": 1.0, "softmax": 1.0}
    expected = row.states[:, 0] if form == "macchiato" else torch.full((HEADS,), shares[form]).double()
    assert_close(row.local_share, expected)


def test_the_part_of_each_latent():
    layer = trace(make_model("latte"), make_tokens(T))["model.layers.0.attention"]
    row = attention_row(layer, 30)
    parts = row.through(torch.arange(31))
    assert parts.shape == (HEADS, 31, LATENTS)
    assert_close(parts.sum(dim=1), row.states)  # over positions p(s|l,t) sums to 1
    assert_close(parts.sum(dim=2), row.weights)


def test_a_model_that_reads_both_ways():
    model = make_model(kind=LatteForSequenceClassification, causal=False, pad_token_id=0)
    layer = trace(model, make_tokens(T))["model.layers.0.attention"]
    matrix = attention_matrix(layer)
    for token in (0, 20, T - 1):
        row = attention_row(layer, token)
        assert row.weights.shape == (HEADS, T)
        assert_close(row.weights, matrix[:, token])


def test_a_hundred_thousand_tokens_one_row():
    """In memory linear in the text: a matrix would be 80 GB per head."""
    model = make_model(num_hidden_layers=1).float()
    tokens = make_tokens(100_000)
    layer = trace(model, tokens)["model.layers.0.attention"]
    row = attention_row(layer, -1)
    assert row.weights.shape == (HEADS, 100_000)
    assert_close(row.weights.sum(dim=1), torch.ones(HEADS).double())
    far = row.top(0, 100_000)[-1]
    assert far.local + sum(far.latents) == pytest.approx(far.weight)


def test_bad_input():
    model, tokens = make_model(), make_tokens(T)
    layer = trace(model, tokens, ["model.layers.1.attention"])["model.layers.1.attention"]
    with pytest.raises(ValueError, match=f"0 to {T - 1}"):
        attention_row(layer, T)
    with pytest.raises(ValueError, match=r"'nowhere' is none of .* model\.layers\.0\.attention"):
        trace(model, tokens, ["nowhere"])
    with pytest.raises(ValueError, match="chunk is 0"):
        trace(model, tokens, chunk=0)
    long = type(layer)(layer.form, type(layer.parts)(*(x.new_zeros(LONGEST_MATRIX + 1, 1, 1) for x in layer.parts)))
    with pytest.raises(ValueError, match="attention_row"):
        attention_matrix(long)
