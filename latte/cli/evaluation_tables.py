"""The tables of `latte evaluate`."""

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from latte.cli.evaluation import Measured, names, ratios
from latte.tasks.evaluation import Estimate, PasskeyReport

WIDTH = 120  # where there is no terminal to ask
LARGE = 1e5  # from where on digits after the point say nothing
BYTE_UNITS = ("B", "KiB", "MiB", "GiB")


def show(results: Sequence[Measured]) -> None:
    """Every table that there are results for, on stdout."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for table in tables(list(results)):
        console.print(table.title, highlight=False)  # on a line of its own, however narrow the table is
        table.title = None
        console.print(table)


def tables(results: list[Measured]) -> Iterator[Table]:
    if results[0].perplexity is not None:
        yield perplexity_table(results)
        if results[0].perplexity.positions:
            yield position_table(results)
    yield from (passkey_table(m.name, m.passkey) for m in results if m.passkey is not None)
    if rows := list(accuracy_rows(results)):
        yield accuracy_table(results, rows)
    if results[0].speed is not None:
        yield speed_table(results)


def make_table(title: str, first: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def perplexity_table(results: list[Measured]) -> Table:
    compared = ratios(results)
    reports = [measured.perplexity for measured in results if measured.perplexity is not None]
    columns = ["tokens", "windows", "texts", *names(results), *(["ratio"] if compared else [])]
    table = make_table(f"Perplexity, {reports[0].mode} windows", "length", columns)
    for index, result in enumerate(reports[0].lengths):
        cells = [f"{result.tokens:,}", f"{result.windows:,}", f"{result.documents:,}"]
        cells += [estimate(report.lengths[index].perplexity, 2) for report in reports]
        table.add_row(f"{result.length:,}", *cells, *([estimate(compared[index], 4)] if compared else []))
    if len(reports) > 1 and not compared:
        table.caption = "The models cut the text into different tokens: their perplexities cannot be compared."
    return table


def position_table(results: list[Measured]) -> Table:
    reports = [measured.perplexity for measured in results if measured.perplexity is not None]
    table = make_table(f"Loss by position, up to {reports[0].lengths[-1].length:,}", "position", names(results))
    for index, bucket in enumerate(reports[0].positions):
        cells = [estimate(report.positions[index].loss, 3) for report in reports]
        table.add_row(f"{bucket.start:,} – {bucket.end - 1:,}", *cells)
    return table


def passkey_table(name: str, report: PasskeyReport) -> Table:
    depths = sorted({cell.depth for cell in report.cells})
    title = f"Passkey, {name}: written % / first of {report.candidates} % / probability %"
    table = make_table(title, "length", [f"depth {depth:g}" for depth in depths])
    for length in sorted({cell.length for cell in report.cells}):
        cells = [cell for cell in report.cells if cell.length == length]
        shown = (
            f"{100 * c.exact.value:.0f} / {100 * c.first.value:.0f} / {100 * c.probability.value:.0f}" for c in cells
        )
        table.add_row(f"{length:,}", *shown)
    return table


def accuracy_rows(results: Sequence[Measured]) -> Iterator[tuple[str, list[Estimate], int]]:
    """Name, estimate of each model, and digits after the point."""
    if lambada := [m.lambada for m in results if m.lambada is not None]:
        yield "LAMBADA accuracy %", [percent(report.accuracy) for report in lambada], 2
        yield "LAMBADA perplexity", [report.perplexity for report in lambada], 2
    if blimp := [m.blimp for m in results if m.blimp is not None]:
        yield "BLiMP accuracy %", [percent(report.accuracy) for report in blimp], 2
        for index, group in enumerate(blimp[0].phenomena):
            yield f"  {group.name}", [percent(report.phenomena[index].accuracy) for report in blimp], 2
    if scores := [m.tasks for m in results if m.tasks is not None]:
        for index, score in enumerate(scores[0]):
            values = [Estimate(row[index].value, row[index].error) for row in scores]
            yield f"{score.task} {score.metric}", values, 4


def accuracy_table(results: Sequence[Measured], rows: Sequence[tuple[str, list[Estimate], int]]) -> Table:
    paired = len(results) > 1
    table = make_table("Tasks", "task", [*names(results), *(["difference"] if paired else [])])
    for name, values, digits in rows:
        difference = [estimate(Estimate(values[0].value - values[1].value, None), digits)] if paired else []
        table.add_row(name, *(estimate(value, digits) for value in values), *difference)
    return table


def speed_table(results: Sequence[Measured]) -> Table:
    reports = [measured.speed for measured in results if measured.speed is not None]
    columns = ("model", "prefill tokens/s", "decode tokens/s", "ms a step", "cache")
    table = make_table(f"Speed, batch of {reports[0][0].batch}", "length", columns)
    for index, first in enumerate(reports[0]):
        for name, report in zip(names(results), reports, strict=True):
            row = report[index]
            rates = (f"{row.prefill_tokens_per_s:,.0f}", f"{row.tokens_per_s:,.1f}", f"{1e3 * row.step_seconds:.2f}")
            table.add_row(f"{first.length:,}", name, *rates, size(row.cache_bytes))
    return table


def percent(value: Estimate) -> Estimate:
    return Estimate(100 * value.value, None if value.error is None else 100 * value.error)


def estimate(value: Estimate, digits: int) -> str:
    shape = f",.{digits}f" if abs(value.value) < LARGE else ".3g"
    shown = format(value.value, shape)
    return shown if value.error is None else f"{shown} ± {format(value.error, shape)}"


def size(count: float) -> str:
    """Bytes as a person reads them."""
    for unit in BYTE_UNITS[:-1]:
        if count < 1024:
            return f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {BYTE_UNITS[-1]}"
