"""The linear cross entropy on a GPU: beside PyTorch's own, in value, gradients and memory."""

import pytest
import torch
import torch.nn.functional as F

from latte.ops import linear_cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

N, C, V = 16384, 768, 50257  # a vocabulary that matrix products do not like


def make_inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn((N, C), generator=generator, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn((V, C), generator=generator, device="cuda") * C**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(V, (N,), generator=generator, device="cuda")
    targets[::7] = -100
    return hidden, weight, targets


def run(function, dtype: torch.dtype) -> list[torch.Tensor]:
    hidden, weight, targets = make_inputs(dtype)
    loss = function(hidden, weight, targets)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]


def plain(hidden, weight, targets):
    return F.cross_entropy(hidden.float() @ weight.float().T, targets)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2), (torch.float16, 3e-3)])
def test_value_and_gradients_are_pytorchs(backend, dtype, tolerance):
    actual = run(lambda *inputs: linear_cross_entropy(*inputs, backend=backend), dtype)
    for got, right in zip(actual, run(plain, dtype), strict=True):
        assert (got.float() - right.float()).norm() <= tolerance * right.float().norm()
    again = run(lambda *inputs: linear_cross_entropy(*inputs, backend=backend), dtype)
    assert all(torch.equal(first, second) for first, second in zip(actual, again, strict=True))


def test_compiled_in_one_graph():
    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    for got, right in zip(run(compiled, torch.bfloat16), run(linear_cross_entropy, torch.bfloat16), strict=True):
        torch.testing.assert_close(got, right)


def test_memory_is_far_below_the_logits():
    hidden, weight, targets = make_inputs(torch.bfloat16)
    linear_cross_entropy(hidden, weight, targets).backward()  # kernels compile, cuBLAS takes its workspace
    hidden.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, targets).backward()
    used = torch.cuda.max_memory_allocated() - before
    chunk = 2**28 * 3 // 2  # in float32, and the gradients in bfloat16
    weights = (4 + 4 + 2 + 2) * V * C  # the gradient summed up, as it waits, as it is given, and the weight aligned
    assert used < chunk + weights + 2**26
    assert used < N * V * 4 / 2
