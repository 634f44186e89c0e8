"""The operations inside autograd's other machinery: checkpoints, offload, odd layouts, no gradients at all."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.ops.cases import FORMS, SMALL, Case, assert_same, differentiate, evaluate, make_case, outputs

EVERY_FORM = pytest.mark.parametrize("form", FORMS)
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


@EVERY_FORM
@CAUSAL
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_gradient_checkpointing(backend: str, form: str, causal: bool, reentrant: bool) -> None:
    case = make_case(form, 67, sizes=SMALL, mask="holes", state=True, causal=causal)

    def through_checkpoint(leaf: Case) -> dict[str, Tensor]:
        def attend(*tensors: Tensor) -> Tensor:
            return replace(leaf, inputs=dict(zip(leaf.inputs, tensors, strict=True))).call(backend).y

        return {"y": checkpoint(attend, *leaf.inputs.values(), use_reentrant=reentrant)}

    expected = differentiate_y(case, lambda leaf: outputs(leaf.call(backend)))
    actual = differentiate_y(case, through_checkpoint)
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(actual[name], x), name


def differentiate_y(case: Case, function) -> dict[str, Tensor]:
    """Gradients of a scalar of y with respect to the inputs, by `backward` as reentrant checkpoints demand."""
    leaf = case.map(lambda x: x.detach().requires_grad_())
    y = function(leaf)["y"]
    y.square().sum().backward()
    return {"y": y.detach()} | {name: x.grad for name, x in leaf.inputs.items() if x.grad is not None}


@EVERY_FORM
@CAUSAL
def test_saved_tensor_hooks(backend: str, form: str, causal: bool) -> None:
    """Activation offload: what is saved may go elsewhere and come back as another tensor."""
    case = make_case(form, 67, sizes=SMALL, mask="holes", state=True, causal=causal)
    expected = evaluate(case, backend)
    away: list[Tensor] = []

    def pack(x: Tensor) -> int:
        away.append(x.detach().clone())
        return len(away) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: away[i]):
        actual = evaluate(case, backend)
    assert away
    for name, x in expected.items():
        assert torch.equal(actual[name], x), name


@EVERY_FORM
def test_saved_tensors_are_the_inputs(backend: str, form: str) -> None:
    """Nothing that grows with the sequence is saved beyond the inputs (and, in linear attention, their features)."""
    case = make_case(form, 131, sizes=SMALL, mask="holes", state=True)
    saved = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.data_ptr()] = x.numel()
        return x

    leaf = case.map(lambda x: x.detach().requires_grad_())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        leaf.call(backend)
    given = sum(x.numel() for x in (*case.inputs.values(), *case.state.values(), case.options["mask"]))
    assert sum(saved.values()) <= (6 if form.startswith("linear") else 1.2) * given


@EVERY_FORM
@CAUSAL
def test_layouts(backend: str, form: str, causal: bool) -> None:
    """Heads first, every other column, or the same memory for all heads: only values count."""
    case = make_case(form, 67, sizes=SMALL, mask="holes", state=True, causal=causal)
    expected = evaluate(case, backend)
    layouts = (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim == 4 else x,
        lambda x: torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0],
        lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    )
    for layout in layouts:
        assert_same(differentiate(case, lambda leaf, f=layout: outputs(leaf.map(f).call(backend))), expected, 1e-13)
    mask = case.options["mask"].T.contiguous().T
    assert_same(evaluate(case.with_options(mask=mask), backend), expected, 1e-13)


@EVERY_FORM
@CAUSAL
def test_expanded_inputs(backend: str, form: str, causal: bool) -> None:
    """Strides of zero, in inputs and in the gradient that comes in."""
    case = make_case(form, 67, sizes=SMALL, state=True, causal=causal)
    leaf = case.map(lambda x: x[:1].detach().requires_grad_())
    results = []
    for copy in (lambda x: x.expand(2, *x.shape[1:]), lambda x: torch.cat([x, x])):
        both = replace(leaf.map(copy), state={name: torch.cat([x[:1], x[:1]]) for name, x in case.state.items()})
        y = both.call(backend).y
        results.append((y.detach(), *torch.autograd.grad(y.sum(), list(leaf.inputs.values()))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@EVERY_FORM
@CAUSAL
def test_gradients_of_some_inputs_only(backend: str, form: str, causal: bool) -> None:
    """Inputs that need no gradient change nothing for those that do."""
    case = make_case(form, 67, sizes=SMALL, mask="holes", state=True, causal=causal)
    all_of_them = differentiate_y(case, lambda leaf: outputs(leaf.call(backend)))
    for name, x in case.inputs.items():
        alone = x.detach().requires_grad_()
        y = replace(case, inputs={**case.inputs, name: alone}).call(backend).y
        (grad,) = torch.autograd.grad(y.square().sum(), alone)
        assert torch.equal(grad, all_of_them[name]), name


@EVERY_FORM
@CAUSAL
def test_without_gradients(backend: str, form: str, causal: bool) -> None:
    case = make_case(form, 67, sizes=SMALL, mask="holes", state=True, causal=causal)
    expected = outputs(case.call(backend))
    leaf = case.map(lambda x: x.detach().requires_grad_())
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            for name, x in outputs(leaf.call(backend)).items():
                assert torch.equal(x, expected[name]), name
                assert not x.requires_grad


@EVERY_FORM
@CAUSAL
def test_repeats_to_the_last_bit(backend: str, form: str, causal: bool) -> None:
    case = make_case(form, 131, mask="holes", state=True, causal=causal, dtype=torch.float32)
    first, second = evaluate(case, backend), evaluate(case, backend)
    for name, x in first.items():
        assert torch.equal(second[name], x), name
