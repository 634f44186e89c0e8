"""RG-LRU and short convolution kernels on a GPU: right, then how fast, beside the time the memory alone would need.

    python benchmarks/kernels_recurrence.py [--profile] [--tune]

`--profile` lists the time of each kernel, `--tune` times other sizes of pieces and blocks. The last line is JSON.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from latte.ops.convolution import short_conv
from latte.ops.recurrence import rglru
from latte.ops.triton import recurrence

WIDTH, TAPS = 768, 4
SHAPES = [(8, 4096), (2, 16384), (1, 32768), (1, 131072), (1, 1048576)]
BANDWIDTH = 4.27e12  # bytes per second of a copy on an H200
TENSORS = {"rglru": (4, 11), "short_conv": (2, 5)}  # read or written once, forward and forward + backward


def make_inputs(batch: int, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(batch, tokens, WIDTH)] * 3
    inputs = [torch.randn(shape, generator=generator, device="cuda", dtype=dtype) for shape in shapes]
    a_param = torch.linspace(-9.0, 1.0, WIDTH, device="cuda")  # a from 0.9999 down to 0
    return [z.requires_grad_() for z in (*inputs, a_param)]


def make_taps(x: Tensor) -> list[Tensor]:
    weight = torch.linspace(-1.0, 1.0, WIDTH * TAPS, device="cuda").reshape(WIDTH, TAPS)
    return [x, weight.requires_grad_(), weight[:, 0].detach().clone().requires_grad_()]


def outputs(
    op: Callable, inputs: list[Tensor], backend: str, dtype: torch.dtype | None = None, **options
) -> list[Tensor]:
    """y, state and gradients through both."""
    leaves = [z.detach().to(dtype or z.dtype).requires_grad_() for z in inputs]
    output = op(*leaves, **options, backend=backend)
    generator = torch.Generator("cuda").manual_seed(1)
    dy = [torch.randn(part.shape, generator=generator, device="cuda", dtype=torch.bfloat16) for part in output]
    grads = torch.autograd.grad(tuple(output), leaves, [d.to(z.dtype) for d, z in zip(dy, output, strict=True)])
    return [*(part.detach() for part in output), *grads]


def check(name: str, op: Callable, inputs: list[Tensor], tolerance: float, **options) -> bool:
    """Relative error of every output and gradient against the torch backend in float64."""
    actual = outputs(op, inputs, "triton", **options)
    expected = outputs(op, inputs, "torch", torch.float64, **options)
    again = outputs(op, inputs, "triton", **options)
    same = all(torch.equal(first, second) for first, second in zip(actual, again, strict=True))
    errors = [relative_error(got, right) for got, right in zip(actual, expected, strict=True)]
    good = same and all(error <= tolerance for error in errors)
    print(f"{name:46} {'ok' if good else 'WRONG'}  same bits: {same}  errors: {' '.join(f'{e:.1e}' for e in errors)}")
    return good


def relative_error(got: Tensor, right: Tensor) -> float:
    seen = right.isfinite()  # a sequence without tokens has a state of −inf
    if not torch.equal(got.isfinite(), seen):
        return float("inf")
    got, right = got.double()[seen], right[seen]
    return ((got - right).norm() / right.norm().clamp(min=1e-30)).item()


def check_all() -> bool:
    results = []
    for dtype, tolerance in ((torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-4)):
        for batch, tokens in ((2, 1000), (1, 4096), (3, 1)):
            inputs = make_inputs(batch, tokens, dtype)
            mask = torch.rand(batch, tokens, device="cuda") > 0.2
            state = torch.randn(batch, WIDTH, device="cuda")
            past = torch.randn(batch, TAPS - 1, WIDTH, device="cuda", dtype=dtype)
            label = f"{str(dtype)[6:]} B={batch} T={tokens}"
            results.append(check(f"rglru {label}", rglru, inputs, tolerance))
            results.append(check(f"rglru {label} mask state", rglru, inputs, tolerance, mask=mask, state=state))
            taps = make_taps(inputs[0])
            results.append(check(f"short_conv {label}", short_conv, taps, tolerance))
            results.append(check(f"short_conv {label} mask state", short_conv, taps, tolerance, mask=mask, state=past))
        cu_seqlens = torch.tensor([0, 5, 5, 700, 701, 2000, 4096], device="cuda")
        packed = make_inputs(1, 4096, dtype)
        results.append(check(f"rglru {str(dtype)[6:]} packed", rglru, packed, tolerance, cu_seqlens=cu_seqlens))
        taps = make_taps(packed[0])
        results.append(check(f"short_conv {str(dtype)[6:]} packed", short_conv, taps, tolerance, cu_seqlens=cu_seqlens))
    results.append(check("rglru bfloat16 B=1 T=131072", rglru, make_inputs(1, 131072, torch.bfloat16), 1e-2))
    return all(results)


def measure(op: Callable, inputs: list[Tensor], backend: str = "triton") -> tuple[float, float]:
    """Median milliseconds of forward and of forward + backward."""
    dy = torch.randn_like(inputs[0])

    def forward() -> None:
        with torch.no_grad():
            op(*inputs, backend=backend)

    def both() -> None:
        torch.autograd.grad(op(*inputs, backend=backend).y, inputs, dy)

    forward_ms, both_ms = (_median(step) for step in (forward, both))
    return forward_ms, both_ms


def _median(step: Callable[[], None]) -> float:
    milliseconds: Any = triton.testing.do_bench(step, warmup=25, rep=200, return_mode="median")
    return milliseconds


def time_all() -> list[dict]:
    rows = []
    print(f"{'op':12}{'B':>4}{'T':>9}{'forward':>10}{'+backward':>11}{'limits':>16}{'ns/token':>12}")
    for (batch, tokens), (name, op) in itertools.product(SHAPES, (("rglru", rglru), ("short_conv", short_conv))):
        inputs = make_inputs(batch, tokens, torch.bfloat16)
        forward, both = measure(op, inputs if name == "rglru" else make_taps(inputs[0]))
        limits = [1e3 * n * batch * tokens * WIDTH * 2 / BANDWIDTH for n in TENSORS[name]]
        per_token = 1e6 * both / (batch * tokens)
        print(
            f"{name:12}{batch:4}{tokens:9}{forward:10.4f}{both:11.4f}{limits[0]:8.3f}{limits[1]:8.3f}{per_token:12.2f}"
        )
        rows.append({"op": name, "batch": batch, "tokens": tokens, "forward_ms": forward, "both_ms": both})
    return rows


def profile() -> None:
    inputs = make_inputs(8, 4096, torch.bfloat16)
    dy = torch.randn_like(inputs[0])
    for _ in range(3):
        torch.autograd.grad(rglru(*inputs).y, inputs, dy)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(20):
            torch.autograd.grad(rglru(*inputs).y, inputs, dy)
        torch.cuda.synchronize()
    print(trace.key_averages().table(sort_by="cuda_time_total", row_limit=15, max_name_column_width=60))


def tune() -> None:
    """Time the kernels with other constants; the best become the ones in `latte.ops.triton.recurrence`."""
    grid = {
        "FORWARD_WARPS": (16, 24, 32, 48, 64),
        "BACKWARD_WARPS": (8, 12, 16, 24, 32),
        "SCAN_ROWS": (16, 32, 64),
        "ROWS": (4, 8, 16),
        "BLOCK": (32, 64, 128, 256),
    }
    for batch, tokens in ((8, 4096), (2, 16384)):
        inputs = make_inputs(batch, tokens, torch.bfloat16)
        for name, values in grid.items():
            usual = getattr(recurrence, name)
            for value in values:
                setattr(recurrence, name, value)
                forward, both = measure(rglru, inputs)
                print(f"B={batch} T={tokens} {name}={value:<4} forward {forward:.4f}  +backward {both:.4f}")
            setattr(recurrence, name, usual)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true", help="list the time of each kernel")
    parser.add_argument("--tune", action="store_true", help="time other sizes of pieces and blocks")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device here: these are GPU kernels", file=sys.stderr)
        return 2
    good = check_all()
    rows = time_all()
    if options.profile:
        profile()
    if options.tune:
        tune()
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(json.dumps({"correct": good, **machine, "rows": rows}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
