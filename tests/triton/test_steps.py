"""One token in place is one token of the operation, and leaves its tensors where they were."""

import pytest
import torch
from torch.testing import assert_close

from latte.ops import LatteState, MacchiatoState, WindowState
from latte.ops.steps import (
    ConvolutionWeights,
    LinearWeights,
    Place,
    RGLRUWeights,
    input_step_,
    mixture_step_,
    rglru_step_,
    short_conv_step_,
)
from latte.ops.window_state import in_order

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter: 1 / 0, overflow

B, HV, L, D, E = 2, 3, 5, 7, 6  # distinct: a swapped axis cannot pass


def make_state(form, groups, slots, device):
    generator = torch.Generator().manual_seed(slots)
    heads = HV * groups

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    norm = draw(B, heads, L)
    norm[0, 0, 0] = -torch.inf  # a latent that has seen nothing
    mean = draw(B, heads, L, D)
    mean[0, 0, 0] = 0.0
    valid = torch.rand(B, slots, generator=generator).to(device) < 0.7
    window = (*(draw(B, slots, HV, width) * valid[..., None, None] for width in (E, D)), valid)
    if form == "latte":
        return LatteState(norm, mean)
    return WindowState(*window) if form == "window" else MacchiatoState(LatteState(norm, mean), *window)


def copies(state):
    return type(state)(*(copies(x) if isinstance(x, tuple) else x.clone() for x in state))


def flat(state):
    return [y for x in state for y in (flat(x) if isinstance(x, tuple) else [x])]


