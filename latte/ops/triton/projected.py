"""Macchiato with its projections on GPUs: products, rotary positions and the attention kernels as one operation.

What it saves is memory's time. Queries and keys are turned where their product wrote them. In backward the attention
kernels turn their gradients back as they write them, side by side into the columns of one matrix; those of logits go
into another. So one product makes the gradient of each input and one that of its weights, with no sums and no copies
between.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops.arguments import HeadSizes
from latte.ops.beside import starts
from latte.ops.first_derivatives import first_derivatives, refuse
from latte.ops.triton.attention import check_sizes, fake_results, fill_gradients, mixture_results
from latte.ops.triton.call import dense
from latte.ops.triton.device import check_device, check_dtypes, check_softcap
from latte.ops.triton.kernels.forward import output_kernel
from latte.ops.triton.launch import Room
from latte.ops.triton.rotary import turn_

OPERANDS = 8  # from x to cu_seqlens; those before cos have gradients
WITH_GRADIENTS = 4


def attend_projected(
    x: Tensor,
    mixed: Tensor,
    weight: Tensor,
    latent_weight: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    sizes: HeadSizes,
    *,
    window: int,
    scale: float,
    softcap: float,
    causal: bool,
) -> Tensor:
    """y; the weights are `beside` each other in the order of `sizes.scores` and `sizes.logits`.

    With cos and sin, queries' and keys' have `pairs_together`.
    """
    check_device(output_kernel, x.device)
    check_dtypes(x=x, mixed=mixed, weight=weight, latent_weight=latent_weight, cos=cos, sin=sin)
    check_softcap(softcap)
    check_sizes(sizes.width, sizes.key_width, sizes.latents)
    operands = (x, mixed, weight, latent_weight, dense(cos), dense(sin), mask, cu_seqlens)
    options = (list(sizes), window, scale, softcap, causal)
    if torch.compiler.is_compiling():
        return projected_forward(*operands, *options)[0]
    # Eager calls take the lighter path around the same functions: a custom operation costs the host much time.
    return Projected.apply(*operands, *options)


def _forward(x, mixed, weight, latent_weight, cos, sin, mask, cu_seqlens, sizes, *options) -> list[Tensor]:
    """y and what backward keeps: the two products, the state after, and what the attention kernels keep."""
    sizes = HeadSizes(*sizes)
    scores, logits = F.linear(x, weight), F.linear(mixed, latent_weight)
    if cos is not None:
        turn_(scores, cos, sin, sizes.heads, sizes.value_heads, starts(sizes.scores)[1])
    y, *kept = mixture_results(*_mixture(scores, logits, mask, cu_seqlens, sizes, options))
    return [y, scores, logits, *kept]


def _backward(
    dy, kept, needs, x, mixed, weight, latent_weight, cos, sin, mask, cu_seqlens, sizes, *options
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of x, mixed and their weights, None where there is no need of them."""
    sizes = HeadSizes(*sizes)
    scores, logits, *kept = kept
    dscores, dlogits = torch.empty_like(scores), torch.empty_like(logits)
    room = Room(*_parts(dscores, dlogits, sizes), cos=cos, sin=sin)
    fill_gradients(room, (dscores, dlogits), dy, kept, *_mixture(scores, logits, mask, cu_seqlens, sizes, options))
    dx, dweight = _product_gradients(dscores, x, weight, sizes.scores, needs[0], needs[2])
    dmixed, dlatent_weight = _product_gradients(dlogits, mixed, latent_weight, sizes.logits, needs[1], needs[3])
    return [dx, dmixed, dweight, dlatent_weight]


def _mixture(
    scores: Tensor, logits: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, sizes: HeadSizes, options: tuple
) -> tuple[tuple[Tensor | None, ...], tuple]:
    """Tensors and options as the mixture takes them: no state, no past, directed."""
    window, scale, softcap, causal = options
    tensors = (*_parts(scores, logits, sizes), mask, *(None,) * 5, cu_seqlens)
    return tensors, (window, scale, softcap, False, causal)


def _parts(scores: Tensor, logits: Tensor, sizes: HeadSizes) -> tuple[Tensor, ...]:
    """Latents' queries and keys, values, and the window's queries and keys, as views [B T heads width]."""

    def part(x: Tensor, begin: int, size: int, heads: int) -> Tensor:
        return x[..., begin : begin + size].unflatten(2, (heads, -1))

    heads, value_heads = sizes.heads, sizes.value_heads
    window_q, window_k, v = map(
        part, (scores,) * 3, starts(sizes.scores), sizes.scores, (heads, value_heads, value_heads)
    )
    k, q = map(part, (logits,) * 2, starts(sizes.logits), sizes.logits, (heads, heads))
    return q, k, v, window_q, window_k


