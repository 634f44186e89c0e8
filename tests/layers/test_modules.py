"""Layers as modules: names of parameters, settings, dtypes, copies, checkpointing, construction without memory."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from latte.layers import GLU, Block, CrossAttention, LatteAttention
from tests.layers.forms import FORMS, HIDDEN, MAIN_FORMS, make_inputs, make_layer, make_mask, tensors

LATENT = {"latent_query": (26, 48), "latent_key": (26, 42)}  # 6 heads, 7 latents and the window
SCORES = {"query": (26, 132), "key": (26, 44)}
REST = {"value": (26, 10), "output": (30, 26)}
PROJECTIONS = {
    "latte": LATENT | REST | {"latent_query": (26, 42)},
    "linear": LATENT | REST | {"latent_query": (26, 42)},
    "macchiato": LATENT | SCORES | REST,
    "window": SCORES | REST,
    "full": SCORES | REST,
}
EVERY_FORM = pytest.mark.parametrize("form", FORMS)


@EVERY_FORM
def test_names_and_shapes_of_parameters(form):
    """They are what checkpoints hold."""
    layer = make_layer(form, bias=False)
    family, _, mixer = form.partition(" ")
    expected = {f"{name}.weight": sizes[::-1] for name, sizes in PROJECTIONS[family].items()}
    if mixer == "conv":
        expected["mixer.weight"] = (26, 3)
    if mixer == "rglru":
        expected["mixer.a_param"] = (26,)
        for gate in ("input_gate", "recurrence_gate"):
            expected |= {f"mixer.{gate}.weight": (13, 2, 2), f"mixer.{gate}.bias": (26,)}
        if family == "window":
            expected["mixer_norm.weight"] = (26,)
    assert {name: tuple(x.shape) for name, x in layer.state_dict().items()} == expected


def test_defaults():
    layer = LatteAttention(512, 8)
    assert (layer.num_latents, layer.head_dim, layer.num_value_heads, layer.window) == (16, 64, 8, None)
    assert layer.causal
    assert layer.mixer is None
    assert layer.value.bias is None
    assert LatteAttention(512, 8, window=128).rope_theta == 10_000.0


@EVERY_FORM
def test_begins_with_logits_of_variance_one(form):
    torch.manual_seed(0)
    layer = LatteAttention(260, 6, **FORMS[form], head_dim=5, mixer_blocks=13, bias=True)
    x = torch.randn(4, 101, 260)
    for name, module in layer.named_children():
        if isinstance(module, nn.Linear) and module.in_features == 260:
            assert 0.9 < module(x).std() < 1.1, name
            assert torch.equal(module.bias, torch.zeros_like(module.bias)), name


@EVERY_FORM
def test_built_without_memory_then_filled(form):
    """`torch.device("meta")`, `to_empty`, `reset_parameters`: a layer like any other."""
    settings = {"head_dim": 5, "mixer_blocks": 13, **FORMS[form]}
    with torch.device("meta"):
        layer = LatteAttention(HIDDEN, 6, **settings)
    assert all(parameter.is_meta for parameter in layer.parameters())
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(torch.nan)
    layer.reset_parameters()
    assert layer(make_inputs(7, dtype=torch.float32)).isfinite().all()
    torch.manual_seed(3)
    layer.reset_parameters()
    usual = LatteAttention(HIDDEN, 6, **settings)
    torch.manual_seed(3)
    usual.reset_parameters()
    assert_close(usual.state_dict(), layer.state_dict(), rtol=0, atol=0)


def test_other_layers_can_be_filled_again():
    with torch.device("meta"):
        layers = nn.ModuleList([GLU(26, 31), CrossAttention(26, 2), Block(LatteAttention(26, 2), GLU(26, 31))])
    layers.to_empty(device="cpu")
    for module in layers.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in layers.parameters())


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_copies_and_round_trips(form):
    layer, x = make_layer(form), make_inputs(13)
    y, state = layer.stream(x)
    other = make_layer(form)
    other.load_state_dict(layer.state_dict(), strict=True)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), other):
        assert torch.equal(twin(x), y)
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    for copied in (pickle.loads(pickle.dumps(state)), torch.load(file)):
        assert type(copied) is type(state)
        assert type(copied.attention) is type(state.attention)
        assert torch.equal(layer.stream(x, copied).y, layer.stream(x, state).y)
    assert type(layer).__name__ in repr(layer)


@EVERY_FORM
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(form, dtype):
    layer, x, mask = make_layer(form), make_inputs(29), make_mask("holes", 29)
    expected = layer(x, mask=mask)
    y, state = layer.to(dtype).stream(x.to(dtype), mask=mask)
    assert y.dtype == dtype
    tolerance = 40 * torch.finfo(dtype).eps * expected.abs().max().item()
    assert_close(y.double(), expected, rtol=0, atol=tolerance)
    floats = [part for part in tensors(state) if part.is_floating_point()]
    assert all(part.dtype in (dtype, torch.float32) for part in floats)


@EVERY_FORM
def test_autocast(form):
    """Parameters and inputs in float32, products in bfloat16, states of sums in float32."""
    layer, x, mask = make_layer(form, torch.float32), make_inputs(29, dtype=torch.float32), make_mask("left", 29)
    expected = layer(x, mask=mask)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer.stream(x, mask=mask)
        later = layer.stream(x[:, :1], state).y
        (grad,) = torch.autograd.grad(y.float().square().sum(), layer.value.weight)
    assert y.dtype == later.dtype == torch.bfloat16
    assert grad.dtype == torch.float32
    assert_close(y.float(), expected, rtol=0, atol=0.1 * expected.abs().max().item())


def test_a_param_may_stay_in_float32():
    layer = make_layer("macchiato rglru", torch.bfloat16)
    layer.mixer.a_param.data = layer.mixer.a_param.data.float()
    x = make_inputs(13, dtype=torch.bfloat16)
    y, state = layer.stream(x)
    y.sum().backward()
    assert (y.dtype, state.mixer.dtype, layer.mixer.a_param.grad.dtype) == (torch.bfloat16, *[torch.float32] * 2)


@pytest.mark.parametrize("form", MAIN_FORMS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(form, reentrant):
    layer, x = make_layer(form), make_inputs(29).requires_grad_()
    leaves = (x, *layer.parameters())

    def gradients(y):
        layer.zero_grad()
        x.grad = None
        y.square().sum().backward()
        return [leaf.grad.clone() for leaf in leaves]

    expected = gradients(layer(x))
    assert_close(gradients(checkpoint(layer, x, use_reentrant=reentrant)), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"hidden_size": 0}, "hidden_size is 0; it must be an integer of at least 1"),
        ({"hidden_size": 26, "num_heads": 4}, "hidden_size is 26, which is no multiple of num_heads, 4; .*head_dim"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_latents": 0}, "num_latents is 0; it must be an integer of at least 1, or None for softmax attention"),
        ({"num_latents": 2.0}, "num_latents is 2.0"),
        ({"window": 0}, r"window is 0; .*at least 1 \(the token itself counts\), or None"),
        ({"window": -1}, "window is -1"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"num_value_heads": 3}, "num_heads is 4, which is no multiple of num_value_heads, 3"),
        ({"num_value_heads": 0}, "num_value_heads is 0"),
        ({"window": 8, "window_head_dim": 0}, "window_head_dim is 0"),
        ({"window_head_dim": 8}, "window_head_dim is 8 without a window; set window"),
        ({"window": 8, "window_head_dim": 7}, "queries and keys are 7 wide; .*even, or set rope_theta=None"),
        ({"window": 8, "head_dim": 7}, "queries and keys are 7 wide"),
        ({"window": 8, "rope_theta": 0.0}, "rope_theta is 0.0; it must be positive"),
        ({"mixer": "mamba"}, "mixer is 'mamba'; it must be one of 'none', 'conv', 'rglru'"),
        ({"mixer": "conv", "conv_size": 0}, "conv_size is 0"),
        ({"mixer": "conv", "conv_size": 4, "causal": False}, "conv_size is 4"),
        ({"mixer": "rglru", "mixer_blocks": 5}, "no multiple of mixer_blocks, 5"),
        ({"num_latents": None, "mixer": "conv"}, "mixer is 'conv' in full attention; set .* or mixer=\"none\""),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"scale": float("inf")}, "scale is inf"),
        ({"backend": "cuda"}, "backend is 'cuda'; it must be one of 'auto'"),
        ({"feature_map": "cos"}, "feature_map is 'cos'; it must be one of"),
        ({"feature_map": "exp", "window": 8}, "linear attention has num_latents features and no window"),
        ({"feature_map": "exp", "num_latents": None}, "linear attention has num_latents features and no window"),
    ],
)
def test_wrong_settings(settings, text):
    with pytest.raises(ValueError, match=text):
        LatteAttention(**{"hidden_size": 64, "num_heads": 4, **settings})


def test_odd_widths_need_no_positions():
    x = make_inputs(5, dtype=torch.float32)
    for settings in ({"num_latents": 3}, {"window": 3, "rope_theta": None}, {"num_latents": None, "rope_theta": None}):
        assert LatteAttention(HIDDEN, 2, head_dim=13, **settings)(x).shape == x.shape


@EVERY_FORM
def test_wrong_input(form):
    layer, x = make_layer(form), make_inputs(5)
    with pytest.raises(ValueError, match=r"x has shape \[3, 5, 25\]; it must be \[B, T, C=26\]"):
        layer(x[..., 1:])
    with pytest.raises(ValueError, match=r"mask has dtype torch.int64; it must be a bool tensor"):
        layer(x, mask=torch.ones(3, 5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"mask has shape \[3, 4\]; it must be \[B=3, T=5\]"):
        layer(x, mask=torch.ones(3, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="cu_seqlens is given with batch size 3"):
        layer(x, cu_seqlens=torch.tensor([0, 5]))
