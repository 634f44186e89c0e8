"""Memory of forward and backward, as the allocator sees it: linear in T, below three times inputs and outputs."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from latte.ops import latte_attention, linear_attention, macchiato_attention, window_attention

H, D, L = 4, 64, 16


class Memory(NamedTuple):
    peak: int  # bytes held at once, beyond what there was before
    largest: int  # bytes of the largest single tensor


def measure(function: Callable[[], object]) -> Memory:
    """Every allocation and release of `function`, by PyTorch's own record of them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        function()
    assert record.profiler is not None
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    held = torch.tensor(sizes).cumsum(dim=0)
    return Memory(int(held.max()), max(sizes))


def attention(form: str, tokens: int, dtype: torch.dtype) -> tuple[Callable, list[Tensor]]:
    def normal(width: int) -> Tensor:
        return torch.randn((1, tokens, H, width), dtype=dtype, requires_grad=True)

    match form:
        case "latte":
            return latte_attention, [normal(L), normal(L), normal(D)]
        case "linear":
            return linear_attention, [normal(L), normal(L), normal(D)]
        case "window":
            return window_attention, [normal(D), normal(D), normal(D)]
    return macchiato_attention, [normal(L + 1), normal(L), normal(D), normal(D), normal(D)]


def forward_and_backward(form: str, tokens: int, dtype: torch.dtype = torch.float32, **options) -> tuple[Memory, int]:
    """What a training step of one operation takes, and the bytes of its inputs and output."""
    function, inputs = attention(form, tokens, dtype)
    dy = torch.randn((1, tokens, H, D), dtype=dtype)
    given = sum(x.nbytes for x in inputs) + dy.nbytes
    return measure(lambda: torch.autograd.grad(function(*inputs, **options).y, inputs, dy)), given


@pytest.mark.parametrize(
    ("form", "causal"), [("latte", True), ("macchiato", True), ("macchiato", False), ("linear", True), ("window", True)]
)
def test_linear_and_small(form: str, causal: bool) -> None:
    memory, given = forward_and_backward(form, 8192, causal=causal)
    assert memory.peak < 3 * given
    assert memory.largest <= given  # nothing like T × T, which is 12 times as much per head
    quarter, _ = forward_and_backward(form, 2048, causal=causal)
    assert memory.peak < 4.2 * quarter.peak


@pytest.mark.parametrize("form", ["latte", "macchiato"])
def test_narrow_dtypes(form: str) -> None:
    """Sums in float32 are kept by the tile, but for the values' gradients."""
    memory, given = forward_and_backward(form, 4096, torch.bfloat16)
    assert memory.peak < 3 * given


def test_window_as_long_as_the_sequence() -> None:
    """T × T scores exist one tile at a time."""
    memory, given = forward_and_backward("window", 2048, window=2048)
    assert memory.peak < 3 * given


def test_hostile_keys_take_no_more() -> None:
    """Where leaps cut every tile into single tokens, states are still kept per tile of 64 only."""
    q, k, v = attention("latte", 256, torch.float32)[1]
    leaping = (k * 1e4 + torch.arange(256)[:, None, None] * 1e4).detach().requires_grad_()
    dy = torch.randn_like(v)
    calm, wild = (
        measure(lambda x=keys: torch.autograd.grad(latte_attention(q, x, v).y, [q, x, v], dy)) for keys in (k, leaping)
    )
    assert wild.peak < 1.5 * calm.peak


def test_step_memory_does_not_grow(backend: str) -> None:
    """The state after many tokens is as large as after one."""
    states = []
    for tokens in (200, 2000):
        function, inputs = attention("macchiato", tokens, torch.float32)
        state = function(*inputs, backend=backend).state
        states.append([x.shape for x in (*state.latents, *state[1:])])
    assert states[0] == states[1]
