"""Time of one more token, and bytes of the cache, after a context of some length."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from latte.models.cache import cache_bytes
from latte.tasks.evaluation.scoring import Scorer

WARM_UP = 4


@dataclass(frozen=True)
class SpeedResult:
    """Of greedy steps, not compiled; the time of a step is the median."""

    length: int
    batch: int
    prefill_seconds: float
    prefill_tokens_per_s: float
    step_seconds: float
    tokens_per_s: float
    cache_bytes: int


def decode_speed(
    model: Any,
    lengths: Sequence[int],
    *,
    batch: int = 1,
    steps: int = 32,
    seed: int = 0,
    chunk: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[SpeedResult]:
    """For each length: read that many random tokens, then take steps."""
    scorer = model if isinstance(model, Scorer) else Scorer(model, chunk)
    scorer.step(random_tokens(scorer, batch, 64, seed), None)  # what is done once, such as compiling, is not timed
    results = []
    for length in lengths:
        results.append(measure(scorer, length, batch, steps, seed))
        if progress is not None:
            progress(len(results), len(lengths))
    return results


def measure(scorer: Scorer, length: int, batch: int, steps: int, seed: int) -> SpeedResult:
    tokens = random_tokens(scorer, batch, length, seed)
    wait(scorer.device)
    start = time.perf_counter()
    cache = scorer.read(tokens)
    wait(scorer.device)
    prefill = time.perf_counter() - start
    held = cache_bytes(cache)
    token, times = tokens[:, -1:], []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        logits, cache = scorer.step(token, cache)
        token = logits.argmax(dim=-1, keepdim=True)
        wait(scorer.device)
        times.append(time.perf_counter() - start)
    step = median(times[WARM_UP:])
    return SpeedResult(length, batch, prefill, batch * length / prefill, step, batch / step, held)


def random_tokens(scorer: Scorer, batch: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(scorer.vocabulary, (batch, length), generator=generator).to(scorer.device)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
