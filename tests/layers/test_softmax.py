"""Full attention is the explicit softmax, and asks PyTorch for its fast kernels where it can."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from latte.layers.softmax import advance_softmax, softmax_attention

B, T, S, H, HV, E, D = 2, 13, 7, 6, 3, 10, 5
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
SOFTCAP = pytest.mark.parametrize("softcap", [None, 1.5])


def make_inputs(tokens=T, seed=0):
    noise = torch.Generator().manual_seed(seed)
    shapes = [(B, tokens, H, E), (B, tokens, HV, E), (B, tokens, HV, D)]
    return [torch.randn(shape, generator=noise, dtype=torch.float64).requires_grad_() for shape in shapes]


def explicit(q, k, v, visible, scale, softcap):
    k, v = (x.repeat_interleave(H // HV, dim=2) for x in (k, v))
    scores = torch.einsum("bthe,bshe->bhts", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    return torch.einsum("bhts,bshd->bthd", torch.softmax(scores, dim=-1), v)


@SOFTCAP
@CAUSAL
def test_is_the_explicit_softmax(causal, softcap):
    inputs = make_inputs()
    visible = torch.ones(T, T, dtype=torch.bool)
    y = softmax_attention(*inputs, scale=0.7, softcap=softcap, causal=causal)
    expected = explicit(*inputs, visible.tril() if causal else visible, 0.7, softcap)
    assert_close(y, expected, rtol=0, atol=1e-12)
    pull = torch.randn_like(y)
    grads = torch.autograd.grad(y, inputs, pull)
    assert_close(grads, torch.autograd.grad(expected, inputs, pull), rtol=0, atol=1e-11)


@SOFTCAP
@CAUSAL
@pytest.mark.parametrize("masked", [False, True])
def test_sees_the_past(causal, softcap, masked):
    past, inputs = make_inputs(S, seed=1), make_inputs()
    valid = torch.rand((B, S), generator=torch.Generator().manual_seed(2)) > 0.3 if masked else None
    state = advance_softmax(None, past[1], past[2], valid)
    y = softmax_attention(*inputs, softcap=softcap, causal=causal, state=state)
    k, v = (torch.cat([old, new], dim=1) for old, new in zip(past[1:], inputs[1:], strict=True))
    now = torch.ones(T, T, dtype=torch.bool)
    seen = torch.ones(B, S, dtype=torch.bool) if valid is None else valid
    visible = torch.cat([seen[:, None].expand(B, T, S), (now.tril() if causal else now).expand(B, T, T)], dim=2)
    expected = explicit(inputs[0], k, v, visible[:, None], E**-0.5, softcap)
    assert_close(y, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tokens", [1, T])
def test_no_mask_is_made_where_none_is_needed(monkeypatch, tokens):
    """A mask tensor would cost [T T] memory, and the fastest kernels take none."""
    calls = []
    inner = F.scaled_dot_product_attention

    def spy(q, k, v, visible=None, **options):
        calls.append((visible, options["is_causal"], options["enable_gqa"]))
        return inner(q, k, v, visible, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    q, k, v = make_inputs(tokens)
    softmax_attention(q, k, v)
    softmax_attention(q, k, v, causal=False)
    softmax_attention(q[:, :1], k[:, :1], v[:, :1], state=advance_softmax(None, k, v))
    assert calls == [(None, True, True), (None, False, True), (None, False, True)]


@CAUSAL
def test_rows_without_a_real_token_are_zero(causal):
    inputs = make_inputs()
    mask = torch.zeros(B, T, dtype=torch.bool)
    mask[1, 3:] = True
    y = softmax_attention(*inputs, causal=causal, mask=mask)
    assert torch.equal(y[~mask], torch.zeros_like(y[~mask]))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(y.sum(), inputs))


def test_no_tokens():
    q, k, v = make_inputs(0)
    assert softmax_attention(q, k, v).shape == (B, 0, H, D)
    state = advance_softmax(None, *make_inputs(S)[1:])
    assert softmax_attention(q, k, v, state=state).shape == (B, 0, H, D)
    assert advance_softmax(state, k, v).keys.shape == (B, S, HV, E)
