"""Cross entropy of rows of logits, in the place of the logits."""

import torch
from torch import Tensor

from latte.ops.checks import check_targets


def losses_and_gradients(
    logits: Tensor,
    targets: Tensor,
    dlosses: Tensor | None,
    *,
    vocabulary: int,
    gradients: bool,
    ignore_index: int,
    softcap: float,
    label_smoothing: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """log Σ exp(z) − (1 − ε) z_target − ε mean(z), and dlosses · (softmax(z) − (1 − ε) onehot − ε/V) in `dtype`.

    0 for ignored rows; dlosses are 1 where None; without `gradients` the second tensor is empty. The logits are lost.
    """
    check_targets(targets, vocabulary, ignore_index)
    real = targets != ignore_index
    index = targets.masked_fill(~real, 0).long()[:, None]
    if softcap:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    slope = 1.0 - (logits / softcap).square_() if softcap and gradients else None
    picked = logits.gather(1, index)
    if label_smoothing:
        picked = (1.0 - label_smoothing) * picked + label_smoothing * logits.mean(dim=1, keepdim=True)
    peak = logits.amax(dim=1, keepdim=True)
    weights = logits.sub_(peak).exp_()
    norm = weights.sum(dim=1, keepdim=True)
    losses = (peak + norm.log() - picked).squeeze(1).masked_fill(~real, 0.0)
    if not gradients:
        return losses, logits.new_empty(0, dtype=dtype)
    factor = real.to(logits.dtype) if dlosses is None else dlosses.masked_fill(~real, 0.0)
    factor = factor[:, None]
    dlogits = weights.mul_(factor / norm)
    if label_smoothing:
        dlogits.sub_(factor * (label_smoothing / vocabulary))
    dlogits.scatter_(1, index, dlogits.gather(1, index) - (1.0 - label_smoothing) * factor)
    return losses, (dlogits if slope is None else dlogits.mul_(slope)).to(dtype)
