"""What the memory alone would need, and the times to reach on an H200."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


def size(tensors: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def bytes_moved(inputs: Sequence[Tensor], y: Tensor, *, backward: bool) -> int:
    """Each input read once and the output written once; backward reads inputs and dy, and writes the gradients."""
    forward = size(inputs) + size([y])
    return forward + 2 * size(inputs) + size([y]) if backward else forward


def milliseconds(moved: int, bandwidth: float) -> float:
    return 1e3 * moved / bandwidth


class Goal(NamedTuple):
    """Milliseconds: the floor is owed, the aim is where the limit is."""

    floor: float
    aim: float


# bfloat16, 32,768 tokens, 12 heads of width 64, 16 latents per head, window 128
GOALS = {
    ("Latte", "forward"): Goal(0.09, 0.06),
    ("Macchiato", "forward"): Goal(0.15, 0.10),
    ("Macchiato", "forward+backward"): Goal(0.65, 0.42),
    ("RG-LRU", "forward"): Goal(0.15, 0.11),
    ("RG-LRU", "forward+backward"): Goal(0.50, 0.36),
}
