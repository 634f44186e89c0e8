"""Feed-forward layers and norms, against their formulas."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from latte.layers import GLU, MLP, LayerNorm, RMSNorm, make_feedforward, make_norm
from tests.layers.forms import randomize

HIDDEN, INNER = 13, 29
TIGHT = {"rtol": 0, "atol": 1e-12}
ACTIVATIONS = {
    "gelu": lambda z: z * 0.5 * (1 + torch.erf(z / 2**0.5)),
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": lambda z: z * torch.sigmoid(z),
    "relu": lambda z: z.clamp(min=0),
}


def make_inputs(dtype=torch.float64):
    return 3 * torch.randn((2, 5, HIDDEN), dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp(activation, bias):
    layer, x = randomize(MLP(HIDDEN, INNER, activation, bias)).double(), make_inputs()
    inner = F.linear(x, layer.up.weight, layer.up.bias)
    assert_close(layer(x), F.linear(ACTIVATIONS[activation](inner), layer.down.weight, layer.down.bias), **TIGHT)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_glu(activation, bias):
    layer, x = randomize(GLU(HIDDEN, INNER, activation, bias)).double(), make_inputs()
    gate = ACTIVATIONS[activation](F.linear(x, layer.gate.weight, layer.gate.bias))
    inner = gate * F.linear(x, layer.up.weight, layer.up.bias)
    assert_close(layer(x), F.linear(inner, layer.down.weight, layer.down.bias), **TIGHT)


def test_names_choose():
    mlp, glu = make_feedforward("mlp", HIDDEN, INNER), make_feedforward("glu", HIDDEN, INNER)
    assert (type(mlp), mlp.activation) == (MLP, "gelu")
    assert (type(glu), glu.activation) == (GLU, "silu")
    assert make_feedforward("glu", HIDDEN, INNER, "gelu").activation == "gelu"
    assert type(make_norm("rmsnorm", HIDDEN)) is RMSNorm
    assert type(make_norm("layernorm", HIDDEN)) is LayerNorm
    assert set(mlp.state_dict()) == {"up.weight", "down.weight"}
    assert set(glu.state_dict()) == {"gate.weight", "up.weight", "down.weight"}


def test_rmsnorm():
    norm, x = randomize(RMSNorm(HIDDEN, eps=0.1)).double(), make_inputs()
    assert_close(norm(x), x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + 0.1) * norm.weight, **TIGHT)


@pytest.mark.parametrize("bias", [False, True])
def test_layernorm(bias):
    norm, x = randomize(LayerNorm(HIDDEN, eps=0.1, bias=bias)).double(), make_inputs()
    centred = x - x.mean(dim=-1, keepdim=True)
    expected = centred / torch.sqrt(centred.square().mean(dim=-1, keepdim=True) + 0.1) * norm.weight
    assert_close(norm(x), expected + norm.bias if bias else expected, **TIGHT)
    assert set(norm.state_dict()) == ({"weight", "bias"} if bias else {"weight"})


@pytest.mark.parametrize("name", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", ["float32", "same"])
def test_norms_keep_the_dtype_and_round_once(name, dtype, weights):
    norm = make_norm(name, HIDDEN)
    x = 100 * make_inputs(dtype)
    expected = norm.double()(x.double())
    y = norm.to(dtype if weights == "same" else torch.float32)(x)
    assert y.dtype == dtype
    assert_close(y.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x).dtype == dtype


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: make_norm("batchnorm", 8), "norm is 'batchnorm'; it must be one of 'rmsnorm', 'layernorm'"),
        (lambda: make_feedforward("moe", 8, 8), "feedforward is 'moe'; it must be one of 'mlp', 'glu'"),
        (lambda: MLP(8, 8, "tanh"), "activation is 'tanh'; it must be one of 'gelu', 'gelu_tanh', 'silu', 'relu'"),
        (lambda: GLU(8, 0), "intermediate_size is 0; it must be an integer of at least 1"),
        (lambda: RMSNorm(-1), "hidden_size is -1"),
        (lambda: LayerNorm(True), "hidden_size is True"),
    ],
)
def test_wrong_settings(make, text):
    with pytest.raises(ValueError, match=text):
        make()
