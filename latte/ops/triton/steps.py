"""One more token: how every step is run; and attention by one launch, an operation that writes to its state."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.graph import increment_version

from latte.ops.known import needs_gradients
from latte.ops.triton.call import launch
from latte.ops.triton.device import check_device, check_dtypes, check_softcap
from latte.ops.triton.kernels.steps import mixture_step_kernel
from latte.ops.triton.replay import Cookbook, empty

ELEMENTS = 16384  # of the widest tensor a program holds
STEPS = Cookbook()
TENSORS = 17  # arguments of the mixture before the others, of which those from STATE on are written to
STATE = 8
MUTATED = ("log_norm", "mean", "keys", "values", "valid", "position", "arrivals", "seen", "turn")


def power(size: int) -> int:
    return triton.next_power_of_2(max(size, 1))


def fitting(size: int, each: int) -> int:
    """How many of `size` rows of `each` elements a program takes at a time, a power of two."""
    return max(1, min(power(size), ELEMENTS // each))


def mixture_step(*arguments: Any) -> Tensor:
    """y [B 1 H D] of one token for every row; the arguments are those of `mixture_step_operation`."""
    tensors = arguments[:TENSORS]
    return run_step(mixture_step_operation, _replay, arguments, tensors, tensors[STATE:])


def _replay(*arguments: Any) -> Tensor:
    """`_mixture_step`, replayed where such a step was seen before."""
    return STEPS.perform(arguments[:TENSORS], arguments[TENSORS:], lambda: [_mixture_step(*arguments)])[0]


def run_step(
    operation: Callable[..., Any], plain: Callable[..., Any], arguments: Sequence[Any],
    tensors: Sequence[Tensor | None], written: Sequence[Tensor | None],
) -> Any:  # fmt: skip
    """A step as an operation of PyTorch's, for compilers and to refuse gradients; otherwise around all that."""
    if torch.compiler.is_compiling() or needs_gradients(tensors):
        return operation(*arguments)
    if not torch.is_inference_mode_enabled():  # tell autograd, as an operation does
        increment_version([x for x in written if x is not None])
    return plain(*arguments)


def check_room(**written: Tensor | None) -> None:
    """Kernels write to a state as if its elements lay side by side."""
    for name, x in written.items():
        if x is not None and not x.is_contiguous():
            raise ValueError(f"{name} has strides {x.stride()}; a step writes to it in place: give it contiguous()")


@torch.library.custom_op("latte::mixture_step_triton", mutates_args=MUTATED)
def mixture_step_operation(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    window_q: Tensor | None,
    window_k: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    mask: Tensor | None,
    log_norm: Tensor | None,
    mean: Tensor | None,
    keys: Tensor | None,
    values: Tensor | None,
    valid: Tensor | None,
    position: Tensor,
    arrivals: Tensor,
    seen: Tensor,
    turn: Tensor | None,
    scale: float,
    softcap: float,
) -> Tensor:
    """y [B 1 H D] of one token for every row; the state's tensors are advanced in place.

    The logits q and k [B P H ·] may come in P parts, which are added up here.
    """
    return _replay(
        q, k, v, window_q, window_k, cos, sin, mask, log_norm, mean, keys, values, valid, position, arrivals, seen,
        turn, scale, softcap,
    )  # fmt: skip


def _mixture_step(
    q, k, v, window_q, window_k, cos, sin, mask, log_norm, mean, keys, values, valid, position, arrivals, seen, turn,
    scale, softcap,
) -> Tensor:  # fmt: skip
    check_device(mixture_step_kernel, v.device)
    check_dtypes(q=q, k=k, v=v, window_q=window_q, window_k=window_k)
    check_softcap(softcap)
    written = (log_norm, mean, keys, values, valid, position, arrivals, seen, turn)
    check_room(**dict(zip(MUTATED, written, strict=True)))
    batch, _, value_heads, width = v.shape
    heads = (q if q is not None else window_q).shape[2]
    key_width = 0 if window_q is None else window_q.shape[3]
    slots = 0 if valid is None else valid.shape[1]
    latents = 0 if k is None else k.shape[3]
    groups = heads // value_heads
    group, wide = power(groups), max(16, power(max(width, key_width)))
    y = empty((batch, 1, heads, width), v.dtype, v.device)
    options: dict[str, Any] = {
        "PARTS": 1 if q is None else q.shape[1],
        "HEADS": heads, "GROUPS": groups, "BG": group, "NUM": latents, "BL": fitting(latents, group * wide),
        "WIDTH": width, "BD": max(16, power(width)), "KEY_WIDTH": max(key_width, 1), "BE": max(16, power(key_width)),
        "SLOTS": slots, "BP": max(16, fitting(slots, wide)), "VALID": power(slots), "LATENTS": q is not None,
        "WINDOW": window_q is not None, "RING": turn is not None, "ROTARY": cos is not None, "MASKED": mask is not None,
        "CAPPED": softcap > 0,
        "PRECISION": "tf32x3" if v.dtype == torch.float32 else "tf32", "ROWS": max(16, group), "num_warps": 8,
    }  # fmt: skip
    strides = [step for x in (q, k) for step in ((0, 0, 0) if x is None else x.stride()[:3])]
    strides += [step for x in (v, window_q, window_k) for step in ((0, 0) if x is None else x.stride()[::2])]
    launch(
        mixture_step_kernel, batch * value_heads,
        *(_rows(x) for x in (q, k, v, window_q, window_k)), cos, sin, mask, log_norm, mean, keys, values, valid,
        position, arrivals, seen, turn, y, *strides, 0 if cos is None or cos.shape[0] == 1 else cos.stride(0),
        0 if mask is None else mask.stride(0), float(scale), float(softcap or 1.0), **options,
    )  # fmt: skip
    return y


def _rows(x: Tensor | None) -> Tensor | None:
    if x is not None and x.stride(3) != 1:
        raise ValueError(f"a tensor has strides {x.stride()}; its last axis must lie side by side: call contiguous()")
    return x


@mixture_step_operation.register_fake
def _(q, k, v, window_q, window_k, *_):
    heads = (q if q is not None else window_q).shape[2]
    return v.new_empty((v.shape[0], 1, heads, v.shape[3]))
