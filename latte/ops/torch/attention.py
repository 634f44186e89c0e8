"""`attend` in chunks, as custom operations with closed-form gradients.

They are opaque to torch.compile, which neither unrolls their loops nor breaks the graph at them.
"""

from typing import Any

import torch
from torch import Tensor

from latte.ops.arguments import DIFFERENTIABLE, MIXTURE, TENSORS
from latte.ops.first_derivatives import refuse
from latte.ops.states import LatteState, WindowState
from latte.ops.torch import causal as causal_mixture
from latte.ops.torch import whole as whole_mixture
from latte.ops.torch.packing import groups
from latte.ops.torch.walk import Inputs, Options

PER_TOKEN = ("q", "k", "v", "window_q", "window_k", "mask")


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
    keys, values, valid = (None, None, None) if past is None else past
    log_norm, mean = (None, None) if latents is None else latents
    y, log_norm, mean = mixture_forward(
        q, k, v, window_q, window_k, mask, log_norm, mean, keys, values, valid, cu_seqlens,
        window, scale, softcap, undirected, causal, dtype,
    )  # fmt: skip
    return y, LatteState(log_norm, mean)


@torch.library.custom_op(
    "latte::mixture_forward", mutates_args=(), schema=f"({MIXTURE}, ScalarType dtype) -> (Tensor, Tensor, Tensor)"
)
def mixture_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """y, log_norm, mean of the causal mixture; without latents the state is empty."""
    inputs, cu_seqlens, options = _unpack(arguments)
    v, dtype = inputs.v, options.dtype
    with torch.autocast(v.device.type, enabled=False):
        if cu_seqlens is None:
            return _mixture(inputs, options).forward(inputs, options)
        y, log_norm, mean = _empty_outputs(inputs, cu_seqlens, dtype)
        for group in groups(cu_seqlens, v.shape[1]):
            sequences = _gather(inputs, group)
            part = _mixture(sequences, options).forward(sequences, options)
            group.scatter(y, part[0])
            log_norm[group.rows], mean[group.rows] = part[1], part[2]
        return y, log_norm, mean


@mixture_forward.register_fake
def _(*arguments):
    inputs, cu_seqlens, options = _unpack(arguments)
    return _empty_outputs(inputs, cu_seqlens, options.dtype)


@torch.library.custom_op(
    "latte::mixture_backward", mutates_args=(),
    schema=f"(Tensor dy, Tensor? dlog_norm, Tensor? dmean, {MIXTURE}, ScalarType dtype) -> Tensor[]",
)  # fmt: skip
def mixture_backward(dy: Tensor, dlog_norm: Tensor | None, dmean: Tensor | None, *arguments: Any) -> list[Tensor]:
    """Gradients of DIFFERENTIABLE; an empty tensor stands for an absent input's."""
    inputs, cu_seqlens, options = _unpack(arguments)
    v = inputs.v
    with torch.autocast(v.device.type, enabled=False):
        if cu_seqlens is None:
            grads = _mixture(inputs, options).backward(inputs, options, dy, dlog_norm, dmean)
            return [grads[name] if name in grads else v.new_empty(0) for name in DIFFERENTIABLE]
        grads: dict[str, Tensor] = dict(zip(DIFFERENTIABLE, _empty_gradients(inputs), strict=True))
        for group in groups(cu_seqlens, v.shape[1]):
            sequences = _gather(inputs, group)
            into_state = (None if d is None else d[group.rows] for d in (dlog_norm, dmean))
            into_y = group.gather(dy).masked_fill(~group.real[..., None, None], 0.0)
            part = _mixture(sequences, options).backward(sequences, options, into_y, *into_state)
            for name, grad in part.items():
                if name in PER_TOKEN:
                    group.scatter(grads[name], grad)
                else:
                    grads[name][group.rows] = grad
        return list(grads.values())


@mixture_backward.register_fake
def _(dy, dlog_norm, dmean, *arguments):
    return _empty_gradients(_unpack(arguments)[0])


def _unpack(arguments: tuple[Any, ...]) -> tuple[Inputs, Tensor | None, Options]:
    """The arguments of MIXTURE and the dtype, as what they are."""
    tensors = len(TENSORS)
    return Inputs(*arguments[:tensors]), arguments[tensors], Options(*arguments[tensors + 1 :])


def _save(ctx, inputs, output) -> None:
    tensors = len(TENSORS) + 1  # and cu_seqlens
    ctx.save_for_backward(*inputs[:tensors])
    ctx.options = inputs[tensors:]


def _gradients(ctx, dy, dlog_norm, dmean):
    tensors = ctx.saved_tensors
    present = dict(zip(TENSORS, tensors, strict=False))
    if present["k"] is None:  # the state is empty then, and so are its gradients
        dlog_norm = dmean = None
    grads = dict(zip(DIFFERENTIABLE, mixture_backward(dy, dlog_norm, dmean, *tensors, *ctx.options), strict=True))
    by_input = [grads[name] if name in grads and present[name] is not None else None for name in TENSORS]
    return (*by_input, *(None for _ in range(1 + len(ctx.options))))


mixture_forward.register_autograd(_gradients, setup_context=_save)
mixture_backward.register_autograd(refuse)


def _mixture(inputs: Inputs, options: Options):
    """The module that walks: latents that look both ways have one state, else (or without tokens) it is carried."""
    carried = options.causal or inputs.k is None or inputs.v.shape[1] == 0
    return causal_mixture if carried else whole_mixture


def _gather(inputs: Inputs, group) -> Inputs:
    """The inputs of a group of packed sequences as a padded batch."""
    parts = {}
    for name in TENSORS:
        x = getattr(inputs, name)
        parts[name] = None if x is None else group.gather(x) if name in PER_TOKEN else x[group.rows]
    parts["mask"] = group.real if parts["mask"] is None else group.real & parts["mask"]
    return Inputs(**parts)


def _empty_outputs(inputs: Inputs, cu_seqlens: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    v, queries = inputs.v, inputs.q if inputs.q is not None else inputs.window_q
    assert queries is not None
    batch = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (batch, queries.shape[2], 0 if inputs.k is None else inputs.k.shape[3])
    y = v.new_empty((*queries.shape[:3], v.shape[3]))
    return y, v.new_empty(shape, dtype=dtype), v.new_empty((*shape, v.shape[3]), dtype=dtype)


def _empty_gradients(inputs: Inputs) -> list[Tensor]:
    present = [getattr(inputs, name) for name in DIFFERENTIABLE]
    return [inputs.v.new_empty(0) if x is None else x.new_empty(x.shape) for x in present]
