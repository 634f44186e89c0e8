"""The root of the `latte` command, and how errors leave it."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import latte
from latte.cli import bench, convert, demo, evaluate, generate, inspect, reproduce, train

BAD_INPUT = 2
INTERRUPTED = 130

app = typer.Typer(name="latte", add_completion=False, pretty_exceptions_enable=False)
app.command("convert")(convert.convert)
app.command("demo")(demo.demo)
app.command("evaluate")(evaluate.evaluate)
app.command("generate")(generate.generate)
app.command("inspect")(inspect.inspect)
app.command("reproduce")(reproduce.reproduce)
app.add_typer(bench.app, name="bench")
app.add_typer(train.app, name="train")


def print_version(wanted: bool) -> None:
    """Print the version and stop, when it was asked for."""
    if wanted:
        typer.echo(f"latte {latte.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Linear-time attention as a latent probabilistic model."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; bad input becomes one line on stderr instead of a traceback."""
    try:
        code = app(args=arguments, prog_name="latte", standalone_mode=False)
    except typer.TyperException as error:
        return fail(error.format_message())
    except (ValueError, OSError) as error:
        return fail(str(error))
    except MemoryError as error:
        return fail(f"the machine's memory is full: {error or 'ask for less at once'}")
    except typer.Abort as error:
        if isinstance(error.__cause__, EOFError):  # a file that ends too soon, which Typer takes for a closed terminal
            return fail(f"a file is cut short: {error.__cause__ or 'its end is missing'}")
        return INTERRUPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def fail(message: str) -> int:
    """Print the message as one line on stderr and return the exit code for bad input."""
    print("latte: error:", " ".join(message.split()), file=sys.stderr)  # noqa: T201
    return BAD_INPUT
