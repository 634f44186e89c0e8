"""The `torch` backend works on several tiles at once: how many must not matter, and every kind of tile may be next."""

from typing import Any

import pytest
import torch

from latte.ops.torch import walk
from latte.ops.torch.walk import Inputs, Options, Stretch, Walk
from tests.ops.cases import MAIN_FORMS, SMALL, Case, assert_same, check_against_reference, evaluate, make_case

ONE_TILE, MANY_TILES = 1, 2**30


def leap(case: Case, token: int) -> Case:
    """The case with keys that leap by 90 nats at a token: its block of 64 is cut."""
    if "log_norm" not in case.state:
        return case
    ahead = torch.where(torch.arange(case.tokens) >= token, 90.0, 0.0)[:, None, None]
    return Case(case.form, {**case.inputs, "k": case.inputs["k"] + ahead}, case.state, case.options)


def several(form: str, *, causal: bool = True, mask: str = "holes", dtype: torch.dtype = torch.float64) -> Case:
    """Four whole tiles and a rest, after a past; windows, where there are any, reach over two of them."""
    window: dict[str, Any] = {"window": 71} if form in ("macchiato", "window") else {}
    return make_case(form, 267, sizes=SMALL, mask=mask, state=causal, causal=causal, dtype=dtype, **window)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("form", MAIN_FORMS)
def test_matches_reference(monkeypatch: pytest.MonkeyPatch, form: str, causal: bool) -> None:
    monkeypatch.setattr(walk, "CPU_STRETCH", MANY_TILES)
    check_against_reference(several(form, causal=causal), "torch")


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_leap_between_stretches(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """The block with the leap is walked in pieces, those before and after it as stretches."""
    monkeypatch.setattr(walk, "CPU_STRETCH", MANY_TILES)
    check_against_reference(leap(several(form, mask="none"), 170), "torch", 1e-9)


@pytest.mark.parametrize("mask", ["none", "left", "holes"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("form", MAIN_FORMS)
def test_number_of_tiles_does_not_matter(monkeypatch: pytest.MonkeyPatch, form: str, causal: bool, mask: str) -> None:
    case = several(form, causal=causal, mask=mask, dtype=torch.float32)
    monkeypatch.setattr(walk, "CPU_STRETCH", ONE_TILE)
    one_by_one = evaluate(case, "torch")
    monkeypatch.setattr(walk, "CPU_STRETCH", MANY_TILES)
    assert_same(evaluate(case, "torch"), one_by_one, 1e-5)


def plan(tokens: int, window: int | None, keys: torch.Tensor | None = None) -> list[list[Stretch]]:
    def zeros(width: int) -> torch.Tensor:
        return torch.zeros(1, tokens, 2, width)

    local = (None, None) if window is None else (zeros(3), zeros(3))
    inputs = Inputs(zeros(5), zeros(5) if keys is None else keys, zeros(3), *local, *[None] * 6)
    return Walk(inputs, Options(window or 1, 1.0, 0.0, False, True, torch.float32)).plan()


def test_tiles_that_are_alike_are_joined() -> None:
    assert plan(64 * 5 + 7, None) == [[Stretch(0, 64, 5)], [Stretch(320, 7)]]
    # the first windows do not reach as far as later ones
    assert plan(64 * 5 + 7, 66) == [[Stretch(0, 64)], [Stretch(64, 64)], [Stretch(128, 64, 3)], [Stretch(320, 7)]]


def test_a_leap_parts_stretches() -> None:
    keys = torch.zeros(1, 64 * 5, 2, 5)
    keys[:, 130:] = 90.0
    before, leaping, after = plan(64 * 5, None, keys)
    assert (before, after) == ([Stretch(0, 64, 2)], [Stretch(192, 64, 2)])
    assert leaping[0].start == 128
    assert sum(stretch.size for stretch in leaping) == 64


def test_stretches_are_no_longer_than_the_cache_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "CPU_STRETCH", 3 * 2 * 64 * (64 + 3 + 2 * 5))  # three tiles of two heads
    assert plan(64 * 5, None) == [[Stretch(0, 64, 3)], [Stretch(192, 64, 2)]]
