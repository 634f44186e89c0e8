"""An explicit state: a sequence cut anywhere is the whole sequence."""

import pytest
import torch
from torch.testing import assert_close

from latte.layers import AttentionOutput
from tests.layers.forms import (
    FORMS,
    MAIN_FORMS,
    B,
    assert_states_close,
    make_inputs,
    make_layer,
    make_mask,
    tensors,
)

T = 29
TIGHT = {"rtol": 0, "atol": 1e-11}
EVERY_FORM = pytest.mark.parametrize("form", FORMS)
CUTS = {
    "two": [13, T],
    "with empty pieces": [0, 13, 13, T, T],
    "token by token": list(range(1, T + 1)),
    "prompt, then tokens": [20, *range(21, T + 1)],
    "tokens, then a chunk": [1, 2, 3, T],
}


def stream(layer, x, cuts, mask=None, **options) -> AttentionOutput:
    ys, state, start = [], None, 0
    for end in cuts:
        piece = None if mask is None else mask[:, start:end]
        y, state = layer.stream(x[:, start:end], state, mask=piece, **options)
        ys.append(y)
        start = end
    return AttentionOutput(torch.cat(ys, dim=1), state)


def select(part, rows):
    """A state with those rows of every tensor."""
    if isinstance(part, torch.Tensor):
        return part[rows]
    return None if part is None else type(part)(*(select(inner, rows) for inner in part))


@pytest.mark.parametrize("mask", ["none", "left", "holes"])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@EVERY_FORM
def test_cut_is_whole(form, cuts, mask):
    layer, x = make_layer(form), make_inputs(T)
    real = make_mask(mask, T)
    whole, cut = layer.stream(x, mask=real), stream(layer, x, cuts, real)
    assert_close(whole.y, layer(x, mask=real), **TIGHT)
    assert_close(cut.y, whole.y, **TIGHT)
    assert_states_close(cut.state, whole.state, **TIGHT)
    assert cut.state.position.tolist() == ([T] * B if real is None else real.sum(dim=1).tolist())


@EVERY_FORM
def test_masked_prompt_then_tokens_without_mask(form):
    """Generation from a batch with left padding: only the prompt has a mask."""
    layer, x = make_layer(form), make_inputs(T)
    mask = make_mask("holes", T)
    mask[:, 20:] = True
    _, state = layer.stream(x[:, :20], mask=mask[:, :20])
    assert_close(layer.stream(x[:, 20:], state).y, layer(x, mask=mask)[:, 20:], **TIGHT)


@EVERY_FORM
def test_gradients_flow_through_the_state(form):
    layer, x = make_layer(form), make_inputs(T).requires_grad_()
    parameters = (x, *layer.parameters())
    whole = torch.autograd.grad(layer(x).square().sum(), parameters)
    cut = torch.autograd.grad(stream(layer, x, [13, 20, T]).y.square().sum(), parameters)
    assert_close(cut, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_packed_sequences_have_a_state_each(form):
    layer, x = make_layer(form), make_inputs(T, batch=1)
    mask = make_mask("holes", T, batch=1)
    first, second = torch.tensor([0, 5, 5, 17]), torch.tensor([0, 3, 7, 12])
    y, state = layer.stream(x[:, :17], mask=mask[:, :17], cu_seqlens=first)
    assert state.position.tolist() == [int(mask[0, :5].sum()), 0, int(mask[0, 5:17].sum())]
    z, state = layer.stream(x[:, 17:], state, mask=mask[:, 17:], cu_seqlens=second)
    for n in range(3):
        parts = [slice(first[n], first[n + 1]), slice(17 + second[n], 17 + second[n + 1])]
        alone, real = (torch.cat([part[:, s] for s in parts], dim=1) for part in (x, mask))
        expected, last = layer.stream(alone, mask=real)
        actual = torch.cat([y[:, parts[0]], z[:, second[n] : second[n + 1]]], dim=1)
        assert_close(actual, expected, **TIGHT)
        assert state.position[n] == last.position
        if form != "full":  # whose rows have padding
            assert_states_close(select(state, slice(n, n + 1)), last, **TIGHT)


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_rows_can_be_reordered(form):
    """Beams: the state's first axis is the batch, in every part."""
    layer, x = make_layer(form), make_inputs(T)
    order = torch.tensor([2, 0, 0, 1])

    state = layer.stream(x[:, :20]).state
    y = layer.stream(x[order, 20:], select(state, order)).y
    assert_close(y, layer(x)[order, 20:], **TIGHT)


@pytest.mark.parametrize("form", [form for form in FORMS if not form.startswith("full")])
def test_size_of_the_state_does_not_depend_on_the_context(form):
    layer = make_layer(form)
    short, long = (layer.stream(make_inputs(tokens)).state for tokens in (5, 97))
    assert [x.shape for x in tensors(short)] == [x.shape for x in tensors(long)]


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_states_are_never_written_to(form):
    layer, x = make_layer(form), make_inputs(T)
    state = layer.stream(x[:, :20]).state
    before = [part.clone() for part in tensors(state)]
    layer.stream(x[:, 20:], state)
    layer.stream(x[:, 20:21], state)
    assert all(map(torch.equal, tensors(state), before))


@pytest.mark.parametrize("form", ["latte", "macchiato", "window", "full"])
def test_bidirectional_pieces_see_the_past(form):
    """Nothing of calls to come, but all of this call and of the past: the last token sees everything."""
    layer, x = make_layer(form, causal=False), make_inputs(T)
    first = layer.stream(x[:, :13])
    assert_close(first.y, layer(x[:, :13]), **TIGHT)
    y = layer.stream(x[:, 13:], first.state).y
    assert_close(y[:, -1], layer(x)[:, -1], **TIGHT)


@pytest.mark.parametrize("mixer", ["conv", "rglru"])
def test_bidirectional_mixers_stream_from_the_left(mixer):
    layer, x = make_layer("latte", causal=False, mixer=mixer, conv_size=5).mixer, make_inputs(T)
    whole = layer(x)
    first = layer.stream(x[:, :13])
    later = layer.stream(x[:, 13:], first.state)
    assert_close(later.y, whole[:, 13:], **TIGHT)  # which depends on the past and on its own future
    assert_close(later.state, layer.stream(x).state, **TIGHT)
    assert not torch.allclose(first.y, whole[:, :13])


def test_foreign_states_are_refused():
    x = make_inputs(T)
    states = {form: make_layer(form).stream(x).state for form in FORMS}
    with pytest.raises(ValueError, match="state is LatteState; it must be a AttentionState"):
        make_layer("latte").stream(x, states["latte"].attention)
    for form, other, text in (
        ("latte", "macchiato", "state is MacchiatoState; it must be a LatteState"),
        ("macchiato", "latte", "state is LatteState; it must be a MacchiatoState"),
        ("full", "window", "state.attention is WindowState; it must be a SoftmaxState"),
        ("latte", "latte conv", "state has a mixer's memory"),
        ("latte conv", "latte", "state has no mixer's memory"),
        ("latte conv", "latte rglru", r"state has shape \[3, 26\]"),
    ):
        with pytest.raises(ValueError, match=text):
            make_layer(form).stream(x, states[other])
    for form in MAIN_FORMS:
        with pytest.raises(ValueError, match="state"):
            make_layer(form).stream(x[:2], states[form])
    for settings in ({"num_value_heads": 3}, {"window_head_dim": 4}, {"head_dim": 3}):
        with pytest.raises(ValueError, match=r"state.(keys|values) has shape .*; it must be \[B=3, "):
            make_layer("full").stream(x, make_layer("full", **settings).stream(x).state)
