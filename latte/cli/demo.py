"""`latte demo`: what the ops can do, shown on this machine."""

import json as jsonlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from latte.analysis.tour import CutCheck, Reading, Speed, Steps, Tour


def demo(
    output: Annotated[Path, typer.Option(dir_okay=False, writable=True, help="Where to write the HTML report.")] = Path(
        "report.html"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Shorter sequences: seconds instead of a minute.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Show what the ops can do on this machine, and write it down as one HTML page."""
    if not output.parent.is_dir():
        raise ValueError(f"--output {output}: there is no directory {output.parent}; create it or name another file")
    from latte.analysis.report import render_report
    from latte.analysis.tour import take_tour

    progress = Console(stderr=True)
    tour = take_tour(quick=quick, progress=lambda step: progress.print(f"[dim]{step} …[/dim]"))
    output.write_text(render_report(tour), encoding="utf-8")
    if json:
        typer.echo(jsonlib.dumps(asdict(tour) | {"report": str(output)}))
    else:
        print_tour(tour)
    progress.print(f"The report is in {output}", highlight=False, soft_wrap=True)


def print_tour(tour: "Tour") -> None:
    """Print everything the tour saw."""
    console = Console()
    print_readings(console, tour.readings)
    print_cuts(console, tour.cuts)
    print_speed(console, tour.speed)
    print_steps(console, tour.steps)


def print_readings(console: Console, readings: list["Reading"]) -> None:
    """Print each implied attention matrix as a text heat map."""
    from latte.analysis.figures import text_heat_map

    print_heading(console, "Attention is a probability")
    console.print("A row per token t, a column per token s; the ink is p(s|t).", highlight=False)
    for reading in readings:
        console.print(f"\n[bold]{reading.name}[/bold]: {reading.meaning}", highlight=False)
        console.print(text_heat_map(reading.weights), highlight=False, markup=False)
        console.print(f"rows sum to 1 within {reading.largest_row_error:.1e}", highlight=False)


def print_cuts(console: Console, cuts: list["CutCheck"]) -> None:
    """Print how far a run in two pieces is from the run in one."""
    print_heading(console, "Cut = whole: the state is all that the past contributes")
    table = number_table("op", "tokens", "cut after", "largest difference")
    for cut in cuts:
        table.add_row(cut.name, f"{cut.tokens:,}", f"{cut.cut:,}", f"{cut.largest_difference:.1e}")
    console.print(table)


def print_speed(console: Console, speed: "Speed") -> None:
    """Print the time per token of every form at every length."""
    print_heading(console, "Linear time: µs per token, forward pass")
    table = number_table("tokens", *(curve.name for curve in speed.curves))
    for index, length in enumerate(speed.lengths):
        table.add_row(f"{length:,}", *(f"{curve.microseconds_per_token[index]:.2f}" for curve in speed.curves))
    console.print(table)
    console.print(speed.setting, highlight=False)


def print_steps(console: Console, steps: list["Steps"]) -> None:
    """Print what one more token costs after a short and a long context."""
    print_heading(console, "Constant memory: what one more token costs")
    table = number_table("op", "context", "step, µs", "state, bytes", "softmax cache, bytes")
    for step in steps:
        table.add_row(
            step.name,
            f"{step.context:,}",
            f"{step.microseconds:.0f}",
            f"{step.state_bytes:,}",
            f"{step.kv_cache_bytes:,}",
        )
    console.print(table)


def print_heading(console: Console, title: str) -> None:
    """Begin a part of the output."""
    console.print()
    console.rule(title, align="left")


def number_table(first: str, *others: str) -> Table:
    """A table whose columns after the first hold numbers."""
    table = Table(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
