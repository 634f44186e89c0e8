"""The RG-LRU with its gates in one kernel, against the reference in float64, gradients included."""

import pytest
import torch
from torch.testing import assert_close

from latte.ops.block_linear import block_linear
from latte.ops.gated_recurrence import gated_rglru
from latte.ops.recurrence import rglru
from latte.ops.states import RGLRUOutput

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter: 1 / 0, overflow

B, BLOCKS, SIZE, N = 2, 2, 3, 3
LENGTHS = [0, 1, 8, 13]  # tiles and pieces of 8


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, device):
    """The interpreter takes a scan element by element: tiles of two segments of 4 tokens, chunks of 4 channels."""
    from latte.ops.triton import gated_recurrence, recurrence

    monkeypatch.setattr(recurrence, "SCAN_ROWS", 2)
    monkeypatch.setattr(gated_recurrence, "MIN_PIECE", 8)
    if device == "cpu":
        monkeypatch.setattr(gated_recurrence, "chunk_size", lambda size: 4)
        shape = gated_recurrence.Shape(span=4, segments=2, fill=4, registers=128)
        monkeypatch.setattr(gated_recurrence, "FORWARD_SHAPES", gated_recurrence.Shapes(shape, shape))
        monkeypatch.setattr(gated_recurrence, "BACKWARD_SHAPES", gated_recurrence.Shapes(shape, shape))
        monkeypatch.setattr(gated_recurrence, "CHECKPOINT", 4)  # a part of a tile, as it may be
        monkeypatch.setattr(gated_recurrence, "UNIT", 8)


def draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_inputs(length, batch=B, blocks=BLOCKS, size=SIZE, dtype=torch.float32):
    width = blocks * size
    shapes = [(batch, length, width), (blocks, size, size), (width,), (blocks, size, size), (width,), (width,)]
    inputs = [draw(seed, *shape).mul(1.5) for seed, shape in enumerate(shapes)]
    inputs[5][::2] -= 5.0  # half of the channels remember over many pieces
    return [z.to(dtype) for z in inputs]


def make_mask(length, batch=B):
    mask = torch.rand((batch, length), generator=torch.Generator().manual_seed(1)) > 0.4
    mask[0, : length // 2] = False  # left padding in one row, holes in all
    return mask


def make_state(sequences=B, width=BLOCKS * SIZE):
    state = draw(2, sequences, width)
    state[0, 2] = -torch.inf  # nothing seen there
    return state


def run(inputs, backend, device, dtype=None, **options):
    """Output, state and all gradients on the CPU."""
    place = {"device": device} if dtype is None else {"device": device, "dtype": dtype}
    leaves = [z.detach().to(**place).requires_grad_() for z in inputs]
    options = {name: z.to(device) for name, z in options.items() if z is not None}
    if "state" in options:
        options["state"] = options["state"].to(**place).requires_grad_()
    output = gated_rglru(*leaves, **options, backend=backend)
    # what is pulled at is the same number for all: a gradient of a narrow output is rounded to its dtype
    pulls = [draw(7, *part.shape).to(inputs[0].dtype).double() for part in output]
    total = sum(
        torch.where(part.isfinite(), part.double(), 0.0).cpu().mul(pull).sum()
        for part, pull in zip(output, pulls, strict=True)
    )
    leaves += [options["state"]] if "state" in options else []
    if total.requires_grad:
        grads = torch.autograd.grad(total, leaves, materialize_grads=True)
    else:  # nothing was computed
        grads = [torch.zeros_like(leaf) for leaf in leaves]
    return [part.detach().cpu() for part in (*output, *grads)]


def assert_matches(inputs, device, tolerance=2e-5, **options):
    """Against the reference in float64, relative to the largest value."""
    if tolerance > 1e-4:
        tolerance *= narrow_factor(device)
    actual = run(inputs, "triton", device, **options)
    assert_near(actual, run(inputs, "reference", "cpu", torch.float64, **options), tolerance)


def narrow_factor(device):
    return 2.5 if device == "cpu" else 1.0  # the interpreter cuts bits off where a GPU rounds


def assert_near(actual, expected, tolerance):
    for got, right in zip(actual, expected, strict=True):
        assert got.shape == right.shape
        seen = right.isfinite()
        assert (got.isfinite() == seen).all()
        got, right = got.double()[seen], right[seen]
        assert right.numel() == 0 or (got - right).abs().max() <= tolerance * right.abs().max() + 1e-6


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("masked", [False, True])
def test_matches_reference(device, length, masked):
    assert_matches(make_inputs(length), device, mask=make_mask(length) if masked else None)


@pytest.mark.parametrize("masked", [False, True])
def test_from_a_state(device, masked):
    assert_matches(make_inputs(13), device, mask=make_mask(13) if masked else None, state=make_state())


@pytest.mark.parametrize(
    ("cu_seqlens", "masked", "continued"),
    [([0, 3, 3, 13], True, True), ([0, 0, 1, 2], False, True), ([0, 8, 11, 13], False, False)],
)
def test_packed(device, cu_seqlens, masked, continued):
    length = cu_seqlens[-1]
    assert_matches(
        make_inputs(length, batch=1),
        device,
        mask=make_mask(length, batch=1) if masked else None,
        state=make_state(N) if continued else None,
        cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32),
    )


