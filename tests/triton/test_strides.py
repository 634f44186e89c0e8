"""Every input may lie in memory as it likes: results are those of copies whose elements are side by side."""

import pytest
import torch
from torch import Tensor

from latte.ops import (
    LatteState,
    latte_attention,
    linear_attention,
    linear_cross_entropy,
    macchiato_attention,
    rglru,
    short_conv,
    window_attention,
)
from latte.ops.gated_recurrence import gated_rglru
from latte.ops.steps import rglru_step_, short_conv_step_

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter: 1 / 0, overflow

T, H, L, D, C = 5, 2, 3, 5, 4


def apart(x: Tensor) -> Tensor:
    """The values of x with as many others between them, which are wrong everywhere."""
    other = ~x if x.dtype == torch.bool else torch.full_like(x, torch.nan) if x.is_floating_point() else x + 1
    return torch.stack([x, other], dim=-1)[..., 0]


def window(q, k, v, **options):
    return window_attention(q, k, v, window=3, **options)


def macchiato(*tensors, **options):
    return macchiato_attention(*tensors, window=3, **options)


def rglru_step(*tensors, backend):
    *rest, state = tensors
    return rglru_step_(*rest, state.clone(), backend=backend)


def short_conv_step(*tensors, backend):
    *rest, state = tensors
    return short_conv_step_(*rest, state.clone(memory_format=torch.contiguous_format), backend=backend)


CALLS = {
    "latte": (latte_attention, [(1, T, H, L), (1, T, H, L), (1, T, H, D)]),
    "linear": (linear_attention, [(1, T, H, L), (1, T, H, L), (1, T, H, D)]),
    "window": (window, [(1, T, H, D)] * 3),
    "macchiato": (macchiato, [(1, T, H, L + 1), (1, T, H, L), *[(1, T, H, D)] * 3]),
    "rglru": (rglru, [*[(1, T, C)] * 3, (C,)]),
    "gated": (gated_rglru, [(1, T, C), (1, C, C), (C,), (1, C, C), (C,), (C,)]),
    "conv": (short_conv, [(1, T, C), (C, 3), (C,)]),
    "rglru step": (rglru_step, [(1, 1, C), (1, C, C), (C,), (1, C, C), (C,), (C,), (1, C)]),
    "conv step": (short_conv_step, [(1, 1, C), (C, 3), (C,), (1, 2, C)]),
}


def draw(shapes: list[tuple[int, ...]], device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def evaluate(op, given: list[Tensor], **options) -> list[Tensor]:
    """Outputs and, of operations that have them, gradients."""
    leaves = [x.detach().requires_grad_("step" not in op.__name__) for x in given]
    output = op(*leaves, **options, backend="triton")
    if isinstance(output, Tensor):
        return [output]
    grads = torch.autograd.grad(output.y.square().sum(), leaves)
    return [*torch.utils._pytree.tree_leaves(tuple(output)), *grads]


@pytest.mark.parametrize("name", CALLS)
def test_inputs(name: str, device: str) -> None:
    op, shapes = CALLS[name]
    given = draw(shapes, device)
    expected = evaluate(op, given)
    for place in range(len(given)):
        found = evaluate(op, [apart(x) if n == place else x for n, x in enumerate(given)])
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True)), f"input {place}"


@pytest.mark.parametrize("name", ["latte", "window", "macchiato", "rglru", "gated", "conv"])
def test_masks_and_bounds(name: str, device: str) -> None:
    op, shapes = CALLS[name]
    given = draw(shapes, device)
    mask = torch.tensor([[True, False, True, True, False]], device=device)
    bounds = torch.tensor([0, 2, T], device=device)
    for option, value in {"mask": mask, "cu_seqlens": bounds, "cu_seqlens of 32 bits": bounds.int()}.items():
        option = option.split()[0]
        found, expected = (evaluate(op, given, **{option: x}) for x in (apart(value), value))
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True)), option


def test_states(device: str) -> None:
    q, k, v = draw(CALLS["latte"][1], device)
    state = LatteState(*draw([(1, H, L), (1, H, L, D)], device))
    one, other = (evaluate(latte_attention, [q, k, v], state=x) for x in (state, LatteState(*map(apart, state))))
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    for name, shape in {"rglru": (1, C), "conv": (1, 2, C)}.items():
        op, shapes = CALLS[name]
        given, (past,) = draw(shapes, device), draw([shape], device)
        one, other = (evaluate(op, given, state=x) for x in (past, apart(past)))
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True)), name


def test_cross_entropy(device: str) -> None:
    hidden, weight = draw([(7, D), (11, D)], device)
    targets = torch.randint(11, (7,), generator=torch.Generator().manual_seed(0)).to(device)
    expected = linear_cross_entropy(hidden, weight, targets, backend="triton")
    found = linear_cross_entropy(apart(hidden), apart(weight), apart(targets), backend="triton")
    torch.testing.assert_close(found, expected)
