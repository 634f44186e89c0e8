"""The RG-LRU with its gates on GPUs: one launch forward, and two backward besides those that add up partial sums.

Where batch rows and blocks of the gates are too few to fill the device, sequences are cut into pieces, as in
`recurrence.py`: what each piece does to h, a scan over the pieces, then all outputs. Kept for the gradients are the
inputs and h before every 32 tokens in float32. No result depends on the order programs run in.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from latte.ops.checks import check_bounds
from latte.ops.first_derivatives import first_derivatives, refuse
from latte.ops.triton import recurrence_calls
from latte.ops.triton.block_linear import even_rows, launch_gradients
from latte.ops.triton.call import launch, side_by_side
from latte.ops.triton.device import check_device, check_dtypes
from latte.ops.triton.kernels.gated_recurrence import forward_kernel
from latte.ops.triton.kernels.gated_recurrence_gradients import gate_grad_kernel, piece_starts_kernel
from latte.ops.triton.recurrence import Rows, mark_rows, scan_pieces
from latte.ops.triton.replay import Cookbook, empty
from latte.ops.triton.sums import add_parts

LARGEST_BLOCK = {torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}  # channels, by the dtype of the products
MIN_PIECE, MAX_PIECES = 128, 512
NUMBERS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Shape(NamedTuple):
    """How a pass is spread over threads."""

    span: int  # tokens of a thread
    segments: int  # of a tile: threads that share a channel
    fill: int  # warps that a processor is to have at once
    registers: int  # of a thread at most, where products are of 16 bits

    @property
    def tile(self) -> int:
        return self.span * self.segments

    def warps(self, chunk: int) -> int:
        return max(1, self.segments * chunk // 32)


class Shapes(NamedTuple):
    """Where rows and channels alone fill the device, few threads share a channel; where not quite, more do."""

    many: Shape
    few: Shape


FORWARD_SHAPES = Shapes(Shape(16, 2, 16, 112), Shape(16, 4, 16, 128))
BACKWARD_SHAPES = Shapes(Shape(16, 2, 12, 168), Shape(8, 8, 16, 128))
CHECKPOINT = 32  # tokens from one h that is kept to the next: divides every tile
UNIT = max(shape.tile for shape in (*FORWARD_SHAPES, *BACKWARD_SHAPES))  # divides every piece


def recur_gated(
    x: Tensor,
    a_weight: Tensor,
    a_bias: Tensor,
    x_weight: Tensor,
    x_bias: Tensor,
    a_param: Tensor,
    *,
    mask: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Output and state; the factors of the gates' products are rounded to `dtype`, all else is in float32."""
    check_device(forward_kernel, x.device)
    weights = (a_weight, a_bias, x_weight, x_bias, a_param)
    names = ("a_weight", "a_bias", "x_weight", "x_bias", "a_param")
    check_dtypes(x=x, **dict(zip(names, weights, strict=True)))
    if state is not None:
        state = state.float()
    save = torch.is_grad_enabled() and any(z is not None and z.requires_grad for z in (x, *weights, state))
    # Eager calls take the lighter path around the same functions: a custom operation costs the host much time.
    run = gated_rglru_forward if torch.compiler.is_compiling() else GatedRecurrence.apply
    y, final, *_ = run(x, *weights, mask, state, cu_seqlens, dtype, save)
    return y, final


def chunk_size(size: int) -> int:
    """Channels of a block of `size` that are taken at a time: as many as leave few threads without one."""
    return 16 if 0 < size % 32 <= 16 and size <= 64 else 32


