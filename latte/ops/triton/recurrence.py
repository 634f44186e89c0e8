"""The RG-LRU on GPUs: what each piece of a sequence does to h, a scan over the pieces, then all outputs.

Three launches forward and three backward, none of whose results depends on the order programs run in. Kept for the
gradients are the inputs and h before every ROWS tokens in float32: in bfloat16 that is 1/16 of inputs and output.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from latte.ops.checks import check_bounds
from latte.ops.first_derivatives import first_derivatives, refuse
from latte.ops.known import needs_gradients
from latte.ops.packing import spans
from latte.ops.triton import recurrence_calls
from latte.ops.triton.call import launch, side_by_side
from latte.ops.triton.device import check_device, check_dtypes
from latte.ops.triton.kernels.recurrence import output_kernel, piece_ends_kernel, scan_pieces_kernel
from latte.ops.triton.kernels.recurrence_gradients import gradient_kernel, piece_starts_kernel
from latte.ops.triton.replay import Cookbook, empty
from latte.ops.triton.sums import add_parts

ROWS = 8  # rows a warp asks for at a time, and tokens between checkpoints
BLOCK = 64  # channels of a warp: 128 bytes of bfloat16
SCAN_ROWS, SCAN_BLOCK = 128, 16  # pieces and channels of one step of the scan over pieces
FORWARD_WARPS, BACKWARD_WARPS = 32, 16  # as many as a processor runs at once, with 64 and with 128 registers
MIN_PIECE, MAX_PIECES = 64, 512


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
    """Output and state of the recurrence, accumulated in float32."""
    check_device(output_kernel, x.device)
    check_dtypes(x=x, a_gate=a_gate, x_gate=x_gate, a_param=a_param)
    if state is not None:
        state = state.to(dtype)
    inputs = (x, a_gate, x_gate, a_param, state)
    arguments = (x, a_gate, x_gate, a_param, mask, state, cu_seqlens, needs_gradients(inputs))
    # Eager calls take the lighter path around the same functions: a custom operation costs the host much time.
    compiling = torch.compiler.is_compiling()
    y, final, *_ = rglru_triton_forward(*arguments) if compiling else Recurrence.apply(*arguments)
    return y, final


class Rows(NamedTuple):
    """Codes of tokens, as the kernels read them; None when no mask and no packing calls for them."""

    codes: Tensor | None = None
    lasts: Tensor | None = None
    untouched: Tensor | None = None  # [N 1] sequences without a real token


def mark_rows(x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Rows:
    """Mark masked tokens, first tokens and last positions, without waiting for the device."""
    if mask is None and cu_seqlens is None:
        return Rows()
    batch, tokens = x.shape[:2]
    found = spans(mask, cu_seqlens, batch, tokens, x.device)
    codes = torch.full((batch, tokens + 1), -1, dtype=torch.int32, device=x.device)  # the last column takes "none"
    lasts = codes.clone()
    if mask is not None:
        codes[:, :tokens].masked_fill_(~mask, -2)
    sequence = torch.arange(len(found.row), dtype=torch.int32, device=x.device)
    codes[found.row, found.first] = sequence
    lasts[found.row, found.last] = sequence
    untouched = (found.first == tokens)[:, None]
    return Rows(codes[:, :tokens].contiguous(), lasts[:, :tokens].contiguous(), untouched)


class Plan(NamedTuple):
    """How a call is cut into pieces: enough to fill the device, few enough to scan."""

    length: int
    pieces: int
    blocks: int

    @classmethod
    def make(cls, x: Tensor, warps: int) -> "Plan":
        batch, tokens, width = x.shape
        blocks = triton.cdiv(width, _block(width))
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1024
        wanted = max(1, warps * processors // (batch * blocks))
        length = max(MIN_PIECE, triton.cdiv(tokens, min(wanted, MAX_PIECES)))
        length = triton.cdiv(length, ROWS) * ROWS
        return cls(length, triton.cdiv(tokens, length), blocks)


def _block(width: int) -> int:
    return min(BLOCK, triton.next_power_of_2(width))


def _forward(x, a_gate, x_gate, a_param, mask, state, cu_seqlens, save) -> tuple[Tensor, Tensor, Tensor]:
    """y, the state after each sequence, and, if `save`, h before every ROWS tokens."""
    batch, tokens, width = x.shape
    if cu_seqlens is not None:
        check_bounds(cu_seqlens, tokens)
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    y = empty(x.shape, x.dtype, x.device)
    checkpoints = empty(_checkpoint_shape(x, save), torch.float32, x.device)
    if x.numel() == 0:
        unseen = x.new_full((sequences, width), -torch.inf, dtype=torch.float32)
        return y, unseen if state is None else state.clone(), checkpoints
    final = empty((sequences, width), torch.float32, x.device)
    rows, plan = mark_rows(x, mask, cu_seqlens), Plan.make(x, FORWARD_WARPS)
    x, a_gate, x_gate, a_param = side_by_side(x), side_by_side(a_gate), side_by_side(x_gate), a_param.contiguous()
    given = None if state is None else state.contiguous()
    options = _options(tokens, width, state, rows, X=x, A=a_gate, G=x_gate)
    sizes = (tokens, plan.pieces, plan.length, x.stride(0), a_gate.stride(0), x_gate.stride(0))
    decays, ends = empty((2, batch, max(plan.pieces - 1, 1), width), torch.float32, x.device)
    if plan.pieces > 1:
        programs = batch * (plan.pieces - 1) * plan.blocks
        launch(
            piece_ends_kernel, programs, x, a_gate, x_gate, a_param, given, rows.codes, decays, ends, *sizes, **options
        )
        scan_pieces(decays, ends, reverse=False)
    launch(
        output_kernel, batch * plan.pieces * plan.blocks,
        x, a_gate, x_gate, a_param, given, rows.codes, rows.lasts, ends, y, final, checkpoints if save else final,
        *sizes, SAVE=save, **options,
    )  # fmt: skip
    if rows.untouched is not None:
        final = torch.where(rows.untouched, -torch.inf if given is None else given, final)
    return y, final, checkpoints


def _checkpoint_shape(x: Tensor, save: bool) -> tuple[int, int, int]:
    return (x.shape[0], (x.shape[1] + ROWS - 1) // ROWS, x.shape[2]) if save else (0, 0, 0)


def _options(tokens: int, width: int, state: Tensor | None, rows: Rows, **inputs: Tensor) -> dict[str, Any]:
    """What the kernels are compiled for; `inputs` by the letter of their stride."""
    marked = rows.codes is not None
    return {
        "W": width,
        "STATE": state is not None,
        "CODES": marked,
        "EVEN": not marked and tokens % ROWS == 0 and width % _block(width) == 0,
        "ROWS": ROWS,
        "BLOCK": _block(width),
        "num_warps": 1,
        **{f"{letter}_TOKEN": z.stride(1) for letter, z in inputs.items()},
    }


def scan_pieces(decays: Tensor, ends: Tensor, *, reverse: bool) -> None:
    """The scan over pieces [B P W], in place in `ends`."""
    batch, count, width = ends.shape
    block = min(SCAN_BLOCK, triton.next_power_of_2(width))
    options: dict[str, Any] = {"W": width, "REVERSE": reverse, "ROWS": SCAN_ROWS, "BLOCK": block, "num_warps": 4}
    launch(scan_pieces_kernel, batch * triton.cdiv(width, block), decays, ends, count, **options)


def _backward(
    dy, dfinal, checkpoints, x, a_gate, x_gate, a_param, mask, state, cu_seqlens
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, a_gate, x_gate, a_param and of the state before."""
    dx, da_gate, dx_gate = (empty(z.shape, z.dtype, z.device) for z in (x, a_gate, x_gate))
    if x.numel() == 0:
        return dx, da_gate, dx_gate, torch.zeros_like(a_param), dfinal.clone()
    batch, tokens, width = x.shape
    rows, plan = mark_rows(x, mask, cu_seqlens), Plan.make(x, BACKWARD_WARPS)
    dy, x, a_gate, x_gate = (side_by_side(z) for z in (dy, x, a_gate, x_gate))
    dfinal, a_param = dfinal.contiguous(), a_param.contiguous()
    given = None if state is None else state.contiguous()
    decays, starts = empty((2, batch, max(plan.pieces - 1, 1), width), torch.float32, x.device)
    dparam = empty((batch * plan.pieces, width), torch.float32, x.device)
    dstate = empty(dfinal.shape, dfinal.dtype, x.device)
    sizes = (tokens, plan.pieces, plan.length, dy.stride(0))
    if plan.pieces > 1:
        options = _options(tokens, width, None, rows, Y=dy, A=a_gate)
        launch(
            piece_starts_kernel, batch * (plan.pieces - 1) * plan.blocks,
            dy, a_gate, a_param, dfinal, rows.codes, rows.lasts, decays, starts, *sizes, a_gate.stride(0), **options,
        )  # fmt: skip
        scan_pieces(decays, starts, reverse=True)
    options = _options(tokens, width, state, rows, Y=dy, X=x, A=a_gate, G=x_gate)
    launch(
        gradient_kernel, batch * plan.pieces * plan.blocks,
        dy, x, a_gate, x_gate, a_param, dfinal, given, rows.codes, rows.lasts, starts, checkpoints,
        dx, da_gate, dx_gate, dparam, dstate,
        *sizes, x.stride(0), a_gate.stride(0), x_gate.stride(0), **options,
    )  # fmt: skip
    if rows.untouched is not None:
        dstate = torch.where(rows.untouched, dfinal, dstate)
    return dx, da_gate, dx_gate, add_parts(dparam, a_param.shape, a_param.dtype)[0], dstate


