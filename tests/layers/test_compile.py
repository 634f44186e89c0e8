"""Layers under torch.compile: one graph, the same results."""

from collections.abc import Iterator

import pytest
import torch
from torch.testing import assert_close

from latte.layers import GLU, Block, CrossAttention
from tests.layers.forms import FORMS, HIDDEN, make_inputs, make_layer, make_mask, tensors

CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
TIGHT = {"rtol": 0, "atol": 1e-10}
STEPS = ("latte conv", "macchiato rglru", "window rglru")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check(layer, *inputs, backend="aot_eager", **options) -> None:
    """Forward and backward in one graph give what they give without."""
    results = []
    for function in (torch.compile(layer, fullgraph=True, backend=backend), layer):
        leaves = [x.detach().requires_grad_() for x in inputs]
        y = function(*leaves, **options)
        results.append((y, *torch.autograd.grad(y.square().sum(), (*leaves, *layer.parameters()))))
    assert_close(*results, **(TIGHT if inputs[0].dtype == torch.float64 else {"rtol": 0, "atol": 1e-3}))


@CAUSAL
@pytest.mark.parametrize("form", FORMS)
def test_one_graph(form, causal):
    check(make_layer(form, causal=causal), make_inputs(13), mask=make_mask("holes", 13))


@pytest.mark.parametrize("form", ["macchiato rglru", "full"])
def test_without_mask(form):
    check(make_layer(form), make_inputs(13))


@pytest.mark.parametrize("form", ["macchiato rglru", "macchiato conv", "full"])
def test_packed_sequences(form):
    check(make_layer(form), make_inputs(13, batch=1), cu_seqlens=torch.tensor([0, 4, 4, 13]))


@pytest.mark.parametrize("form", STEPS)
@torch.no_grad()
def test_step_from_its_own_state(form):
    """Decoding: one graph for all steps, fed the state that it returned."""
    layer, x = make_layer(form), make_inputs(17)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    step = torch.compile(layer.stream, fullgraph=True, backend=count)
    state, ys = layer.stream(x[:, :5]).state, []
    for t in range(5, 17):
        y, state = step(x[:, t : t + 1], state)
        ys.append(y)
    assert_close(torch.cat(ys, dim=1), layer(x)[:, 5:], **TIGHT)
    assert all(part.isfinite().all() for part in tensors(state))
    assert len(graphs) == 1


@pytest.mark.parametrize("form", ["macchiato rglru", "full"])
def test_one_graph_for_every_length(form):
    layer, graphs = make_layer(form), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=count)
    for tokens in (13, 29, 17):
        x = make_inputs(tokens)
        assert_close(compiled(x), layer(x), **TIGHT)
    assert len(graphs) == 1


def test_cross_attention():
    class Both(CrossAttention):
        def forward(self, x, source, mask=None):
            return super().forward(x, self.summarize(source, mask))

    check(Both(HIDDEN, 2).double(), make_inputs(5), make_inputs(13, seed=2), mask=make_mask("holes", 13))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # PyTorch's own
def test_inductor():
    """The whole way to generated code."""
    block = Block(make_layer("macchiato rglru", torch.float32), GLU(HIDDEN, 31))
    check(block, make_inputs(13, dtype=torch.float32), backend="inductor")
