"""Calls like one before skip their checks; every other call is checked."""

import pytest
import torch
from torch import Tensor

from latte.ops import checks, known, latte_attention, macchiato_attention


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "KNOWN", {})
    monkeypatch.setattr(checks, "may_replay", lambda backend, x: True)  # as on a GPU


def draw(*sizes: int) -> Tensor:
    return torch.zeros(2, 8, 2, *sizes)


def test_signatures_tell_calls_apart() -> None:
    x, y = draw(16), draw(16)
    signature = known.sign_call("op", (x, y), (1,))
    assert signature == known.sign_call("op", (y, x), (1,))
    others = [
        known.sign_call("other", (x, y), (1,)),
        known.sign_call("op", (x, y), (2,)),
        known.sign_call("op", (x, y), (1.0,)),
        known.sign_call("op", (x, y), (True,)),
        known.sign_call("op", (x, y.double()), (1,)),
        known.sign_call("op", (x, y[:, :4]), (1,)),
        known.sign_call("op", (x, torch.zeros(2, 2, 8, 16).transpose(1, 2)), (1,)),
        known.sign_call("op", (x, x), (1,)),
        known.sign_call("op", (x, None), (1,)),
        known.sign_call("op", (x, draw(16).requires_grad_()), (1,)),
        known.sign_call("op", (x, torch.nn.Parameter(draw(16)[:, :4])), (1,)),
    ]
    assert None not in others
    assert len({signature, *others}) == 12


def test_gradients_that_nobody_asks_for_make_no_difference() -> None:
    x, leaf = draw(16), draw(16).requires_grad_()
    with torch.no_grad():
        assert known.sign_call("op", (leaf,), ()) == known.sign_call("op", (x,), ())
    assert known.sign_call("op", (leaf,), ()) != known.sign_call("op", (x,), ())


def test_what_has_no_signature() -> None:
    x = draw(16)
    assert known.sign_call("op", (x, "x"), ()) is None
    assert known.sign_call("op", (x, torch.zeros(9)[1:]), ()) is None  # not aligned
    with torch.autograd.forward_ad.dual_level():  # where x may have a tangent
        assert known.sign_call("op", (x,), ()) is None
    seen = []
    torch.vmap(lambda row: (seen.append(known.sign_call("op", (row,), ())), row)[1])(x)  # rows have no address
    assert seen == [None]
    assert known.sign_call("op", (x,), ()) is not None


def test_a_known_call_goes_straight(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, window_q, window_k = draw(5), draw(4), draw(8), draw(8), draw(8)
    for op, tensors, options in (
        (latte_attention, (k, k, v), (True,)),
        (macchiato_attention, (q, k, v, window_q, window_k), (3, None, None, True)),
    ):
        window = {"window": 3} if op is macchiato_attention else {}
        expected = op(*tensors, **window)
        signature = known.sign_call(op.__name__.split("_")[0], tensors, options)
        assert signature is not None
        given = []
        known.remember(signature, lambda x, given=given: given.append(x) or "known")
        assert op(*tensors, **window) == "known"
        assert given == [tensors]
        # others go the usual way
        found = op(*tensors, **window, mask=torch.ones(2, 8, dtype=torch.bool))
        torch.testing.assert_close(found.y, expected.y)
        with pytest.raises(ValueError, match="v has shape"):
            op(*tensors[:2], v[0], *tensors[3:], **window)


def test_not_all_is_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "MOST_KNOWN", 3)
    for n in range(10):
        known.remember((n,), lambda x: x)
    assert len(known.KNOWN) <= 3
    assert known.run_known((9,), ()) == ()
    assert known.run_known((0,), ()) is None
    assert known.run_known(None, ()) is None
