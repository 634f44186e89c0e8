"""Gradients against finite differences, in float64."""

import pytest
import torch
from torch import Tensor

from tests.ops.cases import FORMS, Case, Sizes, make_case, outputs

TINY = Sizes(batch=2, value_heads=1, groups=2, latents=3, width=2, window_width=3)


def check(case: Case, backend: str, fast: bool = False) -> None:
    """All floating point outputs, the state's included, by all floating point inputs (`fast`: in random directions)."""
    given = {**case.inputs, **case.state}
    names = [name for name, x in given.items() if x.is_floating_point()]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        new = dict(zip(names, tensors, strict=True))
        inputs = {name: new[name] for name in case.inputs}
        state = {name: new.get(name, x) for name, x in case.state.items()}
        result = outputs(Case(case.form, inputs, state, case.options).call(backend))
        return tuple(x.masked_fill(x == -torch.inf, 0.0) for x in result.values() if x.is_floating_point())

    tensors = [given[name].detach().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(function, tensors, eps=1e-6, atol=1e-7, rtol=1e-5, fast_mode=fast)


def finite(case: Case) -> Case:
    """With a state in which every latent has seen something: there are no differences around −inf."""
    return case.map(lambda x: x.masked_fill(x == -torch.inf, -0.7))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("state", [False, True], ids=["fresh", "state"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form(backend: str, form: str, state: bool, causal: bool) -> None:
    window = {"window": 3, "softcap": 2.0} if form in ("window", "macchiato") else {}
    check(finite(make_case(form, 5, sizes=TINY, state=state, causal=causal, **window)), backend)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("form", FORMS)
def test_masked_and_packed(backend: str, form: str, causal: bool) -> None:
    window = {"window": 3} if form in ("window", "macchiato") else {}
    options = {"cu_seqlens": torch.tensor([0, 2, 2, 5]), **window}
    sizes = TINY._replace(batch=1)
    case = finite(make_case(form, 5, sizes=sizes, causal=causal, **options))
    check(case.with_options(mask=torch.tensor([[True, True, True, False, True]])), backend, fast=True)


@pytest.mark.parametrize("form", ["latte", "macchiato", "linear exp"])
def test_across_tiles_that_are_cut(backend: str, form: str) -> None:
    """Keys that leap by 40 nats: the tile is cut, and the gradient through the cuts is still right."""
    case = make_case(form, 6, sizes=TINY._replace(batch=1, groups=1), **({"window": 3} if form == "macchiato" else {}))
    leaps = torch.tensor([0.0, 40.0, -40.0, 41.0, 80.0, 79.0], dtype=torch.float64)[:, None, None]
    check(Case(form, {**case.inputs, "k": case.inputs["k"] + leaps}, {}, case.options), backend)
