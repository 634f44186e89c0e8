"""The short causal convolution: each channel mixes its last few tokens before the logits."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from latte.ops import checks
from latte.ops.rounding import round_to
from latte.ops.states import ShortConvOutput, accumulation_dtype


def short_conv(
    x: Float[Tensor, "B T W"],
    weight: Float[Tensor, "W K"],
    bias: Float[Tensor, " W"] | None = None,
    *,
    mask: Bool[Tensor, "B T"] | None = None,
    state: Float[Tensor, "N P W"] | None = None,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    backend: str = "auto",
) -> ShortConvOutput:
    """y_t = bias + Σ_j weight[:, j] x_{t−K+1+j}, channel by channel: weight[:, K−1] meets the token itself.

    Positions before the first are zeros, or the state: the last P = K − 1 inputs of what came before. Masked positions
    (`mask` False) count as zeros, keep their place, and give y = 0. Packed sequences (`cu_seqlens`, B = 1) do not see
    each other and have one state each. y and the state have x's dtype; float16 saturates.
    """
    checks.check_shape("x", x, "B T W", (None,) * 3)
    checks.check_positive("x", x.shape[2], "W")
    checks.check_shape("weight", weight, "W K", (x.shape[2], None))
    checks.check_positive("weight", weight.shape[1], "K")
    if bias is not None:
        checks.check_shape("bias", bias, "W", (x.shape[2],))
    checks.check_mask(mask, x.shape[0], x.shape[1])
    sequences = checks.check_cu_seqlens(cu_seqlens, x.shape[0])
    past = (sequences, weight.shape[1] - 1, x.shape[2])
    if state is not None:
        checks.check_shape("state", state, "B K-1 W" if cu_seqlens is None else "N K-1 W", past)
    checks.check_same_device(x=x, weight=weight, bias=bias, mask=mask, state=state, cu_seqlens=cu_seqlens)
    name = checks.backend_for(backend, x.device)
    checks.refuse_tangents(name, x, weight, bias, state)
    match name:
        case "reference":
            from latte.ops.reference.convolution import convolve
        case "torch":
            from latte.ops.torch.convolution import convolve
        case _:
            from latte.ops.triton.convolution import convolve
    with checks.no_autocast(x.device):
        state = x.new_zeros(past) if state is None else round_to(state, x.dtype)
        y, state = convolve(
            x, weight, bias, mask=mask, state=state, cu_seqlens=cu_seqlens, dtype=accumulation_dtype(x, weight, bias)
        )
    return ShortConvOutput(y, state)