def make_tokens(form, groups, device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    heads = HV * groups

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    latents = (draw(B, 1, heads, L + (form != "latte")), draw(B, 1, heads, L)) if form != "window" else (None, None)
    scores = (draw(B, 1, heads, E), draw(B, 1, HV, E)) if form != "latte" else (None, None)
    return (*latents, draw(B, 1, HV, D), *scores)


def make_place(device):
    seen = torch.tensor(11, device=device)
    return Place(torch.tensor([4, 9], device=device), torch.zeros(B, dtype=torch.int32, device=device), seen)


FORMS = [("latte", 0), ("window", 10), ("macchiato", 10), ("macchiato", 0), ("macchiato", 1), ("macchiato", 37)]


@pytest.mark.parametrize(("form", "slots"), FORMS)
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_step_is_the_operation_on_one_token(form, slots, groups, masked, backend, device, monkeypatch):
    from latte.ops.triton import steps

    monkeypatch.setattr(steps, "ELEMENTS", 256)  # several blocks of slots and latents
    angles = torch.rand(B, 1, E // 2, generator=torch.Generator().manual_seed(1)).to(device)
    options = {"rotary": None if form == "latte" else (angles.cos(), angles.sin()), "softcap": 2.0, "scale": 0.3}
    if masked:
        options["mask"] = torch.tensor([[True], [False]], device=device)
    tokens, state = make_tokens(form, groups, device), make_state(form, groups, slots, device)
    expected_state, expected_place = copies(state), make_place(device)
    place, addresses = make_place(device), [x.data_ptr() for x in flat(state)]
    for _ in range(3):  # the counter is ready for the next token
        expected = mixture_step_(*tokens, expected_state, expected_place, backend="reference", **options)
        actual = mixture_step_(*tokens, state, place, backend=backend, **options)
        assert_close(actual, expected)
        assert_close(flat(state), flat(expected_state))
        assert_close(place, expected_place)
    assert addresses == [x.data_ptr() for x in flat(state)]


def in_order_of(state, turn):
    window = in_order(WindowState(state.keys, state.values, state.valid), turn)
    return state._replace(**window._asdict())


@pytest.mark.parametrize(("form", "slots"), [form for form in FORMS if form[0] != "latte"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
def test_a_ring_holds_what_a_moving_window_does(form, slots, masked, backend, device, monkeypatch):
    """Past its end too, and it begins anywhere; a token is written to one position of it, and the others stay."""
    from latte.ops.triton import steps

    monkeypatch.setattr(steps, "ELEMENTS", 256)
    mask = torch.tensor([[True], [False]], device=device) if masked else None
    ring, begin = make_state(form, 2, slots, device), max(slots - 2, 0)
    turn = torch.full((B,), begin, dtype=torch.int32, device=device)
    moving, place = copies(in_order_of(ring, turn)), make_place(device)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        tokens = [None if x is None else torch.randn(x.shape, generator=generator).to(device)
                  for x in make_tokens(form, 2, device)]  # fmt: skip
        before = ring.keys.clone()
        expected = mixture_step_(*tokens, moving, make_place(device), mask=mask, backend="reference")
        actual = mixture_step_(*tokens, ring, place._replace(turn=turn), mask=mask, backend=backend)
        assert_close(actual, expected)
        assert_close(flat(in_order_of(ring, turn)), flat(moving))
        if slots and backend != "reference":
            assert turn.tolist() == [(begin + step + 1) % slots] * B
            assert ((ring.keys != before).flatten(2).any(dim=2).sum(dim=1) <= 1).all()


@pytest.mark.parametrize("form", ["latte", "window", "macchiato"])
def test_a_step_of_no_rows(form, device):
    state = without_rows(make_state(form, 2, 3, device))
    tokens = [None if x is None else x[:0] for x in make_tokens(form, 2, device)]
    place = Place(*(x[:0] if x is not None and x.ndim else x for x in make_place(device)))
    assert mixture_step_(*tokens, state, place, backend="torch").shape == (0, 1, 2 * HV, D)


def without_rows(state):
    """A state of no rows."""
    return type(state)(*(without_rows(x) if isinstance(x, tuple) else x[:0] for x in state))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_step_in_bfloat16_without_options(backend, device):
    tokens = make_tokens("macchiato", 2, device, torch.bfloat16)
    state = make_state("macchiato", 2, 4, device)
    state = state._replace(keys=state.keys.bfloat16(), values=state.values.bfloat16())
    expected_state = copies(state)
    expected = mixture_step_(*tokens, expected_state, make_place(device), backend="reference")
    actual = mixture_step_(*tokens, state, make_place(device), backend=backend)
    assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    assert_close(flat(state), flat(expected_state), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_float16_window_saturates(backend, ring, device):
    """A state in place keeps its dtype, whatever comes."""
    _, _, v, window_q, window_k = make_tokens("window", 1, device)
    state = make_state("window", 1, 4, device)
    state = state._replace(keys=state.keys.half(), values=state.values.half())
    turn = torch.zeros(B, dtype=torch.int32, device=device)
    place = make_place(device)._replace(turn=turn if ring else None)
    mixture_step_(None, None, v * 1e6, window_q, window_k * -1e6, state, place, backend=backend)
    kept = in_order_of(state, turn)
    assert kept.keys.dtype == kept.values.dtype == torch.float16
    most = torch.finfo(torch.float16).max
    assert_close(kept.keys[:, -1].float(), (window_k[:, 0] * -1e6).clamp(-most, most), rtol=1e-3, atol=0)
    assert_close(kept.values[:, -1].float(), (v[:, 0] * 1e6).clamp(-most, most), rtol=1e-3, atol=0)


def test_a_float16_convolution_saturates(device):
    weight, state = torch.ones(3, 2, device=device), torch.zeros(1, 1, 3, dtype=torch.float16, device=device)
    y = short_conv_step_(torch.full((1, 1, 3), 1e6, device=device), weight, None, state, backend="torch")
    assert y.flatten().tolist() == [1e6] * 3
    assert state.flatten().tolist() == [torch.finfo(torch.float16).max] * 3


def test_too_large_a_softcap_is_refused(device):
    tokens, state = make_tokens("window", 1, device), make_state("window", 1, 4, device)
    with pytest.raises(ValueError, match="softcap is 1001; the Triton kernels take up to 1000"):
        mixture_step_(*tokens, state, make_place(device), softcap=1001, backend="triton")


def test_a_step_is_one_token(device):
    with pytest.raises(ValueError, match="v has 2 tokens; a step takes 1"):
        mixture_step_(None, None, torch.zeros(B, 2, HV, D), None, None, make_state("latte", 1, 0, device), None)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("blocks", "size"), [(3, 5), (1, 11), (2, 40)])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rglru_step(blocks, size, masked, backend, device, monkeypatch):
    from latte.ops.triton import input_steps

    monkeypatch.setattr(input_steps, "ELEMENTS", 512)
    generator = torch.Generator().manual_seed(size)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    width = blocks * size
    gates = (draw(blocks, size, size), draw(width), draw(blocks, size, size), draw(width), draw(width))
    state = draw(B, width)
    state[0] = -torch.inf
    mask = torch.tensor([[True], [False]], device=device) if masked else None
    expected_state = state.clone()
    for _ in range(3):
        x = draw(B, 1, width)
        expected = rglru_step_(x, *gates, expected_state, mask=mask, backend="reference")
        assert_close(rglru_step_(x, *gates, state, mask=mask, backend=backend), expected)
        assert_close(state, expected_state)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_short_conv_step(taps, masked, backend, device):
    width = 11
    weight, bias, state = (
        torch.randn(shape, device=device) for shape in ((width, taps), (width,), (B, taps - 1, width))
    )
    mask = torch.tensor([[True], [False]], device=device) if masked else None
    expected_state = state.clone()
    for _ in range(3):
        x = torch.randn(B, 1, width, device=device)
        expected = short_conv_step_(x, weight, bias, expected_state, mask=mask, backend="reference")
        assert_close(short_conv_step_(x, weight, bias, state, mask=mask, backend=backend), expected)
        assert_close(state, expected_state)


def make_mixer(kind, width, draw):
    if kind == "rglru":
        blocks, size = 3, width // 3
        gates = draw(blocks, size, size), draw(width), draw(blocks, size, size), draw(width), draw(width)
        return RGLRUWeights(*gates), draw(B, width)
    if kind == "none":
        return None, None
    return ConvolutionWeights(draw(width, 3), None if kind == "conv" else draw(width)), draw(B, 2, width)


@pytest.mark.parametrize("plain", [(13,), (13, 40, 7)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["none", "conv", "conv with a bias", "rglru"])
def test_input_step_is_its_parts_one_after_another(kind, masked, bias, plain, device, monkeypatch):
    from latte.ops.triton import input_steps

    for name, value in {"CHANNELS": 16, "LOGITS": 8, "COLUMNS": 16, "ELEMENTS": 256}.items():
        monkeypatch.setattr(input_steps, name, value)  # several programs and steps of each kind
    generator = torch.Generator().manual_seed(5)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    width = 42
    mixer, state = make_mixer(kind, width, draw)
    mixed, others = (
        [LinearWeights(draw(n, width), draw(n) if bias else None) for n in sizes] for sizes in ((22, 10), plain)
    )
    mask = torch.tensor([[True], [False]], device=device) if masked else None
    expected_state = None if state is None else state.clone()
    for _ in range(3):
        x = draw(B, 1, width)
        expected = input_step_(x, mixer, expected_state, mixed, others, mask=mask, backend="torch")
        actual = input_step_(x, mixer, state, mixed, others, mask=mask, backend="triton")
        assert all(part.shape[1] == 3 for part in actual[0])
        assert_close([part.sum(1, keepdim=True) for part in actual[0]], expected[0])
        assert_close(actual[1], expected[1])
        if state is not None:
            assert_close(state, expected_state)


def test_many_rows_are_no_single_launch(device, monkeypatch):
    from latte.ops import steps

    monkeypatch.setattr(steps, "ROWS_AT_ONCE", B - 1)
    layers = [LinearWeights(torch.randn(6, 8, device=device), None) for _ in range(2)]
    mixed, _ = input_step_(torch.randn(B, 1, 8, device=device), None, None, layers, [], backend="triton")
    assert [part.shape for part in mixed] == [(B, 1, 6)] * 2


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_logits_in_parts_are_added_up(backend, device):
    (q, k, *rest), state = make_tokens("macchiato", 2, device), make_state("macchiato", 2, 4, device)
    shares = torch.tensor([0.2, 0.5, 0.3], device=device)[None, :, None, None]
    expected_state = copies(state)
    expected = mixture_step_(q, k, *rest, expected_state, make_place(device), backend="reference")
    parts = (q * shares, k * shares, *rest)
    assert_close(mixture_step_(*parts, state, make_place(device), backend=backend), expected)
    assert_close(flat(state), flat(expected_state))


def test_a_state_must_lie_side_by_side(device):
    """It is written to where it is."""
    state = make_state("macchiato", 1, 4, device)
    apart = state._replace(keys=torch.stack([state.keys, state.keys], dim=-1)[..., 0])
    with pytest.raises(ValueError, match=r"keys has strides .*; a step writes to it in place"):
        mixture_step_(*make_tokens("macchiato", 1, device), apart, make_place(device), backend="triton")
    x, weight, past = torch.zeros(B, 1, 4, device=device), torch.zeros(4, 3, device=device), torch.zeros(B, 4, 2)
    with pytest.raises(ValueError, match=r"state has strides .*; a step writes to it in place"):
        short_conv_step_(x, weight, None, past.to(device).transpose(1, 2), backend="triton")
