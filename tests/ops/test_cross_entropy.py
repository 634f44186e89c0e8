"""The linear cross entropy: PyTorch's own in value and gradient, without its logits."""

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from latte.ops import linear_cross_entropy, logit_chunks
from tests.ops.test_memory import measure

N, C, V = 37, 11, 53  # distinct primes: a swapped axis cannot pass
OPTIONS = pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0}, {"label_smoothing": 0.1}, {"softcap": 3.0, "label_smoothing": 0.2}], ids=str
)
REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of five tokens, which do not divide N."""
    monkeypatch.setattr(logit_chunks, "ON_CPU", 5 * 4 * V)


class Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    targets: Tensor


def make_inputs(dtype: torch.dtype = torch.float64, tokens: int = N, scale: float = 1.0) -> Inputs:
    """Every fifth target is ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((tokens, C), generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (scale * torch.randn((V, C), generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    targets = torch.randint(V, (tokens,), generator=generator)
    targets[::5] = -100
    return Inputs(hidden, weight, targets)


def plain(hidden, weight, targets, softcap=None, **options) -> Tensor:
    """What it means, with all logits."""
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, **options)


def gradients(loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """With a gradient of the loss that is not 1, nor the same for all tokens."""
    return torch.autograd.grad(loss, leaves, torch.linspace(0.5, 2.0, loss.numel()).view_as(loss).to(loss.dtype))


@OPTIONS
@REDUCTIONS
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_value_and_gradients_are_pytorchs(backend, reduction, options):
    inputs = make_inputs()
    actual = linear_cross_entropy(*inputs, reduction=reduction, backend=backend, **options)
    expected = plain(*inputs, reduction=reduction, **options)
    assert_close(actual, expected)
    assert_close(gradients(actual, *inputs[:2]), gradients(expected, *inputs[:2]))


@OPTIONS
@REDUCTIONS
def test_gradcheck(reduction, options):
    hidden, weight, targets = make_inputs(tokens=7)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, targets, reduction=reduction, **options), (hidden, weight)
    )


@REDUCTIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes(dtype, reduction):
    """Against float64 with the same numbers; the loss itself is float32."""
    inputs = make_inputs(dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs[:2]]
    actual = linear_cross_entropy(*inputs, reduction=reduction)
    expected = plain(*wide, inputs.targets, reduction=reduction)
    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    assert actual.dtype == torch.float32
    assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    for got, right in zip(gradients(actual, *inputs[:2]), gradients(expected, *wide), strict=True):
        assert got.dtype == dtype
        assert (got.double() - right).norm() < tolerance * right.norm()


def test_sums_beyond_float16_are_scaled_before_they_are_rounded():
    hidden = torch.full((5000, 2), 30.0, dtype=torch.float16)
    weight = torch.zeros((2, 2), dtype=torch.float16, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.zeros(5000, dtype=torch.long))
    (grad,) = torch.autograd.grad(loss, weight)
    assert_close(grad, torch.tensor([[-15.0], [15.0]], dtype=torch.float16).expand(2, 2))


def test_a_chunks_sum_may_be_beyond_float16(monkeypatch):
    monkeypatch.setattr(logit_chunks, "ON_CPU", 2**25)
    test_sums_beyond_float16_are_scaled_before_they_are_rounded()


@REDUCTIONS
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_only_what_needs_gradients_gets_them(wanted, reduction):
    hidden, weight, targets = make_inputs()
    leaves = [x.detach().requires_grad_(needs) for x, needs in zip((hidden, weight), wanted, strict=True)]
    actual = linear_cross_entropy(*leaves, targets, reduction=reduction)
    assert_close(actual.detach(), plain(hidden, weight, targets, reduction=reduction).detach())
    assert actual.requires_grad == any(wanted)
    needing = [x for x in leaves if x.requires_grad]
    if needing:
        assert_close(gradients(actual, *needing), gradients(plain(*leaves, targets, reduction=reduction), *needing))


def test_without_gradients_their_work_is_not_done(monkeypatch):
    monkeypatch.setattr(logit_chunks, "accumulate", lambda *_: pytest.fail("the weight's gradient was computed"))
    hidden, weight, targets = make_inputs()
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, targets)
    linear_cross_entropy(hidden, weight.detach(), targets).backward()


def test_tied_weights():
    hidden, weight, targets = make_inputs()
    tokens = torch.arange(N) % V

    def loss(function):
        return function(F.embedding(tokens, weight) * hidden, weight, targets)

    assert_close(gradients(loss(linear_cross_entropy), weight), gradients(loss(plain), weight))


