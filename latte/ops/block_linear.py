"""Products with block-diagonal matrices: what the RG-LRU's gates are made of."""

import torch
from jaxtyping import Float
from torch import Tensor

from latte.ops import checks


def block_linear(
    x: Float[Tensor, "B T width"],
    weight: Float[Tensor, "two N I O"],
    bias: Float[Tensor, "two out"],
    *,
    backend: str = "auto",
) -> tuple[Float[Tensor, "B T out"], Float[Tensor, "B T out"]]:
    """y = x W + b for two matrices, of which block n maps channels nI … nI + I − 1 of x to nO … nO + O − 1 of y."""
    checks.check_shape("weight", weight, "2 N I O", (2, None, None, None))
    groups, blocks, size, out = weight.shape
    checks.check_shape("x", x, "B T N·I", (None, None, blocks * size))
    checks.check_shape("bias", bias, "2 N·O", (groups, blocks * out))
    checks.check_same_device(x=x, weight=weight, bias=bias)
    if checks.autocasts(x.device):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    if checks.backend_for(backend, x.device) == "triton":
        checks.refuse_tangents("triton", x, weight, bias)
        from latte.ops.triton.block_linear import multiply

        return multiply(x, weight, bias)
    batch, tokens, _ = x.shape
    rows = x.reshape(batch * tokens, blocks, size).transpose(0, 1)
    side_by_side = weight.permute(1, 2, 0, 3).reshape(blocks, size, groups * out)
    first = bias.view(groups, blocks, out).transpose(0, 1).reshape(blocks, 1, groups * out)
    product = torch.baddbmm(first, rows, side_by_side).view(blocks, batch, tokens, groups, out)
    first, second = product.permute(3, 1, 2, 0, 4).reshape(groups, batch, tokens, blocks * out).unbind()
    return first, second
