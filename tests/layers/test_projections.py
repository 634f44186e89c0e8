"""Several projections by one product give what each gives alone, gradients included."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from latte.layers import projections
from latte.layers.projections import project, spare_columns


@pytest.mark.parametrize("spare", [0, 5])
@pytest.mark.parametrize("bias", [True, False])
def test_one_product_for_several(bias: bool, spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without columns of 0 that fill the rows up, as on a GPU."""
    monkeypatch.setattr(projections, "spare_columns", lambda columns, device: spare)
    linears = [nn.Linear(6, size, bias=bias) for size in (4, 7)]
    parameters = [*linears[0].parameters(), *linears[1].parameters()]
    x = torch.randn(2, 3, 6, requires_grad=True)
    found, expected = project(x, *linears), [linear(x) for linear in linears]
    assert len(found) == 2
    pulls = [torch.randn_like(y) for y in expected]
    assert_close(found, expected)
    grads, expected_grads = (torch.autograd.grad(ys, [x, *parameters], pulls) for ys in (found, expected))
    assert_close(grads, expected_grads)


@pytest.mark.parametrize("columns", [1, 16, 264])
def test_rows_are_filled_up_on_a_gpu(columns: int) -> None:
    spare = spare_columns(columns, torch.device("cuda"))
    assert (columns + spare) % 16 == 0
    assert 0 <= spare < 16
    assert spare_columns(columns, torch.device("cpu")) == 0


def test_hooks_are_called() -> None:
    linears = [nn.Linear(6, size) for size in (4, 7)]
    seen = []
    linears[1].register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    project(torch.randn(2, 3, 6), *linears)
    assert seen == [(2, 3, 7)]
