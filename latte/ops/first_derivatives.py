"""Gradients that have no derivatives themselves, and say so: left alone, they would pass for constants."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor

Gradients = Sequence[Tensor | None]


def refuse(*_: Any) -> NoReturn:
    """The derivative of a custom operation that computes gradients."""
    raise RuntimeError('this backend has no second derivatives; use backend="reference"')


class _Once(torch.autograd.Function):
    """A gradient as it is, and that it depends on all its sources."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor | None) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        refuse()


def once(gradients: Gradients, sources: Gradients = ()) -> Gradients:
    """Gradients that refuse to be differentiated, where a graph of them is built: that is with create_graph=True."""
    if not torch.is_grad_enabled():
        return gradients
    return [None if gradient is None else _Once.apply(gradient, *sources) for gradient in gradients]


def first_derivatives(backward: Callable[..., Gradients]) -> Callable[..., Any]:
    """A `backward` by kernels, called with (ctx, saved tensors, *gradients).

    PyTorch's once_differentiable refuses what comes of the gradients given, but not what comes of the saved tensors.
    """

    @wraps(backward)
    def run(ctx: Any, *gradients: Tensor | None) -> Any:
        saved = ctx.saved_tensors  # once: checkpointing allows no second look
        if not torch.is_grad_enabled():
            return backward(ctx, saved, *gradients)
        with torch.no_grad():
            found = backward(ctx, saved, *gradients)
        return tuple(once(found, (*gradients, *saved)))

    return run
