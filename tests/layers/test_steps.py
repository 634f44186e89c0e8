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


@torch.no_grad()
def test_full_and_bidirectional_attention_have_no_step():
    for layer in (make_layer("full"), make_layer("latte", causal=False), make_layer("linear")):
        _, state = layer.stream(make_inputs(3))
        with pytest.raises(ValueError, match="a step in place needs causal attention with a window or latents"):
            layer.step_(torch.zeros(B, 1, HIDDEN, dtype=torch.float64), state)
