"""The exact attention matrix p(s|t) of every form, for looking and testing: quadratic in T by nature."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from latte.ops import checks
from latte.ops.features import FeatureMap, log_features
from latte.ops.states import accumulation_dtype


def attention_weights(
    q: Float[Tensor, "B T H _"] | None = None,
    k: Float[Tensor, "B T H L"] | None = None,
    window_q: Float[Tensor, "B T H E"] | None = None,
    window_k: Float[Tensor, "B T Hv E"] | None = None,
    *,
    feature_map: FeatureMap | None = None,
    window: int = 128,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    mask: Bool[Tensor, "B T"] | None = None,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
) -> Float[Tensor, "B H T T"]:
    """a_ts = p(s|t) = Σ_l p(l|t) p(s|l,t)  (eq. 8): every row is non-negative and sums to 1.

    What is given says which form: q and k alone are Latte; with a `feature_map`, linear attention; with window_q and
    window_k (q then has L + 1 logits), Macchiato; window_q and window_k alone, window attention. Rows of masked
    tokens are 0, and so is the part of a row whose latent has seen no key.
    """
    _check(q, k, window_q, window_k, feature_map)
    queries = window_q if q is None else q
    assert queries is not None
    batch, tokens = queries.shape[:2]
    checks.check_causal(causal)
    checks.check_mask(mask, batch, tokens)
    checks.check_cu_seqlens(cu_seqlens, batch)
    checks.check_same_device(q=q, k=k, window_q=window_q, window_k=window_k, mask=mask, cu_seqlens=cu_seqlens)
    visible = _visible(queries, causal, mask, cu_seqlens)
    if mask is not None:  # what stands in masked positions may be anything
        hidden = ~mask[..., None, None]
        q, k, window_q, window_k = (
            None if x is None else x.masked_fill(hidden, 0.0) for x in (q, k, window_q, window_k)
        )

    local = None
    if window_q is not None and window_k is not None:
        checks.check_window(window)
        checks.check_scores(scale, softcap)
        local = _window_weights(window_q, window_k, visible, window, scale, softcap)
    if q is None or k is None:
        assert local is not None
        return local
    p, per_latent = _latent_parts(q, k, visible, feature_map)
    others = 0 if local is None else 1
    weights = p.new_zeros((*p.shape[:3], tokens)) if local is None else p[..., :1] * local
    for latent in range(p.shape[3] - others):
        weights = weights + p[..., others + latent, None] * per_latent(latent)
    return weights


def _check(q, k, window_q, window_k, feature_map) -> None:
    if (q is None) != (k is None):
        raise ValueError(f"{'q' if q is None else 'k'} is missing; give both q and k, or neither for window attention")
    if (window_q is None) != (window_k is None):
        raise ValueError(f"{'window_q' if window_q is None else 'window_k'} is missing; give both or neither")
    if q is None and window_q is None:
        raise ValueError("nothing is given; give q and k, window_q and window_k, or all four")
    if window_q is not None and feature_map is not None:
        raise ValueError(f"feature_map is {feature_map!r} with a window; linear attention has none, leave it out")
    if window_q is not None:
        checks.check_shape("window_q", window_q, "B T H E", (None,) * 4)
        checks.check_shape("window_k", window_k, "B T Hv E", (*window_q.shape[:2], None, window_q.shape[3]))
        checks.check_positive("window_q", window_q.shape[3], "E")
        checks.check_grouping(window_q.shape[2], window_k.shape[2], "window_q", "window_k")
    if q is not None:
        extra = 0 if window_q is None else 1
        shape = (None,) * 4 if window_q is None else (*window_q.shape[:3], None)
        checks.check_shape("q", q, "B T H L+1" if extra else "B T H L", shape)
        checks.check_positive("q", q.shape[3] - extra, "L")
        checks.check_shape("k", k, "B T H L", (*q.shape[:3], q.shape[3] - extra))


def _visible(queries: Tensor, causal: bool, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """[B T T] True where token t may see token s."""
    batch, tokens = queries.shape[:2]
    place = torch.arange(tokens, device=queries.device)
    visible = torch.ones((batch, tokens, tokens), dtype=torch.bool, device=queries.device)
    if causal:
        visible = visible & (place[:, None] >= place)
    if mask is not None:
        visible = visible & mask[:, :, None] & mask[:, None, :]
    if cu_seqlens is not None:
        bounds = torch.tensor(checks.sequence_bounds(cu_seqlens, tokens), device=queries.device)
        sequence = torch.searchsorted(bounds[1:].contiguous(), place, right=True)
        visible = visible & (sequence[:, None] == sequence)
    return visible


def _window_weights(q, k, visible, window: int, scale: float | None, softcap: float | None) -> Tensor:
    dtype = accumulation_dtype(q, k)
    k = k.to(dtype).repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    with checks.no_autocast(q.device):
        scores = torch.einsum("bthe,bshe->bhts", q.to(dtype), k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(q.shape[1], device=q.device)
    near = (place[:, None] - place).abs() < window
    return _masked_softmax(scores, (visible & near).unsqueeze(1))


def _latent_parts(q, k, visible, feature_map):
    """p(·|t) as [B H T ·], and a function that gives p(s|l,t) as [B H T T] for one latent."""
    dtype = accumulation_dtype(q, k)
    if feature_map is not None:
        q, k = log_features(feature_map, q, "q"), log_features(feature_map, k, "k")
        checks.check_positive("q", q.shape[3], "L")
    logits, keys = q.to(dtype).transpose(1, 2), k.to(dtype).transpose(1, 2)

    def scores(latent: int) -> Tensor:
        return keys[..., None, :, latent].masked_fill(~visible.unsqueeze(1), -torch.inf)

    if feature_map is not None:  # the undirected model weighs a latent by all that its keys gathered
        norms = [_logsumexp(scores(latent)) for latent in range(keys.shape[3])]
        logits = logits + torch.stack(norms, dim=-1)
    seeing = visible.any(dim=-1)[:, None, :, None]
    p = _masked_softmax(logits, seeing & (logits > -torch.inf))
    return p, lambda latent: _masked_softmax(scores(latent), scores(latent) > -torch.inf)


def _logsumexp(scores: Tensor) -> Tensor:
    """Over the last axis; −inf, with a gradient of 0 and not NaN, where every score is −inf."""
    empty = (scores == -torch.inf).all(dim=-1)
    return torch.logsumexp(scores.masked_fill(empty.unsqueeze(-1), 0.0), dim=-1).masked_fill(empty, -torch.inf)


def _masked_softmax(logits: Tensor, keep: Tensor) -> Tensor:
    """Softmax over what is kept; rows that keep nothing are 0."""
    kept = keep.any(dim=-1, keepdim=True)
    logits = logits.masked_fill(~keep, -torch.inf).masked_fill(~kept, 0.0)
    return torch.softmax(logits, dim=-1).masked_fill(~kept, 0.0)
