"""What only a fresh process can measure: the peak of its memory, and the wait for a first result.

    python -m benchmarks.fresh memory Latte forward 16384
    python -m benchmarks.fresh first-call
    python -m benchmarks.fresh warm ours|flex

Each prints one JSON document.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def ask(*arguments: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Run this module in a new process and return what it prints."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    completed = subprocess.run(
        [sys.executable, "-m", "benchmarks.fresh", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode:
        last = (completed.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"measuring {' '.join(arguments)} in a new process failed: {last}")
    return json.loads(completed.stdout.splitlines()[-1])


def resident(name: str) -> int:
    """Bytes of this process in memory now (VmRSS), or at most so far (VmHWM)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (kilobytes,) = re.findall(rf"^{name}:\s+(\d+) kB$", status, flags=re.MULTILINE)
    return 1024 * int(kilobytes)


def peak_memory(op: str, what: str, tokens: int, threads: int = 2) -> dict[str, int]:
    """Bytes that one call takes at its peak, beyond its inputs; its results are part of them."""
    import torch

    from benchmarks.contenders import OURS, Sizes, first
    from benchmarks.limits import size

    torch.set_num_threads(threads)
    (contender,) = [ours for ours in OURS if ours.op == op]
    backward = what == "forward+backward"
    small, sizes = Sizes(1, 128), Sizes(1, tokens)
    contender.step(contender.inputs(small, torch.float32, "cpu"), small, backward=backward)()  # libraries load
    inputs = contender.inputs(sizes, torch.float32, "cpu")
    dy = torch.randn(1, tokens, sizes.heads, sizes.head_dim)  # as large as y
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
    before = resident("VmRSS")
    with torch.set_grad_enabled(backward):
        y = first(contender.run(inputs, sizes))
    held = torch.autograd.grad(y, inputs, dy) if backward else y
    extra = max(0, resident("VmHWM") - before)
    del held
    return {"extra": extra, "inputs_and_outputs": size(inputs) + size([dy])}


def first_calls() -> dict[str, dict[str, float]]:
    """Seconds to the first result of each op, and from there to its first gradients, compilation included."""
    import torch

    from benchmarks.contenders import OURS, Sizes, first

    torch.randn(64, 64, device="cuda").matmul(torch.randn(64, 64, device="cuda"))
    sizes, waits = Sizes(8, 4096), {}
    for contender in OURS:
        inputs = contender.inputs(sizes, torch.bfloat16, "cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        y = first(contender.run(inputs, sizes))
        torch.cuda.synchronize()
        forward = time.perf_counter()
        torch.autograd.grad(y, inputs, torch.ones_like(y))
        torch.cuda.synchronize()
        waits[contender.op] = {"forward": forward - start, "backward": time.perf_counter() - forward}
    return waits


def warm(what: str) -> dict[str, int]:
    """Compile what is timed later besides the first calls: our kernels for other head widths, or FlexAttention."""
    import torch

    from benchmarks.contenders import FLEX, LATTE, MACCHIATO, WINDOW
    from benchmarks.gpu_suite import FULL

    ours = what == "ours"
    contenders, shapes = ((LATTE, MACCHIATO, WINDOW), FULL.more_shapes) if ours else ((FLEX,), FULL.shapes)
    for contender, shape in itertools.product(contenders, shapes):
        inputs = contender.inputs(shape, torch.bfloat16, "cuda")
        for backward in (False, True):
            contender.step(inputs, shape, backward=backward)()
    torch.cuda.synchronize()
    return {"compiled": len(contenders) * len(shapes)}


def main(arguments: list[str]) -> None:
    match arguments:
        case ["memory", op, what, tokens]:
            print(json.dumps(peak_memory(op, what, int(tokens))))
        case ["first-call"]:
            print(json.dumps(first_calls()))
        case ["warm", "ours" | "flex" as what]:
            print(json.dumps(warm(what)))
        case _:
            raise SystemExit(f"not understood: {' '.join(arguments)}")


if __name__ == "__main__":
    main(sys.argv[1:])
