"""One token in place is one token of a stream."""

import pytest
import torch
from torch.testing import assert_close

from tests.layers.forms import FORMS, HIDDEN, B, make_inputs, make_layer, make_mask


def flat(state):
    return [y for x in state if x is not None for y in (flat(x) if isinstance(x, tuple) else [x])]


def copied(state):
    return type(state)(*(copied(x) if isinstance(x, tuple) else x if x is None else x.clone() for x in state))


@pytest.mark.parametrize("form", [form for form in FORMS if form != "linear" and not form.startswith("full")])
@pytest.mark.parametrize("mask", ["none", "left"])
@torch.no_grad()
def test_steps_are_a_stream(form, mask):
    layer, x, real = make_layer(form), make_inputs(29), make_mask(mask, 29)
    _, state = layer.stream(x[:, :13], mask=None if real is None else real[:, :13])
    mine = copied(state)
    addresses = [tensor.data_ptr() for tensor in flat(mine)]
    for t in range(13, 29):
        now = None if real is None else real[:, t : t + 1]
        expected, state = layer.stream(x[:, t : t + 1], state, mask=now)
        assert_close(layer.step_(x[:, t : t + 1], mine, mask=now), expected)
        assert_close(flat(mine), flat(state))
    assert addresses == [tensor.data_ptr() for tensor in flat(mine)]


@pytest.mark.parametrize("form", [form for form in FORMS if form != "linear" and not form.startswith("full")])
@pytest.mark.parametrize("before", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("after", [torch.float32, torch.float64, torch.bfloat16])
@torch.no_grad()
def test_steps_from_a_state_of_another_dtype(form, before, after):
    """As a stream takes it; the state in place keeps its dtype."""
    x = make_inputs(16)
    _, state = make_layer(form).to(before).stream(x[:, :13].to(before))
    mine, layer, x = copied(state), make_layer(form).to(after), x.to(after)
    precise = torch.bfloat16 not in (before, after)
    for t in range(13, 16):
        expected, state = layer.stream(x[:, t : t + 1], state)
        y = layer.step_(x[:, t : t + 1], mine)
        assert_close(y, expected, **({"rtol": 1e-4, "atol": 1e-4} if precise else {"rtol": 0.05, "atol": 0.05}))


@torch.no_grad()
def test_full_and_bidirectional_attention_have_no_step():
    for layer in (make_layer("full"), make_layer("latte", causal=False), make_layer("linear")):
        _, state = layer.stream(make_inputs(3))
        with pytest.raises(ValueError, match="a step in place needs causal attention with a window or latents"):
            layer.step_(torch.zeros(B, 1, HIDDEN, dtype=torch.float64), state)


@pytest.mark.parametrize(
    ("form", "other", "settings", "message"),
    [
        ("latte", "macchiato", {}, "state is MacchiatoState; it must be a LatteState"),
        ("macchiato", "latte", {}, "state is LatteState; it must be a MacchiatoState"),
        ("window", "macchiato", {}, "state is MacchiatoState; it must be a WindowState"),
        ("macchiato", "macchiato", {"window": 5}, r"state.valid has shape \[3, 4\]; it must be \[B=3, w-1=10\]"),
        ("macchiato", "macchiato", {"window_head_dim": 4}, r"state.keys has .* it must be \[B=3, w-1=10, Hv=2, E=22\]"),
        ("macchiato", "macchiato", {"num_value_heads": 3}, r"state.keys has shape \[3, 10, 3, 22\]"),
        ("window", "window", {"head_dim": 3}, r"state.values has .* it must be \[B=3, w-1=10, Hv=2, D=5\]"),
        ("latte", "latte", {"num_latents": 1}, r"state.log_norm has .* it must be \[B=3, H=6, L=7\]"),
        ("latte", "latte", {"head_dim": 1}, r"state.mean has .* it must be \[B=3, H=6, L=7, D=5\]"),
    ],
)
@torch.no_grad()
def test_states_of_other_settings_are_refused(form, other, settings, message):
    """They would be written to, where sizes can be broadcast without anyone noticing."""
    _, state = make_layer(other, **settings).stream(make_inputs(13))
    with pytest.raises(ValueError, match=message):
        make_layer(form).step_(make_inputs(1), state)
