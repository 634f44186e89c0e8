"""The pre-norm block."""

import pytest
import torch
from torch.testing import assert_close

from latte.layers import GLU, MLP, Block
from tests.layers.forms import HIDDEN, MAIN_FORMS, assert_states_close, make_inputs, make_layer, make_mask, randomize

TIGHT = {"rtol": 0, "atol": 1e-11}


def make_block(form, norm="rmsnorm"):
    feedforward = GLU(HIDDEN, 31) if norm == "rmsnorm" else MLP(HIDDEN, 31, bias=True)
    return randomize(Block(make_layer(form), feedforward, norm=norm, eps=0.01)).double()


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("form", MAIN_FORMS)
def test_is_two_residual_steps(form, norm):
    block, x, mask = make_block(form, norm), make_inputs(17), make_mask("holes", 17)
    middle = x + block.attention(block.attention_norm(x), mask)
    expected = middle + block.feedforward(block.feedforward_norm(middle))
    assert_close(block(x, mask), expected, **TIGHT)
    assert block.attention_norm.eps == block.feedforward_norm.eps == 0.01


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_cut_is_whole(form):
    block, x, mask = make_block(form), make_inputs(17), make_mask("left", 17)
    whole = block.stream(x, mask=mask)
    first = block.stream(x[:, :5], mask=mask[:, :5])
    second = block.stream(x[:, 5:], first.state, mask=mask[:, 5:])
    assert_close(whole.y, block(x, mask), **TIGHT)
    assert_close(torch.cat([first.y, second.y], dim=1), whole.y, **TIGHT)
    assert_states_close(second.state, whole.state, **TIGHT)


def test_packed_is_apart():
    block, x = make_block("macchiato conv"), make_inputs(17, batch=1)
    packed = block(x, cu_seqlens=torch.tensor([0, 5, 17]), positions=torch.arange(17)[None])
    assert_close(packed[:, 5:], block(x[:, 5:]), rtol=0, atol=1e-5)
    assert_close(packed[:, :5], block(x[:, :5]), **TIGHT)


def test_names_of_parts():
    parts = [name for name, _ in make_block("latte").named_children()]
    assert parts == ["attention_norm", "attention", "feedforward_norm", "feedforward"]


def test_unknown_norm():
    with pytest.raises(ValueError, match="norm is 'none'"):
        make_block("latte", "none")
