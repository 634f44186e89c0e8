"""The short causal convolution on GPUs: one launch forward, one backward and a sum over its partial sums."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from latte.ops.checks import check_bounds
from latte.ops.first_derivatives import first_derivatives, refuse
from latte.ops.packing import bounds, last_tokens
from latte.ops.triton.call import dense, launch, side_by_side
from latte.ops.triton.device import check_device, check_dtypes
from latte.ops.triton.kernels.convolution import backward_kernel, forward_kernel
from latte.ops.triton.replay import Cookbook, empty
from latte.ops.triton.sums import add_parts

FORWARD_TILE, BACKWARD_TILE, BLOCK = 32, 16, 64
MAX_TAPS = 16
FILLING, MOST_TILES = 2048, 8  # programs that fill a device, beyond which each takes more tiles, up to so many
PARTS = 128  # partial sums of the taps' gradient


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    mask: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Output and last K − 1 inputs, accumulated in float32."""
    check_device(forward_kernel, x.device)
    check_dtypes(x=x, weight=weight, bias=bias)
    if weight.shape[1] > MAX_TAPS:
        raise ValueError(
            f"weight has K = {weight.shape[1]}; the Triton kernels take at most {MAX_TAPS} taps; "
            'use backend="torch" for more'
        )
    # Eager calls take the lighter path around the same functions: a custom operation costs the host much time.
    run = short_conv_triton_forward if torch.compiler.is_compiling() else Convolution.apply
    y = run(x, weight, bias, mask, state, cu_seqlens)
    clean = x if mask is None else x.masked_fill(~mask[..., None], 0.0)
    return y, last_tokens(state, clean, cu_seqlens)


class Layout(NamedTuple):
    """Where each token's sequence begins and ends, and its number; None unless packed."""

    starts: Tensor | None = None
    ends: Tensor | None = None
    sequences: Tensor | None = None

    @classmethod
    def make(cls, cu_seqlens: Tensor | None, tokens: int) -> "Layout":
        if cu_seqlens is None:
            return cls()
        cu_seqlens = cu_seqlens.to(torch.int32)
        place = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens.device)
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), place, right=True)
        return cls(cu_seqlens[sequence], cu_seqlens[sequence + 1], sequence.to(torch.int32))


def _options(
    weight: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, tile: int, **inputs: Tensor
) -> dict[str, Any]:
    """What the kernels are compiled for; `inputs` by the letter of their stride."""
    width, taps = weight.shape
    return {
        "W": width,
        "K": taps,
        "MASK": mask is not None,
        "PACKED": cu_seqlens is not None,
        "TILE": tile if taps <= 6 else tile // 2,  # the more taps, the more registers
        "BLOCK": min(BLOCK, triton.next_power_of_2(width)),
        "num_warps": 4,
        **{f"{letter}_TOKEN": z.stride(1) for letter, z in inputs.items()},
    }


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