class Plan(NamedTuple):
    """How a call is cut: pieces of `length` tokens, each by `chunks` programs."""

    shape: Shape
    length: int
    pieces: int
    chunks: int

    @classmethod
    def make(cls, x: Tensor, blocks: int, shapes: Shapes) -> "Plan":
        batch, tokens, width = x.shape
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 64
        chunk = chunk_size(width // blocks)
        chunks = blocks * triton.cdiv(width // blocks, chunk)
        wanted = {shape: triton.cdiv(processors * shape.fill, shape.warps(chunk)) for shape in shapes}  # programs
        # A second look at every token costs more than a third of the processors' time.
        whole = next((shape for shape in shapes if 3 * batch * chunks >= wanted[shape]), None)
        shape = whole or shapes.many
        pieces = 1 if whole else min(MAX_PIECES, triton.cdiv(wanted[shape], batch * chunks))
        length = triton.cdiv(max(MIN_PIECE, triton.cdiv(tokens, pieces)), UNIT) * UNIT
        return cls(shape, length, triton.cdiv(tokens, length), chunks)


def _options(x: Tensor, weight: Tensor, state: Tensor | None, rows: Rows, shape: Shape, dtype: torch.dtype,
             **inputs: Tensor) -> dict[str, Any]:  # fmt: skip
    """What the kernels are compiled for; `inputs` by the letter of their stride."""
    blocks, size, _ = weight.shape
    chunk = chunk_size(size)
    exact = dtype == torch.float32
    limit = {} if exact else {"maxnreg": shape.registers}
    return {
        "N": blocks,
        "I": size,
        "K": max(32, triton.next_power_of_2(size)),  # Triton 3.6 misreads 16-bit right factors of 16 columns
        "S": shape.span,
        "G": shape.segments,
        "CHUNK": chunk,
        "CHUNKS": triton.cdiv(size, chunk),
        "STATE": state is not None,
        "CODES": rows.codes is not None,
        "EVEN": rows.codes is None and x.shape[1] % shape.tile == 0,
        "DTYPE": NUMBERS[dtype],
        "PRECISION": "tf32x3" if exact else "tf32",
        "num_warps": shape.warps(chunk),
        "num_stages": 1 if exact else 3,  # as shared memory allows
        **limit,
        **{f"{letter}_TOKEN": z.stride(1) for letter, z in inputs.items()},
    }


def _forward(
    x, a_weight, a_bias, x_weight, x_bias, a_param, mask, state, cu_seqlens, dtype, save
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the state after each sequence, and, if `save`, h before every CHECKPOINT tokens."""
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
    rows, plan = mark_rows(x, mask, cu_seqlens), Plan.make(x, len(a_weight), FORWARD_SHAPES)
    x, given = side_by_side(x), None if state is None else state.contiguous()
    weights = [z.contiguous() for z in (a_weight, a_bias, x_weight, x_bias, a_param)]
    options = _options(x, a_weight, state, rows, plan.shape, dtype, X=x)
    decays, ends = empty((2, batch, max(plan.pieces - 1, 1), width), torch.float32, x.device)
    arguments = (
        x, *weights, given, rows.codes, rows.lasts, decays, ends, y, final, checkpoints if save else final,
        tokens, plan.pieces, plan.length, x.stride(0),
    )  # fmt: skip
    if plan.pieces > 1:
        programs = batch * (plan.pieces - 1) * plan.chunks
        launch(forward_kernel, programs, *arguments, SAVE=0, ENDS=True, **options)
        scan_pieces(decays, ends, reverse=False)
    every = CHECKPOINT if save else 0
    launch(forward_kernel, batch * plan.pieces * plan.chunks, *arguments, SAVE=every, ENDS=False, **options)
    if rows.untouched is not None:
        final = torch.where(rows.untouched, -torch.inf if given is None else given, final)
    return y, final, checkpoints


def _checkpoint_shape(x: Tensor, save: bool) -> tuple[int, int, int]:
    return (x.shape[0], (x.shape[1] + CHECKPOINT - 1) // CHECKPOINT, x.shape[2]) if save else (0, 0, 0)


def _backward(
    dy, dfinal, checkpoints, x, a_weight, a_bias, x_weight, x_bias, a_param, mask, state, cu_seqlens, dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, of both weights side by side, of biases and a_param likewise, and of the state before."""
    dx = empty(x.shape, x.dtype, x.device)
    blocks, size, _ = a_weight.shape
    matrices, vectors = _common_dtype(a_weight, x_weight), _common_dtype(a_bias, x_bias, a_param)
    if x.numel() == 0:
        dweights = dfinal.new_zeros(2 * blocks * size * size, dtype=matrices)
        return dx, dweights, dfinal.new_zeros(3 * x.shape[2], dtype=vectors), dfinal.clone()
    batch, _, width = x.shape
    rows, plan = mark_rows(x, mask, cu_seqlens), Plan.make(x, blocks, BACKWARD_SHAPES)
    dy, x, dfinal = side_by_side(dy), even_rows(x), dfinal.contiguous()
    given = None if state is None else state.contiguous()
    weights = [z.contiguous() for z in (a_weight, a_bias, x_weight, x_bias, a_param)]
    options = _options(x, a_weight, state, rows, plan.shape, dtype, Y=dy, X=x)
    decays, starts = empty((2, batch, max(plan.pieces - 1, 1), width), torch.float32, x.device)
    dstate = empty(dfinal.shape, dfinal.dtype, x.device)
    sums = empty((batch * plan.pieces, 3 * width), torch.float32, x.device)
    da_gate, dx_gate = (empty(x.shape, dtype, x.device) for _ in range(2))
    sizes = (x.shape[1], plan.pieces, plan.length, dy.stride(0), x.stride(0))
    if plan.pieces > 1:
        stateless = {name: value for name, value in options.items() if name != "STATE"}
        launch(
            piece_starts_kernel, batch * (plan.pieces - 1) * plan.chunks,
            dy, x, weights[0], weights[1], weights[4], dfinal, rows.codes, rows.lasts, decays, starts,
            *sizes, **stateless,
        )  # fmt: skip
        scan_pieces(decays, starts, reverse=True)
    launch(
        gate_grad_kernel, batch * plan.pieces * plan.chunks,
        dy, x, *weights, dfinal, given, rows.codes, rows.lasts, starts, checkpoints,
        da_gate, dx_gate, dx, sums, dstate, *sizes, EVERY=CHECKPOINT, **options,
    )  # fmt: skip
    weight_sums = launch_gradients(x, da_gate, dx_gate, weights[0], weights[2], dx, rows.codes, add=True)
    if rows.untouched is not None:
        dstate = torch.where(rows.untouched, dfinal, dstate)
    dweights, _ = add_parts(weight_sums, weight_sums.shape[1:], matrices)
    dvectors, _ = add_parts(sums, sums.shape[1:], vectors)
    return dx, dweights, dvectors, dstate


def _common_dtype(*tensors: Tensor) -> torch.dtype:
    """That of all, if it is one."""
    dtypes = {z.dtype for z in tensors}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _split(matrices: Tensor, vectors: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """`_backward`'s gradients of weights one by one, in the order of the arguments."""
    da_weight, dx_weight = matrices.view(2, *weights[0].shape)
    da_bias, dx_bias, da_param = vectors.view(3, -1)
    grads = (da_weight, da_bias, dx_weight, dx_bias, da_param)
    return tuple(grad.to(z.dtype) for grad, z in zip(grads, weights, strict=True))


FORWARD, BACKWARD = Cookbook(), Cookbook()
COMPILED_FORWARD, COMPILED_BACKWARD = Cookbook(), Cookbook()  # whose forward returns what it keeps
INPUTS = 9  # tensors: x, the weights, mask, state, cu_seqlens


class GatedRecurrence(torch.autograd.Function):
    """`_forward` and `_backward` for eager calls, replayed where such a call was seen before."""

    @staticmethod
    def forward(ctx, *arguments):
        tensors, (dtype, save) = arguments[:INPUTS], arguments[INPUTS:]

        def call() -> tuple[list[Tensor], list[Tensor]]:
            y, final, checkpoints = _forward(*arguments)
            return [y, final], [checkpoints]

        outputs, kept, parts = FORWARD.run(tensors, (dtype, save), call, plain=_plain(tensors), keep=save)
        if save:
            ctx.save_for_backward(*tensors, *kept)
            ctx.parts, ctx.dtype = parts, dtype
        return tuple(outputs)

    @staticmethod
    @first_derivatives
    def backward(ctx, saved, *gradients):
        *tensors, kept = saved
        (dx, matrices, vectors, dstate), _ = recurrence_calls.turn_back(
            BACKWARD, _backward, ctx.parts, gradients, kept, tensors, (ctx.dtype,)
        )
        dstate = None if tensors[7] is None else dstate
        return dx, *_split(matrices, vectors, *tensors[1:6]), None, dstate, None, None, None


def remember_call(signature: tuple, tensors: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """If a plain call was recorded, let the next like it go to its kernels at once."""

    def finish(found: list[Tensor], saved: Sequence[Any]) -> tuple[Tensor, ...]:
        dx, matrices, vectors, _ = found
        _, *weights, _ = saved
        return dx, *_split(matrices, vectors, *weights)

    absent = (None,) * (INPUTS - len(tensors))
    recurrence_calls.remember_call(signature, tensors, absent, (dtype,), (FORWARD, BACKWARD), _backward, finish)


def _plain(tensors: tuple) -> bool:
    """Whether a call is nothing but its kernels: no mask, state or packing, and channels side by side."""
    x, weights, absent = tensors[0], tensors[1:6], tensors[6:]
    bare = all(z is None for z in absent) and all(z.is_contiguous() for z in weights)
    return bare and x.stride(-1) == 1 and x.numel() > 0


@torch.library.custom_op("latte::gated_rglru_forward", mutates_args=())
def gated_rglru_forward(
    x: Tensor,
    a_weight: Tensor,
    a_bias: Tensor,
    x_weight: Tensor,
    x_bias: Tensor,
    a_param: Tensor,
    mask: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the state after each sequence, and, if `save`, h before every CHECKPOINT tokens."""
    tensors = (x, a_weight, a_bias, x_weight, x_bias, a_param, mask, state, cu_seqlens)

    def call() -> list[Tensor]:
        return list(_forward(*tensors, dtype, save))

    plain = _plain(tensors)
    y, final, checkpoints = COMPILED_FORWARD.perform(tensors, (dtype, save), call) if plain else call()
    return y, final, checkpoints


@gated_rglru_forward.register_fake
def _(x, a_weight, a_bias, x_weight, x_bias, a_param, mask, state, cu_seqlens, dtype, save):
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    final = x.new_empty((sequences, x.shape[2]), dtype=torch.float32)
    return y, final, x.new_empty(_checkpoint_shape(x, save), dtype=torch.float32)


@torch.library.custom_op("latte::gated_rglru_backward", mutates_args=())
def gated_rglru_backward(
    dy: Tensor,
    dfinal: Tensor,
    checkpoints: Tensor,
    x: Tensor,
    a_weight: Tensor,
    a_bias: Tensor,
    x_weight: Tensor,
    x_bias: Tensor,
    a_param: Tensor,
    mask: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, of both weights side by side, of biases and a_param likewise, and of the state before."""
    tensors = (x, a_weight, a_bias, x_weight, x_bias, a_param, mask, state, cu_seqlens)
    inputs = (dy, dfinal, checkpoints, *tensors)

    def call() -> list[Tensor]:
        return list(_backward(*inputs, dtype))

    plain = _plain(tensors) and dy.stride(2) == 1 and dfinal.is_contiguous()
    dx, matrices, vectors, dstate = COMPILED_BACKWARD.perform(inputs, (dtype,), call) if plain else call()
    return dx, matrices, vectors, dstate


@gated_rglru_backward.register_fake
def _(dy, dfinal, checkpoints, x, a_weight, a_bias, x_weight, x_bias, a_param, mask, state, cu_seqlens, dtype):
    matrices = x.new_empty(2 * a_weight.numel(), dtype=_common_dtype(a_weight, x_weight))
    vectors = x.new_empty(3 * a_param.numel(), dtype=_common_dtype(a_bias, x_bias, a_param))
    return torch.empty_like(x, memory_format=torch.contiguous_format), matrices, vectors, torch.empty_like(dfinal)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[2], *inputs[:INPUTS])
    ctx.dtype = inputs[INPUTS]


def _differentiate(ctx: Any, dy: Tensor, dfinal: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: checkpointing allows no second look
    dx, matrices, vectors, dstate = gated_rglru_backward(dy, dfinal, *saved, ctx.dtype)
    dstate = None if saved[8] is None else dstate
    return dx, *_split(matrices, vectors, *saved[2:7]), None, dstate, None, None, None


gated_rglru_forward.register_autograd(_differentiate, setup_context=_save)
gated_rglru_backward.register_autograd(refuse)
