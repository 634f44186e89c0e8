"""Kernels compile for a GPU on a machine without one: the interpreter takes things that the compiler does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_MEMORY = 227 * 1024  # of a processor of an H100, for one program
KERNELS = {
    "attention": {"tile_kernel", "prefix_kernel", "output_kernel", "query_grad_kernel", "carry_walk_kernel",
                  "carry_scan_kernel", "key_grad_kernel", "window_tail_kernel", "turn_kernel"},
    "mixers": {"piece_ends_kernel", "scan_pieces_kernel", "output_kernel", "gradient_kernel", "forward_kernel",
               "gate_grad_kernel", "backward_kernel", "add_parts_kernel", "piece_starts_kernel"},
    "steps": {"mixture_step_kernel", "input_step_kernel", "rglru_step_kernel", "short_conv_step_kernel", "rows_kernel"},
}  # fmt: skip
SIZE = {"attention": 256, "mixers": 256, "steps": 2}  # tokens, or heads


@pytest.mark.parametrize("calls", KERNELS)
def test_every_kernel_compiles_for_an_h100(calls: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("compiling.py")), calls, str(SIZE[calls])]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in found} == KERNELS[calls]
    ways = {(kernel["kernel"], *kernel["ways"]) for kernel in found}
    if calls == "steps":
        assert {("mixture_step_kernel",), ("mixture_step_kernel", "RING")} <= ways
    if calls == "attention":
        assert {("prefix_kernel",), ("prefix_kernel", "SHORT"), ("output_kernel", "FOLD"), ("output_kernel",)} <= ways
        assert {("output_kernel", "WILD", "FOLD"), ("output_kernel", "WILD", "FOLD", "TAIL")} <= ways
    assert all(kernel["bytes"] and kernel["shared"] <= SHARED_MEMORY for kernel in found)
