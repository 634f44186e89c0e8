"""Macchiato with its projections: one operation gives what its steps give one after the other, gradients included."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from latte.layers import LatteAttention
from latte.layers.rotary import rotary
from latte.ops.arguments import HeadSizes
from latte.ops.beside import beside, starts
from latte.ops.projected import MacchiatoWeights, projected_macchiato

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter: 1 / 0, overflow

SIZES = {
    "plain": HeadSizes(2, 2, 3, 8, 8),
    "grouped, odd widths": HeadSizes(4, 2, 5, 7, 6),
    "parts of whole rows": HeadSizes(4, 4, 4, 16, 16),
    "one of each": HeadSizes(1, 1, 1, 1, 2),
    "rows in two parts": HeadSizes(1, 1, 2, 70, 74),
}
C, MIXED = 10, 6
FLOAT32 = 3e-5
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
NAMES = ("x", "mixed", *MacchiatoWeights._fields)


@pytest.fixture(autouse=True)
def one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatteAttention, "one_operation", True)


def make_inputs(sizes: HeadSizes, device: str, batch: int = 2, tokens: int = 70) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    heads, value_heads, latents, width, key_width = sizes
    rows = (heads * key_width, value_heads * key_width, value_heads * width, heads * (latents + 1), heads * latents)
    shapes = [(batch, tokens, C), (batch, tokens, MIXED)]
    shapes += [(size, C if n < 3 else MIXED) for n, size in enumerate(rows)]
    return tuple(torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes)


def angles(sizes: HeadSizes, device: str, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    places = torch.arange(tokens, device=device) + 7 * torch.arange(rows, device=device)[:, None]
    return rotary(places, sizes.key_width)


def run(inputs: tuple[Tensor, ...], turned, sizes: HeadSizes, **options) -> Tensor:
    x, mixed, *weights = inputs
    return projected_macchiato(
        x, mixed, MacchiatoWeights(*weights), turned, sizes, window=options.pop("window", 9), **options
    )


def test_second_derivatives_are_refused(device: str) -> None:
    sizes = SIZES["plain"]
    inputs = make_inputs(sizes, device, tokens=5)
    y = run(inputs, None, sizes, backend="triton").sum()
    for grad in torch.autograd.grad(y, inputs, create_graph=True):
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(grad.sum(), inputs, retain_graph=True, materialize_grads=True)


def check(inputs: tuple[Tensor, ...], turned, sizes: HeadSizes, **options) -> None:
    """Output and the gradients of what wants one, against the reference of every step in float64."""
    exact = tuple(z.detach().double().requires_grad_(z.requires_grad) for z in inputs)
    y = run(inputs, turned, sizes, backend="triton", **options)
    expected = run(exact, turned and [z.double() for z in turned], sizes, backend="reference", **options)
    assert relative_error(y, expected) < FLOAT32
    pull = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device)
    names = [name for name, z in zip(NAMES, inputs, strict=True) if z.requires_grad]
    grads = torch.autograd.grad(y, [z for z in inputs if z.requires_grad], pull)
    expected_grads = torch.autograd.grad(expected, [z for z in exact if z.requires_grad], pull.double())
    errors = {name: relative_error(*pair) for name, *pair in zip(names, grads, expected_grads, strict=True)}
    assert max(errors.values()) < FLOAT32, errors


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("kind", SIZES)
def test_sizes(kind: str, device: str) -> None:
    """Each row has its own positions."""
    sizes = SIZES[kind]
    check(make_inputs(sizes, device), angles(sizes, device, 2, 70), sizes)


@pytest.mark.parametrize("rows", [0, 1], ids=["no positions", "the same for all rows"])
def test_positions(rows: int, device: str) -> None:
    sizes = SIZES["plain"]
    check(make_inputs(sizes, device), angles(sizes, device, rows, 70) if rows else None, sizes)


@pytest.mark.parametrize("options", [{"softcap": 1.5}, {"scale": 0.3}, {"causal": False}, {"window": 200}])
def test_options(options: dict, device: str) -> None:
    sizes = SIZES["grouped, odd widths"]
    check(make_inputs(sizes, device, 1), angles(sizes, device, 1, 70), sizes, **options)


def test_holes_and_packing(device: str) -> None:
    sizes = SIZES["grouped, odd widths"]
    mask = (torch.arange(40, device=device) % 5 > 0).view(2, 20)
    check(make_inputs(sizes, device, 2, 20), angles(sizes, device, 2, 20), sizes, mask=mask)
    bounds = torch.tensor([0, 1, 30, 90], device=device)
    check(make_inputs(sizes, device, 1, 90), angles(sizes, device, 1, 90), sizes, cu_seqlens=bounds)


@pytest.mark.parametrize("frozen", [("x", "mixed"), MacchiatoWeights._fields, ("x", "query", "key", "value")])
def test_what_is_frozen_gets_no_gradient(frozen: tuple[str, ...], device: str) -> None:
    sizes = SIZES["grouped, odd widths"]
    inputs = make_inputs(sizes, device, 1, 20)
    for name, z in zip(NAMES, inputs, strict=True):
        z.requires_grad_(name not in frozen)
    check(inputs, angles(sizes, device, 1, 20), sizes)


def test_rows_of_one_token(device: str) -> None:
    """Views of a product then tell its rows' distance by another stride. A choice of one value has no gradient."""
    sizes = SIZES["grouped, odd widths"]
    inputs = make_inputs(sizes, device, 3, 1)
    for name, z in zip(NAMES, inputs, strict=True):
        z.requires_grad_(name in ("x", "value"))
    check(inputs, angles(sizes, device, 3, 1), sizes)