@pytest.mark.parametrize("num_items", [101, torch.tensor(101)])
def test_num_items_takes_the_place_of_the_count(num_items):
    inputs = make_inputs()
    expected = plain(*inputs, reduction="sum") / 101
    actual = linear_cross_entropy(*inputs, num_items=num_items)
    assert_close(actual, expected)
    assert_close(gradients(actual, *inputs[:2]), gradients(expected, *inputs[:2]))


@pytest.mark.parametrize("tokens", [0, N])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_to_predict_is_as_in_pytorch(tokens, reduction):
    """A mean over nothing is NaN, with gradients of 0."""
    hidden, weight, targets = make_inputs(tokens=tokens)
    targets.fill_(-100)
    actual = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
    expected = plain(hidden, weight, targets, reduction=reduction)
    assert_close(actual, expected, equal_nan=True)
    assert all(grad.eq(0).all() for grad in torch.autograd.grad(actual.sum(), (hidden, weight)))


@REDUCTIONS
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_ignored_rows_do_not_matter(backend, reduction):
    hidden, weight, targets = make_inputs()
    hostile = hidden.detach().masked_fill((targets == -100)[:, None], torch.nan).requires_grad_()
    actual = linear_cross_entropy(hostile, weight, targets, reduction=reduction, backend=backend)
    expected = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
    assert_close(actual, expected)
    assert_close(gradients(actual, hostile, weight), gradients(expected, hidden, weight))


def test_another_ignore_index_and_int32_targets():
    hidden, weight, targets = make_inputs()
    targets = targets.masked_fill(targets == -100, 7).int()
    actual = linear_cross_entropy(hidden, weight, targets, ignore_index=7)
    assert_close(actual, plain(hidden, weight, targets.long(), ignore_index=7))


def test_huge_logits():
    hidden, weight, targets = make_inputs(torch.float32, scale=1e4)
    loss = linear_cross_entropy(hidden, weight, targets)
    assert_close(loss, plain(hidden, weight, targets))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(loss, (hidden, weight)))


def test_autocast():
    """Products in the autocast's dtype, gradients in the inputs' own."""
    hidden, weight, targets = make_inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        actual = linear_cross_entropy(hidden, weight, targets)
        expected = F.cross_entropy(F.linear(hidden, weight).float(), targets)
    assert_close(actual, expected)
    assert not torch.equal(actual, linear_cross_entropy(hidden, weight, targets))
    for got, right in zip(gradients(actual, hidden, weight), gradients(expected, hidden, weight), strict=True):
        assert got.dtype == torch.float32
        assert (got - right).norm() < 1e-2 * right.norm()


def test_every_run_gives_the_same_bits():
    runs = []
    for _ in range(2):
        inputs = make_inputs(torch.bfloat16)
        loss = linear_cross_entropy(*inputs)
        runs.append((loss, *gradients(loss, *inputs[:2])))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_backward_twice():
    inputs = make_inputs()
    loss = linear_cross_entropy(*inputs)
    first = torch.autograd.grad(loss, inputs[:2], retain_graph=True)
    assert_close(torch.autograd.grad(loss, inputs[:2]), first)


@pytest.mark.parametrize("power", [1, 2])
@REDUCTIONS
def test_second_derivatives_are_refused(power, reduction):
    """As products with what comes from above, gradients look as if they could be differentiated."""
    inputs = make_inputs()
    loss = linear_cross_entropy(*inputs, reduction=reduction).pow(power).sum()
    grads = torch.autograd.grad(loss, inputs[:2], create_graph=True)
    assert_close(grads, torch.autograd.grad(plain(*inputs, reduction=reduction).pow(power).sum(), inputs[:2]))
    for grad in grads:
        with pytest.raises(RuntimeError, match="no second derivatives; use backend="):
            torch.autograd.grad(grad.sum(), inputs[:2], retain_graph=True)


@OPTIONS
@REDUCTIONS
def test_one_graph(reduction, options):
    torch._dynamo.reset()
    hidden, weight, targets = make_inputs()

    def loss(h, w):
        return linear_cross_entropy(torch.tanh(h), w, targets, reduction=reduction, **options)

    actual, expected = torch.compile(loss, fullgraph=True, backend="aot_eager")(hidden, weight), loss(hidden, weight)
    assert_close(actual, expected)
    assert_close(gradients(actual, hidden, weight), gradients(expected, hidden, weight))


def test_one_graph_for_every_number_of_tokens():
    torch._dynamo.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(linear_cross_entropy, fullgraph=True, dynamic=True, backend=count)
    for tokens in (N, 131, 20):
        inputs = make_inputs(tokens=tokens)
        assert_close(compiled(*inputs), linear_cross_entropy(*inputs))
    assert len(graphs) == 1


def test_one_graph_under_autocast():
    torch._dynamo.reset()
    inputs = make_inputs(torch.float32)

    def loss(*inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return linear_cross_entropy(*inputs)

    assert_close(torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs), loss(*inputs))


