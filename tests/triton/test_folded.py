"""The output kernel's short way: whole tiles without a mask, a window of two tiles, at most 16 latents."""

from dataclasses import replace

import pytest
import torch

from latte.ops.triton.attention_call import Call
from tests.ops.cases import Case, Sizes, evaluate, make_case

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter: 1 / 0, overflow

WINDOW = 128
NARROW = Sizes(batch=1, value_heads=1, groups=2, latents=5, width=7, window_width=11)
WHOLE = Sizes(batch=1, value_heads=1, groups=1, latents=16, width=32, window_width=32)


def folded_case(
    device: str, tokens: int, sizes: Sizes = NARROW, dtype: torch.dtype = torch.bfloat16, **options
) -> Case:
    case = make_case("macchiato", tokens, dtype=torch.float32, device=device, sizes=sizes)
    return case.to(dtype).with_options(window=WINDOW, **options)


@pytest.fixture(autouse=True)
def only_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of these tests folds, and its own states are made several tiles to a program."""

    class Folded(Call):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            assert self.plan.folds

    monkeypatch.setattr("latte.ops.triton.attention.Call", Folded)
    monkeypatch.setattr("latte.ops.triton.states.FILLING", 1)


def check(case: Case, device: str) -> None:
    """Output and gradients by norm, and the output of each tile by itself."""
    limit = 1e-2 if device == "cuda" else 2e-2  # the interpreter truncates where a GPU rounds
    actual, expected = evaluate(case, "triton"), evaluate(case.to(torch.float64), "reference")
    for name, x in actual.items():
        other = expected[name].double()
        error = (x.double() - other).norm() / other.norm().clamp(min=1e-9)
        assert error < limit, (name, error)
    difference, y = actual["y"].double() - expected["y"], expected["y"]
    for begin in range(0, y.shape[1], 64):
        tile = slice(begin, begin + 64)
        assert difference[:, tile].norm() < limit * y[:, tile].norm(), begin


@pytest.mark.parametrize("tokens", [64, 128, 192, 320])
def test_first_and_later_tiles(device: str, tokens: int) -> None:
    """The window reaches before the sequence, begins with it, and lies inside it."""
    check(folded_case(device, tokens), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widths_without_bounds(device: str, dtype: torch.dtype) -> None:
    check(folded_case(device, 192, WHOLE, dtype), device)


def test_softcap(device: str) -> None:
    check(folded_case(device, 192, softcap=2.0), device)


def test_leaping_keys_are_taken_by_the_other_way(device: str) -> None:
    case = folded_case(device, 192)
    leaping = case.inputs["k"] + 40.0 * (torch.arange(192, device=device) % 50 == 49)[None, :, None, None]
    check(replace(case, inputs={**case.inputs, "k": leaping.to(torch.bfloat16)}), device)


def test_large_scores_stay_finite(device: str) -> None:
    case = folded_case(device, 192)
    large = {name: 300 * case.inputs[name] for name in ("window_q", "window_k")}
    y = replace(case, inputs={**case.inputs, **large}).call("triton").y
    assert y.isfinite().all()
