"""`latte reproduce`: the paper's experiments, from nothing to a table."""

import json as jsonlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from latte.cli.generate import note

Name = Literal["table-1", "table-2", "table-3", "figure-5"]


def reproduce(
    context: typer.Context,
    experiment: Annotated[Name | None, typer.Argument(help="Of the paper.", show_default=False)] = None,
    budget: Annotated[
        Literal["default", "paper"], typer.Option(help="Small models and little data, or the paper's own.")
    ] = "default",
    models: Annotated[
        str | None, typer.Option(metavar="LIST", help="These alone, such as latte,latte-r-swa++.", show_default="all")
    ] = None,
    parts: Annotated[
        str | None, typer.Option(metavar="LIST", help="These columns alone, such as listops.", show_default="all")
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="NAME=VALUE",
            help="A setting of latte train for all runs, or as TASK.NAME for one task's; repeatable.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for the runs.", show_default="runs/EXPERIMENT-BUDGET")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin all runs anew.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print all runs' settings as JSON and do nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
) -> int:
    """Train the models of one of the paper's experiments and print its table. Called again, it goes on."""
    if experiment is None:
        typer.echo(context.get_help())
        return 0
    from latte.cli.training import require_training

    require_training()
    from latte.train import reproduction

    folder = output or Path("runs") / f"{experiment}-{budget}"
    trials = reproduction.trials(
        experiment, budget=budget, output=folder, models=split(models), parts=split(parts), given=pairs(given or [])
    )
    if show:
        typer.echo(jsonlib.dumps([trial.plan.document() for trial in trials], indent=1, ensure_ascii=False))
        return 0
    return perform(experiment, budget, trials, folder, overwrite=overwrite, json=json)


def perform(experiment: str, budget: str, trials: Sequence[Any], folder: Path, *, overwrite: bool, json: bool) -> int:
    """Run what is left to run, and print what there is when all has ended; of several processes the first speaks."""
    from latte.cli.training import FAILED
    from latte.train.checkpoints import write_json
    from latte.train.distributed import launched_rank, leave
    from latte.train.guards import Diverged
    from latte.train.progress import Display, make_display
    from latte.train.reproduction import EXPERIMENTS, reproduce

    first, about = launched_rank() == 0, EXPERIMENTS[experiment]

    def document(runs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"experiment": experiment, "title": about.title, "budget": budget, "runs": runs}

    def keep(runs: list[dict[str, Any]]) -> None:
        if first:
            write_json(folder / "results.json", document(runs))

    display = make_display() if first else Display()
    try:
        runs, signal = reproduce(experiment, trials, overwrite=overwrite, display=display, done=keep)
    except ValueError:
        if first:
            raise
        return 2
    except Diverged as error:
        if first:
            typer.echo(f"latte: error: {error}", err=True)
        return FAILED
    leave()
    if first and signal is not None:
        note("interrupted; the same command goes on")
    elif first and json:
        typer.echo(jsonlib.dumps(document(runs), ensure_ascii=False))
    elif first:
        print_table(about.title, runs, with_paper=budget == "paper")
    if first and signal is None:
        note(f"the runs are in {folder}, and what came of them in {folder / 'results.json'}")
    return 0 if signal is None else 128 + signal


def print_table(title: str, runs: Sequence[dict[str, Any]], *, with_paper: bool) -> None:
    """A row for each model, a column for each part; `with_paper` the paper's own figures in brackets."""
    known = with_paper and any(run["paper"] is not None for run in runs)
    table = Table("model", title=title, caption="in brackets: the paper's own figure" if known else None, box=None)
    parts, models = (list(dict.fromkeys(run[word] for run in runs)) for word in ("part", "model"))
    for part in parts:
        table.add_column(part, justify="right")
    for model in models:
        found = {run["part"]: cell(run, with_paper) for run in runs if run["model"] == model}
        table.add_row(model, *(found.get(part, "") for part in parts))
    Console(soft_wrap=True).print(table, markup=False)


def cell(run: dict[str, Any], with_paper: bool) -> str:
    style = "{:.2f}" if run["metric"] == "perplexity" else "{:.1%}"
    paper = f" ({style.format(run['paper'])})" if with_paper and run["paper"] is not None else ""
    return style.format(run["value"]) + paper


def split(words: str | None) -> list[str] | None:
    return None if words is None else [word.strip() for word in words.split(",") if word.strip()]


def pairs(given: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE, again and again."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"--with {text}: it must be NAME=VALUE, such as steps=100 or lm.data=book.txt")
        found[name.replace("-", "_")] = value
    return found
