import math
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.debugging import aot_eager
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from latte.ops.recurrence import rglru
from latte.ops.states import RGLRUOutput
from latte.ops.torch import segments

B, W, N = 2, 7, 3  # distinct primes: a swapped axis cannot pass
LENGTHS = [0, 1, 2, 63, 64, 65, 131]  # around a chunk and around four segments of 16


@pytest.fixture(params=[2**19, 1], ids=["one segment", "segments of 16"])
def segment(request, monkeypatch):
    monkeypatch.setattr(segments, "CPU_SEGMENT", request.param)


def make_inputs(length, batch=B, dtype=torch.float64, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, length, W)] * 3 + [(W,)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).mul(scale) for shape in shapes]
    inputs[3][::2] -= 6.0  # half of the channels remember over many chunks and segments
    return [z.to(dtype).requires_grad_() for z in inputs]


def make_mask(length, batch=B, seed=1):
    mask = torch.rand((batch, length), generator=torch.Generator().manual_seed(seed)) > 0.4
    mask[0, : length // 2] = False  # left padding in one row, holes in all
    return mask


def make_state(sequences=B, dtype=torch.float64, seed=2):
    state = torch.randn((sequences, W), generator=torch.Generator().manual_seed(seed), dtype=dtype)
    state[0, 3] = -torch.inf  # nothing seen there
    return state.requires_grad_()


def gradients(output, leaves, seed=3):
    """Gradients of a random weighing of y and of the state where it says something."""
    generator = torch.Generator().manual_seed(seed)
    total = 0.0
    for part in (output.y, output.state):
        weights = torch.randn(part.shape, generator=generator, dtype=torch.float64)
        total = total + torch.where(part.isfinite(), part.double(), 0.0).mul(weights).sum()
    if not total.requires_grad:  # nothing was computed
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    return torch.autograd.grad(total, leaves, materialize_grads=True)


def assert_matches(inputs, *, backend="torch", rtol=1e-9, atol=1e-11, **options):
    expected = rglru(*inputs, **options, backend="reference")
    actual = rglru(*inputs, **options, backend=backend)
    assert_close(tuple(actual), tuple(expected), rtol=rtol, atol=atol)
    leaves = [*inputs, options["state"]] if options.get("state") is not None else inputs
    assert_close(gradients(actual, leaves), gradients(expected, leaves), rtol=rtol, atol=atol)


def test_reference_is_the_formula():
    x, a_gate, x_gate, a_param = (part.detach() for part in make_inputs(2))
    y, state = rglru(x, a_gate, x_gate, a_param, backend="reference")
    for w in range(W):
        gated = [x[0, t, w].item() / (1 + math.exp(-x_gate[0, t, w].item())) for t in range(2)]
        a = math.exp(-8 * math.log1p(math.exp(a_param[w].item())) / (1 + math.exp(-a_gate[0, 1, w].item())))
        second = a * gated[0] + math.sqrt(1 - a * a) * gated[1]
        assert y[0, :, w].tolist() == pytest.approx([gated[0], second], rel=1e-9)
        assert state[0, w].item() == pytest.approx(second, rel=1e-9)


@pytest.mark.usefixtures("segment")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("continued", [False, True])
def test_matches_reference(length, masked, continued):
    assert_matches(
        make_inputs(length),
        mask=make_mask(length) if masked else None,
        state=make_state() if continued else None,
    )


@pytest.mark.usefixtures("segment")
@pytest.mark.parametrize("cu_seqlens", [[0, 5, 5, 21], [0, 0, 1, 2], [0, 40, 71, 131], [0, 0, 0, 0]])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("continued", [False, True])
def test_packed_matches_reference(cu_seqlens, masked, continued):
    length = cu_seqlens[-1]
    assert_matches(
        make_inputs(length, batch=1),
        mask=make_mask(length, batch=1) if masked else None,
        state=make_state(N) if continued else None,
        cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32),
    )