FORWARD, BACKWARD = Cookbook(), Cookbook()
COMPILED_FORWARD, COMPILED_BACKWARD = Cookbook(), Cookbook()  # whose forward returns what it keeps


class Recurrence(torch.autograd.Function):
    """`_forward` and `_backward` for eager calls, replayed where such a call was seen before."""

    @staticmethod
    def forward(ctx, *arguments):
        tensors, save = arguments[:7], arguments[7]

        def call() -> tuple[list[Tensor], list[Tensor]]:
            y, final, checkpoints = _forward(*arguments)
            return [y, final], [checkpoints]

        outputs, kept, parts = FORWARD.run(tensors, (save,), call, plain=_plain(tensors), keep=save)
        if save:
            ctx.save_for_backward(*tensors, *kept)
            ctx.parts = parts
        return tuple(outputs)

    @staticmethod
    @first_derivatives
    def backward(ctx, saved, *gradients):
        *tensors, kept = saved
        (*grads, dstate), _ = recurrence_calls.turn_back(BACKWARD, _backward, ctx.parts, gradients, kept, tensors, ())
        return *grads, None, None if tensors[5] is None else dstate, None, None


def remember_call(signature: tuple, tensors: tuple[Tensor, ...]) -> None:
    """If a plain call was recorded, let the next like it go to its kernels at once."""

    def finish(found: list[Tensor], _: Sequence[Any]) -> list[Tensor]:
        return found[:-1]  # the last is that of a state, which was not given

    recurrence_calls.remember_call(signature, tensors, (None,) * 3, (), (FORWARD, BACKWARD), _backward, finish)


