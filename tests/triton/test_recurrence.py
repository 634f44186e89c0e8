import os
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from latte.ops.recurrence import rglru
from latte.ops.states import RGLRUOutput

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter: 1 / 0, overflow

B, W, N = 2, 7, 3  # distinct primes: a swapped axis cannot pass
LENGTHS = [0, 1, 7, 8, 9, 16, 41]  # around the 8 rows of a load and pieces of 16


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch, device):
    from latte.ops.triton import recurrence

    monkeypatch.setattr(recurrence, "MIN_PIECE", 16)
    monkeypatch.setattr(recurrence, "SCAN_ROWS", 2)


def make_inputs(length, batch=B, dtype=torch.float32, scale=2.0, width=W):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, length, width)] * 3 + [(width,)]
    inputs = [torch.randn(shape, generator=generator).mul(scale) for shape in shapes]
    inputs[3][::2] -= 6.0  # half of the channels remember over many pieces
    return [z.to(dtype) for z in inputs]


def make_mask(length, batch=B):
    mask = torch.rand((batch, length), generator=torch.Generator().manual_seed(1)) > 0.4
    mask[0, : length // 2] = False  # left padding in one row, holes in all
    return mask


def make_state(sequences=B):
    state = torch.randn((sequences, W), generator=torch.Generator().manual_seed(2))
    state[0, 3] = -torch.inf  # nothing seen there
    return state


def run(inputs, backend, device, dtype=None, **options):
    """Output, state and all gradients on the CPU."""
    place = {"device": device} if dtype is None else {"device": device, "dtype": dtype}
    leaves = [z.detach().to(**place).requires_grad_() for z in inputs]
    options = {name: z.to(device) for name, z in options.items() if z is not None}
    if "state" in options:
        options["state"] = options["state"].to(**place).requires_grad_()
    output = rglru(*leaves, **options, backend=backend)
    generator = torch.Generator().manual_seed(3)
    total = sum(
        torch.where(part.isfinite(), part.double(), 0.0).cpu().mul(torch.randn(part.shape, generator=generator)).sum()
        for part in output
    )
    leaves += [options["state"]] if "state" in options else []
    if total.requires_grad:
        grads = torch.autograd.grad(total, leaves, materialize_grads=True)
    else:  # nothing was computed
        grads = [torch.zeros_like(leaf) for leaf in leaves]
    return [part.detach().cpu() for part in (*output, *grads)]


def assert_matches(inputs, device, tolerance=2e-5, **options):
    """Against the reference in float64, relative to the largest value."""
    actual = run(inputs, "triton", device, **options)
    expected = run(inputs, "reference", "cpu", torch.float64, **options)
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
    assert_matches(make_inputs(41), device, mask=make_mask(41) if masked else None, state=make_state())
    assert_matches(make_inputs(1), device, mask=make_mask(1) if masked else None, state=make_state())


@pytest.mark.parametrize("cu_seqlens", [[0, 5, 5, 41], [0, 0, 1, 2], [0, 16, 33, 41]])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("continued", [False, True])
def test_packed(device, cu_seqlens, masked, continued):
    length = cu_seqlens[-1]
    assert_matches(
        make_inputs(length, batch=1),
        device,
        mask=make_mask(length, batch=1) if masked else None,
        state=make_state(N) if continued else None,
        cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32),
    )


@pytest.mark.parametrize("length", [24, 40])
def test_whole_tiles(device, length):
    """The form of the kernels that checks no bounds."""
    assert_matches(make_inputs(length, width=8), device)


def test_wider_than_a_block(device, monkeypatch):
    from latte.ops.triton import recurrence

    monkeypatch.setattr(recurrence, "BLOCK", 4)
    monkeypatch.setattr(recurrence, "SCAN_BLOCK", 2)
    assert_matches(make_inputs(41), device, state=make_state())
    assert_matches(make_inputs(40, width=8), device)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_narrow_dtypes(device, dtype, tolerance):
    inputs = make_inputs(17, dtype=dtype)
    assert_matches(inputs, device, tolerance=tolerance)
    output = run(inputs, "triton", device)
    assert [part.dtype for part in output] == [dtype, torch.float32, dtype, dtype, dtype, dtype]


