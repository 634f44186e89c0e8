"""The attention operations. Each checks its input, picks a backend and names the result.

Every form is a mixture over latents, so every backend has one function, `attend`, and the forms differ only in
which parts they hand to it: latents (Latte), a window (sliding-window attention) or both (Macchiato). Linear
attention is the undirected model: the same state, with latents chosen by p(l|t) ∝ φ(q_t)_l Σ_s φ(k_s)_l.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from latte.ops import checks
from latte.ops.features import FeatureMap, log_features
from latte.ops.known import run_known, sign_call
from latte.ops.states import (
    LatteOutput,
    LatteState,
    LinearOutput,
    MacchiatoOutput,
    MacchiatoState,
    WindowOutput,
    WindowState,
    accumulation_dtype,
)
from latte.ops.window_state import advance_window, room_for_tail


def latte_attention(
    q: Float[Tensor, "B T H L"],
    k: Float[Tensor, "B T H L"],
    v: Float[Tensor, "B T Hv D"],
    *,
    causal: bool = True,
    mask: Bool[Tensor, "B T"] | None = None,
    state: LatteState | None = None,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    backend: str = "auto",
) -> LatteOutput:
    """y_t = Σ_l p(l|t) Σ_{s≤t} p(s|l,t) v_s, with p(l|t) = softmax_l(q_t) and p(s|l,t) ∝ exp(k_s,l)  (eqs. 6-14).

    `mask` is True at real tokens; masked positions give y = 0 and influence nothing. `state` is what came before;
    with `causal=False` every token also sees all that follows in this call. Packed sequences (`cu_seqlens`, B = 1)
    have one state each. A latent that has seen no key contributes 0. y has v's dtype.
    """
    signature = None
    if mask is None and state is None and cu_seqlens is None and checks.may_replay(backend, v):
        signature = sign_call("latte", (q, k, v), (causal,))
        known = run_known(signature, (q, k, v))
        if known is not None:
            return known
    _check_latents(q, k, v, extra=0)
    sequences = _check_common(causal, mask, cu_seqlens, q=q, k=k, v=v)
    _check_latte_state(state, (sequences, q.shape[2], k.shape[3], v.shape[3]), v)
    y, latents = _attend(backend, q, k, v, causal=causal, mask=mask, latents=state, cu_seqlens=cu_seqlens)
    if signature is not None:
        _remember(signature, (q, k, v), None, (1, 1.0, 0.0, False, causal), _latte_output)
    return LatteOutput(y, latents)


def _latte_output(_: Sequence[Any], y: Tensor, latents: LatteState, __: WindowState | None) -> LatteOutput:
    return LatteOutput(y, latents)


def linear_attention(
    q: Float[Tensor, "B T H L"],
    k: Float[Tensor, "B T H L"],
    v: Float[Tensor, "B T Hv D"],
    *,
    causal: bool = True,
    feature_map: FeatureMap = "elu+1",
    mask: Bool[Tensor, "B T"] | None = None,
    state: LatteState | None = None,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    backend: str = "auto",
) -> LinearOutput:
    """y_t = φ(q_t)ᵀ Σ_{s≤t} φ(k_s) v_sᵀ / φ(q_t)ᵀ Σ_{s≤t} φ(k_s), the undirected model  (eqs. 4-5).

    φ is "elu+1", "exp", "relu" or any callable on tensors that returns non-negative features of any number; values
    that are not positive count as 0. Features are kept as logarithms, so φ = exp cannot overflow, and the state is
    Latte's: (log Σ φ(k_s), weighted mean of values). Where φ(q_t) meets no key at all, y_t = 0.
    """
    checks.check_shape("v", v, "B T Hv D", (None,) * 4)
    checks.check_shape("q", q, "B T H L", (v.shape[0], v.shape[1], None, None))
    checks.check_shape("k", k, "B T H L", q.shape)
    sequences = _check_common(causal, mask, cu_seqlens, q=q, k=k, v=v)
    if mask is not None:  # what stands in masked positions may be anything, and features have gradients of their own
        q, k = (x.masked_fill(~mask[..., None, None], 0.0) for x in (q, k))
    log_q, log_k = log_features(feature_map, q, "q"), log_features(feature_map, k, "k")
    _check_latents(log_q, log_k, v, extra=0)
    _check_latte_state(state, (sequences, q.shape[2], log_k.shape[3], v.shape[3]), v)
    y, latents = _attend(
        backend, log_q, log_k, v, undirected=True, causal=causal, mask=mask, latents=state, cu_seqlens=cu_seqlens
    )
    return LinearOutput(y, latents)


def window_attention(
    q: Float[Tensor, "B T H E"],
    k: Float[Tensor, "B T Hv E"],
    v: Float[Tensor, "B T Hv D"],
    *,
    window: int = 128,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    mask: Bool[Tensor, "B T"] | None = None,
    state: WindowState | None = None,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    backend: str = "auto",
) -> WindowOutput:
    """y_t = Σ_s softmax_s(cap(scale · q_t·k_s)) v_s over the last `window` positions, t itself included  (eq. 17).

    The paper's w counts the positions before t; ours, like FlashAttention's and Transformers', counts t too. With
    `causal=False` the window reaches `window` − 1 positions to both sides. `scale` defaults to E ** -0.5; `softcap`
    bounds scores as softcap · tanh(score / softcap). Masked positions keep their place in the window.
    """
    signature = None
    tensors = (None, None, v, q, k)
    if mask is None and state is None and cu_seqlens is None and checks.may_replay(backend, v):
        signature = sign_call("window", tensors, (window, scale, softcap, causal))
        known = run_known(signature, tensors)
        if known is not None:
            return known
    _check_window_parts("q", q, "k", k, v, window, scale, softcap)
    sequences = _check_common(causal, mask, cu_seqlens, q=q, k=k, v=v)
    _check_window_state(state, sequences, k, v, window)
    y, _ = _attend(
        backend, None, None, v, q, k, window=window, scale=scale, softcap=softcap, causal=causal, mask=mask,
        past=state, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    if signature is not None:
        options = (window, q.shape[-1] ** -0.5 if scale is None else scale, softcap or 0.0, False, causal)
        _remember(signature, tensors, None, options, partial(_window_output, window))
    return WindowOutput(y, advance_window(state, k, v, window, mask, cu_seqlens, backend))


def _window_output(window: int, given: Sequence[Any], y: Tensor, _: LatteState, __: WindowState | None) -> WindowOutput:
    return WindowOutput(y, _whole_window(given, window))


def macchiato_attention(
    q: Float[Tensor, "B T H choices"],
    k: Float[Tensor, "B T H L"],
    v: Float[Tensor, "B T Hv D"],
    window_q: Float[Tensor, "B T H E"],
    window_k: Float[Tensor, "B T Hv E"],
    *,
    window: int = 128,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    mask: Bool[Tensor, "B T"] | None = None,
    state: MacchiatoState | None = None,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    backend: str = "auto",
) -> MacchiatoOutput:
    """y_t = p(0|t) · window_attention_t + Σ_{l≥1} p(l|t) Σ_{s≤t} p(s|l,t) v_s, p(·|t) = softmax(q_t)  (eqs. 15-17).

    q holds L + 1 logits per head: index 0 is the window, 1..L are the latents whose keys k holds. Both paths share
    v. Window, scale and softcap are `window_attention`'s; masks, packing and the latents' state `latte_attention`'s.
    """
    signature = None
    if mask is None and state is None and cu_seqlens is None and checks.may_replay(backend, v):
        tensors = (q, k, v, window_q, window_k)
        signature = sign_call("macchiato", tensors, (window, scale, softcap, causal))
        known = run_known(signature, tensors)
        if known is not None:
            return known
    _check_latents(q, k, v, extra=1)
    _check_window_parts("window_q", window_q, "window_k", window_k, v, window, scale, softcap)
    checks.check_sizes("window_q", window_q, "B T H E", (*q.shape[:3], None))
    sequences = _check_common(causal, mask, cu_seqlens, q=q, k=k, v=v, window_q=window_q, window_k=window_k)
    past = None
    if state is not None:
        checks.check_kind("state", state, MacchiatoState)
        checks.check_kind("state.latents", state.latents, LatteState)
        past = WindowState(state.keys, state.values, state.valid)
        _check_latte_state(state.latents, (sequences, q.shape[2], k.shape[3], v.shape[3]), v, "state.latents")
        _check_window_state(past, sequences, window_k, v, window)
    recent = None
    if causal and mask is None and past is None and cu_seqlens is None:
        recent = room_for_tail(window_k, v, window, (q, k, v, window_q, window_k), backend)
    y, latents = _attend(
        backend, q, k, v, window_q, window_k, window=window, scale=scale, softcap=softcap, causal=causal, mask=mask,
        latents=None if state is None else state.latents, past=past, cu_seqlens=cu_seqlens, tail=recent,
    )  # fmt: skip
    if signature is not None:
        options = (window, window_q.shape[-1] ** -0.5 if scale is None else scale, softcap or 0.0, False, causal)
        tensors = (q, k, v, window_q, window_k)
        _remember(signature, tensors, recent, options, partial(_macchiato_output, window))
    if recent is None:
        recent = advance_window(past, window_k, v, window, mask, cu_seqlens, backend)
    return MacchiatoOutput(y, MacchiatoState(latents, *recent))


def _macchiato_output(
    window: int, given: Sequence[Any], y: Tensor, latents: LatteState, recent: WindowState | None
) -> MacchiatoOutput:
    return MacchiatoOutput(y, MacchiatoState(latents, *(recent or _whole_window(given, window))))


def _whole_window(given: Sequence[Any], window: int) -> WindowState:
    """The window's state after a plain call of the kernels."""
    _, _, v, _, window_k = given
    return advance_window(None, window_k, v, window, None, None, "triton")


