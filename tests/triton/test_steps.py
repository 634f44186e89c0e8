"""One token in place is one token of the operation, and leaves its tensors where they were."""

import pytest
import torch
from torch.testing import assert_close

from latte.ops import LatteState, MacchiatoState, WindowState
from latte.ops.steps import Place, mixture_step_, rglru_step_, short_conv_step_

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


def test_a_step_is_one_token(device):
    with pytest.raises(ValueError, match="v has 2 tokens; a step takes 1"):
        mixture_step_(None, None, torch.zeros(B, 2, HV, D), None, None, make_state("latte", 1, 0, device), None)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("blocks", "size"), [(3, 5), (1, 11), (2, 40)])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rglru_step(blocks, size, masked, backend, device, monkeypatch):
    from latte.ops.triton import steps

    monkeypatch.setattr(steps, "ELEMENTS", 512)
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
