"""A time counts only beside a right result: outputs and gradients against float64."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.contenders import Contender, Sizes


class Check(NamedTuple):
    error: float  # the largest relative error of any output or gradient
    worst: str  # which that was
    same_bits: bool  # a second run gave the very same

    def right(self, tolerance: float) -> bool:
        return self.same_bits and self.error <= tolerance


def check(contender: Contender, sizes: Sizes, dtype: torch.dtype, device: str, reference: str) -> Check:
    """Compare with the backend `reference` in float64 on the same inputs; gradients flow in by y and by the state."""
    inputs = contender.inputs(sizes, dtype, device)
    actual, again = (results(contender, sizes, inputs) for _ in range(2))
    expected = results(contender, sizes, [x.double() for x in inputs], backend=reference)
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    worst = max(errors, key=lambda name: errors[name])
    same = all(torch.equal(actual[name], again[name]) for name in actual)
    return Check(errors[worst], worst, same)


def results(contender: Contender, sizes: Sizes, inputs: list[Tensor], **options: Any) -> dict[str, Tensor]:
    """Every output, and the gradient of every input for a pull of random numbers on all of them."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = floating(contender.run(leaves, sizes, **options))
    noise = torch.Generator(inputs[0].device).manual_seed(1)
    pulls = [torch.randn(x.shape, generator=noise, device=x.device).bfloat16().to(x.dtype) for x in outputs]
    grads = torch.autograd.grad(outputs, leaves, pulls)
    named = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    return named | {f"gradient {i}": x for i, x in enumerate(grads)}


def floating(output: Any) -> list[Tensor]:
    """The tensors of an output that gradients reach, nested states included."""
    if isinstance(output, Tensor):
        return [output] if output.requires_grad else []
    return [x for part in output for x in floating(part)]


def relative_error(got: Tensor, right: Tensor) -> float:
    """‖got − right‖ / ‖right‖; inf where one is finite and the other is not."""
    finite = right.isfinite()
    if not torch.equal(got.isfinite(), finite):
        return float("inf")
    got, right = got.double()[finite], right.double()[finite]
    return ((got - right).norm() / right.norm().clamp(min=1e-30)).item()