def test_whole_tiles(device: str) -> None:
    """The path without bounds checks, whose gradients are not masked on their way into their columns."""
    sizes = SIZES["parts of whole rows"]
    check(make_inputs(sizes, device, 1, 192), angles(sizes, device, 1, 192), sizes, window=64)


def test_columns_nobody_wrote_count_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients' memory may hold anything before."""
    sizes = SIZES["grouped, odd widths"]
    inputs, turned = make_inputs(sizes, device, 1, 20), angles(sizes, device, 1, 20)
    expected = torch.autograd.grad(run(inputs, turned, sizes, backend="triton").sum(), inputs)
    monkeypatch.setattr(torch, "empty_like", lambda x, **_: torch.full_like(x, torch.nan))
    grads = torch.autograd.grad(run(inputs, turned, sizes, backend="triton").sum(), inputs)
    assert all(torch.equal(grad, right) for grad, right in zip(grads, expected, strict=True))


def test_gradients_have_no_gradients(device: str) -> None:
    """Products in backward are PyTorch's and would have some, which would be wrong."""
    sizes = SIZES["plain"]
    inputs = make_inputs(sizes, device, 1, 10)
    (grad,) = torch.autograd.grad(
        run(inputs, None, sizes, backend="triton").square().sum(), inputs[:1], create_graph=True
    )
    with pytest.raises(RuntimeError, match="no second derivatives"):
        grad.square().sum().backward()


def test_as_a_custom_operation(device: str) -> None:
    """Schema, shapes without data and gradients as torch.compile needs them; the eager way gives the same bits."""
    from latte.ops.triton.projected import attend_projected, projected_backward, projected_forward

    sizes = HeadSizes(2, 1, 5, 7, 6)
    x, mixed, *weights = make_inputs(sizes, device, 1, 20)
    scores, logits = (beside([z.detach() for z in part]).requires_grad_() for part in (weights[:3], weights[:2:-1]))
    operands = (x, mixed, scores, logits, *angles(sizes, device, 1, 20), None, None)
    options = {"window": 9, "scale": 0.5, "softcap": 0.0, "causal": True}
    arguments = (*operands, list(sizes), *options.values())
    torch.library.opcheck(projected_forward, arguments, test_utils=CHECKS)
    y, *kept = projected_forward(*arguments)
    plain = tuple(z if z is None else z.detach() for z in operands)
    needs, kept = [True, False, True, True], [z.detach() for z in kept]
    torch.library.opcheck(projected_backward, (y.detach(), kept, needs, *plain, *arguments[8:]), test_utils=CHECKS)
    ys = y, attend_projected(*operands, sizes, **options)
    found, expected = (torch.autograd.grad(z.square().sum(), operands[:4]) for z in ys)
    assert all(torch.equal(*pair) for pair in zip((ys[0], *found), (ys[1], *expected), strict=True))


@pytest.mark.parametrize("scale", [0.0, -0.4])
def test_scales_that_kernels_do_not_take(scale: float, device: str) -> None:
    sizes = SIZES["plain"]
    inputs = make_inputs(sizes, device, 1, 10)
    if scale == 0:  # queries then have no gradient, or one of zeros
        inputs = tuple(z.detach() for z in inputs)
        ys = [run(inputs, None, sizes, scale=scale, backend=backend) for backend in ("triton", "reference")]
        assert_close(*ys, rtol=1e-4, atol=1e-5)
    else:
        check(inputs, None, sizes, scale=scale)


def test_no_tokens(device: str) -> None:
    sizes = SIZES["plain"]
    assert run(make_inputs(sizes, device, 2, 0), None, sizes, backend="triton").shape == (2, 0, 2, 8)


def test_gradients_of_angles(device: str) -> None:
    sizes = SIZES["plain"]
    inputs = make_inputs(sizes, device, 1, 10)
    cos, sin = (z.requires_grad_() for z in angles(sizes, device, 1, 10))
    found, expected = (
        torch.autograd.grad(run(inputs, (cos, sin), sizes, backend=backend).sum(), (cos, sin))
        for backend in ("triton", "reference")
    )
    assert max(relative_error(grad, right.double()) for grad, right in zip(found, expected, strict=True)) < 1e-4


