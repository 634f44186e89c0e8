"""`latte demo`: a language model trained, run and looked at on this machine."""

import json as jsonlib
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from latte.cli.generate import note, require_transformers

if TYPE_CHECKING:
    from latte.analysis.report import Lesson, Story, Writing


def demo(
    output: Annotated[
        Path,
        typer.Option(
            dir_okay=False, writable=True, help="The HTML report; the model goes into a folder of that name beside it."
        ),
    ] = Path("report.html"),
    quick: Annotated[bool, typer.Option("--quick", help="A few steps and short contexts: a look, no result.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Train a small language model on Python's own library, let it write, time it beside softmax attention, and write
    down what was seen as one HTML page."""
    if not output.parent.is_dir():
        raise ValueError(f"--output {output}: there is no directory {output.parent}; create it or name another file")
    if not output.suffix:
        raise ValueError(f"--output {output}: give it an ending, such as {output}.html; the model goes into {output}")
    require_transformers()
    if find_spec("accelerate") is None:
        raise ValueError("training needs Accelerate, which is not installed; pip install 'latte-attention[train]'")
    from latte.analysis.files import replacing
    from latte.analysis.report import render_report
    from latte.cli.demonstration import demonstrate
    from latte.train.progress import make_display

    folder = output.with_suffix("")
    story, latents = demonstrate(folder, quick=quick, display=make_display(), note=note)
    with replacing(output) as file:
        file.write(render_report(story, latents).encode())
    if json:
        typer.echo(jsonlib.dumps(asdict(story) | {"report": str(output), "model": str(folder / "model")}))
    else:
        print_story(story)
    note(f"the report is in {output}, and `latte generate {folder / 'model'} --prompt ...` goes on with the model")


def print_story(story: "Story") -> None:
    """Print everything that was seen."""
    console = Console()
    print_lesson(console, story.lesson)
    print_writing(console, story.writing)
    print_costs(console, story)


def print_lesson(console: Console, lesson: "Lesson") -> None:
    """Print how the model learned."""
    print_heading(console, "It learns")
    rate = lesson.tokens / lesson.seconds
    console.print(
        f"{lesson.preset}, {lesson.parameters:,} parameters: {lesson.tokens:,} tokens of {lesson.source} in "
        f"{lesson.seconds:.0f} s, {rate:,.0f} a second",
        highlight=False,
    )
    console.print(f"held-out files: {lesson.bits_per_byte:.3f} bits per byte", highlight=False)


def print_writing(console: Console, writing: "Writing") -> None:
    """Print what the model wrote."""
    print_heading(console, "It writes")
    console.print(f"{writing.prompt}{writing.text}", highlight=False, markup=False)
    console.print(
        f"{writing.tokens:,} tokens, {writing.tokens_per_s:,.0f} a second; state {writing.state_bytes_before:,} bytes "
        f"after the prompt, {writing.state_bytes_after:,} at the end",
        highlight=False,
    )


def print_costs(console: Console, story: "Story") -> None:
    """Print what one more token costs."""
    print_heading(console, "Constant time and memory: what one more token costs")
    columns = [f"{costs.name}, {what}" for costs in story.costs for what in ("ms", "bytes")]
    table = Table("tokens before")
    for name in columns:
        table.add_column(name, justify="right")
    for index, context in enumerate(story.contexts):
        cells = (f"{costs.milliseconds[index]:.2f}" for costs in story.costs)
        sizes = (f"{costs.cache_bytes[index]:,}" for costs in story.costs)
        table.add_row(f"{context:,}", *(cell for pair in zip(cells, sizes, strict=True) for cell in pair))
    console.print(table)
    console.print(story.setting, highlight=False)


def print_heading(console: Console, title: str) -> None:
    """Begin a part of the output."""
    console.print()
    console.rule(title, align="left")