def _forward(x, weight, bias, mask, past, cu_seqlens) -> Tensor:
    """y of the convolution, given the K − 1 inputs before each sequence."""
    batch, tokens, width = x.shape
    if cu_seqlens is not None:
        check_bounds(cu_seqlens, tokens)
    y = empty(x.shape, x.dtype, x.device)
    if y.numel() == 0:
        return y
    x, layout = side_by_side(x), Layout.make(cu_seqlens, tokens)
    options = _options(weight, mask, cu_seqlens, FORWARD_TILE, X=x)
    tiles, blocks = triton.cdiv(tokens, options["TILE"]), triton.cdiv(width, options["BLOCK"])
    run = max(1, min(MOST_TILES, batch * tiles * blocks // FILLING))
    launch(
        forward_kernel, batch * triton.cdiv(tiles, run) * blocks,
        x, weight.contiguous(), dense(bias), _bytes(mask), past.contiguous(), layout.starts, layout.sequences, y,
        tokens, tiles, run, x.stride(0), BIAS=bias is not None, **options,
    )  # fmt: skip
    return y


def _backward(dy, x, weight, mask, past, cu_seqlens) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias, the last in float32."""
    batch, tokens, width = x.shape
    dx = empty(x.shape, x.dtype, x.device)
    if dx.numel() == 0:
        dweight = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        return dx, dweight, weight.new_zeros(width, dtype=torch.float32)
    dy, x, layout = side_by_side(dy), side_by_side(x), Layout.make(cu_seqlens, tokens)
    options = _options(weight, mask, cu_seqlens, BACKWARD_TILE, Y=dy, X=x)
    tiles = triton.cdiv(tokens, options["TILE"])
    if weight.shape[1] <= 4:  # four programs a processor where it takes three otherwise; more taps would not fit
        options["maxnreg"] = 128
    run = triton.cdiv(batch * tiles, PARTS)
    parts = triton.cdiv(tiles, run)
    partial = empty((batch * parts, weight.numel() + width), torch.float32, x.device)
    launch(
        backward_kernel, batch * parts * triton.cdiv(width, options["BLOCK"]),
        dy, x, weight.contiguous(), _bytes(mask), past.contiguous(), *layout, dx, partial,
        tokens, tiles, run, dy.stride(0), x.stride(0), **options,
    )  # fmt: skip
    return dx, *add_parts(partial, weight.shape, weight.dtype)


def _past_gradient(dy: Tensor, weight: Tensor, mask: Tensor | None, past: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """What the first K − 1 tokens of each sequence pass on to its past: a few rows, in PyTorch."""
    batch, tokens, _ = dy.shape
    if dy.numel() == 0:
        return torch.zeros_like(past)
    slots = past.shape[1]
    row, starts, ends = bounds(cu_seqlens, batch, tokens, dy.device)
    token = starts[:, None] + torch.arange(slots, device=dy.device)
    real, token = token < ends[:, None], token.clamp(max=tokens - 1)
    if mask is not None:
        real = real & mask[row[:, None], token]
    heads = dy[row[:, None], token].float().masked_fill_(~real[..., None], 0.0)
    dpast = torch.zeros_like(heads)
    for j in range(slots):
        dpast[:, j:].addcmul_(heads[:, : slots - j], weight[:, j].float())
    return dpast.to(past.dtype)


FORWARD, BACKWARD = Cookbook(), Cookbook()


def _plain(*inputs: Tensor | None) -> bool:
    """Whether a call is nothing but its kernels: of tokens, without mask and packing, everything side by side."""
    x, weight, bias, mask, past, cu_seqlens = inputs
    bare = mask is None and cu_seqlens is None and x is not None and x.stride(2) == 1 and x.numel() > 0
    return bare and all(z is None or z.is_contiguous() for z in (weight, bias, past))


def _replay_forward(*inputs: Tensor | None) -> Tensor:
    """`_forward`, replayed where such a call was seen before."""
    return FORWARD.perform(inputs, (), lambda: [_forward(*inputs)])[0] if _plain(*inputs) else _forward(*inputs)


def _replay_backward(dy: Tensor, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """`_backward` likewise."""
    if dy.stride(2) == 1 and _plain(*inputs[:2], None, *inputs[2:]):
        return tuple(BACKWARD.perform((dy, *inputs), (), lambda: list(_backward(dy, *inputs))))
    return _backward(dy, *inputs)


class Convolution(torch.autograd.Function):
    """The convolution for eager calls."""

    @staticmethod
    def forward(ctx, *inputs):
        _save(ctx, inputs, inputs[0])
        return _replay_forward(*inputs)

    @staticmethod
    @first_derivatives
    def backward(ctx, saved, dy):
        x, *others = saved
        dx, dweight, dbias = _replay_backward(dy, x, *others)
        return _finish(ctx, dx, dweight, dbias, _past_gradient(dy, *others) if ctx.needs_input_grad[4] else None)


@torch.library.custom_op("latte::short_conv_triton_forward", mutates_args=())
def short_conv_triton_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, past: Tensor, cu_seqlens: Tensor | None
) -> Tensor:
    """y of the convolution, given the K − 1 inputs before each sequence."""
    return _replay_forward(x, weight, bias, mask, past, cu_seqlens)


@short_conv_triton_forward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, past: Tensor, cu_seqlens: Tensor | None
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("latte::short_conv_triton_backward", mutates_args=())
def short_conv_triton_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    past: Tensor,
    cu_seqlens: Tensor | None,
    through_past: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias (in float32) and, if `through_past`, of the past."""
    dpast = _past_gradient(dy, weight, mask, past, cu_seqlens) if through_past else torch.zeros_like(past)
    dx, dweight, dbias = _replay_backward(dy, x, weight, mask, past, cu_seqlens)
    return dx, dweight, dbias, dpast


@short_conv_triton_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    past: Tensor,
    cu_seqlens: Tensor | None,
    through_past: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    return dx, dweight, weight.new_empty(weight.shape[:1], dtype=torch.float32), torch.empty_like(past)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, mask, past, cu_seqlens = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, mask, past, cu_seqlens)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _finish(ctx, *short_conv_triton_backward(dy, *ctx.saved_tensors, ctx.needs_input_grad[4]))


def _finish(ctx: Any, dx: Tensor, dweight: Tensor, dbias: Tensor, dpast: Tensor | None) -> tuple[Tensor | None, ...]:
    return dx, dweight, None if ctx.bias_dtype is None else dbias.to(ctx.bias_dtype), None, dpast, None


short_conv_triton_forward.register_autograd(_differentiate, setup_context=_save)
short_conv_triton_backward.register_autograd(refuse)
