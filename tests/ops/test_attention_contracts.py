"""What holds for every form: cuts, packing, masks, the arrow of time, rows that do not know each other."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.cases import (
    FORMS,
    MASKS,
    SMALL,
    Case,
    assert_same,
    differentiate,
    evaluate,
    make_case,
    make_state,
    outputs,
    state_parts,
)

GARBAGE = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30], dtype=torch.float64)
EVERY_FORM = pytest.mark.parametrize("form", FORMS)
FEW = settings(max_examples=15, deadline=None)


def in_pieces(case: Case, cuts: list[int], backend: str) -> dict[str, Tensor]:
    """The case cut at `cuts`, each piece starting from the state that the one before it left."""
    bounds = [0, *sorted(cuts), case.tokens]
    state, ys = case.state, []
    for start, end in pairwise(bounds):
        output = replace(case.tokens_between(start, end), state=state).call(backend)
        state = state_parts(output.state)
        ys.append(output.y)
    return {"y": torch.cat(ys, dim=1), **{f"state.{name}": x for name, x in state.items()}}


def apart(case: Case, bounds: list[int], backend: str) -> dict[str, Tensor]:
    """The packed sequences of a case one by one, put together again."""
    options = {name: x for name, x in case.options.items() if name != "cu_seqlens"}
    parts = []
    for row, (start, end) in enumerate(pairwise(bounds)):
        state = {name: x[row : row + 1] for name, x in case.state.items()}
        alone = replace(case, options=options, state=state).tokens_between(start, end)
        parts.append(outputs(alone.call(backend)))
    return {name: torch.cat([part[name] for part in parts], dim=int(name == "y")) for name in parts[0]}


def spoil(x: Tensor, hidden: Tensor) -> Tensor:
    """Every kind of garbage at the hidden places."""
    return torch.where(hidden, GARBAGE[torch.arange(x.numel()).view_as(x) % len(GARBAGE)], x)


@EVERY_FORM
@FEW
@given(data=st.data())
def test_cut_anywhere(backend: str, form: str, data: st.DataObject) -> None:
    """Several cuts, empty pieces among them; gradients flow back through the states."""
    tokens = data.draw(st.integers(0, 140), "tokens")
    cuts = data.draw(st.lists(st.integers(0, tokens), max_size=4), "cuts")
    mask, state = data.draw(st.sampled_from(MASKS), "mask"), data.draw(st.booleans(), "state")
    window = {"window": data.draw(st.integers(1, 40), "window")} if form in ("window", "macchiato") else {}
    case = make_case(form, tokens, sizes=SMALL, mask=mask, state=state, **window)
    assert_same(differentiate(case, lambda leaf: in_pieces(leaf, cuts, backend)), evaluate(case, backend))


@EVERY_FORM
@pytest.mark.parametrize("mask", ["none", "holes"])
def test_token_by_token(backend: str, form: str, mask: str) -> None:
    case = make_case(form, 67, sizes=SMALL, mask=mask, state=True)
    cuts = list(range(1, 67))
    assert_same(differentiate(case, lambda leaf: in_pieces(leaf, cuts, backend)), evaluate(case, backend))


@EVERY_FORM
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@FEW
@given(data=st.data())
def test_packed_is_apart(backend: str, form: str, causal: bool, data: st.DataObject) -> None:
    """Values, states and gradients, with sequences of no token at all and a state for each."""
    length = st.integers(0, 20) | st.sampled_from((63, 64, 65, 70))
    lengths = data.draw(st.lists(length, min_size=1, max_size=5), "lengths")
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    mask = data.draw(st.sampled_from(("none", "holes")), "mask")
    case = make_case(form, bounds[-1], sizes=SMALL._replace(batch=1), mask=mask, causal=causal)
    if data.draw(st.booleans(), "state"):
        sizes, noise = SMALL._replace(batch=len(lengths)), torch.Generator().manual_seed(1)
        case = replace(case, state=make_state(form, sizes, case.options.get("window", 0), noise))
    dtype = data.draw(st.sampled_from((torch.int32, torch.int64)), "dtype")
    packed = case.with_options(cu_seqlens=torch.tensor(bounds, dtype=dtype))
    expected = differentiate(case, lambda leaf: apart(leaf, bounds, "reference"))
    assert_same(evaluate(packed, backend), expected)
    assert_same(evaluate(packed, "reference"), expected)


@EVERY_FORM
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("mask", MASKS[1:])
def test_masked_contents_do_not_matter(backend: str, form: str, causal: bool, mask: str) -> None:
    """Neither to values nor to gradients, whichever backend, not even when they are no numbers."""
    clean = make_case(form, 67, sizes=SMALL, mask=mask, state=True, causal=causal)
    hidden = ~clean.options["mask"][..., None, None]
    dirty = replace(clean, inputs={name: spoil(x, hidden) for name, x in clean.inputs.items()})
    if "valid" in clean.state:
        unused = ~clean.state["valid"][..., None, None]
        kept = {name: spoil(clean.state[name], unused) for name in ("keys", "values")}
        dirty = replace(dirty, state={**clean.state, **kept})
    for chosen in (backend, "reference"):
        expected, actual = evaluate(clean, chosen), evaluate(dirty, chosen)
        for name, x in expected.items():
            if name in ("state.keys", "state.values"):  # slots that are not valid may hold anything
                valid = expected["state.valid"][..., None, None]
                assert torch.equal(actual[name].masked_fill(~valid, 0.0), x.masked_fill(~valid, 0.0)), name
            else:
                assert torch.equal(actual[name], x), (chosen, name)
        for name in clean.inputs:
            assert not actual[f"gradient of {name}"].masked_select(hidden).any(), (chosen, name)
        assert not actual["y"].masked_select(hidden).any()


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("window", "macchiato")])
def test_masked_tokens_may_as_well_be_absent(backend: str, form: str) -> None:
    """Without a window, holes are the same as a shorter sequence."""
    case = make_case(form, 131, sizes=SMALL._replace(batch=1), mask="holes", state=True)
    real = case.options["mask"][0]
    shorter = Case(form, {name: x[:, real] for name, x in case.inputs.items()}, case.state)
    whole, short = outputs(case.call(backend)), outputs(shorter.call(backend))
    assert_same({**whole, "y": whole["y"][:, real]}, short)


@EVERY_FORM
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_nothing_but_masked_tokens(backend: str, form: str, causal: bool) -> None:
    """Rows without a key give zeros and the empty state, and gradients of zero."""
    case = make_case(form, 67, sizes=SMALL, mask="holes", causal=causal)
    case.options["mask"][0] = False
    result = evaluate(case, backend)
    assert not result["y"][0].any()
    assert result["y"][1].any()
    for name, x in result.items():
        if name.startswith("gradient"):
            assert not x[0].any(), name
        if name == "state.log_norm":
            assert (x[0] == -torch.inf).all()
        elif name.startswith("state"):
            assert not x[0].any(), name


@EVERY_FORM
@FEW
@given(data=st.data())
def test_no_influence_of_the_future(backend: str, form: str, data: st.DataObject) -> None:
    """The gradient of y_t with respect to what comes later is exactly 0, and what comes later changes no value."""
    tokens = data.draw(st.integers(2, 140), "tokens")
    t = data.draw(st.integers(0, tokens - 2), "t")
    case = make_case(form, tokens, sizes=SMALL, mask=data.draw(st.sampled_from(MASKS), "mask"), state=True)
    result = differentiate(case, lambda leaf: {"y": leaf.call(backend).y[:, : t + 1]})
    for name in case.inputs:
        assert not result[f"gradient of {name}"][:, t + 1 :].any(), name
    later = torch.arange(tokens)[:, None, None] > t
    other = make_case(form, tokens, sizes=SMALL, seed=1)
    changed = {name: torch.where(later, 100 * other.inputs[name], x) for name, x in case.inputs.items()}
    after = replace(case, inputs=changed).call(backend).y[:, : t + 1]
    torch.testing.assert_close(after, result["y"], rtol=0, atol=1e-10)


@EVERY_FORM
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_rows_do_not_know_each_other(backend: str, form: str, causal: bool) -> None:
    """Each row gives what it gives alone, however wild its neighbours are; gradients between rows are exactly 0."""
    case = make_case(form, 131, mask="holes", state=True, causal=causal)
    wild = {name: x.clone() for name, x in case.inputs.items()}
    wild["k"][0] *= 1e4
    result = evaluate(replace(case, inputs=wild), backend)
    for row in range(1, 5):
        alone = case.rows(slice(row, row + 1))
        actual = differentiate(case, lambda leaf, r=row: {"y": leaf.call(backend).y[r : r + 1]})
        for name in case.inputs:
            others = torch.arange(5) != row
            assert not actual[f"gradient of {name}"][others].any(), name
        same = outputs(alone.call(backend))
        assert_same({name: result[name][row : row + 1] for name in same}, same)


@EVERY_FORM
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_nothing_given_is_changed_or_shared(backend: str, form: str, causal: bool, mask: str, packed: bool) -> None:
    """Inputs stay as they are, and a returned state may be written to without harm."""
    case = make_case(form, 67, sizes=SMALL._replace(batch=1), mask=mask, state=True, causal=causal)
    if packed:
        case = case.with_options(cu_seqlens=torch.tensor([0, 67]))
    before = case.map(torch.clone)
    evaluate(case, backend)
    output = case.call(backend)
    for x in outputs(output).values():
        x.zero_()
    for name, x in {**case.inputs, **case.state}.items():
        assert torch.equal(x, {**before.inputs, **before.state}[name]), name


@EVERY_FORM
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_no_rows(backend: str, form: str, causal: bool) -> None:
    case = make_case(form, 67, sizes=SMALL._replace(batch=0), state=True, causal=causal)
    for x in evaluate(case, backend).values():
        assert x.shape[0] == 0