def _product_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, sizes: Sequence[int], for_x: bool, for_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the two factors of `F.linear(x, weight)`; nobody wrote dy's columns between the parts."""
    begins = starts(sizes)
    for begin, size, following in zip(begins[:-1], sizes[:-1], begins[1:], strict=False):
        if begin + size < following:
            dy[..., begin + size : following].zero_()
    used = begins[-2] + sizes[-1]
    dy, rows = dy[..., :used].flatten(0, 1), x.reshape(-1, x.shape[2])
    dx = dweight = None
    if for_x:
        dx = torch.mm(dy, weight[:used]).view(x.shape)
    if for_weight:
        dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        dweight[used:].zero_()
        torch.mm(dy.t(), rows, out=dweight[:used])
    return dx, dweight


class Projected(torch.autograd.Function):
    """`_forward` and `_backward` for eager calls."""

    @staticmethod
    def forward(ctx, *arguments):
        y, *kept = _forward(*arguments)
        ctx.save_for_backward(*arguments[:OPERANDS], *kept)
        ctx.options = arguments[OPERANDS:]
        return y

    @staticmethod
    @first_derivatives
    def backward(ctx, saved, dy):
        needs = ctx.needs_input_grad[:WITH_GRADIENTS]
        found = _backward(dy, saved[OPERANDS:], needs, *saved[:OPERANDS], *ctx.options)
        return (*found, *(None for _ in range(OPERANDS - WITH_GRADIENTS + len(ctx.options))))


@torch.library.custom_op("latte::projected_macchiato_triton_forward", mutates_args=())
def projected_forward(
    x: Tensor,
    mixed: Tensor,
    weight: Tensor,
    latent_weight: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    sizes: list[int],
    window: int,
    scale: float,
    softcap: float,
    causal: bool,
) -> list[Tensor]:
    """y and what backward keeps."""
    return _forward(x, mixed, weight, latent_weight, cos, sin, mask, cu_seqlens, sizes, window, scale, softcap, causal)


@projected_forward.register_fake
def _(x, mixed, weight, latent_weight, cos, sin, mask, cu_seqlens, sizes, *options):
    sizes = HeadSizes(*sizes)
    scores = x.new_empty(*x.shape[:2], weight.shape[0])
    logits = mixed.new_empty(*mixed.shape[:2], latent_weight.shape[0])
    tensors, options = _mixture(scores, logits, mask, cu_seqlens, sizes, options)
    y, *kept = fake_results(*tensors, *options)
    return [y, scores, logits, *kept]


@torch.library.custom_op("latte::projected_macchiato_triton_backward", mutates_args=())
def projected_backward(
    dy: Tensor,
    kept: list[Tensor],
    needs: list[bool],
    x: Tensor,
    mixed: Tensor,
    weight: Tensor,
    latent_weight: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    sizes: list[int],
    window: int,
    scale: float,
    softcap: float,
    causal: bool,
) -> list[Tensor]:
    """Gradients of x, mixed and their weights; an empty tensor where there is no need of one."""
    found = _backward(
        dy, kept, needs, x, mixed, weight, latent_weight, cos, sin, mask, cu_seqlens, sizes,
        window, scale, softcap, causal,
    )  # fmt: skip
    return [x.new_empty(0) if grad is None else grad for grad in found]


@projected_backward.register_fake
def _(dy, kept, needs, x, mixed, weight, latent_weight, *_):
    given = (x, mixed, weight, latent_weight)
    return [z.new_empty(z.shape if needed else 0) for z, needed in zip(given, needs, strict=True)]


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:OPERANDS], *output[1:])
    ctx.options = inputs[OPERANDS:]


def _gradients(ctx, grads: Sequence[Any]):
    saved, needs = ctx.saved_tensors, list(ctx.needs_input_grad[:WITH_GRADIENTS])
    found = projected_backward(grads[0], list(saved[OPERANDS:]), needs, *saved[:OPERANDS], *ctx.options)
    found = [grad if needed else None for grad, needed in zip(found, needs, strict=True)]
    return (*found, *(None for _ in range(OPERANDS - WITH_GRADIENTS + len(ctx.options))))


projected_forward.register_autograd(_gradients, setup_context=_save)
projected_backward.register_autograd(refuse)
