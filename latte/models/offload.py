"""Weights that `device_map` keeps on a disk or another device come with a module's forward; mixers have a `stream`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn


def weights_at_hand(module: nn.Module | None) -> AbstractContextManager[None]:
    """While the body runs, offloaded weights of `module` and all in it are where they are computed with."""
    if module is None or not hasattr(module, "_hf_hook"):
        return nullcontext()
    return _run_hooks([part for part in module.modules() if hasattr(part, "_hf_hook")])


@contextmanager
def _run_hooks(modules: list[nn.Module]) -> Iterator[None]:
    for module in modules:
        module._hf_hook.pre_forward(module)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    try:
        yield
    finally:
        for module in modules:
            module._hf_hook.post_forward(module, None)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
