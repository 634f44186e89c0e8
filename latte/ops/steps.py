"""One more token, in place: the state's tensors stay where they are, as CUDA graphs want them.

Each has the same result as its operation on one token with that state; on a GPU each is one launch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from latte.ops import checks
from latte.ops.attention import latte_attention, macchiato_attention, window_attention
from latte.ops.convolution import short_conv
from latte.ops.recurrence import rglru
from latte.ops.rotary import apply_rotary
from latte.ops.rounding import round_to
from latte.ops.states import LatteState, MacchiatoState, WindowState, accumulation_dtype
from latte.ops.window_state import in_order

Rotary = tuple[Float[Tensor, "_ one half"], Float[Tensor, "_ one half"]]


class Place(NamedTuple):
    """What heads share besides validity: how many tokens came, and a counter that is 0 between calls.

    With `turn` the window is a ring, and the token takes the place of the oldest position; else all move up by one.
    """

    position: Int[Tensor, " B"]  # real tokens of each row
    arrivals: Int[Tensor, " B"]  # int32
    seen: Int[Tensor, ""]  # tokens, real or not
    turn: Int[Tensor, " B"] | None = None  # int32: where each row's oldest position is


class RGLRUWeights(NamedTuple):
    """A recurrence with its gates: block-diagonal products, whose weights are [block, in, out]."""

    a_weight: Float[Tensor, "N size size"]
    a_bias: Float[Tensor, " W"]
    x_weight: Float[Tensor, "N size size"]
    x_bias: Float[Tensor, " W"]
    a_param: Float[Tensor, " W"]


class ConvolutionWeights(NamedTuple):
    weight: Float[Tensor, "W K"]
    bias: Float[Tensor, " W"] | None


class LinearWeights(NamedTuple):
    weight: Float[Tensor, "N W"]
    bias: Float[Tensor, " N"] | None


def mixture_step_(
    q: Float[Tensor, "B parts H choices"] | None,
    k: Float[Tensor, "B parts H L"] | None,
    v: Float[Tensor, "B one Hv D"],
    window_q: Float[Tensor, "B one H E"] | None,
    window_k: Float[Tensor, "B one Hv E"] | None,
    state: LatteState | MacchiatoState | WindowState,
    place: Place,
    *,
    window: int | None = None,
    rotary: Rotary | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Bool[Tensor, "B one"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "B one H D"]:
    """`latte_attention`, `window_attention` or `macchiato_attention` of one token, by which parts are given.

    `rotary` (cos, sin) turns the window's query and key. The window is one longer than the state's positions, which
    are a ring if `place` has a turn; give `window` to have that checked. Logits of latents may come in parts that are
    to be added up, as `input_step_` leaves them.
    """
    if v.shape[1] != 1:
        raise ValueError(f"v has {v.shape[1]} tokens; a step takes 1: use the operation itself for more")
    checks.check_scores(scale, softcap)
    _check_state(q, k, v, window_k, state, window)
    latents: LatteState | None = state if isinstance(state, LatteState) else getattr(state, "latents", None)
    past = None if isinstance(state, LatteState) else WindowState(state.keys, state.values, state.valid)
    factor: float = scale if scale is not None else 1.0 if window_q is None else window_q.shape[-1] ** -0.5
    name = checks.backend_for(backend, v.device)
    if name != "triton":
        q, k = (x if x is None or x.shape[1] == 1 else x.sum(dim=1, keepdim=True) for x in (q, k))
    match name:
        case "triton":
            from latte.ops.triton.steps import mixture_step

            return mixture_step(
                q, k, v, window_q, window_k, *(rotary or (None, None)), mask, *(latents or (None, None)),
                *(past or (None, None, None)), *place, factor, softcap or 0.0,
            )  # fmt: skip
        case _:
            if rotary is not None and window_q is not None and window_k is not None:
                window_q, window_k = apply_rotary(window_q, *rotary), apply_rotary(window_k, *rotary)
            if name == "torch":
                from latte.ops.torch.steps import mixture_step

                dtype = accumulation_dtype(q, k, v, window_q, window_k)
                y = mixture_step(
                    q, k, v, window_q, window_k, latents, past, place.turn, scale=factor, softcap=softcap, mask=mask,
                    dtype=dtype,
                )  # fmt: skip
            else:
                if place.turn is not None and past is not None:
                    write(past, in_order(past, place.turn))
                    place.turn.zero_()
                y, after = _run(q, k, v, window_q, window_k, state, {"mask": mask, "backend": name}, factor, softcap)
                write(state, after)
            place.position.add_(1 if mask is None else mask[:, 0].to(place.position.dtype))
            place.seen.add_(1)
            return y


def _check_state(
    q: Tensor | None, k: Tensor | None, v: Tensor, window_k: Tensor | None, state: Any, window: int | None
) -> None:
    """The state must be of the parts given, and of their sizes: it is written to, by kernels that look no further."""
    checks.check_kind("state", state, LatteState if window_k is None else WindowState if q is None else MacchiatoState)
    batch, _, value_heads, width = v.shape
    if q is not None and k is not None:
        latents, name = (state, "state") if window_k is None else (state.latents, "state.latents")
        sizes = (batch, q.shape[2], k.shape[3], width)
        _check_sizes(f"{name}.log_norm", latents.log_norm, "B H L", sizes[:3])
        _check_sizes(f"{name}.mean", latents.mean, "B H L D", sizes)
    if window_k is not None:
        slots = state.valid.shape[1] if window is None else window - 1
        _check_sizes("state.valid", state.valid, "B w-1", (batch, slots))
        _check_sizes("state.keys", state.keys, "B w-1 Hv E", (batch, slots, value_heads, window_k.shape[3]))
        _check_sizes("state.values", state.values, "B w-1 Hv D", (batch, slots, value_heads, width))


def _check_memory(x: Tensor, taps: Tensor | None, state: Tensor) -> None:
    """The same of a mixer's state: the recurrence's, or that of a convolution with `taps`."""
    if taps is None:
        _check_sizes("state", state, "B W", (x.shape[0], x.shape[2]))
    else:
        _check_sizes("state", state, "B K-1 W", (x.shape[0], taps.shape[1] - 1, x.shape[2]))


def _check_sizes(name: str, tensor: Tensor, legend: str, sizes: tuple[int, ...]) -> None:
    if tensor.shape != sizes:  # a step is short, and so is this
        checks.check_sizes(name, tensor, legend, sizes)


def _run(q, k, v, window_q, window_k, state, options, scale, softcap) -> Any:
    """The operation whose step it is."""
    if isinstance(state, LatteState):
        return latte_attention(q, k, v, state=state, **options)
    options |= {"window": state.valid.shape[1] + 1, "scale": scale, "softcap": softcap, "state": state}
    if isinstance(state, WindowState):
        return window_attention(window_q, window_k, v, **options)
    return macchiato_attention(q, k, v, window_q, window_k, **options)


def rglru_step_(
    x: Float[Tensor, "B one W"],
    a_weight: Float[Tensor, "N size size"],
    a_bias: Float[Tensor, " W"],
    x_weight: Float[Tensor, "N size size"],
    x_bias: Float[Tensor, " W"],
    a_param: Float[Tensor, " W"],
    state: Float[Tensor, "B W"],
    *,
    mask: Bool[Tensor, "B one"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "B one W"]:
    """`rglru` of one token with its gates: block-diagonal products of x, whose weights are [block, in, out]."""
    match checks.backend_for(backend, x.device):
        case "triton":
            from latte.ops.triton.input_steps import rglru_step

            _check_memory(x, None, state)
            return rglru_step(x, a_weight, a_bias, x_weight, x_bias, a_param, mask, state)
        case name:
            blocks = x[:, 0].unflatten(1, (a_weight.shape[0], -1)).transpose(0, 1)  # [N B size]
            a_gate, x_gate = (
                (torch.bmm(blocks, weight).transpose(0, 1).flatten(1) + bias).unsqueeze(1)
                for weight, bias in ((a_weight, a_bias), (x_weight, x_bias))
            )
            y, after = rglru(x, a_gate, x_gate, a_param, mask=mask, state=state, backend=name)
            state.copy_(round_to(after, state.dtype))
            return y


def short_conv_step_(
    x: Float[Tensor, "B one W"],
    weight: Float[Tensor, "W K"],
    bias: Float[Tensor, " W"] | None,
    state: Float[Tensor, "B P W"],
    *,
    mask: Bool[Tensor, "B one"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "B one W"]:
    """`short_conv` of one token."""
    match checks.backend_for(backend, x.device):
        case "triton":
            from latte.ops.triton.input_steps import short_conv_step

            _check_memory(x, weight, state)
            return short_conv_step(x, weight, bias, mask, state)
        case name:
            y, after = short_conv(x, weight, bias, mask=mask, state=state, backend=name)
            state.copy_(round_to(after, state.dtype))
            return y


ROWS_AT_ONCE = 8  # up to which reading weights for each row costs less than launching one kernel after another


def input_step_(
    x: Float[Tensor, "B one W"],
    mixer: RGLRUWeights | ConvolutionWeights | None,
    state: Tensor | None,
    mixed: Sequence[LinearWeights],
    plain: Sequence[LinearWeights],
    *,
    mask: Bool[Tensor, "B one"] | None = None,
    backend: str = "auto",
) -> tuple[list[Tensor], list[Tensor]]:
    """One token through a mixer and the two linear layers `mixed` that read its output, and through the layers `plain`,
    at most three, that read x.

    Outputs of the former are [B P N], in P parts that are to be added up. A few rows on a GPU are one launch.
    """
    if checks.backend_for(backend, x.device) == "triton" and x.shape[0] <= ROWS_AT_ONCE and _alike(x, mixed, plain):
        from latte.ops.triton.input_steps import input_step

        if mixer is not None and state is not None:
            _check_memory(x, mixer.weight if isinstance(mixer, ConvolutionWeights) else None, state)
        gates = [part.contiguous() for part in mixer] if isinstance(mixer, RGLRUWeights) else []
        taps = [part for part in mixer if part is not None] if isinstance(mixer, ConvolutionWeights) else []
        weights = [[layer.weight for layer in layers] for layers in (mixed, plain)]
        biases = [[layer.bias for layer in layers if layer.bias is not None] for layers in (mixed, plain)]
        logits, y = input_step(x, gates, taps, state, weights[0], biases[0], weights[1], biases[1], mask)
        return (
            list(logits.split([len(weight) for weight in weights[0]], dim=2)),
            list(y.split([len(weight) for weight in weights[1]], dim=2)),
        )
    inside = x
    if isinstance(mixer, RGLRUWeights) and state is not None:
        inside = rglru_step_(x, *mixer, state, mask=mask, backend=backend)
    elif isinstance(mixer, ConvolutionWeights) and state is not None:
        inside = short_conv_step_(x, *mixer, state, mask=mask, backend=backend)
    return [F.linear(inside, *layer) for layer in mixed], [F.linear(x, *layer) for layer in plain]


def _alike(x: Tensor, *layers: Sequence[LinearWeights]) -> bool:
    """Whether all weights lie as the kernel reads them: of x's dtype and contiguous, all with a bias or all without."""
    every = [layer for group in layers for layer in group]
    dense = all(layer.weight.dtype == x.dtype and layer.weight.is_contiguous() for layer in every)
    return dense and len({layer.bias is None for layer in every}) == 1 and x.stride(2) == 1


def write(state: Any, after: Any) -> None:
    """Put a state, of tensors and states, into the tensors of another."""
    for old, new in zip(state, after, strict=True):
        if isinstance(old, Tensor):
            old.copy_(round_to(new, old.dtype))
        else:
            write(old, new)
