"""Calls that are replayed from a recording, in the interpreter: the same bits as without, on whatever tensors."""

import weakref
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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
            patch.setattr(Cookbook, "follow", lambda self, inputs, options, call: (call(), None))
            for module in ("attention", "recurrence", "gated_recurrence"):
                patch.setattr(f"latte.ops.{module}.run_known", lambda *_: None)
            return function(*arguments)

    return run


@pytest.mark.parametrize("run", [forward, both], ids=["forward", "with gradients"])
@pytest.mark.parametrize("form", OPS)
def test_replayed_is_plain(form: str, run, replays, unrecorded) -> None:  # noqa: F811
    cases = [draw(form, seed) for seed in range(5)]
    counts, found = [], []
    for case in cases:
        before = len(replays)
        found.append(run(form, case))
        counts.append(len(replays) - before)
    assert counts[0] == 0, "the first call of its kind is no recording"
    assert counts[3] == counts[4] >= counts[2] > 0  # backward's is made one call later than forward's
    assert len(known.KNOWN) == (form not in ("conv", "projected"))  # these are called by layers, which know their input
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


def known_leaves(form: str) -> list[Tensor]:
    """Input of a call that is known, with its backward."""
    leaves = [x.detach().requires_grad_() for x in draw(form, 0)]
    for _ in range(5):
        y = OPS[form](*leaves, backend="triton").y
        torch.autograd.grad(y, leaves, torch.ones(y.shape))
    assert len(known.KNOWN) == 1
    return leaves


def gradients(form: str, leaves: list[Tensor], dy: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(OPS[form](*leaves, backend="triton").y, leaves, dy))


KNOWN = ("latte", "macchiato", "window", "rglru", "gated")


@pytest.mark.parametrize("form", KNOWN)
def test_known_calls_take_gradients_however_they_lie(form: str, replays, unrecorded) -> None:  # noqa: F811
    leaves = known_leaves(form)
    shape = OPS[form](*leaves, backend="triton").y.shape
    joint = torch.randn(*shape[:-1], shape[-1] + 4)
    layouts = {
        "side by side": joint[..., 4:].contiguous(),
        "rows apart": joint[..., 4:],
        "not aligned": joint[..., 1 : shape[-1] + 1],
        "transposed": torch.randn(shape[::-1]).permute(*reversed(range(len(shape)))),
        "one number": torch.ones(()).expand(shape),
    }
    expected = {name: unrecorded(gradients, form, leaves, dy) for name, dy in layouts.items()}
    for name, dy in [*layouts.items()] * 3:
        before = len(replays)
        found = gradients(form, leaves, dy)
        assert all(torch.equal(a, b) for a, b in zip(found, expected[name], strict=True)), name
        if name == "not aligned":  # compiled kernels take whole words of what is aligned
            assert not any("grad" in kernel for kernel in replays[before:])
    assert any("grad" in kernel for kernel in replays)


@pytest.mark.parametrize("form", KNOWN)
def test_known_calls_take_an_input_as_gradient(form: str, replays, unrecorded) -> None:  # noqa: F811
    """A recording in which two inputs are one tensor serves no call in which they are two."""
    leaves = [x.detach().requires_grad_() for x in draw(form, 0)]
    shape = OPS[form](*leaves, backend="triton").y.shape
    same = next(x for x in leaves if x.shape == shape)
    cases = [(dy, unrecorded(gradients, form, leaves, dy)) for dy in (same, torch.randn(shape))]
    for dy, expected in [cases[0]] * 5 + [cases[1]] * 3 + [cases[0]]:
        found = gradients(form, leaves, dy)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("form", KNOWN)
def test_known_calls_and_saved_tensors_that_come_back_elsewhere(form: str, replays, unrecorded) -> None:  # noqa: F811
    """As offloaded ones do: rows that were apart lie side by side, perhaps off 16 bytes."""
    leaves = known_leaves(form)
    dy = torch.randn(OPS[form](*leaves, backend="triton").y.shape)

    def misaligned(x: Tensor) -> Tensor:
        if x.dtype is torch.uint8:
            return x.clone()
        room = torch.empty(x.numel() + 1, dtype=x.dtype)
        return room[1:].view(x.shape).copy_(x)

    expected = unrecorded(gradients, form, leaves, dy)
    gradients(form, leaves, dy)
    for unpack in [torch.clone, lambda x: x.clone(memory_format=torch.contiguous_format), misaligned] * 3:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), unpack):
            found = gradients(form, leaves, dy)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Unmoved(torch.autograd.Function):
    """y, to which no gradient goes back."""

    @staticmethod
    def forward(ctx, *inputs):
        return inputs[0].clone()

    @staticmethod
    def backward(ctx, *gradients):
        return None


@pytest.mark.parametrize("form", ["latte", "macchiato", "rglru", "gated"])
def test_known_calls_turn_back_states(form: str, replays, unrecorded) -> None:  # noqa: F811
    """Gradients of the state alone, of y as well, and of neither."""
    leaves = known_leaves(form)

    def states(of: str) -> list[Tensor]:
        output = OPS[form](*leaves, backend="triton")
        parts = [x for x in torch.utils._pytree.tree_leaves(output.state) if x.requires_grad]
        parts = {"state": parts, "both": [*parts, output.y], "nothing": [Unmoved.apply(output.y)]}[of]
        return list(torch.autograd.grad([x.sin().sum() for x in parts], leaves, allow_unused=True))

    expected = {of: unrecorded(states, of) for of in ("state", "both", "nothing")}
    for of in [*expected] * 3:
        for a, b in zip(states(of), expected[of], strict=True):
            assert (a is None) == (b is None)
            assert a is None or a.equal(b)


@pytest.mark.parametrize("form", KNOWN)
def test_known_calls_hold_none_of_their_tensors(form: str, replays) -> None:  # noqa: F811
    leaves = known_leaves(form)
    gone = [weakref.ref(x) for x in leaves]
    del leaves
    assert all(x() is None for x in gone)


@pytest.mark.parametrize("form", KNOWN)
def test_known_calls_have_no_second_gradients(form: str, replays) -> None:  # noqa: F811
    leaves = known_leaves(form)
    y = OPS[form](*leaves, backend="triton").y
    for grad in torch.autograd.grad(y.sum(), leaves, create_graph=True):
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(grad.sum(), leaves, retain_graph=True, materialize_grads=True)


@pytest.mark.parametrize("form", OPS)
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_calls_may_be_recorded_between_a_checkpoint_and_its_backward(form: str, reentrant: bool, replays) -> None:  # noqa: F811
    """What the second run of a call keeps has to be what the first kept, whichever way either of them went."""
    leaves = [x.detach().requires_grad_() for x in draw(form, 0)]

    def call(*tensors: Tensor) -> Tensor:
        return OPS[form](*tensors, backend="triton").y

    expected = torch.autograd.grad(call(*[x.double().float() for x in leaves]).square().sum(), leaves)
    for _ in range(4):
        y = checkpoint(call, *leaves, use_reentrant=reentrant)
        for x in leaves:
            x.grad = None
        y.square().sum().backward()
        for x, grad in zip(leaves, expected, strict=True):
            assert torch.equal(x.grad, grad)
