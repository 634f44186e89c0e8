"""The ops on a GPU in bfloat16: against the memory's limit, beside other people's kernels, up to a million tokens."""

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from benchmarks import limits
from benchmarks.contenders import (
    CONVOLUTION,
    CUDNN,
    FLEX,
    LATTE,
    LIGHTNET,
    MACCHIATO,
    PASSES,
    RGLRU,
    SOFTMAX,
    WINDOW,
    Contender,
    Sizes,
    first,
)
from benchmarks.correctness import check
from benchmarks.gpu_suite import CHECKS, DTYPE, OPS, TARGETS, TIMES, TOKENS, TOLERANCE, Clock, Plan, Suite
from benchmarks.gpu_targets import first_calls, flatness, memory, warm_up
from benchmarks.rows import Cell, Report, Row, Target
from benchmarks.timing import GPUClock, Times, copy_bandwidth, reason

SEE = "its results are wrong, see Correctness"


def measure(plan: Plan, progress: Callable[[str], None]) -> Report:
    started = time.perf_counter()
    with empty_cache() as cache:
        rows = []
        if plan.first_call:
            rows += first_calls(progress, cache)
            warm_up(progress, cache)
        progress("bandwidth of a copy")
        suite = Suite(
            plan, progress, GPUClock(10, plan.rep), GPUClock(5, plan.rep // 2), copy_bandwidth(), started=started
        )
        report = measure_all(suite)
    report.rows += rows
    report.facts["seconds_taken"] = round(time.perf_counter() - started, 1)
    return report


@contextmanager
def empty_cache() -> Iterator[str]:
    """A new folder for Triton's kernels: the first calls compile them, and what follows finds them there."""
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="latte-kernels-", ignore_cleanup_errors=True) as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield folder
        finally:
            os.environ.pop("TRITON_CACHE_DIR")
            if before is not None:
                os.environ["TRITON_CACHE_DIR"] = before


def measure_all(suite: Suite) -> Report:
    plan, sizes = suite.plan, suite.plan.shapes[0]
    report = Report({
        "dtype": "bfloat16", "latents": sizes.latents, "window": sizes.window, "taps": sizes.taps,
        "copy_bandwidth_tb_per_s": suite.bandwidth / 1e12,
    })  # fmt: skip
    report.rows += check_all(suite, plan.ours, sizes)
    for shape in plan.shapes:
        report.rows += time_ops(suite, [*plan.ours, SOFTMAX, CUDNN], shape)
    targets = list(memory(suite, sizes))
    attention = [contender for contender in plan.ours if contender not in (RGLRU, CONVOLUTION)]
    for number, shape in enumerate(plan.more_shapes):
        if number == 0:
            report.rows += check_all(suite, attention, shape)
        report.rows += time_ops(suite, [*attention, SOFTMAX], shape)
    times = list(time_lengths(suite))
    report.rows += times
    targets += flatness(times)
    for shape in plan.shapes:
        report.rows += time_ops(suite, [LIGHTNET, *([FLEX] if plan.flex else [])], shape, needed=10.0)
    report.rows += targets
    report.rows.sort(key=lambda row: (CHECKS, OPS, TARGETS, TIMES).index(row.table))
    return report


def check_all(suite: Suite, contenders: Sequence[Contender], shape: Sizes) -> Iterator[Row]:
    """Outputs and gradients of the kernels that are timed, on fewer tokens, against float64."""
    tokens = suite.plan.check_tokens
    for contender in contenders:
        suite.progress(f"checking {contender.op}, {shape.heads} heads of width {shape.head_dim}")
        cells: dict[str, Cell] = {
            "op": contender.op, "heads": shape.heads, "head_dim": shape.head_dim, "tokens": tokens
        }  # fmt: skip
        try:
            found = check(contender, shape._replace(batch=2, tokens=tokens), DTYPE, suite.device, "torch")
        except Exception as error:  # the other ops are still worth measuring
            row = Row(CHECKS, cells, TOLERANCE.text(), "wrong", reason(error))
        else:
            status = "ok" if found.right(TOLERANCE.bound) else "wrong"
            row = Row(CHECKS, cells | found._asdict(), TOLERANCE.text(), status)
        if row.status == "wrong":
            suite.wrong.add((contender.op, shape.heads))
        yield row
        suite.give_back()


