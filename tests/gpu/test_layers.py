"""Layers on a GPU: bfloat16 beside float64, compiled, streamed, and in a CUDA graph."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from latte.layers import GLU, Block, LatteAttention

pytestmark = pytest.mark.gpu

FORMS = {
    "latte": {"mixer": "conv"},
    "macchiato": {"window": 128, "mixer": "rglru"},
    "window": {"num_latents": None, "window": 128, "window_head_dim": 16, "mixer": "rglru"},
    "full": {"num_latents": None},
}
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
EVERY_FORM = pytest.mark.parametrize("form", FORMS)


def make_layer(form: str, **settings) -> LatteAttention:
    torch.manual_seed(0)
    return LatteAttention(256, 4, **FORMS[form], **settings).to("cuda", torch.bfloat16)


def make_inputs(tokens: int, batch: int = 2) -> torch.Tensor:
    noise = torch.Generator("cuda").manual_seed(1)
    return torch.randn((batch, tokens, 256), generator=noise, device="cuda").bfloat16()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def gradients(layer, x: torch.Tensor, mask: torch.Tensor | None, function=None) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    y = (layer if function is None else function)(x, mask=mask)
    return [y, *torch.autograd.grad(y.float().sin().sum(), (x, *layer.parameters()))]


@CAUSAL
@EVERY_FORM
def test_against_float64(form: str, causal: bool) -> None:
    layer, x = make_layer(form, causal=causal), make_inputs(700)
    mask = torch.arange(700, device="cuda") >= torch.tensor([[0], [97]], device="cuda")
    exact = make_layer(form, causal=causal, backend="torch").double()
    for actual, expected in zip(gradients(layer, x, mask), gradients(exact, x.double(), mask), strict=True):
        assert relative_error(actual, expected) < 0.05


@EVERY_FORM
def test_compiled(form: str) -> None:
    torch._dynamo.reset()
    block = Block(make_layer(form), GLU(256, 512)).to("cuda", torch.bfloat16)
    compiled = torch.compile(block, fullgraph=True)
    x = make_inputs(700)
    pairs = zip(gradients(block, x, None, compiled), gradients(block, x, None), strict=True)
    assert max(relative_error(actual, expected) for actual, expected in pairs) < 0.05


@pytest.mark.parametrize("tokens", [700, 704], ids=["part of a tile", "whole tiles"])
@pytest.mark.parametrize("width", [64, 96])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_one_operation(compiled: bool, width: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to float64 as the steps one after the other, and the same bits every time."""
    monkeypatch.setattr(LatteAttention, "one_operation", True)
    torch._dynamo.reset()
    torch.manual_seed(0)
    exact = LatteAttention(4 * width, 4, window=128, mixer="rglru", backend="torch").to("cuda", torch.float64)
    layer = LatteAttention(4 * width, 4, window=128, mixer="rglru").to("cuda", torch.bfloat16)
    layer.load_state_dict(exact.state_dict())
    exact.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    x = torch.randn((2, tokens, 4 * width), generator=torch.Generator("cuda").manual_seed(1), device="cuda").bfloat16()
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    found = gradients(layer, x, None, run)
    with monkeypatch.context() as patch:
        patch.setattr(LatteAttention, "one_operation", False)
        steps = gradients(layer, x, None)
    expected = gradients(exact, x.double(), None)
    for one, each, right in zip(found, steps, expected, strict=True):
        assert relative_error(one, right) < max(1.5 * relative_error(each, right), 0.01)
    for _ in range(3):  # the third is replayed from a recording
        assert all(torch.equal(*pair) for pair in zip(gradients(layer, x, None, run), found, strict=True))


@EVERY_FORM
@torch.no_grad()
def test_streaming_and_packing(form: str) -> None:
    layer, x = make_layer(form), make_inputs(300, batch=1)
    whole, (first, state) = layer(x), layer.stream(x[:, :290])
    ys = [first]
    for t in range(290, 300):
        y, state = layer.stream(x[:, t : t + 1], state)
        ys.append(y)
    assert relative_error(torch.cat(ys, dim=1), whole) < 0.02
    packed = layer(x, cu_seqlens=torch.tensor([0, 100, 300], device="cuda"))
    assert relative_error(packed[:, 100:], layer(x[:, 100:])) < 0.02


def test_full_attention_takes_the_fastest_kernel() -> None:
    layer, x = make_layer("full", num_value_heads=2), make_inputs(256)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        layer(x).sum().backward()


@pytest.mark.parametrize("form", ["latte", "macchiato", "window"])
@torch.no_grad()
def test_a_graph_replays_the_step(form: str) -> None:
    layer, x = make_layer(form), make_inputs(200)
    state, token = layer.stream(x[:, :199]).state, x[:, 199:].clone()
    for _ in range(3):
        expected = layer.stream(token, state).y
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = layer.stream(token, state)
    graph.replay()
    assert torch.equal(y, expected)
