"""The short causal convolution as K shifted products, segment by segment, with closed-form gradients.

The first K − 1 tokens of every sequence, its head, reach into its past; they are gathered and convolved apart. All
other tokens form the body: for them, sequences packed one after another are one sequence.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from latte.ops.checks import sequence_bounds
from latte.ops.first_derivatives import refuse
from latte.ops.packing import bounds, last_tokens
from latte.ops.rounding import round_to
from latte.ops.states import accumulation_dtype
from latte.ops.torch.segments import segment_length


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
    """Output and last K − 1 inputs, accumulated in `dtype`."""
    y = short_conv_forward(x, weight, bias, mask, state, cu_seqlens)
    clean = x if mask is None else x.masked_fill(~mask[..., None], 0.0)
    return y, last_tokens(state, clean, cu_seqlens)


class Heads(NamedTuple):
    """The first K − 1 tokens of each of N sequences: M real ones, and what they see."""

    row: Tensor  # [M]
    token: Tensor  # [M]
    place: tuple[Tensor, Tensor]  # [M] each: which sequence's, and which of its K − 1
    window: Tensor  # [N 2K-2 W] the past and these tokens, zeros where they are not real

    @classmethod
    def gather(
        cls, x: Tensor, mask: Tensor | None, past: Tensor, cu_seqlens: Tensor | None, dtype: torch.dtype
    ) -> "Heads":
        batch, tokens = x.shape[:2]
        rows, starts, ends = bounds(cu_seqlens, batch, tokens, x.device)
        token = starts[:, None] + torch.arange(past.shape[1], device=x.device)
        real = token < ends[:, None]
        if mask is not None:
            real &= mask[rows[:, None], token.clamp(max=tokens - 1)]
        sequence, slot = real.nonzero(as_tuple=True)
        row, token = rows[sequence], token[sequence, slot]
        window = torch.cat([past, past.new_zeros(past.shape)], dim=1).to(dtype)
        window[sequence, past.shape[1] + slot] = x[row, token].to(dtype)
        return cls(row, token, (sequence, slot), window)


@torch.library.custom_op("latte::short_conv_forward", mutates_args=())
def short_conv_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, past: Tensor, cu_seqlens: Tensor | None
) -> Tensor:
    """y of the convolution, given the K − 1 inputs before each sequence."""
    if cu_seqlens is not None:
        sequence_bounds(cu_seqlens, x.shape[1])
    dtype = accumulation_dtype(x, weight, bias)
    taps = weight.t().to(dtype).contiguous()
    offset = torch.zeros_like(taps[0]) if bias is None else bias.to(dtype)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.shape[1] == 1 and cu_seqlens is None:  # the step of decoding
        y.copy_(round_to(_slide(torch.cat([past, x], dim=1).to(dtype), taps, offset), y.dtype))
    elif x.shape[1]:
        _write_body(y, x, mask, taps, offset)
        heads = Heads.gather(x, mask, past, cu_seqlens, dtype)
        y[heads.row, heads.token] = round_to(_slide(heads.window, taps, offset)[heads.place], y.dtype)
    return y if mask is None else y.masked_fill_(~mask[..., None], 0.0)


def _write_body(y: Tensor, x: Tensor, mask: Tensor | None, taps: Tensor, offset: Tensor) -> None:
    """y of all tokens that have K − 1 before them, whichever sequence those are in."""
    reach = len(taps) - 1
    length = segment_length(x.shape[0], x.shape[2], x.device)
    for start in range(reach, x.shape[1], length):
        stop = min(start + length, x.shape[1])
        source, out = _load(x, mask, start - reach, stop, taps.dtype), y[:, start:stop]
        if out.dtype == taps.dtype:
            _slide(source, taps, offset, out)
        else:
            out.copy_(round_to(_slide(source, taps, offset), out.dtype))


def _load(x: Tensor, mask: Tensor | None, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    part = x[:, start:stop].to(dtype)
    return part if mask is None else part.masked_fill(~mask[:, start:stop, None], 0.0)


def _slide(source: Tensor, taps: Tensor, offset: Tensor, out: Tensor | None = None) -> Tensor:
    """offset + Σ_j taps_j source_{t+j} for every t with K tokens from it on."""
    tokens = source.shape[1] - len(taps) + 1
    out = torch.addcmul(offset, source[:, :tokens], taps[0], out=out)
    for j in range(1, len(taps)):
        out.addcmul_(source[:, j : j + tokens], taps[j])
    return out


@short_conv_forward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, past: Tensor, cu_seqlens: Tensor | None
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("latte::short_conv_backward", mutates_args=())
def short_conv_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    past: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and the past."""
    dtype = accumulation_dtype(x, weight, bias)
    taps = weight.t().to(dtype).contiguous()
    dx, dpast = torch.empty_like(x, memory_format=torch.contiguous_format), torch.zeros_like(past)
    dtaps, dbias = torch.zeros_like(taps), torch.zeros_like(taps[0])
    if x.shape[1]:
        heads = Heads.gather(x, mask, past, cu_seqlens, dtype)
        skip = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else ~mask
        skip[heads.row, heads.token] = True
        _body_gradients(dy, skip, x, mask, taps, dx, dtaps, dbias)
        dwindow = _head_gradients(dy, heads, taps, dtaps, dbias)
        dpast.copy_(dwindow[:, : past.shape[1]])
        sequence, slot = heads.place
        dx[heads.row, heads.token] += dwindow[sequence, past.shape[1] + slot].to(dx.dtype)
    if mask is not None:
        dx.masked_fill_(~mask[..., None], 0.0)
    return dx, dtaps.t().to(weight.dtype).contiguous(), dbias.to(weight.dtype if bias is None else bias.dtype), dpast