@pytest.mark.usefixtures("segment")
@pytest.mark.parametrize("packed", [False, True])
def test_gradcheck(packed):
    inputs = make_inputs(21, batch=1, scale=1.0)
    mask = torch.ones(1, 21, dtype=torch.bool)
    mask[0, [0, 8, 9, 20]] = False
    state = torch.randn(2 if packed else 1, W, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, 8, 21]) if packed else None

    def function(x, a_gate, x_gate, a_param, state):
        return tuple(rglru(x, a_gate, x_gate, a_param, mask=mask, state=state, cu_seqlens=cu_seqlens, backend="torch"))

    assert torch.autograd.gradcheck(function, (*inputs, state))


@given(cuts=st.lists(st.integers(0, 40), max_size=4), masks=st.integers(0, 2**40 - 1), masked=st.booleans())
@settings(max_examples=30, deadline=None)
def test_cut_equals_whole(cuts, masks, masked):
    inputs = make_inputs(40, batch=1)
    mask = torch.tensor([[bool(masks >> t & 1) for t in range(40)]]) if masked else None
    whole = rglru(*inputs, mask=mask)
    bounds = [0, *sorted(cuts), 40]
    state, outputs = None, []
    for start, end in pairwise(bounds):
        part = [z[:, start:end] for z in inputs[:3]]
        y, state = rglru(*part, inputs[3], mask=None if mask is None else mask[:, start:end], state=state)
        outputs.append(y)
    joined = type(whole)(torch.cat(outputs, dim=1), state)
    assert_close(tuple(joined), tuple(whole))
    assert_close(gradients(joined, inputs), gradients(whole, inputs))


@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=5), masked=st.booleans(), continued=st.booleans())
@settings(max_examples=30, deadline=None)
def test_packed_equals_apart(lengths, masked, continued):
    total = sum(lengths)
    inputs = make_inputs(total, batch=1)
    mask = make_mask(total, batch=1) if masked else None
    state = make_state(len(lengths)) if continued else None
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    packed = rglru(*inputs, mask=mask, state=state, cu_seqlens=cu_seqlens)
    for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        part = [z[:, start:end] for z in inputs[:3]]
        alone = rglru(
            *part,
            inputs[3],
            mask=None if mask is None else mask[:, start:end],
            state=None if state is None else state[n : n + 1],
        )
        assert_close(packed.y[:, start:end], alone.y)
        assert_close(packed.state[n : n + 1], alone.state)


def test_state_says_when_nothing_was_seen():
    inputs = make_inputs(5)
    empty = rglru(*(z[:, :0] for z in inputs[:3]), inputs[3])
    masked = rglru(*inputs, mask=torch.zeros(B, 5, dtype=torch.bool))
    assert (empty.state == -torch.inf).all()
    assert (masked.state == -torch.inf).all()
    assert empty.y.shape == (B, 0, W)
    assert (masked.y == 0).all()
    assert_close(tuple(rglru(*inputs, state=masked.state)), tuple(rglru(*inputs)))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_empty_batch(backend):
    y, state = rglru(*make_inputs(5, batch=0), backend=backend)
    assert y.shape == (0, 5, W)
    assert state.shape == (0, W)


@pytest.mark.usefixtures("segment")
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("contents", [torch.nan, torch.inf, 1e4])
def test_masked_contents_do_not_matter(backend, contents):
    mask = make_mask(65)
    clean, dirty = make_inputs(65), make_inputs(65)
    with torch.no_grad():
        for z in dirty[:3]:
            z[~mask] = contents
    expected, actual = (rglru(*inputs, mask=mask, backend=backend) for inputs in (clean, dirty))
    assert_close(tuple(actual), tuple(expected), rtol=0, atol=0)
    grads = gradients(actual, dirty)
    assert_close(grads, gradients(expected, clean), rtol=0, atol=0)
    assert all((grad[~mask] == 0).all() for grad in grads[:3])
    assert (actual.y[~mask] == 0).all()