def time_ops(suite: Suite, contenders: Sequence[Contender], shape: Sizes, needed: float = 0.0) -> Iterator[Row]:
    """Every contender, forward and with backward."""
    for contender, what in itertools.product(contenders, PASSES):
        suite.progress(f"{contender.op} by {contender.by}, {what}, {shape.batch} × {shape.tokens:,} tokens")
        cells: dict[str, Cell] = {
            "op": contender.op, "by": contender.by, "pass": what, "batch": shape.batch, "tokens": shape.tokens,
            "heads": shape.heads, "head_dim": shape.head_dim,
        }  # fmt: skip
        measured = attempt(suite, suite.clock, contender, shape, what, OPS, cells, needed)
        if isinstance(measured, Row):
            yield measured
            continue
        times, moved = measured
        limit = limits.milliseconds(moved, suite.bandwidth)
        cells |= {"wall_ms": times.wall, "one_thread_ms": times.one_thread, "device_ms": times.device}
        cells |= {"limit_ms": limit}
        cells |= {"times_limit": None if times.device is None else times.device / limit}
        yield op_row(suite, contender, shape, what, times, cells)


def attempt(
    suite: Suite, clock: Clock, contender: Contender, shape: Sizes, what: str, table: str, cells: dict[str, Cell],
    needed: float,
) -> tuple[Times, int] | Row:  # fmt: skip
    """Times and bytes to move; or, if it cannot run here or not in the time that is left, the row that says so."""
    if suite.late(needed):
        return Row(table, cells, status="skipped", note="out of time")
    backward = what == "forward+backward"
    try:
        inputs = contender.inputs(shape, DTYPE, suite.device)
        step = contender.step(inputs, shape, backward=backward)
        times = clock.time(step, one_thread=backward and table == OPS)
        y = first(contender.step(inputs, shape, backward=False)())
        return times, limits.bytes_moved(inputs, y, backward=backward)
    except Exception as error:
        return Row(table, cells, status="wrong" if contender.by == LATTE.by else "skipped", note=reason(error))
    finally:
        suite.give_back()


def op_row(suite: Suite, contender: Contender, shape: Sizes, what: str, times: Times, cells: dict[str, Cell]) -> Row:
    if suite.is_wrong(contender, shape):
        return Row(OPS, cells, status="wrong", note=SEE)
    goal = limits.GOALS.get((contender.op, what)) if contender.by == LATTE.by else None
    if goal is None or (shape.head_dim, shape.batch * shape.tokens) != (64, TOKENS):
        return Row(OPS, cells, note=times.note)
    target = Target(goal.floor, unit=" ms wall")
    return Row(OPS, cells, f"{target.text()} (aim {goal.aim:g})", target.status(times.wall), times.note)


def time_lengths(suite: Suite) -> Iterator[Row]:
    """Lengths up to a million; below 32,768 tokens several sequences fill the GPU, above there is one."""
    plan = suite.plan
    contenders = [contender for contender in (LATTE, MACCHIATO, WINDOW, RGLRU) if contender in plan.ours]
    for tokens, what in itertools.product(plan.lengths, PASSES):
        shape = plan.shapes[0]._replace(batch=max(1, plan.tokens // tokens), tokens=tokens)
        suite.progress(f"{what}, {shape.batch} × {tokens:,} tokens")
        for contender in [*contenders, *([SOFTMAX] if tokens <= plan.softmax_up_to else [])]:
            cells: dict[str, Cell] = {
                "op": contender.op, "by": contender.by, "pass": what, "batch": shape.batch, "tokens": tokens
            }  # fmt: skip
            measured = attempt(suite, suite.short_clock, contender, shape, what, TIMES, cells, needed=3.0)
            if isinstance(measured, Row):
                yield measured
                continue
            times, _ = measured
            taken = times.wall if times.device is None else times.device
            cells |= {"wall_ms": times.wall, "device_ms": times.device}
            cells |= {"ns_per_token": 1e6 * taken / (shape.batch * tokens)}
            wrong = suite.is_wrong(contender, shape)
            yield Row(TIMES, cells, status="wrong" if wrong else "measured", note=SEE if wrong else times.note)
