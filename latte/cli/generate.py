"""`latte generate`: continue a text, token by token, with a state that does not grow."""

import json as jsonlib
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from latte.cli.generation import Continuation, Reading


def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a name on the hub, or a preset's name.")],
    prompt: Annotated[str | None, typer.Option(help="The text to continue.")] = None,
    file: Annotated[
        Path | None, typer.Option(dir_okay=False, allow_dash=True, help="A file with the text; - is standard input.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to add at most.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help="Above 1 bolder, below 1 safer; implies --sample.", show_default="1")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Choose among the k likeliest tokens; implies --sample.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Choose among the likeliest tokens that have probability p together; implies --sample."),
    ] = None,
    sample: Annotated[
        bool | None,
        typer.Option("--sample/--greedy", help="Draw the next token, or take the likeliest.", show_default="greedy"),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=-(2**63), max=2**63 - 1, help="Of drawing, and of a preset's random weights.")
    ] = 0,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where to run; auto is CUDA where there is one.")
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Of the weights; auto is the checkpoint's own, for a preset what suits the device."),
    ] = "auto",
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of the prompt to read at once.")] = 8192,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document at the end instead of the text.")
    ] = False,
) -> None:
    """Continue a text. The text goes to stdout as it comes; speed and the size of the state go to stderr."""
    choice = choose(temperature, top_k, top_p, sample)
    text = read_prompt(prompt, file)
    require_transformers()
    from latte.cli import generation

    loaded = generation.load(model, device, dtype, seed, note)
    tokens = generation.encode(loaded, text)
    reading = generation.read(
        loaded, tokens, chunk, progress=None if json or not sys.stderr.isatty() else show_progress
    )
    written = generation.continue_text(
        loaded, reading, max_new_tokens, choice, seed, show=None if json else lambda piece: typer.echo(piece, nl=False)
    )
    if json:
        typer.echo(jsonlib.dumps(generation.document(model, loaded, reading, written), ensure_ascii=False))
    else:
        typer.echo()
        report(reading, written)


def require_transformers() -> None:
    if find_spec("transformers") is None:
        raise ValueError("models need Transformers, which is not installed; pip install 'latte-attention[train]'")


def choose(
    temperature: float | None, top_k: int | None, top_p: float | None, sample: bool | None
) -> dict[str, float | int | bool]:
    """How tokens are chosen, as Transformers' `generate` takes it; raises ValueError for what contradicts itself."""
    if temperature is not None and not 0 < temperature < math.inf:
        raise ValueError(
            f"--temperature {temperature:g}: it must be above 0 and finite; for the likeliest token use --greedy"
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"--top-p {top_p:g}: it must be above 0 and at most 1")
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    given = {name: value for name, value in given.items() if value is not None}
    if given and sample is False:
        flag = next(iter(given)).replace("_", "-")
        raise ValueError(f"--greedy with --{flag}: the likeliest token needs no {flag}; leave one of them out")
    return {"do_sample": bool(sample or given), **given}


def read_prompt(prompt: str | None, file: Path | None) -> bytes:
    if (prompt is None) == (file is None):
        raise ValueError("give the text to continue with --prompt TEXT or --file FILE, one of them")
    if file is None:
        return str(prompt).encode(errors="surrogateescape")  # bytes that were no text as they were typed
    if str(file) == "-":
        return sys.stdin.buffer.read()
    if not file.is_file():
        raise ValueError(f"--file {file}: there is no such file")
    return file.read_bytes()


def note(message: str) -> None:
    typer.echo(f"latte: {message}", err=True)


def show_progress(read: int, total: int) -> None:
    """One line that counts."""
    typer.echo(f"\rlatte: read {read:,} of {total:,} tokens", err=True, nl=read == total)


def report(reading: "Reading", written: "Continuation") -> None:
    """Speed and memory, on stderr."""
    if reading.seconds > 0:
        rate = reading.read / reading.seconds
        note(f"prefill: {reading.read:,} tokens in {reading.seconds:.2f} s, {rate:,.0f} tokens/s")
    note(f"decode: {len(written.tokens):,} tokens in {written.seconds:.2f} s, {written.rate:,.1f} tokens/s")
    if written.state_bytes == reading.state_bytes:
        note(f"state: {written.state_bytes:,} bytes, as many as after the prompt")
    elif reading.state_bytes:
        note(f"state: {written.state_bytes:,} bytes, {reading.state_bytes:,} after the prompt: it grows")
    else:
        note(f"state: {written.state_bytes:,} bytes")
