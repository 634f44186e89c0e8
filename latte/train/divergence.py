"""Kullback-Leibler divergence of two models' next tokens, for vocabularies whose logits would not fit."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from latte.ops.logit_chunks import accumulate, chunks, product
from latte.ops.states import accumulation_dtype


class Prediction(NamedTuple):
    """What logits are made of: cap(hidden weightᵀ)."""

    hidden: Tensor  # [N C]
    weight: Tensor  # [V C]
    softcap: float | None = None


def linear_divergence(
    teacher: Prediction, student: Prediction, counts: Tensor, temperature: float, dtype: torch.dtype
) -> Tensor:
    """Σ counts · KL(teacher ‖ student) over tokens, of logits divided by `temperature`, without holding them.

    Tokens are taken a chunk at a time, and a chunk's gradients are computed with its divergence, so that backward only
    scales them. The teacher has none. `dtype` is that of the factors of products; the rest is float32.
    """
    options = (teacher, student.softcap, counts, temperature, dtype)
    with torch.autocast(counts.device.type, enabled=False):
        return _Divergence.apply(student.hidden, student.weight, *options)  # pyright: ignore[reportReturnType]


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher: Prediction,
        softcap: float | None,
        counts: Tensor,
        temperature: float,
        dtype: torch.dtype,
    ) -> Tensor:
        wide = accumulation_dtype(hidden, weight)
        into_hidden, into_weight = ctx.needs_input_grad[:2]
        dhidden = torch.empty_like(hidden) if into_hidden else None
        dweight = torch.zeros_like(weight, dtype=wide) if into_weight else None
        w, teacher_w = weight.to(dtype), teacher.weight.to(dtype)
        total = hidden.new_zeros((), dtype=wide)
        for rows in chunks(hidden, len(weight)):
            h, count = hidden[rows].to(dtype), counts[rows].to(wide)[:, None]
            expected = log_probabilities(teacher.hidden[rows].to(dtype), teacher_w, teacher.softcap, temperature, wide)
            logits = capped(product(h, w.t(), wide), softcap)
            actual = torch.log_softmax(logits / temperature, dim=-1)
            p = expected.exp()
            total += (p * expected.sub_(actual)).sum(dim=-1, keepdim=True).mul_(count).sum()
            if dhidden is None and dweight is None:
                continue
            dlogits = actual.exp_().sub_(p).mul_(count / temperature)
            if softcap is not None:
                dlogits.mul_(1 - (logits / softcap).square_())
            dlogits = dlogits.to(dtype)
            if dhidden is not None:
                dhidden[rows] = product(dlogits, w, wide).to(dhidden.dtype)
            if dweight is not None:
                accumulate(dweight, dlogits.t(), h)
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(dhidden, dweight)
        return total

    @staticmethod
    def backward(ctx: Any, *dtotal: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = ctx.saved_tensors
        return (
            None if dhidden is None else dhidden * dtotal[0].to(dhidden.dtype),
            None if dweight is None else (dweight * dtotal[0]).to(ctx.weight_dtype),
            *[None] * 5,
        )


def log_probabilities(
    hidden: Tensor, weight: Tensor, softcap: float | None, temperature: float, wide: torch.dtype
) -> Tensor:
    return torch.log_softmax(capped(product(hidden, weight.t(), wide), softcap).div_(temperature), dim=-1)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)
