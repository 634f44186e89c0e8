"""Kernels of one call compiled side by side, so that the first call does not wait for one after the other."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import local
from typing import Any

import triton

WORKERS = 8
_thread = local()


def is_preparing() -> bool:
    """Whether launches are only compiled now."""
    return getattr(_thread, "preparing", False)


def prepare(kernel: Any, call: Callable[[], object]) -> None:
    """Compile what `call` would launch.

    Triton's interpreter, whose kernels are no JITFunctions, has no need. Triton 3.4, that of PyTorch 2.8, cannot: there
    the launches themselves compile, one after the other.
    """
    if not isinstance(kernel, triton.JITFunction) or is_preparing() or not hasattr(triton, "AsyncCompileMode"):
        return
    _thread.preparing = True
    try:
        with ThreadPoolExecutor(WORKERS) as pool, triton.AsyncCompileMode(pool):
            call()
    finally:
        _thread.preparing = False
