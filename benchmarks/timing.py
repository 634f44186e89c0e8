"""How time is taken: the host's clock on a CPU, events and graph replays on a GPU."""

import time
from collections.abc import Callable, Hashable, Mapping
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)
Step = Callable[[], object]

WARM_UP = 1.0  # a first call shorter than this only warms up; a longer one counts
PATIENCE = 15.0  # seconds after which a step is not repeated any more,
ENOUGH = 3  # once it has run this often: a median of three survives one busy moment
LONG = 20.0  # milliseconds beyond which gaps between launches do not show


def seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def interleave(steps: Mapping[Key, Step], rounds: int) -> dict[Key, list[float]]:
    """Seconds of each step, taken in turns, so that a busy moment of the machine hits all alike."""
    times: dict[Key, list[float]] = {}
    for name, step in steps.items():
        taken = seconds(step)
        times[name] = [taken] if taken > WARM_UP else []
    for _ in range(rounds):
        for name, step in steps.items():
            if len(times[name]) < ENOUGH or sum(times[name]) < PATIENCE:
                times[name].append(seconds(step))
    return times


def compare(first: Step, second: Step, repeats: int) -> tuple[float, float]:
    """Median seconds of two short steps that alternate, each going first every other time."""
    times: dict[Step, list[float]] = {first: [], second: []}
    for step in (first, second) * 10:
        step()
    for repeat in range(repeats):
        for step in (first, second) if repeat % 2 else (second, first):
            times[step].append(seconds(step))
    return median(times[first]), median(times[second])


class Times(NamedTuple):
    """Milliseconds of one step on a GPU."""

    wall: float  # launched one by one, as a program does: gaps in which the GPU waits for the host included
    device: float | None  # replayed from a CUDA graph: the GPU's work alone
    note: str = ""
    one_thread: float | None = None  # wall again, with backward in the thread that calls it


class GPUClock:
    """Medians by triton.testing; `warmup` and `rep` are milliseconds of repetition."""

    def __init__(self, warmup: int, rep: int) -> None:
        self.warmup, self.rep = warmup, rep

    def time(self, step: Step, *, one_thread: bool = False) -> Times:
        import torch
        from triton import testing

        wall: Any = testing.do_bench(step, warmup=self.warmup, rep=self.rep, return_mode="median")
        if wall > LONG:
            return Times(wall, wall, f"longer than {LONG:g} ms, so no graph was taken")
        alone: Any = None
        if one_thread:
            with torch.autograd.set_multithreading_enabled(False):
                alone = testing.do_bench(step, warmup=self.warmup, rep=self.rep, return_mode="median")
        try:
            device: Any = testing.do_bench_cudagraph(step, rep=max(self.rep // 2, 1), return_mode="median")
        except Exception as error:  # whatever a contender does in a capture is worth a note, no more
            return Times(wall, None, f"no CUDA graph: {reason(error)}", alone)
        return Times(wall, device, one_thread=alone)


def reason(error: BaseException) -> str:
    """An error as one short line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def copy_bandwidth(size: int = 2**30) -> float:
    """Bytes per second of a copy on the GPU, read and written: the most that memory gives."""
    import torch
    from triton import testing

    source = torch.randn(size // 2, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    milliseconds: Any = testing.do_bench(lambda: target.copy_(source), warmup=20, rep=100, return_mode="median")
    return 2 * size / (milliseconds / 1e3)


def replay_times(graph: Any, budget: float = 0.5, most: int = 300) -> float:
    """Median seconds of a CUDA graph's replay, each between two events, for about `budget` seconds."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(5):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    count = max(10, min(most, int(budget / (start.elapsed_time(end) / 5e3))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    return median(first.elapsed_time(second) / 1e3 for first, second in pairwise(events))


class StepTimes(NamedTuple):
    """Of a step that is repeated."""

    first: float  # seconds of the first call, in which compilers work
    median: float
    peak: float | None  # GiB on a GPU


def step_times(step: Step, device: str, least: int = 5, budget: float = 1.5, warm: int = 2) -> StepTimes:
    """Seconds of long steps, one after another without waiting for the GPU between them, for about `budget` seconds."""
    if device == "cpu":
        first = seconds(step)
        return StepTimes(first, median(seconds(step) for _ in range(least)), None)
    import torch

    def run(count: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        for event in events[:-1]:
            event.record()
            step()
        events[-1].record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]

    (first,) = run(1)
    warmed = run(warm)
    torch.cuda.reset_peak_memory_stats()
    count = max(min(least, ENOUGH) if warmed[-1] > WARM_UP else least, min(50, int(budget / warmed[-1])))
    return StepTimes(first, median(run(count)), torch.cuda.max_memory_allocated() / 2**30)
