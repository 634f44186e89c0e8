"""The RG-LRU with its gates: block-diagonal products of x, and the recurrence that they steer."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from latte.ops import checks
from latte.ops.block_linear import block_linear
from latte.ops.known import run_known, sign_call
from latte.ops.recurrence import rglru
from latte.ops.states import RGLRUOutput


def gated_rglru(
    x: Float[Tensor, "B T W"],
    a_weight: Float[Tensor, "N size size"],
    a_bias: Float[Tensor, " W"],
    x_weight: Float[Tensor, "N size size"],
    x_bias: Float[Tensor, " W"],
    a_param: Float[Tensor, " W"],
    *,
    mask: Bool[Tensor, "B T"] | None = None,
    state: Float[Tensor, "N W"] | None = None,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    backend: str = "auto",
) -> RGLRUOutput:
    """`rglru` of x with the gates x W + b; block n of W [block, in, out] takes the channels n · size onwards.

    With the Triton backend the gates stay on the chip, in float32, if blocks have at most 64 channels (32 where x is
    float32): wider ones want more shared memory and registers than there are. Otherwise they are `block_linear`'s, in
    x's dtype.
    """
    signature = None
    given = (x, a_weight, a_bias, x_weight, x_bias, a_param)
    if mask is None and state is None and cu_seqlens is None and checks.may_replay(backend, x):
        signature = sign_call("gated", given, (_product_dtype(x),))
        known = run_known(signature, given)
        if known is not None:
            return known
    checks.check_shape("a_weight", a_weight, "N size size", (None, None, None))
    blocks, size, _ = a_weight.shape
    checks.check_shape("x", x, "B T N·size", (None, None, blocks * size))
    checks.check_positive("x", x.shape[2], "N·size")
    checks.check_shape("a_weight", a_weight, "N size size", (blocks, size, size))
    checks.check_shape("x_weight", x_weight, "N size size", (blocks, size, size))
    for name, vector in (("a_bias", a_bias), ("x_bias", x_bias), ("a_param", a_param)):
        checks.check_shape(name, vector, "W", (x.shape[2],))
    if checks.backend_for(backend, x.device) == "triton":
        from latte.ops.triton.gated_recurrence import LARGEST_BLOCK, recur_gated, remember_call

        dtype = _product_dtype(x)
        if size <= LARGEST_BLOCK.get(dtype, size):  # a dtype that is not there is refused by name
            _check_past(x, mask, state, cu_seqlens)
            checks.check_same_device(
                x=x, a_weight=a_weight, a_bias=a_bias, x_weight=x_weight, x_bias=x_bias, a_param=a_param,
                mask=mask, state=state, cu_seqlens=cu_seqlens,
            )  # fmt: skip
            with checks.no_autocast(x.device):
                y, after = recur_gated(
                    x, a_weight, a_bias, x_weight, x_bias, a_param,
                    mask=mask, state=state, cu_seqlens=cu_seqlens, dtype=dtype,
                )  # fmt: skip
            if signature is not None:
                remember_call(signature, given, dtype)
            return RGLRUOutput(y, after)
    checks.check_mask(mask, x.shape[0], x.shape[1])
    checks.check_same_device(x=x, a_weight=a_weight, a_bias=a_bias, x_weight=x_weight, x_bias=x_bias, mask=mask)
    if mask is not None:  # what stands in masked positions may be anything, and weights have gradients of it
        x = x.masked_fill(~mask[..., None], 0.0)
    weight, bias = torch.stack([a_weight, x_weight]), torch.stack([a_bias, x_bias])
    a_gate, x_gate = block_linear(x, weight, bias, backend=backend)
    return rglru(x, a_gate, x_gate, a_param, mask=mask, state=state, cu_seqlens=cu_seqlens, backend=backend)


def _product_dtype(x: Tensor) -> torch.dtype:
    """That of the gates' products."""
    return torch.get_autocast_dtype(x.device.type) if checks.autocasts(x.device) else x.dtype


def _check_past(x: Tensor, mask: object, state: Tensor | None, cu_seqlens: object) -> None:
    checks.check_mask(mask, x.shape[0], x.shape[1])
    sequences = checks.check_cu_seqlens(cu_seqlens, x.shape[0])
    if state is not None:
        checks.check_shape("state", state, "B W" if cu_seqlens is None else "N W", (sequences, x.shape[2]))
