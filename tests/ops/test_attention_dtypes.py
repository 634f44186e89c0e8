"""Narrow and mixed dtypes, autocast."""

from dataclasses import replace

import pytest
import torch

from tests.ops.cases import FORMS, SMALL, Case, assert_same, evaluate, make_case, outputs

EVERY_FORM = pytest.mark.parametrize("form", FORMS)
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
FLOAT32 = 2e-5


def check_in_its_dtypes(case: Case, backend: str) -> None:
    """Each result is the float64 reference's, rounded once to its own dtype after sums in float32."""
    actual, expected = evaluate(case, backend), evaluate(case.to(torch.float64), "reference")
    for name, x in actual.items():
        if x.is_floating_point():
            tolerance = max(torch.finfo(x.dtype).eps, FLOAT32)
            assert_same({name: x}, {name: expected[name]}, tolerance, dtypes=False)


@EVERY_FORM
@CAUSAL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(backend: str, form: str, causal: bool, dtype: torch.dtype) -> None:
    """y and gradients come in the inputs' dtype, the latents' state in float32."""
    case = make_case(form, 131, mask="holes", state=True, causal=causal).to(dtype)
    result = evaluate(case, backend)
    for name, x in result.items():
        if name in ("state.log_norm", "state.mean", "gradient of state.log_norm", "gradient of state.mean"):
            assert x.dtype == torch.float32, name
        elif x.is_floating_point():
            assert x.dtype == dtype, name
    check_in_its_dtypes(case, backend)


HALF, BRAIN, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
MIXTURES = (
    {"q": FLOAT, "k": BRAIN, "v": HALF, "window_q": FLOAT, "window_k": HALF},
    {"q": BRAIN, "k": FLOAT, "v": FLOAT, "window_q": HALF, "window_k": BRAIN},
    {"q": HALF, "k": DOUBLE, "v": BRAIN, "window_q": BRAIN, "window_k": FLOAT},
)


@EVERY_FORM
@CAUSAL
@pytest.mark.parametrize("dtypes", MIXTURES, ids=["half values", "float values", "a double"])
def test_mixed_dtypes(backend: str, form: str, causal: bool, dtypes: dict[str, torch.dtype]) -> None:
    """Every input in a dtype of its own, the state (float32) in another; y has that of v, gradients their input's."""
    case = make_case(form, 67, mask="holes", state=True, causal=causal).to(torch.float32)
    case = replace(case, inputs={name: x.to(dtypes[name]) for name, x in case.inputs.items()})
    result = evaluate(case, backend)
    assert result["y"].dtype == dtypes["v"]
    for name, x in case.inputs.items():
        assert result[f"gradient of {name}"].dtype == x.dtype
    if "state.log_norm" in result:
        assert result["state.log_norm"].dtype == (torch.float64 if torch.float64 in dtypes.values() else torch.float32)
    check_in_its_dtypes(case, backend)


@pytest.mark.parametrize("form", ["window", "macchiato"])
@pytest.mark.parametrize("tokens", [3, 67])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_window_state_keeps_the_wider_dtype(backend: str, form: str, tokens: int, packed: bool) -> None:
    """Whether the tokens fill the window or not."""
    case = make_case(form, tokens, sizes=SMALL._replace(batch=1), state=True).to(torch.bfloat16)
    case = replace(case, state={name: x.float() if x.is_floating_point() else x for name, x in case.state.items()})
    if packed:
        case = case.with_options(cu_seqlens=torch.tensor([0, tokens]))
    result = evaluate(case, backend)
    assert result["state.keys"].dtype == result["state.values"].dtype == torch.float32
    check_in_its_dtypes(case, backend)


@EVERY_FORM
@CAUSAL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_changes_nothing(backend: str, form: str, causal: bool, dtype: torch.dtype) -> None:
    """Operations take dtypes as they come: to the last bit the same, backward included."""
    case = make_case(form, 67, sizes=SMALL, mask="holes", state=True, causal=causal).to(dtype)
    expected, oracle = evaluate(case, backend), outputs(case.call("reference"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, same = evaluate(case, backend), outputs(case.call("reference"))
    for name, x in expected.items():
        assert actual[name].dtype == x.dtype, name
        assert torch.equal(actual[name], x), name
    for name, x in oracle.items():
        assert torch.equal(same[name], x), name
