"""On a GPU, besides the times: memory kept for backward, time per token from length to length, the first call."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks import fresh, limits
from benchmarks.contenders import LATTE, first
from benchmarks.gpu_suite import DTYPE, TARGETS, Sizes, Suite
from benchmarks.rows import Cell, Row, Target, judged_row
from benchmarks.timing import reason

FLAT = 1.2


def flatness(times: Sequence[Row]) -> Iterator[Row]:
    """The slowest time per token of our ops over the fastest."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in times:
        match row.cells:
            case {
                "by": LATTE.by,
                "op": str(op),
                "pass": str(what),
                "tokens": int(tokens),
                "ns_per_token": float(taken),
            }:
                found.setdefault((op, what), {})[tokens] = taken
    for (op, what), by_length in found.items():
        if len(by_length) == 1:
            continue
        (fastest, least), *_, (slowest, most) = sorted(by_length.items(), key=lambda item: item[1])
        lengths = f"{min(by_length):,} to {max(by_length):,} tokens"
        cells: dict[str, Cell] = {
            "what": f"{op}, {what}: slowest time per token over fastest, {lengths}",
            "value": most / least,
        }
        note = f"slowest at {slowest:,}, fastest at {fastest:,}"
        yield judged_row(TARGETS, cells, most / least, Target(FLAT, unit="×"), note)


def memory(suite: Suite, shape: Sizes) -> Iterator[Row]:
    """What stays allocated between forward and backward, inputs included, over inputs and output."""
    for contender in suite.plan.ours:
        suite.progress(f"memory that {contender.op} keeps for backward")
        if suite.is_wrong(contender, shape):
            continue
        inputs = contender.inputs(shape, DTYPE, suite.device)
        first(contender.run(inputs, shape))  # kernels compile, tables are made
        suite.give_back()
        before = allocated(suite.device)
        output = contender.run(inputs, shape)
        kept = limits.size(inputs) + allocated(suite.device) - before
        whole = limits.size(inputs) + limits.size([first(output)])
        cells: dict[str, Cell] = {
            "what": f"{contender.op}: memory kept for backward over inputs and output",
            "value": kept / whole,
        }
        note = f"{kept / 2**20:,.0f} MiB beside {whole / 2**20:,.0f} MiB"
        del output  # what the next op allocates is counted from a clean start
        yield judged_row(TARGETS, cells, kept / whole, Target(1.1, unit="×"), note)


def allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def first_calls(progress: Callable[[str], None], cache: str) -> Iterator[Row]:
    """The wait for a first result in a new process that has compiled nothing yet."""
    progress("first calls, in a fresh process")
    target = Target(10.0, unit=" s")
    try:
        waits = fresh.ask("first-call", environment={"TRITON_CACHE_DIR": cache})
    except RuntimeError as error:
        yield Row(TARGETS, {"what": "first call", "value": None}, target.text(), "skipped", reason(error))
        return
    for op, wait in waits.items():
        value = wait["forward"] + wait["backward"]
        cells: dict[str, Cell] = {"what": f"{op}: seconds to the first result and gradients, compiling", "value": value}
        note = f"forward {wait['forward']:.2f} s, backward {wait['backward']:.2f} s"
        yield judged_row(TARGETS, cells, value, target, note)


def warm_up(progress: Callable[[str], None], cache: str) -> None:
    """Compile in processes side by side what the run needs besides; what fails there fails again where it counts."""
    progress("compiling for other head widths, and FlexAttention")
    with ThreadPoolExecutor() as pool:
        for what in ("ours", "flex"):
            pool.submit(fresh.ask, "warm", what, environment={"TRITON_CACHE_DIR": cache})
