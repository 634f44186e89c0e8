"""What the probabilistic reading implies: special cases and symmetries of the forms, as equalities."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot, scaled_dot_product_attention

from latte.ops import latte_attention, linear_attention, macchiato_attention, window_attention
from tests.ops.cases import FORMS, SMALL, Case, make_case
from tests.ops.oracle import weights_of

T = 131
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
LATENT_FORMS = [form for form in FORMS if form != "window"]


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def latte_inputs(**sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    inputs = make_case("latte", T, sizes=SMALL._replace(groups=1, **sizes)).inputs
    return inputs["q"], inputs["k"], inputs["v"]


@CAUSAL
def test_linear_attention_with_exp_is_equation_5(backend: str, causal: bool) -> None:
    """Σ_s Σ_l exp(q_tl + k_sl) v_s over the same without v_s, as one quadratic sum."""
    q, k, v = latte_inputs()
    joint = torch.einsum("bthl,bshl->bhts", torch.exp(q), torch.exp(k))
    joint = joint.tril() if causal else joint
    expected = torch.einsum("bhts,bshd->bthd", joint / joint.sum(dim=-1, keepdim=True), v)
    close(linear_attention(q, k, v, causal=causal, feature_map="exp", backend=backend).y, expected)


@CAUSAL
def test_undirected_is_directed_with_gathered_mass(backend: str, causal: bool) -> None:
    """Linear attention with φ = exp is Latte whose query logits are q_t + Z_t (eqs. 5 and 9)."""
    q, k, v = latte_inputs()
    gathered = torch.logcumsumexp(k, dim=1) if causal else torch.logsumexp(k, dim=1, keepdim=True)
    undirected = linear_attention(q, k, v, causal=causal, feature_map="exp", backend=backend)
    directed = latte_attention(q + gathered, k, v, causal=causal, backend=backend)
    close(undirected.y, directed.y)
    close(undirected.state.log_norm, directed.state.log_norm)
    close(undirected.state.mean, directed.state.mean)


def test_feature_maps_by_name_are_the_functions(backend: str) -> None:
    q, k, v = latte_inputs()
    maps = {"exp": torch.exp, "relu": torch.relu, "elu+1": lambda x: torch.nn.functional.elu(x) + 1}
    for name, function in maps.items():
        named = linear_attention(q, k, v, feature_map=name, backend=backend)
        close(named.y, linear_attention(q, k, v, feature_map=function, backend=backend).y)


def test_constant_features_give_the_mean(backend: str) -> None:
    """φ = 1 weighs all keys alike."""
    q, k, v = latte_inputs()
    running = v.cumsum(dim=1) / torch.arange(1, T + 1)[:, None, None]
    close(linear_attention(q, k, v, feature_map=torch.ones_like, backend=backend).y, running)


@CAUSAL
@pytest.mark.parametrize("mask", ["none", "holes"])
def test_macchiato_between_window_and_latte(backend: str, causal: bool, mask: str) -> None:
    """p(0|t) → 1 leaves window attention, p(0|t) → 0 leaves Latte."""
    case = make_case("macchiato", T, mask=mask, causal=causal)
    x, common = dict(case.inputs), {name: case.options.get(name) for name in ("causal", "mask")}
    all_local, none_local = x["q"].clone(), x["q"].clone()
    all_local[..., 0], none_local[..., 0] = 1e4, -1e4
    local = window_attention(x["window_q"], x["window_k"], x["v"], window=17, **common, backend=backend)
    close(macchiato_attention(**{**x, "q": all_local}, window=17, **common, backend=backend).y, local.y)
    latents = latte_attention(x["q"][..., 1:], x["k"], x["v"], **common, backend=backend)
    close(macchiato_attention(**{**x, "q": none_local}, window=17, **common, backend=backend).y, latents.y)


@CAUSAL
def test_macchiato_is_a_mixture_of_both(backend: str, causal: bool) -> None:
    """y = p(0|t) · window + (1 − p(0|t)) · Latte, since softmax over L + 1 states splits that way (eq. 15)."""
    x = dict(make_case("macchiato", T).inputs)
    share = torch.softmax(x["q"], dim=-1)[..., :1]
    local = window_attention(x["window_q"], x["window_k"], x["v"], window=17, causal=causal, backend=backend).y
    latents = latte_attention(x["q"][..., 1:], x["k"], x["v"], causal=causal, backend=backend).y
    actual = macchiato_attention(**x, window=17, causal=causal, backend=backend)
    close(actual.y, share * local + (1 - share) * latents)


def test_one_latent_with_constant_keys_is_the_running_mean(backend: str) -> None:
    q, k, v = latte_inputs(latents=1)
    running = v.cumsum(dim=1) / torch.arange(1, T + 1)[:, None, None]
    for constant in (0.0, 7.0, -1e3):
        output = latte_attention(q, torch.full_like(k, constant), v, backend=backend)
        close(output.y, running, 1e-11)
        close(output.state.log_norm, torch.full_like(output.state.log_norm, constant + math.log(T)))


@CAUSAL
def test_one_latent_does_not_ask_the_query(backend: str, causal: bool) -> None:
    """L = 1 is a softmax over the keys alone."""
    q, k, v = latte_inputs(latents=1)
    scores = k[..., 0].transpose(1, 2)[:, :, None].expand(-1, -1, T, -1)
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf) if causal else scores
    expected = torch.einsum("bhts,bshd->bthd", torch.softmax(scores, dim=-1), v)
    close(latte_attention(q, k, v, causal=causal, backend=backend).y, expected)
    close(latte_attention(-5 * q + 3, k, v, causal=causal, backend=backend).y, expected)


@CAUSAL
def test_window_of_everything_is_softmax_attention(backend: str, causal: bool) -> None:
    """window ≥ T is PyTorch's attention, grouped values included (eq. 3)."""
    x = make_case("window", T).inputs
    q, k, v = (x[name].transpose(1, 2) for name in ("q", "k", "v"))
    expected = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
    for window in (T, T + 1, 500):
        close(window_attention(x["q"], x["k"], x["v"], window=window, causal=causal, backend=backend).y, expected)


