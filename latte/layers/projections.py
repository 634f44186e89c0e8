"""Projections of one input: several by one product, and how wide heads are."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latte.layers.checks import check_count, check_multiple
from latte.ops.beside import ROW, beside, padded


def project(x: Tensor, *linears: nn.Linear) -> list[Tensor]:
    """The output of each; for several tokens, of plain layers, by one product, whose gradient is one product too."""
    # for one token, putting the weights side by side would cost more than it saves
    if not are_plain(*linears) or x.shape[1] == 1:
        return [linear(x) for linear in linears]
    row = row_multiple(x.device)
    weight = beside([linear.weight for linear in linears], row)
    bias = None if linears[0].bias is None else beside([linear.bias for linear in linears], row)
    sizes: list[int] = []  # of parts, and of the gaps between them: together, so that their gradient is one again
    places = []
    for linear in linears:
        places.append(len(sizes))
        gap = padded(linear.out_features, row) - linear.out_features
        sizes += [linear.out_features, gap] if gap else [linear.out_features]
    parts = F.linear(x, weight, bias).split(sizes, dim=-1)
    return [parts[place] for place in places]


def row_multiple(device: torch.device) -> int:
    """Columns at whose multiples a device likes the parts of a row to begin."""
    return ROW if device.type == "cuda" else 1


def are_plain(*linears: nn.Module) -> bool:
    """Whether their weights may be used without calling them."""
    return all(type(linear) is nn.Linear and not has_hooks(linear) for linear in linears)


def has_hooks(module: nn.Module) -> bool:
    """Whether someone wants to see, or change, what goes into a module and comes out; some put a forward of theirs."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return bool(hooks) or "forward" in vars(module)


def head_width(hidden_size: int, num_heads: int, head_dim: int | None) -> int:
    """`head_dim`, or what hidden_size leaves for each of the heads."""
    if head_dim is not None:
        check_count("head_dim", head_dim)
        return head_dim
    check_multiple(
        "hidden_size", hidden_size, "num_heads", num_heads, "choose num_heads that divide it or set head_dim"
    )
    return hidden_size // num_heads


def value_heads(num_heads: int, num_value_heads: int | None) -> int:
    """`num_value_heads`, or as many as there are heads."""
    if num_value_heads is None:
        return num_heads
    check_count("num_value_heads", num_value_heads)
    check_multiple("num_heads", num_heads, "num_value_heads", num_value_heads, "choose a divisor")
    return num_value_heads
