"""The RG-LRU with its gates on a GPU at sizes that models have: beside float64, replayed, compiled."""

import pytest
import torch

from latte.ops.gated_recurrence import gated_rglru
from latte.ops.triton import gated_recurrence

pytestmark = pytest.mark.gpu


def tensors(batch: int, tokens: int, blocks: int, size: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    noise = torch.Generator("cuda").manual_seed(seed)
    width = blocks * size
    shapes = [(batch, tokens, width), (blocks, size, size), (width,), (blocks, size, size), (width,), (width,)]
    drawn = [torch.randn(shape, generator=noise, device="cuda") for shape in shapes]
    for weight in (drawn[1], drawn[3]):
        weight *= size**-0.5
    drawn[5] -= 4.0  # memories of tens of tokens and more
    return [*(z.to(dtype) for z in drawn[:5]), drawn[5]]


def run(given: list[torch.Tensor], backend: str = "triton", function=gated_rglru, **options) -> list[torch.Tensor]:
    leaves = [z.detach().requires_grad_() for z in given]
    y, state = function(*leaves, backend=backend, **options)
    return [y, state, *torch.autograd.grad(y.double().sin().sum() + state.double().sin().sum(), leaves)]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-4)])
@pytest.mark.parametrize(("batch", "tokens", "size"), [(32, 256, 48), (1, 5000, 48), (3, 1001, 32), (2, 700, 128)])
def test_against_float64(batch: int, tokens: int, size: int, dtype: torch.dtype, limit: float) -> None:
    given = tensors(batch, tokens, 16, size, dtype)
    mask = torch.rand((batch, tokens), device="cuda") > 0.1 if tokens == 1001 else None
    exact = run([z.double() for z in given], "torch", mask=mask)
    for actual, expected in zip(run(given, mask=mask), exact, strict=True):
        assert (actual.double() - expected).norm() <= limit * expected.norm()


@pytest.mark.parametrize("batch", [2, 64])
def test_replayed_is_plain(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits whether calls are replayed or not, on whatever tensors they are given."""
    books = [type(gated_recurrence.FORWARD)() for _ in range(2)]
    for name, book in zip(("FORWARD", "BACKWARD"), books, strict=True):
        monkeypatch.setattr(gated_recurrence, name, book)
    cases = [tensors(batch, 320, 16, 48, torch.bfloat16, seed) for seed in range(5)]
    found = [run(case) for case in cases]
    assert all(len(book.recipes) == 1 and None not in book.recipes.values() for book in books)
    for book in books:
        monkeypatch.setattr(book, "find", lambda *_: None)
    for case, results in zip(cases, found, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(results, run(case), strict=True))


def test_compiled() -> None:
    torch._dynamo.reset()
    given = tensors(4, 700, 16, 48, torch.bfloat16)
    compiled = torch.compile(gated_rglru, fullgraph=True)
    for actual, expected in zip(run(given, function=compiled), run(given), strict=True):
        assert (actual.double() - expected.double()).norm() <= 1e-2 * expected.double().norm()
