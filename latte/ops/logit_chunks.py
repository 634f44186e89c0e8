"""Cross entropy a chunk of tokens at a time, as custom operations with closed-form gradients.

The logits of a chunk exist once, in float32, and are followed by their gradients. A sum over tokens has one number for
its gradient, so `total` computes the gradients of hidden and weight on the way and backward only scales them; `losses`
has a gradient per token and goes through the chunks again in backward.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops.first_derivatives import once, refuse
from latte.ops.states import accumulation_dtype

MOST, LEAST, SHARE = 2**30, 2**28, 16  # a chunk's logits are a sixteenth of all, within these bounds in bytes;
ON_CPU = 2**25  # on a CPU, what is near its caches
ALIGNED = 64  # GPUs multiply slowly what does not begin at multiples of 128 bytes
NARROW = (torch.bfloat16, torch.float16)
ADDS_WIDE = torch.__version__ >= "2.10"  # addmm adds products of narrow factors to float32


class Options(NamedTuple):
    ignore_index: int
    softcap: float  # 0 is none
    label_smoothing: float
    dtype: torch.dtype  # of the factors of products
    backend: str  # what turns logits into losses and gradients, "torch" or "triton"


def total(hidden: Tensor, weight: Tensor, targets: Tensor, options: Options) -> Tensor:
    """The sum of the losses of all tokens."""
    wanted = [torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight)]
    if not any(wanted):
        return losses(hidden, weight, targets, options).sum()
    return cross_entropy_total(hidden, weight, targets, *wanted, *options)[0]


def losses(hidden: Tensor, weight: Tensor, targets: Tensor, options: Options) -> Tensor:
    """The loss of every token, 0 for ignored ones."""
    return cross_entropy_losses(hidden, weight, targets, *options)


@torch.library.custom_op("latte::cross_entropy_losses", mutates_args=())
def cross_entropy_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    softcap: float,
    label_smoothing: float,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    options = Options(ignore_index, softcap, label_smoothing, dtype, backend)
    return _walk(hidden, weight, targets, None, False, False, options)[0]


@cross_entropy_losses.register_fake
def _(hidden, weight, targets, *options):
    return hidden.new_empty(hidden.shape[0], dtype=accumulation_dtype(hidden, weight))


@torch.library.custom_op("latte::cross_entropy_total", mutates_args=())
def cross_entropy_total(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    into_hidden: bool,
    into_weight: bool,
    ignore_index: int,
    softcap: float,
    label_smoothing: float,
    dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of losses and its gradients; an empty tensor stands for one that is not wanted."""
    options = Options(ignore_index, softcap, label_smoothing, dtype, backend)
    each, dhidden, dweight = _walk(hidden, weight, targets, None, into_hidden, into_weight, options)
    return each.sum(), dhidden, dweight.to(_waiting_dtype(weight))


@cross_entropy_total.register_fake
def _(hidden, weight, targets, into_hidden, into_weight, *options):
    dhidden, dweight = _empty_gradients(hidden, weight, into_hidden, into_weight, _waiting_dtype(weight))
    return hidden.new_empty((), dtype=accumulation_dtype(hidden, weight)), dhidden, dweight


