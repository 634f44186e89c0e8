import pytest
import torch

from latte.ops import linear_cross_entropy, logit_chunks

pytestmark = pytest.mark.usefixtures("device")

N, C, V = 17, 7, 149  # distinct primes; a row is three blocks of 64, the last one padded


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Chunks of five tokens, and blocks of 64 logits."""
    for bound in ("ON_CPU", "LEAST", "MOST"):
        monkeypatch.setattr(logit_chunks, bound, 5 * 4 * V)
    monkeypatch.setattr("latte.ops.triton.cross_entropy.BLOCK", 64)


def run(backend, device, dtype, reduction="mean", targets=None, **options):
    """Loss and gradients on the CPU in float64."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((N, C), (V, C)))
    if targets is None:
        targets = torch.randint(V, (N,), generator=generator)
        targets[::5] = -100
    if backend == "reference":
        hidden, weight = hidden.double(), weight.double()
    leaves = [x.to(device).requires_grad_() for x in (hidden, weight)]
    loss = linear_cross_entropy(*leaves, targets.to(device), reduction=reduction, backend=backend, **options)
    factor = torch.linspace(0.5, 2.0, loss.numel(), device=device).view_as(loss).to(loss.dtype)
    grads = torch.autograd.grad(loss, leaves, factor)
    return [x.detach().cpu().double() for x in (loss, *grads)]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0}, {"label_smoothing": 0.1}, {"softcap": 3.0, "label_smoothing": 0.2}], ids=str
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_matches_reference(device, dtype, tolerance, reduction, options):
    actual = run("triton", device, dtype, reduction, **options)
    expected = run("reference", "cpu", dtype, reduction, **options)
    for got, right in zip(actual, expected, strict=True):
        assert got.shape == right.shape
        assert (got - right).norm() <= tolerance * right.norm()


@pytest.mark.parametrize("target", [V, V + 63, -1])
def test_targets_beyond_the_vocabulary_give_nan(device, target):
    targets = torch.full((N,), 3)
    targets[6] = target
    loss, *_ = run("triton", device, torch.float32, "none", targets)
    assert loss.isnan().tolist() == [row == 6 for row in range(N)]


def test_forward_alone(device):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator).to(device) for shape in ((N, C), (V, C)))
    targets = torch.arange(N, device=device)
    losses = [linear_cross_entropy(hidden, weight, targets, backend=name).cpu() for name in ("triton", "torch")]
    torch.testing.assert_close(*losses)


def test_too_large_a_softcap_is_refused():
    with pytest.raises(ValueError, match=r"softcap is 1001\.0; the Triton kernels take up to 1000"):
        run("triton", "cpu" if not torch.cuda.is_available() else "cuda", torch.float32, softcap=1001.0)


def test_float64_is_refused():
    with pytest.raises(ValueError, match='backend="torch" for float64'):
        run("triton", "cpu" if not torch.cuda.is_available() else "cuda", torch.float64)
