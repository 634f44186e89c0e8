"""Cross entropy of a linear layer's logits, for vocabularies whose logits would not fit."""

from numbers import Integral

import torch
from jaxtyping import Float, Int
from torch import Tensor

from latte.ops import checks
from latte.ops.logit_chunks import Options

REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    hidden: Float[Tensor, "N C"],
    weight: Float[Tensor, "V C"],
    targets: Int[Tensor, " N"],
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Int[Tensor, ""] | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    backend: str = "auto",
) -> Float[Tensor, "..."]:
    """−log softmax(cap(hidden weightᵀ))[target], averaged, without ever holding the logits [N V].

    Equals torch.nn.functional.cross_entropy in value and gradients, with logits in float32 and the loss too (float64
    if an input is). Tokens are taken a chunk at a time, and for "mean" and "sum" a chunk's gradients are computed with
    its loss, so that backward only scales them. Rows whose target is `ignore_index` neither count nor matter.
    `num_items` takes the place of their number in "mean", as gradient accumulation over several batches needs it;
    `softcap` bounds logits as softcap · tanh(logit / softcap). Under autocast the products are in its dtype.
    """
    _check(hidden, weight, targets, ignore_index, reduction, num_items, softcap, label_smoothing)
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    if checks.autocasts(hidden.device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
    name = checks.backend_for(backend, hidden.device)
    checks.refuse_tangents(name, hidden, weight)
    match name:
        case "reference":
            from latte.ops.reference.cross_entropy import losses, total
        case "torch":
            from latte.ops.logit_chunks import losses, total
        case _:
            from latte.ops.logit_chunks import losses, total
            from latte.ops.triton.cross_entropy import check_kernel

            check_kernel(hidden, weight, softcap or 0.0)
    options = Options(ignore_index, softcap or 0.0, label_smoothing, dtype, name)
    with checks.no_autocast(hidden.device):
        if reduction == "none":
            return losses(hidden, weight, targets, options)
        loss = total(hidden, weight, targets, options)
        if reduction == "sum":
            return loss
        if num_items is not None:
            return loss / num_items
        count = (targets != ignore_index).sum()
        return torch.where(count > 0, loss / count.clamp(min=1), torch.nan)


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    reduction: str,
    num_items: int | Tensor | None,
    softcap: float | None,
    label_smoothing: float,
) -> None:
    checks.check_shape("hidden", hidden, "N C", (None, None))
    checks.check_positive("hidden", hidden.shape[1], "C")
    checks.check_shape("weight", weight, "V C", (None, hidden.shape[1]))
    checks.check_positive("weight", weight.shape[0], "V")
    if not isinstance(targets, Tensor) or targets.dtype not in (torch.int32, torch.int64):
        got = f"dtype {targets.dtype}" if isinstance(targets, Tensor) else f"type {type(targets).__name__}"
        raise ValueError(f"targets has {got}; it must be an int32 or int64 tensor [N]")
    checks.check_sizes("targets", targets, "N", (hidden.shape[0],))
    checks.check_same_device(hidden=hidden, weight=weight, targets=targets)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; it must be one of {', '.join(map(repr, REDUCTIONS))}")
    if num_items is not None and reduction != "mean":
        raise ValueError(f'num_items is given with reduction {reduction!r}; it divides the loss of reduction="mean"')
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise ValueError(f"num_items has shape {list(num_items.shape)}; it must be one number")
    elif num_items is not None:
        checks.check_number("num_items", num_items)
        if not num_items > 0:
            raise ValueError(f"num_items is {num_items}; it must be at least 1, the number of targets that count")
    if not isinstance(ignore_index, Integral):
        raise ValueError(f"ignore_index is {ignore_index!r}; it must be an integer")
    checks.check_scores(None, softcap)
    checks.check_number("label_smoothing", label_smoothing)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be between 0 and 1")
