"""The divergence of two models' next tokens in chunks is what the plain formula says, in value and gradients."""

import pytest
import torch
from torch import Tensor

from latte.ops import logit_chunks
from latte.train.divergence import Prediction, linear_divergence

N, C, TEACHERS, V = 13, 5, 7, 17


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(logit_chunks, "ON_CPU", 4 * 4 * V)  # four tokens each


def make(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(N, C), (V, C), (N, TEACHERS), (V, TEACHERS)]
    hidden, weight, theirs, their_weight = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    counts = torch.rand(N, generator=generator) > 0.3
    return hidden.requires_grad_(), weight.requires_grad_(), theirs, their_weight, counts


def plain(hidden, weight, theirs, their_weight, counts, softcap, temperature) -> Tensor:
    ours, expected = hidden @ weight.T, theirs @ their_weight.T
    if softcap is not None:
        ours = softcap * torch.tanh(ours / softcap)
    q, p = torch.log_softmax(ours / temperature, -1), torch.log_softmax(expected / temperature, -1)
    return (torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1) * counts).sum()


def chunked(hidden, weight, theirs, their_weight, counts, softcap, temperature, dtype) -> Tensor:
    student, teacher = Prediction(hidden, weight, softcap), Prediction(theirs, their_weight)
    return linear_divergence(teacher, student, counts, temperature, dtype)


@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_values_and_gradients(softcap, temperature):
    inputs = make()
    expected = plain(*inputs, softcap, temperature)
    actual = chunked(*inputs, softcap, temperature, torch.float64)
    torch.testing.assert_close(actual, expected)
    scale = torch.tensor(0.7, dtype=torch.float64)
    grads, wanted = (torch.autograd.grad(total, inputs[:2], scale) for total in (actual, expected))
    torch.testing.assert_close(grads, wanted)


def test_equal_models_do_not_diverge():
    hidden, weight, *_, counts = make(torch.float32)
    total = chunked(hidden, weight, hidden.detach(), weight.detach(), counts, None, 1.0, torch.float32)
    assert total.item() == pytest.approx(0.0, abs=1e-5)
    grad = torch.autograd.grad(total, hidden)[0]
    torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-5)


def test_narrow_factors():
    inputs = make(torch.float32)
    expected = plain(*inputs, None, 1.0)
    actual = chunked(*inputs, None, 1.0, torch.bfloat16)
    assert actual.dtype == torch.float32
    assert actual.item() == pytest.approx(expected.item(), rel=0.05)


def test_frozen_weights_cost_nothing(monkeypatch):
    hidden, weight, *rest = make(torch.float32)
    monkeypatch.setattr(
        "latte.train.divergence.accumulate", lambda *_: pytest.fail("the weight's gradient was computed")
    )
    chunked(hidden, weight.detach(), *rest, None, 1.0, torch.float32).backward()
    assert hidden.grad is not None


def test_no_more_than_a_chunk_of_logits_is_held(monkeypatch):
    """The largest tensor that is made in forward and backward is a chunk's, not [N V]."""
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in torch.utils._pytree.tree_leaves(output) if isinstance(x, Tensor))
            return output

    hidden, weight, *rest = make(torch.float32)
    with Sizes():
        chunked(hidden, weight, *rest, None, 2.0, torch.float32).backward()
    assert max(sizes) == max(4 * V, TEACHERS * V)
    assert max(sizes) < N * V
