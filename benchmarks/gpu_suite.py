"""What the runs on a GPU share: how much to measure, with what, and in which time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from benchmarks.contenders import LATTE, MACCHIATO, OURS, RGLRU, Contender, Sizes
from benchmarks.rows import Target
from benchmarks.timing import Step, Times

CHECKS, OPS, TIMES, TARGETS = "Correctness", "32,768 tokens", "Time per token", "Targets"
TOKENS = 32768
TOLERANCE = Target(1e-2)
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Plan:
    """How much is measured, in how many seconds."""

    shapes: Sequence[Sizes] = (Sizes(8, 4096), Sizes(2, 16384))
    more_shapes: Sequence[Sizes] = (Sizes(8, 4096, 8, 96), Sizes(2, 16384, 8, 96))  # of one other head width
    ours: Sequence[Contender] = OURS
    flex: bool = True
    lengths: Sequence[int] = (1024, 4096, 16384, 32768, 131072, 524288, 1048576)
    tokens: int = TOKENS  # in all, until one sequence is longer
    softmax_up_to: int = 131072
    first_call: bool = True
    check_tokens: int = 1024
    rep: int = 40
    seconds: float = 185.0  # of 200: Python, PyTorch and the GPU take some to start


FULL = Plan()
QUICK = Plan(
    shapes=(Sizes(8, 4096),), more_shapes=(), ours=(LATTE, MACCHIATO, RGLRU), flex=False, lengths=(1024, 32768, 262144),
    softmax_up_to=32768, first_call=False, rep=10, seconds=32.0,
)  # fmt: skip


class Clock(Protocol):
    def time(self, step: Step, *, one_thread: bool = False) -> Times: ...


@dataclass
class Suite:
    """One run: what it measures with, and what it has found so far."""

    plan: Plan
    progress: Callable[[str], None]
    clock: Clock
    short_clock: Clock
    bandwidth: float
    device: str = "cuda"
    started: float = field(default_factory=time.perf_counter)
    wrong: set[tuple[str, int]] = field(default_factory=set)  # op and heads whose check failed

    def late(self, needed: float) -> bool:
        """Whether `needed` seconds more would be too many."""
        return time.perf_counter() - self.started + needed > self.plan.seconds

    def is_wrong(self, contender: Contender, shape: Sizes) -> bool:
        return contender.by == LATTE.by and (contender.op, shape.heads) in self.wrong

    def give_back(self) -> None:
        """Let go of memory that is not in use: the next sizes need other pieces of it."""
        if self.device == "cuda":
            torch.cuda.empty_cache()
