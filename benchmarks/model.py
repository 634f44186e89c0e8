"""Measure training and forward passes of whole models beside transformers, and print tables and one JSON line.

python benchmarks/model.py [--device cpu|cuda] [--model PRESET] [--peer PRESET] [--contexts 1K,16K,64K] [--tokens 32K]
                           [--parts training,forward,figure] [--shapes 2.6B,400M] [--compile layers|model|none]
                           [--peers] [--one-operation] [--seconds S] [--quick] [--json] [--output FILE]
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

STARTED = time.perf_counter()
ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import program  # noqa: E402

PARTS = ("training", "forward", "figure")
SHAPES = ("2.6B", "400M")
USUAL = {
    "cpu": {
        "model": "macchiato-small",
        "peer": "transformer-small",
        "contexts": [1024, 4096],
        "tokens": 4096,
        "compile": "none",
        "parts": ["training", "forward"],
        "shapes": list(SHAPES),
    },
    "cuda": {
        "model": "latte-r-swa++",
        "peer": "transformer++",
        "contexts": [1024, 4096, 16384, 65536],
        "tokens": 32768,
        "compile": "layers",
        "parts": list(PARTS),
        "shapes": list(SHAPES),
    },
}
QUICK = {
    "model": "macchiato-tiny", "peer": "transformer-tiny", "contexts": [64, 256], "tokens": 256, "parts": list(PARTS),
    "shapes": ["tiny"],
}  # fmt: skip


def parser() -> program.Parser:
    made = program.make_parser("model", "Measure training and forward passes of whole models beside transformers.", 450)
    made.add_argument("--model", metavar="PRESET", help="ours (default: latte-r-swa++, on a CPU macchiato-small)")
    made.add_argument("--peer", metavar="PRESET", help="the transformer beside it (default: transformer++ or -small)")
    made.add_argument("--contexts", type=program.whole_numbers, metavar="LIST", help="lengths of a sequence: 1K,16K")
    made.add_argument("--tokens", type=program.whole_number, metavar="N", help="of a step, until one sequence has more")
    made.add_argument(
        "--compile", choices=("layers", "model", "none"),
        help="what torch.compile takes at once, for every model alike (default: layers; none on a CPU)",
    )  # fmt: skip
    made.add_argument(
        "--parts", type=part_names, metavar="LIST",
        help="of training, forward and figure, which is the paper's figure 7: forward, 400M and 2.6B shapes",
    )  # fmt: skip
    made.add_argument(
        "--shapes", type=shape_names, metavar="LIST", help=f"of the figure: {' and '.join(SHAPES)} (default: both)"
    )
    made.add_argument(
        "--peers", action="store_true", help="also the transformer with cuDNN's attention, and Transformers' Llama"
    )
    made.add_argument(
        "--one-operation", action="store_true",
        help="train ours also with projections and attention as one operation, which is off by default (cuda)",
    )  # fmt: skip
    return made


def part_names(text: str) -> list[str]:
    return names_among(text, PARTS)


def shape_names(text: str) -> list[str]:
    return names_among(text, SHAPES)


def names_among(text: str, known: Sequence[str]) -> list[str]:
    names = [word.strip() for word in text.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
    return names


def measure(run: program.Run) -> None:
    program.require_transformers()
    options = run.options
    usual = USUAL[options.device] | (QUICK if options.quick else {})
    for name, value in usual.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.contexts = sorted(set(options.contexts))
    if "figure" in options.parts and options.device == "cpu" and not options.quick:
        raise ValueError("--parts figure: its models of up to 2.6B parameters need a GPU; use --device cuda or --quick")
    if options.one_operation and options.device == "cpu":
        raise ValueError("--one-operation: it is of GPU kernels; use --device cuda")
    from benchmarks import model_suite

    model_suite.measure(run)


def main(arguments: Sequence[str] | None = None) -> int:
    return program.main("model", parser(), measure, arguments, STARTED)


if __name__ == "__main__":
    sys.exit(main())
