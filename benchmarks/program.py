"""What the programs that measure whole models share: their options, their time, and a report written as it grows."""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from benchmarks.rows import Cell, Report, Row, tables, text_table

BAD_INPUT = 2
STARTED = time.perf_counter()


class Parser(argparse.ArgumentParser):
    """Raises for bad arguments instead of printing the usage and ending the program."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def make_parser(name: str, description: str, seconds: float) -> Parser:
    """The options that every such program has."""
    parser = Parser(prog=f"benchmarks/{name}.py", description=description)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (default: cpu)")
    parser.add_argument("--quick", action="store_true", help="tiny models and short contexts: a look, no result")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help=f"begin nothing new after this long (default: {seconds:g})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document and no tables")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON document to this file")
    return parser


def whole_number(text: str) -> int:
    """A number from 1, K for 1,024."""
    text = text.strip()
    digits, factor = (text[:-1], 1024) if text.upper().endswith("K") else (text, 1)
    if not digits.isdecimal() or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1, such as 65536 or 64K")
    return factor * int(digits)


def whole_numbers(text: str) -> list[int]:
    """Numbers from 1 apart by commas: "1K,16K,65536"."""
    return [whole_number(word) for word in text.split(",")]


@dataclass
class Run:
    """One run: its options, its report, and the file that holds what there is so far."""

    name: str
    options: argparse.Namespace
    command: str
    facts: dict[str, Cell] = field(default_factory=dict)
    started: float = STARTED

    def __post_init__(self) -> None:
        self.report = Report(self.facts)

    def add(self, *rows: Row) -> None:
        """Keep rows; what was measured survives whatever ends the run."""
        self.report.rows += rows
        self.write()

    def late(self, needed: float = 0.0) -> bool:
        """Whether `needed` seconds more would be too many."""
        return time.perf_counter() - self.started + needed > self.options.seconds

    def progress(self, step: str) -> None:
        print(f"{time.perf_counter() - self.started:5.0f} s  {step} …", file=sys.stderr, flush=True)

    def document(self) -> dict:
        self.facts["seconds_taken"] = round(time.perf_counter() - self.started, 1)
        return self.report.document(self.command, self.options.device, self.options.quick, self.name)

    def write(self) -> None:
        if self.options.output is not None:
            text = json.dumps(self.document(), ensure_ascii=False, indent=1)
            self.options.output.write_text(text + "\n", encoding="utf-8")


def command_of(parser: Parser, options: argparse.Namespace) -> str:
    """How to run this again; of the output only the file's name, since its folder is this machine's own affair."""
    words = ["python", parser.prog, "--device", options.device]
    for option, value in vars(options).items():
        flag = f"--{option.replace('_', '-')}"
        if option == "device" or value == parser.get_default(option):
            continue
        match value:
            case True:
                words.append(flag)
            case Path():
                words += [flag, value.name]
            case list():
                words += [flag, ",".join(map(str, value))]
            case _:
                words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def main(
    name: str, parser: Parser, measure: Callable[[Run], None], arguments: Sequence[str] | None, started: float = STARTED
) -> int:
    """Measure, print and write; 0, or 1 if a result was wrong, or 2 for bad arguments."""
    try:
        options = parser.parse_args(arguments)
        check(options)
        run = Run(name, options, command_of(parser, options), started=started)
        measure(run)
    except ValueError as error:
        print(f"benchmarks/{name}.py: error:", " ".join(str(error).split()), file=sys.stderr)
        return BAD_INPUT
    run.write()
    document = run.document()
    if not options.json:
        for title, rows in tables(document["rows"]).items():
            print(text_table(title, rows), end="\n\n")
    print(json.dumps(document, ensure_ascii=False))
    return 0 if run.report.right else 1


def check(options: argparse.Namespace) -> None:
    output = options.output
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise ValueError(f"--output {output}: no file can be written there; is its directory missing?")
    if not options.seconds > 0:
        raise ValueError(f"--seconds {options.seconds:g}: it must be positive")
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no CUDA device on this machine; use --device cpu")


def require_transformers() -> None:
    if find_spec("transformers") is None:
        raise ValueError("models need Transformers, which is not installed; pip install 'latte-attention[train]'")
