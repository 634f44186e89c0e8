"""The ops on a CPU in float32: time, growth and memory beside softmax attention, and the cost of one more token."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks import fresh
from benchmarks.contenders import FLEX, LATTE, LOOP, MACCHIATO, PASSES, RGLRU, SOFTMAX, WINDOW, Contender, Sizes, first
from benchmarks.correctness import check
from benchmarks.rows import Cell, Report, Row, Target, judged_row, show
from benchmarks.timing import compare, interleave, reason

TIMES, TARGETS, CHECKS = "Time per token", "Targets", "Correctness"
SPEED_UPS = {
    ("Latte", "forward"): 15.0,
    ("Latte", "forward+backward"): 10.0,
    ("Macchiato", "forward"): 6.0,
    ("Macchiato", "forward+backward"): 5.0,
}


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    lengths: Sequence[int] = (1024, 4096, 16384, 65536)
    softmax_up_to: int = 16384
    rounds: int = 3
    recurrence: int = 4096
    contexts: tuple[int, int] = (1024, 65536)
    steps: int = 2000
    memory: Sequence[tuple[Contender, str, int]] = tuple(
        (contender, what, tokens)
        for contender in (LATTE, MACCHIATO)
        for what, tokens in (("forward", 16384), ("forward+backward", 16384), ("forward+backward", 65536))
    )
    flex: bool = True
    threads: int = 2
    judged: bool = True


FULL = Plan()
QUICK = Plan(
    lengths=(256, 1024, 2048), softmax_up_to=1024, rounds=1, recurrence=512, contexts=(64, 512), steps=20,
    memory=((MACCHIATO, "forward+backward", 2048),), flex=False, threads=min(2, torch.get_num_threads()), judged=False,
)  # fmt: skip


def measure(plan: Plan, progress: Callable[[str], None]) -> Report:
    sizes = Sizes(1, plan.softmax_up_to)
    report = Report({
        "dtype": "float32", "threads": plan.threads, "heads": sizes.heads, "head_dim": sizes.head_dim,
        "latents": sizes.latents, "window": sizes.window, "width": sizes.width, "load_at_start": load(),
    })  # fmt: skip
    with threads(plan.threads):
        report.rows += check_all(progress)
        times = time_lengths(plan, progress)
        report.rows += times
        report.rows += ratios(plan, times)
        report.rows += recurrence(plan, progress)
        report.rows += steps(plan, progress)
    report.rows += memory(plan, progress)
    return report


def load() -> float | None:
    """Processes that wanted a core in the last minute: what else went on. A quiet machine has next to 0."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_all(progress: Callable[[str], None]) -> Iterator[Row]:
    progress("comparing with the reference in float64")
    tolerance = Target(1e-4)
    for contender in (LATTE, MACCHIATO, WINDOW, RGLRU):
        sizes = Sizes(1, 160, heads=2, window=48)
        found = check(contender, sizes, torch.float32, "cpu", "reference")
        cells: dict[str, Cell] = {"op": contender.op, "tokens": sizes.tokens, **found._asdict()}
        yield Row(CHECKS, cells, tolerance.text(), "ok" if found.right(tolerance.bound) else "wrong")


