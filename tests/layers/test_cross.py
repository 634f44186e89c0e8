"""Linear-time cross attention."""

from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from latte.layers import CrossAttention
from latte.ops import LatteState, latte_attention
from tests.layers.forms import randomize, summary_twin

B, T, S, HIDDEN, SOURCE, HEADS, VALUE_HEADS, LATENTS, WIDTH = 3, 5, 19, 14, 11, 6, 2, 7, 13
TIGHT = {"rtol": 0, "atol": 1e-12}


def make_layer(dtype=torch.float64):
    torch.manual_seed(0)
    layer = CrossAttention(
        HIDDEN, HEADS, LATENTS, source_size=SOURCE, head_dim=WIDTH, num_value_heads=VALUE_HEADS, bias=True
    )
    return randomize(layer).to(dtype)


def make_inputs(dtype=torch.float64):
    noise = torch.Generator().manual_seed(1)
    x, source = (torch.randn(shape, generator=noise, dtype=dtype) for shape in ((B, T, HIDDEN), (B, S, SOURCE)))
    mask = torch.rand((B, S), generator=noise) > 0.3
    return x, source, mask


def split(x, heads):
    return x.view(*x.shape[:2], heads, -1)


@pytest.mark.parametrize("masked", [False, True])
def test_is_its_matrix_times_values(masked):
    """y = Σ_s p(s|t) v_s with p(s|t) = Σ_l p(l|t) p(s|l), whose rows sum to 1; gradients too."""
    layer, (x, source, mask) = make_layer(), make_inputs()
    mask = mask if masked else torch.ones_like(mask)
    k, v = split(layer.latent_key(source), HEADS), split(layer.value(source), VALUE_HEADS)
    p = torch.softmax(split(layer.latent_query(x), HEADS), dim=-1)
    shares = torch.softmax(k.masked_fill(~mask[..., None, None], -torch.inf), dim=1)
    a = torch.einsum("bthl,bshl->bhts", p, shares)
    assert_close(a.sum(dim=-1), torch.ones(B, HEADS, T, dtype=torch.float64), **TIGHT)
    v = v.repeat_interleave(HEADS // VALUE_HEADS, dim=2)
    expected = layer.output(torch.einsum("bhts,bshd->bthd", a, v).flatten(2))
    y = layer(x, layer.summarize(source, mask if masked else None))
    assert_close(y, expected, **TIGHT)
    leaves = list(layer.parameters())
    grads = torch.autograd.grad(y.square().sum(), leaves)
    assert_close(grads, torch.autograd.grad(expected.square().sum(), leaves), rtol=1e-9, atol=1e-9)


def test_summary_is_the_state_of_bidirectional_latte():
    layer, (_, source, mask) = make_layer(), make_inputs()
    k, v = split(layer.latent_key(source), HEADS), split(layer.value(source), VALUE_HEADS)
    state = layer.summarize(source, mask)
    assert_close(tuple(state), tuple(latte_attention(k, k, v, causal=False, mask=mask).state), **TIGHT)
    assert_close(tuple(state), tuple(summary_twin(k, v, mask)), **TIGHT)
    assert state.mean.shape == (B, HEADS, LATENTS, WIDTH)  # whatever the source's length


def test_source_may_come_in_pieces():
    layer, (x, source, mask) = make_layer(), make_inputs()
    state = None
    for piece, real in zip(source.split([0, 7, 12], dim=1), mask.split([0, 7, 12], dim=1), strict=True):
        state = layer.summarize(piece, real, state)
    whole = layer.summarize(source, mask)
    assert_close(tuple(state), tuple(whole), **TIGHT)
    assert_close(layer(x, state), layer(x, whole), **TIGHT)


def test_target_tokens_by_themselves():
    layer, (x, source, _) = make_layer(), make_inputs()
    state = layer.summarize(source)
    assert_close(torch.cat([layer(x[:, t : t + 1], state) for t in range(T)], dim=1), layer(x, state), **TIGHT)
    assert layer(x[:, :0], state).shape == (B, 0, HIDDEN)


def test_padding_of_the_source_does_not_matter():
    layer, (x, source, mask) = make_layer(), make_inputs()
    garbage = torch.where(mask[..., None], source, 1e3)
    assert torch.equal(layer(x, layer.summarize(garbage, mask)), layer(x, layer.summarize(source, mask)))


def test_source_without_a_real_token_gives_nothing():
    layer, (x, source, mask) = make_layer(), make_inputs()
    mask[1] = False
    state = layer.summarize(source, mask)
    assert state.log_norm[1].eq(-torch.inf).all()
    y = layer(x, state)
    assert_close(y[1], layer.output.bias.expand(T, HIDDEN), **TIGHT)
    grads = torch.autograd.grad(y.sum(), list(layer.parameters()))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_logits_of_any_size(size):
    layer, (x, source, mask) = make_layer(torch.float32), make_inputs(torch.float32)
    with torch.no_grad():
        layer.latent_key.bias.fill_(size)
        layer.latent_key.weight.mul_(1e3)
    y = layer(x, layer.summarize(source, mask))
    grads = torch.autograd.grad(y.sum(), list(layer.parameters()))
    assert all(part.isfinite().all() for part in (y, *grads))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype):
    layer, (x, source, mask) = make_layer(), make_inputs()
    expected = layer(x, layer.summarize(source, mask))
    layer, x, source = layer.to(dtype), x.to(dtype), source.to(dtype)
    state = layer.summarize(source, mask)
    assert state.log_norm.dtype == state.mean.dtype == torch.float32
    y = layer(x, state)
    assert y.dtype == dtype
    tolerance = 20 * torch.finfo(dtype).eps
    assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