def test_cut_equals_whole(device):
    inputs, mask = [z.to(device) for z in make_inputs(41)], make_mask(41).to(device)
    whole = rglru(*inputs, mask=mask, backend="triton")
    state, outputs = None, []
    for start, end in [(0, 0), (0, 3), (3, 20), (20, 41)]:
        part = [z[:, start:end] for z in inputs[:3]]
        y, state = rglru(*part, inputs[3], mask=mask[:, start:end], state=state, backend="triton")
        outputs.append(y)
    assert_close((torch.cat(outputs, dim=1), state), tuple(whole))


def test_masked_contents_do_not_matter(device):
    mask, clean, dirty = make_mask(33), make_inputs(33), make_inputs(33)
    for z in dirty[:3]:
        z[~mask] = torch.nan
    assert_close(run(dirty, "triton", device, mask=mask), run(clean, "triton", device, mask=mask), rtol=0, atol=0)


@pytest.mark.parametrize("a_gate", [-1e4, -44.0, -30.0, 1e4])
@pytest.mark.parametrize("a_param", [-1e4, -20.0, 1e4, 3e38])
def test_hostile_inputs(device, a_gate, a_param):
    inputs = make_inputs(17)
    inputs[0][:] = 1e4
    inputs[1][:, ::3] = a_gate
    inputs[2][:, ::5] = -1e4
    inputs[2][:, 1::5] = 1e4
    inputs[3][::2] = a_param
    assert_matches(inputs, device)


def test_float16_saturates(device):
    x = torch.full((1, 64, 1), 6e4, dtype=torch.float16, device=device)
    gates = torch.full_like(x, -3.0), torch.full_like(x, 20.0)
    y, state = rglru(x, *gates, torch.zeros(1, device=device), backend="triton")
    assert (y[0, 32:] == torch.finfo(torch.float16).max).all()
    assert state.item() > 1e5


def test_strides(device):
    x, a_gate, x_gate, a_param = (z.to(device) for z in make_inputs(17))
    gates = torch.cat([a_gate, x_gate], dim=2).chunk(2, dim=2)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    apart = torch.stack([x, x], dim=3)[..., 0]
    expected = rglru(x, a_gate, x_gate, a_param, backend="triton")
    for z in (turned, apart):
        assert_close(tuple(rglru(z, *gates, a_param, backend="triton")), tuple(expected), rtol=0, atol=0)


def test_same_bits_every_time(device):
    first, second = (run(make_inputs(33), "triton", device, mask=make_mask(33)) for _ in range(2))
    assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_whole(device, packed):
    torch._dynamo.reset()
    inputs = [z.to(device).requires_grad_() for z in make_inputs(12, batch=1)]
    cu_seqlens = torch.tensor([0, 5, 12], device=device) if packed else None
    mask = make_mask(12, batch=1).to(device)

    def function(*inputs):
        y, state = rglru(*inputs, mask=mask, cu_seqlens=cu_seqlens, backend="triton")
        return RGLRUOutput(y + 1, state)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    actual, expected = compiled(*inputs), function(*inputs)
    assert_close(tuple(actual), tuple(expected))
    assert_close(*(torch.autograd.grad(output.y.sum() + output.state.sum(), inputs) for output in (actual, expected)))


def test_operators_are_well_formed(device):
    from latte.ops.triton.recurrence import rglru_triton_forward

    inputs = [z.to(device).requires_grad_() for z in make_inputs(12, batch=1)]
    state = torch.zeros(1, W, device=device, requires_grad=True)
    torch.library.opcheck(rglru_triton_forward, (*inputs, make_mask(12, batch=1).to(device), state, None, True))


def test_what_the_kernels_do_not_take(device):
    x = torch.zeros(1, 5, W, device=device)
    with pytest.raises(ValueError, match=r'x has dtype torch.float64; .* use backend="torch"'):
        rglru(x.double(), x, x, x[0, 0], backend="triton")
    with pytest.raises(ValueError, match="cu_seqlens ends at 4"):
        rglru(x, x, x, x[0, 0], cu_seqlens=torch.tensor([0, 4], device=device), backend="triton")


def test_needs_a_gpu_or_the_interpreter():
    code = (
        "import torch; from latte.ops.recurrence import rglru; x = torch.zeros(1, 2, 3)\n"
        "try: rglru(x, x, x, x[0, 0], backend='triton')\n"
        "except ValueError as error: print(error)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "needs a CUDA device" in done.stdout
    assert "TRITON_INTERPRET=1" in done.stdout