def test_window_is_attention_under_a_band(backend: str) -> None:
    x = make_case("window", T).inputs
    q, k, v = (x[name].transpose(1, 2) for name in ("q", "k", "v"))
    distance = torch.arange(T)[:, None] - torch.arange(T)
    for causal, band in ((True, (distance >= 0) & (distance < 17)), (False, distance.abs() < 17)):
        expected = scaled_dot_product_attention(q, k, v, attn_mask=band, enable_gqa=True).transpose(1, 2)
        close(window_attention(x["q"], x["k"], x["v"], window=17, causal=causal, backend=backend).y, expected)


@CAUSAL
def test_window_of_one_gives_the_value(backend: str, causal: bool) -> None:
    x = make_case("window", T).inputs
    y = window_attention(x["q"], x["k"], x["v"], window=1, causal=causal, backend=backend).y
    close(y, x["v"].repeat_interleave(3, dim=2))


def test_scale_of_zero_gives_the_mean_of_the_window(backend: str) -> None:
    x = make_case("window", T).inputs
    y = window_attention(x["q"], x["k"], x["v"], window=T, scale=0.0, backend=backend).y
    running = x["v"].cumsum(dim=1) / torch.arange(1, T + 1)[:, None, None]
    close(y, running.repeat_interleave(3, dim=2))


def test_a_large_softcap_caps_nothing(backend: str) -> None:
    x = make_case("window", T).inputs
    free = window_attention(**x, window=17, backend=backend).y
    close(window_attention(**x, window=17, softcap=1e9, backend=backend).y, free)
    assert (window_attention(**x, window=17, softcap=0.1, backend=backend).y - free).abs().max() > 1e-2


def test_bidirectional_latte_is_equation_6(backend: str) -> None:
    """Each latent is one softmax over all tokens, the same for every t."""
    q, k, v = latte_inputs()
    means = torch.einsum("bshl,bshd->bhld", torch.softmax(k, dim=1), v)
    expected = torch.einsum("bthl,bhld->bthd", torch.softmax(q, dim=-1), means)
    close(latte_attention(q, k, v, causal=False, backend=backend).y, expected)


