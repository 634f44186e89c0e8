"""Measure the ops beside what else there is for the same work, and print a table and one JSON line.

python benchmarks/ops.py [--device cpu|cuda] [--quick] [--json] [--output FILE]
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[1]
BAD_INPUT = 2
STARTED = time.perf_counter()


class Parser(argparse.ArgumentParser):
    """Raises for bad arguments instead of printing the usage and ending the program."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="benchmarks/ops.py", description="Measure the ops beside PyTorch's softmax attention.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print one JSON document and no tables")
    parser.add_argument("--quick", action="store_true", help="short sequences and few repeats: a look, no result")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON document to this file")
    options = parser.parse_args(arguments)
    if options.output is not None and (options.output.is_dir() or not options.output.parent.is_dir()):
        raise ValueError(f"--output {options.output}: no file can be written there; is its directory missing?")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 0, or 1 if a result was wrong, or 2 for bad arguments."""
    try:
        options = parse(arguments)
        report = run(options.device, options.quick)
    except ValueError as error:
        print("benchmarks/ops.py: error:", " ".join(str(error).split()), file=sys.stderr)
        return BAD_INPUT
    from benchmarks.rows import tables, text_table

    document = report.document(command(options), options.device, options.quick)
    if not options.json:
        for name, rows in tables(document["rows"]).items():
            print(text_table(name, rows), end="\n\n")
    line = json.dumps(document, ensure_ascii=False)
    print(line)
    if options.output is not None:
        options.output.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return 0 if report.right else 1


def command(options: argparse.Namespace) -> str:
    """How to run this again; of the output only the file's name, since its folder is this machine's own affair."""
    words = ["python", "benchmarks/ops.py", "--device", options.device]
    words += ["--quick"] if options.quick else []
    words += ["--output", options.output.name] if options.output is not None else []
    return shlex.join(words)


def run(device: str, quick: bool):
    """The report of one device. Only now is this folder's package imported: the file may have been loaded by path."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    import torch

    if device == "cpu":
        from benchmarks import cpu

        return cpu.measure(cpu.QUICK if quick else cpu.FULL, progress)
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no CUDA device on this machine; use --device cpu")
    from benchmarks import gpu, gpu_suite

    return gpu.measure(gpu_suite.QUICK if quick else gpu_suite.FULL, progress)


def progress(step: str) -> None:
    print(f"{time.perf_counter() - STARTED:5.0f} s  {step} …", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
