"""`latte inspect`: look at what the latents of a model do with a text."""

import json as jsonlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from latte.cli.generate import note, require_transformers, show_progress

if TYPE_CHECKING:
    from latte.analysis.rows import AttentionRow
    from latte.cli.inspecting import Seen


CAPTION = (
    "in effect: latents, from the average of p(l|t). entropy, inform.: nats. window: its share. back, 90% in: tokens "
    "that latents look back, the mean and what holds nine tenths. softmax: the same mean of window or softmax "
    "attention. collapsed: fewer than a tenth of the latents in effect. idle: latents have less than 1 % together."
)


def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a name on the hub, or a preset's name.")],
    text: Annotated[str | None, typer.Option(help="The text to look at.")] = None,
    file: Annotated[
        Path | None, typer.Option(dir_okay=False, allow_dash=True, help="A file with the text; - is standard input.")
    ] = None,
    output: Annotated[Path, typer.Option(dir_okay=False, writable=True, help="Where to write the HTML report.")] = Path(
        "inspect.html"
    ),
    figures: Annotated[
        Path | None, typer.Option(file_okay=False, help="Also write figures into this folder (needs matplotlib).")
    ] = None,
    formats: Annotated[str, typer.Option("--format", metavar="LIST", help="Of figures: png, svg, pdf.")] = "png",
    metrics: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="A run's metrics.jsonl, for the figure of usage over training."),
    ] = None,
    token: Annotated[
        int | None, typer.Option(help="Also print what this token attends to; -1 is the last.", show_default=False)
    ] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="LIST", help="Show these in report and figures, such as 0,5,11.")
    ] = None,
    show: Annotated[int, typer.Option(min=1, max=65_536, help="Tokens in the report at most.")] = 16_384,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Read no more of the text than this.")] = None,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens to read at once.")] = 4096,
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="Of a preset's random weights.")] = 0,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where to run; auto is CUDA where there is one.")
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Of the weights; auto is the checkpoint's own, for a preset what suits the device."),
    ] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
) -> None:
    """Measure which latents a model uses on a text, and write one HTML report to point and click in."""
    if not output.parent.is_dir():
        raise ValueError(f"--output {output}: there is no directory {output.parent}; create it or name another file")
    if metrics is not None and not metrics.is_file():
        raise ValueError(f"--metrics {metrics}: there is no such file; name the metrics.jsonl of a training run")
    if metrics is not None and figures is None:
        raise ValueError(f"--metrics {metrics}: it is for a figure; say where that goes with --figures FOLDER")
    kinds, numbers = parse_formats(formats), parse_layers(layers)
    given = (text, file)
    require_transformers()
    from latte.analysis.files import replacing
    from latte.cli import inspecting

    loaded = inspecting.load(model, device, dtype, seed, note)
    tokens = inspecting.read_tokens(loaded, *given, max_tokens, note)
    progress = None if json or not sys.stderr.isatty() else show_progress
    seen = inspecting.look(loaded, tokens, layers=numbers, show=show, chunk=chunk, token=token, progress=progress)
    written = []
    if figures is not None:
        written = inspecting.draw(seen, figures, kinds, inspecting.usage_history(seen, model, metrics))
    with replacing(output) as report:
        report.write(inspecting.page(seen, model).encode())
    if json:
        document = inspecting.document(model, seen) | {
            "report": str(output),
            "figures": [str(path) for path in written],
        }
        typer.echo(jsonlib.dumps(document, ensure_ascii=False, allow_nan=False))
    else:
        print_measures(seen)
        for row in seen.rows:
            print_row(row, seen)
    for message in seen.notes:
        note(message)
    note(f"the report is in {output}" + (f", figures in {figures}" if written else ""))


def parse_formats(formats: str) -> list[str]:
    kinds = [kind.strip() for kind in formats.split(",") if kind.strip()]
    for kind in kinds:
        if kind not in ("png", "svg", "pdf"):
            raise ValueError(f"--format {kind}: figures are written as png, svg or pdf")
    if not kinds:
        raise ValueError("--format: it is empty; figures are written as png, svg or pdf")
    return kinds


def parse_layers(layers: str | None) -> list[int] | None:
    if layers is None:
        return None
    try:
        numbers = [int(number) for number in layers.split(",")]
    except ValueError:
        raise ValueError(f"--layers {layers}: give numbers with commas between them, such as 0,5,11") from None
    return sorted(set(numbers))


def print_measures(seen: "Seen") -> None:
    """A row for each head, over the whole text."""
    columns: dict[str, Any] = {
        "in effect": "effective", "entropy": "entropy", "inform.": "information",
        "window": "window", "back": "distance", "90% in": "within", "softmax": "scoreDistance",
    }  # fmt: skip
    heads = seen.heads
    columns = {title: word for title, word in columns.items() if any(word in head for head in heads)}
    table = Table("layer", "head", box=None, padding=(0, 1, 0, 0))
    for title in columns:
        table.add_column(title, justify="right")
    table.add_column()
    for head in heads:
        cells = [number(head[word]) if word in head else "–" for word in columns.values()]
        table.add_row(head["layer"], str(head["head"]), *cells, verdict(head))
    console = Console()
    console.print(table)
    console.print(CAPTION, style="dim", highlight=False)


def verdict(head: dict[str, Any]) -> str:
    return "[yellow]idle" if head.get("idle") else "[red]collapsed" if head.get("collapsed") else ""


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def print_row(row: "AttentionRow", seen: "Seen") -> None:
    """What a token attends to in one layer: for each head the largest weights."""
    console = Console()
    table = Table("head", "window", "attends to: weight token −distance (largest part)", title=row.trace.form.name)
    for head in range(row.weights.shape[0]):
        listed = []
        for attended in row.top(head, 5):
            parts = {"window": attended.local} | {str(n + 1): part for n, part in enumerate(attended.latents)}
            word = repr(seen.text_of(attended.position))
            through = max(parts, key=lambda name: parts[name])
            listed.append(f"{attended.weight:.3f} {word} −{row.token - attended.position} ({through})")
        table.add_row(str(head), f"{row.local_share[head]:.3f}", "  ".join(listed))
    console.print(f"\nToken {row.token} {seen.text_of(row.token)!r}", highlight=False, markup=False)
    console.print(table, markup=False)