def _plain(tensors: tuple) -> bool:
    """Whether a call is nothing but its kernels: no mask, state or packing, and channels side by side."""
    given, absent = tensors[:4], tensors[4:]
    return all(x is None for x in absent) and all(x.stride(-1) == 1 for x in given) and given[0].numel() > 0


@torch.library.custom_op("latte::rglru_triton_forward", mutates_args=())
def rglru_triton_forward(
    x: Tensor,
    a_gate: Tensor,
    x_gate: Tensor,
    a_param: Tensor,
    mask: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the state after each sequence, and, if `save`, h before every ROWS tokens."""
    tensors = (x, a_gate, x_gate, a_param, mask, state, cu_seqlens)

    def call() -> list[Tensor]:
        return list(_forward(*tensors, save))

    y, final, checkpoints = COMPILED_FORWARD.perform(tensors, (save,), call) if _plain(tensors) else call()
    return y, final, checkpoints


@rglru_triton_forward.register_fake
def _(
    x: Tensor,
    a_gate: Tensor,
    x_gate: Tensor,
    a_param: Tensor,
    mask: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    final = x.new_empty((sequences, x.shape[2]), dtype=torch.float32)
    return y, final, x.new_empty(_checkpoint_shape(x, save), dtype=torch.float32)


@torch.library.custom_op("latte::rglru_triton_backward", mutates_args=())
def rglru_triton_backward(
    dy: Tensor,
    dfinal: Tensor,
    checkpoints: Tensor,
    x: Tensor,
    a_gate: Tensor,
    x_gate: Tensor,
    a_param: Tensor,
    mask: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, a_gate, x_gate, a_param and of the state before."""
    tensors = (x, a_gate, x_gate, a_param, mask, state, cu_seqlens)
    inputs = (dy, dfinal, checkpoints, *tensors)

    def call() -> list[Tensor]:
        return list(_backward(*inputs))

    plain = _plain(tensors) and dy.stride(2) == 1 and dfinal.is_contiguous()
    dx, da_gate, dx_gate, dparam, dstate = COMPILED_BACKWARD.perform(inputs, (), call) if plain else call()
    return dx, da_gate, dx_gate, dparam, dstate


@rglru_triton_backward.register_fake
def _(
    dy: Tensor,
    dfinal: Tensor,
    checkpoints: Tensor,
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
    ctx.save_for_backward(output[2], *inputs[:-1])


def _differentiate(ctx: Any, dy: Tensor, dfinal: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: checkpointing allows no second look
    *grads, dstate = rglru_triton_backward(dy, dfinal, *saved)
    return *grads, None, None if saved[6] is None else dstate, None, None


rglru_triton_forward.register_autograd(_differentiate, setup_context=_save)
rglru_triton_backward.register_autograd(refuse)
