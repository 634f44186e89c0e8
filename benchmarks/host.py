"""Measure what the host does around calls of our ops that are known, their launches left out.

python benchmarks/host.py [--device cpu|cuda] [--seconds S] [--quick] [--json] [--output FILE]

A call like one that was made before is a list of launches (`latte/ops/triton/replay.py`). With that list empty, what
is left is Python, PyTorch's graph and its allocator: the least time between one call and the next. On a CPU the calls
are recorded in Triton's interpreter, by the tests' stand-ins for compiled kernels.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import program  # noqa: E402
from benchmarks.rows import Row  # noqa: E402

LAUNCHES = "latte.ops.triton.replay.launch_all"
SEEN = 5  # calls after which all is recorded
CALLS, ROUNDS = 50, 200
BY_ITSELF = "one node of the graph that does nothing"  # with Macchiato's five inputs


def parser() -> program.Parser:
    return program.make_parser("host", "Measure the host's time around calls of our ops, launches left out.", 300)


def measure(run: program.Run) -> None:
    if run.options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before the first import of Triton
    import torch

    from benchmarks.contenders import GATED, OURS, Contender, Sizes

    sizes = Sizes(batch=1, tokens=64, heads=2, head_dim=16, window=32)  # the host's time depends on no size
    rounds = ROUNDS // 10 if run.options.quick else ROUNDS
    # Beside a GPU backward runs in a thread that has to wake first; on a CPU other programs' turns should not count.
    clock = time.process_time if run.options.device == "cpu" else time.perf_counter
    torch.set_num_threads(1)
    run.facts |= sizes._asdict() | {"dtype": "float32", "clock": clock.__name__, "calls": CALLS, "rounds": rounds}

    def row(op: str, passes: dict[str, Callable[[], object]], launches: int | None) -> None:
        taken = {name: median(rounds_of(step, clock, rounds)) for name, step in passes.items()}
        run.add(Row("Time around a call", {"op": op, **taken, "launches": launches}))

    with ExitStack() as stack:
        if run.options.device == "cpu":
            import pytest

            from tests.triton.replaying import emulate

            emulate(stack.enter_context(pytest.MonkeyPatch.context()))

        def steps(contender: Contender) -> dict[str, Callable[[], object]]:
            inputs = contender.inputs(sizes, torch.float32, run.options.device)
            found = {f"{name}_us": contender.step(inputs, sizes, backward=name != "forward", backend="triton")
                     for name in ("forward", "forward+backward")}  # fmt: skip
            for step in list(found.values()) * SEEN:
                step()
            return found

        for contender in (*OURS, GATED):
            run.progress(contender.op)
            passes, counted = steps(contender), []
            with patch(LAUNCHES, lambda launches, *_, counted=counted: counted.extend(launches)):
                passes["forward+backward_us"]()
            with patch(LAUNCHES, lambda *_: None):
                row(contender.op, passes, len(counted))
        row(BY_ITSELF, nothing(run.options.device), None)


def nothing(device: str) -> dict[str, Callable[[], object]]:
    """What PyTorch alone takes for five inputs, their gradients and one operation between."""
    import torch

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            return inputs[0].view_as(inputs[0])

        @staticmethod
        def backward(ctx, *gradients):
            return gradients * 5

    inputs = [torch.zeros(4, device=device, requires_grad=True) for _ in range(5)]
    dy = torch.zeros(4, device=device)
    return {
        "forward_us": torch.no_grad()(lambda: Nothing.apply(*inputs)),
        "forward+backward_us": lambda: torch.autograd.grad(Nothing.apply(*inputs), inputs, dy),
    }


def rounds_of(step: Callable[[], object], clock: Callable[[], float], rounds: int) -> list[float]:
    """Microseconds of a call, of rounds of CALLS."""
    taken = []
    for _ in range(rounds + 1):
        start = clock()
        for _ in range(CALLS):
            step()
        taken.append((clock() - start) / CALLS * 1e6)
    return taken[1:]


def main(arguments: Sequence[str] | None = None) -> int:
    return program.main("host", parser(), measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
