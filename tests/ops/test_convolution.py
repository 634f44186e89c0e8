from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.debugging import aot_eager
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from latte.ops.convolution import short_conv
from latte.ops.torch import segments

B, W, K = 2, 7, 3  # distinct primes: a swapped axis cannot pass
LENGTHS = [0, 1, 2, 3, 63, 64, 65, 131]  # around the taps and around segments of 16


@pytest.fixture(params=[2**19, 1], ids=["one segment", "segments of 16"])
def segment(request, monkeypatch):
    monkeypatch.setattr(segments, "CPU_SEGMENT", request.param)


def make_inputs(length, batch=B, taps=K, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, length, W), (W, taps), (W,)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def make_mask(length, batch=B):
    mask = torch.rand((batch, length), generator=torch.Generator().manual_seed(1)) > 0.4
    mask[0, : length // 2] = False  # left padding in one row, holes in all
    return mask


def make_state(sequences=B, taps=K, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    return torch.randn((sequences, taps - 1, W), generator=generator, dtype=dtype).requires_grad_()


def gradients(output, leaves):
    """Gradients of a random weighing of y and of the state."""
    generator = torch.Generator().manual_seed(3)
    total = sum((part.double() * torch.randn(part.shape, generator=generator)).sum() for part in output)
    if not total.requires_grad:  # nothing was computed
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    return torch.autograd.grad(total, leaves, materialize_grads=True)


def assert_matches(inputs, **options):
    expected = short_conv(*inputs, **options, backend="reference")
    actual = short_conv(*inputs, **options, backend="torch")
    assert_close(tuple(actual), tuple(expected))
    leaves = [leaf for leaf in (*inputs, options.get("state")) if leaf is not None]
    assert_close(gradients(actual, leaves), gradients(expected, leaves))


def test_reference_is_the_convolution_of_pytorch():
    x, weight, bias = make_inputs(21)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (K - 1, 0))
    expected = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=W).transpose(1, 2)
    y, state = short_conv(x, weight, bias, backend="reference")
    assert_close(y, expected)
    assert_close(state, x[:, -(K - 1) :])


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
@pytest.mark.parametrize("taps", [1, 2, 5, 17])
@pytest.mark.parametrize("length", [1, 4, 40])
def test_any_number_of_taps(taps, length):
    x, weight, bias = make_inputs(length, taps=taps)
    assert_matches((x, weight, bias), mask=make_mask(length), state=make_state(taps=taps))
    assert_matches((x, weight, None))


@pytest.mark.usefixtures("segment")
@pytest.mark.parametrize("cu_seqlens", [[0, 5, 5, 21], [0, 0, 1, 2], [0, 40, 71, 131], [0, 0, 0, 0]])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("continued", [False, True])
def test_packed_matches_reference(cu_seqlens, masked, continued):
    length = cu_seqlens[-1]
    assert_matches(
        make_inputs(length, batch=1),
        mask=make_mask(length, batch=1) if masked else None,
        state=make_state(3) if continued else None,
        cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32),
    )


@pytest.mark.usefixtures("segment")
@pytest.mark.parametrize("packed", [False, True])
def test_gradcheck(packed):
    inputs = make_inputs(19, batch=1)
    mask = torch.ones(1, 19, dtype=torch.bool)
    mask[0, [0, 8, 9, 18]] = False
    cu_seqlens = torch.tensor([0, 8, 19]) if packed else None

    def function(x, weight, bias, state):
        return tuple(short_conv(x, weight, bias, mask=mask, state=state, cu_seqlens=cu_seqlens, backend="torch"))

    assert torch.autograd.gradcheck(function, (*inputs, make_state(2 if packed else 1)))