@pytest.mark.parametrize("form", FORMS)
def test_last_token_sees_the_same_either_way(backend: str, form: str) -> None:
    """Causal and bidirectional attention agree at the last token, and in the state they leave."""
    case = make_case(form, T, state=True)
    one, other = (case.with_options(causal=causal).call(backend) for causal in (True, False))
    close(one.y[:, -1], other.y[:, -1])
    if form != "window":
        one, other = (getattr(output.state, "latents", output.state) for output in (one, other))
        close(one.log_norm, other.log_norm)
        close(one.mean, other.mean)


@CAUSAL
@pytest.mark.parametrize("form", ["latte", "macchiato", "linear exp"])
def test_shifts_change_nothing(backend: str, form: str, causal: bool) -> None:
    """A constant on all query logits of a token, and (directed) one on all keys of a latent."""
    case = make_case(form, T, causal=causal)
    q, k = case.inputs["q"], case.inputs["k"]
    per_latent = 0.0 if form == "linear exp" else torch.linspace(-50, 50, k.shape[3], dtype=torch.float64)
    moved = {**case.inputs, "q": q + torch.linspace(-9, 9, T)[:, None, None], "k": k + per_latent + 3.0}
    before, after = case.call(backend), Case(form, moved, {}, case.options).call(backend)
    close(after.y, before.y, 1e-11)
    before, after = (getattr(output.state, "latents", output.state) for output in (before, after))
    close(after.mean, before.mean, 1e-11)
    close(after.log_norm, before.log_norm + per_latent + 3.0)


@CAUSAL
@pytest.mark.parametrize("form", [form for form in LATENT_FORMS if form != "linear callable"])
def test_latents_have_no_order(backend: str, form: str, causal: bool) -> None:
    case = make_case(form, T, causal=causal)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    queries = torch.cat([torch.tensor([0]), order + 1]) if form == "macchiato" else order
    shuffled = {**case.inputs, "q": case.inputs["q"][..., queries], "k": case.inputs["k"][..., order]}
    before, after = case.call(backend), Case(form, shuffled, {}, case.options).call(backend)
    close(after.y, before.y)
    before, after = (getattr(output.state, "latents", output.state) for output in (before, after))
    close(after.log_norm, before.log_norm[..., order])
    close(after.mean, before.mean[..., order, :])


@pytest.mark.parametrize("form", [form for form in LATENT_FORMS if form != "macchiato"])
def test_the_past_has_no_order(backend: str, form: str) -> None:
    """Without a window, the last token does not know in which order the others came."""
    case = make_case(form, T)
    order = torch.cat([torch.randperm(T - 1, generator=torch.Generator().manual_seed(2)), torch.tensor([T - 1])])
    shuffled = {name: x[:, order] for name, x in case.inputs.items()}
    close(Case(form, shuffled).call(backend).y[:, -1], case.call(backend).y[:, -1])


@pytest.mark.parametrize("form", FORMS)
def test_attention_averages(backend: str, form: str) -> None:
    """y is an average: it lies within the values' range, keeps a constant and follows values linearly."""
    case = make_case(form, T)
    x = case.inputs
    y = case.call(backend).y
    fed = weights_of(case).sum(dim=-1).transpose(1, 2) > 0.5  # relu features may meet no key
    running = x["v"].cummax(dim=1).values.repeat_interleave(3, dim=2)
    assert (y <= running + 1e-12)[fed].all()
    constant = Case(form, {**x, "v": torch.full_like(x["v"], 2.5)}, {}, case.options).call(backend).y
    close(constant, torch.where(fed, 2.5, 0.0).double().unsqueeze(-1).expand_as(constant))
    affine = Case(form, {**x, "v": 3 * x["v"] - 1}, {}, case.options).call(backend).y
    close(affine, torch.where(fed.unsqueeze(-1), 3 * y - 1, 0.0), 1e-11)


def test_one_hot_values_read_the_weights(backend: str) -> None:
    """With v_s = e_s, y is the attention matrix itself."""
    for form in FORMS:
        case = make_case(form, 67, sizes=SMALL)
        values = one_hot(torch.arange(67)).double()[None, :, None].expand(2, 67, 1, 67)
        y = Case(form, {**case.inputs, "v": values}, {}, case.options).call(backend).y
        close(y.transpose(1, 2), weights_of(case))