def _remember(signature: tuple, *call: Any) -> None:
    from latte.ops.triton.attention import remember_call

    remember_call(signature, *call)


def _attend(
    backend: str,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    window_q: Tensor | None = None,
    window_k: Tensor | None = None,
    *,
    window: int = 1,
    scale: float | None = None,
    softcap: float | None = None,
    undirected: bool = False,
    causal: bool,
    mask: Tensor | None,
    latents: LatteState | None = None,
    past: WindowState | None = None,
    cu_seqlens: Tensor | None,
    tail: WindowState | None = None,
) -> tuple[Tensor, LatteState]:
    name = checks.backend_for(backend, v.device)
    checks.refuse_tangents(name, q, k, v, window_q, window_k, *(latents or ()), *(past or ()))
    match name:
        case "reference":
            from latte.ops.reference.attention import attend
        case "torch":
            from latte.ops.torch.attention import attend
        case _:
            from latte.ops.triton.attention import attend
    more = {} if tail is None else {"tail": tail}  # which only Triton's kernels fill
    if scale is None and window_q is not None:
        scale = window_q.shape[-1] ** -0.5
    with checks.no_autocast(v.device):
        return attend(
            q, k, v, window_q, window_k, window=window, scale=1.0 if scale is None else scale, softcap=softcap or 0.0,
            undirected=undirected, causal=causal, mask=mask, latents=latents, past=past, cu_seqlens=cu_seqlens,
            dtype=accumulation_dtype(q, k, v, window_q, window_k), **more,
        )  # fmt: skip


