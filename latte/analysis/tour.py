"""A tour of the ops, measured on this machine: probabilities, cutting, time and memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops import attention_weights, latte_attention, macchiato_attention, window_attention

NUM_HEADS, NUM_LATENTS, HEAD_DIM, WINDOW = 4, 16, 64, 128
SETTING = f"float32 on the CPU, {NUM_HEADS} heads of width {HEAD_DIM}, {NUM_LATENTS} latents per head, window {WINDOW}"

Op = Callable[..., Any]


@dataclass(frozen=True)
class Reading:
    """The attention matrix p(s|t) that one form implies on a tiny example."""

    name: str
    meaning: str
    weights: list[list[float]]
    largest_row_error: float


@dataclass(frozen=True)
class CutCheck:
    """How far an op run in two pieces, the state passed on, is from the op run in one."""

    name: str
    tokens: int
    cut: int
    largest_difference: float


@dataclass(frozen=True)
class Curve:
    """Time per token of one form, at each length of the `Speed` it belongs to."""

    name: str
    microseconds_per_token: list[float]


@dataclass(frozen=True)
class Speed:
    """Time per token of the causal forms as the sequence grows."""

    setting: str
    lengths: list[int]
    curves: list[Curve]


@dataclass(frozen=True)
class Steps:
    """What generating one more token costs after a context of a given length."""

    name: str
    context: int
    microseconds: float
    state_bytes: int
    kv_cache_bytes: int


@dataclass(frozen=True)
class Tour:
    """Everything the tour saw."""

    readings: list[Reading]
    cuts: list[CutCheck]
    speed: Speed
    steps: list[Steps]


class Inputs(NamedTuple):
    """Random inputs for every form; `states` holds the L+1 logits whose first is the window's."""

    states: Tensor
    k: Tensor
    v: Tensor
    window_q: Tensor
    window_k: Tensor

    def slice(self, start: int, stop: int) -> "Inputs":
        """The tokens from start up to stop."""
        return Inputs(*(tensor[:, start:stop] for tensor in self))


def take_tour(*, quick: bool, progress: Callable[[str], None]) -> Tour:
    """Run all four parts of the tour; `progress` hears the name of each part as it begins."""
    lengths = [256, 512, 1024] if quick else [1024, 2048, 4096, 8192]
    contexts = [256, 2048] if quick else [1024, 32768]
    with torch.inference_mode():
        progress("reading the attention weights of a tiny example")
        readings = read_probabilities()
        progress("cutting a sequence in two")
        cuts = check_cuts(tokens=1000, cut=377)
        progress(f"timing up to {lengths[-1]:,} tokens")
        speed = measure_speed(lengths, repeats=3 if quick else 7)
        progress(f"stepping after {contexts[-1]:,} tokens")
        steps = measure_steps(contexts, repeats=20 if quick else 200)
    return Tour(readings, cuts, speed, steps)


def make_inputs(
    tokens: int, *, heads: int = NUM_HEADS, latents: int = NUM_LATENTS, width: int = HEAD_DIM, seed: int = 0
) -> Inputs:
    """Draw inputs from a fixed seed, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (latents + 1, latents, width, width, width)
    return Inputs(*(torch.randn(1, tokens, heads, size, generator=generator) for size in sizes))


def run_latte(x: Inputs, state: Any = None) -> Any:
    """Causal Latte, on the logits that leave the window out."""
    return latte_attention(x.states[..., 1:], x.k, x.v, state=state)


def run_macchiato(x: Inputs, state: Any = None) -> Any:
    """Causal Macchiato: the latents and the window in one softmax."""
    return macchiato_attention(x.states, x.k, x.v, x.window_q, x.window_k, window=WINDOW, state=state)


def run_window(x: Inputs, state: Any = None) -> Any:
    """Causal sliding-window attention."""
    return window_attention(x.window_q, x.window_k, x.v, window=WINDOW, state=state)


def run_softmax(x: Inputs) -> Tensor:
    """PyTorch's causal softmax attention over all tokens."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (x.window_q, x.window_k, x.v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def read_probabilities(tokens: int = 16, window: int = 4) -> list[Reading]:
    """Compute p(s|t) of Latte, of the window, and of Macchiato, which mixes the two."""
    x = make_inputs(tokens, heads=1, latents=3, width=8, seed=3)
    states, k = 2 * x.states, 2 * x.k
    states[..., 0] += 2  # about half of the weight on the window, so that both are seen
    pair = {"window_q": 2 * x.window_q, "window_k": x.window_k, "window": window}
    latents = "3 latents reach every past token"
    return [
        read_weights("Latte", latents, attention_weights(states[..., 1:], k)),
        read_weights("Window", f"softmax attention over the last {window} tokens", attention_weights(**pair)),
        read_weights("Macchiato", f"the window as latent 0, and {latents}", attention_weights(states, k, **pair)),
    ]


def read_weights(name: str, meaning: str, weights: Tensor) -> Reading:
    """Take the first head's matrix and measure how far its rows are from summing to 1."""
    rows = weights[0, 0].double()
    return Reading(name, meaning, rows.tolist(), (rows.sum(-1) - 1).abs().max().item())


def check_cuts(*, tokens: int, cut: int) -> list[CutCheck]:
    """Run each form in one piece and in two."""
    x = make_inputs(tokens)
    checks = []
    for name, op in {"Latte": run_latte, "Window": run_window, "Macchiato": run_macchiato}.items():
        whole = op(x).y
        first = op(x.slice(0, cut))
        second = op(x.slice(cut, tokens), state=first.state)
        difference = (torch.cat([first.y, second.y], dim=1) - whole).abs().max().item()
        checks.append(CutCheck(name, tokens, cut, difference))
    return checks


def measure_speed(lengths: list[int], *, repeats: int) -> Speed:
    """Time the causal forms beside softmax attention at each length."""
    forms: dict[str, Op] = {"softmax": run_softmax, "Latte": run_latte, "Macchiato": run_macchiato}
    inputs = [make_inputs(length) for length in lengths]
    curves = [
        Curve(name, [1e6 * median_seconds(lambda op=op, x=x: op(x), repeats) / x.v.shape[1] for x in inputs])
        for name, op in forms.items()
    ]
    return Speed(SETTING, lengths, curves)


def measure_steps(contexts: list[int], *, repeats: int) -> list[Steps]:
    """Time one-token steps from the state after each context."""
    token = make_inputs(1, seed=1)
    steps = []
    for name, op in {"Latte": run_latte, "Macchiato": run_macchiato}.items():
        for context in contexts:
            state = op(make_inputs(context)).state
            seconds = median_seconds(lambda op=op, state=state: op(token, state=state), repeats)
            steps.append(Steps(name, context, 1e6 * seconds, count_bytes(state), kv_cache_bytes(context)))
    return steps


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    """Median wall-clock time of a call, after one to warm up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return median(times)


def count_bytes(state: Any) -> int:
    """Memory that the tensors of a state take, nested states included."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    return sum(count_bytes(part) for part in state) if isinstance(state, tuple) else 0


def kv_cache_bytes(context: int) -> int:
    """What softmax attention keeps for the same context: a float32 key and value per token and head."""
    return 2 * context * NUM_HEADS * HEAD_DIM * 4