@pytest.mark.parametrize("a_gate", [-1e4, -30.0, 0.0, 1e4])
@pytest.mark.parametrize("x_gate", [-1e4, 1e4])
@pytest.mark.parametrize("a_param", [-1e4, -20.0, 3.0, 1e4, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hostile_inputs(a_gate, x_gate, a_param, dtype):
    length = 40
    inputs = make_inputs(length, dtype=dtype)
    with torch.no_grad():
        inputs[0][:] = 1e4  # constant and large
        inputs[1][:, ::3] = a_gate
        inputs[2][:, ::5] = x_gate
        inputs[3][::2] = a_param
    exact = [z.detach().double().requires_grad_() for z in inputs]
    actual, expected = rglru(*inputs, backend="torch"), rglru(*exact, backend="reference")
    assert_near(actual, expected, gradients(actual, inputs), gradients(expected, exact), dtype)


def assert_near(actual, expected, grads, exact_grads, dtype):
    """Everything finite, and within the dtype's rounding of the largest value."""
    eps = torch.finfo(dtype).eps
    for got, right in zip([*actual, *grads], [*expected, *exact_grads], strict=True):
        assert got.isfinite().all()
        assert (got.double() - right).abs().max() <= 100 * eps * right.abs().max() + 1e-6


@pytest.mark.usefixtures("segment")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    inputs = make_inputs(131, dtype=dtype)
    exact = [z.detach().double().requires_grad_() for z in inputs]
    actual, expected = rglru(*inputs), rglru(*exact, backend="reference")
    assert actual.y.dtype == dtype
    assert actual.state.dtype == torch.float32
    grads = gradients(actual, inputs)
    assert [grad.dtype for grad in grads] == [dtype] * 4
    assert_near(actual, expected, grads, gradients(expected, exact), dtype)


def test_mixed_dtypes_and_strides():
    x, a_gate, x_gate, a_param = make_inputs(65, dtype=torch.float32)
    gates = torch.cat([a_gate, x_gate], dim=2).bfloat16()
    a_gate, x_gate = gates.chunk(2, dim=2)
    x = x.detach().transpose(0, 1).contiguous().transpose(0, 1)
    actual = rglru(x, a_gate, x_gate, a_param)
    expected = rglru(x, a_gate.contiguous(), x_gate.contiguous(), a_param, backend="reference")
    assert actual.y.dtype == torch.float32
    assert_close(tuple(actual), tuple(expected))
    assert rglru(x.bfloat16(), a_gate.double(), x_gate, a_param).state.dtype == torch.float64


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_float16_saturates(backend):
    x = torch.full((1, 64, 1), 6e4, dtype=torch.float16)
    y, state = rglru(x, torch.full_like(x, -3.0), torch.full_like(x, 20.0), torch.zeros(1), backend=backend)
    assert (y[0, 32:] == torch.finfo(torch.float16).max).all()
    assert state.item() > 1e5


def test_gradient_near_one_is_clipped():
    inputs = make_inputs(9, dtype=torch.float64)
    with torch.no_grad():
        inputs[1][:] = -25.0  # 1 − a² ≈ 1e-10, so 1 / (2 sqrt(1 − a²)) ≈ 5e4
    assert_matches(inputs)
    inputs = [z.detach()[:1, :2].clone().requires_grad_() if z.ndim == 3 else z for z in inputs]
    (grad,) = torch.autograd.grad(rglru(*inputs).y[0, 1].sum(), inputs[1])
    gated = torch.sigmoid(inputs[2]) * inputs[0]
    rate = 8 * torch.nn.functional.softplus(inputs[3]) * torch.sigmoid(torch.tensor(-25.0, dtype=torch.float64))
    assert_close(grad[0, 1], -rate * gated[0, 0] + 1000 * 2 * rate * gated[0, 1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("continued", [False, True])
def test_checkpoint_and_autocast(continued):
    inputs = make_inputs(65, dtype=torch.float32)
    state = make_state(dtype=torch.float32) if continued else None
    expected = rglru(*inputs, state=state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = checkpoint(rglru, *inputs, state=state, use_reentrant=False)
    assert actual.y.dtype == torch.float32
    assert_close(tuple(actual), tuple(expected), rtol=0, atol=0)
    assert_close(gradients(actual, inputs), gradients(expected, inputs), rtol=0, atol=0)


def test_compiles_whole_with_any_length():
    torch._dynamo.reset()

    def function(x, a_gate, x_gate, a_param, mask, state, cu_seqlens):
        y, state = rglru(2 * x, a_gate, x_gate, a_param, mask=mask, state=state, cu_seqlens=cu_seqlens)
        return y + 1, state

    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=count)
    for length, packed, expected_graphs in [(5, False, 1), (9, False, 1), (1, False, 2), (12, True, 3)]:
        inputs = make_inputs(length, batch=1 if packed else B)
        mask = make_mask(length, batch=1 if packed else B)
        cu_seqlens = torch.tensor([0, 4, 12]) if packed else None
        arguments = (*inputs, mask, make_state(), cu_seqlens)
        expected, actual = function(*arguments), compiled(*arguments)
        assert len(graphs) == expected_graphs
        assert_close(actual, expected)
        leaves = [*inputs, arguments[5]]
        assert_close(*(gradients(RGLRUOutput(*pair), leaves) for pair in (actual, expected)))


@pytest.mark.usefixtures("segment")
@pytest.mark.parametrize("packed", [False, True])
def test_operators_are_well_formed(packed):
    from latte.ops.torch.recurrence import rglru_forward

    inputs = make_inputs(12, batch=1)
    state = torch.zeros(2 if packed else 1, W, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, 5, 12]) if packed else None
    torch.library.opcheck(rglru_forward, (*inputs, make_mask(12, batch=1), state, cu_seqlens))


@pytest.mark.bench
def test_faster_than_a_loop_over_time():
    x, a_gate, x_gate = torch.randn(3, 1, 4096, 768)
    a_param = torch.randn(768)

    def seconds(backend):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            rglru(x, a_gate, x_gate, a_param, backend=backend)
            times.append(time.perf_counter() - start)
        return min(times)

    assert seconds("torch") * 3 < seconds("reference")


GOOD = {
    "x": torch.zeros(B, 5, W),
    "a_gate": torch.zeros(B, 5, W),
    "x_gate": torch.zeros(B, 5, W),
    "a_param": torch.zeros(W),
}
ONE_ROW = {name: value[:1] if value.ndim == 3 else value for name, value in GOOD.items()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (GOOD | {"x": torch.zeros(B, 5)}, r"x has shape \[2, 5\]"),
        (GOOD | {"x": torch.zeros(B, 5, W, dtype=torch.int64)}, r"x has dtype torch.int64"),
        (GOOD | {"x": [1.0]}, r"x is list"),
        (GOOD | {"a_gate": torch.zeros(B, 6, W)}, r"a_gate has shape \[2, 6, 7\]; .*T=5"),
        (GOOD | {"x_gate": torch.zeros(B, 5, W + 1)}, r"x_gate has shape \[2, 5, 8\]; .*W=7"),
        (GOOD | {"a_param": torch.zeros(W + 1)}, r"a_param has shape \[8\]; it must be \[W=7\]"),
        (GOOD | {"mask": torch.ones(B, 5)}, r"mask has dtype torch.float32"),
        (GOOD | {"mask": torch.ones(B, 4, dtype=torch.bool)}, r"mask has shape \[2, 4\]"),
        (GOOD | {"state": torch.zeros(B + 1, W)}, r"state has shape \[3, 7\]; it must be \[B=2, W=7\]"),
        (GOOD | {"state": torch.zeros(B, W, device="meta")}, r"state is on meta; it must be on cpu"),
        (GOOD | {"backend": "cuda"}, r"backend is 'cuda'; it must be one of"),
        (GOOD | {"cu_seqlens": torch.tensor([0, 5])}, r"cu_seqlens is given with batch size 2"),
        (ONE_ROW | {"cu_seqlens": torch.tensor([1, 5])}, r"cu_seqlens starts at 1"),
        (ONE_ROW | {"cu_seqlens": torch.tensor([0, 3, 2, 5])}, r"cu_seqlens decreases from 3 to 2"),
        (ONE_ROW | {"cu_seqlens": torch.tensor([0, 4])}, r"cu_seqlens ends at 4; .* 5"),
        (ONE_ROW | {"cu_seqlens": torch.tensor([0, 3, 5]), "state": torch.zeros(1, W)}, r"state has shape .*N=2"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        rglru(**arguments)
