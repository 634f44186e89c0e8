"""What the kernels need of a machine, and of the tensors they are given."""

from functools import cache

import torch
import triton
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_SOFTCAP = 1000.0


def check_device(kernel: object, device: torch.device) -> None:
    """Compiled kernels need CUDA; Triton's interpreter (TRITON_INTERPRET=1 before its import) takes any tensor."""
    if device.type != "cuda" and isinstance(kernel, triton.JITFunction):
        raise ValueError(
            f'backend is "triton" and the tensors are on {device}; it needs a CUDA device '
            '(or TRITON_INTERPRET=1 in the environment, for tests); use backend="torch" here'
        )


def check_dtypes(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in DTYPES:
            raise ValueError(
                f"{name} has dtype {tensor.dtype}; the Triton kernels take float32, bfloat16 and float16; "
                'use backend="torch" for float64'
            )


def check_softcap(softcap: float) -> None:
    """Kernels take tanh by way of exp, so that scores are off by a ten-millionth of the cap."""
    if softcap > MOST_SOFTCAP:
        raise ValueError(
            f"softcap is {softcap}; the Triton kernels take up to {MOST_SOFTCAP:g}, beyond which scores lose digits; "
            'use backend="torch", or None for no cap'
        )


@cache
def launches_overlap(device: torch.device) -> bool:
    """Whether a launch may begin while the one before it ends: NVIDIA's from compute capability 9 on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
