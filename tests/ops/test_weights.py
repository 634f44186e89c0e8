"""The attention matrix p(s|t): right by the formulas, a probability, and what the operations average values with."""

import pytest
import torch

from tests.ops.cases import FORMS, MASKS, SMALL, make_case
from tests.ops.oracle import direct_weights, weights_of

EVERY_FORM = pytest.mark.parametrize("form", FORMS)
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
PACKED = torch.tensor([0, 5, 5, 6, 23])


def options_of(form: str) -> list[dict]:
    scores = ({"window": 4}, {"window": 30, "softcap": 1.3}, {"window": 1}, {"window": 4, "scale": -0.6})
    return list(scores) if form in ("window", "macchiato") else [{}]


@EVERY_FORM
@CAUSAL
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_formulas(form: str, causal: bool, mask: str, packed: bool) -> None:
    """Against eqs. 3, 5, 9 and 15-17 written out row by row."""
    for options in options_of(form):
        if packed:
            options["cu_seqlens"] = PACKED
        sizes = SMALL._replace(batch=1 if packed else 2)
        case = make_case(form, 23, sizes=sizes, mask=mask, causal=causal, **options)
        torch.testing.assert_close(weights_of(case), direct_weights(case), rtol=0, atol=1e-14)


@EVERY_FORM
@CAUSAL
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_rows_are_probabilities(form: str, causal: bool, mask: str, packed: bool) -> None:
    """Non-negative, 0 in the future, in other sequences and at masked tokens; rows of real tokens sum to 1."""
    sizes = SMALL._replace(batch=1) if packed else SMALL
    case = make_case(form, 23, sizes=sizes, mask=mask, causal=causal, **({"cu_seqlens": PACKED} if packed else {}))
    weights = weights_of(case)
    real = case.options.get("mask", torch.ones((sizes.batch, 23), dtype=torch.bool))
    assert (weights >= 0).all()
    sums = weights.sum(dim=-1)
    expected = real[:, None].expand_as(sums).double()
    if form == "linear relu":  # relu(q_t) may share no positive feature with any key: the token then sees nothing
        expected = torch.where(direct_weights(case).sum(dim=-1) > 0.5, expected, 0.0)
        assert expected.mean() > 0.8 * real.double().mean()
    torch.testing.assert_close(sums, expected, rtol=0, atol=1e-14)
    assert not weights.masked_select(~real[:, None, None]).any()
    if causal:
        assert not weights.triu(1).any()
    if packed:
        assert not weights[..., :5, 5:].any()
        assert not weights[..., 5:, :5].any()


@EVERY_FORM
@CAUSAL
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_operations_average_values_with_them(backend: str, form: str, causal: bool, mask: str, packed: bool) -> None:
    """y = p(s|t) v_s, at every head of a group."""
    sizes = SMALL._replace(batch=1, value_heads=2)
    packing = {"cu_seqlens": torch.tensor([0, 5, 5, 70, 131])} if packed else {}
    case = make_case(form, 131, sizes=sizes, mask=mask, causal=causal, **packing)
    v = case.inputs["v"].repeat_interleave(sizes.groups, dim=2)
    expected = torch.einsum("bhts,bshd->bthd", weights_of(case), v)
    torch.testing.assert_close(case.call(backend).y, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@EVERY_FORM
def test_dtypes(form: str, dtype: torch.dtype) -> None:
    """In float32 at least, whatever the inputs."""
    case = make_case(form, 23, sizes=SMALL, mask="holes").to(dtype)
    weights = weights_of(case)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, weights_of(case.to(torch.float64)).float(), rtol=0, atol=1e-6)


@EVERY_FORM
def test_autocast_changes_nothing(form: str) -> None:
    case = make_case(form, 23, sizes=SMALL, mask="holes", dtype=torch.float32)
    expected = weights_of(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(weights_of(case), expected)


@EVERY_FORM
def test_no_tokens(form: str) -> None:
    assert weights_of(make_case(form, 0, sizes=SMALL)).shape == (2, 3, 0, 0)


@EVERY_FORM
@CAUSAL
def test_masked_contents_do_not_matter(form: str, causal: bool) -> None:
    """Neither to values nor to gradients."""
    clean = make_case(form, 23, sizes=SMALL, mask="holes", causal=causal)
    hidden = ~clean.options["mask"][..., None, None]
    results = []
    for garbage in (0.0, torch.nan, torch.inf):
        leaf = clean.map(lambda x, fill=garbage: x.masked_fill(hidden, fill).requires_grad_())
        inputs = [x for name, x in leaf.inputs.items() if name != "v"]
        weights = weights_of(leaf)
        results.append((weights.detach(), *torch.autograd.grad(weights.square().sum(), inputs)))
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


@EVERY_FORM
def test_gradients_are_finite(form: str) -> None:
    """Also where tokens see nothing, or keys are −inf."""
    case = make_case(form, 23, sizes=SMALL, mask="left")
    if form not in ("window", "linear callable", "linear elu+1"):
        case.inputs["k"][:, :9, :, 0] = -torch.inf
    leaf = case.map(lambda x: x.detach().requires_grad_())
    inputs = [x for name, x in leaf.inputs.items() if name != "v"]
    for grad in torch.autograd.grad(weights_of(leaf).square().sum(), inputs):
        assert grad.isfinite().all()
        assert grad.any()