@given(cuts=st.lists(st.integers(0, 40), max_size=5), masks=st.integers(0, 2**40 - 1), masked=st.booleans())
@settings(max_examples=30, deadline=None)
def test_cut_equals_whole(cuts, masks, masked):
    x, weight, bias = inputs = make_inputs(40, batch=1)
    mask = torch.tensor([[bool(masks >> t & 1) for t in range(40)]]) if masked else None
    whole = short_conv(*inputs, mask=mask)
    bounds = [0, *sorted(cuts), 40]
    state, outputs = None, []
    for start, end in pairwise(bounds):
        part = None if mask is None else mask[:, start:end]
        y, state = short_conv(x[:, start:end], weight, bias, mask=part, state=state)
        outputs.append(y)
    joined = torch.cat(outputs, dim=1), state
    assert_close(joined, tuple(whole))
    assert_close(gradients(joined, inputs), gradients(whole, inputs))


@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=5), masked=st.booleans(), continued=st.booleans())
@settings(max_examples=30, deadline=None)
def test_packed_equals_apart(lengths, masked, continued):
    total = sum(lengths)
    x, weight, bias = make_inputs(total, batch=1)
    mask = make_mask(total, batch=1) if masked else None
    state = make_state(len(lengths)) if continued else None
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    packed = short_conv(x, weight, bias, mask=mask, state=state, cu_seqlens=cu_seqlens)
    for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        alone = short_conv(
            x[:, start:end],
            weight,
            bias,
            mask=None if mask is None else mask[:, start:end],
            state=None if state is None else state[n : n + 1],
        )
        assert_close(packed.y[:, start:end], alone.y)
        assert_close(packed.state[n : n + 1], alone.state)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_empty_batch(backend):
    y, state = short_conv(*make_inputs(5, batch=0), backend=backend)
    assert y.shape == (0, 5, W)
    assert state.shape == (0, K - 1, W)


@pytest.mark.usefixtures("segment")
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("contents", [torch.nan, torch.inf, 1e4])
def test_masked_contents_do_not_matter(backend, contents):
    mask = make_mask(65)
    clean, dirty = make_inputs(65), make_inputs(65)
    with torch.no_grad():
        dirty[0][~mask] = contents
    expected, actual = (short_conv(*inputs, mask=mask, backend=backend) for inputs in (clean, dirty))
    assert_close(tuple(actual), tuple(expected), rtol=0, atol=0)
    grads = gradients(actual, dirty)
    assert_close(grads, gradients(expected, clean), rtol=0, atol=0)
    assert (grads[0][~mask] == 0).all()
    assert (actual.y[~mask] == 0).all()


@pytest.mark.usefixtures("segment")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    inputs = make_inputs(131, dtype=dtype)
    exact = [z.detach().double().requires_grad_() for z in inputs]
    actual, expected = short_conv(*inputs), short_conv(*exact, backend="reference")
    assert actual.y.dtype == actual.state.dtype == dtype
    grads = gradients(actual, inputs)
    assert [grad.dtype for grad in grads] == [dtype] * 3
    eps = torch.finfo(dtype).eps
    for got, right in zip([*actual, *grads], [*expected, *gradients(expected, exact)], strict=True):
        assert (got.double() - right).abs().max() <= 10 * eps * right.abs().max()


def test_mixed_dtypes_and_strides():
    x, weight, bias = make_inputs(65, dtype=torch.float32)
    x = x.detach().bfloat16().transpose(0, 1).contiguous().transpose(0, 1)
    actual = short_conv(x, weight, bias, state=make_state(dtype=torch.float32))
    expected = short_conv(x, weight, bias, state=make_state(dtype=torch.float32), backend="reference")
    assert actual.y.dtype == actual.state.dtype == torch.bfloat16
    assert_close(tuple(actual), tuple(expected))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_float16_saturates(backend):
    x = torch.full((1, 5, 1), 6e4, dtype=torch.float16)
    y, _ = short_conv(x, torch.ones(1, K), backend=backend)
    assert y[0, :, 0].tolist() == [6e4] + [torch.finfo(torch.float16).max] * 4


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_float16_takes_a_state_beyond_its_range(backend):
    weight = torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.float16)
    y, state = short_conv(torch.ones(1, 1, 1).half(), weight, state=torch.full((1, 2, 1), 1e5), backend=backend)
    assert (y.item(), state.flatten().tolist()) == (0.0, [65504.0, 1.0])


