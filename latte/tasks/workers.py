"""Many blocks of examples made at once, by several processes, and handed on in order."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

Made = TypeVar("Made")
Progress = Callable[[str, int, int], None]
AHEAD = 4  # blocks in the making for each process: enough to keep it busy, and few enough to hold


def map_blocks(
    make: Callable[[int], Made], count: int, workers: int = 0, progress: Callable[[int], None] | None = None
) -> Iterator[Made]:
    """make(0), make(1), … up to count, the same whatever the number of workers; 0 is one for each core.

    `make` and what it gives must be picklable. `progress` hears how many blocks are done.
    """
    if workers < 0:
        raise ValueError(f"workers is {workers}; it must be 0, for one process a core, or their number")
    workers = min(workers or available_cores(), count)
    made = map(make, range(count)) if workers <= 1 else _in_processes(make, count, workers)
    for done, block in enumerate(made, start=1):
        yield block
        if progress is not None:
            progress(done)


def steps_of(progress: Progress, what: str, total: int) -> Callable[[int], None]:
    """`progress` of one thing that is being done, to be told how much of it is."""
    return lambda done: progress(what, done, total)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_processes(make: Callable[[int], Made], count: int, workers: int) -> Iterator[Made]:
    # Spawned: a process with PyTorch's threads in it is not safe to fork.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = deque(pool.submit(make, block) for block in range(min(count, AHEAD * workers)))
        for block in range(len(waiting), count + len(waiting)):
            yield waiting.popleft().result()
            if block < count:
                waiting.append(pool.submit(make, block))