def _check_latents(q: Tensor, k: Tensor, v: Tensor, extra: int) -> None:
    legend = "B T H L+1" if extra else "B T H L"
    checks.check_shape("v", v, "B T Hv D", (None,) * 4)
    checks.check_positive("v", v.shape[3], "D")
    checks.check_shape("q", q, legend, (v.shape[0], v.shape[1], None, None))
    checks.check_positive("q", q.shape[3] - extra, "L")
    checks.check_shape("k", k, "B T H L", (*q.shape[:3], q.shape[3] - extra))
    checks.check_grouping(q.shape[2], v.shape[2], "q")


def _check_window_parts(
    q_name: str, q: Tensor, k_name: str, k: Tensor, v: Tensor, window: int, scale: float | None, softcap: float | None
) -> None:
    checks.check_window(window)
    checks.check_scores(scale, softcap)
    checks.check_shape("v", v, "B T Hv D", (None,) * 4)
    checks.check_positive("v", v.shape[3], "D")
    checks.check_shape(q_name, q, "B T H E", (v.shape[0], v.shape[1], None, None))
    checks.check_positive(q_name, q.shape[3], "E")
    checks.check_shape(k_name, k, "B T Hv E", (*v.shape[:3], q.shape[3]))
    checks.check_grouping(q.shape[2], v.shape[2], q_name)


def _check_common(causal: bool, mask: Tensor | None, cu_seqlens: Tensor | None, **tensors: Tensor) -> int:
    """Direction, mask, packing and devices; returns the number of states."""
    checks.check_causal(causal)
    batch, tokens = tensors["v"].shape[:2]
    checks.check_mask(mask, batch, tokens)
    sequences = checks.check_cu_seqlens(cu_seqlens, batch)
    checks.check_same_device(**tensors, mask=mask, cu_seqlens=cu_seqlens)
    return sequences


def _check_latte_state(
    state: LatteState | None, sizes: tuple[int, int, int, int], v: Tensor, name: str = "state"
) -> None:
    if state is None:
        return
    checks.check_kind(name, state, LatteState)
    checks.check_shape(f"{name}.log_norm", state.log_norm, "B H L", sizes[:3])
    checks.check_shape(f"{name}.mean", state.mean, "B H L D", sizes)
    checks.check_same_device(v=v, **{f"{name}.{part}": tensor for part, tensor in state._asdict().items()})


def _check_window_state(state: WindowState | None, sequences: int, k: Tensor, v: Tensor, window: int) -> None:
    if state is None:
        return
    checks.check_kind("state", state, WindowState)
    checks.check_shape("state.keys", state.keys, "B w-1 Hv E", (sequences, window - 1, *k.shape[2:]))
    checks.check_shape("state.values", state.values, "B w-1 Hv D", (sequences, window - 1, *v.shape[2:]))
    checks.check_mask(state.valid, sequences, window - 1, "state.valid")
    checks.check_same_device(v=v, **{f"state.{name}": part for name, part in state._asdict().items()})
