"""Attention token by token: the recurrence of the latents (eqs. 10-14) and a softmax over the window (eq. 17)."""

from itertools import pairwise

import torch
from torch import Tensor

from latte.ops.checks import sequence_bounds
from latte.ops.states import LatteState, WindowState, empty_latte_state, merge


def attend(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    window_q: Tensor | None,
    window_k: Tensor | None,
    *,
    window: int,
    scale: float,
    softcap: float,
    undirected: bool,
    causal: bool,
    mask: Tensor | None,
    latents: LatteState | None,
    past: WindowState | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, LatteState]:
    """The mixture of latents and window; either may be absent. Accumulates in `dtype`."""
    real = torch.ones(v.shape[:2], dtype=torch.bool, device=v.device) if mask is None else mask
    bounds = [0, v.shape[1]] if cu_seqlens is None else sequence_bounds(cu_seqlens, v.shape[1])
    outputs: list[Tensor] = []
    states: list[LatteState] = []
    for i, (start, end) in enumerate(pairwise(bounds)):
        here = real[:, start:end]
        piece = [x if x is None else _clean(x[:, start:end], here, dtype) for x in (q, k, v, window_q, window_k)]
        row = slice(None) if cu_seqlens is None else slice(i, i + 1)
        y, state = _attend_sequence(
            *piece,
            real=here,
            state=None if latents is None else LatteState(*(part[row].to(dtype) for part in latents)),
            past=None if past is None else _clean_past(WindowState(*(part[row] for part in past)), dtype),
            window=window, scale=scale, softcap=softcap, undirected=undirected, causal=causal,
        )  # fmt: skip
        outputs.append(y)
        states.append(state)
    y = torch.cat(outputs, dim=1).to(v.dtype)
    return y, LatteState(torch.cat([s.log_norm for s in states]), torch.cat([s.mean for s in states]))


def _clean(x: Tensor, real: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).masked_fill(~real[..., None, None], 0.0)


def _clean_past(past: WindowState, dtype: torch.dtype) -> WindowState:
    return WindowState(_clean(past.keys, past.valid, dtype), _clean(past.values, past.valid, dtype), past.valid)


def _attend_sequence(
    q, k, v, window_q, window_k, *, real, state, past, window, scale, softcap, undirected, causal
) -> tuple[Tensor, LatteState]:  # fmt: skip
    batch, tokens, value_heads, width = v.shape
    heads = (q if q is not None else window_q).shape[2]
    v_heads = v.repeat_interleave(heads // value_heads, dim=2)
    if state is None:
        state = empty_latte_state(batch, heads, 0 if k is None else k.shape[3], width, v, v.dtype)

    states = []
    if k is not None:
        for t in range(tokens):
            values = v_heads[:, t, :, None].expand_as(state.mean)
            key = k[:, t].masked_fill(~real[:, t, None, None], -torch.inf)
            state = merge(state, LatteState(key, values))
            states.append(state)

    outputs = []
    for t in range(tokens):
        y, share = v.new_zeros((batch, heads, width)), 1.0
        if q is not None:
            seen = states[t] if causal else state
            p = _softmax(q[:, t] + seen.log_norm if undirected else q[:, t])
            y, share = torch.einsum("bhl,bhld->bhd", p[..., -seen.log_norm.shape[-1] :], seen.mean), p[..., :1]
        if window_q is not None:
            y = y + share * _window_mean(t, v, window_q, window_k, real, past, window, scale, softcap, causal)
        outputs.append(y.masked_fill(~real[:, t, None, None], 0.0))
    y = torch.stack(outputs, dim=1) if outputs else v_heads  # which are none, and have a gradient
    return y, state


def _window_mean(t, v, q, k, real, past, window, scale, softcap, causal) -> Tensor:
    """Σ_s softmax_s(cap(scale · q_t·k_s)) v_s over the window of token t, including what of it lies in the past."""
    stop = t + 1 if causal else min(t + window, v.shape[1])
    start = max(0, t - window + 1)
    keys, values, valid = k[:, start:stop], v[:, start:stop], real[:, start:stop]
    older = window - 1 - t  # window positions before the first token of this call
    if past is not None and older > 0:
        keys = torch.cat([past.keys[:, -older:], keys], dim=1)
        values = torch.cat([past.values[:, -older:], values], dim=1)
        valid = torch.cat([past.valid[:, -older:], valid], dim=1)
    groups = q.shape[2] // k.shape[2]
    keys, values = keys.repeat_interleave(groups, dim=2), values.repeat_interleave(groups, dim=2)
    scores = scale * torch.einsum("bhe,bshe->bhs", q[:, t], keys)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = _softmax(scores.masked_fill(~valid[:, None], -torch.inf))
    return torch.einsum("bhs,bshd->bhd", weights, values)


def _softmax(logits: Tensor) -> Tensor:
    """Softmax over the last axis that gives zeros, not NaN, where every logit is −inf."""
    empty = (logits == -torch.inf).all(dim=-1, keepdim=True)
    return torch.softmax(logits.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
