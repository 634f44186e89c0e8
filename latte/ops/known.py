"""Calls like one that was made before go to their kernels at once: what they would be checked for, that one passed."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.nn import Parameter

Ready = Callable[[Sequence[Any]], Any]

MOST_KNOWN = 1024
ALIGNED = 16  # bytes, as kernels are compiled for
KNOWN: dict[Any, Ready] = {}


def sign_call(op: str, tensors: Sequence[Any], options: tuple) -> tuple | None:
    """What a plain call is checked for, and its launches follow from; None for any other call."""
    # Within transformations of torch.func tensors have no address; forward-mode differentiation is refused elsewhere.
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0 or peek_interpreter_stack() is not None:
        return None
    with_grad = torch.is_grad_enabled()
    parts: list[Any] = [op, options, *map(type, options)]  # True is no window of 1
    addresses = []
    for x in tensors:
        if x is None:
            parts.append(None)
            continue
        if type(x) is not Tensor and type(x) is not Parameter:
            return None
        addresses.append(x.data_ptr())
        parts.append((x.shape, x.stride(), x.dtype, x.device, with_grad and x.requires_grad))
    return sign_places(parts, addresses)


def sign_places(parts: list[Any], addresses: list[int]) -> tuple | None:
    """A signature of what a call's tensors are and of which of them are one; None if one is not aligned.

    A call that was recorded with one tensor in two places tells nothing of where each place's launches take theirs.
    """
    bits = 0
    for address in addresses:
        bits |= address
    if bits % ALIGNED:
        return None
    if len(set(addresses)) < len(addresses):
        parts.append(tuple(map(addresses.index, addresses)))
    return tuple(parts)


def run_known(signature: tuple | None, tensors: Sequence[Tensor | None]) -> Any:
    """The result of a call that is known, else None."""
    ready = None if signature is None else KNOWN.get(signature)
    return None if ready is None else ready(tensors)


def needs_gradients(tensors: Sequence[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def remember(signature: tuple, ready: Ready) -> None:
    if len(KNOWN) >= MOST_KNOWN:  # a length seen no more should not be kept for ever
        KNOWN.clear()
    KNOWN[signature] = ready
