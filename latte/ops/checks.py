"""Input checks: each raises ValueError naming the argument, what it was and what it should be."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from numbers import Real

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.weak import WeakIdKeyDictionary

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FLOAT32 = torch.finfo(torch.float32)
BACKENDS = ("auto", "reference", "torch", "triton")
_checked = WeakIdKeyDictionary()


def backend_for(name: str, device: torch.device) -> str:
    """The backend that `name` means on `device`; "auto" depends on the device alone."""
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}; it must be one of {', '.join(map(repr, BACKENDS))}")
    if name != "auto":
        return name
    return "triton" if device.type == "cuda" else "torch"


def may_replay(backend: object, x: object) -> bool:
    """Whether kernels may have been recorded for a call with x."""
    return backend in ("auto", "triton") and isinstance(x, Tensor) and x.is_cuda


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on there; PyTorch takes it for an error to ask that of the meta device."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A region without autocast; where there is none anyway, one that costs nothing."""
    if autocasts(device):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def refuse_tangents(backend: str, *tensors: Tensor | None) -> None:
    """Custom operations would drop the tangents of forward-mode differentiation, and give zeros without a word."""
    if backend == "reference" or torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise ValueError(
            f'an input has a tangent; backend "{backend}" has no forward-mode derivatives: take them by backward'
        )


def check_shape(name: str, tensor: object, legend: str, shape: Sequence[int | None]) -> None:
    """`tensor` must be a floating point tensor of `shape`; None stands for any size, `legend` says the axes."""
    check_sizes(name, check_floating(name, tensor, legend), legend, shape)


def check_floating(name: str, tensor: object, legend: str) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is {type(tensor).__name__}; it must be a tensor [{legend}]")
    if tensor.dtype not in DTYPES:
        raise ValueError(
            f"{name} has dtype {tensor.dtype}; it must be a floating point tensor [{legend}] "
            "in float32, bfloat16, float16 or float64"
        )
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} has layout {tensor.layout}; it must be a dense tensor [{legend}]")
    return tensor


def check_sizes(name: str, tensor: Tensor, legend: str, shape: Sequence[int | None]) -> None:
    fits = tensor.ndim == len(shape) and all(
        size is None or size == got for size, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits:  # only now, since a size that is written into text is no longer dynamic to torch.compile
        axes = zip(legend.split(), shape, strict=True)
        expected = [axis if size is None else f"{axis}={size}" for axis, size in axes]
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be [{', '.join(expected)}]")


def check_positive(name: str, value: int, axes: str) -> None:
    if value < 1:
        raise ValueError(f"{name} has {axes} = {value}; it must be at least 1")


def check_grouping(heads: int, value_heads: int, query: str, value: str = "v") -> None:
    if value_heads < 1 or heads % value_heads:
        raise ValueError(
            f"{value} has {value_heads} heads and {query} has {heads}; {query}'s must be a multiple of {value}'s"
        )


def check_window(window: object) -> None:
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ValueError(f"window is {window!r}; it must be an integer of at least 1 (the token itself counts)")


def check_causal(causal: object) -> None:
    if not isinstance(causal, bool):
        raise ValueError(f"causal is {causal!r}; it must be True or False")


def check_number(name: str, value: object) -> None:
    """A tensor is none: operations take numbers, and would cut its gradient off."""
    if isinstance(value, bool) or not isinstance(value, (float, int, Real, torch.SymFloat, torch.SymInt)):
        raise ValueError(f"{name} is {value!r}; it must be a number")


def check_scores(scale: float | None, softcap: float | None) -> None:
    if scale is not None:
        check_number("scale", scale)
        if not -FLOAT32.max <= scale <= FLOAT32.max:  # math.isfinite takes no number that is symbolic
            raise ValueError(f"scale is {scale}; it must be finite in float32, or None for E ** -0.5")
    check_softcap("softcap", softcap)


def check_softcap(name: str, softcap: float | None) -> None:
    """What scores are divided by and multiplied with must be no 0 and no inf in float32."""
    if softcap is None:
        return
    check_number(name, softcap)
    if not FLOAT32.tiny <= softcap <= FLOAT32.max:
        raise ValueError(
            f"{name} is {softcap}; it must be positive and finite in float32 ({FLOAT32.tiny:.2g} to "
            f"{FLOAT32.max:.2g}), or None for no cap"
        )


def check_mask(mask: object, batch: int, tokens: int, name: str = "mask") -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = f"dtype {mask.dtype}" if isinstance(mask, Tensor) else f"type {type(mask).__name__}"
        raise ValueError(f"{name} has {got}; it must be a bool tensor [B, T], True = real token")
    check_sizes(name, mask, "B T", (batch, tokens))


def check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {type(value).__name__}; it must be a {kind.__name__}")


def check_same_device(**tensors: Tensor | None) -> None:
    """All tensors must live where the first one does."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first, anchor = next(iter(present.items()))
    for name, tensor in present.items():
        if tensor.device != anchor.device:
            raise ValueError(f"{name} is on {tensor.device}; it must be on {anchor.device}, where {first} is")


def check_cu_seqlens(cu_seqlens: object, batch: int) -> int:
    """Shape and dtype of `cu_seqlens`; returns the number of states, one per sequence. Values: `sequence_bounds`."""
    if cu_seqlens is None:
        return batch
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = f"dtype {cu_seqlens.dtype}" if isinstance(cu_seqlens, Tensor) else f"type {type(cu_seqlens).__name__}"
        raise ValueError(f"cu_seqlens has {got}; it must be an int32 or int64 tensor [N + 1]")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}; it must be [N + 1] for N >= 1 sequences")
    if batch != 1:
        raise ValueError(f"cu_seqlens is given with batch size {batch}; packed sequences lie in one row, B = 1")
    return cu_seqlens.shape[0] - 1


def sequence_bounds(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """`cu_seqlens` as checked integers: from 0, never decreasing, to the number of tokens."""
    bounds = [int(bound) for bound in cu_seqlens.tolist()]
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens starts at {bounds[0]}; it must start at 0")
    for i, (start, end) in enumerate(pairwise(bounds)):
        if end < start:
            raise ValueError(f"cu_seqlens decreases from {start} to {end} at index {i + 1}; it must never decrease")
    if bounds[-1] != tokens:
        raise ValueError(f"cu_seqlens ends at {bounds[-1]}; it must end at the number of tokens, {tokens}")
    return bounds


def check_bounds(cu_seqlens: Tensor, tokens: int) -> None:
    """The values of `cu_seqlens`, read from the device once per tensor: a model hands the same one to every layer.

    Tensors made in inference mode do not count their changes, so that those are read each time.
    """
    stamp = None if cu_seqlens.is_inference() else (cu_seqlens._version, tokens)
    if stamp is None or _checked.get(cu_seqlens) != stamp:
        sequence_bounds(cu_seqlens, tokens)
        _checked[cu_seqlens] = stamp


def check_targets(targets: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Targets within the vocabulary, where looking at them does not stall the device."""
    if targets.device.type != "cpu":
        return
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= vocabulary))
    if wrong.any():
        raise ValueError(
            f"targets holds {int(targets[wrong][0])}; targets must be from 0 to {vocabulary - 1}, the rows of weight, "
            f"or ignore_index = {ignore_index}"
        )
