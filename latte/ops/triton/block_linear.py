"""Block-diagonal products by Triton kernels: about as fast as memory reads x and takes y."""

from typing import Any

import torch
import triton
from torch import Tensor

from latte.ops.first_derivatives import refuse
from latte.ops.triton.call import launch
from latte.ops.triton.device import check_device, check_dtypes
from latte.ops.triton.kernels.block_linear import (
    forward_kernel,
    gradient_kernel,
    input_grad_kernel,
    weight_grad_kernel,
)
from latte.ops.triton.replay import empty
from latte.ops.triton.sums import add_parts

TILE, PARTS = 64, 16  # of tokens
LARGEST = 64  # rows or columns of a block that a program takes at once


def multiply(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Both y [B T N·O] of x [B T N·I] and two matrices of blocks [2 N I O]."""
    check_device(forward_kernel, x.device)
    check_dtypes(x=x, weight=weight, bias=bias)
    return block_linear_forward(x, weight, bias)


def _options(blocks: int, size: int, out: int, dtype: torch.dtype) -> dict[str, Any]:
    """What the kernels are compiled for; `dtype` is that of the products' factors."""
    exact = dtype == torch.float32
    return {
        "N": blocks, "I": size, "O": out, "BT": TILE, "BI": _piece(size), "BO": _piece(out),
        "PRECISION": "tf32x3" if exact else "tf32", "num_warps": 4,
    }  # fmt: skip


def _piece(size: int) -> int:
    """A power of two that the matrix units take; Triton 3.6 reads wrongly for right factors of 16 columns."""
    return min(LARGEST, max(32, triton.next_power_of_2(size)))


def even_rows(x: Tensor) -> Tensor:
    """x [… T W] with rows at equal distances."""
    even = x.stride(-1) == 1 and (x.shape[-3] == 1 or x.stride(-3) == x.shape[-2] * x.stride(-2))
    return x if even else side_by_side_rows(x)


def side_by_side_rows(x: Tensor) -> Tensor:
    """x [… T W] with rows next to each other, so that the stride of T says so even where T is 1."""
    x = x.contiguous()
    return x if x.stride(-2) == x.shape[-1] else x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("latte::block_linear_forward", mutates_args=())
def block_linear_forward(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Both y [B T N·O]."""
    groups, blocks, size, out = weight.shape
    batch, length, _ = x.shape
    y, other = (torch.empty((batch, length, blocks * out), dtype=x.dtype, device=x.device) for _ in range(2))
    if y.numel() == 0:
        return y, other
    x, weight, options = even_rows(x), weight.to(x.dtype).contiguous(), _options(blocks, size, out, x.dtype)
    grid = (triton.cdiv(batch * length, options["BT"]), blocks, triton.cdiv(out, options["BO"]))
    launch(
        forward_kernel, grid, x, weight, bias.contiguous(), y, batch * length, x.stride(1), y.stride(1),
        _distance(y, other), GROUPS=groups, **options,
    )  # fmt: skip
    return y, other


def _distance(first: Tensor, second: Tensor) -> int:
    """How many elements lie from the start of one tensor to that of another: where the kernels find the second."""
    return (second.data_ptr() - first.data_ptr()) // first.element_size()


@block_linear_forward.register_fake
def _(x, weight, bias):
    shape = (x.shape[0], x.shape[1], weight.shape[1] * weight.shape[3])
    return x.new_empty(shape), x.new_empty(shape)


def _part(tokens: int) -> int:
    """How many tokens a program sums over."""
    return triton.cdiv(triton.cdiv(tokens, PARTS), TILE) * TILE


def launch_gradients(
    x: Tensor, dy: Tensor, other_dy: Tensor, weight: Tensor, other_weight: Tensor, dx: Tensor,
    codes: Tensor | None = None, add: bool = False,
) -> Tensor:  # fmt: skip
    """Gradients of two products of x with blocks [N I O] of at most LARGEST rows and columns.

    dx is written, and parts [· all] of the gradients of both weights and biases are returned; if `add`, dx is added to,
    and the parts are of the weights alone. With `codes` of tokens, masked ones of x are not read.
    """
    blocks, size, out = weight.shape
    tokens = x.shape[0] * x.shape[1]
    part = _part(tokens)
    each = 2 * blocks * (size if add else size + 1) * out
    sums = empty((triton.cdiv(tokens, part), each), torch.float32, x.device)
    launch(
        gradient_kernel, (len(sums), blocks),
        x, dy, other_dy, weight, other_weight, codes, dx, sums,
        tokens, part, x.stride(1), dy.stride(1), dx.stride(1), ADD=add,
        **_options(blocks, size, out, dy.dtype),
    )  # fmt: skip
    return sums


@torch.library.custom_op("latte::block_linear_backward", mutates_args=())
def block_linear_backward(dy: Tensor, other: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias, the last in float32."""
    groups, blocks, size, out = weight.shape
    tokens = x.shape[0] * x.shape[1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel() == 0:
        return dx, torch.zeros_like(weight), weight.new_zeros((groups, blocks * out), dtype=torch.float32)
    options = _options(blocks, size, out, x.dtype)
    x, narrow = even_rows(x), weight.to(x.dtype).contiguous()
    dy, other = (side_by_side_rows(z.to(x.dtype)) for z in (dy, other))
    if size <= options["BI"] and out <= options["BO"]:
        sums = launch_gradients(x, dy, other, narrow[0], narrow[1], dx)
    else:
        part = _part(tokens)
        sums = empty((triton.cdiv(tokens, part), groups * blocks * (size + 1) * out), torch.float32, x.device)
        strides = (dy.stride(1), _distance(dy, other))
        pieces = triton.cdiv(size, options["BI"])
        launch(
            input_grad_kernel, (triton.cdiv(tokens, options["BT"]), blocks, pieces),
            dy, narrow, dx, tokens, *strides, dx.stride(1), GROUPS=groups, **options,
        )  # fmt: skip
        launch(
            weight_grad_kernel, (len(sums), groups * blocks, pieces * triton.cdiv(out, options["BO"])),
            x, dy, sums, tokens, part, x.stride(1), *strides, GROUPS=groups, **options,
        )  # fmt: skip
    dweight, dbias = add_parts(sums, tuple(weight.shape), weight.dtype)
    return dx, dweight, dbias.view(groups, -1)


@block_linear_backward.register_fake
def _(dy, other, x, weight):
    groups, blocks, _, out = weight.shape
    return (
        x.new_empty(x.shape), weight.new_empty(weight.shape),
        weight.new_empty((groups, blocks * out), dtype=torch.float32),
    )  # fmt: skip


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = bias.dtype


def _differentiate(ctx: Any, dy: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = block_linear_backward(dy, other, *ctx.saved_tensors)
    return dx, dweight, dbias.to(ctx.bias_dtype)


block_linear_forward.register_autograd(_differentiate, setup_context=_save)
block_linear_backward.register_autograd(refuse)