def test_one_piece(device, monkeypatch):
    """As for many rows."""
    from latte.ops.triton import gated_recurrence

    def plan(x, blocks, shapes):
        return gated_recurrence.Plan(shapes.few, 128, 1, 1)

    monkeypatch.setattr(gated_recurrence.Plan, "make", plan)
    assert_matches(make_inputs(13, batch=3, blocks=1), device, state=make_state(3, SIZE)[:, :SIZE])


@pytest.mark.parametrize(
    ("batch", "tokens", "many", "cut"), [(32, 1024, True, False), (5, 4096, False, False), (1, 4096, True, True)]
)
def test_threads_share_channels_where_rows_do_not_quite_fill_the_device(batch, tokens, many, cut, monkeypatch):
    """The plan for 16 blocks of 48 channels: 48 programs a row, on a device of 64 processors."""
    from latte.ops.triton import gated_recurrence

    monkeypatch.undo()
    x = torch.empty((batch, tokens, 768), device="meta")
    for shapes in (gated_recurrence.FORWARD_SHAPES, gated_recurrence.BACKWARD_SHAPES):
        plan = gated_recurrence.Plan.make(x, 16, shapes)
        assert (plan.shape is shapes.many) == many
        assert plan.chunks == 48
        assert (plan.pieces > 1) == cut
        assert plan.length % plan.shape.tile == plan.shape.tile % gated_recurrence.CHECKPOINT == 0


@pytest.mark.parametrize(("blocks", "size", "length"), [(1, 4, 16), (1, 7, 11)])
def test_whole_tiles_and_other_sizes(device, blocks, size, length):
    """Chunks that fill a block or not, and the form of the kernels that checks no bounds."""
    assert_matches(make_inputs(length, blocks=blocks, size=size), device)


@pytest.mark.parametrize(("size", "dtype"), [(16, torch.float32), (32, torch.float32), (24, torch.bfloat16),
                                             (48, torch.bfloat16), (64, torch.float16)])  # fmt: skip
