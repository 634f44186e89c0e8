"""`latte evaluate`: what a model can do, at which length, and beside the model it was made from."""

import json as jsonlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from latte.cli.generate import require_transformers

UNITS = {"K": 2**10, "M": 2**20}


@dataclass(frozen=True)
class Settings:
    """What to measure and how, as given on the command line."""

    text: list[Path]
    text_field: str
    join: bool
    lengths: list[int]
    mode: Literal["whole", "sliding"]
    stride: int | None
    max_tokens: int
    buckets: int
    spacing: Literal["log", "equal"]
    bos: Literal["auto", "always", "never"]
    passkey: bool
    depths: list[float]
    trials: int
    distractors: int
    haystack: Path | None
    lambada: Path | None
    blimp: Path | None
    limit: int | None
    tasks: list[str]
    include_path: Path | None
    num_fewshot: int | None
    speed: bool
    speed_batch: int
    attention: str | None
    device: Literal["auto", "cpu", "cuda"]
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    batch_tokens: int
    chunk: int | None
    seed: int


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a name on the hub, or a preset's name.")],
    against: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="A second model beside it, such as the one it was made from.")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Measure perplexity on it: .txt, .jsonl, also .xz, .gz, .bz2, .zst."),
    ] = None,
    text_field: Annotated[str, typer.Option(help="Of JSON lines, the field with the text.")] = "text",
    join: Annotated[bool, typer.Option("--join", help="Read all documents as one long text.")] = False,
    lengths: Annotated[
        str, typer.Option(metavar="LIST", help="Tokens of context for --text, --passkey and --speed.")
    ] = "2K,4K,8K",
    mode: Annotated[
        Literal["whole", "sliding"], typer.Option(help="Windows that do not overlap, or that move by --stride.")
    ] = "whole",
    stride: Annotated[
        int | None, typer.Option(min=1, help="Of sliding windows.", show_default="half the length")
    ] = None,
    max_tokens: Annotated[str, typer.Option(metavar="N", help="Of text at most, for each length.")] = "256K",
    buckets: Annotated[int, typer.Option(min=1, help="Of positions, for the loss by position.")] = 24,
    spacing: Annotated[Literal["log", "equal"], typer.Option(help="Of the buckets.")] = "log",
    bos: Annotated[
        Literal["auto", "always", "never"],
        typer.Option(help="Begin with the tokenizer's BOS; auto is where the tokenizer itself does."),
    ] = "auto",
    passkey: Annotated[bool, typer.Option("--passkey", help="Measure retrieval of a key hidden in a text.")] = False,
    depths: Annotated[
        str, typer.Option(metavar="LIST", help="Where the key is hidden, 0 the beginning and 1 the end.")
    ] = "0,0.25,0.5,0.75,1",
    trials: Annotated[int, typer.Option(min=1, help="Keys for each length and depth.")] = 8,
    distractors: Annotated[int, typer.Option(min=1, help="Wrong keys beside the right one.")] = 7,
    haystack: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The text to hide keys in.", show_default="sentences made here")
    ] = None,
    lambada: Annotated[Path | None, typer.Option(metavar="FILE", help="LAMBADA as JSON lines.")] = None,
    blimp: Annotated[
        Path | None, typer.Option(metavar="PATH", help="BLiMP as a folder, or a tar, of JSON lines.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Passages of LAMBADA, pairs of each BLiMP paradigm, examples of each task."),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="LIST", help="Of lm-evaluation-harness, such as hellaswag,arc_easy.")
    ] = None,
    include_path: Annotated[Path | None, typer.Option(metavar="FOLDER", help="With tasks of your own.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question.", show_default="the task's own")
    ] = None,
    speed: Annotated[bool, typer.Option("--speed", help="Measure time and cache of one more token.")] = False,
    speed_batch: Annotated[int, typer.Option(min=1, help="Sequences at once, for --speed.")] = 1,
    attention: Annotated[
        str | None, typer.Option(metavar="NAME", help="Transformers' implementation: sdpa, eager, flash_attention_2.")
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where to run; auto is CUDA where there is one.")
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Of the weights; auto is the checkpoint's own, for a preset what suits the device."),
    ] = "auto",
    batch_tokens: Annotated[str, typer.Option(metavar="N", help="Tokens at once, but at least one text.")] = "32K",
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a text to read at once.", show_default="suits the model")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=-(2**63), max=2**63 - 1, help="Of keys, subsets, and a preset's random weights.")
    ] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also write the JSON document to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw perplexity and loss by position: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Measure a model: perplexity by length and position, retrieval, LAMBADA, BLiMP, harness tasks, speed."""
    settings = Settings(
        text=text or [], text_field=text_field, join=join, lengths=parse_lengths("--lengths", lengths), mode=mode,
        stride=stride, max_tokens=parse_length("--max-tokens", max_tokens), buckets=buckets, spacing=spacing, bos=bos,
        passkey=passkey, depths=parse_depths(depths), trials=trials, distractors=distractors, haystack=haystack,
        lambada=lambada, blimp=blimp, limit=limit, tasks=split(tasks or ""), include_path=include_path,
        num_fewshot=num_fewshot, speed=speed, speed_batch=speed_batch, attention=attention, device=device, dtype=dtype,
        batch_tokens=parse_length("--batch-tokens", batch_tokens), chunk=chunk, seed=seed,
    )  # fmt: skip
    check(settings, output, plot)
    require_transformers()
    from latte.cli import evaluation, evaluation_tables

    if plot is not None:
        evaluation.check_plot(plot)
    results = evaluation.run(model, against, settings)
    document = evaluation.document(results, settings)
    if output is not None:
        write_document(output, document)
    if plot is not None:
        evaluation.draw(results, plot)
    if json:
        typer.echo(jsonlib.dumps(document, ensure_ascii=False))
    else:
        evaluation_tables.show(results)


def check(settings: Settings, output: Path | None, plot: Path | None) -> None:
    """Raise ValueError for what contradicts itself or is not there, before anything is loaded."""
    measured = (settings.text, settings.passkey, settings.lambada, settings.blimp, settings.tasks, settings.speed)
    if not any(measured):
        raise ValueError(
            "nothing to measure; give one or more of --text FILE, --passkey, --lambada FILE, --blimp PATH, "
            "--tasks LIST, --speed"
        )
    for name, path in (("--haystack", settings.haystack), ("--lambada", settings.lambada)):
        if path is not None and not path.is_file():
            raise ValueError(f"{name} {path}: there is no such file")
    for path in settings.text:
        if not path.is_file():
            raise ValueError(f"--text {path}: there is no such file")
    if settings.blimp is not None and not settings.blimp.exists():
        raise ValueError(f"--blimp {settings.blimp}: there is no such file or folder")
    if plot is not None and not settings.text:
        raise ValueError(f"--plot {plot}: it draws perplexity, which needs --text FILE")
    for name, path in (("--output", output), ("--plot", plot)):  # what takes hours must not be lost for these
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{name} {path}: there is no folder {path.parent}")
        if path is not None and not os.access(path.parent, os.W_OK):
            raise ValueError(f"{name} {path}: {path.parent} does not allow to write there; name another file")


def split(words: str) -> list[str]:
    return [word.strip() for word in words.split(",") if word.strip()]


def parse_length(option: str, word: str) -> int:
    """A number of tokens such as 500, 2K or 1M."""
    number, unit = (word[:-1], UNITS[word[-1].upper()]) if word[-1:].upper() in UNITS else (word, 1)
    if not number.isascii() or not number.isdigit() or int(number) < 1:
        raise ValueError(f"{option} {word}: it must be a number of tokens such as 500, 2K or 1M")
    return int(number) * unit


def parse_lengths(option: str, words: str) -> list[int]:
    found = sorted({parse_length(option, word) for word in split(words)})
    if not found:
        raise ValueError(f"{option}: it is empty; name lengths such as 2K,4K,8K")
    return found


def parse_depths(words: str) -> list[float]:
    try:
        found = sorted({float(word) for word in split(words)})
    except ValueError as error:
        raise ValueError(f"--depths {words}: they must be numbers between 0 and 1, such as 0,0.5,1") from error
    if not found or not 0 <= found[0] <= found[-1] <= 1:
        raise ValueError(f"--depths {words}: they must be numbers between 0 and 1, such as 0,0.5,1")
    return found


def write_document(path: Path, document: dict[str, Any]) -> None:
    """All of the file or nothing of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            jsonlib.dump(document, file, ensure_ascii=False, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
