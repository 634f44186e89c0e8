"""What one more token goes through before attention, by one launch each, as custom operations that write to a state."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from latte.ops.triton.call import dense, launch, side_by_side
from latte.ops.triton.device import check_device, check_dtypes
from latte.ops.triton.kernels.input_steps import input_step_kernel, rglru_step_kernel, short_conv_step_kernel
from latte.ops.triton.replay import Cookbook, empty
from latte.ops.triton.steps import ELEMENTS, check_room, power, run_step

CHANNELS = 64  # of a program, where the mixer has no blocks of its own
OUTPUTS, COLUMNS = 16, 256  # of a program that has some outputs of a linear layer, and of its steps
LOGITS = 256  # rows of a logits' layer that a program holds


RGLRU_STEPS, CONVOLUTION_STEPS, INPUT_STEPS = Cookbook(), Cookbook(), Cookbook()


def rglru_step(*tensors: Tensor | None) -> Tensor:
    """y [B 1 W]; the arguments are those of `rglru_step_operation`."""
    return run_step(rglru_step_operation, _replay_rglru, tensors, tensors, tensors[-1:])


def _replay_rglru(*tensors: Tensor | None) -> Tensor:
    return RGLRU_STEPS.perform(tensors, (), lambda: [_rglru_step(*tensors)])[0]


@torch.library.custom_op("latte::rglru_step_triton", mutates_args=("state",))
def rglru_step_operation(
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
    return _replay_rglru(x, a_weight, a_bias, x_weight, x_bias, a_param, mask, state)


def _rglru_step(x, a_weight, a_bias, x_weight, x_bias, a_param, mask, state) -> Tensor:
    check_device(rglru_step_kernel, x.device)
    check_dtypes(x=x, a_weight=a_weight, x_weight=x_weight, a_param=a_param)
    check_room(state=state)
    blocks, size, _ = a_weight.shape
    x, y = side_by_side(x), empty(x.shape, x.dtype, x.device)
    wide = power(size)
    launch(
        rglru_step_kernel, x.shape[0] * blocks,
        x, *(z.contiguous() for z in (a_weight, a_bias, x_weight, x_bias, a_param)), mask, state, y,
        x.stride(0), 0 if mask is None else mask.stride(0),
        W=x.shape[2], SIZE=size, BS=wide, BI=min(wide, max(1, ELEMENTS // 2 // wide)), MASKED=mask is not None,
        num_warps=4,
    )  # fmt: skip
    return y


@rglru_step_operation.register_fake
def _(x, *_):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def short_conv_step(*tensors: Tensor | None) -> Tensor:
    """y [B 1 W]; the arguments are those of `short_conv_step_operation`."""
    return run_step(short_conv_step_operation, _replay_short_conv, tensors, tensors, tensors[-1:])


def _replay_short_conv(*tensors: Tensor | None) -> Tensor:
    return CONVOLUTION_STEPS.perform(tensors, (), lambda: [_short_conv_step(*tensors)])[0]


@torch.library.custom_op("latte::short_conv_step_triton", mutates_args=("state",))
def short_conv_step_operation(
    x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, state: Tensor
) -> Tensor:
    """y [B 1 W]; the last inputs in `state` move up by one."""
    return _replay_short_conv(x, weight, bias, mask, state)


def _short_conv_step(x, weight, bias, mask, state) -> Tensor:
    check_device(short_conv_step_kernel, x.device)
    check_dtypes(x=x, weight=weight, bias=bias)
    check_room(state=state)
    x, y = side_by_side(x), empty(x.shape, x.dtype, x.device)
    width, taps = weight.shape
    block = min(256, power(width))
    launch(
        short_conv_step_kernel, x.shape[0] * triton.cdiv(width, block),
        x, weight.contiguous(), dense(bias), mask, state, y, x.stride(0), 0 if mask is None else mask.stride(0),
        W=width, K=taps, BLOCK=block, BIAS=bias is not None, MASKED=mask is not None, num_warps=2,
    )  # fmt: skip
    return y


@short_conv_step_operation.register_fake
def _(x, *_):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def input_step(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Logits and y; the arguments are those of `input_step_operation`."""
    tensors, _ = flatten(arguments)
    return run_step(input_step_operation, _replay_inputs, arguments, tensors, arguments[3:4])  # which is the state


