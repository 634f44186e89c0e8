"""The latents' state: a bounded mean, a normaliser that only grows, and an associative merge."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from latte.ops import LatteState, latte_attention
from latte.ops.states import empty_latte_state, merge
from tests.ops.cases import FORMS, assert_same, make_case, state_parts


def latents(state) -> LatteState:
    return getattr(state, "latents", state)


def states_equal(actual: LatteState, expected: LatteState, tolerance: float = 1e-12) -> None:
    prefixed = [{f"state.{name}": x for name, x in state._asdict().items()} for state in (actual, expected)]
    assert_same(*prefixed, tolerance)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "window"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_mean_is_bounded_by_the_values(backend: str, form: str, causal: bool) -> None:
    for dtype in (torch.float64, torch.float32):
        case = make_case(form, 131, causal=causal, dtype=dtype)
        case.inputs["k"].mul_(1e3)
        mean = latents(case.call(backend).state).mean
        largest = case.inputs["v"].abs().amax(dim=(1, 3)).repeat_interleave(3, dim=1)
        assert (mean.abs() <= largest[..., None, None] * (1 + 1e-6)).all()


@pytest.mark.parametrize("form", [form for form in FORMS if form != "window"])
def test_log_norm_never_decreases(backend: str, form: str) -> None:
    case = make_case(form, 67, dtype=torch.float32)
    lengths = range(68)
    norms = torch.stack([latents(case.tokens_between(0, n).call(backend).state).log_norm for n in lengths])
    assert (norms[1:] >= norms[:-1]).all()
    assert (norms[0] == -torch.inf).all()


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(0, 131), mask=st.sampled_from(("none", "left", "right", "holes")))
def test_merged_halves_are_the_whole(backend: str, cut: int, mask: str) -> None:
    case = make_case("latte", 131, mask=mask)
    halves = (latents(case.tokens_between(*part).call(backend).state) for part in ((0, cut), (cut, 131)))
    states_equal(merge(*halves), latents(case.call(backend).state))


def test_merge_is_associative_and_has_a_unit(backend: str) -> None:
    case = make_case("latte", 131, mask="left")
    a, b, c = (latents(case.tokens_between(*part).call(backend).state) for part in ((0, 40), (40, 80), (80, 131)))
    states_equal(merge(merge(a, b), c), merge(a, merge(b, c)))
    states_equal(merge(a, b), merge(b, a))
    empty = empty_latte_state(*a.mean.shape, like=a.mean, dtype=a.mean.dtype)
    states_equal(merge(empty, a), a, 0.0)
    states_equal(merge(a, empty), a, 0.0)
    states_equal(merge(empty, empty), empty, 0.0)


def test_merge_of_far_apart_pieces(backend: str) -> None:
    """What one piece weighs beside the other may be nothing, never NaN, in values or gradients."""
    near = LatteState(torch.zeros(1, 1, 3), torch.ones(1, 1, 3, 2))
    far = LatteState(torch.tensor([[[1e4, -1e4, -torch.inf]]]), torch.full((1, 1, 3, 2), 2.0))
    given_parts = [x.clone().requires_grad_() for x in (*near, *far)]
    merged = merge(LatteState(*given_parts[:2]), LatteState(*given_parts[2:]))
    assert merged.log_norm.tolist() == [[[1e4, 0.0, 0.0]]]
    assert merged.mean[0, 0, :, 0].tolist() == [2.0, 1.0, 1.0]
    for grad in torch.autograd.grad(merged.log_norm.sum() + merged.mean.sum(), given_parts):
        assert grad.isfinite().all()


def test_a_state_is_a_token_that_weighs_more(backend: str) -> None:
    """Starting from (Z, M) is starting after one token whose key is Z and whose value is M, latent by latent."""
    case = make_case("latte", 67, state=True)
    log_norm, mean = case.state["log_norm"], case.state["mean"]
    expected = case.call(backend)
    for latent in range(1, 7):  # latent 0 has seen nothing
        one = {name: x[..., latent : latent + 1] for name, x in case.inputs.items() if name != "v"}
        v = case.inputs["v"].repeat_interleave(3, dim=2)
        k = torch.cat([log_norm[:, None, :, latent : latent + 1], one["k"]], dim=1)
        v = torch.cat([mean[:, None, :, latent], v], dim=1)
        state = latte_attention(torch.zeros_like(k), k, v, backend=backend).state
        torch.testing.assert_close(state.mean[:, :, 0], expected.state.mean[:, :, latent], rtol=0, atol=1e-12)
        torch.testing.assert_close(state.log_norm[..., 0], expected.state.log_norm[..., latent], rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", ["window", "macchiato"])
@pytest.mark.parametrize("mask", ["none", "holes"])
def test_window_state_holds_the_last_positions(backend: str, form: str, mask: str) -> None:
    for tokens in (0, 3, 16, 17, 40):
        case = make_case(form, tokens, window=17, mask=mask, state=True)
        state = state_parts(case.call(backend).state)
        keys = case.inputs["k" if form == "window" else "window_k"]
        real = case.options.get("mask", torch.ones((5, tokens), dtype=torch.bool))
        valid = torch.cat([case.state["valid"], real], dim=1)[:, -16:]
        assert torch.equal(state["valid"], valid)
        for name, new in (("keys", keys), ("values", case.inputs["v"])):
            kept = torch.cat([case.state[name], new], dim=1)[:, -16:]
            assert torch.equal(state[name][valid], kept[valid])
