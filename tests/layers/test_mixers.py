"""The mixers by themselves, against loops over tokens."""

import pytest
import torch
from torch.testing import assert_close

from latte.layers import RGLRU, BlockDiagonal, ShortConvolution, make_mixer
from latte.layers.mixers import initial_a_param
from latte.ops import rglru
from tests.layers.forms import BLOCKS, HIDDEN, B, make_inputs, make_mask, mixer_twin, randomize

TIGHT = {"rtol": 0, "atol": 1e-12}
KINDS = [("conv", 1), ("conv", 3), ("conv", 5), ("rglru", 3)]
EVERY_KIND = pytest.mark.parametrize(("name", "size"), KINDS, ids=[f"{name} {size}" for name, size in KINDS])
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


def make(name, size=3, causal=True):
    torch.manual_seed(0)
    mixer = make_mixer(name, HIDDEN, conv_size=size, blocks=BLOCKS, causal=causal, bias=True)
    return randomize(mixer).double()


@CAUSAL
@pytest.mark.parametrize("mask", ["none", "left", "holes"])
@EVERY_KIND
def test_is_a_loop_over_tokens(name, size, mask, causal):
    mixer, x, real = make(name, size, causal), make_inputs(19).requires_grad_(), make_mask(mask, 19)
    y, expected = mixer(x, real), mixer_twin(mixer, x, real)
    assert_close(y, expected, **TIGHT)
    pull = make_inputs(19, seed=7)
    leaves = (x, *mixer.parameters())
    grads = torch.autograd.grad(y, leaves, pull)
    assert_close(grads, torch.autograd.grad(expected, leaves, pull), rtol=1e-9, atol=1e-9)


@CAUSAL
@EVERY_KIND
def test_packed_is_apart(name, size, causal):
    mixer, x = make(name, size, causal), make_inputs(19, batch=1)
    mask, bounds = make_mask("holes", 19, batch=1), torch.tensor([0, 2, 2, 3, 19])
    y, state = mixer.stream(x, mask=mask, cu_seqlens=bounds)
    for n in (0, 2, 3):
        piece = slice(bounds[n], bounds[n + 1])
        alone = mixer.stream(x[:, piece], mask=mask[:, piece])
        assert_close(y[:, piece], alone.y, **TIGHT)
        assert_close(state[n : n + 1], alone.state, **TIGHT)


@EVERY_KIND
def test_cut_is_whole(name, size):
    mixer, x = make(name, size), make_inputs(19)
    whole, state, ys = mixer.stream(x), None, []
    for piece in x.split([1, 1, 9, 0, 8], dim=1):
        y, state = mixer.stream(piece, state)
        ys.append(y)
    assert_close(torch.cat(ys, dim=1), whole.y, **TIGHT)
    assert_close(state, whole.state, **TIGHT)


@pytest.mark.parametrize("name", ["conv", "rglru"])
def test_no_tokens(name):
    for causal in (True, False):
        assert make(name, causal=causal)(make_inputs(0)).shape == (B, 0, HIDDEN)


def test_blocks_are_a_block_diagonal_matrix():
    layer, x = randomize(BlockDiagonal(HIDDEN, BLOCKS)).double(), make_inputs(5)
    assert_close(layer(x), x @ torch.block_diag(*layer.weight) + layer.bias, **TIGHT)


def test_gates_are_those_of_their_layers():
    mixer, x = make("rglru"), make_inputs(5)
    assert_close(mixer(x), rglru(x, mixer.recurrence_gate(x), mixer.input_gate(x), mixer.a_param).y, **TIGHT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memories_begin_between_ten_and_a_thousand_tokens(dtype):
    a_param = initial_a_param(torch.empty(10_007, dtype=dtype))
    decay = torch.exp(-8 * torch.nn.functional.softplus(a_param))
    assert a_param.dtype == torch.float32
    assert 0.9 - 1e-5 < decay.min() < 0.901
    assert 0.998 < decay.max() < 0.999 + 1e-5
    assert abs(decay.mean() - 0.9495) < 2e-3


def test_begin_with_outputs_as_large_as_inputs():
    torch.manual_seed(0)
    x = torch.randn(1, 2003, 512)
    assert 0.9 < ShortConvolution(512, 4)(x).std() < 1.1
    mixer = RGLRU(512, 16)
    assert all(0.9 < gate(x).std() < 1.1 for gate in (mixer.recurrence_gate, mixer.input_gate))


def test_names_and_shapes_of_parameters():
    shapes = {name: tuple(x.shape) for name, x in RGLRU(26, 13).state_dict().items()}
    assert shapes == {
        "a_param": (26,),
        "input_gate.weight": (13, 2, 2),
        "input_gate.bias": (26,),
        "recurrence_gate.weight": (13, 2, 2),
        "recurrence_gate.bias": (26,),
    }
    conv = ShortConvolution(26, 3, bias=True).state_dict()
    assert {name: tuple(x.shape) for name, x in conv.items()} == {"weight": (26, 3), "bias": (26,)}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: make_mixer("lstm", 8), "mixer is 'lstm'; it must be one of 'none', 'conv', 'rglru'"),
        (lambda: ShortConvolution(8, 0), "conv_size is 0; it must be an integer of at least 1"),
        (lambda: ShortConvolution(8, 4, causal=False), "conv_size is 4; .* odd in number, e.g. 5"),
        (lambda: RGLRU(26, 16), "hidden_size is 26, which is no multiple of mixer_blocks, 16; choose"),
        (lambda: RGLRU(26, 0), "mixer_blocks is 0"),
        (lambda: RGLRU(0, 1), "hidden_size is 0"),
    ],
)
def test_wrong_settings(make, text):
    with pytest.raises(ValueError, match=text):
        make()