def _body_gradients(
    dy: Tensor, skip: Tensor, x: Tensor, mask: Tensor | None, taps: Tensor, dx: Tensor, dtaps: Tensor, dbias: Tensor
) -> None:
    """Write dx, and add to dtaps and dbias, for all of dy but what `skip` marks: masked tokens and heads."""
    (batch, tokens, width), reach = x.shape, len(taps) - 1
    length = min(tokens, segment_length(batch, width, x.device))
    room, product = taps.new_empty((2, batch, length + reach, width)).unbind()
    for start in range(0, tokens, length):
        stop, after = min(start + length, tokens), min(start + length + reach, tokens)
        dy_part = room[:, : after - start].copy_(dy[:, start:after])
        dy_part.masked_fill_(skip[:, start:after, None], 0.0)
        out = torch.mul(dy_part[:, : stop - start], taps[-1], out=product[:, : stop - start])
        for j in range(min(reach, after - start - 1)):
            ahead = dy_part[:, j + 1 : j + 1 + stop - start]
            out[:, : ahead.shape[1]].addcmul_(ahead, taps[reach - 1 - j])
        dx[:, start:stop] = out

        first = max(start, reach)  # the tokens before are in heads
        if first < stop:
            _correlate(
                dy_part[:, first - start : stop - start],
                _load(x, mask, first - reach, stop, taps.dtype),
                dtaps,
                product,
            )
        dbias += dy_part[:, : stop - start].sum(dim=(0, 1))


def _head_gradients(dy: Tensor, heads: Heads, taps: Tensor, dtaps: Tensor, dbias: Tensor) -> Tensor:
    """Gradient of the heads' windows; adds to dtaps and dbias."""
    dwindow = torch.zeros_like(heads.window)
    slots = len(taps) - 1
    dy_heads = dwindow[:, :slots].clone()
    dy_heads[heads.place] = dy[heads.row, heads.token].to(taps.dtype)
    for j, tap in enumerate(taps):
        dwindow[:, j : j + slots].addcmul_(dy_heads, tap)
    _correlate(dy_heads, heads.window, dtaps, torch.empty_like(dy_heads))
    dbias += dy_heads.sum(dim=(0, 1))
    return dwindow


def _correlate(dy: Tensor, source: Tensor, dtaps: Tensor, room: Tensor) -> None:
    """dtaps_j += Σ_t dy_t source_{t+j}: the gradient of `_slide`'s taps."""
    tokens = dy.shape[1]
    for j in range(len(dtaps)):
        dtaps[j] += torch.mul(dy, source[:, j : j + tokens], out=room[:, :tokens]).sum(dim=(0, 1))


@short_conv_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    past: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    return (
        dx,
        dweight,
        weight.new_empty(weight.shape[:1], dtype=(weight if bias is None else bias).dtype),
        torch.empty_like(past),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: checkpointing allows no second look
    dx, dweight, dbias, dpast = short_conv_backward(dy, *saved)
    return dx, dweight, None if saved[2] is None else dbias, None, dpast, None


short_conv_forward.register_autograd(_differentiate, setup_context=_save)
short_conv_backward.register_autograd(refuse)
