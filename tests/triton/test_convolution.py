import pytest
import torch
from torch.testing import assert_close

from latte.ops.convolution import short_conv

pytestmark = pytest.mark.usefixtures("device")

B, W, K, N = 2, 7, 3, 5  # distinct primes: a swapped axis cannot pass


def make_inputs(length, batch=B, taps=K, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in [(batch, length, W), (W, taps), (W,)]]


def make_mask(length, batch=B):
    mask = torch.rand((batch, length), generator=torch.Generator().manual_seed(1)) > 0.4
    mask[0, : length // 2] = False  # left padding in one row, holes in all
    return mask


def make_state(sequences=B, taps=K):
    return torch.randn((sequences, taps - 1, W), generator=torch.Generator().manual_seed(2))


def run(inputs, backend, device, dtype=None, **options):
    """Output, state and all gradients on the CPU."""
    place = {"device": device} if dtype is None else {"device": device, "dtype": dtype}
    leaves = [z.detach().to(**place).requires_grad_() for z in inputs]
    options = {name: z.to(device) for name, z in options.items() if z is not None}
    if "state" in options:
        options["state"] = options["state"].to(**place).requires_grad_()
    output = short_conv(*leaves, **options, backend=backend)
    generator = torch.Generator().manual_seed(3)
    total = sum((part.double().cpu() * torch.randn(part.shape, generator=generator)).sum() for part in output)
    leaves += [options["state"]] if "state" in options else []
    grads = torch.autograd.grad(total, leaves, materialize_grads=True)
    return [part.detach().cpu() for part in (*output, *grads)]


def assert_matches(inputs, device, tolerance=1e-5, **options):
    """Against the reference in float64, relative to the largest value."""
    actual = run(inputs, "triton", device, **options)
    expected = run(inputs, "reference", "cpu", torch.float64, **options)
    for got, right in zip(actual, expected, strict=True):
        assert got.shape == right.shape
        assert right.numel() == 0 or (got.double() - right).abs().max() <= tolerance * right.abs().max() + 1e-6


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 41])  # around the taps and tiles of 16
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("continued", [False, True])
def test_matches_reference(device, length, masked, continued):
    assert_matches(
        make_inputs(length),
        device,
        mask=make_mask(length) if masked else None,
        state=make_state() if continued else None,
    )


@pytest.mark.parametrize("taps", [1, 2, 6, 7, 16])
def test_numbers_of_taps(device, taps):
    x, weight, _ = make_inputs(19, taps=taps)
    assert_matches((x, weight), device, mask=make_mask(19), state=make_state(taps=taps))


@pytest.mark.parametrize("cu_seqlens", [[0, 5, 5, 41], [0, 0, 1, 2], [0, 16, 33, 41]])
@pytest.mark.parametrize("masked", [False, True])
def test_packed(device, cu_seqlens, masked):
    length = cu_seqlens[-1]
    assert_matches(
        make_inputs(length, batch=1),
        device,
        mask=make_mask(length, batch=1) if masked else None,
        state=make_state(3),
        cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32),
    )


def test_several_tiles_and_blocks_a_program(device, monkeypatch):
    from latte.ops.triton import convolution

    for name, number in {"PARTS": 2, "FORWARD_TILE": 8, "BACKWARD_TILE": 8, "BLOCK": 4, "FILLING": 6}.items():
        monkeypatch.setattr(convolution, name, number)
    assert_matches(make_inputs(41), device, mask=make_mask(41), state=make_state())
    bounds = torch.tensor([0, 1, 20, 20, 41], dtype=torch.int32)
    assert_matches(make_inputs(41, batch=1), device, state=make_state(4), cu_seqlens=bounds)


def test_empty(device):
    x, weight, bias = (z.to(device) for z in make_inputs(0))
    state = make_state().to(device)
    y, after = short_conv(x, weight, bias, state=state, backend="triton")
    assert y.shape == (B, 0, W)
    assert_close(after, state)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_narrow_dtypes(device, dtype, tolerance):
    inputs = make_inputs(19, dtype=dtype)
    assert_matches(inputs, device, tolerance=tolerance)
    assert [part.dtype for part in run(inputs, "triton", device)] == [dtype] * 5


def test_masked_contents_do_not_matter(device):
    mask, clean, dirty = make_mask(33), make_inputs(33), make_inputs(33)
    dirty[0][~mask] = torch.nan
    assert_close(run(dirty, "triton", device, mask=mask), run(clean, "triton", device, mask=mask), rtol=0, atol=0)


def test_strides(device):
    x, weight, bias = (z.to(device) for z in make_inputs(17))
    expected = short_conv(x, weight, bias, backend="triton")
    for z in (x.transpose(0, 1).contiguous().transpose(0, 1), torch.stack([x, x], dim=3)[..., 0]):
        assert_close(tuple(short_conv(z, weight, bias, backend="triton")), tuple(expected), rtol=0, atol=0)


def test_compiles_whole(device):
    torch._dynamo.reset()
    inputs = [z.to(device).requires_grad_() for z in make_inputs(12)]

    def function(x, weight, bias):
        return short_conv(x, weight, bias, backend="triton").y + 1

    actual, expected = torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs), function(*inputs)
    assert_close(actual, expected)
    assert_close(*(torch.autograd.grad(y.sin().sum(), inputs) for y in (actual, expected)))


def test_operators_are_well_formed(device):
    from latte.ops.triton.convolution import short_conv_triton_forward

    inputs = [z.to(device).requires_grad_() for z in make_inputs(12, batch=1)]
    state = make_state(1).to(device).requires_grad_()
    torch.library.opcheck(short_conv_triton_forward, (*inputs, make_mask(12, batch=1).to(device), state, None))


def test_what_the_kernels_do_not_take(device):
    x = torch.zeros(1, 5, W, device=device)
    with pytest.raises(ValueError, match=r'x has dtype torch.float64; .* use backend="torch"'):
        short_conv(x.double(), torch.zeros(W, K, device=device), backend="triton")
    with pytest.raises(ValueError, match=r'weight has K = 17; .* at most 16 taps; use backend="torch"'):
        short_conv(x, torch.zeros(W, 17, device=device), backend="triton")
    with pytest.raises(ValueError, match="cu_seqlens starts at 1"):
        short_conv(
            x, torch.zeros(W, K, device=device), cu_seqlens=torch.tensor([1, 5], device=device), backend="triton"
        )
