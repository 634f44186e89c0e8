"""The operations under torch.compile: one graph, the same results, any length."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from latte.ops.torch.attention import mixture_forward
from tests.ops.cases import FORMS, MAIN_FORMS, SMALL, Case, assert_same, build_state, make_case, outputs, state_parts

CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def forward_and_backward(case: Case, function) -> dict[str, Tensor]:
    """Outputs of a function of a case's tensors, and the gradients of y and the state's means."""
    leaf = case.map(lambda x: x.detach().requires_grad_())
    tensors = {**leaf.inputs, **leaf.state}
    given = {name: x for name, x in tensors.items() if x.requires_grad}
    result = function(tensors)
    reached = [result[name].square().sum() for name in ("y", "state.mean", "state.values") if name in result]
    grads = torch.autograd.grad(reached, list(given.values()), materialize_grads=True)
    return {**result, **{f"gradient of {name}": grad for name, grad in zip(given, grads, strict=True)}}


def function_of(case: Case, backend: str):
    """The case's operation as a function of its tensors alone; options are constants to the compiler."""

    def function(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        inputs = {name: tensors[name] for name in case.inputs}
        state = {name: tensors[name] for name in case.state}
        return outputs(Case(case.form, inputs, state, case.options).call(backend))

    return function


@CAUSAL
@pytest.mark.parametrize("form", FORMS)
def test_one_graph(backend: str, form: str, causal: bool) -> None:
    """Forward and backward without a break, to the eager results, states and masks included."""
    case = make_case(form, 67, sizes=SMALL, mask="holes", state=True, causal=causal)
    eager = function_of(case, backend)
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    assert_same(forward_and_backward(case, compiled), forward_and_backward(case, eager), 1e-12)


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_packed_sequences(backend: str, form: str) -> None:
    case = make_case(form, 67, sizes=SMALL._replace(batch=1), cu_seqlens=torch.tensor([0, 3, 3, 40, 67]))
    eager = function_of(case, backend)
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    assert_same(forward_and_backward(case, compiled), forward_and_backward(case, eager), 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_one_graph_for_every_length(backend: str, form: str) -> None:
    """With `dynamic=True` other lengths need no other graph."""
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    case = make_case(form, 67, sizes=SMALL)
    compiled = torch.compile(function_of(case, backend), fullgraph=True, dynamic=True, backend=count)
    for tokens in (67, 131, 20):
        longer = make_case(form, tokens, sizes=SMALL, seed=tokens)
        eager = outputs(longer.call(backend))
        assert_same(compiled(dict(longer.inputs)), eager, 1e-12)
    assert len(graphs) == 1


def test_dynamic_lengths_forward_and_backward(backend: str) -> None:
    case = make_case("macchiato", 67, sizes=SMALL)
    eager = function_of(case, backend)
    compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (67, 131):
        longer = make_case("macchiato", tokens, sizes=SMALL, seed=tokens)
        assert_same(forward_and_backward(longer, compiled), forward_and_backward(longer, eager), 1e-12)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # PyTorch's own
def test_inductor(backend: str) -> None:
    """The whole way to generated code, with something to fuse around the operation."""
    case = make_case("latte", 67, sizes=SMALL, dtype=torch.float32)
    inner = function_of(case, backend)

    def layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": torch.relu(inner({**tensors, "v": torch.tanh(tensors["v"])})["y"])}

    compiled = torch.compile(layer, fullgraph=True)
    assert_same(forward_and_backward(case, compiled), forward_and_backward(case, layer), 2e-5)


def test_step_from_its_own_state(backend: str) -> None:
    """Decoding: one compiled step, fed the state that it returned."""
    case = make_case("macchiato", 12, sizes=SMALL, state=True)

    def step(tensors: dict[str, Tensor], state: dict[str, Tensor]):
        return Case("macchiato", tensors, state, case.options).call(backend)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    state, ys = dict(case.state), []
    for t in range(case.tokens):
        output = compiled({name: x[:, t : t + 1] for name, x in case.inputs.items()}, state)
        assert type(output.state) is type(build_state("macchiato", case.state))
        state = state_parts(output.state)
        ys.append(output.y)
    torch.testing.assert_close(torch.cat(ys, dim=1), case.call(backend).y, rtol=0, atol=1e-12)


@CAUSAL
@pytest.mark.parametrize("form", ["latte", "macchiato", "window", "linear exp"])
def test_custom_operation_keeps_its_promises(form: str, causal: bool) -> None:
    """PyTorch's own checks: schema, autograd registration, fake tensors, tracing."""
    case = make_case(form, 67, sizes=SMALL, mask="holes", state=True).map(lambda x: x.requires_grad_())
    x, state = case.inputs, case.state
    latents = (None, None) if form == "window" else (x["q"], x["k"])
    window = (x["q"], x["k"]) if form == "window" else (x.get("window_q"), x.get("window_k"))
    past = tuple(state.get(name) for name in ("log_norm", "mean", "keys", "values", "valid"))
    arguments = (*latents, x["v"], *window, case.options["mask"], *past, None)
    options = (case.options.get("window", 1), 0.3, 2.0, form == "linear exp", causal, torch.float64)
    torch.library.opcheck(mixture_forward, (*arguments, *options))