def test_checkpoint_and_autocast():
    inputs = make_inputs(65, dtype=torch.float32)
    expected = short_conv(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = checkpoint(short_conv, *inputs, use_reentrant=False)
    assert actual.y.dtype == torch.float32
    assert_close(tuple(actual), tuple(expected), rtol=0, atol=0)
    assert_close(gradients(actual, inputs), gradients(expected, inputs), rtol=0, atol=0)


def test_compiles_whole_with_any_length():
    torch._dynamo.reset()

    def function(x, weight, bias, mask, state, cu_seqlens):
        y, state = short_conv(2 * x, weight, bias, mask=mask, state=state, cu_seqlens=cu_seqlens)
        return y + 1, state

    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=count)
    for length, packed, expected_graphs in [(5, False, 1), (9, False, 1), (1, False, 2), (12, True, 3)]:
        batch = 1 if packed else B
        inputs = make_inputs(length, batch=batch)
        cu_seqlens = torch.tensor([0, 4, 12]) if packed else None
        arguments = (*inputs, make_mask(length, batch=batch), make_state(), cu_seqlens)
        expected, actual = function(*arguments), compiled(*arguments)
        assert len(graphs) == expected_graphs
        assert_close(actual, expected)
        leaves = [*inputs, arguments[4]]
        assert_close(gradients(actual, leaves), gradients(expected, leaves))


@pytest.mark.usefixtures("segment")
@pytest.mark.parametrize("packed", [False, True])
def test_operators_are_well_formed(packed):
    from latte.ops.torch.convolution import short_conv_forward

    cu_seqlens = torch.tensor([0, 5, 12]) if packed else None
    arguments = (*make_inputs(12, batch=1), make_mask(12, batch=1), make_state(2 if packed else 1), cu_seqlens)
    torch.library.opcheck(short_conv_forward, arguments)


GOOD = {"x": torch.zeros(B, 5, W), "weight": torch.zeros(W, K)}
ONE_ROW = GOOD | {"x": torch.zeros(1, 5, W)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (GOOD | {"x": torch.zeros(B, 5)}, r"x has shape \[2, 5\]"),
        (GOOD | {"x": torch.zeros(B, 5, W, dtype=torch.int64)}, r"x has dtype torch.int64"),
        (GOOD | {"weight": torch.zeros(K, W)}, r"weight has shape \[3, 7\]; it must be \[W=7, K\]"),
        (GOOD | {"weight": torch.zeros(W, 0)}, r"weight has K = 0; it must be at least 1"),
        (GOOD | {"bias": torch.zeros(W + 1)}, r"bias has shape \[8\]; it must be \[W=7\]"),
        (GOOD | {"mask": torch.ones(B, 5)}, r"mask has dtype torch.float32"),
        (GOOD | {"mask": torch.ones(B, 4, dtype=torch.bool)}, r"mask has shape \[2, 4\]"),
        (GOOD | {"state": torch.zeros(B, K, W)}, r"state has shape \[2, 3, 7\]; it must be \[B=2, K-1=2, W=7\]"),
        (GOOD | {"state": torch.zeros(B + 1, K - 1, W)}, r"state has shape \[3, 2, 7\]; it must be \[B=2"),
        (GOOD | {"weight": torch.zeros(W, K, device="meta")}, r"weight is on meta; it must be on cpu"),
        (GOOD | {"backend": "cuda"}, r"backend is 'cuda'; it must be one of"),
        (GOOD | {"cu_seqlens": torch.tensor([0, 5])}, r"cu_seqlens is given with batch size 2"),
        (ONE_ROW | {"cu_seqlens": torch.tensor([1, 5])}, r"cu_seqlens starts at 1"),
        (ONE_ROW | {"cu_seqlens": torch.tensor([0, 3, 2, 5])}, r"cu_seqlens decreases from 3 to 2"),
        (ONE_ROW | {"cu_seqlens": torch.tensor([0, 4])}, r"cu_seqlens ends at 4; .* 5"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        short_conv(**arguments)
