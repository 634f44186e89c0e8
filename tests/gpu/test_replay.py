"""Calls that are replayed give the same bits as those that are not, on whatever tensors they are given."""

import pytest
import torch

from latte.ops import known, latte_attention, macchiato_attention, rglru, window_attention
from latte.ops.triton import attention, recurrence

pytestmark = pytest.mark.gpu


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def tensors(form: str) -> list[torch.Tensor]:
    batch, tokens, heads, latents, width = 2, 320, 3, 16, 64
    if form == "rglru":
        return [*(draw(batch, tokens, 192) for _ in range(3)), torch.randn(192, device="cuda")]
    joint = draw(batch, tokens, heads * (latents + latents + width * 3)).split(
        [heads * latents] * 2 + [heads * width] * 3, -1
    )
    q, k, v, window_q, window_k = (x.unflatten(2, (heads, -1)) for x in joint)
    if form == "window":
        return [window_q, window_k, v]
    return [q, k, v] if form == "latte" else [draw(batch, tokens, heads, latents + 1), k, v, window_q, window_k]


OPS = {"latte": latte_attention, "macchiato": macchiato_attention, "window": window_attention, "rglru": rglru}


def run(form: str, given: list[torch.Tensor], dy: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in given]
    y = OPS[form](*leaves).y
    return [y, *torch.autograd.grad(y, leaves, dy)]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "KNOWN", {})


def check_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no call is known."""
    for module in ("attention", "recurrence"):
        monkeypatch.setattr(f"latte.ops.{module}.run_known", lambda *_: None)


@pytest.mark.parametrize("form", OPS)
def test_replayed_is_plain(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = recurrence if form == "rglru" else attention
    books = [type(module.FORWARD)() for _ in range(2)]
    for name, book in zip(("FORWARD", "BACKWARD"), books, strict=True):
        monkeypatch.setattr(module, name, book)
    cases = [tensors(form) for _ in range(5)]
    pulls = [torch.randn_like(OPS[form](*case).y) for case in cases]
    for book in books:
        book.seen.clear()
        book.recipes.clear()
    found = [run(form, case, dy) for case, dy in zip(cases, pulls, strict=True)]
    assert all(len(book.recipes) == 1 and None not in book.recipes.values() for book in books)
    check_all(monkeypatch)
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(getattr(module, name), "find", lambda *_: None)
    for case, dy, results in zip(cases, pulls, found, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(results, run(form, case, dy), strict=True))


@pytest.mark.parametrize("form", OPS)
def test_known_calls_give_the_same_bits(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States included, and no result is another's memory."""
    cases = [tensors(form) for _ in range(5)]
    found = [OPS[form](*case) for case in cases]
    assert len(known.KNOWN) == 1
    check_all(monkeypatch)
    for case, result in zip(cases, found, strict=True):
        again = OPS[form](*case)
        assert torch.equal(result.y, again.y)
        assert type(result) is type(again)
        assert type(result.state) is type(again.state)
        flat, flat_again = (torch.utils._pytree.tree_leaves(x.state) for x in (result, again))
        assert all(torch.equal(x, y) for x, y in zip(flat, flat_again, strict=True))


def test_calls_without_tokens_are_not_replayed() -> None:
    """Their state is filled by no kernel."""
    for _ in range(4):
        q, k, v = (draw(2, 0, 3, size) for size in (16, 16, 64))
        state = latte_attention(q, k, v).state
        assert (state.log_norm == -torch.inf).all()
        assert (state.mean == 0).all()


@pytest.mark.parametrize("form", ["latte", "window", "rglru"])
def test_one_tensor_in_several_places_is_another_call(form: str) -> None:
    """What was recorded with it must not be replayed for several."""
    x, *others = (draw(2, 192, 4, 64) if form != "rglru" else draw(2, 192, 192) for _ in range(3))
    rest = [torch.randn(192, device="cuda")] if form == "rglru" else []
    for given in ([x, x, x], [x, *others]):
        expected = OPS[form](*(z.double() for z in (*given, *rest)), backend="torch").y
        for _ in range(4):
            y = OPS[form](*given, *rest).y
            assert ((y.double() - expected).norm() / expected.norm()).item() < 1e-2
