"""Every operation on the meta device, where there are only shapes, and with derivatives that it refuses."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from latte.ops import (
    attention_weights,
    latte_attention,
    linear_attention,
    linear_cross_entropy,
    macchiato_attention,
    rglru,
    short_conv,
    window_attention,
)
from latte.ops.gated_recurrence import gated_rglru

# PyTorch's own, when it loads its rules for forward-mode derivatives.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

B, T, H, HV, L, D, E, W = 2, 5, 6, 3, 7, 11, 13, 8
LATENTS, WINDOW = ((B, T, H, L), (B, T, H, L), (B, T, HV, D)), ((B, T, H, E), (B, T, HV, E))
GATES = ((2, 4, 4), (W,), (2, 4, 4), (W,))


def loss(hidden: Tensor, weight: Tensor, backend: str = "auto") -> Tensor:
    targets = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
    return linear_cross_entropy(hidden, weight, targets, backend=backend)


OPS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "latte": (lambda *x, **how: latte_attention(*x, **how).y, LATENTS),
    "bidirectional": (lambda *x, **how: latte_attention(*x, causal=False, **how).y, LATENTS),
    "linear": (lambda *x, **how: linear_attention(*x, **how).y, LATENTS),
    "window": (lambda *x, **how: window_attention(*x, window=3, **how).y, (*WINDOW, LATENTS[2])),
    "macchiato": (
        lambda *x, **how: macchiato_attention(*x, window=3, **how).y, ((B, T, H, L + 1), *LATENTS[1:], *WINDOW)
    ),
    "rglru": (lambda *x, **how: rglru(*x, **how).y, (*[(B, T, W)] * 3, (W,))),
    "gated rglru": (lambda *x, **how: gated_rglru(*x, **how).y, ((B, T, W), *GATES, (W,))),
    "short_conv": (lambda *x, **how: short_conv(*x, **how).y, ((B, T, W), (W, 4), (W,))),
    "cross entropy": (loss, ((T, W), (D, W))),
}  # fmt: skip
EVERY_OP = pytest.mark.parametrize("name", OPS)


@EVERY_OP
def test_meta_device(name: str) -> None:
    function, shapes = OPS[name]
    expected = function(*(torch.randn(shape) for shape in shapes))
    inputs = [torch.randn(shape, device="meta", requires_grad=True) for shape in shapes]
    y = function(*inputs)
    assert (y.shape, y.dtype, y.is_meta) == (expected.shape, expected.dtype, True)
    y.sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in inputs)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("name", [name for name in OPS if name != "cross entropy"])
def test_no_tokens_have_gradients_of_nothing(name: str, backend: str) -> None:
    function, shapes = OPS[name]
    inputs = [torch.randn([0 if size == T else size for size in shape], requires_grad=True) for shape in shapes]
    y = function(*inputs, backend=backend)
    assert y.shape[1] == 0
    y.sum().backward()
    assert all(x.grad is None or not x.grad.any() for x in inputs)


def test_weights_on_the_meta_device() -> None:
    q, k = (torch.randn(shape, device="meta") for shape in WINDOW)
    assert attention_weights(window_q=q, window_k=k).shape == (B, H, T, T)


@EVERY_OP
def test_tangents_are_refused(name: str) -> None:
    """PyTorch would drop them without a word, and give derivatives of 0."""
    function, shapes = OPS[name]
    inputs = [torch.randn(shape) for shape in shapes]
    with forward_ad.dual_level():
        function(*inputs)
        for i, x in enumerate(inputs):
            dual = [*inputs[:i], forward_ad.make_dual(x, torch.ones_like(x)), *inputs[i + 1 :]]
            with pytest.raises(ValueError, match=r'^an input has a tangent; backend "torch" has no forward-mode'):
                function(*dual)
    with pytest.raises(ValueError, match="an input has a tangent"):
        torch.func.jvp(function, tuple(inputs), tuple(map(torch.ones_like, inputs)))


@EVERY_OP
def test_second_derivatives_are_refused(name: str) -> None:
    check_second_derivatives(name, "torch")


def check_second_derivatives(name: str, backend: str, device: str = "cpu") -> None:
    """Gradients may be part of a graph, though what comes to them from above is none, but are not differentiated."""
    function, shapes = OPS[name]
    inputs = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    y = function(*inputs, backend=backend).sum()
    expected = torch.autograd.grad(y, inputs, retain_graph=True)
    for grad, x in zip(torch.autograd.grad(y, inputs, create_graph=True), expected, strict=True):
        torch.testing.assert_close(grad.detach(), x)
        with pytest.raises(RuntimeError, match="no second derivatives; use backend="):
            torch.autograd.grad(grad.sum(), inputs, retain_graph=True, materialize_grads=True)


def test_tangents_of_a_state_are_refused() -> None:
    q, k, v = (torch.randn(shape) for shape in LATENTS)
    state = latte_attention(q, k, v).state
    with forward_ad.dual_level():
        dual = state._replace(mean=forward_ad.make_dual(state.mean, torch.ones_like(state.mean)))
        with pytest.raises(ValueError, match="an input has a tangent"):
            latte_attention(q, k, v, state=dual)


def test_the_reference_takes_tangents() -> None:
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in LATENTS)
    direction, step = torch.randn_like(k), 1e-5

    def attend(k: Tensor) -> Tensor:
        return latte_attention(q, k, v, backend="reference").y

    _, tangent = torch.func.jvp(attend, (k,), (direction,))
    expected = (attend(k + step * direction) - attend(k - step * direction)) / (2 * step)
    torch.testing.assert_close(tangent, expected, rtol=1e-6, atol=1e-8)
