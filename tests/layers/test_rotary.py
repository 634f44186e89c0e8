"""Rotary positions."""

import pytest
import torch
from torch.testing import assert_close

from latte.layers import count_tokens, token_positions
from latte.layers.rotary import apply_rotary, rotary
from tests.layers.forms import turn

B, T, H, E = 2, 11, 3, 14
CPU = torch.device("cpu")


def normal(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_is_a_product_of_complex_numbers(theta):
    x, positions = normal(B, T, H, E), torch.randint(0, 1000, (B, T))
    assert_close(apply_rotary(x, *rotary(positions, E, theta)), turn(x, positions, theta), rtol=0, atol=3e-4)


def test_scores_depend_on_differences_of_positions_only():
    q, k = normal(B, T, H, E), normal(B, T, H, E).flip(0)
    positions = torch.randint(0, 50, (B, T))

    def scores(shift):
        turned = [apply_rotary(x, *rotary(positions + shift, E)) for x in (q, k)]
        return torch.einsum("bthe,bshe->bhts", *turned)

    assert_close(scores(97), scores(0), rtol=0, atol=1e-4)
    assert not torch.allclose(scores(0), torch.einsum("bthe,bshe->bhts", q, k))


def test_position_zero_and_lengths_are_kept():
    x, positions = normal(B, T, H, E), torch.arange(T).expand(B, T)
    y = apply_rotary(x, *rotary(positions, E))
    assert torch.equal(y[:, 0], x[:, 0])
    assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=1e-6)


def test_angles_are_float32_and_results_have_the_dtype_of_x():
    cos, sin = rotary(torch.arange(T)[None], E)
    assert cos.shape == sin.shape == (1, T, E // 2)
    assert cos.dtype == sin.dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        x = normal(B, T, H, E).to(dtype)
        y = apply_rotary(x, cos, sin)
        assert y.dtype == dtype
        assert_close(y.double(), apply_rotary(x.double(), cos, sin), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_gradients_are_rounded_once():
    """The gradient is the turn back, as near as bfloat16 holds it."""
    cos, sin = rotary(torch.arange(T)[None], E)
    x, pull = (normal(B, T, H, E).roll(n, 1).bfloat16() for n in range(2))
    (found,) = torch.autograd.grad(apply_rotary(x.requires_grad_(), cos, sin), x, pull)
    assert_close(found.double(), apply_rotary(pull.double(), cos, -sin), rtol=2**-8, atol=1e-6)


def test_default_positions():
    mask = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1], [0] * 6], dtype=torch.bool)
    before = torch.tensor([10, 20, 30])
    assert token_positions(4, CPU).tolist() == [[0, 1, 2, 3]]
    assert token_positions(2, CPU, before=before).tolist() == [[10, 11], [20, 21], [30, 31]]
    places = token_positions(6, CPU, before=before, mask=mask)
    assert places[0, mask[0]].tolist() == [10, 11, 12]
    assert places[1].tolist() == [20, 21, 22, 23, 24, 25]
    assert count_tokens(3, 6, CPU).tolist() == [6, 6, 6]
    assert count_tokens(3, 6, CPU, before=before).tolist() == [16, 26, 36]
    assert count_tokens(3, 6, CPU, before=before, mask=mask).tolist() == [13, 26, 30]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_default_positions_of_packed_sequences(dtype):
    bounds, before = torch.tensor([0, 2, 2, 6], dtype=dtype), torch.tensor([10, 20, 30])
    mask = torch.tensor([[1, 1, 0, 1, 0, 1]], dtype=torch.bool)
    assert token_positions(6, CPU, cu_seqlens=bounds).tolist() == [[0, 1, 0, 1, 2, 3]]
    places = token_positions(6, CPU, before=before, mask=mask, cu_seqlens=bounds)
    assert places[mask].tolist() == [10, 11, 30, 31]
    assert count_tokens(1, 6, CPU, cu_seqlens=bounds).tolist() == [2, 0, 4]
    assert count_tokens(1, 6, CPU, before=before, mask=mask, cu_seqlens=bounds).tolist() == [12, 20, 32]


def test_wrong_settings():
    positions = torch.arange(T)[None]
    with pytest.raises(ValueError, match=r"queries and keys are 7 wide; .* even, or set rope_theta=None"):
        rotary(positions, 7)
    for theta in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"rope_theta is {theta}; it must be positive"):
            rotary(positions, E, theta)