@pytest.mark.parametrize("length", [256, 333])
def test_real_sizes(device, size, dtype, length):
    if device == "cpu":
        pytest.skip("minutes in the interpreter")
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    assert_matches(make_inputs(length, blocks=2, size=size, dtype=dtype), device, tolerance=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_narrow_dtypes(device, dtype, tolerance):
    """The weights' gradients are sums of narrow numbers, which may cancel: compared with the same sums in float64."""
    inputs = make_inputs(5, blocks=1, dtype=dtype)
    output = run(inputs, "triton", device)
    assert [part.dtype for part in output] == [dtype, torch.float32, *[dtype] * 6]
    expected = run(inputs, "reference", "cpu", torch.float64)
    expected[3], expected[5] = rounded_weight_grads(inputs)
    assert_near(output, expected, tolerance * narrow_factor(device))


def rounded_weight_grads(inputs):
    """Gradients of both weights (of one block), where those of the gates are rounded to the inputs' dtype."""
    x, a_weight, a_bias, x_weight, x_bias, a_param = (z.double() for z in inputs)
    gates = [(x @ w[0] + b).requires_grad_() for w, b in ((a_weight, a_bias), (x_weight, x_bias))]
    output = rglru(x, *gates, a_param, backend="reference")
    pulls = [draw(7, *part.shape).to(inputs[0].dtype).double() for part in output]
    grads = torch.autograd.grad(tuple(output), gates, pulls)
    return [(x.flatten(0, 1).T @ grad.to(inputs[0].dtype).double().flatten(0, 1))[None] for grad in grads]


def test_wide_weights_of_a_narrow_input(device):
    """As parameters are in float32 under autocast: gradients come in each one's dtype."""
    x, *weights = make_inputs(5, blocks=1)
    inputs = [x.bfloat16(), *weights[:2], weights[2].bfloat16(), *weights[3:]]
    assert [part.dtype for part in run(inputs, "triton", device)[2:]] == [z.dtype for z in inputs]
    assert_matches(inputs, device, tolerance=2e-2)


def test_gates_under_autocast(device):
    inputs = [z.to(device) for z in make_inputs(9)]
    with torch.autocast(device, torch.bfloat16):
        y = gated_rglru(*inputs, backend="triton").y
    assert y.dtype == torch.float32
    exact = gated_rglru(*inputs, backend="triton").y
    assert 1e-5 < (y - exact).abs().max() < 5e-2


def test_cut_equals_whole(device):
    (x, *weights), mask = [z.to(device) for z in make_inputs(13)], make_mask(13).to(device)
    whole = gated_rglru(x, *weights, mask=mask, backend="triton")
    state, outputs = None, []
    for start, end in [(0, 0), (0, 3), (3, 13)]:
        y, state = gated_rglru(x[:, start:end], *weights, mask=mask[:, start:end], state=state, backend="triton")
        outputs.append(y)
    assert_close((torch.cat(outputs, dim=1), state), tuple(whole), rtol=1e-5, atol=1e-5)


def test_masked_contents_do_not_matter(device):
    mask, clean, dirty = make_mask(9), make_inputs(9), make_inputs(9)
    dirty[0][~mask] = torch.nan
    assert_close(run(dirty, "triton", device, mask=mask), run(clean, "triton", device, mask=mask), rtol=0, atol=0)


@pytest.mark.parametrize(("a_bias", "a_param"), [(-1e4, 3e38), (-44.0, -20.0), (1e4, -1e4), (1e4, 3e38)])
def test_hostile_inputs(device, a_bias, a_param):
    inputs = make_inputs(3, blocks=1)
    inputs[0][:] = 1e4
    inputs[1][:] = inputs[3][:] = 0.0
    inputs[2][:] = a_bias
    inputs[4][0], inputs[4][1] = -1e4, 1e4
    inputs[5][::2] = a_param
    assert_matches(inputs, device)


def test_float16_saturates(device):
    x = torch.full((1, 24, 1), 6e4, dtype=torch.float16, device=device)
    zero, a_bias, x_bias = torch.zeros(1, 1, 1), torch.full((1,), -3.0), torch.full((1,), 20.0)
    weights = [z.to(device) for z in (zero, a_bias, zero, x_bias, torch.zeros(1))]
    y, state = gated_rglru(x, *weights, backend="triton")
    assert (y[0, 16:] == torch.finfo(torch.float16).max).all()
    assert state.item() > 1e5


def test_strides(device):
    x, *weights = (z.to(device) for z in make_inputs(9))
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    apart = torch.stack([x, x], dim=3)[..., 0]
    wide = torch.cat([x, x], dim=2)[..., : x.shape[2]]
    expected = gated_rglru(x, *weights, backend="triton")
    for z in (turned, apart, wide):
        assert_close(tuple(gated_rglru(z, *weights, backend="triton")), tuple(expected), rtol=0, atol=0)


def test_same_bits_every_time(device):
    first, second = (run(make_inputs(9), "triton", device, mask=make_mask(9)) for _ in range(2))
    assert_close(first, second, rtol=0, atol=0)


def test_blocks_too_wide_are_composed(device, monkeypatch):
    from latte.ops.triton import gated_recurrence

    monkeypatch.setitem(gated_recurrence.LARGEST_BLOCK, torch.float32, SIZE - 1)
    x, *weights = (z.to(device) for z in make_inputs(3))
    a_weight, a_bias, x_weight, x_bias, a_param = weights
    gates = block_linear(x, torch.stack([a_weight, x_weight]), torch.stack([a_bias, x_bias]), backend="triton")
    expected = rglru(x, *gates, a_param, backend="triton")
    assert_close(tuple(gated_rglru(x, *weights, backend="triton")), tuple(expected), rtol=0, atol=0)


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_whole(device, packed):
    torch._dynamo.reset()
    inputs = [z.to(device).requires_grad_() for z in make_inputs(7, batch=1)]
    cu_seqlens = torch.tensor([0, 5, 7], device=device) if packed else None

    def function(*inputs):
        y, state = gated_rglru(*inputs, cu_seqlens=cu_seqlens, backend="triton")
        return RGLRUOutput(y + 1, state)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    actual, expected = compiled(*inputs), function(*inputs)
    assert_close(tuple(actual), tuple(expected))
    assert_close(*(torch.autograd.grad(output.y.sum() + output.state.sum(), inputs) for output in (actual, expected)))


def test_operators_are_well_formed(device):
    from latte.ops.triton.gated_recurrence import gated_rglru_forward

    inputs = [z.to(device).requires_grad_() for z in make_inputs(3, batch=1, blocks=1)]
    state = torch.zeros(1, SIZE, device=device, requires_grad=True)
    torch.library.opcheck(gated_rglru_forward, (*inputs, None, state, None, torch.float32, True))


def test_wrong_sizes_are_named(device):
    x, *weights = make_inputs(3)
    with pytest.raises(ValueError, match=r"x has shape \[2, 3, 5\]; it must be \[B, T, N·size=6\]"):
        gated_rglru(x[..., :5], *weights)
    with pytest.raises(ValueError, match=r"x_weight has shape"):
        gated_rglru(x, *weights[:2], weights[2][:1], *weights[3:])
    with pytest.raises(ValueError, match=r'x has dtype torch.float64; .* use backend="torch"'):
        gated_rglru(x.double().to(device), *(z.to(device) for z in weights), backend="triton")
