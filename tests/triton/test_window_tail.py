"""The window's state by one launch: what copies give, bit for bit, however keys and values lie in memory."""

import pytest
import torch
from torch import Tensor

from latte.ops import macchiato_attention, window_attention
from latte.ops.triton.window_tail import copy_tail


def random(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def check(keys: Tensor, values: Tensor, slots: int) -> None:
    found_keys, found_values, valid = copy_tail(keys[:, -slots:], values[:, -slots:])
    assert torch.equal(found_keys, keys[:, -slots:])
    assert torch.equal(found_values, values[:, -slots:])
    assert valid.shape == keys[:, -slots:].shape[:2]
    assert valid.dtype == torch.bool
    assert valid.all()
    assert all(x.is_contiguous() for x in (found_keys, found_values, valid))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("slots", [1, 7, 20])
def test_the_last_positions(device: str, slots: int, dtype: torch.dtype) -> None:
    check(random(device, 3, 20, 2, 5, dtype=dtype), random(device, 3, 20, 2, 11, dtype=dtype), slots)


def test_parts_of_one_projection(device: str) -> None:
    """Keys and values as a model cuts them: heads side by side, tokens and rows far apart."""
    keys, values, _ = random(device, 2, 9, 3 * 48).unflatten(2, (3, 48)).split([16, 24, 8], dim=3)
    check(keys, values, 4)


def test_heads_before_tokens(device: str) -> None:
    keys, values = (random(device, 2, 3, 9, 8).transpose(1, 2) for _ in range(2))
    check(keys, values, 4)


def test_channels_apart(device: str) -> None:
    keys, values = (random(device, 2, 9, 8, 3).transpose(2, 3) for _ in range(2))
    check(keys, values, 4)


def test_more_heads_than_one_block_holds(device: str) -> None:
    check(random(device, 1, 5, 12, 128), random(device, 1, 5, 12, 96), 3)


def test_again_and_again(device: str) -> None:
    """The third call of its kind is replayed; no result is another's memory."""
    calls = [(random(device, 2, 9, 2, 8), random(device, 2, 9, 2, 8)) for _ in range(4)]
    found = [copy_tail(keys[:, 4:], values[:, 4:]) for keys, values in calls]
    for (keys, values), (found_keys, found_values, valid) in zip(calls, found, strict=True):
        assert torch.equal(found_keys, keys[:, 4:])
        assert torch.equal(found_values, values[:, 4:])
        assert valid.all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("tokens", [5, 6, 70])
def test_states_of_attention(device: str, tokens: int) -> None:
    """As the other backends give them: shorter than the window, as long, and longer; a copy, not a view."""
    q, k, v, wq, wk = (random(device, 2, tokens, 2, n, dtype=torch.float32) for n in (4, 3, 7, 5, 5))
    ours = macchiato_attention(q, k, v, wq, wk, window=7, backend="triton").state
    theirs = macchiato_attention(q, k, v, wq, wk, window=7, backend="reference").state
    window = window_attention(wq, wk, v, window=7, backend="triton").state
    for state in (ours, window):
        for name in ("keys", "values", "valid"):
            assert torch.equal(getattr(state, name), getattr(theirs, name)), name
    assert ours.keys.untyped_storage().data_ptr() != wk.untyped_storage().data_ptr()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("heads", "groups", "width", "key_width", "window"), [(4, 2, 16, 8, 65), (1, 1, 7, 5, 71), (6, 1, 192, 3, 2)]
)
def test_macchiato_keeps_its_window_in_passing(
    device: str, heads: int, groups: int, width: int, key_width: int, window: int
) -> None:
    """More positions than programs take at once, grouped values, more numbers than one block holds; a wild tile too."""
    shared, tokens = heads // groups, 70 if window > 2 else 9
    q, k = (random(device, 2, tokens, heads, n, dtype=torch.float32) for n in (4, 3))
    k[:, 5] += 200.0  # a normaliser leaps there
    wq = random(device, 2, tokens, heads, key_width, dtype=torch.float32)
    wk, v = random(device, 2, tokens, shared, key_width + width, dtype=torch.float32).split([key_width, width], dim=3)
    theirs = macchiato_attention(q, k, v, wq, wk, window=window, backend="reference")
    for _ in range(1 if device == "cpu" else 3):  # on a GPU the third is replayed
        ours = macchiato_attention(q, k, v, wq, wk, window=window, backend="triton")
        torch.testing.assert_close(ours.y, theirs.y, rtol=1e-4, atol=1e-5)
        for name in ("keys", "values", "valid"):
            assert torch.equal(getattr(ours.state, name), getattr(theirs.state, name)), name
            assert getattr(ours.state, name).is_contiguous()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gradients_of_logits_do_not_reach_the_windows_state(device: str) -> None:
    """Only what a state was made of has gradients through it: the latents', not the window's."""
    q, k, v, wq, wk = (random(device, 1, 9, 1, n, dtype=torch.float32) for n in (4, 3, 4, 4, 4))
    state = macchiato_attention(q.requires_grad_(), k, v, wq, wk, window=5, backend="triton").state
    assert state.latents.mean.requires_grad
    assert not state.keys.requires_grad
    assert torch.equal(state.keys, wk[:, 5:])


def test_what_needs_gradients_stays_a_view(device: str) -> None:
    wq, wk, v = (random(device, 1, 9, 1, 4, dtype=torch.float32).requires_grad_() for _ in range(3))
    state = window_attention(wq, wk, v, window=5, backend="triton").state
    (state.keys.sum() + 2 * state.values.sum()).backward()
    assert wk.grad is not None
    assert v.grad is not None
    assert torch.equal(wk.grad[:, 5:], torch.ones_like(wk[:, 5:]))
    assert torch.equal(v.grad[:, :5], torch.zeros_like(v[:, :5]))