def test_custom_operations_keep_their_promises():
    inputs = make_inputs()
    options = (-100, 2.0, 0.1, torch.float64, "torch")
    torch.library.opcheck(logit_chunks.cross_entropy_losses, (*inputs, *options))
    torch.library.opcheck(logit_chunks.cross_entropy_total, (*inputs, True, True, *options))
    torch.library.opcheck(
        logit_chunks.cross_entropy_gradients,
        (torch.ones(N, dtype=torch.float64), *(x.detach() for x in inputs), True, False, *options),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_far_below_the_logits(dtype, monkeypatch):
    """Three chunks' worth of logits at most, gradients and the weight's sums; a sixth of the logits in float32."""
    tokens, vocabulary, width, chunk = 2048, 8192, 16, 2**21
    monkeypatch.setattr(logit_chunks, "ON_CPU", chunk)
    hidden = torch.randn((tokens, width), dtype=dtype, requires_grad=True)
    weight = torch.randn((vocabulary, width), dtype=dtype, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    used = measure(lambda: linear_cross_entropy(hidden, weight, targets).backward())
    assert used.peak < 3 * chunk + 4 * 4 * (hidden.numel() + weight.numel())
    assert used.peak < 4 * tokens * vocabulary / 6
    assert used.largest <= chunk


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "count"), [(32768, 50304, 16), (1024, 50304, 1), (2**18, 256000, 251), (3, 2**29, 3)]
)
def test_chunks_on_other_devices_are_few_and_bounded(tokens, vocabulary, count):
    hidden = torch.empty((tokens, 1), device="meta")
    chunks = list(logit_chunks.chunks(hidden, vocabulary))
    assert len(chunks) == count
    assert (chunks[0].start, chunks[-1].stop >= tokens) == (0, True)
    assert all(first.stop == second.start for first, second in pairwise(chunks))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": torch.zeros(N, C, 1)}, ["hidden has shape [37, 11, 1]", "[N, C]"]),
        ({"hidden": torch.zeros(N, C, dtype=torch.long)}, ["hidden has dtype torch.int64", "floating"]),
        ({"weight": torch.zeros(C, V)}, ["weight has shape [11, 53]", "C=11"]),
        ({"weight": torch.zeros(0, C)}, ["weight has V = 0", "at least 1"]),
        ({"targets": torch.zeros(N)}, ["targets has dtype torch.float32", "int64"]),
        ({"targets": [0] * N}, ["targets has type list", "int64"]),
        ({"targets": torch.zeros(N - 1, dtype=torch.long)}, ["targets has shape [36]", "N=37"]),
        ({"targets": torch.full((N,), V)}, ["targets holds 53", "0 to 52", "ignore_index = -100"]),
        ({"targets": torch.full((N,), -1)}, ["targets holds -1", "0 to 52"]),
        ({"targets": torch.zeros(N, dtype=torch.long, device="meta")}, ["targets is on meta", "cpu"]),
        ({"reduction": "average"}, ["reduction is 'average'", "'mean'"]),
        ({"num_items": 0}, ["num_items is 0", "at least 1"]),
        ({"num_items": -2.5}, ["num_items is -2.5", "at least 1"]),
        ({"num_items": float("nan")}, ["num_items is nan", "at least 1"]),
        ({"num_items": "5"}, ["num_items is '5'", "a number"]),
        ({"num_items": torch.tensor([1, 2])}, ["num_items has shape [2]", "one number"]),
        ({"ignore_index": None}, ["ignore_index is None", "an integer"]),
        ({"softcap": torch.tensor(5.0)}, ["softcap is tensor(5.)", "a number"]),
        ({"label_smoothing": None}, ["label_smoothing is None", "a number"]),
        ({"targets": torch.full((N,), V), "backend": "reference"}, ["targets holds 53", "0 to 52"]),
        ({"num_items": 5, "reduction": "sum"}, ["num_items", "'sum'"]),
        ({"softcap": -1.0}, ["softcap is -1.0", "None"]),
        ({"label_smoothing": 1.5}, ["label_smoothing is 1.5", "between 0 and 1"]),
        ({"label_smoothing": float("nan")}, ["label_smoothing is nan"]),
        ({"backend": "cuda"}, ["backend is 'cuda'", "'torch'"]),
    ],
)
def test_bad_input_names_the_argument_and_the_remedy(change, words):
    hidden, weight, targets = make_inputs(torch.float32)
    with pytest.raises(ValueError, match=r"must be|it divides") as error:
        linear_cross_entropy(**({"hidden": hidden, "weight": weight, "targets": targets} | change))
    assert all(word in str(error.value) for word in words), str(error.value)
