"""Measure the time and memory of one more token against the context, and print tables and one JSON line.

python benchmarks/decode.py [--device cpu|cuda] [--model PRESET] [--peer PRESET] [--contexts 1K,64K] [--batches 1,8]
                            [--seconds S] [--no-compile] [--quick] [--json] [--output FILE]

A context of ours is random tokens that the model really reads. The transformer's is random keys and values of the same
number: to read 262,144 tokens would take it longer than to measure the step, and the step does not care what they are.
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

USUAL = {
    "cpu": {
        "model": "macchiato-small",
        "peer": "transformer-small",
        "contexts": [1024, 4096, 16384, 65536],
        "batches": [1],
    },
    "cuda": {
        "model": "latte-r-swa++",
        "peer": "transformer++",
        "contexts": [1024, 4096, 16384, 65536, 262144],
        "batches": [1, 8, 32],
    },
}
QUICK = {"model": "macchiato-tiny", "peer": "transformer-tiny", "contexts": [64, 256], "batches": [1]}


def parser() -> program.Parser:
    made = program.make_parser("decode", "Measure the time and memory of one more token against the context.", 450)
    made.add_argument("--model", metavar="PRESET", help="ours (default: latte-r-swa++, on a CPU macchiato-small)")
    made.add_argument("--peer", metavar="PRESET", help="the transformer beside it (default: transformer++ or -small)")
    made.add_argument("--contexts", type=program.whole_numbers, metavar="LIST", help="tokens before, such as 1K,64K")
    made.add_argument("--batches", type=program.whole_numbers, metavar="LIST", help="sequences at once, such as 1,8")
    made.add_argument(
        "--no-compile", action="store_true", help="on a GPU, capture the step as it is, without torch.compile"
    )
    return made


def fill(options: argparse.Namespace) -> None:
    """Defaults that depend on the device, and the small ones of a quick look."""
    usual = USUAL[options.device] | (QUICK if options.quick else {})
    for name, value in usual.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.contexts, options.batches = sorted(set(options.contexts)), sorted(set(options.batches))


def measure(run: program.Run) -> None:
    program.require_transformers()
    fill(run.options)
    from benchmarks import decode_suite

    decode_suite.measure(run)


def main(arguments: Sequence[str] | None = None) -> int:
    return program.main("decode", parser(), measure, arguments, STARTED)


if __name__ == "__main__":
    sys.exit(main())