def _replay_inputs(*arguments: Any) -> tuple[Tensor, Tensor]:
    logits, y = INPUT_STEPS.perform(*flatten(arguments), lambda: list(_input_step(*arguments)))
    return logits, y


def flatten(arguments: tuple) -> tuple[list[Tensor | None], tuple[int, ...]]:
    """The tensors of some arguments, and how many each group of them has; −1 where there is no group."""
    groups = [x if isinstance(x, (list, tuple)) else None for x in arguments]
    sizes = tuple(-1 if group is None else len(group) for group in groups)
    return [x for one, group in zip(arguments, groups, strict=True) for x in ([one] if group is None else group)], sizes


@torch.library.custom_op("latte::input_step_triton", mutates_args=("state",))
def input_step_operation(
    x: Tensor,
    gates: Sequence[Tensor],
    taps: Sequence[Tensor],
    state: Tensor | None,
    mixed_weights: Sequence[Tensor],
    mixed_biases: Sequence[Tensor],
    plain_weights: Sequence[Tensor],
    plain_biases: Sequence[Tensor],
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Parts [B P N] of the outputs of two layers that read the mixer's output, and those [B 1 M] of up to three others.

    `gates` are the RG-LRU's weights, `taps` the convolution's and perhaps its bias: one of them, or neither, is there.
    """
    return _replay_inputs(x, gates, taps, state, mixed_weights, mixed_biases, plain_weights, plain_biases, mask)


def _input_step(
    x, gates, taps, state, mixed_weights, mixed_biases, plain_weights, plain_biases, mask
) -> tuple[Tensor, Tensor]:
    check_device(input_step_kernel, x.device)
    check_dtypes(x=x)
    check_room(state=state)
    batch, _, width = x.shape
    size = gates[0].shape[1] if gates else CHANNELS
    blocks = triton.cdiv(width, size)
    queries, keys = (weight.shape[0] for weight in mixed_weights)
    outputs = [weight.shape[0] for weight in plain_weights] + [0] * (3 - len(plain_weights))
    logits = empty((batch, blocks, queries + keys), torch.float32, x.device)
    y = empty((batch, 1, sum(outputs)), x.dtype, x.device)
    wide = max(16, power(size))
    options: dict[str, Any] = {
        "RECURRENT": bool(gates), "TAPS": taps[0].shape[1] if taps else 0, "TAPS_BIAS": len(taps) > 1,
        "MASKED": mask is not None, "BIAS": bool(mixed_biases), "W": width, "SIZE": size, "BS": wide,
        "BI": min(wide, max(1, ELEMENTS // 2 // wide)), "NQ": queries, "BQ": min(LOGITS, power(queries)),
        "NK": keys, "BK": min(LOGITS, power(keys)), "N0": outputs[0], "N1": outputs[1], "N2": outputs[2],
        "BR": OUTPUTS, "BC": min(COLUMNS, power(width)), "num_warps": 8,
    }  # fmt: skip
    programs = batch * (blocks + sum(triton.cdiv(n, OUTPUTS) for n in outputs))
    launch(
        input_step_kernel, programs, x, mask, state, *(gates or [None] * 5), *padded(list(map(dense, taps)), 2),
        mixed_weights[0], padded(mixed_biases, 2)[0], mixed_weights[1], padded(mixed_biases, 2)[1], logits,
        *padded(plain_weights, 3), *padded(plain_biases, 3), y,
        x.stride(0), 0 if mask is None else mask.stride(0), **options,
    )  # fmt: skip
    return logits, y


def padded(tensors: Sequence[Tensor | None], count: int) -> list[Tensor | None]:
    return [*tensors, *[None] * (count - len(tensors))]


@input_step_operation.register_fake
def _(x, gates, taps, state, mixed_weights, mixed_biases, plain_weights, *_):
    blocks = triton.cdiv(x.shape[2], gates[0].shape[1] if gates else CHANNELS)
    logits = x.new_empty((x.shape[0], blocks, sum(w.shape[0] for w in mixed_weights)), dtype=torch.float32)
    return logits, x.new_empty((x.shape[0], 1, sum(w.shape[0] for w in plain_weights)))
