"""Several projections by one product give what each gives alone, gradients included."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from latte.layers import projections
from latte.layers.projections import project, row_multiple


@pytest.mark.parametrize("row", [1, 4, 16])
@pytest.mark.parametrize("bias", [True, False])
def test_one_product_for_several(bias: bool, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without columns of 0 that fill parts up, as on a GPU."""
    monkeypatch.setattr(projections, "row_multiple", lambda device: row)
    linears = [nn.Linear(6, size, bias=bias) for size in (4, 7, 16)]
    parameters = [parameter for linear in linears for parameter in linear.parameters()]
    x = torch.randn(2, 3, 6, requires_grad=True)
    found, expected = project(x, *linears), [linear(x) for linear in linears]
    assert len(found) == 3
    assert all(y.storage_offset() % row == 0 for y in found)
    pulls = [torch.randn_like(y) for y in expected]
    assert_close(found, expected)
    grads, expected_grads = (torch.autograd.grad(ys, [x, *parameters], pulls) for ys in (found, expected))
    assert_close(grads, expected_grads)


def test_parts_are_filled_up_on_a_gpu_alone() -> None:
    assert row_multiple(torch.device("cuda")) == 16
    assert row_multiple(torch.device("cpu")) == 1


def test_hooks_are_called() -> None:
    linears = [nn.Linear(6, size) for size in (4, 7)]
    seen = []
    linears[1].register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    project(torch.randn(2, 3, 6), *linears)
    assert seen == [(2, 3, 7)]
