"""Losses by position: where in its context a model predicts well, and where it breaks."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from latte.tasks.evaluation.statistics import Estimate, mean_over_groups

Spacing = Literal["log", "equal"]

FIRST = 16  # where the second of log-spaced buckets begins


@dataclass(frozen=True)
class PositionBucket:
    """The mean loss of tokens that stand at `start` to `end` − 1, counted from 0."""

    start: int
    end: int
    loss: Estimate
    tokens: int


def bucket_edges(length: int, count: int, spacing: Spacing) -> list[int]:
    """Where at most `count` buckets of the positions 1 to `length` − 1 begin, and where the last ends."""
    if count < 1:
        raise ValueError(f"the number of buckets is {count}; it must be at least 1")
    if spacing == "equal":
        edges = [1 + round((length - 1) * step / count) for step in range(count + 1)]
    else:  # the first positions are few and their losses noisy: they share a bucket
        start = min(FIRST, length)
        later = [round(start * (length / start) ** (step / max(count - 1, 1))) for step in range(count)]
        edges = [1, *later, length]
    return sorted(set(edges))


class PositionSums:
    """Sums of losses by bucket, for every group of windows apart."""

    def __init__(self, length: int, count: int, spacing: Spacing, groups: int) -> None:
        self.length = length
        self.edges = bucket_edges(length, count, spacing)
        self.sums = torch.zeros(groups, len(self.edges) - 1, dtype=torch.float64)
        self.windows = torch.zeros(groups, dtype=torch.long)

    def add(self, losses: Tensor, groups: Tensor) -> None:
        """Losses [B T−1] of whole windows, and the group of each."""
        along = torch.cat([losses.new_zeros(losses.shape[0], 1), losses.cumsum(1)], dim=1)  # up to each position
        bounds = along[:, torch.tensor(self.edges) - 1]
        self.sums.index_add_(0, groups, bounds.diff(dim=1))
        self.windows.index_add_(0, groups, torch.ones_like(groups))

    def buckets(self) -> list[PositionBucket]:
        measured = self.windows > 0
        sums, windows = self.sums[measured], self.windows[measured]
        found = []
        for index, (start, end) in enumerate(zip(self.edges, self.edges[1:], strict=False)):
            counts = windows * (end - start)
            loss = mean_over_groups(sums[:, index].tolist(), counts.tolist())
            found.append(PositionBucket(start, end, loss, int(counts.sum())))
        return found
