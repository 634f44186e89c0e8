"""What only a GPU can show: real sizes, CUDA graphs, torch.compile, and that "auto" means the kernels."""

import pytest
import torch

from latte.ops import latte_attention, macchiato_attention, rglru

pytestmark = pytest.mark.gpu


def inputs(batch: int, tokens: int, heads: int = 4, width: int = 64, latents: int = 16, scale: float = 1.0):
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator, device="cuda")
        return noise.to(torch.bfloat16)

    q, k = normal(batch, tokens, heads, latents + 1), scale * normal(batch, tokens, heads, latents)
    values = [normal(batch, tokens, heads, width) for _ in range(3)]
    return [x.requires_grad_() for x in (q, k, *values)]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def test_auto_is_triton() -> None:
    q, k, v, *_ = inputs(1, 70)
    auto, named = (latte_attention(q[..., 1:], k, v, backend=name).y for name in ("auto", "triton"))
    assert torch.equal(auto, named)


@pytest.mark.parametrize("tokens", [512, 4096, 40_000])
def test_against_float64(tokens: int) -> None:
    given = inputs(1, tokens)
    exact = [x.detach().double().requires_grad_() for x in given]
    dy = torch.randn_like(given[2])
    y, expected = macchiato_attention(*given).y, macchiato_attention(*exact, backend="torch").y
    assert relative_error(y, expected) < 1e-2
    for actual, wanted in zip(
        torch.autograd.grad(y, given, dy), torch.autograd.grad(expected, exact, dy.double()), strict=True
    ):
        assert relative_error(actual, wanted) < 1e-2


@pytest.mark.parametrize(("width", "latents"), [(16, 64), (32, 32), (32, 48), (32, 128), (64, 64), (96, 16), (72, 40),
                                                (128, 16), (256, 64)])  # fmt: skip
def test_widths_and_latents(width: int, latents: int) -> None:
    """Blocks of every shape: compilers have misread some of them."""
    given = inputs(2, 512, width=width, latents=latents)
    exact = [x.detach().double().requires_grad_() for x in given]
    dy = torch.randn_like(given[2])
    y, expected = macchiato_attention(*given).y, macchiato_attention(*exact, backend="torch").y
    assert relative_error(y, expected) < 1e-2
    for actual, wanted in zip(
        torch.autograd.grad(y, given, dy), torch.autograd.grad(expected, exact, dy.double()), strict=True
    ):
        assert relative_error(actual, wanted) < 2e-2


def test_leaps_stay_finite() -> None:
    given = inputs(2, 512, scale=1e4)
    output = macchiato_attention(*given)
    for x in (output.y, output.state.latents.mean, *torch.autograd.grad(output.y, given, torch.ones_like(output.y))):
        assert x.isfinite().all()


def test_same_bits_every_time() -> None:
    given = inputs(2, 16_384)
    dy = torch.randn_like(given[2])
    runs = [torch.autograd.grad(macchiato_attention(*given).y, given, dy) for _ in range(3)]
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(runs[0], run, strict=True))


def test_a_graph_replays_the_call() -> None:
    given = [x.detach() for x in inputs(2, 1024)]
    expected = macchiato_attention(*given).y
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        macchiato_attention(*given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = macchiato_attention(*given).y
    captured.fill_(torch.nan)
    graph.replay()
    assert torch.equal(captured, expected)


def test_compiles_whole() -> None:
    given = inputs(1, 192)
    dy = torch.randn_like(given[2])

    def step(*tensors: torch.Tensor) -> torch.Tensor:
        return macchiato_attention(*tensors).y

    y, expected = torch.compile(step, fullgraph=True)(*given), step(*given)
    torch.testing.assert_close(y, expected)
    for actual, wanted in zip(torch.autograd.grad(y, given, dy), torch.autograd.grad(expected, given, dy), strict=True):
        torch.testing.assert_close(actual, wanted)


def test_a_million_tokens() -> None:
    q, k, v, *_ = (x.detach() for x in inputs(1, 1 << 20, heads=2))
    output = latte_attention(q[..., 1:].contiguous(), k, v)
    assert output.y.isfinite().all()
    exact = torch.logsumexp(k.double(), dim=1)
    torch.testing.assert_close(output.state.log_norm.double(), exact, rtol=0, atol=1e-3)


def test_rglru_against_float64() -> None:
    given = [torch.randn(2, 4096, 768, device="cuda").to(torch.bfloat16) for _ in range(3)]
    a_param = torch.randn(768, device="cuda")
    expected = rglru(*(x.double() for x in given), a_param.double(), backend="torch").y
    assert relative_error(rglru(*given, a_param).y, expected) < 1e-2
