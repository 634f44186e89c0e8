"""The attention kernels against the reference: every form, mask, packing, state and way to cut latents into blocks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from latte.ops import LatteState, latte_attention, macchiato_attention
from latte.ops.triton.plan import Plan
from tests.ops.cases import (
    FORMS,
    Case,
    Sizes,
    assert_same,
    check_against_reference,
    differentiate,
    evaluate,
    make_case,
    outputs,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter: 1 / 0, overflow

FLOAT32 = 3e-5
ONE = Sizes(batch=1, value_heads=1, groups=1, latents=5, width=7, window_width=11)
GROUPED = Sizes(batch=1, value_heads=1, groups=2, latents=3, width=7, window_width=5)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Two tiles a piece, so that a few hundred tokens have several."""
    from latte.ops.triton import states, tiles

    for module, name in ((tiles, "_pieces"), (states, "lane_pieces")):
        monkeypatch.setattr(module, name, lambda per_row: (2, (per_row + 1) // 2))


def case_on(device: str, form: str, tokens: int, **options) -> Case:
    return make_case(form, tokens, dtype=torch.float32, device=device, **options)


@pytest.mark.parametrize("form", FORMS)
def test_causal(device: str, form: str) -> None:
    """Three tiles in two pieces, the last one short; holes, grouped values, a state before and its gradient."""
    case = case_on(device, form, 131, sizes=GROUPED, mask="holes", state=True)
    check_against_reference(case, "triton", FLOAT32)


@pytest.mark.parametrize("form", ["latte", "macchiato", "linear exp", "window"])
def test_bidirectional(device: str, form: str) -> None:
    case = case_on(device, form, 131, sizes=GROUPED, mask="holes", state=True, causal=False)
    check_against_reference(case, "triton", FLOAT32)


@pytest.mark.parametrize("form", ["latte", "macchiato", "window"])
def test_whole_tiles_without_a_mask(device: str, form: str) -> None:
    """The path without any bounds check."""
    check_against_reference(case_on(device, form, 192, sizes=ONE), "triton", FLOAT32)


@pytest.mark.parametrize("tokens", [0, 1, 63, 65])
def test_lengths(device: str, tokens: int) -> None:
    check_against_reference(case_on(device, "macchiato", tokens, sizes=ONE, state=True), "triton", FLOAT32)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(Sizes(1, 1, 1, latents=1, width=96, window_width=16), id="1 latent, width 96"),
        pytest.param(Sizes(1, 1, 1, latents=70, width=5, window_width=96), id="70 latents in blocks, window width 96"),
        pytest.param(Sizes(1, 1, 1, latents=16, width=130, window_width=5), id="width 130"),
    ],
)
def test_sizes(device: str, sizes: Sizes) -> None:
    check_against_reference(case_on(device, "macchiato", 67, sizes=sizes, mask="holes", state=True), "triton", FLOAT32)


@pytest.mark.parametrize(
    "options", [{"softcap": 1.7}, {"scale": -0.37}, {"scale": 0.0}, {"window": 1}, {"window": 200}]
)
def test_window_options(device: str, options: dict) -> None:
    case = case_on(device, "macchiato", 131, sizes=ONE, mask="holes", state=True, **options)
    check_against_reference(case, "triton", FLOAT32)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("form", ["latte", "macchiato", "linear elu+1", "window"])
def test_packed(device: str, form: str, causal: bool) -> None:
    """Sequences of one token, of none, inside a tile, across tiles and across pieces, each with its state."""
    bounds = [0, 1, 1, 40, 200, 205]
    case = case_on(device, form, bounds[-1], sizes=ONE, mask="holes", causal=causal)
    states = case_on(device, form, 0, sizes=ONE._replace(batch=len(bounds) - 1), state=True).state
    if "log_norm" in states:  # −inf has no gradient to speak of in a sequence without tokens
        states = {**states, "log_norm": states["log_norm"].nan_to_num(neginf=-3.0)}
    packed = replace(case, state=states).with_options(cu_seqlens=torch.tensor(bounds, device=device))
    check_against_reference(packed, "triton", FLOAT32)


def wild(case: Case, ramp: bool) -> Case:
    """The case with keys that leap: ever higher by 1e4, or anywhere within ±1e4."""
    k = case.inputs["k"]
    steps = torch.arange(k.shape[1], device=k.device, dtype=k.dtype)[None, :, None, None]
    return replace(case, inputs={**case.inputs, "k": k + 1e4 * steps if ramp else k * 1e4})


