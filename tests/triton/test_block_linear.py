"""Block-diagonal products against einsum, gradients included."""

import pytest
import torch
from torch.testing import assert_close

from latte.ops.block_linear import block_linear

CASES = [(3, 5, 7, 11), (2, 40, 70, 3), (1, 33, 33, 130)]


def expected(x, weight, bias):
    rows = x.unflatten(2, weight.shape[1:3])
    return tuple(torch.einsum("btni,nio->btno", rows, w).flatten(2) + b for w, b in zip(weight, bias, strict=True))


@pytest.mark.parametrize(("blocks", "size", "out", "tokens"), CASES)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_values_and_gradients(blocks, size, out, tokens, backend, device):
    generator = torch.Generator().manual_seed(size)
    shapes = [(2, tokens, blocks * size), (2, blocks, size, out), (2, blocks * out)]
    inputs = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
    y, twin = block_linear(*inputs, backend=backend), expected(*inputs)
    dy = [torch.randn(x.shape, generator=generator).to(device) for x in twin]
    assert_close(y, twin, rtol=1e-4, atol=1e-4)
    assert_close(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(twin, inputs, dy), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_tokens_and_rows_that_lie_apart(backend, device):
    weight, bias = torch.randn(2, 3, 5, 5, device=device), torch.randn(2, 15, device=device)
    y, _ = block_linear(torch.randn(2, 0, 15, device=device), weight, bias, backend=backend)
    assert y.shape == (2, 0, 15)
    apart = torch.randn(2, 7, 40, device=device)[..., 10:25]
    assert_close(block_linear(apart, weight, bias, backend=backend), expected(apart, weight, bias))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_of_one_token_that_came_tokens_first(backend, device):
    """The stride of one token is any number, and PyTorch calls such tensors contiguous all the same."""
    generator = torch.Generator().manual_seed(0)
    x, *weights = (torch.randn(shape, generator=generator).to(device) for shape in ((1, 7, 15), (2, 3, 5, 5), (2, 15)))
    inputs = [z.requires_grad_() for z in (x.transpose(0, 1), *weights)]
    y, twin = block_linear(*inputs, backend=backend), expected(*inputs)
    dy = [torch.randn((1, 7, 15), generator=generator).to(device).transpose(0, 1) for _ in twin]
    assert_close(y, twin, rtol=1e-4, atol=1e-4)
    assert_close(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(twin, inputs, dy), rtol=1e-4, atol=1e-3)


def test_wrong_sizes_are_named(device):
    weight, bias = torch.randn(2, 3, 5, 5, device=device), torch.randn(2, 15, device=device)
    with pytest.raises(ValueError, match=r"x has shape \[2, 7, 14\]; it must be \[B, T, N·I=15\]"):
        block_linear(torch.randn(2, 7, 14, device=device), weight, bias)
