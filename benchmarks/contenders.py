"""What is measured: our ops, and what others offer for the same work. Inputs come from a fixed seed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from latte.ops.attention import latte_attention, macchiato_attention, window_attention
from latte.ops.convolution import short_conv
from latte.ops.gated_recurrence import gated_rglru
from latte.ops.recurrence import rglru

PASSES = ("forward", "forward+backward")


class Sizes(NamedTuple):
    batch: int
    tokens: int
    heads: int = 12
    head_dim: int = 64
    latents: int = 16
    window: int = 128
    taps: int = 4

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


class Draw:
    """Random inputs of one call."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: str) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device
        self.generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=self.dtype, device=self.device)

    def heads(self, width: int) -> Tensor:
        return self(self.sizes.batch, self.sizes.tokens, self.sizes.heads, width)

    def channels(self) -> Tensor:
        return self(self.sizes.batch, self.sizes.tokens, self.sizes.width)

    def line(self, first: float, last: float) -> Tensor:
        """One float32 parameter per channel."""
        return torch.linspace(first, last, self.sizes.width, device=self.device)


@dataclass(frozen=True)
class Contender:
    op: str  # what it computes
    by: str  # whose it is
    draw: Callable[[Draw], list[Tensor]]
    run: Callable[..., Any]  # (inputs, sizes, **options) → y, or a tuple that begins with it

    def inputs(self, sizes: Sizes, dtype: torch.dtype, device: str) -> list[Tensor]:
        return [x.requires_grad_() for x in self.draw(Draw(sizes, dtype, device))]

    def step(self, inputs: list[Tensor], sizes: Sizes, *, backward: bool, **options: str) -> Callable[[], object]:
        """A function that does the work once; `options` are of our ops."""
        plain = [x.detach() for x in inputs]  # FlexAttention takes no others forward on a CPU

        def forward() -> object:
            with torch.no_grad():
                return self.run(plain, sizes, **options)

        if not backward:
            return forward
        dy = torch.randn_like(first(forward()))
        return lambda: torch.autograd.grad(first(self.run(inputs, sizes, **options)), inputs, dy)


def first(output: Any) -> Tensor:
    """y of an output."""
    return output if isinstance(output, Tensor) else output[0]


LATTE = Contender(
    "Latte",
    "latte",
    lambda draw: [draw.heads(draw.sizes.latents), draw.heads(draw.sizes.latents), draw.heads(draw.sizes.head_dim)],
    lambda inputs, sizes, **options: latte_attention(*inputs, **options),
)
MACCHIATO = Contender(
    "Macchiato",
    "latte",
    lambda draw: [
        draw.heads(draw.sizes.latents + 1),
        draw.heads(draw.sizes.latents),
        *(draw.heads(draw.sizes.head_dim) for _ in range(3)),
    ],
    lambda inputs, sizes, **options: macchiato_attention(*inputs, window=sizes.window, **options),
)
WINDOW = Contender(
    "window",
    "latte",
    lambda draw: [draw.heads(draw.sizes.head_dim) for _ in range(3)],
    lambda inputs, sizes, **options: window_attention(*inputs, window=sizes.window, **options),
)
RGLRU = Contender(
    "RG-LRU",
    "latte",
    lambda draw: [*(draw.channels() for _ in range(3)), draw.line(-9.0, 1.0)],  # a from 0.9999 down to 0
    lambda inputs, sizes, **options: rglru(*inputs, **options),
)
GATED = Contender(
    "RG-LRU with its gates",
    "latte",
    lambda draw: [
        draw.channels(),
        *(x for _ in range(2) for x in (draw(1, draw.sizes.width, draw.sizes.width), draw.line(-1.0, 1.0))),
        draw.line(-9.0, 1.0),
    ],
    lambda inputs, sizes, **options: gated_rglru(*inputs, **options),
)
CONVOLUTION = Contender(
    "short conv",
    "latte",
    lambda draw: [
        draw.channels(),
        torch.stack([draw.line(-1.0, float(tap)) for tap in range(draw.sizes.taps)], dim=1),
        draw.line(-1.0, 1.0),
    ],
    lambda inputs, sizes, **options: short_conv(*inputs, **options),
)
OURS = (LATTE, MACCHIATO, WINDOW, RGLRU, CONVOLUTION)


def heads_first(draw: Draw) -> list[Tensor]:
    """q, k, v as PyTorch's attention likes them: [B H T D]."""
    sizes = draw.sizes
    return [draw(sizes.batch, sizes.heads, sizes.tokens, sizes.head_dim) for _ in range(3)]


def run_softmax(inputs: list[Tensor], sizes: Sizes, kernel: SDPBackend = SDPBackend.FLASH_ATTENTION) -> Tensor:
    q, k, v = inputs
    with sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@cache
def compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


@cache
def band(tokens: int, window: int, device: str, block: int = 128) -> BlockMask:
    """The window as a block mask, made from the blocks it touches: a T × T mask would not fit for long sequences."""
    if tokens % block:
        raise ValueError(f"tokens is {tokens}; it must be a multiple of {block}")
    rows = torch.arange(tokens // block, device=device)
    start = torch.div(rows * block - window + 1, block, rounding_mode="floor").clamp(min=0)
    columns = (start[:, None] + torch.arange(len(rows), device=device)).clamp(max=len(rows) - 1)
    return BlockMask.from_kv_blocks(
        (rows - start + 1).int()[None, None],
        columns.int()[None, None],
        BLOCK_SIZE=block,
        mask_mod=lambda b, h, q, k: (q >= k) & (q - k < window),
    )


def run_flex(inputs: list[Tensor], sizes: Sizes) -> Any:
    mask = band(sizes.tokens, sizes.window, str(inputs[0].device))
    return compiled_flex()(*inputs, block_mask=mask)


def run_lightnet(inputs: list[Tensor], sizes: Sizes) -> Any:
    """Causal Latte by FLA: its gated linear attention with keys normalised as they come."""
    from fla.ops.lightnet import chunk_lightnet  # pyright: ignore[reportMissingImports]

    q, k, v = inputs
    return chunk_lightnet(torch.softmax(q, dim=-1), k, v, scale=1.0)


def run_loop(inputs: list[Tensor], sizes: Sizes) -> Tensor:
    """Gates at once, then a Python loop over time; tokens are cut apart first, which public code leaves to the loop."""
    x, a_gate, x_gate, a_param = inputs
    log_a = -8.0 * F.softplus(a_param) * torch.sigmoid(a_gate)
    fresh = torch.sigmoid(x_gate) * x
    added = torch.sqrt(-torch.expm1(2.0 * log_a)) * fresh
    h, outputs = fresh[:, 0], [fresh[:, 0]]
    for a_t, b_t in zip(torch.exp(log_a).unbind(1)[1:], added.unbind(1)[1:], strict=True):
        h = a_t * h + b_t
        outputs.append(h)
    return torch.stack(outputs, dim=1)


SOFTMAX = Contender("softmax attention", "SDPA FlashAttention", heads_first, run_softmax)
CUDNN = Contender(
    "softmax attention", "SDPA cuDNN", heads_first, partial(run_softmax, kernel=SDPBackend.CUDNN_ATTENTION)
)
FLEX = Contender("window", "FlexAttention, compiled", heads_first, run_flex)
LIGHTNET = Contender("Latte", "FLA chunk_lightnet", LATTE.draw, run_lightnet)
LOOP = Contender("RG-LRU", "Python loop over time", RGLRU.draw, run_loop)
