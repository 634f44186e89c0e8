"""`latte bench`: run the benchmarks of a source checkout."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import typer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

app = typer.Typer()


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Measure speed and memory on this machine."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def ops(
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to measure.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Short sequences and few repeats: a look, no result.")] = False,
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, writable=True, help="Also write the JSON document to this file.")
    ] = None,
) -> int:
    """Measure the ops beside PyTorch's softmax attention."""
    if device == "cuda":
        require_cuda()
    arguments = ["--device", device]
    if json:
        arguments.append("--json")
    if quick:
        arguments.append("--quick")
    if output is not None:
        arguments += ["--output", str(output)]
    return load_benchmark("ops").main(arguments)


def require_cuda() -> None:
    """Raise a ValueError where PyTorch has no CUDA device to measure on."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no CUDA device on this machine; use --device cpu")


def load_benchmark(name: str) -> ModuleType:
    """Import benchmarks/<name>.py, which stands beside the package in a source checkout and in no installation."""
    path = BENCHMARKS / f"{name}.py"
    if not path.is_file():
        raise ValueError(
            f"no benchmark at {path}: benchmarks are not part of the installed package; "
            "clone the repository and run `make bench` there"
        )
    spec = spec_from_file_location(f"latte_benchmark_{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded as a Python module")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module
