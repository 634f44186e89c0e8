"""Hostile inputs: whatever their size, results are finite and those of a float64 brute force.

Tolerances: y, states and gradients are sums of a few hundred products, each rounded in float32 (6e-8). Where several
keys of a size of 1e4 tie, one more thing counts: the state carries their sum as one float32 logarithm Z, whose last bit
is Z · 2**-24 nats, so weights on both sides of a tile's edge may be off by that factor (`Keys.tied`).
"""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.ops.cases import MAIN_FORMS, SMALL, Case, assert_same, differentiate, make_case, outputs
from tests.ops.oracle import brute_force

T = 131
PLACE = torch.arange(T, dtype=torch.float64)
NOISE = torch.randn(T, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
SIZES = SMALL._replace(groups=2)
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
ACCUMULATED = {torch.float64: 1e-12, torch.float32: 2e-5}  # rounding of the sums, which are float32 in narrow dtypes


class Keys(NamedTuple):
    """A course of keys over time, and whether keys of that size tie."""

    course: Tensor
    tied: bool = False


HOSTILE = {
    "normal times 1e4": Keys(1e4 * NOISE),
    "leaps of 1e4 up": Keys(1e4 * PLACE),
    "leaps of 1e4 down": Keys(-1e4 * PLACE),
    "leaps of 1e4 up and down": Keys(5e3 * (-1) ** PLACE, tied=True),
    "leaps of 1e4 down and up": Keys(-5e3 * (-1) ** PLACE, tied=True),
    "leaps of 1e4 at random": Keys(torch.cumsum(1e4 * NOISE.sign(), dim=0), tied=True),
    "29 nats in a tile": Keys(0.46 * PLACE),
    "31 nats in a tile": Keys(0.5 * PLACE),
    "one nat per token up": Keys(PLACE),
    "one nat per token down": Keys(-PLACE),
    "leaps of 29.9 nats": Keys(29.9 * (PLACE % 2)),
    "leaps of 31 nats": Keys(31.0 * (PLACE % 3 > 0)),
    "13 nats every 7 tokens": Keys(13 * (PLACE // 7)),
    "zero": Keys(0 * PLACE),
    "constant 1e4": Keys(0 * PLACE + 1e4, tied=True),
    "constant -1e4": Keys(0 * PLACE - 1e4, tied=True),
    "one -inf": Keys(NOISE.masked_fill(PLACE == 5, -torch.inf)),
    "a third -inf": Keys(NOISE.masked_fill(PLACE % 3 == 0, -torch.inf)),
    "prefix -inf": Keys(NOISE.masked_fill(PLACE < 70, -torch.inf)),
    "all but the first -inf": Keys(NOISE.masked_fill(PLACE > 0, -torch.inf)),
    "all but the last -inf": Keys(NOISE.masked_fill(PLACE < T - 1, -torch.inf)),
    "all -inf": Keys(0 * PLACE - torch.inf),
    "-inf, then leaps of 1e4": Keys((1e4 * NOISE).masked_fill(PLACE < 70, -torch.inf)),
}


def hostile_case(form: str, course: Tensor, dtype: torch.dtype, causal: bool) -> Case:
    """One latent with the course itself, one with noise upon it, the others with noise alone."""
    case = make_case(form, T, sizes=SIZES, causal=causal)
    k = case.inputs["k"].clone()
    k[..., 0] = course[:, None]
    k[..., 1] += course[:, None]
    limit = torch.finfo(torch.float16).max
    k = torch.where(k.isfinite(), k.clamp(-limit, limit), k) if dtype == torch.float16 else k
    return replace(case, inputs={**case.inputs, "k": k}).to(dtype)


def no_window_state(result: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: result[name] for name in ("y", "state.log_norm", "state.mean") if name in result}


def check_against_brute_force(case: Case, backend: str, tied: float = 0.0) -> None:
    """Values, states and gradients, each to the rounding of its own dtype after sums in float32 or better."""
    actual = differentiate(case, lambda leaf: no_window_state(outputs(leaf.call(backend))))
    expected = differentiate(case.to(torch.float64), brute_force)
    assert actual.keys() == expected.keys()
    accumulated = torch.promote_types(case.inputs["v"].dtype, torch.float32)
    for name, x in actual.items():
        if name == "state.log_norm":
            seen = expected[name] > -torch.inf
            assert torch.equal(x > -torch.inf, seen)
            error = (x - expected[name])[seen].abs() / expected[name][seen].abs().clamp(min=1)
            assert error.numel() == 0 or error.max() < 8 * torch.finfo(accumulated).eps
        else:
            narrow = 0.0 if x.dtype == accumulated else torch.finfo(x.dtype).eps
            tolerance = ACCUMULATED[accumulated] + narrow + tied * torch.finfo(accumulated).eps
            assert_same({name: x}, {name: expected[name]}, tolerance, dtypes=False)


@CAUSAL
@pytest.mark.parametrize("keys", HOSTILE)
@pytest.mark.parametrize("form", ["latte", "macchiato", "linear exp"])
def test_hostile_keys(backend: str, form: str, keys: str, causal: bool) -> None:
    course, tied = HOSTILE[keys]
    for dtype in (torch.float32, torch.float64):
        case = hostile_case(form, course, dtype, causal)
        check_against_brute_force(case, backend, tied=course.abs().max().item() if tied else 0.0)


@CAUSAL
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("keys", HOSTILE)
def test_hostile_keys_in_narrow_dtypes(backend: str, keys: str, dtype: torch.dtype, causal: bool) -> None:
    """Ties come by themselves where keys have eight or eleven bits."""
    course = HOSTILE[keys].course
    case = hostile_case("macchiato", course, dtype, causal)
    finite = case.inputs["k"][case.inputs["k"].isfinite()].double()
    check_against_brute_force(case, backend, tied=finite.abs().max().item())


@CAUSAL
@pytest.mark.parametrize("size", [1e4, 1e30])
@pytest.mark.parametrize("form", ["latte", "macchiato", "linear exp"])
def test_huge_query_logits(backend: str, form: str, size: float, causal: bool) -> None:
    case = make_case(form, T, sizes=SIZES, causal=causal, dtype=torch.float32)
    check_against_brute_force(replace(case, inputs={**case.inputs, "q": size * case.inputs["q"]}), backend)


@CAUSAL
@pytest.mark.parametrize("size", [1e2, 1e4, 1e18])
@pytest.mark.parametrize("form", ["window", "macchiato"])
def test_huge_window_scores(backend: str, form: str, size: float, causal: bool) -> None:
    """Scores as large as float32 holds; the largest one takes all."""
    case = make_case(form, T, sizes=SIZES, causal=causal, dtype=torch.float32)
    q, k = ("q", "k") if form == "window" else ("window_q", "window_k")
    large = {name: (size if name in (q, k) else 1.0) * x for name, x in case.inputs.items()}
    case = replace(case, inputs=large)
    actual = differentiate(case, lambda leaf: {"y": leaf.call(backend).y})
    expected = brute_force(case.to(torch.float64))
    tolerance = 1e-3 if size == 1e2 else 2e-5  # scores of 1e4 have a last bit of 1e-3, and some nearly tie
    assert_same({"y": actual["y"]}, {"y": expected["y"]}, tolerance, dtypes=False)
    assert all(x.isfinite().all() for x in actual.values())


@CAUSAL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", MAIN_FORMS)
def test_everything_huge_is_finite(backend: str, form: str, dtype: torch.dtype, causal: bool) -> None:
    """All logits at ±1e4 at once, in random signs (those of the window as scores of queries and keys at ±1e2)."""
    case = make_case(form, T, sizes=SIZES, causal=causal, state=True, mask="holes")
    sizes = {"window_q": 1e2, "window_k": 1e2, "v": 1.0}
    inputs = {name: x.sign() * sizes.get(name, 1e2 if form == "window" else 1e4) for name, x in case.inputs.items()}
    result = differentiate(replace(case, inputs=inputs).to(dtype), lambda leaf: outputs(leaf.call(backend)))
    for name, x in result.items():
        assert (x.isfinite() | (x == -torch.inf) if name == "state.log_norm" else x.isfinite()).all(), name


@pytest.mark.parametrize("course", ["leaps of 1e4 up", "constant 1e4", "zero", "normal times 1e4"])
def test_token_by_token_through_hostile_keys(backend: str, course: str) -> None:
    """Steps of one token meet the same keys as one call does, each as a tile of its own."""
    keys, tied = HOSTILE[course]
    case = hostile_case("latte", keys, torch.float32, causal=True)
    state, ys = {}, []
    for t in range(T):
        step = outputs(replace(case.tokens_between(t, t + 1), state=state).call(backend))
        state = {name.removeprefix("state."): x for name, x in step.items() if name != "y"}
        ys.append(step["y"])
    expected = brute_force(case.to(torch.float64))
    ulp = torch.finfo(torch.float32).eps * (keys.abs().max().item() if tied else 1.0)
    result = {"y": torch.cat(ys, dim=1), "state.mean": state["mean"]}
    # Every step may round Z once more, by half a unit in the last place.
    assert_same(result, {name: expected[name] for name in result}, 2e-5 + T * ulp / 2, dtypes=False)
