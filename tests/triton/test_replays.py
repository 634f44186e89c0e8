"""Calls that are replayed from a recording, in the interpreter: the same bits as without, on whatever tensors."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from latte.layers.rotary import rotary
from latte.ops import (
    LatteState,
    MacchiatoState,
    WindowState,
    known,
    latte_attention,
    macchiato_attention,
    rglru,
    short_conv,
    window_attention,
)
from latte.ops.arguments import HeadSizes
from latte.ops.gated_recurrence import gated_rglru
from latte.ops.projected import MacchiatoWeights, projected_macchiato
from latte.ops.steps import (
    LinearWeights,
    Place,
    RGLRUWeights,
    input_step_,
    mixture_step_,
    rglru_step_,
    short_conv_step_,
)
from latte.ops.triton.replay import Cookbook
from tests.triton.replaying import replays  # noqa: F401 - a fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter: 1 / 0, overflow

B, T, H, L, D, E, W = 1, 9, 2, 3, 5, 6, 7
MIXERS = ("rglru", "gated", "conv")


def window(*tensors: Tensor, **options):
    return window_attention(*tensors, window=W, **options)


def macchiato(*tensors: Tensor, **options):
    return macchiato_attention(*tensors, window=W, **options)


class Heads(NamedTuple):
    y: Tensor


def projected(x: Tensor, mixed: Tensor, *weights: Tensor, backend: str) -> Heads:
    sizes, turned = HeadSizes(H, H, L, D, E), rotary(torch.arange(T)[None], E)
    return Heads(projected_macchiato(x, mixed, MacchiatoWeights(*weights), turned, sizes, window=W, backend=backend))


OPS = {"latte": latte_attention, "macchiato": macchiato, "window": window, "rglru": rglru, "gated": gated_rglru,
       "conv": short_conv, "projected": projected}  # fmt: skip


def draw(form: str, seed: int) -> list[Tensor]:
    """Heads of one joint product where the form has heads."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if form in MIXERS:
        x, vectors = normal(B, T, 4), [normal(4) for _ in range(3)]
        match form:
            case "rglru":
                return [x, normal(B, T, 4), normal(B, T, 4), vectors[0]]
            case "gated":
                return [x, normal(1, 4, 4), vectors[0], normal(1, 4, 4), *vectors[1:]]
            case _:
                return [x, normal(4, 3), vectors[0]]
    if form == "projected":
        rows = H * E, H * E, H * D, H * (L + 1), H * L
        return [normal(B, T, 4), normal(B, T, 4), *(normal(size, 4) for size in rows)]
    sizes = {"latte": [L, L, D], "macchiato": [L + 1, L, D, D, D], "window": [D, D, D]}[form]
    sizes = [4 * -(-size // 4) * H for size in sizes]  # every part begins at 16 bytes
    parts = normal(B, T, sum(sizes)).split(sizes, dim=2)
    widths = {"latte": [L, L, D], "macchiato": [L + 1, L, D, D, D], "window": [D, D, D]}[form]
    return [part.unflatten(2, (H, -1))[..., :width] for part, width in zip(parts, widths, strict=True)]


def forward(form: str, given: list[Tensor]) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(tuple(OPS[form](*given, backend="triton")))


def both(form: str, given: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in given]
    output = OPS[form](*leaves, backend="triton")
    dy = torch.randn(output.y.shape, generator=torch.Generator().manual_seed(7))
    return [*torch.utils._pytree.tree_leaves(tuple(output)), *torch.autograd.grad(output.y, leaves, dy)]


@pytest.fixture
def unrecorded(monkeypatch: pytest.MonkeyPatch):
    """Run a function as if nothing had been seen before."""

    def run(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(Cookbook, "find", lambda *_: None)
            patch.setattr(Cookbook, "perform", lambda self, inputs, options, call: call())
            for module in ("attention", "recurrence"):
                patch.setattr(f"latte.ops.{module}.run_known", lambda *_: None)
            return function(*arguments)

    return run


@pytest.mark.parametrize("run", [forward, both], ids=["forward", "with gradients"])
@pytest.mark.parametrize("form", OPS)
def test_replayed_is_plain(form: str, run, replays, unrecorded) -> None:  # noqa: F811
    cases = [draw(form, seed) for seed in range(4)]
    counts, found = [], []
    for case in cases:
        before = len(replays)
        found.append(run(form, case))
        counts.append(len(replays) - before)
    assert counts[0] == 0, "the first call of its kind is no recording"
    assert counts[2] == counts[3] > 0
    assert len(known.KNOWN) == (
        form not in ("gated", "conv", "projected")
    )  # these are called by layers, which know their input
    before = len(replays)
    for case, results in zip(cases, found, strict=True):
        expected = unrecorded(run, form, case)
        assert len(results) == len(expected)
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
    assert len(replays) == before


@pytest.mark.parametrize("form", ["latte", "window", "rglru"])
def test_one_tensor_in_several_places_is_another_call(form: str, replays, unrecorded) -> None:  # noqa: F811
    x, y, z = (torch.randn(B, T, H, 8) if form != "rglru" else torch.randn(B, 9, 4) for _ in range(3))
    rest = [torch.randn(4)] if form == "rglru" else []
    for given in ([x, x, x, *rest], [x, y, z, *rest]):
        for run in (forward, both):
            expected = unrecorded(run, form, given)
            for _ in range(3):
                assert all(torch.equal(a, b) for a, b in zip(run(form, given), expected, strict=True))
    assert replays


def make_step(kind: str):
    """One step, from its number, and the tensors that it writes to."""

    def draw(seed: int, *shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    slots, width, blocks = 3, 4, 1
    window = WindowState(draw(1, 1, slots, H, width), draw(2, 1, slots, H, width), torch.ones(1, slots).bool())
    state = MacchiatoState(LatteState(draw(3, 1, H, 4), draw(4, 1, H, 4, width)), *window)
    number = torch.zeros(1, dtype=torch.int32)
    turn = number.clone() if kind == "ring" else None
    place = Place(number.long(), number, torch.zeros((), dtype=torch.long), turn)
    gates = RGLRUWeights(*(draw(n, blocks, width, width) if n in (5, 7) else draw(n, width) for n in range(5, 10)))
    layers = [LinearWeights(draw(n, 8, width), None) for n in (10, 11)]
    memory = draw(12, 1, 2, width) if kind == "conv" else draw(12, 1, width)

    def step(n: int) -> list[Tensor]:
        x = draw(20 + n, 1, 1, width)
        match kind:
            case "rglru":
                return [rglru_step_(x, *gates, memory, backend="triton")]
            case "conv":
                return [short_conv_step_(x, draw(13, width, 3), None, memory, backend="triton")]
            case "inputs":
                return [y for group in input_step_(x, gates, memory, layers, layers, backend="triton") for y in group]
        q, k, v, wq, wk = (draw(30 + n, 1, 1, H, 8)[..., :size] for size in (5, 4, width, width, width))
        return [mixture_step_(q, k, v, wq, wk, state, place, backend="triton")]

    return step, [x for x in torch.utils._pytree.tree_leaves((memory, tuple(state), tuple(place))) if x is not None]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["rglru", "conv", "inputs", "ring", "moving"])
def test_steps_that_are_replayed_go_on_once(kind: str, replays, unrecorded) -> None:  # noqa: F811
    """A step writes to its state, so that it must not run twice to be recorded."""
    (step, written), (plain, expected_written) = make_step(kind), make_step(kind)
    versions = [x._version for x in written]
    for n in range(4):
        for found, expected in ((step(n), unrecorded(plain, n)), (written, expected_written)):
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert len(replays) == 2
    assert any(x._version > before for x, before in zip(written, versions, strict=True))  # autograd is told


def test_steps_refuse_gradients(replays) -> None:  # noqa: F811
    step, _ = make_step("rglru")
    leaf = torch.ones(1, 1, 4, requires_grad=True)
    gates = [torch.ones(1, 4, 4), torch.ones(4), torch.ones(1, 4, 4), torch.ones(4), torch.ones(4)]
    y = rglru_step_(leaf, *gates, torch.zeros(1, 4), backend="triton")
    with pytest.raises(RuntimeError, match="autograd"):
        y.sum().backward()
    assert step(0)[0].grad_fn is None


def test_calls_without_tokens_are_not_replayed(replays) -> None:  # noqa: F811
    """Their state is filled by no kernel."""
    for _ in range(4):
        state = latte_attention(*(torch.zeros(B, 0, H, n) for n in (L, L, D)), backend="triton").state
        assert (state.log_norm == -torch.inf).all()
        assert (state.mean == 0).all()
    assert not replays