def time_lengths(plan: Plan, progress: Callable[[str], None]) -> list[Row]:
    rows = []
    for tokens, what in itertools.product(plan.lengths, PASSES):
        progress(f"{what}, {tokens:,} tokens")
        contenders = [LATTE, MACCHIATO, WINDOW, *([SOFTMAX] if tokens <= plan.softmax_up_to else [])]
        rounds = plan.rounds * max(1, plan.softmax_up_to // tokens)
        taken = interleave({contender: step(contender, tokens, what) for contender in contenders}, rounds)
        rows += [time_row(contender, what, tokens, times) for contender, times in taken.items()]
        if tokens == plan.softmax_up_to:
            rows.append(flex_row(plan, what, tokens))
    return rows


def step(contender: Contender, tokens: int, what: str) -> Callable[[], object]:
    sizes = Sizes(1, tokens)
    inputs = contender.inputs(sizes, torch.float32, "cpu")
    return contender.step(inputs, sizes, backward=what == "forward+backward")


def time_row(contender: Contender, what: str, tokens: int, taken: Sequence[float]) -> Row:
    return Row(TIMES, {
        "op": contender.op, "by": contender.by, "pass": what, "batch": 1, "tokens": tokens,
        "wall_ms": 1e3 * median(taken), "runs": len(taken), "ns_per_token": 1e9 * median(taken) / tokens,
    })  # fmt: skip


def flex_row(plan: Plan, what: str, tokens: int) -> Row:
    cells: dict[str, Cell] = {"op": FLEX.op, "by": FLEX.by, "pass": what, "batch": 1, "tokens": tokens}
    if not plan.flex:
        return Row(TIMES, cells, status="skipped", note="left out: compiling it takes longer than a quick look")
    try:
        flex = step(FLEX, tokens, what)
        flex()  # compiles
        taken = interleave({FLEX: flex}, plan.rounds)[FLEX]
    except Exception as error:  # no compiler, no backward on a CPU: whatever it is, the table says it
        return Row(TIMES, cells, status="skipped", note=reason(error))
    return time_row(FLEX, what, tokens, taken)


def ratios(plan: Plan, times: Sequence[Row]) -> Iterator[Row]:
    """How much faster than softmax attention, and how time grows with length."""
    wall = {
        (row.cells["op"], row.cells["pass"], row.cells["tokens"]): float(row.cells["wall_ms"] or 0.0)
        for row in times
        if row.status != "skipped" and row.cells["by"] != FLEX.by
    }
    tokens, longest = plan.softmax_up_to, plan.lengths[-1]
    for (op, what), bound in SPEED_UPS.items():
        speed_up = wall[SOFTMAX.op, what, tokens] / wall[op, what, tokens]
        target = Target(bound, at_least=True, unit="×", judged=plan.judged)
        yield target_row(f"{op}, {what}: times faster than SDPA, {tokens:,} tokens", speed_up, target)
    for op, what in SPEED_UPS:
        growth = wall[op, what, longest] / wall[op, what, tokens]
        target = Target(5.0, unit="×", judged=plan.judged)
        yield target_row(f"{op}, {what}: growth of time, {tokens:,} to {longest:,} tokens", growth, target)


def target_row(what: str, value: float, target: Target, note: str = "") -> Row:
    return judged_row(TARGETS, {"what": what, "value": value}, value, target, note)


def recurrence(plan: Plan, progress: Callable[[str], None]) -> Iterator[Row]:
    for what in PASSES:
        progress(f"RG-LRU beside a Python loop, {what}")
        steps = {contender: step(contender, plan.recurrence, what) for contender in (RGLRU, LOOP)}
        ours, loop = (median(times) for times in interleave(steps, 5 * plan.rounds).values())
        yield target_row(
            f"RG-LRU, {what}: times faster than a Python loop, {plan.recurrence:,} tokens",
            loop / ours,
            Target(3.0, at_least=True, unit="×", judged=plan.judged),
            f"{show(1e3 * ours)} ms against {show(1e3 * loop)} ms",
        )


def steps(plan: Plan, progress: Callable[[str], None]) -> Iterator[Row]:
    """One token after a short and after a long context."""
    for contender in (LATTE, MACCHIATO):
        few, many = plan.contexts
        progress(f"{contender.op} step after {many:,} tokens")
        with torch.no_grad():
            short, long = compare(one_token(contender, few), one_token(contender, many), plan.steps)
        yield target_row(
            f"{contender.op}: cost of a one-token step after {many:,} tokens over that after {few:,}",
            long / short,
            Target(1.1, unit="×", judged=plan.judged),
            f"{show(1e6 * long)} µs against {show(1e6 * short)} µs",
        )


def one_token(contender: Contender, context: int) -> Callable[[], object]:
    """A step from the state after `context` tokens."""
    before = Sizes(1, context)
    state = contender.run(contender.inputs(before, torch.float32, "cpu"), before).state
    inputs = contender.inputs(Sizes(1, 1), torch.float32, "cpu")
    return lambda: first(contender.run(inputs, Sizes(1, 1), state=state))


def memory(plan: Plan, progress: Callable[[str], None]) -> Iterator[Row]:
    for contender, what, tokens in plan.memory:
        progress(f"memory of {contender.op}, {what}, {tokens:,} tokens, in a fresh process")
        name = f"{contender.op}, {what}: peak memory beyond the inputs over inputs and output, {tokens:,} tokens"
        target = Target(3.0, unit="×", judged=plan.judged)
        try:
            found = fresh.ask("memory", contender.op, what, str(tokens))
        except RuntimeError as error:
            yield Row(TARGETS, {"what": name, "value": None}, target.text(), "skipped", reason(error))
            continue
        note = f"{found['extra'] / 2**20:,.0f} MiB beside {found['inputs_and_outputs'] / 2**20:,.0f} MiB"
        yield target_row(name, found["extra"] / found["inputs_and_outputs"], target, note)
