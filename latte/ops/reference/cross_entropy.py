"""`total` and `losses` as they read: all logits at once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops.checks import check_targets
from latte.ops.logit_chunks import Options
from latte.ops.states import accumulation_dtype


def losses(hidden: Tensor, weight: Tensor, targets: Tensor, options: Options) -> Tensor:
    """The loss of every token, 0 for ignored ones."""
    check_targets(targets, weight.shape[0], options.ignore_index)
    hidden = hidden.masked_fill((targets == options.ignore_index)[:, None], 0.0)  # which may hold anything
    logits = F.linear(hidden.to(options.dtype), weight.to(options.dtype)).to(accumulation_dtype(hidden, weight))
    if options.softcap:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    return F.cross_entropy(
        logits,
        targets.long(),
        ignore_index=options.ignore_index,
        reduction="none",
        label_smoothing=options.label_smoothing,
    )


def total(hidden: Tensor, weight: Tensor, targets: Tensor, options: Options) -> Tensor:
    """The sum of the losses of all tokens."""
    return losses(hidden, weight, targets, options).sum()
