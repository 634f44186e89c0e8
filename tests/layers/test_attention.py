"""What the attention layer computes: its twins, what may and may not influence what, gradients."""

import pytest
import torch
from torch.testing import assert_close

from latte import LatteAttention
from latte.layers.rotary import rotary
from tests.layers.forms import FORMS, HIDDEN, MAIN_FORMS, B, make_inputs, make_layer, make_mask, twin

CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
EVERY_FORM = pytest.mark.parametrize("form", FORMS)
TIGHT = {"rtol": 0, "atol": 1e-11}
ANGLES = {"rtol": 0, "atol": 2e-5}  # rotary angles are float32


def test_three_lines_in_a_model():
    x = torch.randn(2, 100, 512)
    x = x + LatteAttention(hidden_size=512, num_heads=8, num_latents=16)(x)
    assert x.shape == (2, 100, 512)
    assert x.isfinite().all()


@CAUSAL
@pytest.mark.parametrize("mask", ["none", "left", "holes"])
@EVERY_FORM
def test_is_its_matrix_times_values(form, mask, causal):
    layer, x = make_layer(form, causal=causal), make_inputs(29)
    real = make_mask(mask, 29)
    y = layer(x, mask=real)
    expected = twin(layer, x, real)
    rotates = layer.rope_theta is not None
    assert_close(y, expected, **(ANGLES if rotates else TIGHT))


@EVERY_FORM
def test_without_positions_twins_agree_to_rounding(form):
    layer, x = make_layer(form, rope_theta=None), make_inputs(29)
    assert_close(layer(x), twin(layer, x), **TIGHT)


@EVERY_FORM
def test_future_has_no_influence(form):
    layer, x = make_layer(form), make_inputs(29)
    other = torch.cat([x[:, :17], 100 * make_inputs(12, seed=5)], dim=1)
    assert_close(layer(other)[:, :17], layer(x)[:, :17], **TIGHT)
    assert not torch.allclose(layer(other)[:, 17:], layer(x)[:, 17:])


@EVERY_FORM
def test_both_sides_are_seen(form):
    layer, x = make_layer(form, causal=False), make_inputs(29).requires_grad_()
    for seeing, seen in ((14, slice(15, 16)), (14, slice(12, 13))):
        (grad,) = torch.autograd.grad(layer(x)[:, seeing].sum(), x)
        assert grad[:, seen].abs().amin() > 0


@CAUSAL
@EVERY_FORM
def test_what_stands_in_masked_positions_does_not_matter(form, causal):
    layer, x = make_layer(form, causal=causal), make_inputs(29)
    mask = make_mask("holes", 29)
    garbage = torch.where(mask[..., None], x, 1e3 * make_inputs(29, seed=5))
    assert torch.equal(layer(garbage, mask=mask), layer(x, mask=mask))
    weight = layer.value.weight
    grads = [torch.autograd.grad(layer(z, mask=mask).square().sum(), weight)[0] for z in (garbage, x)]
    assert_close(*grads, rtol=1e-11, atol=1e-11)


@CAUSAL
@EVERY_FORM
def test_left_padding_is_not_there(form, causal):
    layer, x = make_layer(form, causal=causal), make_inputs(23)
    padded = torch.cat([make_inputs(6, seed=5), x], dim=1)
    mask = (torch.arange(29) >= 6).expand(B, 29)
    y = layer(padded, mask=mask)
    assert_close(y[:, 6:], layer(x), **TIGHT)
    assert_close(y[:, :6], layer.output.bias.expand(B, 6, HIDDEN), **TIGHT)


@CAUSAL
@pytest.mark.parametrize("mask", ["none", "holes"])
@EVERY_FORM
def test_packed_is_apart(form, causal, mask):
    layer, x = make_layer(form, causal=causal), make_inputs(37, batch=1)
    real = make_mask(mask, 37, batch=1)
    bounds = [0, 13, 13, 14, 37]
    for dtype in (torch.int32, torch.int64):
        packed = layer(x, mask=real, cu_seqlens=torch.tensor(bounds, dtype=dtype))
        for start, end in ((0, 13), (13, 14), (14, 37)):
            piece = None if real is None else real[:, start:end]
            assert_close(packed[:, start:end], layer(x[:, start:end], mask=piece), **TIGHT)


@CAUSAL
@EVERY_FORM
def test_gradients_reach_every_parameter(form, causal):
    layer, x = make_layer(form, causal=causal), make_inputs(29).requires_grad_()
    layer(x).square().sum().backward()
    for name, parameter in (*layer.named_parameters(), ("x", x)):
        assert parameter.grad.isfinite().all(), name
        reached = parameter.grad if name != "latent_key.bias" else torch.ones(1)  # a constant in all keys is no choice
        assert reached.abs().amax() > 1e-6, name


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_positions_count_real_tokens(form):
    layer, x = make_layer(form), make_inputs(29)
    mask = make_mask("holes", 29)
    place = (mask.cumsum(dim=1) - 1).clamp(min=0)
    assert torch.equal(layer(x, mask=mask, positions=place), layer(x, mask=mask))
    assert_close(layer(x, mask=mask, positions=place + 1000), layer(x, mask=mask), rtol=0, atol=1e-3)


@pytest.mark.parametrize("form", ["macchiato", "window", "full"])
def test_rotary_stands_for_positions(form):
    layer, x = make_layer(form), make_inputs(29)
    positions = torch.randint(0, 100, (B, 29))
    y = layer(x, positions=positions)
    assert torch.equal(layer(x, rotary=rotary(positions, layer.window_head_dim, layer.rope_theta)), y)
    assert not torch.allclose(y, layer(x))
    for wrong in (positions[:, :5], positions[:2]):
        with pytest.raises(ValueError, match=r"positions has shape .*; it must be \[B=3, T=29\]"):
            layer(x, positions=wrong)
    with pytest.raises(ValueError, match="positions and rotary are both given"):
        layer(x, positions=positions, rotary=rotary(positions, layer.window_head_dim))
    with pytest.raises(ValueError, match=r"rotary has 7 angles for heads of width 22; it must have .* 11"):
        layer(x, rotary=rotary(positions, 14))


def test_backends_agree():
    x = make_inputs(29)
    assert_close(make_layer("macchiato rglru", backend="reference")(x), make_layer("macchiato rglru")(x), **TIGHT)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0, 10], "cu_seqlens ends at 10; it must end at the number of tokens, 29"),
        ([0, 10, 40], "cu_seqlens ends at 40"),
        ([5, 29], "cu_seqlens starts at 5"),
        ([0, 20, 10, 29], "cu_seqlens decreases from 20 to 10"),
    ],
)
@EVERY_FORM
def test_bounds_that_do_not_fit_the_row_are_refused(form, bounds, message):
    layer, x = make_layer(form), make_inputs(29)[:1]
    with pytest.raises(ValueError, match=message):
        layer(x, cu_seqlens=torch.tensor(bounds))
