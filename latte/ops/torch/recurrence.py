"""The RG-LRU as a chunked scan with closed-form gradients.

The sequence is walked in segments that fit the processor's cache. Within one, the scan h_t = a_t h_{t−1} + b_t runs
over chunks of about √S tokens, all chunks at once: first for what each chunk adds, then from the right start. Only
the inputs and the h before each segment are kept for the gradients. Where nothing came before, log a = −inf says all:
no past, and a multiplier sqrt(1 − a²) of 1. A masked position has a gate of −inf and x = 0: a = 1 and nothing added.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from latte.ops.first_derivatives import refuse
from latte.ops.rounding import round_to
from latte.ops.states import accumulation_dtype
from latte.ops.torch.scan import scan
from latte.ops.torch.segments import Starts, Walk, decay_rate, segment_length


def recur(
    x: Tensor,
    a_gate: Tensor,
    x_gate: Tensor,
    a_param: Tensor,
    *,
    mask: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Output and state of the recurrence, accumulated in `dtype`."""
    if state is not None:
        state = state.to(dtype)
    y, final, _ = rglru_forward(x, a_gate, x_gate, a_param, mask, state, cu_seqlens)
    return y, final


@torch.library.custom_op("latte::rglru_forward", mutates_args=())
def rglru_forward(
    x: Tensor,
    a_gate: Tensor,
    x_gate: Tensor,
    a_param: Tensor,
    mask: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the state after each sequence, and h before each segment for the gradients.

    The latter has h after the last segment too: of how many segments there are, torch.export would ask if it is one.
    """
    if x.shape[1] == 1 and cu_seqlens is None:
        return _one_token(x, a_gate, x_gate, a_param, mask, state)
    walk = Walk(x, a_gate, x_gate, a_param, mask, state, cu_seqlens)
    y, final = torch.empty_like(x, memory_format=torch.contiguous_format), walk.state.clone()
    segments = walk.segments()
    carries = walk.state.new_zeros((len(segments) + 1, *x.shape[::2]))
    room = walk.buffers(2 if y.dtype == walk.dtype else 3)
    for n, (start, stop) in enumerate(segments):
        starts = walk.starts(start, stop)
        a, multiplier, *spare = (buffer[:, : stop - start] for buffer in room)
        walk.decay(start, stop, starts, a, a, multiplier)
        h = spare[0] if spare else y[:, start:stop]
        torch.sigmoid(walk.load(x_gate, start, stop, 0.0, out=h), out=h)
        h.mul_(x[:, start:stop]).mul_(multiplier)
        if mask is not None:
            h.masked_fill_(~mask[:, start:stop, None], 0.0)
        _enter(starts, a, h)
        carries[n + 1] = scan(a, h, carries[n])
        row, token, sequence = walk.ends(start, stop)
        final[sequence] = h[row, token]
        if spare:
            y[:, start:stop] = round_to(h, y.dtype)
    return y if mask is None else y.masked_fill_(~mask[..., None], 0.0), final, carries


def _enter(starts: Starts, a: Tensor, h: Tensor) -> Tensor:
    """Let the states before enter at the sequences' first tokens and cut the scan there; returns what a was."""
    at = starts.row, starts.token
    decay = a[at]
    h[at] += decay * starts.h
    a[at] = 0.0
    return decay


def _one_token(
    x: Tensor, a_gate: Tensor, x_gate: Tensor, a_param: Tensor, mask: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The step of decoding, with no more operations than its formula has."""
    dtype = accumulation_dtype(x, a_gate, x_gate, a_param)
    h = torch.sigmoid(x_gate[:, 0].to(dtype)).mul_(x[:, 0])
    before = torch.full_like(h, -torch.inf) if state is None else state
    if state is not None:
        log_a = torch.sigmoid(a_gate[:, 0].to(dtype)).mul_(decay_rate(a_param.to(dtype))).neg_()
        unseen = state == -torch.inf
        a = torch.exp(log_a.masked_fill_(unseen, -torch.inf))
        h.mul_(log_a.mul_(2.0).expm1_().neg_().sqrt_()).addcmul_(a, state.masked_fill(unseen, 0.0))
    y = h
    if mask is not None:
        h, y = torch.where(mask, h, before), h.masked_fill(~mask, 0.0)
    y = round_to(y, x.dtype)
    return (y.clone() if y is h else y)[:, None], h, h.new_zeros((2, *h.shape))


@rglru_forward.register_fake
def _(
    x: Tensor,
    a_gate: Tensor,
    x_gate: Tensor,
    a_param: Tensor,
    mask: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, width = x.shape
    dtype = accumulation_dtype(x, a_gate, x_gate, a_param)
    length = segment_length(batch, width, x.device)
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    carries = x.new_empty(((tokens + length - 1) // length + 1, batch, width), dtype=dtype)
    return y, x.new_empty((sequences, width), dtype=dtype), carries


@torch.library.custom_op("latte::rglru_backward", mutates_args=())
def rglru_backward(
    dy: Tensor,
    dfinal: Tensor,
    carries: Tensor,
    x: Tensor,
    a_gate: Tensor,
    x_gate: Tensor,
    a_param: Tensor,
    mask: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, a_gate, x_gate, a_param and of the state before."""
    walk = Walk(x, a_gate, x_gate, a_param, mask, state, cu_seqlens)
    dx, da_gate, dx_gate = (torch.empty_like(z, memory_format=torch.contiguous_format) for z in (x, a_gate, x_gate))
    drate = torch.zeros_like(walk.rate)
    dstate = dfinal.clone()  # right where a sequence has no real token
    later = walk.state.new_zeros(x.shape[::2])  # a · dh of the token after the segment
    room = walk.buffers(len(Room._fields))
    for n, (start, stop) in reversed(list(enumerate(walk.segments()))):
        starts = walk.starts(start, stop)
        part = Room(*(buffer[:, : stop - start + 1] for buffer in room))
        x_part, decay = _recompute(walk, part, start, stop, starts, carries[n])

        dh = walk.gradient(dy, dfinal, start, stop, out=part.dh[:, :-1])
        scan(part.a[:, 1:], dh, later, reverse=True)
        later = part.a[:, 0] * dh[:, 0]
        first = starts.row, starts.token
        dstate[starts.sequence] = decay * dh[first]
        part.a[first], part.h[first] = decay, starts.h

        grads = (z[:, start:stop] for z in (dx, da_gate, dx_gate))
        drate += _input_gradients(part, x_part, walk.rate, *grads)
    da_param = 8.0 * drate * torch.sigmoid(a_param.to(walk.dtype))
    return dx, da_gate, dx_gate, da_param.to(a_param.dtype), dstate


class Room(NamedTuple):
    """Buffers for a segment of S tokens and one more."""

    a: Tensor  # and 1 after the last token
    h: Tensor  # from the h before the first token
    r: Tensor
    i: Tensor
    multiplier: Tensor
    gated: Tensor  # i x
    dh: Tensor
    x: Tensor
    spare: Tensor


def _recompute(walk: Walk, room: Room, start: int, stop: int, starts: Starts, carry: Tensor) -> tuple[Tensor, Tensor]:
    """Fill the room with what the forward pass knew; returns x, and a at first tokens, which is 0 in the room."""
    a, h, r, i, multiplier, gated, _, scratch, _ = (buffer[:, :-1] for buffer in room)
    walk.decay(start, stop, starts, r, a, multiplier)
    torch.sigmoid(walk.load(walk.inputs[2], start, stop, 0.0, out=i), out=i)
    x = walk.load(walk.inputs[0], start, stop, 0.0, out=scratch)
    h = room.h[:, 1:]
    torch.mul(torch.mul(i, x, out=gated), multiplier, out=h)
    decay = _enter(starts, a, h)
    scan(a, h, carry)
    room.a[:, -1], room.h[:, 0] = 1.0, carry
    return x, decay


def _input_gradients(room: Room, x: Tensor, rate: Tensor, dx: Tensor, da_gate: Tensor, dx_gate: Tensor) -> Tensor:
    """Write the gradients of a segment's inputs, given dh; returns that of the decay rate. Uses up the room."""
    a, past, r, i, multiplier, gated, dh, _, spare = (buffer[:, :-1] for buffer in room)
    scaled = torch.mul(dh, multiplier, out=spare)
    torch.mul(scaled, i, out=dx)
    _through_sigmoid(scaled.mul_(x), i, out=dx_gate)
    # h = a h' + sqrt(1 − a²) i x, and sqrt's derivative 1 / (2 sqrt) is clipped to 1000
    past.sub_(gated.mul_(a).div_(multiplier.clamp_(min=5e-4)))
    dlog_a = dh.mul_(past).mul_(a)
    drate = -torch.mul(dlog_a, r, out=spare).sum(dim=(0, 1))
    _through_sigmoid(dlog_a.mul_(-rate), r, out=da_gate)
    return drate


def _through_sigmoid(gradient: Tensor, sigmoid: Tensor, out: Tensor) -> None:
    torch.ops.aten.sigmoid_backward.grad_input(gradient, sigmoid, grad_input=out)


@rglru_backward.register_fake
def _(
    dy: Tensor,
    dfinal: Tensor,
    carries: Tensor,
    x: Tensor,
    a_gate: Tensor,
    x_gate: Tensor,
    a_param: Tensor,
    mask: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx, da_gate, dx_gate = (torch.empty_like(z, memory_format=torch.contiguous_format) for z in (x, a_gate, x_gate))
    return dx, da_gate, dx_gate, torch.empty_like(a_param), torch.empty_like(dfinal)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[2], *inputs)


def _differentiate(ctx: Any, dy: Tensor, dfinal: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: checkpointing allows no second look
    *grads, dstate = rglru_backward(dy, dfinal, *saved)
    return *grads, None, None if saved[6] is None else dstate, None


rglru_forward.register_autograd(_differentiate, setup_context=_save)
rglru_backward.register_autograd(refuse)
