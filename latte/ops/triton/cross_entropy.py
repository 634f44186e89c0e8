"""Cross entropy of rows of logits on GPUs: a program per row, two passes of which the second finds it in the cache."""

import torch
from torch import Tensor

from latte.ops.triton.call import launch
from latte.ops.triton.device import check_device, check_dtypes, check_softcap
from latte.ops.triton.kernels.cross_entropy import BLOCK, rows_kernel


def check_kernel(hidden: Tensor, weight: Tensor, softcap: float) -> None:
    check_device(rows_kernel, hidden.device)
    check_dtypes(hidden=hidden, weight=weight)
    check_softcap(softcap)


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
    """Losses [n] and dlosses · gradients of the logits [n V+], 0 in the columns beyond the vocabulary.

    0 for ignored rows; dlosses are 1 where None; without `gradients` the second tensor is empty. A target beyond the
    vocabulary gives NaN: an error would have to wait for the device.
    """
    rows, columns = logits.shape
    losses = logits.new_empty(rows)
    dlogits = logits.new_empty((rows, columns) if gradients else (0,), dtype=dtype)
    launch(
        rows_kernel, rows,
        logits, targets.contiguous(), dlosses, losses, dlogits,
        vocabulary, columns, ignore_index, softcap, label_smoothing,
        GIVEN=dlosses is not None, GRADIENTS=gradients, CAPPED=softcap > 0, SMOOTHED=label_smoothing > 0,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return losses, dlogits
