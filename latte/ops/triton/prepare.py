"""Kernels of one call compiled and loaded side by side: the first call does not wait for one after the other."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import local
from typing import Any

import torch
import triton

WORKERS = 8


class _Thread(local):
    waiting: list[Any] | None = None  # what is being compiled


_thread = _Thread()


def is_preparing() -> bool:
    """Whether launches are only compiled now."""
    return _thread.waiting is not None


def compile_only(kernel: Any, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any]) -> None:
    """Instead of a launch, while preparing."""
    assert _thread.waiting is not None
    _thread.waiting.append(kernel.warmup(*arguments, grid=grid, **constants))


def prepare(kernel: Any, call: Callable[[], object]) -> None:
    """Compile and load what `call` would launch.

    Triton's interpreter, whose kernels are no JITFunctions, has no need. Triton 3.4, that of PyTorch 2.8, cannot: there
    the launches themselves compile, one after the other.
    """
    if not isinstance(kernel, triton.JITFunction) or is_preparing() or not hasattr(triton, "AsyncCompileMode"):
        return
    waiting = _thread.waiting = []
    try:
        with ThreadPoolExecutor(WORKERS) as pool:
            with triton.AsyncCompileMode(pool):
                call()
            device = torch.cuda.current_device()
            for loaded in [pool.submit(_load, binary, device) for binary in waiting]:
                loaded.result()
    finally:
        _thread.waiting = None


def _load(binary: Any, device: int) -> None:
    """Have what Triton does at a kernel's first launch done: a C compiler builds its launcher."""
    with torch.cuda.device(device):
        _ = (binary.result() if hasattr(binary, "result") else binary).run