@torch.library.custom_op("latte::cross_entropy_gradients", mutates_args=())
def cross_entropy_gradients(
    dlosses: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    into_hidden: bool,
    into_weight: bool,
    ignore_index: int,
    softcap: float,
    label_smoothing: float,
    dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of Σ dlosses · losses; an empty tensor stands for one that is not wanted."""
    options = Options(ignore_index, softcap, label_smoothing, dtype, backend)
    _, dhidden, dweight = _walk(hidden, weight, targets, dlosses, into_hidden, into_weight, options)
    return dhidden, dweight.to(weight.dtype)


@cross_entropy_gradients.register_fake
def _(dlosses, hidden, weight, targets, into_hidden, into_weight, *options):
    return _empty_gradients(hidden, weight, into_hidden, into_weight, weight.dtype)


def _save_inputs(ctx, inputs, output) -> None:
    hidden, weight, targets, *ctx.options = inputs
    ctx.save_for_backward(hidden, weight, targets)


def _recompute(ctx, dlosses):
    wanted = ctx.needs_input_grad[:2]
    grads = cross_entropy_gradients(dlosses, *ctx.saved_tensors, *wanted, *ctx.options)
    return (*_where(wanted, grads), None, *(None for _ in ctx.options))


def _save_gradients(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)  # zeros for the gradients' own gradients would be as large as the weight
    hidden, weight, _, *ctx.wanted = inputs[:5]
    ctx.dtypes, ctx.others = (hidden.dtype, weight.dtype), len(inputs) - 2
    ctx.save_for_backward(*output[1:])


def _scale(ctx, dtotal, *_):
    if dtotal is None:
        return (None,) * (2 + ctx.others)
    scaled = [(dtotal * grad).to(dtype) for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
    # As products with `dtotal` they look as if they could be differentiated.
    return (*_where(ctx.wanted, once(scaled)), *(None for _ in range(ctx.others)))


cross_entropy_losses.register_autograd(_recompute, setup_context=_save_inputs)
cross_entropy_total.register_autograd(_scale, setup_context=_save_gradients)
cross_entropy_gradients.register_autograd(refuse)


def _where(wanted, grads) -> list[Tensor | None]:
    return [grad if yes else None for yes, grad in zip(wanted, grads, strict=True)]


def _waiting_dtype(weight: Tensor) -> torch.dtype:
    """What the weight's gradient waits for its scale in: a sum over tokens may be beyond float16's range."""
    return torch.float32 if weight.dtype == torch.float16 else weight.dtype


def _empty_gradients(
    hidden: Tensor, weight: Tensor, into_hidden: bool, into_weight: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if into_hidden else (0,)),
        weight.new_empty(weight.shape if into_weight else (0,), dtype=dtype),
    )


def _walk(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    dlosses: Tensor | None,
    into_hidden: bool,
    into_weight: bool,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, and the gradients of Σ dlosses · losses (dlosses = 1 where None); dweight as it was summed up."""
    wide, vocabulary = accumulation_dtype(hidden, weight), weight.shape[0]
    losses, gradients = hidden.new_empty(hidden.shape[0], dtype=wide), into_hidden or into_weight
    with torch.autocast(hidden.device.type, enabled=False):
        w = _factor(weight, options)
        dhidden = hidden.new_empty(hidden.shape if into_hidden else (0,))
        dweight = w.new_zeros(w.shape if into_weight else (0,), dtype=wide)
        for rows in chunks(hidden, w.shape[0]):
            h = hidden[rows].to(options.dtype).masked_fill((targets[rows] == options.ignore_index)[:, None], 0.0)
            logits = product(h, w.t(), wide)
            into_losses = None if dlosses is None else dlosses[rows].contiguous()
            losses[rows], dlogits = _rows(logits, targets[rows], into_losses, vocabulary, gradients, options)
            if into_hidden:
                dhidden[rows] = product(dlogits, w, wide)
            if into_weight:
                accumulate(dweight, dlogits.t(), h)
    return losses, dhidden, dweight[:vocabulary]


def _factor(weight: Tensor, options: Options) -> Tensor:
    """The weight as a factor of products; for the kernels with rows of zeros up to an aligned number of them."""
    rows = 0 if options.backend == "torch" else -weight.shape[0] % ALIGNED
    return F.pad(weight.to(options.dtype), (0, 0, 0, rows)) if rows else weight.to(options.dtype)


def _rows(
    logits: Tensor, targets: Tensor, dlosses: Tensor | None, vocabulary: int, gradients: bool, options: Options
) -> tuple[Tensor, Tensor]:
    """Losses of a chunk and, if wanted, the gradients of its logits."""
    match options.backend:
        case "torch":
            from latte.ops.torch.cross_entropy import losses_and_gradients
        case _:
            from latte.ops.triton.cross_entropy import losses_and_gradients
    return losses_and_gradients(
        logits, targets, dlosses, vocabulary=vocabulary, gradients=gradients, ignore_index=options.ignore_index,
        softcap=options.softcap, label_smoothing=options.label_smoothing, dtype=options.dtype,
    )  # fmt: skip


def chunks(hidden: Tensor, vocabulary: int) -> Iterator[slice]:
    """Tokens a chunk at a time, all chunks of about the same size."""
    tokens, row = hidden.shape[0], 4 * vocabulary
    if tokens == 0:
        return
    bound = ON_CPU if hidden.device.type == "cpu" else min(max(tokens * row // SHARE, LEAST), MOST)
    count = -(-tokens // max(bound // row, 1))
    size = -(-tokens // count)
    for start in range(0, tokens, size):
        yield slice(start, start + size)


def product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """a b in the accumulation dtype; on CUDA the sums of narrow factors' products come as they are, not rounded."""
    if a.dtype in NARROW and a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=wide)
    return torch.mm(a, b).to(wide)


def accumulate(sums: Tensor, a: Tensor, b: Tensor) -> None:
    """sums += a b."""
    if a.dtype == sums.dtype:
        sums.addmm_(a, b)
    elif a.device.type == "cuda" and ADDS_WIDE:
        torch.addmm(sums, a, b, out_dtype=sums.dtype, out=sums)
    elif a.dtype == torch.float16 and a.device.type != "cuda":  # a chunk's sum may be beyond its range
        sums.addmm_(a.to(sums.dtype), b.to(sums.dtype))
    else:
        sums.add_(product(a, b, sums.dtype))
