"""Outputs, states and gradients of every form against the token by token reference."""

import pytest
import torch

from tests.ops.cases import FORMS, MAIN_FORMS, MASKS, Sizes, check_against_reference, evaluate, make_case

LENGTHS = (0, 1, 63, 64, 65, 131)  # around one and two tiles of 64
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
FLOAT32 = 2e-5  # some hundred roundings of 6e-8 in sums over 131 tokens, two levels of them in gradients


@CAUSAL
@pytest.mark.parametrize("state", [False, True], ids=["fresh", "state"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form(backend: str, form: str, mask: str, state: bool, causal: bool) -> None:
    check_against_reference(make_case(form, 131, mask=mask, state=state, causal=causal), backend)


@CAUSAL
@pytest.mark.parametrize("state", [False, True], ids=["fresh", "state"])
@pytest.mark.parametrize("tokens", LENGTHS[:-1])
@pytest.mark.parametrize("form", FORMS)
def test_every_length(backend: str, form: str, tokens: int, state: bool, causal: bool) -> None:
    mask = "holes" if tokens % 2 else "none"
    check_against_reference(make_case(form, tokens, mask=mask, state=state, causal=causal, seed=tokens), backend)


@CAUSAL
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", FORMS)
def test_float32(backend: str, form: str, mask: str, causal: bool) -> None:
    case = make_case(form, 131, mask=mask, state=True, causal=causal, dtype=torch.float32)
    check_against_reference(case, backend, FLOAT32)


@CAUSAL
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(Sizes(value_heads=3, groups=1), id="one head per value head"),
        pytest.param(Sizes(value_heads=1, groups=5), id="one value head"),
        pytest.param(Sizes(batch=1), id="one row"),
        pytest.param(Sizes(batch=1, value_heads=1, groups=1), id="one row and head"),
        pytest.param(Sizes(width=7, window_width=96), id="width 7, window width 96"),
        pytest.param(Sizes(width=96, window_width=7), id="width 96, window width 7"),
        pytest.param(Sizes(width=1, window_width=1), id="width 1"),
        pytest.param(Sizes(latents=1), id="1 latent"),
        pytest.param(Sizes(batch=1, latents=256), id="256 latents"),
    ],
)
@pytest.mark.parametrize("form", MAIN_FORMS)
def test_sizes(backend: str, form: str, sizes: Sizes, causal: bool) -> None:
    check_against_reference(make_case(form, 67, sizes=sizes, mask="holes", state=True, causal=causal), backend)


@CAUSAL
@pytest.mark.parametrize("window", [1, 2, 64, 65, 130, 131, 200])
@pytest.mark.parametrize("form", ["window", "macchiato"])
def test_windows(backend: str, form: str, window: int, causal: bool) -> None:
    """Windows of one token, around the tile's edge, of all tokens and of more than that."""
    check_against_reference(make_case(form, 131, window=window, mask="holes", state=True, causal=causal), backend)


@CAUSAL
@pytest.mark.parametrize(
    "options", [{"softcap": 1.7}, {"scale": -0.37}, {"scale": 0.0}, {"softcap": 3.0, "scale": 2.0}]
)
@pytest.mark.parametrize("form", ["window", "macchiato"])
def test_scores(backend: str, form: str, options: dict, causal: bool) -> None:
    check_against_reference(make_case(form, 67, mask="holes", state=True, causal=causal, **options), backend)


@CAUSAL
@pytest.mark.parametrize("form", FORMS)
def test_gradient_of_the_state_alone(backend: str, form: str, causal: bool) -> None:
    """A loss on the last state only, as when a state is passed on through time."""
    case = make_case(form, 67, mask="holes", state=True, causal=causal)
    expected, actual = (evaluate(case, name, of="state") for name in ("reference", backend))
    assert any(expected[name].any() for name in expected if name.startswith("gradient"))
    for name, x in expected.items():
        torch.testing.assert_close(actual[name], x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_empty_call_returns_the_state_it_was_given(backend: str, form: str) -> None:
    case = make_case(form, 0, state=True)
    output = evaluate(case, backend)
    assert output["y"].shape == (*case.inputs["q"].shape[:3], case.inputs["v"].shape[3])
    for name, x in case.state.items():
        assert torch.equal(output[f"state.{name}"], x)


@pytest.mark.parametrize("form", FORMS)
def test_auto_is_torch_on_a_cpu(form: str) -> None:
    case = make_case(form, 67, mask="holes")
    chosen, named = case.call("auto"), case.call("torch")
    assert torch.equal(chosen.y, named.y)