def test_autocast():
    layer, (x, source, mask) = make_layer(torch.float32), make_inputs(torch.float32)
    expected = layer(x, layer.summarize(source, mask))
    with torch.autocast("cpu", torch.bfloat16):
        state = layer.summarize(source, mask)
        y = layer(x, state)
    assert state.mean.dtype == torch.float32
    assert y.dtype == torch.bfloat16
    assert_close(y.float(), expected, rtol=0.1, atol=0.1)


def test_float16_takes_long_sources():
    """Sums beyond float16's range on the way to a mean within it."""
    layer = make_layer(torch.float16)
    source = torch.full((1, 70_001, SOURCE), 3.0, dtype=torch.float16)
    state = layer.summarize(source)
    assert_close(state.mean, layer.summarize(source[:, :1]).mean, rtol=1e-3, atol=1e-3)


def test_wrong_input():
    layer, (x, source, mask) = make_layer(), make_inputs()
    state = layer.summarize(source)
    with pytest.raises(ValueError, match=r"source has shape \[3, 5, 14\]; it must be \[B, S, C=11\]"):
        layer.summarize(x)
    with pytest.raises(ValueError, match=r"mask has dtype torch.int64; it must be a bool tensor"):
        layer.summarize(source, mask.long())
    with pytest.raises(ValueError, match=r"state.mean has shape \[3, 6, 7, 13\]; it must be \[B=2, H=6, L=7, D=13\]"):
        layer(x[:2], state)
    with pytest.raises(ValueError, match="state is Tensor; it must be a LatteState"):
        layer(x, source)
    for settings, text in (
        ({"num_latents": 0}, "num_latents is 0"),
        ({"source_size": 0}, "source_size is 0"),
        ({"num_heads": 5}, "hidden_size is 14, which is no multiple of num_heads, 5; .*head_dim"),
        ({"num_heads": 7, "num_value_heads": 3}, "num_heads is 7, which is no multiple of num_value_heads, 3"),
    ):
        with pytest.raises(ValueError, match=text):
            CrossAttention(**{"hidden_size": 14, "num_heads": 7, **settings})


@pytest.mark.parametrize("masked", [False, True])
def test_packed_pairs_are_as_they_are_alone(masked):
    """Target i attends to source i, one of which is empty; gradients too, and sources in pieces."""
    layer, noise = make_layer(), torch.Generator().manual_seed(3)
    sources, targets = [0, 7, 7, 19], [0, 3, 5, 11]
    x = torch.randn((1, targets[-1], HIDDEN), generator=noise, dtype=torch.float64).requires_grad_()
    source = torch.randn((1, sources[-1], SOURCE), generator=noise, dtype=torch.float64).requires_grad_()
    mask = torch.rand((1, sources[-1]), generator=noise) > 0.4 if masked else None
    state = layer.summarize(source, mask, cu_seqlens=torch.tensor(sources))
    y = layer(x, state, torch.tensor(targets))
    alone = []
    for (a, b), (c, d) in zip(pairwise(sources), pairwise(targets), strict=True):
        own = None if mask is None else mask[:, a:b]
        alone.append(layer(x[:, c:d], layer.summarize(source[:, a:b], own)))
    expected = torch.cat(alone, dim=1)
    assert_close(y, expected, **TIGHT)
    assert_close(y[:, 3:5], layer.output.bias.expand(1, 2, -1), **TIGHT)
    leaves, pull = [x, source, *layer.parameters()], torch.randn_like(y)
    grads = torch.autograd.grad(y, leaves, pull)
    assert_close(grads, torch.autograd.grad(expected, leaves, pull), rtol=1e-9, atol=1e-9)
    twice = layer.summarize(source, mask, state, torch.tensor(sources))
    assert_close(layer(x, twice, torch.tensor(targets)), y, **TIGHT)


def test_summaries_of_another_layer_are_refused():
    layer, (_, source, _) = make_layer(), make_inputs()
    with pytest.raises(ValueError, match=r"state.mean has shape \[3, 6, 2, 13\]; it must be \[B=3, H=6, L=7, D=13\]"):
        layer.summarize(source, state=LatteState(torch.zeros(3, 6, 2), torch.zeros(3, 6, 2, 13)))


def test_packed_pairs_must_be_pairs():
    layer, (x, source, _) = make_layer(), make_inputs()
    state = layer.summarize(source[:1], cu_seqlens=torch.tensor([0, 4, S]))
    with pytest.raises(ValueError, match=r"state.mean has shape \[2, 6, 7, 13\]; it must be \[N=3, H=6, L=7, D=13\]"):
        layer(x[:1], state, torch.tensor([0, 1, 2, T]))
    with pytest.raises(ValueError, match="packed sequences lie in one row"):
        layer.summarize(source, cu_seqlens=torch.tensor([0, S]))
