"""`latte train`: one command per task. A task's options are made when its command is called, not before."""

from typing import Any

import typer
from typer.core import TyperGroup

TASKS = {
    "lm": "Predict the next token of text: files, JSON lines, datasets, or Python's own library.",
    "mqar": "Find again what was told: keys with values, then the keys alone.",
    "chains": "Tokens that follow from stated causes, direct and chained.",
    "listops": "Long Range Arena: nested operations on lists of digits.",
    "pathfinder": "Long Range Arena: are two dots joined by a dashed path? Path-X too.",
    "text": "Long Range Arena: film reviews, byte by byte.",
    "retrieval": "Long Range Arena: do two papers cite each other?",
    "image": "Long Range Arena: grey CIFAR-10, pixel by pixel.",
}


class TaskCommands(TyperGroup):
    """Lists the tasks by name alone; the command of the one that is called has its settings as options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in TASKS:
            raise ValueError(f"task is {args[0]!r}; it must be one of {', '.join(map(repr, TASKS))}")
        name, command, rest = super().resolve_command(ctx, args)
        if name in TASKS:
            from latte.cli.training import task_command

            command = task_command(name, TASKS[name])
        return name, command, rest


app = typer.Typer(cls=TaskCommands)


@app.callback(invoke_without_command=True)
def train(context: typer.Context) -> None:
    """Train a model on a task. Each task has its own options: latte train TASK --help."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def never_called() -> None:
    """Stands for a command in the list of tasks."""


for _name, _help in TASKS.items():
    app.command(_name, help=_help)(never_called)