def test_bad_input_is_named(device: str) -> None:
    sizes = SIZES["plain"]
    x, mixed, *weights = make_inputs(sizes, device)
    cos, sin = angles(sizes, device, 1, 70)
    with pytest.raises(ValueError, match=r"query has shape \[16, 10\]; it must be \[rows=20, C=10\]"):
        run((x, mixed, *weights), None, sizes._replace(key_width=10))
    with pytest.raises(ValueError, match=r"mixed has shape \[2, 69, 6\]"):
        run((x, mixed[:, 1:], *weights), None, sizes)
    with pytest.raises(ValueError, match="rotary has 3 angles for heads of width 8"):
        run((x, mixed, *weights), (cos[..., 1:], sin[..., 1:]), sizes)
    with pytest.raises(ValueError, match=r"rotary has shape \[1, 69, 4\]; it must be \[B=1, T=70, half\]"):
        run((x, mixed, *weights), (cos[:, 1:], sin[:, 1:]), sizes)
    with pytest.raises(ValueError, match="cos is on meta; it must be on"):
        run((x, mixed, *weights), (cos.to("meta"), sin), sizes)
    with pytest.raises(ValueError, match="window is 0"):
        run((x, mixed, *weights), None, sizes, window=0)
    with pytest.raises(ValueError, match="softcap is 1001; the Triton kernels take up to 1000"):
        run((x, mixed, *weights), None, sizes, softcap=1001, backend="triton")


def test_weights_lie_beside_each_other() -> None:
    first, second = torch.ones(3, 2), torch.full((4, 2), 2.0)
    assert starts((3, 4), 4) == [0, 4, 8]
    assert beside((first, second), 4)[:, 0].tolist() == [1, 1, 1, 0, 2, 2, 2, 2]
    assert beside((first, second), 1).shape == (7, 2)


@pytest.mark.parametrize(
    "form", [{"mixer": "conv"}, {"num_value_heads": 2, "window_head_dim": 6}, {"rope_theta": None, "causal": False}]
)
def test_a_layer_gives_what_its_steps_give(form: dict, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stream`, which has a state to give, takes the steps one after the other."""
    torch.manual_seed(0)
    layer = LatteAttention(24, 4, 3, window=9, backend="triton", **form).to(device)
    x = torch.randn(2, 20, 24, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    mask = torch.arange(20, device=device) >= torch.tensor([[0], [11]], device=device)
    called = []
    from latte.ops.triton import projected

    attend = projected.attend_projected
    monkeypatch.setattr(projected, "attend_projected", lambda *a, **b: called.append(1) or attend(*a, **b))
    ys = layer(x, mask=mask), layer.stream(x, mask=mask).y
    assert called == [1]
    assert_close(*ys, rtol=1e-4, atol=1e-5)
    found, expected = (torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]) for y in ys)
    assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_compiled_without_a_break(device: str) -> None:
    torch.manual_seed(0)
    layer = LatteAttention(24, 2, 3, window=9, mixer="conv", backend="triton").to(device)
    x = torch.randn(1, 20, 24).to(device).requires_grad_()
    ys = torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x)
    found, expected = (torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]) for y in ys)
    assert_close((ys[0], *found), (ys[1], *expected), rtol=1e-4, atol=1e-5)


def test_autocast(device: str) -> None:
    torch.manual_seed(0)
    layer = LatteAttention(24, 4, 3, window=9, backend="triton").to(device)
    x = torch.randn(1, 20, 24).to(device).requires_grad_()
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        ys = layer(x), layer.stream(x).y
    assert ys[0].dtype == ys[1].dtype == torch.bfloat16
    assert_close(*ys, rtol=3e-2, atol=3e-2)
    found, expected = (torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()]) for y in ys)
    assert all(grad.dtype == torch.float32 for grad in found)
    for grad, right in zip(found, expected, strict=True):
        assert relative_error(grad, right.double()) < 3e-2


@pytest.mark.parametrize("change", ["bias", "hook", "subclass", "switched off"])
def test_other_layers_take_their_steps(change: str, device: str, monkeypatch) -> None:
    from latte.ops.triton import projected

    monkeypatch.setattr(projected, "attend_projected", lambda *_, **__: pytest.fail("took the short way"))
    kind = type("Another", (LatteAttention,), {}) if change == "subclass" else LatteAttention
    layer = kind(24, 4, 3, window=9, bias=change == "bias", backend="triton").to(device)
    seen = []
    if change == "switched off":
        layer.one_operation = False
    if change == "hook":
        layer.value.register_forward_hook(lambda *_: seen.append(1))
    layer(torch.randn(1, 5, 24, device=device))
    assert len(seen) == (change == "hook")