@pytest.mark.parametrize("ramp", [True, False], ids=["ramp", "random"])
@pytest.mark.parametrize("form", ["latte", "macchiato", "linear exp"])
def test_leaping_keys(device: str, form: str, ramp: bool) -> None:
    """Normalisers that leap are taken token by token; the values stay those of float64 for what float32 holds."""
    case = wild(case_on(device, form, 70, sizes=ONE, state=True), ramp)
    actual, expected = evaluate(case, "triton"), evaluate(case.to(torch.float64), "reference")
    assert_same(actual, expected, 2e-3, dtypes=False)  # half an ulp of 1e4 is 5e-4 in a logarithm


def test_empty_latents_give_zero(device: str) -> None:
    case = case_on(device, "latte", 70, sizes=ONE)
    case.inputs["k"][..., 2] = -torch.inf
    case.inputs["k"][:, :66, :, 3] = -torch.inf  # seen only in the second tile
    check_against_reference(case, "triton", FLOAT32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(device: str, dtype: torch.dtype) -> None:
    limit = 1e-2 if device == "cuda" else 2e-2  # the interpreter truncates where a GPU rounds
    case = case_on(device, "macchiato", 131, sizes=ONE).to(dtype)
    actual, expected = evaluate(case, "triton"), evaluate(case.to(torch.float64), "reference")
    for name, x in actual.items():
        error = (x.double() - expected[name].double()).norm() / expected[name].double().norm().clamp(min=1e-9)
        assert error < limit, (name, error)
        assert x.dtype == (dtype if name in case.inputs or name == "y" else x.dtype)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_pieces_longer_than_one_step(device: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pieces of 8 tiles, 4 asked for at once, the second not full; a state before, or sequences of all lengths."""
    from latte.ops.triton import states

    monkeypatch.setattr(states, "lane_pieces", lambda per_row: (8, -(-per_row // 8)))
    case = case_on(device, "latte", 645, sizes=ONE._replace(latents=2, width=3), state=not packed)
    if packed:
        case = case.with_options(cu_seqlens=torch.tensor([0, 70, 70, 330, 335, 645], device=device))
    check_against_reference(case, "triton", FLOAT32)


def test_same_bits_every_time(device: str) -> None:
    case = case_on(device, "macchiato", 131, sizes=ONE, mask="holes")
    first, second = evaluate(case, "triton"), evaluate(case, "triton")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_states_made_again_are_those_of_the_forward_pass(
    device: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward may keep the states before tiles or make them again from those before pieces: the same bits."""
    from latte.ops.triton import plan

    case = case_on(device, "macchiato", 300, sizes=ONE, state=not packed)
    if packed:
        case = case.with_options(cu_seqlens=torch.tensor([0, 131, 131, 136, 300], device=device))
    found = []
    for small in (True, False):
        monkeypatch.setattr(plan, "states_are_small", lambda *_, small=small: small)
        plan.make_plan.cache_clear()
        found.append(evaluate(case, "triton"))
    plan.make_plan.cache_clear()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_masked_contents_do_not_matter(device: str) -> None:
    case = case_on(device, "macchiato", 70, sizes=ONE, mask="holes")
    hidden = ~case.options["mask"][..., None, None]
    spoiled = case.map(lambda x: x.masked_fill(hidden, torch.nan))
    clean, dirty = evaluate(case, "triton"), evaluate(spoiled, "triton")
    for name, x in clean.items():
        assert torch.equal(x, dirty[name]), name


def test_float64_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match=r"q has dtype torch.float64; .*backend=\"torch\""):
        make_case("latte", 3, sizes=ONE, device=device).call("triton")


def test_too_wide_or_too_many_latents_are_refused(device: str) -> None:
    logits, values = torch.zeros(1, 3, 1, 5, device=device), torch.zeros(1, 3, 1, 257, device=device)
    with pytest.raises(ValueError, match="v has 257 head width; the Triton kernels take up to 256"):
        latte_attention(logits, logits, values, backend="triton")
    logits = torch.zeros(1, 3, 1, 257, device=device)
    with pytest.raises(ValueError, match="k has 257 latents per head"):
        latte_attention(logits, logits, values[..., :7], backend="triton")


def test_too_large_a_softcap_is_refused(device: str) -> None:
    """Kernels take tanh by way of exp, whose digits a large cap would bring to light."""
    case_on(device, "window", 3, sizes=ONE, softcap=1000.0).call("triton")
    with pytest.raises(ValueError, match=r"softcap is 1001\.0; .* up to 1000, .*backend=\"torch\""):
        case_on(device, "window", 3, sizes=ONE, softcap=1001.0).call("triton")


@pytest.mark.parametrize("kind", [int, float, np.float32])
def test_numbers_of_any_kind_are_launched_as_floats(device: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """To Python 2 is 2.0, so that a kernel compiled for the one would be launched with the other."""
    launched = []
    launch = Plan.launch

    def spy(plan, name, kernel, grid, tensors, numbers, *rest) -> None:
        launched.append([x for x in numbers if x in (2, 3) and type(x) is not int])
        launch(plan, name, kernel, grid, tensors, numbers, *rest)

    monkeypatch.setattr(Plan, "launch", spy)
    evaluate(case_on(device, "window", 5, sizes=ONE, scale=kind(2), softcap=kind(3)), "triton")
    assert launched
    assert all(list(map(type, numbers)) == [float, float] for numbers in launched), launched


def test_float16_takes_a_past_beyond_its_range(device: str) -> None:
    case = case_on(device, "window", 3, sizes=ONE, state=True).map(torch.Tensor.half)
    wide = {name: torch.full_like(x, 1e5, dtype=torch.float32) for name, x in case.state.items() if name != "valid"}
    case = replace(case, state={**wide, "valid": torch.ones_like(case.state["valid"])})
    assert case.call("triton").y.isfinite().all()


def test_bad_bounds_are_named(device: str) -> None:
    logits, values = torch.zeros(1, 3, 1, 5, device=device), torch.zeros(1, 3, 1, 7, device=device)
    with pytest.raises(ValueError, match="cu_seqlens ends at 2; it must end at the number of tokens, 3"):
        latte_attention(logits, logits, values, cu_seqlens=torch.tensor([0, 2], device=device), backend="triton")


def test_what_is_nothing_but_its_kernels(device: str) -> None:
    """Only such calls are recorded: a state that no kernel fills would be replayed unfilled."""
    from latte.ops.triton.attention import _plain

    def tensors(tokens: int, batch: int = 2) -> tuple:
        return (*(torch.zeros(batch, tokens, 3, 4, device=device) for _ in range(5)), *(None for _ in range(7)))

    assert _plain(tensors(5))
    assert not _plain(tensors(0))
    assert not _plain(tensors(5, batch=0))
    assert not _plain((*tensors(5)[:4], tensors(5)[4].transpose(2, 3), *tensors(5)[5:]))
    assert not _plain((*tensors(5)[:11], torch.tensor([0, 5])))


def test_bounds_made_in_inference_mode_are_read_each_time(device: str) -> None:
    """Such tensors do not tell whether they were changed."""
    logits, values = torch.zeros(1, 3, 1, 5, device=device), torch.ones(1, 3, 1, 7, device=device)
    with torch.inference_mode():
        bounds = torch.tensor([0, 1, 3], device=device)
        y = latte_attention(logits, logits, values, cu_seqlens=bounds, backend="triton").y
        torch.testing.assert_close(y, values)
        bounds[2] = 2
        with pytest.raises(ValueError, match="cu_seqlens ends at 2"):
            latte_attention(logits, logits, values, cu_seqlens=bounds, backend="triton")


def test_inputs_of_any_stride(device: str) -> None:
    """Heads of a fused projection, and a transposed tensor, which is copied."""
    case = case_on(device, "macchiato", 70, sizes=ONE)
    fused = torch.cat([case.inputs["q"], case.inputs["k"]], dim=-1)
    q, k = fused.split([6, 5], dim=-1)
    v = case.inputs["v"].transpose(1, 3).contiguous().transpose(1, 3)
    rest = {name: case.inputs[name] for name in ("window_q", "window_k")}
    strided = macchiato_attention(q, k, v, **rest, window=17, backend="triton")
    assert torch.equal(strided.y, case.call("triton").y)


@pytest.mark.parametrize("form", ["latte", "macchiato", "window"])
def test_compiles_whole(device: str, form: str) -> None:
    """One graph, forward and backward, around custom operations."""
    case = case_on(device, form, 70, sizes=ONE, mask="holes", state=True)

    def compiled(leaf: Case) -> dict[str, torch.Tensor]:
        names, tensors = zip(*leaf.inputs.items(), strict=True)

        @torch.compile(fullgraph=True, backend="aot_eager")
        def call(*given: torch.Tensor):
            return outputs(replace(leaf, inputs=dict(zip(names, given, strict=True))).call("triton"))

        return call(*tensors)

    torch.compiler.reset()
    assert_same(differentiate(case, compiled), evaluate(case, "triton"), 1e-6)


def test_state_has_float32_for_half_inputs(device: str) -> None:
    state = case_on(device, "latte", 5, sizes=ONE).to(torch.bfloat16).call("triton").state
    assert isinstance(state, LatteState)
    assert state.log_norm.dtype == state.mean.dtype == torch.float32
