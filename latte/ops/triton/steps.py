"""One more token by one launch each, as custom operations that write to the state they are given."""

from typing import Any

import torch
import triton
from torch import Tensor

from latte.ops.triton.call import launch
from latte.ops.triton.device import check_device, check_dtypes
from latte.ops.triton.kernels.steps import mixture_step_kernel, rglru_step_kernel, short_conv_step_kernel

ELEMENTS = 16384  # of the widest tensor a program holds
MUTATED = ("log_norm", "mean", "keys", "values", "valid", "position", "arrivals", "seen")


def _power(size: int) -> int:
    return triton.next_power_of_2(max(size, 1))


def _fitting(size: int, each: int) -> int:
    """How many of `size` rows of `each` elements a program takes at a time, a power of two."""
    return max(1, min(_power(size), ELEMENTS // each))


@torch.library.custom_op("latte::mixture_step_triton", mutates_args=MUTATED)
def mixture_step(
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
    scale: float,
    softcap: float,
) -> Tensor:
    """y [B 1 H D] of one token for every row; the state's tensors are advanced in place."""
    check_device(mixture_step_kernel, v.device)
    check_dtypes(q=q, k=k, v=v, window_q=window_q, window_k=window_k)
    batch, _, value_heads, width = v.shape
    heads = (q if q is not None else window_q).shape[2]  # pyright: ignore[reportOptionalMemberAccess]
    key_width = 0 if window_q is None else window_q.shape[3]
    slots = 0 if valid is None else valid.shape[1]
    latents = 0 if k is None else k.shape[3]
    groups = heads // value_heads
    group, wide = _power(groups), max(16, _power(max(width, key_width)))
    y = torch.empty((batch, 1, heads, width), dtype=v.dtype, device=v.device)
    options: dict[str, Any] = {
        "HEADS": heads, "GROUPS": groups, "BG": group, "NUM": latents, "BL": _fitting(latents, group * wide),
        "WIDTH": width, "BD": max(16, _power(width)), "KEY_WIDTH": max(key_width, 1), "BE": max(16, _power(key_width)),
        "SLOTS": slots, "BP": max(16, _fitting(slots, wide)), "VALID": _power(slots), "LATENTS": q is not None,
        "WINDOW": window_q is not None, "ROTARY": cos is not None, "MASKED": mask is not None, "CAPPED": softcap > 0,
        "PRECISION": "tf32x3" if v.dtype == torch.float32 else "tf32", "ROWS": max(16, group), "num_warps": 8,
    }  # fmt: skip
    strides = [step for x in (q, k, v, window_q, window_k) for step in ((0, 0) if x is None else x.stride()[::2])]
    launch(
        mixture_step_kernel, batch * value_heads,
        *(_rows(x) for x in (q, k, v, window_q, window_k)), cos, sin, mask, log_norm, mean, keys, values, valid,
        position, arrivals, seen, y, *strides, 0 if cos is None or cos.shape[0] == 1 else cos.stride(0),
        0 if mask is None else mask.stride(0), scale, softcap or 1.0, **options,
    )  # fmt: skip
    return y


def _rows(x: Tensor | None) -> Tensor | None:
    if x is not None and x.stride(3) != 1:
        raise ValueError(f"a tensor has strides {x.stride()}; its last axis must lie side by side: call contiguous()")
    return x


@mixture_step.register_fake
def _(q, k, v, window_q, window_k, *_):
    heads = (q if q is not None else window_q).shape[2]
    return v.new_empty((v.shape[0], 1, heads, v.shape[3]))


@torch.library.custom_op("latte::rglru_step_triton", mutates_args=("state",))
def rglru_step(
    x: Tensor,
    a_weight: Tensor,
    a_bias: Tensor,
    x_weight: Tensor,
    x_bias: Tensor,
    a_param: Tensor,
    mask: Tensor | None,
    state: Tensor,
) -> Tensor:
    """y [B 1 W]; h in `state` is advanced in place."""
    check_device(rglru_step_kernel, x.device)
    check_dtypes(x=x, a_weight=a_weight, x_weight=x_weight, a_param=a_param)
    blocks, size, _ = a_weight.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    wide = _power(size)
    launch(
        rglru_step_kernel, x.shape[0] * blocks,
        x, a_weight.contiguous(), a_bias, x_weight.contiguous(), x_bias, a_param, mask, state, y,
        x.stride(0), 0 if mask is None else mask.stride(0),
        W=x.shape[2], SIZE=size, BS=wide, BI=min(wide, max(1, ELEMENTS // 2 // wide)), MASKED=mask is not None,
        num_warps=4,
    )  # fmt: skip
    return y


@rglru_step.register_fake
def _(x, *_):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("latte::short_conv_step_triton", mutates_args=("state",))
def short_conv_step(x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, state: Tensor) -> Tensor:
    """y [B 1 W]; the last inputs in `state` move up by one."""
    check_device(short_conv_step_kernel, x.device)
    check_dtypes(x=x, weight=weight, bias=bias)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    width, taps = weight.shape
    block = min(256, _power(width))
    launch(
        short_conv_step_kernel, x.shape[0] * triton.cdiv(width, block),
        x, weight.contiguous(), bias, mask, state, y, x.stride(0), 0 if mask is None else mask.stride(0),
        W=width, K=taps, BLOCK=block, BIAS=bias is not None, MASKED=mask is not None, num_warps=2,
    )  # fmt: skip
    return y


@short_conv_step.register_fake
def _(x, *_):
    return torch.empty_like(x, memory_format=torch.contiguous_format)
