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


Device = Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to measure.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Output = Annotated[
    Path | None, typer.Option(dir_okay=False, writable=True, help="Also write the JSON document to this file.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes and few repeats: a look, no result.")]
Preset = Annotated[str | None, typer.Option(metavar="PRESET", help="The model of ours.")]
Peer = Annotated[str | None, typer.Option(metavar="PRESET", help="The transformer beside it.")]
Seconds = Annotated[float | None, typer.Option(help="Begin nothing new after this long.")]


@app.command()
def ops(device: Device = "cpu", json: Json = False, quick: Quick = False, output: Output = None) -> int:
    """Measure the ops beside PyTorch's softmax attention."""
    return run("ops", device, json=json, quick=quick, output=output)


@app.command()
def decode(
    device: Device = "cpu",
    model: Preset = None,
    peer: Peer = None,
    contexts: Annotated[str | None, typer.Option(metavar="LIST", help="Tokens before, such as 1K,64K.")] = None,
    batches: Annotated[str | None, typer.Option(metavar="LIST", help="Sequences at once, such as 1,8.")] = None,
    seconds: Seconds = None,
    json: Json = False,
    quick: Quick = False,
    output: Output = None,
) -> int:
    """Measure time and memory of one more token against the context, beside a transformer of the same size."""
    return run(
        "decode", device, model=model, peer=peer, contexts=contexts, batches=batches, seconds=seconds, json=json,
        quick=quick, output=output,
    )  # fmt: skip


@app.command()
def model(
    device: Device = "cpu",
    model: Preset = None,
    peer: Peer = None,
    contexts: Annotated[str | None, typer.Option(metavar="LIST", help="Lengths of a sequence, such as 1K,16K.")] = None,
    tokens: Annotated[str | None, typer.Option(metavar="N", help="Of a step, such as 32K.")] = None,
    parts: Annotated[str | None, typer.Option(metavar="LIST", help="Of training, forward and figure.")] = None,
    shapes: Annotated[str | None, typer.Option(metavar="LIST", help="Of the figure: 2.6B and 400M.")] = None,
    seconds: Seconds = None,
    json: Json = False,
    quick: Quick = False,
    output: Output = None,
) -> int:
    """Measure training and forward passes of whole models beside transformers of the same size."""
    return run(
        "model", device, model=model, peer=peer, contexts=contexts, tokens=tokens, parts=parts, shapes=shapes,
        seconds=seconds, json=json, quick=quick, output=output,
    )  # fmt: skip


def run(name: str, device: str, **options: object) -> int:
    """Hand the options that were given on to a benchmark's own program."""
    if device == "cuda":
        require_cuda()
    arguments = ["--device", device]
    for option, value in options.items():
        if value is True:
            arguments.append(f"--{option}")
        elif value is not None and value is not False:
            arguments += [f"--{option}", str(value)]
    return load_benchmark(name).main(arguments)


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
