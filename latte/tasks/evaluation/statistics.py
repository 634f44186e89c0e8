"""Means over tokens with standard errors over texts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error, which is None where one text alone was measured."""

    value: float
    error: float | None

    def exp(self) -> "Estimate":
        value = math.exp(self.value) if self.value < 700 else math.inf
        return Estimate(value, None if self.error is None else value * self.error)


def mean_over_groups(sums: Sequence[float], counts: Sequence[float]) -> Estimate:
    """Σ sums / Σ counts. Groups are independent, what is within one is not: the error is that of a ratio of sums."""
    total, groups = math.fsum(counts), len(sums)
    if not total:
        raise ValueError("nothing was counted; a mean needs at least one token")
    mean = math.fsum(sums) / total
    if groups < 2:
        return Estimate(mean, None)
    squares = math.fsum((s - mean * n) ** 2 for s, n in zip(sums, counts, strict=True))
    return Estimate(mean, math.sqrt(squares * groups / (groups - 1)) / total)


def mean(values: Sequence[float]) -> Estimate:
    return mean_over_groups(values, [1.0] * len(values))


def choose(items: Sequence[Item], limit: int | None, seed: int) -> list[Item]:
    """`limit` of the items, drawn with a seed and in their order; all of them where there are no more."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[index] for index in sorted(Random(seed).sample(range(len(items)), limit))]
